"""`plan` against what stages really hold: bytes of parameters and buffers, counted on upstream's classes and ours."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from vllm.distributed import parallel_state

from tests.conftest import Checkpoint
from tests.models import ROWS
from tests.stages import pipeline as ring
from tests.stages.conftest import OURS, UPSTREAM, model_class
from tests.stages.device import DTYPE
from tests.stages.pipeline import MAX_TOKENS, Group, Model, engine_config, start_distributed
from vllm_pp_fixes.cli.configuration import read
from vllm_pp_fixes.planning.headers import of_folder
from vllm_pp_fixes.planning.stages import Pipeline
from vllm_pp_fixes.planning.weights import Model as Sizes
from vllm_pp_fixes.planning.weights import weigh
from vllm_pp_fixes.runtime.towers import KEEP

each = pytest.mark.parametrize("model_type", ROWS)


def planned(
    folder: Path, stages: int, *, ours: bool = True, towers_first: bool = True, tp: int = 1, dtype: torch.dtype = DTYPE
) -> Pipeline:
    _, config = read(str(folder))
    sizes = Sizes.read(config, tp, str(dtype).removeprefix("torch."))
    weights = weigh(of_folder(folder), sizes, tp)
    return Pipeline(sizes, weights, stages, (), MAX_TOKENS, ours, towers_first, MAX_TOKENS, 4, 16, 0, 1.0)


def stage_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def buffer_bytes(stage: Model) -> int:
    """The text model's rotary positions, the levels that the first stage keeps, what a later one receives into."""
    model = stage.model
    kept = [
        b for name, b in model.named_buffers() if ".self_attn.rotary_emb." in name or name.startswith("level_buffer_")
    ]
    if isinstance(levels := getattr(model, "deepstack_input_embeds", None), list):
        kept += levels  # upstream's; ours are registered too
    received = [] if stage.buffers is None else [tensor for _, tensor in stage.buffers.items()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in (*kept, *received)}.values())


@pytest.fixture(scope="module")
def alive() -> list[Model]:
    """Stages that are not freed: vLLM remembers what is missing of a model by its address."""
    return []


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave weights as they were loaded: a CPU packs them into tensors that are no parameters."""
    start_distributed()
    monkeypatch.setattr(ring, "process_weights_after_loading", lambda *_: None)


@each
@pytest.mark.parametrize("split", [(3, 3), (1, 5), (4, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("package", "keep"), [(OURS, ""), (OURS, "1"), (UPSTREAM, "")], ids=["ours", "kept", "upstream"]
)
@pytest.mark.usefixtures("unpacked")
def test_bytes_of_each_stage(
    model_type: str,
    split: tuple[int, ...],
    package: str,
    keep: str,
    checkpoint: Checkpoint,
    alive: list[Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if package == UPSTREAM and split[0] < ROWS[model_type].levels and model_type.startswith("qwen3_vl"):
        pytest.skip("upstream refuses the split")
    monkeypatch.setenv(KEEP, keep)
    folder = checkpoint(model_type)
    ours = package == OURS
    plan = planned(folder, len(split), ours=ours, towers_first=ours and not keep)
    for rank, held in enumerate(plan.over(split)):
        stage = Model(model_class(model_type, package), engine_config(str(folder)), split, rank)
        alive.append(stage)
        assert sum(size for part, size in held.parts.items() if part != "buffers") == stage_bytes(stage.model), rank
        if ours:
            assert held.parts["buffers"] == buffer_bytes(stage), rank


@dataclass
class Half(Group):
    """The first of two GPUs that share a stage, for constructors: they ask for its size and its rank."""

    def __getattr__(self, name: str) -> object:
        return getattr(parallel_state.get_world_group(), name)


@each
@pytest.mark.usefixtures("unpacked")
def test_bytes_on_each_of_two_gpus(model_type: str, checkpoint: Checkpoint, alive: list[Model]) -> None:
    folder = checkpoint(model_type)
    plan = planned(folder, 2, tp=2)
    with (
        mock.patch.object(parallel_state, "_TP", Half(0, 2)),
        mock.patch.object(model_class(model_type, OURS), "load_weights", return_value=set()),
    ):
        stages = [Model(model_class(model_type, OURS), engine_config(str(folder)), (2, 4), rank) for rank in range(2)]
    alive += stages
    for held, stage in zip(plan.over([2, 4]), stages, strict=True):
        assert sum(size for part, size in held.parts.items() if part != "buffers") == stage_bytes(stage.model)


@pytest.mark.usefixtures("unpacked")
def test_bytes_of_tied_embeddings(qwen3_vl: Path, alive: list[Model], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen3_vl, tmp_path / "tied"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    for rank, held in enumerate(planned(folder, 3).over((2, 2, 2))):
        stage = Model(model_class("qwen3_vl", OURS), engine_config(str(folder)), (2, 2, 2), rank)
        alive.append(stage)
        assert sum(size for part, size in held.parts.items() if part != "buffers") == stage_bytes(stage.model), rank
