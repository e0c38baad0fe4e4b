"""A first stage with fewer layers than DeepStack levels: the levels of later stages are lost, and nothing says so."""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import NEWEST, OLDEST
from ..shapes import CARRIED_RESTS_ON, takes_over_factory


def cure() -> Cure:
    """Carry each level to the stage that uses it."""
    from ..runtime.deepstack import DeepStackOverStages

    return Cure(mixins=(DeepStackOverStages,))


FAULT = Fault(
    id="split-drops-levels",
    hits=("qwen3_omni_moe_thinker",),
    ranges=((OLDEST, NEWEST),),
    effect="wrong answers",
    crossing=True,
    symptom="a first stage with fewer layers than DeepStack levels: no refusal, but levels after the first stage are "
    "lost: **wrong answers** for pictures and video, log-probabilities off by more than 1",
    upstream="none",
    remedy="a stage sends each level that a later stage uses, and that stage's factory declares exactly those",
    until="a release whose factory declares levels",
    probe=takes_over_factory,
    cure=cure,
    rests_on=CARRIED_RESTS_ON,
)
