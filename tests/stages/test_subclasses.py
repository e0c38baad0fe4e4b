"""Models that inherit from a patched one under another name: the overrides go below what they make of its output."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.models.registry import ModelRegistry

import vllm_pp_fixes
from tests.conftest import Checkpoint, edited
from tests.installed import TREE
from tests.models import ROWS
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, answers, batches, equal
from tests.stages.pipeline import MEDIA_TOKEN, Model, Pipeline, Weights, engine_config, start_distributed
from vllm_pp_fixes.registry import MODELS, UNTOUCHED
from vllm_pp_fixes.runtime.compose import upstream_of
from vllm_pp_fixes.runtime.deepstack import DeepStackOverStages

OMNI = "qwen3_omni_moe_thinker"


def with_projection(weights: Weights) -> Weights:
    projection = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    return {**weights, "custom_text_proj.weight": projection}


def flat_names(weights: Weights) -> Weights:
    return {re.sub(r"^model\.(language_model|visual)\.", "", name): weight for name, weight in weights.items()}


@dataclass(frozen=True)
class Case:
    """A subclass, run on the tiny checkpoint of the model_type that it inherits from."""

    class_name: str
    base: str = "qwen3_vl"
    publish: Callable[[Weights], Weights] = lambda weights: weights
    """What its own checkpoints hold instead."""
    engine: dict[str, Any] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)


HEAD = {"hidden_size": 64, "width": 32, "routing_layers": 1, "layers": 1, "heads": 2, "feedforward": 64}
CASES = {
    "colqwen3": Case(
        "ColQwen3Model",
        publish=with_projection,
        engine={"runner": "pooling", "hf_overrides": {"architectures": ["ColQwen3"], "embed_dim": 32}},
    ),
    "cosmos3": Case("Cosmos3ForConditionalGeneration", publish=flat_names),
    "clef_omni": Case("ClefOmniForJointSchema", OMNI, configuration={"joint_head_config": HEAD}),
}
CASES = {module: case for module, case in CASES.items() if TREE.has(module)}


def build(checkpoint: Checkpoint, module: str, package: str, split: tuple[int, ...]) -> Pipeline:
    start_distributed()
    case = CASES[module]
    cls = getattr(import_module(f"{package}.{module}"), case.class_name)

    def stage(rank: int) -> Model:
        folder = checkpoint(case.base)
        config = engine_config(str(edited(folder) if package == UPSTREAM else folder), **case.engine)
        for name, value in case.configuration.items():
            setattr(config.model_config.hf_config, name, value)
        return Model(cls, config, split, rank, case.publish)

    return Pipeline([stage(rank) for rank in range(len(split))])


@pytest.mark.parametrize("split", [(1, 5), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("module", CASES)
def test_split(checkpoint: Checkpoint, module: str, split: tuple[int, ...]) -> None:
    asked = batches(CASES[module].base)
    reference = answers(build(checkpoint, module, UPSTREAM, (LAYERS,)), asked)
    assert equal(answers(build(checkpoint, module, OURS, split), asked), reference)
    if module == "clef_omni":
        assert not equal(answers(build(checkpoint, module, UPSTREAM, split), asked), reference)
    else:
        with pytest.raises((AssertionError, AttributeError), match="start_layer"):
            build(checkpoint, module, UPSTREAM, split)


def upstream_class(architecture: str) -> type:
    return ModelRegistry.models[architecture].load_model_cls()


@pytest.mark.parametrize("module", CASES)
def test_the_overrides_go_directly_above_the_class_at_fault(module: str) -> None:
    ours = getattr(vllm_pp_fixes, CASES[module].class_name)
    mro = ours.__mro__
    base = CASES[module].base
    assert upstream_of(ours) is getattr(import_module(f"{UPSTREAM}.{base}"), ROWS[base].class_name)
    assert mro.index(DeepStackOverStages) > 1
    assert ours.__name__ == mro[1].__name__
    assert mro[1].__module__ == f"{UPSTREAM}.{module}"


def test_every_architecture_that_inherits_is_served_or_named() -> None:
    """No silent gap: whatever in vLLM's registry inherits from or is a patched class is in the registry here."""
    here = {module: model for module, model in MODELS.items() if TREE.has(module)}
    served = {architecture for model in here.values() for architecture in model.architectures}
    patched = tuple(getattr(import_module(f"{UPSTREAM}.{module}"), here[module].class_name) for module in here)
    inheriting = set()
    for architecture, entry in ModelRegistry.models.items():
        if not re.search(r"qwen3|qwen_?4|intern_?s|cosmos|clef|col|step|moss|bailing", f"{entry}", re.I):
            continue  # the other hundreds cannot inherit without importing one of these
        try:
            cls = upstream_class(architecture)
        except Exception:
            continue  # needs a device or a library that is not here
        if issubclass(cls, patched):
            inheriting.add(architecture)
    assert inheriting - served <= set(UNTOUCHED)
    assert {"Qwen3VLForConditionalGeneration", "Step3TextForCausalLM"} <= served & set(ModelRegistry.models)


def test_step3_vl_builds_its_text_model_through_the_registry(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Text over the stages of Step3-VL: hidden states and residual are declared and sent, and nothing else."""
    start_distributed()
    text = checkpoint("step3_text")
    shutil.copytree(text, tmp_path, dirs_exist_ok=True)
    vision = {"hidden_size": 64, "intermediate_size": 128, "output_hidden_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    configuration = {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "dtype": "float32",
        "text_config": json.loads((text / "config.json").read_text()),
        "vision_config": vision,
        "image_token_id": MEDIA_TOKEN,
    }
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    cls = upstream_class("Step3VLForConditionalGeneration")
    asked = batches("step3_text")

    def pipeline(*split: int) -> Pipeline:
        return Pipeline([Model(cls, engine_config(str(tmp_path)), split, rank) for rank in range(len(split))])

    reference = answers(pipeline(LAYERS), asked)
    for split in ((1, 5), (1, 1, 4)):
        stages = pipeline(*split)
        assert equal(answers(stages, asked), reference)
        assert all(set(sent) == {"hidden_states", "residual"} for sent in stages.sent)
        for stage in stages.stages:
            assert type(stage.model.language_model) is vllm_pp_fixes.Step3TextForCausalLM
