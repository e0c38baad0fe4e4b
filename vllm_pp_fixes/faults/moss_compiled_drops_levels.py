"""Under torch.compile MOSS-Audio ignores the levels of every sound.

Upstream makes the levels anew for each batch that has sound and passes None for all others. vLLM traces the inner
model once, before the first sound, drops the guards, and so ignores the levels for ever.
"""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import NEWEST
from ..shapes import CARRIED_RESTS_ON, FACTORY, LEVELS, OWN_GRAPHS_REST_ON
from ..source import Tree, assigns, enclosed, is_none


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the constructor makes no buffers, but leaves the levels None."""
    return any(enclosed(tree.builder(model, cls)[2], lambda s: is_none(assigns(s, f"self.{LEVELS}"))))


def cure() -> Cure:
    """Keep the levels in buffers, as those of Qwen3-VL are, and carry them over stages in the same way."""
    from ..runtime.level_buffers import OwnLevelBuffers

    return Cure(mixins=(OwnLevelBuffers,))


FAULT = Fault(
    id="moss-compiled-drops-levels",
    hits=("moss_audio",),
    ranges=(("0.24.0", NEWEST),),
    effect="wrong answers",
    symptom="under torch.compile, the default, the levels are ignored, at one stage too: **wrong answers** for "
    "every sound",
    upstream="none",
    remedy="the levels lie in zero-backed buffers, so that the one trace of the model sees them",
    until="a release that gives the inner model levels in each batch",
    probe=probe,
    cure=cure,
    rests_on={
        **OWN_GRAPHS_REST_ON,
        "__init__": "lists the levels in `deepstack_inject_layer_indices` of the text model and of the model inside",
        "embed_input_ids": "assigns `deepstack_input_embeds` anew in each step: None, or the levels of all tokens",
        "forward": "hands `deepstack_input_embeds` to the inner model on the first stage, and assigns None after it",
        "language_model.__init__": "takes the list of levels from the configuration",
        "language_model.model.__init__": "takes the list of levels from the configuration; gives the stage's layers",
        "language_model.model.forward": CARRIED_RESTS_ON["language_model.model.forward"],
        f"language_model.{FACTORY}": "declares hidden states, residual, what `deepstack_inject_layer_indices` lists",
    },
)
