"""One record a fault: what the user meets, where, and what is done about it here.

README's tables, `status` and the tests read it. Which faults an installed vLLM has is asked of `probes`; the releases
here are what they answered, and a difference is worth a look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OLDEST = "0.17.0"
"""Oldest release of vLLM that the drop-ins were made for."""
NEWEST = "0.33.0"
"""Newest release that the catalogue knows."""
TESTED = "0.32.0"
"""Newest release that the tests were run on."""


def numbers(version: str) -> tuple[int, ...]:
    """Return the release in `version` as numbers: `(0, 32, 0)` of `0.32.0+cpu`; `(0, 0, 0)` where there is none.

    Builds from a source tree without tags call themselves 0.1.devN, whatever they hold: they have none.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!\.?dev)", version)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


@dataclass(frozen=True)
class Fault:
    """A fault of upstream's, under the id that messages and documents use."""

    id: str
    models: tuple[str, ...]
    """Module names of the models, as in `MODELS`."""
    ranges: tuple[tuple[str, str], ...]
    """Releases that have it: ranges, both ends included."""
    symptom: str
    upstream: str
    """Issue or pull request, or "none"."""
    cure: str
    until: str
    """When the cure can go."""

    @property
    def releases(self) -> str:
        """The ranges as text."""
        return ", ".join(first if first == last else f"{first} to {last}" for first, last in self.ranges)

    def expected(self, version: str) -> bool | None:
        """Tell whether the catalogue says that release `version` has the fault; None for one that it does not know."""
        release = numbers(version)
        if not numbers(OLDEST) <= release <= numbers(NEWEST):
            return None
        return any(numbers(first) <= release <= numbers(last) for first, last in self.ranges)


MODELS = {
    "qwen3_vl": {"Qwen3VLForConditionalGeneration": "Qwen3VLForConditionalGeneration"},
    "qwen3_vl_moe": {"Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeForConditionalGeneration"},
    "qwen3_omni_moe_thinker": {"Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration"},
    "moss_audio": {"MossAudioModel": "MossAudioModel"},
    "step3_text": {"Step3TextForCausalLM": "Step3TextForCausalLM"},
    "colqwen3": {
        "ColQwen3": "ColQwen3Model",
        "OpsColQwen3Model": "ColQwen3Model",
        "Qwen3VLNemotronEmbedModel": "ColQwen3Model",
    },
    "cosmos3": {"Cosmos3ForConditionalGeneration": "Cosmos3ForConditionalGeneration"},
    "clef_omni": {"ClefOmniForJointSchema": "ClefOmniForJointSchema"},
}
"""Module name of each drop-in: the architectures that it serves, and the class that serves each."""

_REFUSED = ("qwen3_vl", "qwen3_vl_moe", "colqwen3", "cosmos3")
_OMNI = ("qwen3_omni_moe_thinker", "clef_omni")
_ALL = (("0.17.0", "0.33.0"),)
_MOSS = (("0.24.0", "0.33.0"),)

