"""EAGLE-3 over stages: the auxiliary states of the earlier stages do not reach the draft, which the last one runs.

Upstream: PR 50514 sends them, for models whose inner `forward` packs and collects them; these do not.
"""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import NEWEST
from ..shapes import OWN_GRAPHS_REST_ON, PACK, sends_states
from ..source import Tree, mentions

INNER = "language_model.model"


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether this vLLM sends auxiliary states over stages, and the inner model does not. Raises `CannotTell`."""
    if not sends_states(tree):
        return False
    return not any(mentions(function, PACK) for *_, function in tree.definitions(model, cls, f"{INNER}.forward"))


def cure() -> Cure:
    """Capture each state on one stage, and send it to the last."""
    from ..runtime.auxiliary import AuxiliaryStatesOverStages

    return Cure(mixins=(AuxiliaryStatesOverStages,))


FAULT = Fault(
    id="aux-states-lost",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"),
    ranges=(("0.30.0", NEWEST),),
    effect="refuses",
    symptom="EAGLE-3 with PP>1, runner V2: `KeyError: 'aux_hidden_states_0'` at the first request (Qwen3-VL), or "
    "`does not support eagle3 with pipeline parallelism`",
    upstream="none; PR 50514 made it work for other models",
    remedy="each stage captures the auxiliary states of its layers and sends them, so that the draft reads all",
    until="a release whose inner models pack and collect auxiliary states",
    drafts=True,
    probe=probe,
    cure=cure,
    rests_on={
        "set_aux_hidden_state_layers": "tells the inner model which states are wanted",
        f"{INNER}.forward": "calls `_maybe_add_hidden_state` with what enters a layer or leaves it, and with the list "
        "that the last stage returns where it is not empty",
        f"{INNER}._maybe_add_hidden_state": "captures hidden states plus residual",
        f"{INNER}._set_aux_hidden_state_layers": "sorts the layers, and works out how many states come from before",
        f"{INNER}._cache_aux_pp_layout": "counts a state between two stages to the earlier one",
        "forward": "returns what the inner model returns",
        **OWN_GRAPHS_REST_ON,
    },
)
