"""The models under test, a row each: adding a model is adding a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_pp_fixes.demo.examples import EXAMPLES

NO_VISION = {"image": 0, "video": 0}


@dataclass(frozen=True)
class Row:
    """One model: how its tower is left out, and what upstream does with it."""

    model_type: str
    class_name: str
    no_tower: dict[str, int] = field(default_factory=dict)
    """`--limit-mm-per-prompt` that leaves out the tower that gives levels; empty where there is none."""
    left: tuple[str, ...] = ()
    """Prompts with media that can still be asked then."""
    upstream_splits: tuple[tuple[int, ...], ...] = ((),)
    """Splits that upstream starts with, the one to fill a compile cache with first."""
    levels: int = 3
    lost: str = "deepstack_input_embeds_1"
    """A tensor that must not be lost between stages 1 and 5."""

    @property
    def asked(self) -> list[list[str]]:
        """Text, media, text without payload after it, all at once, what the prefix cache holds, and text again."""
        model_type = EXAMPLES[self.model_type]
        media = model_type.media
        mixed = [["text"], [media[0]], ["text2"], ["text", *media], [media[-1]]]
        return [*mixed, *([name] for name in model_type.alone), *self.text]

    @property
    def text(self) -> list[list[str]]:
        return [["text"], ["text2", "text"]]

    @property
    def without_tower(self) -> dict[str, Any]:
        """Arguments of an engine whose tower is left out."""
        return {"limit_mm_per_prompt": self.no_tower}


ROWS = {
    row.model_type: row
    for row in (
        Row("qwen3_vl", "Qwen3VLForConditionalGeneration", NO_VISION, upstream_splits=((), (3, 3))),
        Row("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", NO_VISION, upstream_splits=((3, 3),)),
        Row(
            "qwen3_omni_moe_thinker",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            {**NO_VISION, "audio": 1},
            left=("sound",),
            upstream_splits=((1, 5),),
        ),
        Row("moss_audio", "MossAudioModel", {"audio": 0}, upstream_splits=((1, 5),)),
        Row("step3_text", "Step3TextForCausalLM", upstream_splits=((1, 5),), levels=0, lost="residual"),
    )
}
OTHERS = [model_type for model_type in ROWS if model_type != "qwen3_vl"]