FAULTS = (
    Fault(
        id="text-architectures",
        models=_REFUSED,
        ranges=(("0.17.0", "0.29.0"),),
        symptom="PP>1, a checkpoint as published: `No model architectures are specified`: the text model's "
        "configuration names none (0.29.0's CPU build at one stage too: `IndexError: list index out of range`)",
        upstream="#43271, PR 43272, PR 53699; fixed 0.30.0",
        cure="the constructor gives the text model's configuration its architecture",
        until="0.30.0",
    ),
    Fault(
        id="start-layer",
        models=_REFUSED,
        ranges=(("0.17.0", "0.21.0"),),
        symptom="PP>1: `AttributeError: 'Qwen3LLMForCausalLM' object has no attribute 'start_layer'`: asked of the "
        "wrapper, it lives on its `.model`",
        upstream="PR 42394; fixed 0.22.0",
        cure="as for split-refused: the question is not asked",
        until="0.22.0",
    ),
    Fault(
        id="split-refused",
        models=_REFUSED,
        ranges=_ALL,
        symptom="a first stage with fewer layers than DeepStack levels: `AssertionError: start_layer should be "
        "greater than or equal to len(deepstack_visual_indexes)`",
        upstream="none",
        cure="the constructor no longer refuses; a stage sends each level that a later stage uses, and that stage's "
        "factory declares exactly those",
        until="a release whose factory declares levels",
    ),
    Fault(
        id="split-refused-towerless",
        models=_REFUSED,
        ranges=_ALL,
        symptom="the same refusal with image=0 and video=0 in `--limit-mm-per-prompt`, where no level exists",
        upstream="none",
        cure="the constructor no longer refuses; nothing is declared or sent without a tower",
        until="a release that asks for the tower first",
    ),
    Fault(
        id="split-drops-levels",
        models=_OMNI,
        ranges=_ALL,
        symptom="the same split: no refusal, but levels after the first stage are lost: **wrong answers** for "
        "pictures and video, log-probabilities off by more than 1",
        upstream="none",
        cure="as for split-refused",
        until="a release whose factory declares levels",
    ),
    Fault(
        id="buffers-on-meta",
        models=(*_REFUSED, *_OMNI),
        ranges=(("0.17.0", "0.19.1"), ("0.23.0", "0.27.1")),
        symptom="towers off by `--limit-mm-per-prompt`: `Tensor on device meta is not on the expected device`: "
        "Qwen3-Omni with sound alone; Qwen3-VL when something still brings input embeddings",
        upstream="#49384, PR 49397; fixed 0.28.0",
        cure="no tower, no buffers",
        until="0.28.0",
    ),
    Fault(
        id="compiled-drops-levels",
        models=(*_REFUSED, *_OMNI),
        ranges=(("0.20.0", "0.22.1"),),
        symptom="under torch.compile, the default, the levels are ignored, at one stage too: **wrong answers**; "
        "on 0.20.0 also `ValueError: Requested more deepstack tokens than available in buffer`",
        upstream="PR 40145 brought it, #41485, PR 43617; fixed 0.23.0",
        cure="levels are handed over in each batch, zeros where it has none, so that the one trace of the model sees "
        "them",
        until="0.23.0",
    ),
    Fault(
        id="buffers-everywhere",
        models=(*_REFUSED, *_OMNI),
        ranges=_ALL,
        symptom="every stage holds DeepStack buffers (levels x max_num_batched_tokens x hidden_size); only the first "
        "uses them",
        upstream="none",
        cure="buffers exist on the first stage only, and only with a tower (whole towers still stand on every stage)",
        until="a release that asks is_first_rank before it makes them",
    ),
    Fault(
        id="compile-cache-shared",
        models=(*_REFUSED, *_OMNI, "moss_audio"),
        ranges=(("0.17.0", "0.32.0"),),
        symptom="one compile-cache entry for towers on and off, so that the second start loads the first one's graph: "
        "`AttributeError: 'NoneType' object has no attribute 'size'`, or, Omni with sound alone and then with "
        "pictures, **wrong answers** (from 0.28.0 on); a drop-in would load upstream's graph too",
        upstream="#50891, PR 50908, PR 54642; fixed 0.33.0",
        cure="package version, overrides and towers are part of the cache's key (`additional_config`)",
        until="as long as there is a drop-in",
    ),
    Fault(
        id="moss-factory",
        models=("moss_audio",),
        ranges=(("0.24.0", "0.24.0"),),
        symptom="PP>1 under runner V2: `KeyError: 'deepstack_input_embeds_0'`: later stages declare levels that come "
        "before their start_layer",
        upstream="PR 47607; fixed 0.25.0",
        cure="the start_layer-aware factory of the other models",
        until="0.25.0",
    ),
    Fault(
        id="moss-compiled-drops-levels",
        models=("moss_audio",),
        ranges=_MOSS,
        symptom="under torch.compile, the default, the levels are ignored, at one stage too: **wrong answers** for "
        "every sound",
        upstream="none",
        cure="the levels lie in zero-backed buffers, so that the one trace of the model sees them",
        until="a release that gives the inner model levels in each batch",
    ),
    Fault(
        id="moss-audio-off",
        models=("moss_audio",),
        ranges=(("0.24.0", "0.32.0"),),
        symptom="audio=0: `Tensor.item() cannot be called on meta tensors` while the tower is built",
        upstream="fixed 0.33.0",
        cure="the constructor reads its sizes from tensors on the CPU",
        until="0.33.0",
    ),
    Fault(
        id="moss-levels-without-tower",
        models=("moss_audio",),
        ranges=_MOSS,
        symptom="audio=0: levels are still declared, and zeros sent over every boundary",
        upstream="none",
        cure="no tower, no levels",
        until="a release that asks for the tower first",
    ),
    Fault(
        id="step3-residual",
        models=("step3_text",),
        ranges=(("0.17.0", "0.22.1"),),
        symptom="PP>1: `KeyError: 'residual'`: the factory declares hidden_states only",
        upstream="#37543, PR 37622; fixed 0.23.0",
        cure="the factory declares the residual too",
        until="0.23.0",
    ),
)

UNTOUCHED = {
    "ColQwen3_5": "passes no DeepStack levels",
    "Qwen3_5ForConditionalGeneration": "passes no DeepStack levels",
    "Qwen3_5MoeForConditionalGeneration": "passes no DeepStack levels",
    "InternS2PreviewForConditionalGeneration": "a Qwen3.5: passes no DeepStack levels",
    "InternS2MobiusForConditionalGeneration": "switches DeepStack off in its constructor",
    "Cosmos3EdgeForConditionalGeneration": "no DeepStack: borrows a position function only",
    "BailingMoeV3VLForConditionalGeneration": "no DeepStack: its tower has no level",
    "InternS1ProForConditionalGeneration": "cannot be constructed on 0.32.0, at one stage either: its constructor "
    "reads `self.model_config`, set nowhere",
    "Qwen4ExpForConditionalGeneration": "refuses such a split only for a configuration with levels, which none that is "
    "published has; its hidden states are wider than a level, which the overrides do not fit",
    "Step3VLForConditionalGeneration": "builds its text model through the registry: Step3TextForCausalLM serves it",
    "Step3p7ForConditionalGeneration": "builds its text model through the registry, a Step3p5: nothing is wrong there",
    "StepVLForConditionalGeneration": "builds its text model through the registry: nothing is wrong there",
}
"""Architectures that inherit from or build a model above and are left alone, and why."""
