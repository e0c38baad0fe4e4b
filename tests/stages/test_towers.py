"""Towers stand on the first stage only: counted in bytes, upstream against ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.config.load import LoadConfig
from vllm.lora.utils import get_supported_lora_modules
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import ShardedStateLoader

from tests.conftest import Checkpoint
from tests.installed import FAULTS
from tests.models import ROWS
from tests.stages import pipeline
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, Build, OneStage, answers, batches, equal, model_class
from tests.stages.pipeline import Model, Pipeline, engine_config, start_distributed
from vllm_pp_fixes.runtime.towers import KEEP

WITH_TOWERS = [model_type for model_type in FAULTS if ROWS[model_type].no_tower]
each = pytest.mark.parametrize("model_type", WITH_TOWERS)


def tower_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers of all that is not the text model, the buffers of levels aside."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.nbytes for name, t in held if not name.startswith(("language_model.", "level_buffer_")))


def named_towers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return [(name, layer) for name, layer in model.named_modules() if not name.startswith("language_model.")]


@each
def test_no_byte_of_a_tower_on_later_stages(model_type: str, build: Build) -> None:
    if "start-layer" in FAULTS[model_type]:
        pytest.skip("no later stage of upstream's can be built here")
    theirs, ours = (build((3, 3), package, model_type).stages for package in (UPSTREAM, OURS))
    first, later = (tower_bytes(stage.model) for stage in theirs)
    assert first == later > 10_000, "upstream leaves them out itself: is the cure still needed?"
    assert [tower_bytes(stage.model) for stage in ours] == [first, 0]
    config = ours[1].config
    assert config.model_config.multimodal_config.skip_mm_profiling
    assert not ours[0].config.model_config.multimodal_config.skip_mm_profiling


@each
def test_an_adapter_for_a_tower_is_taken_on_every_stage(model_type: str, build: Build) -> None:
    """An adapter is refused with weights for layers of a name that no layer of the stage has."""
    (whole,), stages = (build(split, OURS, model_type).stages for split in ((LAYERS,), (3, 3)))
    wanted = {*get_supported_lora_modules(whole.model)}
    tower = {name.rpartition(".")[2] for name, layer in named_towers(whole.model) if isinstance(layer, LinearBase)}
    assert tower - {*get_supported_lora_modules(whole.model.language_model)}
    assert tower <= {*get_supported_lora_modules(stages[1].model)} <= wanted


@each
def test_sharded_state_saved_and_loaded(
    model_type: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_format="sharded_state"` wants each parameter of the stage in its file, and no other."""
    # On the CPU it packs weights away, which then cannot be saved, at one stage of upstream's neither.
    monkeypatch.setattr(pipeline, "process_weights_after_loading", lambda *_: None)
    start_distributed()
    folder, cls = str(checkpoint(model_type)), model_class(model_type, OURS)
    saved = Model(cls, engine_config(folder), (1, 5), 1)
    blank = Model(cls, engine_config(folder), (1, 5), 1, lambda weights: {n: w * 0 for n, w in weights.items()})
    blank.config.model_config.model = str(tmp_path)
    with saved.on_stage():
        ShardedStateLoader.save_model(saved.model, str(tmp_path))
        ShardedStateLoader(LoadConfig(load_format="sharded_state")).load_weights(blank.model, blank.config.model_config)
    wanted, loaded = saved.model.state_dict(), blank.model.state_dict()
    assert wanted.keys() == loaded.keys()
    assert not any("visual" in name or "audio" in name for name in wanted)
    assert all(torch.equal(wanted[name], loaded[name]) for name in wanted)
    assert any(weight.any() for weight in loaded.values())


@each
@pytest.mark.parametrize("keep", ["", "1"], ids=["left out", "kept"])
def test_answers_are_those_of_one_stage(
    model_type: str, keep: str, checkpoint: Checkpoint, one_stage: OneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEEP, keep)
    start_distributed()
    config = engine_config(str(checkpoint(model_type)))
    stages = [
        Model(model_class(model_type, OURS), engine_config(config.model_config.model), (1, 5), n) for n in range(2)
    ]
    assert equal(answers(Pipeline(stages), batches(model_type)), one_stage(model_type))
    first, later = (tower_bytes(stage.model) for stage in stages)
    assert later == (first if keep else 0)
    assert ("no tower" in stages[1].model.exchange()) == (not keep)
