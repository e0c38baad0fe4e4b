"""One record a fault: what the user meets, where, and what is done about it here.

README's table and the tests read it. Releases are ranges, both ends included; "fixed" names the first release
without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault of upstream's, under the id that messages and documents use."""

    id: str
    models: tuple[str, ...]
    """Module names of the models, as in `MODELS`."""
    releases: str
    symptom: str
    upstream: str
    """Issue or pull request, or "none"."""
    cure: str
    until: str
    """When the cure can go."""


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

FAULTS = (
    Fault(
        id="split-refused",
        models=_REFUSED,
        releases="0.17.0 to 0.33.0",
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
        releases="0.17.0 to 0.33.0",
        symptom="the same refusal with image=0 and video=0 in `--limit-mm-per-prompt`, where no level exists",
        upstream="none",
        cure="the constructor no longer refuses; nothing is declared or sent without a tower",
        until="a release that asks for the tower first",
    ),
    Fault(
        id="split-drops-levels",
        models=_OMNI,
        releases="all to 0.33.0",
        symptom="the same split: no refusal, but levels after the first stage are lost: **wrong answers** for "
        "pictures and video, log-probabilities off by more than 1",
        upstream="none",
        cure="as for split-refused",
        until="a release whose factory declares levels",
    ),
    Fault(
        id="buffers-everywhere",
        models=(*_REFUSED, *_OMNI),
        releases="all to 0.33.0",
        symptom="every stage holds DeepStack buffers (levels x max_num_batched_tokens x hidden_size); only the first "
        "uses them",
        upstream="none",
        cure="buffers exist on the first stage only, and only with a tower (whole towers still stand on every stage)",
        until="a release that asks is_first_rank before it makes them",
    ),
    Fault(
        id="compile-cache-shared",
        models=(*_REFUSED, *_OMNI, "moss_audio"),
        releases="releases with AOT compile (torch 2.10 or newer) to 0.32.0",
        symptom="one compile-cache entry for towers on and off, so that the second start loads the first one's graph: "
        "`AttributeError: 'NoneType' object has no attribute 'size'`, or, Omni with sound alone and then with "
        "pictures, **wrong answers**; a drop-in would load upstream's graph too",
        upstream="#50891, PR 50908, PR 54642; fixed 0.33.0",
        cure="package version, overrides and towers are part of the cache's key (`additional_config`)",
        until="as long as there is a drop-in",
    ),
    Fault(
        id="moss-compiled-drops-levels",
        models=("moss_audio",),
        releases="0.24.0 to 0.33.0",
        symptom="under torch.compile, the default, the levels are ignored, at one stage too: **wrong answers** for "
        "every sound",
        upstream="none",
        cure="the levels lie in zero-backed buffers, so that the one trace of the model sees them",
        until="a release that gives the inner model levels in each batch",
    ),
    Fault(
        id="moss-audio-off",
        models=("moss_audio",),
        releases="0.24.0 to 0.32.0",
        symptom="audio=0: `Tensor.item() cannot be called on meta tensors` while the tower is built",
        upstream="fixed 0.33.0",
        cure="the constructor reads its sizes from tensors on the CPU",
        until="0.33.0",
    ),
    Fault(
        id="moss-levels-without-tower",
        models=("moss_audio",),
        releases="0.24.0 to 0.33.0",
        symptom="audio=0: levels are still declared, and zeros sent over every boundary",
        upstream="none",
        cure="no tower, no levels",
        until="a release that asks for the tower first",
    ),
    Fault(
        id="step3-residual",
        models=("step3_text",),
        releases="0.17.0 to 0.22.1",
        symptom="PP>1: `KeyError: 'residual'`: the factory declares hidden_states only",
        upstream="#37543, PR 37622; fixed 0.23.0",
        cure="none needed where this package is tested (0.32.0): the drop-in is upstream's own class",
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
