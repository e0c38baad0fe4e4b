"""Towers on the first stage only: a later stage neither allocates one nor reads its weights."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import StageMissingLayer

from .compose import DropIn
from .construction import Instead
from .deepstack import DeepStackOverStages

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEEP = "VLLM_PP_FIXES_KEEP_TOWERS"
"""Environment variable that, set to 1, leaves towers on every stage."""


class TowersOnFirstStage(DropIn):
    """Mixin over an upstream model with towers: on later stages they are missing, as with `--limit-mm-per-prompt` 0.

    Upstream then builds a tower on the meta device, keeps it as a `StageMissingLayer`, which has no parameters, and
    its loader passes over the weights. Only the construction of towers sees these limits: the stage still counts the
    levels that the first one sends, where the drop-in carries them; elsewhere towers stay.
    """

    without_towers = False
    """Whether this stage has left them out."""

    def _mark_tower_model(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        # A patched upstream that carries levels itself counts them by the tower that its stage holds.
        carried = isinstance(self, DeepStackOverStages)
        self.without_towers = carried and os.environ.get(KEEP) != "1" and not get_pp_group().is_first_rank
        if self.without_towers:
            real = vllm_config.model_config
            limits = Instead(real.multimodal_config, get_limit_per_prompt=lambda modality: 0)
            # Up to 0.27 upstream reads the attribute.
            model_config = Instead(real, multimodal_config=limits, get_multimodal_config=lambda: limits)
            vllm_config = Instead(vllm_config, model_config=model_config)
        return super()._mark_tower_model(vllm_config, *args, **kwargs)  # type: ignore[misc]

    def built(self, vllm_config: VllmConfig) -> None:
        """Tell the stage's runner, which reads these settings after its model, that there is no tower to try."""
        super().built(vllm_config)
        if not self.without_towers:
            return
        vllm_config.model_config.multimodal_config.skip_mm_profiling = True
        if hasattr(vllm_config.compilation_config, "cudagraph_mm_encoder"):
            vllm_config.compilation_config.cudagraph_mm_encoder = False
        for child in self.modules():
            if isinstance(child, StageMissingLayer) and child.module is not None:
                # vLLM refuses an adapter that has weights for a kind of layer that the stage has not.
                layers = child.module.named_modules()
                child.embedding_modules = {
                    name.rpartition(".")[2]: "" for name, layer in layers if isinstance(layer, LinearBase)
                }

    def exchange(self) -> str:
        """Say that the towers are missing, where they are."""
        return super().exchange() + (", no tower" if self.without_towers else "")
