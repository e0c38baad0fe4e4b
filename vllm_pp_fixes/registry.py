"""Which architecture of vLLM's is served by which drop-in, and which ones are left alone, and why.

A model is one entry here and one file in `models/`; what is exported, the README's table and the messages follow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A module of vLLM's models for which there is a drop-in of the same name in `models/`."""

    class_name: str
    architectures: tuple[str, ...]
    """Names in vLLM's registry that the class serves."""
    inherits: str = ""
    """Module of the model that it inherits from, and with it that model's faults; empty where there is none."""


MODELS = {
    "qwen3_vl": Model("Qwen3VLForConditionalGeneration", ("Qwen3VLForConditionalGeneration",)),
    "qwen3_vl_moe": Model("Qwen3VLMoeForConditionalGeneration", ("Qwen3VLMoeForConditionalGeneration",)),
    "qwen3_omni_moe_thinker": Model(
        "Qwen3OmniMoeThinkerForConditionalGeneration", ("Qwen3OmniMoeForConditionalGeneration",)
    ),
    "moss_audio": Model("MossAudioModel", ("MossAudioModel",)),
    "step3_text": Model("Step3TextForCausalLM", ("Step3TextForCausalLM",)),
    "colqwen3": Model("ColQwen3Model", ("ColQwen3", "OpsColQwen3Model", "Qwen3VLNemotronEmbedModel"), "qwen3_vl"),
    "cosmos3": Model("Cosmos3ForConditionalGeneration", ("Cosmos3ForConditionalGeneration",), "qwen3_vl"),
    "clef_omni": Model("ClefOmniForJointSchema", ("ClefOmniForJointSchema",), "qwen3_omni_moe_thinker"),
}
"""The models by the name of their module."""

ARCHITECTURES = {architecture: module for module, model in MODELS.items() for architecture in model.architectures}
"""The module that serves each architecture."""

UNTOUCHED = {
    "ColQwen3_5": "passes no DeepStack levels",
    "Qwen3_5ForConditionalGeneration": "passes no DeepStack levels",
    "Qwen3_5MoeForConditionalGeneration": "passes no DeepStack levels",
    "ClefFlashForJointSchema": "a Qwen3.5: passes no DeepStack levels",
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
