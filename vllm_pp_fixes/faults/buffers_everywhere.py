"""Every stage holds DeepStack buffers, `levels x max_num_batched_tokens x hidden_size`; only the first uses them."""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import NEWEST, OLDEST
from ..shapes import asked_around, buffer_assignments
from ..source import Tree, mentions


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether buffers are made without asking which stage it is."""
    return not all(
        any(mentions(condition, "is_first_rank") for condition in asked_around(found))
        for found in buffer_assignments(tree, model, cls)
    )


def cure() -> Cure:
    """Keep buffers on the first stage only, and only with a tower."""
    from ..runtime.deepstack import LevelBuffersWhereUsed

    return Cure(mixins=(LevelBuffersWhereUsed,))


FAULT = Fault(
    id="buffers-everywhere",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"),
    ranges=((OLDEST, NEWEST),),
    effect="wastes",
    symptom="every stage holds DeepStack buffers (levels x max_num_batched_tokens x hidden_size); only the first "
    "uses them",
    upstream="none",
    remedy="buffers exist on the first stage only, and only with a tower",
    until="a release that asks is_first_rank before it makes them",
    probe=probe,
    cure=cure,
    rests_on={
        "__init__": "makes the buffers, a list that its own functions alone read",
        "_get_deepstack_input_embeds": "gives None where the list of buffers is empty",
        "embed_input_ids": "fills the buffers, and runs on the first stage only",
    },
)
