"""A first stage with fewer layers than DeepStack levels is refused: nothing carries the levels to the later stages."""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import NEWEST, OLDEST
from ..shapes import CARRIED_RESTS_ON, takes_over_factory


def cure() -> Cure:
    """Do not refuse, and carry each level to the stage that uses it: both or none."""
    from ..runtime.construction import as_first_stage
    from ..runtime.deepstack import DeepStackOverStages

    return Cure(as_first_stage, (DeepStackOverStages,))


FAULT = Fault(
    id="split-refused",
    hits=("qwen3_vl", "qwen3_vl_moe"),
    ranges=((OLDEST, NEWEST),),
    effect="refuses",
    crossing=True,
    symptom="a first stage with fewer layers than DeepStack levels: `AssertionError: start_layer should be "
    "greater than or equal to len(deepstack_visual_indexes)`",
    upstream="none",
    remedy="the constructor no longer refuses; a stage sends each level that a later stage uses, and that stage's "
    "factory declares exactly those",
    until="a release whose factory declares levels",
    probe=takes_over_factory,
    cure=cure,
    rests_on={**CARRIED_RESTS_ON, "__init__": "asks whether it is the first stage for its refusal and nothing else"},
)
