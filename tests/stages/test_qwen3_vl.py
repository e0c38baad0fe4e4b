"""Ring 2: every stage of the real model in one process, bit-equal to one stage of upstream's class."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Upstream

from tests.stages.pipeline import (
    MAX_TOKENS,
    RECEIVE,
    Batch,
    Count,
    Model,
    Pipeline,
    engine_config,
    picture_batch,
    splits,
    start_distributed,
    text_batch,
)
from vllm_pp_fixes.commands.checkpoint import tiny
from vllm_pp_fixes.deepstack import key
from vllm_pp_fixes.models.qwen3_vl import Qwen3VLForConditionalGeneration as Ours
from vllm_pp_fixes.stages import stages

LAYERS = 6
SPLITS = [split for count in (2, 3, 6) for split in splits(LAYERS, count)]
NO_TOWER = {"image": 0, "video": 0}
REFUSAL = "start_layer should be greater than or equal to len"

Build = Callable[..., Pipeline]


@pytest.fixture(scope="session")
def build(checkpoints: Path) -> Build:
    """Builds a pipeline; the stages of one process share their models across tests."""
    start_distributed()

    @cache
    def model(cls: type, levels: int, tower: bool, split: tuple[int, ...], rank: int, layers: int) -> Model:
        path = tiny("qwen3_vl", checkpoints, levels=levels, layers=layers)
        return Model(cls, engine_config(str(path), None if tower else NO_TOWER), split, rank)

    def pipeline(
        split: tuple[int, ...], *, cls: type = Ours, levels: int = 3, tower: bool = True, layers: int = LAYERS
    ) -> Pipeline:
        return Pipeline([model(cls, levels, tower, split, rank, layers) for rank in range(len(split))])

    return pipeline


def batches(config: VllmConfig, tower: bool) -> list[Batch]:
    """With a picture, without (shorter and longer: stale levels would show), with another one."""
    if not tower:
        return [text_batch(30, 1), text_batch(12, 2)]
    return [
        picture_batch(config, 1),
        text_batch(12, 2),
        text_batch(60, 3),
        picture_batch(config, 4, 64, 128),
        picture_batch(config, 5, 32, 32),
    ]


def answers(pipeline: Pipeline, tower: bool = True, runner: str = "V1") -> list[torch.Tensor]:
    return [pipeline.run(batch, runner) for batch in batches(pipeline.stages[0].config, tower)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("runner", RECEIVE)
@pytest.mark.parametrize(("levels", "tower"), [(1, True), (2, True), (3, True), (4, True), (3, False)])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "+".join(map(str, split)))
def test_every_split_answers_as_one_stage(
    build: Build, split: tuple[int, ...], levels: int, tower: bool, runner: str
) -> None:
    reference = answers(build((LAYERS,), cls=Upstream, levels=levels, tower=tower), tower)
    pipeline = build(split, levels=levels, tower=tower)
    assert equal(answers(pipeline, tower, runner), reference)
    for sent, stage, expected in zip(
        pipeline.sent, pipeline.stages[1:], stages(split, levels if tower else 0)[1:], strict=True
    ):
        assert stage.buffers is not None
        assert set(sent) == set(stage.buffers.tensors) == {"hidden_states", "residual", *map(key, expected.received)}


@pytest.mark.parametrize("level", [1, 2])
def test_a_lost_level_would_be_noticed(build: Build, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = build((1, 5))
    reference = answers(build((LAYERS,), cls=Upstream))
    copy = RECEIVE["V1"]

    def lose(buffers, sent, tokens):
        return copy(buffers, {**sent, key(level): torch.zeros_like(sent[key(level)])}, tokens)

    monkeypatch.setitem(RECEIVE, "V1", lose)
    lost = answers(pipeline)
    differences = [(a - b).abs().max().item() for a, b in zip(lost, reference, strict=True)]
    assert [d > 0.1 for d in differences] == [True, False, False, True, True], "pictures change, text does not"


@pytest.mark.parametrize("tower", [True, False])
def test_upstream_refuses(build: Build, tower: bool) -> None:
    """split-refused, split-refused-towerless: what the drop-in is for."""
    with pytest.raises(AssertionError, match=REFUSAL):
        build((1, 5), cls=Upstream, tower=tower)


@pytest.mark.parametrize("split", [(3, 3), (4, 2)])
def test_where_upstream_is_right_nothing_more_is_sent(build: Build, split: tuple[int, ...]) -> None:
    theirs, ours = build(split, cls=Upstream), build(split)
    assert equal(answers(theirs), answers(ours))
    assert [list(sent) for sent in ours.sent] == [list(sent) for sent in theirs.sent] == [["hidden_states", "residual"]]


def test_a_level_beyond_the_last_layer_is_not_sent(build: Build) -> None:
    pipeline = build((1, 1), levels=4, layers=2)
    assert equal(answers(pipeline), answers(build((2,), cls=Upstream, levels=4, layers=2)))
    assert list(pipeline.sent[0]) == ["hidden_states", "residual", key(1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factory_declares_shape_dtype_device(build: Build, dtype: torch.dtype) -> None:
    _, middle, last = build((1, 1, 4)).stages
    for stage, received in ((middle, (1, 2)), (last, (2,))):
        declared = stage.model.make_empty_intermediate_tensors(7, dtype, torch.device("cpu"))
        assert list(declared.tensors) == ["hidden_states", "residual", *map(key, received)]
        for tensor in declared.tensors.values():
            assert (tensor.shape, tensor.dtype, tensor.device.type) == ((7, 64), dtype, "cpu")
            assert not tensor.any()


def test_buffers_exist_on_the_first_stage_with_a_tower_only(build: Build) -> None:
    first, last = (stage.model for stage in build((1, 5)).stages)
    assert [tuple(buffer.shape) for buffer in first.deepstack_input_embeds] == [(MAX_TOKENS, 64)] * 3
    assert last.deepstack_input_embeds == []
    assert not any(getattr(s.model, "deepstack_input_embeds", None) for s in build((1, 5), tower=False).stages)


def test_what_a_stage_sends_outlives_its_buffers(build: Build) -> None:
    """A send may still be under way when the next step writes into the buffers."""
    first, middle, _ = build((1, 1, 4)).stages
    batch = batches(first.config, tower=True)[0]
    sent = first.step(None, batch.positions, None, first.embed(batch.input_ids, batch.pixels)).tensors
    kept = {name: tensor.clone() for name, tensor in sent.items()}
    assert kept[key(2)].any()
    for buffer in first.model.deepstack_input_embeds:
        buffer.fill_(7)
    assert all(torch.equal(sent[name], kept[name]) for name in sent)
    first.model.deepstack_input_embeds_num_tokens = MAX_TOKENS
    first.model._clear_deepstack_input_embeds(MAX_TOKENS)

    received = RECEIVE["V2"](middle.buffers, sent, batch.input_ids.numel())
    forwarded = middle.step(None, batch.positions, received, None)[key(2)]
    assert torch.equal(forwarded, kept[key(2)])
    middle.buffers[key(2)].fill_(7)
    assert torch.equal(forwarded, kept[key(2)])


def test_levels_are_dropped_when_no_forward_ran_between(build: Build) -> None:
    """A replayed full CUDA graph does not run `forward`; the next batch must still find clean buffers."""

    def left_behind(cls: type) -> bool:
        first = build((LAYERS,), cls=cls).stages[0]
        with_picture, without = batches(first.config, tower=True)[:2]
        first.embed(with_picture.input_ids, with_picture.pixels)
        assert any(buffer.any() for buffer in first.model.deepstack_input_embeds)
        first.embed(without.input_ids, without.pixels)
        stale = any(bool(buffer.any()) for buffer in first.model.deepstack_input_embeds)
        first.model._clear_deepstack_input_embeds(MAX_TOKENS)
        return stale

    assert left_behind(Upstream)
    assert not left_behind(Ours)


def test_one_stage_costs_no_operation_more(build: Build) -> None:
    counted = []
    for cls in (Upstream, Ours):
        stage = build((LAYERS,), cls=cls).stages[0]
        for batch in batches(stage.config, tower=True)[:2]:
            with Count() as embed:
                embeds = stage.embed(batch.input_ids, batch.pixels)
            with Count() as forward:
                stage.step(None, batch.positions, None, embeds)
            counted.append((embed.operations, forward.operations))
    assert counted[:2] == counted[2:]
    assert len(counted[0][1]) > 100
