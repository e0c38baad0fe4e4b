"""Every stage holds the vision and audio towers, parameters and all; only the first one runs them."""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import NEWEST, OLDEST
from ..source import CannotTell, Tree, mentions

MARK = "_mark_tower_model"


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether one runner at least has towers on every stage. Raises `CannotTell`."""
    mark = tree.method(model, cls, MARK)
    if mark is None:
        raise CannotTell(f"{cls} in {model}.py has no {MARK}")
    return not mentions(mark, "is_first_rank") or mentions(mark, "use_v2_model_runner")


def cure() -> Cure:
    """Leave towers out on later stages."""
    from ..runtime.towers import TowersOnFirstStage

    return Cure(mixins=(TowersOnFirstStage,))


FAULT = Fault(
    id="towers-everywhere",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "moss_audio"),
    ranges=((OLDEST, NEWEST),),
    effect="wastes",
    symptom="every stage holds the vision and audio towers, about 1.2 GB of Qwen3-VL and 2.4 GB of Qwen3-Omni in "
    "bfloat16; only the first one runs them (from 0.33.0 on runner V2 leaves them out itself)",
    upstream="none",
    remedy="where the drop-in carries levels, later stages have no tower and do not load its weights; "
    "`VLLM_PP_FIXES_KEEP_TOWERS=1` keeps it",
    until="a release that leaves them out under both runners",
    no_diff="it costs memory, not answers, and from 0.33.0 on runner V2 leaves towers out in another way",
    probe=probe,
    cure=cure,
    rests_on={
        MARK: "leaves a tower out where `get_limit_per_prompt` of the configuration is 0 for its modalities",
        "__init__": "builds in `_mark_tower_model` all that only an encoder uses, and nothing else",
        "load_weights": "passes over what is missing",
        "embed_multimodal": "runs on the first stage only, and for the memory profile",
    },
)
