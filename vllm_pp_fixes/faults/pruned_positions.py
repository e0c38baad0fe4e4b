"""With `video_pruning_rate` positions are worked out anew from the tower's output, which the first stage alone has."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ..fault import Cure, Fault
from ..releases import NEWEST, OLDEST
from ..shapes import POSITIONS_REST_ON
from ..source import Tree

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RECOMPUTE = "recompute_mrope_positions"
RUNNERS = "v1/worker/gpu/model_states/mm_pruning.py", "v1/worker/gpu_model_runner.py"
"""V2's, from 0.25 on, and V1's."""


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the model works positions out anew from what it embeds, and a runner asks for that."""
    recomputes = tree.method(model, cls, RECOMPUTE)
    return recomputes is not None and any(
        tree.mentions(runner, lambda node: isinstance(node, ast.Attribute) and node.attr == RECOMPUTE)
        for runner in RUNNERS
    )


def cure() -> Cure:
    """Send the first stage's positions along."""
    from vllm.distributed import get_pp_group

    from ..runtime.construction import asked_for
    from ..runtime.positions import PositionsOverStages

    class PositionsOfPruned(PositionsOverStages):
        """Mixin over an upstream model that prunes video: sends positions where it does."""

        is_multimodal_pruning_enabled: bool

        def built(self, vllm_config: VllmConfig) -> None:
            super().built(vllm_config)
            if not get_pp_group().is_first_rank:
                # A later stage embeds for its memory profile only, and has no text embeddings to put around a video.
                self.is_multimodal_pruning_enabled = False

        def needs_positions(self, vllm_config: VllmConfig) -> bool:
            config = vllm_config.model_config.multimodal_config
            pruned = config is not None and (config.video_pruning_rate or 0) > 0
            return bool(pruned and asked_for(vllm_config, "video")) or super().needs_positions(vllm_config)

    return Cure(mixins=(PositionsOfPruned,))


FAULT = Fault(
    id="pruned-positions",
    hits=("qwen3_vl", "qwen3_vl_moe"),
    ranges=((OLDEST, NEWEST),),
    effect="wrong answers",
    symptom="PP>1 with `--video-pruning-rate`: positions after pruning are worked out on the first stage only, later "
    "stages use those of before: **wrong answers** for video",
    upstream="none",
    remedy="where video is pruned the first stage sends its positions along, and later stages use them",
    until="a release whose later stages use the positions of after pruning",
    no_diff="both model runners work positions out anew from what a tower gives, which the first stage alone has: a "
    "patch would have each runner, or each model that prunes (Qwen2.5-VL and others too), send them beside the hidden "
    "states, which is upstream's to choose. Without `--video-pruning-rate` positions are right",
    probe=probe,
    cure=cure,
    rests_on=POSITIONS_REST_ON,
)
