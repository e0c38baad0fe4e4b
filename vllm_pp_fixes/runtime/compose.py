"""What a drop-in is made of: the installed upstream class, and above it the cures of the faults that it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any

import torch
import vllm

from ..fault import Condition
from ..source import CannotTell, Tree
from ..version import identity
from .agreement import Agreement, Exchange, all_stages_stand, announce
from .construction import mark_compile_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.vllm_pp_fixes")


class DropIn:
    """Mixin of every drop-in: upstream's constructor runs under the conditions of the cures; its graphs are its own.

    A cure that acts on what the constructor has built is a subclass that extends `built`.
    """

    cured: tuple[str, ...] = ()
    """Ids of the faults that this upstream class has."""
    conditions: tuple[Condition, ...] = ()
    outermost = False
    """Whether a cure stands above those that do not call upstream's `forward` on every stage."""
    agreements: tuple[Agreement, ...] = ()
    """What neighbours have still to be asked."""
    launched_apart = False
    """Whether the ranks are those of an external launcher, each of which warms up on its own."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str | None = None) -> None:
        from vllm.distributed import get_pp_group

        mark_compile_cache(vllm_config, " ".join(self.cured))
        with ExitStack() as stack:
            for condition in self.conditions:
                stack.enter_context(condition(upstream_of(type(self)), vllm_config))
            super().__init__(vllm_config=vllm_config, **({} if prefix is None else {"prefix": prefix}))  # type: ignore[call-arg]
        self.launched_apart = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
        self.built(vllm_config)
        group = get_pp_group()
        logger.info(
            "vllm_pp_fixes %s serves %s in place of vLLM's, which has %s: stage %d of %d%s",
            identity(),
            type(self).__name__,
            ", ".join(self.cured),
            group.rank_in_group + 1,
            group.world_size,
            self.exchange(),
        )

    def built(self, vllm_config: VllmConfig) -> None:
        """Act on what the constructor has built; the parent's `built` comes first."""

    def exchange(self) -> str:
        """Say what the stage runs and exchanges, for the line that is logged."""
        return ""

    def say(self, exchange: Exchange, what: str = Agreement.what) -> None:
        """Say to the neighbours what this stage receives and forwards, and have them asked before the first answer."""
        from vllm.distributed import get_pp_group

        said = announce(get_pp_group(), type(self).__name__, exchange, what)
        self.agreements += () if said is None else (said,)

    def hear(self) -> None:
        """Hear the neighbours, once, when every stage stands. Raises `StagesDisagree`; called in each `forward`."""
        if self.agreements and not torch.compiler.is_compiling() and all_stages_stand(self.launched_apart):
            for agreement in self.agreements:
                agreement.check()
            self.agreements = ()

    # Upstream's, named here for readers and the type checker.
    if TYPE_CHECKING:
        config: Any
        language_model: Any
        make_empty_intermediate_tensors: Callable[..., Any]
        modules: Callable[[], Iterator[Any]]
        register_buffer: Callable[..., None]


def drop_in(upstream: type, module: str) -> type:
    """Return the class that serves in place of `upstream`: upstream's own where nothing is wrong, or none can tell.

    Only the cures of the faults that it has are composed, all or none: none where upstream's code is not one that the
    drop-in was seen right with (`vllm_pp_fixes.seen`). They go directly above the class whose constructor is at
    fault, below a subclass that makes something else of its output (a projection, a pooler). `module` is the name of
    the module that the class is for.

    Never raises: whatever goes wrong, the class is upstream's, and one line says why.
    """
    try:
        return _compose(upstream, module)
    except CannotTell as error:
        why = f"it cannot tell what it does: {error}"
    except Exception as error:
        why = f"what cures it cannot be composed: {type(error).__name__}: {error}"
    logger.warning("vllm_pp_fixes leaves %s as it is, %s", upstream.__name__, why)
    return upstream


def _compose(upstream: type, module: str) -> type:
    # Imported here, where an error is caught.
    from ..seen import recognised

    tree, name = Tree(Path(vllm.__file__).parent), _module(upstream)
    faults = recognised(tree, name, upstream.__name__)
    if not faults:
        return upstream
    home, builder, _ = tree.builder(name, upstream.__name__)
    at_fault = next((cls for cls in upstream.__mro__ if cls.__name__ == builder and _module(cls) == home), None)
    if at_fault is None:
        raise CannotTell(f"it does not inherit from {builder} of {home}, as its source does")
    cures = [fault.cure() for fault in faults]
    mixins = [DropIn, *(mixin for cure in cures for mixin in cure.mixins)]
    mixins.sort(key=lambda mixin: not getattr(mixin, "outermost", False))
    mixed = subclass(
        builder,
        module,
        (*_most_derived(mixins), at_fault),
        cured=tuple(fault.id for fault in faults),
        conditions=tuple(dict.fromkeys(cure.condition for cure in cures if cure.condition)),
    )
    return mixed if at_fault is upstream else subclass(upstream.__name__, module, (upstream, mixed))


def subclass(name: str, module: str, bases: tuple[type, ...], **members: object) -> type:
    """Return a class of these bases that bears upstream's name (speculative decoding compares it), in `module`."""
    return new_class(name, bases, {}, lambda body: body.update(members, __module__=module))


def upstream_of(cls: type) -> type:
    """Return the upstream class whose constructor and forward a drop-in's cures stand directly above."""
    return cls.__mro__[cls.__mro__.index(DropIn) + 1]


def _most_derived(classes: list[type]) -> list[type]:
    """Return each class once, without those that another one inherits from."""
    once = dict.fromkeys(classes)
    return [cls for cls in once if not any(other is not cls and issubclass(other, cls) for other in once)]


def _module(cls: type) -> str:
    return cls.__module__.rpartition(".")[2]
