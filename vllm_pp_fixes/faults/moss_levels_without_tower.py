"""MOSS-Audio with audio=0 still declares its levels, and sends zeros over every boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Cure, Fault
from ..releases import NEWEST
from ..shapes import FACTORY, asks_for_tower
from ..source import Tree

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the constructor does not ask for the tower."""
    return not asks_for_tower(tree.builder(model, cls)[2])


def cure() -> Cure:
    """Declare and send no levels without a tower."""
    from ..runtime.compose import DropIn
    from ..runtime.construction import asked_for

    class NoTowerNoLevels(DropIn):
        """Mixin over upstream's MOSS-Audio."""

        def built(self, vllm_config: VllmConfig) -> None:
            super().built(vllm_config)
            if not asked_for(vllm_config, "audio"):
                self.language_model.deepstack_inject_layer_indices = range(0)
                self.language_model.model.deepstack_inject_layer_indices = range(0)

    return Cure(mixins=(NoTowerNoLevels,))


FAULT = Fault(
    id="moss-levels-without-tower",
    hits=("moss_audio",),
    ranges=(("0.24.0", NEWEST),),
    effect="wastes",
    symptom="audio=0: levels are still declared, and zeros sent over every boundary",
    upstream="none",
    remedy="no tower, no levels",
    until="a release that asks for the tower first",
    probe=probe,
    cure=cure,
    rests_on={
        f"language_model.{FACTORY}": "declares what the text model's `deepstack_inject_layer_indices` lists",
        "language_model.model.forward": "sends what its own `deepstack_inject_layer_indices` lists",
    },
)
