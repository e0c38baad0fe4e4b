"""Buffers for the levels are made while the tower is skipped: on the meta device, where nothing can be read.

Upstream: #49384, PR 49397.
"""

from __future__ import annotations

import ast

from ..fault import Cure, Fault
from ..releases import OLDEST
from ..shapes import buffer_assignments, hides_empty_buffers
from ..source import Tree, mentions


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether buffers are made inside the tower's context and handed out while they are empty."""

    def in_tower(found: list[ast.stmt]) -> bool:
        return any(isinstance(s, ast.With) and mentions(s.items[0], "_mark_tower_model") for s in found)

    return any(map(in_tower, buffer_assignments(tree, model, cls))) and not hides_empty_buffers(tree, model, cls)


def cure() -> Cure:
    """Keep no buffers without a tower."""
    from ..runtime.deepstack import LevelBuffersWhereUsed

    return Cure(mixins=(LevelBuffersWhereUsed,))


FAULT = Fault(
    id="buffers-on-meta",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"),
    ranges=((OLDEST, "0.19.1"), ("0.23.0", "0.27.1")),
    effect="refuses",
    symptom="towers off by `--limit-mm-per-prompt`: `Tensor on device meta is not on the expected device`: "
    "Qwen3-Omni with sound alone; Qwen3-VL when something still brings input embeddings",
    upstream="#49384, PR 49397; fixed 0.28.0",
    remedy="no tower, no buffers",
    until="0.28.0",
    probe=probe,
    cure=cure,
    rests_on={
        "__init__": "makes the buffers, a list that its own functions alone read",
        "_get_deepstack_input_embeds": "gives None where the list of buffers is empty",
    },
)
