"""Drop-in for `vllm.model_executor.models.moss_audio` (moss-compiled-drops-levels, -audio-off, -levels-without-tower).

Upstream makes the levels anew for each batch that has sound and passes None for all others. vLLM traces the inner
model once, before the first sound, so that a compiled model ignores the levels for ever. Here they lie in zero-backed
buffers, as Qwen3-VL's do, and travel over stages as Qwen3-VL's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models import moss_audio as upstream
from vllm.sequence import IntermediateTensors

from vllm_pp_fixes.construction import asked_for
from vllm_pp_fixes.deepstack import DeepStackOverStages, faults_of, key, named

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _MossAudioModel(DeepStackOverStages, upstream.MossAudioModel):
    """MOSS-Audio that keeps its DeepStack levels in buffers, on the first stage and with a tower only."""

    _has_level_buffers = False  # upstream's name holds something else here

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The mixin declares and sends; upstream's own lists know nothing of a missing tower.
        self.language_model.deepstack_inject_layer_indices = range(0)
        self.language_model.model.deepstack_inject_layer_indices = range(0)
        shape = vllm_config.scheduler_config.max_num_batched_tokens, self.config.language_config.hidden_size
        self.level_buffers = [torch.zeros(shape) for _ in range(self.pp_stage.levels if self.pp_stage.first else 0)]
        self.deepstack_input_embeds_num_tokens = 0

    def _count_levels(self, vllm_config: VllmConfig) -> int:
        return len(self.language_model.deepstack_inject_layer_indices) if asked_for(vllm_config, "audio") else 0

    def _get_deepstack_input_embeds(self, num_tokens: int) -> IntermediateTensors:
        return IntermediateTensors({key(k): buffer[:num_tokens] for k, buffer in enumerate(self.level_buffers)})

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        if self.deepstack_input_embeds_num_tokens:
            for buffer in self.level_buffers:
                buffer[:num_tokens].zero_()
            self.deepstack_input_embeds_num_tokens = 0

    def embed_input_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Embed as upstream does; levels of this batch, if any, go from upstream's tensors into the buffers."""
        embeds = super().embed_input_ids(input_ids, *args, **kwargs)
        if self.deepstack_input_embeds:
            for k, buffer in enumerate(self.level_buffers):
                buffer[: embeds.size(0)].copy_(self.deepstack_input_embeds[key(k)])
            self.deepstack_input_embeds_num_tokens = embeds.size(0)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this stage's layers; see `DeepStackOverStages.forward`."""
        if not self.level_buffers:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        num_tokens = positions.size(-1)
        self.deepstack_input_embeds = self._get_deepstack_input_embeds(num_tokens)
        output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        self._clear_deepstack_input_embeds(num_tokens)
        return output


_FAULTS = faults_of(upstream.MossAudioModel)
MossAudioModel = (
    named(upstream.MossAudioModel.__name__, __name__, (_MossAudioModel,), cured=_FAULTS)
    if "moss-compiled-drops-levels" in _FAULTS  # without it upstream has buffers of its own, which these do not fit
    else upstream.MossAudioModel
)
