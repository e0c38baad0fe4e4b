"""The constructor asks the wrapper of the text model where its layers start; only the model inside knows.

Upstream: PR 42394.
"""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import OLDEST
from ..shapes import CARRIED_RESTS_ON, refusals
from ..source import Tree, mentions


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the wrapper is asked."""
    return any(mentions(found[-1], "self.language_model.start_layer") for found in refusals(tree, model, cls))


def cure() -> Cure:
    """Do not ask. The question guards a split that loses levels, so the levels are carried too: both or none."""
    from ..runtime.construction import as_first_stage
    from ..runtime.deepstack import DeepStackOverStages

    return Cure(as_first_stage, (DeepStackOverStages,))


FAULT = Fault(
    id="start-layer",
    hits=("qwen3_vl", "qwen3_vl_moe"),
    ranges=((OLDEST, "0.21.0"),),
    effect="refuses",
    symptom="PP>1: `AttributeError: 'Qwen3LLMForCausalLM' object has no attribute 'start_layer'`: asked of the "
    "wrapper, it lives on its `.model`",
    upstream="PR 42394; fixed 0.22.0",
    remedy="the question is not asked; levels cross stages where a split needs it",
    until="0.22.0",
    probe=probe,
    cure=cure,
    rests_on={**CARRIED_RESTS_ON, "__init__": "asks whether it is the first stage for this question and nothing else"},
)
