"""DeepStack levels that upstream makes anew for each batch, kept in zero-backed buffers as Qwen3-VL's are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.sequence import IntermediateTensors

from .construction import asked_for
from .deepstack import DeepStackOverStages, key

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OwnLevelBuffers(DeepStackOverStages):
    """Mixin over upstream's MOSS-Audio: its levels lie in buffers, on the first stage and with a tower only.

    Upstream assigns `deepstack_input_embeds` in `embed_input_ids`, None or the levels of all tokens, and hands it to
    the inner model in `forward`. Here it is a view of the buffers whatever was assigned, so that the inner model has
    the same inputs in every batch: vLLM traces it once, and an input that was None then is ignored for ever.
    """

    buffered_levels = range(0)
    """Levels that have a buffer on this stage."""
    deepstack_input_embeds_num_tokens = 0
    """Rows that the batch has filled."""
    batch_tokens = 0
    """Rows that the batch reads: its tokens, and what a graph pads them to."""

    def built(self, vllm_config: VllmConfig) -> None:
        """Make the buffers; upstream's lists of levels, which know nothing of a missing tower, declare nothing more."""
        super().built(vllm_config)
        self.language_model.deepstack_inject_layer_indices = range(0)
        self.language_model.model.deepstack_inject_layer_indices = range(0)
        shape = vllm_config.scheduler_config.max_num_batched_tokens, self.config.language_config.hidden_size
        if self.pp_stage.first:
            self.buffered_levels = range(self.pp_stage.levels)
        for level in self.buffered_levels:
            # Registered: vLLM puts back what buffers held when it wakes up from sleep level 2. In no checkpoint.
            self.register_buffer(f"level_buffer_{level}", torch.zeros(shape), persistent=False)

    @property
    def level_buffers(self) -> list[torch.Tensor]:
        """The buffers, `(max_num_batched_tokens, hidden_size)` each, zero but for the levels of the batch."""
        return [getattr(self, f"level_buffer_{level}") for level in self.buffered_levels]

    def count_levels(self, vllm_config: VllmConfig) -> int:
        """Return how many levels are injected: none where the audio tower is left out."""
        injected = self.language_model.model.deepstack_inject_layer_indices
        return len(injected) if asked_for(vllm_config, "audio") else 0

    @property
    def deepstack_input_embeds(self) -> IntermediateTensors:
        """The levels of the batch, `(batch_tokens, hidden_size)` each: views of the buffers, zero without sound."""
        return self._get_deepstack_input_embeds(self.batch_tokens)

    @deepstack_input_embeds.setter
    def deepstack_input_embeds(self, levels: IntermediateTensors | None) -> None:
        self._clear_deepstack_input_embeds(self.deepstack_input_embeds_num_tokens)
        if levels is not None:
            for k, buffer in enumerate(self.level_buffers):
                tokens = levels[key(k)].size(0)
                buffer[:tokens].copy_(levels[key(k)])
                self.deepstack_input_embeds_num_tokens = tokens

    def _get_deepstack_input_embeds(self, num_tokens: int) -> IntermediateTensors:
        return IntermediateTensors({key(k): buffer[:num_tokens] for k, buffer in enumerate(self.level_buffers)})

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        if self.deepstack_input_embeds_num_tokens:
            for buffer in self.level_buffers:
                buffer[:num_tokens].zero_()
            self.deepstack_input_embeds_num_tokens = 0

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this stage's layers; see `DeepStackOverStages.forward`."""
        self.batch_tokens = positions.size(-1)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
