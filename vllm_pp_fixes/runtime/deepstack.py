"""DeepStack levels over pipeline stages: the buffers, what a stage sends, the factory that declares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors

from .compose import DropIn
from .construction import asked_for
from .stages import Stage

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


class StageLevels(DropIn):
    """Mixin over an upstream DeepStack model that knows which levels its stage receives, uses and forwards."""

    pp_stage: Stage

    def built(self, vllm_config: VllmConfig) -> None:
        """Work out the stage."""
        super().built(vllm_config)
        inner = self.language_model.model
        levels = min(self.count_levels(vllm_config), len(inner.layers))
        self.pp_stage = Stage(inner.start_layer, inner.end_layer, levels, first=get_pp_group().is_first_rank)

    def count_levels(self, vllm_config: VllmConfig) -> int:
        """Return how many levels the vision tower, wherever it stands, gives: none where it is left out."""
        indexes = getattr(self.config.vision_config, "deepstack_visual_indexes", ())
        return len(indexes) if asked_for(vllm_config, "image", "video") else 0

    def exchange(self) -> str:
        """Say which layers the stage runs and which levels it exchanges."""
        stage = self.pp_stage
        return (
            f", layers {stage.start} to {stage.end - 1}, "
            f"receives {[*stage.received] or 'none'}, forwards {[*stage.forwarded] or 'none'}{super().exchange()}"
        )


class LevelBuffersWhereUsed(StageLevels):
    """Mixin over an upstream DeepStack model: buffers for the levels on the first stage only, and only with a tower."""

    deepstack_input_embeds: list[torch.Tensor]

    def built(self, vllm_config: VllmConfig) -> None:
        """Drop the buffers that nothing fills: only `embed_input_ids` does, and it runs on the first stage only."""
        super().built(vllm_config)
        if not (self.pp_stage.levels and self.pp_stage.first):
            self.deepstack_input_embeds = []
        for level, buffer in enumerate(self.deepstack_input_embeds):
            # Registered too: vLLM puts back what those held when it wakes up from sleep level 2. In no checkpoint.
            self.register_buffer(f"level_buffer_{level}", buffer, persistent=False)


class DeepStackOverStages(StageLevels):
    """Mixin over an upstream DeepStack model: any split of its layers answers as one stage does.

    Upstream keeps the levels in buffers of the outer model and hands them to the inner model on the first stage
    only; it refuses a split that would need them later (Qwen3-VL, -MoE) or loses them (Qwen3-Omni). Here a stage
    sends every level that a later one uses, with payload or without (zeros), since vLLM traces the inner model once
    and an input that was None then is ignored for ever. It happens outside the compiled inner model, which stays
    upstream's.
    """

    def built(self, vllm_config: VllmConfig) -> None:
        """Declare the levels that the stage receives; say to the neighbours what it exchanges."""
        super().built(vllm_config)
        self.make_empty_intermediate_tensors = with_levels(self.make_empty_intermediate_tensors, self.pp_stage)
        self.say(self.pp_stage)

    def _set_deepstack_input_embeds(self, deepstack_input_embeds: torch.Tensor) -> None:
        super()._set_deepstack_input_embeds(deepstack_input_embeds)  # type: ignore[misc]
        # Up to 0.19 upstream does not keep it.
        self.deepstack_input_embeds_num_tokens = deepstack_input_embeds.size(1)

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        # A dummy batch of one token may follow a replayed graph, which left more.
        filled = getattr(self, "deepstack_input_embeds_num_tokens", 0)
        super()._clear_deepstack_input_embeds(max(num_tokens, filled))  # type: ignore[misc]
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
        self.hear()
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
            unread = levels[key(stage.start)]
            output = self.language_model.model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=IntermediateTensors(tensors),
                inputs_embeds=None,
                deepstack_input_embeds=IntermediateTensors(
                    {key(k): levels.get(key(k), unread) for k in range(stage.levels)}
                ),
            )
        return IntermediateTensors({**output.tensors, **payload}) if payload else output

    # Upstream's, named here for readers and the type checker.
    if TYPE_CHECKING:
        deepstack_input_embeds_num_tokens: int
        _get_deepstack_input_embeds: Callable[[int], IntermediateTensors]

    def _buffered(self, inputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the first stage's levels for the tokens in `inputs`, zero where the batch has no payload."""
        assert inputs is not None
        return self._get_deepstack_input_embeds(inputs.size(0)).tensors
