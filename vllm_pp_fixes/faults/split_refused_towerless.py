"""A first stage with few layers is refused with image=0 and video=0 too, where no tower stands and no level exists."""

from __future__ import annotations

import ast
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..fault import Cure, Fault
from ..releases import NEWEST, OLDEST
from ..shapes import asked_around, asks_for_tower, refusals
from ..source import Tree, assigns, enclosed, mentions


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether a refusal does not ask for the tower, nor for what the constructor worked out from it."""
    init = tree.builder(model, cls)[2]

    def knows(name: str) -> bool:
        made = [found[-1] for found in enclosed(init, lambda s: assigns(s, name) is not None)]
        # A helper that is given the limits asks them.
        return any(asks_for_tower(statement) or mentions(statement, "multimodal_config") for statement in made)

    knowing = [name for name in ("self.use_deepstack", "self.deepstack_num_level") if knows(name)]

    def asks(condition: ast.expr) -> bool:
        return asks_for_tower(condition) or any(mentions(condition, name) for name in knowing)

    return not all(any(map(asks, asked_around(found))) for found in refusals(tree, model, cls))


def cure() -> Cure:
    """Do not refuse where there is no tower; with one the refusal stands, unless levels are carried."""
    from ..runtime.construction import as_first_stage, asked_for

    def as_first_stage_without_tower(upstream: type, vllm_config: Any) -> AbstractContextManager[None]:
        tower = asked_for(vllm_config, "image", "video")
        return nullcontext() if tower else as_first_stage(upstream, vllm_config)

    return Cure(as_first_stage_without_tower)


FAULT = Fault(
    id="split-refused-towerless",
    hits=("qwen3_vl", "qwen3_vl_moe"),
    ranges=((OLDEST, NEWEST),),
    effect="refuses",
    crossing=True,
    symptom="the same refusal with image=0 and video=0 in `--limit-mm-per-prompt`, where no level exists",
    upstream="none",
    remedy="the constructor no longer refuses; nothing is declared or sent without a tower",
    until="a release that asks for the tower first",
    probe=probe,
    cure=cure,
    rests_on={"__init__": "asks whether it is the first stage for its refusal and nothing else"},
)
