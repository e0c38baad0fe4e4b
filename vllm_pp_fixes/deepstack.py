"""DeepStack levels over pipeline stages: the buffers, what a stage sends, the factory that declares it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import new_class
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors

from . import __version__
from .construction import as_first_stage, mark_compile_cache
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


class DeepStackOverStages:
    """Mixin over an upstream DeepStack model: any split of its layers answers as one stage does.

    Upstream keeps the levels in buffers of the outer model and hands them to the inner model on the first stage
    only; it refuses a split that would need them later (Qwen3-VL, -MoE) or loses them (Qwen3-Omni). Here a stage
    sends every level that a later one uses, with payload or without (zeros), since vLLM traces the inner model once
    and an input that was None then is ignored for ever. It happens outside the compiled inner model, which stays
    upstream's.
    """

    pp_stage: Stage
    replaced_because = "hands no DeepStack level to a later stage"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str | None = None) -> None:
        upstream = upstream_of(type(self))
        mark_compile_cache(vllm_config, DeepStackOverStages.__name__)
        with as_first_stage(upstream):
            super().__init__(vllm_config=vllm_config, **({} if prefix is None else {"prefix": prefix}))  # type: ignore[call-arg]
        inner, group = self.language_model.model, get_pp_group()
        levels = min(self._count_levels(), len(inner.layers))
        self.pp_stage = Stage(inner.start_layer, inner.end_layer, levels, first=group.is_first_rank)
        self.make_empty_intermediate_tensors = with_levels(self.make_empty_intermediate_tensors, self.pp_stage)
        if not self.pp_stage.first:
            # Only embed_input_ids fills them, and it runs on the first stage only.
            self.deepstack_input_embeds = []
        logger.info(
            "vllm_pp_fixes %s serves %s in place of vLLM's, which %s: "
            "stage %d of %d, layers %d to %d, receives %s, forwards %s",
            __version__,
            type(self).__name__,
            self.replaced_because,
            group.rank_in_group + 1,
            group.world_size,
            self.pp_stage.start,
            self.pp_stage.end - 1,
            [*self.pp_stage.received] or "none",
            [*self.pp_stage.forwarded] or "none",
        )

    def _count_levels(self) -> int:
        """Return how many levels the towers of this model give: none without a tower."""
        return self.deepstack_num_level

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
        declares.
        """
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

    def _buffered(self, inputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the first stage's levels for the tokens in `inputs`, zero where the batch has no payload."""
        assert inputs is not None
        return self._get_deepstack_input_embeds(inputs.size(0)).tensors

    # Upstream's, named here for readers and the type checker.
    if TYPE_CHECKING:
        language_model: Any
        deepstack_input_embeds: Any
        deepstack_num_level: int
        make_empty_intermediate_tensors: Factory
        _get_deepstack_input_embeds: Callable[[int], IntermediateTensors]
        _clear_deepstack_input_embeds: Callable[[int], None]


def upstream_of(drop_in: type) -> type:
    """Return the upstream class whose constructor and forward a drop-in's overrides stand directly above."""
    return drop_in.__mro__[drop_in.__mro__.index(DeepStackOverStages) + 1]


_TAKES_OVER = re.compile(
    r"self\.make_empty_intermediate_tensors = \(?\s*self\.language_model\.make_empty_intermediate_tensors"
)
_DELEGATES = re.compile(r"super\(\)\.__init__\(\s*vllm_config=")


def at_fault(upstream: type) -> type | None:
    """Return the class, `upstream` or one that it inherits from, that cannot hand levels to a later stage.

    It cannot where its constructor takes over its text model's factory, which declares no levels. Decided by the
    constructor's text, not by the release's number: forks, nightlies and backports carry misleading ones. Raises
    `OSError` or `TypeError` where that text cannot be read. None where levels are declared otherwise.
    """
    for cls in upstream.__mro__:
        if "__init__" in vars(cls):
            source = inspect.getsource(cls.__init__)  # type: ignore[misc]
            if _TAKES_OVER.search(source):
                return cls
            if not _DELEGATES.search(source):
                break  # constructors further down never run
    return None


def drop_in(upstream: type, module: str) -> type:
    """Return the class that serves in place of `upstream`: upstream's own where nothing is wrong.

    The overrides go directly above the class at fault, below a subclass that makes something else of its output (a
    projection, a pooler). The drop-in keeps upstream's name (speculative decoding compares it) and lives in `module`.
    It never raises (see `unless_unreadable`).
    """
    return unless_unreadable(upstream, lambda: _compose(upstream, at_fault(upstream), module))


def unless_unreadable(upstream: type, choose: Callable[[], type]) -> type:
    """Return the class that `choose` chooses; `upstream`, with one warning, where it cannot read upstream's text."""
    try:
        return choose()
    except (OSError, TypeError) as error:
        logger.warning("vllm_pp_fixes leaves %s as it is, it cannot tell what it does: %s", upstream.__name__, error)
        return upstream


def _compose(upstream: type, fault: type | None, module: str) -> type:
    if fault is None:
        return upstream
    mixed = new_class(fault.__name__, (DeepStackOverStages, fault), {}, lambda body: body.update(__module__=module))
    if fault is upstream:
        return mixed
    return new_class(upstream.__name__, (upstream, mixed), {}, lambda body: body.update(__module__=module))
