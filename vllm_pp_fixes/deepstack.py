"""DeepStack levels over pipeline stages: the buffers, what a stage sends, the factory that declares it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch.nn.functional import pad
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors

from . import __version__
from .agreement import Agreement, announce
from .construction import asked_for, corrected, mark_compile_cache
from .probes import CannotTell, Tree, present
from .stages import Stage

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.vllm_pp_fixes")

Factory = Callable[[int, torch.dtype, torch.device], IntermediateTensors]


def key(level: int) -> str:
    """Return the name under which upstream's inner model looks up a level."""
    return f"deepstack_input_embeds_{level}"


def with_levels(factory: Factory, stage: Stage) -> Factory:
    """Return the start_layer-aware factory: what `factory` declares, and each level that `stage` receives.

    The returned factory makes tensors `(batch_size, hidden_size)` of the asked dtype, zero-filled, on `device`.
    """

    def make_empty_intermediate_tensors(
        batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        empty = factory(batch_size, dtype, device)
        for level in stage.received:
            empty[key(level)] = torch.zeros_like(empty["hidden_states"])
        return empty

    return make_empty_intermediate_tensors


class Corrected:
    """Mixin over an upstream model: its constructor runs under corrected conditions, its compile cache is its own."""

    cured: tuple[str, ...] = ()
    """Ids of the faults of the catalogue that this upstream class has."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str | None = None) -> None:
        mark_compile_cache(vllm_config, " ".join(self.cured))
        with corrected(upstream_of(type(self)), self.cured):
            super().__init__(vllm_config=vllm_config, **({} if prefix is None else {"prefix": prefix}))  # type: ignore[call-arg]
        inner, group = self.language_model.model, get_pp_group()
        levels = min(self._count_levels(vllm_config), len(inner.layers))
        self.pp_stage = Stage(inner.start_layer, inner.end_layer, levels, first=group.is_first_rank)
        if self._has_level_buffers and not (levels and self.pp_stage.first):
            # Only embed_input_ids fills them, and it runs on the first stage only.
            self.deepstack_input_embeds = []
        self._carry_levels(group, vllm_config)
        log_service(self, self.cured, self.pp_stage)

    _has_level_buffers = True

    def _count_levels(self, vllm_config: VllmConfig) -> int:
        """Return how many levels the vision tower, wherever it stands, gives: none where it is left out."""
        indexes = getattr(self.config.vision_config, "deepstack_visual_indexes", ())
        return len(indexes) if asked_for(vllm_config, "image", "video") else 0

    def _carry_levels(self, group: Any, vllm_config: VllmConfig) -> None:
        """Prepare for what crosses stages; upstream's own way stays where upstream has one."""

    # Upstream's, named here for readers and the type checker.
    if TYPE_CHECKING:
        config: Any
        language_model: Any
        deepstack_input_embeds: Any
        make_empty_intermediate_tensors: Factory
        _get_deepstack_input_embeds: Callable[[int], IntermediateTensors]


class ZeroBackedLevels:
    """Mixin over an upstream model whose buffers answer None until a batch has levels (fault compiled-drops-levels).

    vLLM traces the inner model once, before the first picture, and an input that was None then is ignored for ever.
    """

    deepstack_input_embeds: list[torch.Tensor]

    def _get_deepstack_input_embeds(self, num_tokens: int) -> IntermediateTensors | None:
        if not self.deepstack_input_embeds:
            return None
        missing = num_tokens - self.deepstack_input_embeds[0].size(0)
        if missing > 0:
            self.deepstack_input_embeds = [pad(buffer, (0, 0, 0, missing)) for buffer in self.deepstack_input_embeds]
        return IntermediateTensors({key(k): b[:num_tokens] for k, b in enumerate(self.deepstack_input_embeds)})

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        # 0.20.0 refuses to clear more than was filled (#41485); the rest is zero as it is.
        filled = getattr(self, "deepstack_input_embeds_num_tokens", 0)
        super()._clear_deepstack_input_embeds(min(num_tokens, filled))  # type: ignore[misc]


class DeepStackOverStages(Corrected):
    """Mixin over an upstream DeepStack model: any split of its layers answers as one stage does.

    Upstream keeps the levels in buffers of the outer model and hands them to the inner model on the first stage
    only; it refuses a split that would need them later (Qwen3-VL, -MoE) or loses them (Qwen3-Omni). Here a stage
    sends every level that a later one uses, with payload or without (zeros), since vLLM traces the inner model once
    and an input that was None then is ignored for ever. It happens outside the compiled inner model, which stays
    upstream's.
    """

    pp_stage: Stage
    agreement: Agreement | None = None

    def _carry_levels(self, group: Any, vllm_config: VllmConfig) -> None:
        self.make_empty_intermediate_tensors = with_levels(self.make_empty_intermediate_tensors, self.pp_stage)
        self.agreement = announce(group, type(self).__name__, self.pp_stage)
        self.launched_apart = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"

    def _set_deepstack_input_embeds(self, deepstack_input_embeds: torch.Tensor) -> None:
        super()._set_deepstack_input_embeds(deepstack_input_embeds)  # type: ignore[misc]
        # Up to 0.19 upstream does not keep it.
        self.deepstack_input_embeds_num_tokens = deepstack_input_embeds.size(1)

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        super()._clear_deepstack_input_embeds(num_tokens)  # type: ignore[misc]
        self.deepstack_input_embeds_num_tokens = 0

    def embed_input_ids(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Embed as upstream does, after dropping levels that an earlier step left behind.

        `forward` clears them too, but a replayed CUDA graph does not run it.
        """
        self._clear_deepstack_input_embeds(getattr(self, "deepstack_input_embeds_num_tokens", 0))
        return super().embed_input_ids(*args, **kwargs)  # type: ignore[misc]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this stage's layers.

        Args:
            input_ids: `(num_tokens,)`, or None (V2 gives later stages none).
            positions: `(3 or 4, num_tokens)` or `(num_tokens,)`.
            intermediate_tensors: from the stage before: `hidden_states`, `residual` and the levels that this stage
                receives, each `(num_tokens, hidden_size)`; None on the first stage.
            inputs_embeds: `(num_tokens, hidden_size)`, read on the first stage only.
            kwargs: passed to upstream.

        Returns hidden states `(num_tokens, hidden_size)` on the last stage, else what the next stage's factory
        declares. Raises `StagesDisagree` at the first step if a neighbour does not run what this stage runs.
        """
        if self.agreement is not None and not torch.compiler.is_compiling() and self._all_stages_stand():
            self.agreement.check()
            self.agreement = None
        stage = self.pp_stage
        if not stage.received:
            levels = self._buffered(input_ids if inputs_embeds is None else inputs_embeds) if stage.forwarded else {}
            # A copy: upstream's forward clears the buffers before the runner sends.
            payload = {key(k): levels[key(k)].clone() for k in stage.forwarded}
            output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]
        else:
            assert intermediate_tensors is not None
            tensors = dict(intermediate_tensors.items())
            levels = {key(k): tensors.pop(key(k)) for k in stage.received}
            # A copy: the send may still be under way when the next step overwrites the receive buffer.
            payload = {key(k): levels[key(k)].clone() for k in stage.forwarded}
            # The inner model counts the levels to see how far they go, but reads only those from start_layer on.
            stand_in = levels[key(stage.start)]
            output = self.language_model.model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=IntermediateTensors(tensors),
                inputs_embeds=None,
                deepstack_input_embeds=IntermediateTensors(
                    {key(k): levels.get(key(k), stand_in) for k in range(stage.levels)}
                ),
            )
        return IntermediateTensors({**output.tensors, **payload}) if payload else output

    def _all_stages_stand(self) -> bool:
        """Tell whether every stage has been built: the ranks of an external launcher warm up each on its own."""
        return not self.launched_apart or get_forward_context().attn_metadata is not None

    def _buffered(self, inputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the first stage's levels for the tokens in `inputs`, zero where the batch has no payload."""
        assert inputs is not None
        return self._get_deepstack_input_embeds(inputs.size(0)).tensors


def log_service(model: object, cured: tuple[str, ...], stage: Stage | None = None) -> None:
    """Log the one line that a worker says of a model that it serves in place of vLLM's."""
    group = get_pp_group()
    exchange = (
        ""
        if stage is None
        else (
            f", layers {stage.start} to {stage.end - 1}, "
            f"receives {[*stage.received] or 'none'}, forwards {[*stage.forwarded] or 'none'}"
        )
    )
    logger.info(
        "vllm_pp_fixes %s serves %s in place of vLLM's, which has %s: stage %d of %d%s",
        __version__,
        type(model).__name__,
        ", ".join(cured),
        group.rank_in_group + 1,
        group.world_size,
        exchange,
    )


def faults_of(upstream: type) -> tuple[str, ...]:
    """Return the ids of the faults that the installed `upstream` has; none, with one warning, where none can tell."""
    try:
        return present(_tree(), _model(upstream), upstream.__name__)
    except CannotTell as error:
        _leave(upstream, error)
        return ()


def _tree() -> Tree:
    return Tree(Path(vllm.__file__).parent)


def _model(upstream: type) -> str:
    return upstream.__module__.rpartition(".")[2]


def _leave(upstream: type, why: object) -> None:
    logger.warning("vllm_pp_fixes leaves %s as it is, it cannot tell what it does: %s", upstream.__name__, why)


def named(name: str, module: str, bases: tuple[type, ...], **members: object) -> type:
    """Return a class of these bases that bears upstream's name (speculative decoding compares it), in `module`."""
    return new_class(name, bases, {}, lambda body: body.update(members, __module__=module))


def drop_in(upstream: type, module: str) -> type:
    """Return the class that serves in place of `upstream`: upstream's own where nothing is wrong, or none can tell.

    Only the overrides that it needs are composed. They go directly above the class whose constructor is at fault,
    below a subclass that makes something else of its output (a projection, a pooler). Never raises.
    """
    faults = faults_of(upstream)
    if not faults:
        return upstream
    home, name, _ = _tree().builder(_model(upstream), upstream.__name__)
    at_fault = next((cls for cls in upstream.__mro__ if cls.__name__ == name and _model(cls) == home), None)
    if at_fault is None:
        _leave(upstream, f"it does not inherit from {name} of {home}, as its source does")
        return upstream
    mixins: list[type] = [ZeroBackedLevels] if "compiled-drops-levels" in faults else []
    mixins.append(DeepStackOverStages if {"split-refused", "split-drops-levels"} & {*faults} else Corrected)
    mixed = named(name, module, (*mixins, at_fault), cured=faults)
    return mixed if at_fault is upstream else named(upstream.__name__, module, (upstream, mixed))


def upstream_of(drop_in: type) -> type:
    """Return the upstream class whose constructor and forward a drop-in's overrides stand directly above."""
    return drop_in.__mro__[drop_in.__mro__.index(Corrected) + 1]
