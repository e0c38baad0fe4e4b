"""Later stages of MOSS-Audio declare levels that come before their start_layer, which no stage sends.

Upstream: PR 47607.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Cure, Fault
from ..shapes import FACTORY
from ..source import CannotTell, Tree, mentions, own_method, path_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the factory does not ask where the layers start."""
    factory = own_method(tree.cls(path_of(model), "MossQwen3ForCausalLM"), FACTORY)
    if factory is None:
        raise CannotTell(f"MossQwen3ForCausalLM has no {FACTORY}")
    return not mentions(factory, "start_layer")


def cure() -> Cure:
    """Let the list that the factory reads, and it alone, begin at the stage's first layer."""
    from ..runtime.compose import DropIn

    class DeclaresFromItsFirstLayer(DropIn):
        """Mixin over upstream's MOSS-Audio."""

        def built(self, vllm_config: VllmConfig) -> None:
            super().built(vllm_config)
            wrapper = self.language_model
            wrapper.deepstack_inject_layer_indices = [
                level for level in wrapper.deepstack_inject_layer_indices if level >= wrapper.model.start_layer
            ]

    return Cure(mixins=(DeclaresFromItsFirstLayer,))


FAULT = Fault(
    id="moss-factory",
    hits=("moss_audio",),
    ranges=(("0.24.0", "0.24.0"),),
    effect="refuses",
    symptom="PP>1 under runner V2: `KeyError: 'deepstack_input_embeds_0'`: later stages declare levels that come "
    "before their start_layer",
    upstream="PR 47607; fixed 0.25.0",
    remedy="a stage declares levels from its first layer on",
    until="0.25.0",
    probe=probe,
    cure=cure,
    rests_on={f"language_model.{FACTORY}": "declares what the text model's own `deepstack_inject_layer_indices` lists"},
)
