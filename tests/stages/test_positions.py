"""M-RoPE positions over stages: later ones, which are given those of plain text, run on the first one's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.executor.abstract import Executor

from tests.conftest import Checkpoint, edited
from tests.installed import FAULTS
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, batches, equal, model_class
from tests.stages.device import DEVICE, DTYPE
from tests.stages.pipeline import RECEIVE, Group, Model, Pipeline, engine_config, start_distributed, text_batch
from vllm_pp_fixes import faults
from vllm_pp_fixes.faults import pruned_positions, ray_strips_media
from vllm_pp_fixes.runtime.agreement import StagesDisagree
from vllm_pp_fixes.runtime.compose import drop_in
from vllm_pp_fixes.runtime.deepstack import DeepStackOverStages, key
from vllm_pp_fixes.runtime.positions import KEY, PositionsOverStages

MODELS = [model for model in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker") if model in FAULTS]
RAY = "vllm.v1.executor.ray_executor"
Asked = list[tuple[Any, torch.Tensor]]
pytestmark = pytest.mark.skipif(
    "ray-strips-media" not in FAULTS["qwen3_vl"], reason="this release has no compiled-graph executor"
)


def asked(model_type: str) -> Asked:
    """Batches, and positions for them as media give them: each row on its own; at last a step of one token."""
    made: Asked = []
    for seed, batch in enumerate([*batches(model_type), text_batch(1, 6)]):
        tokens = batch.input_ids.numel()
        steps = torch.randint(0, 2, (3, tokens), generator=torch.Generator().manual_seed(seed))
        made.append((batch, steps.cumsum(1).to(DEVICE)))
    return made


def answers(pipeline: Pipeline, model_type: str, runner: str = "V1") -> list[torch.Tensor]:
    return [pipeline.run(batch, runner, positions) for batch, positions in asked(model_type)]


@pytest.fixture
def under_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is one that is made of Ray's compiled graph."""
    executor = type("Own", (type("RayDistributedExecutor", (Executor,), {"__module__": RAY}),), {})
    monkeypatch.setattr("vllm.v1.executor.abstract.Executor.get_class", staticmethod(lambda config: executor))


def pipeline(cls: type, checkpoint: Checkpoint, model_type: str, *split: int, **more: Any) -> Pipeline:
    start_distributed()
    folder = checkpoint(model_type)
    if cls is model_class(model_type, UPSTREAM):
        folder = edited(folder)
    return Pipeline([Model(cls, engine_config(str(folder), **more), split, rank) for rank in range(len(split))])


@pytest.mark.usefixtures("under_ray")
@pytest.mark.parametrize("model_type", MODELS)
def test_every_stage_runs_on_the_first_ones_positions(
    model_type: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model_class(model_type, OURS)
    one = answers(pipeline(model_class(model_type, UPSTREAM), checkpoint, model_type, LAYERS), model_type)
    for split in ((1, 5), (3, 3), (1, 1, 4)):
        made = pipeline(ours, checkpoint, model_type, *split)
        for runner in RECEIVE:
            assert equal(answers(made, model_type, runner), one), (split, runner)
            for sent, stage in zip(made.sent, made.stages[1:], strict=True):
                assert set(sent) == set(stage.buffers.tensors)
                assert sent[KEY].shape == (1, 3)
                assert (sent[KEY].dtype, sent[KEY].is_contiguous()) == (torch.int64, True)
        assert key(2) in made.sent[0] or split[0] > 2
    monkeypatch.setattr(ray_strips_media, "compiled_graph", lambda config: False)
    for cls in (ours, *([] if "start-layer" in FAULTS[model_type] else [model_class(model_type, UPSTREAM)])):
        without = pipeline(cls, checkpoint, model_type, 3, 3)
        differs = [(a - b).abs().max().item() > 0.1 for a, b in zip(answers(without, model_type), one, strict=True)]
        # The position of a token alone moves nothing.
        assert differs == [batch.input_ids.numel() > 1 for batch, _ in asked(model_type)]
        assert KEY not in without.sent[0]


@pytest.mark.usefixtures("under_ray")
@pytest.mark.skipif("start-layer" in FAULTS["qwen3_vl"], reason="upstream starts no later stage")
def test_alone_over_a_class_that_has_no_other_fault(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a tree whose other faults are patched."""
    monkeypatch.setattr(faults, "FAULTS", (ray_strips_media.FAULT, pruned_positions.FAULT))
    upstream = model_class("qwen3_vl", UPSTREAM)
    alone = drop_in(upstream, __name__)
    assert not issubclass(alone, DeepStackOverStages)
    monkeypatch.undo()
    monkeypatch.setattr(ray_strips_media, "compiled_graph", lambda config: True)
    folder = edited(checkpoint("qwen3_vl"))
    start_distributed()
    config = engine_config(str(folder))
    made = Pipeline([Model(alone, config, (3, 3), rank) for rank in range(2)])
    assert equal(answers(made, "qwen3_vl"), answers(pipeline(upstream, checkpoint, "qwen3_vl", LAYERS), "qwen3_vl"))


@pytest.mark.usefixtures("under_ray")
def test_positions_are_written_where_the_runner_keeps_them(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph reads them at the address at which it was captured; a draft reads the runner's buffer."""
    first, last = pipeline(model_class("qwen3_vl", OURS), checkpoint, "qwen3_vl", 1, 5).stages
    buffer, theirs = torch.zeros(3, 9, dtype=torch.int64, device=DEVICE), torch.arange(12, device=DEVICE).reshape(3, 4)
    sent = first.step(None, theirs, None, torch.zeros(4, 64, dtype=DTYPE, device=DEVICE))
    assert sent[KEY].data_ptr() != theirs.data_ptr()
    seen: list[int] = []
    inner = last.model.language_model.model
    forward = inner.forward

    def spied(**given: Any) -> Any:
        seen.append(given["positions"].data_ptr())
        return forward(**given)

    monkeypatch.setattr(inner, "forward", spied)
    last.step(None, buffer[:, :4], sent, None)
    assert seen == [buffer.data_ptr()]
    assert torch.equal(buffer[:, :4], theirs)
    assert not buffer[:, 4:].any()


def test_it_stands_above_what_carries_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the faults: there later stages do not call upstream's forward."""
    for order in (faults.FAULTS, faults.FAULTS[::-1]):
        monkeypatch.setattr(faults, "FAULTS", order)
        mro = drop_in(model_class("qwen3_vl", UPSTREAM), __name__).__mro__
        assert mro.index(PositionsOverStages) < mro.index(DeepStackOverStages)


def test_pruned_video_needs_them(checkpoint: Checkpoint) -> None:
    cls = model_class("qwen3_vl", OURS)
    first, last = pipeline(cls, checkpoint, "qwen3_vl", 1, 5, video_pruning_rate=0.5).stages
    assert KEY in last.buffers.tensors
    assert first.model.is_multimodal_pruning_enabled
    assert not last.model.is_multimodal_pruning_enabled, "its memory profile embeds, and it has no text embeddings"
    for more in ({"limits": {"video": 0}, "video_pruning_rate": 0.5}, {"video_pruning_rate": 0.0}, {}):
        stages = pipeline(cls, checkpoint, "qwen3_vl", 1, 5, **more).stages
        assert KEY not in stages[1].buffers.tensors


def test_stages_that_do_not_agree_find_out(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that differs between hosts: one stage takes the executor for another."""
    start_distributed()
    monkeypatch.setattr(Group, "ranks", [15, 16], raising=False)
    config = engine_config(str(checkpoint("qwen3_vl")))
    cls = model_class("qwen3_vl", OURS)
    first = Model(cls, config, (3, 3), 0)
    monkeypatch.setattr(ray_strips_media, "compiled_graph", lambda config: True)
    last = Model(cls, config, (3, 3), 1)
    positions = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    first.step(None, positions, None, torch.zeros(4, 64, dtype=DTYPE, device=DEVICE))
    with pytest.raises(StagesDisagree, match=r"rows of M-RoPE positions \[0, 1, 2\] with stage 1, .* forwarded \[\]"):
        last.step(None, positions, last.buffers[:4], None)


def test_which_executors_are_rays_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_graph(backend: object) -> bool:
        config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
        return ray_strips_media.compiled_graph(config)

    assert [compiled_graph(name) for name in ("mp", "uni", "external_launcher")] == [False] * 3
    assert compiled_graph("no.such.Executor"), "in doubt they are sent"
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert compiled_graph("ray")
    v2 = ModuleType(f"{RAY}_v2")
    v2.RayExecutorV2 = type("RayExecutorV2", (), {"__module__": v2.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, v2.__name__, v2)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
    import vllm.envs

    if "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in vllm.envs.environment_variables:
        assert not compiled_graph("ray")
