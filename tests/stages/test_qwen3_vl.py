"""Ring 2: what a stage declares, holds and sends, and what it costs; on Qwen3-VL, whose pieces all models share."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from vllm.forward_context import set_forward_context

from tests.installed import FAULTS
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, Build, answers, batches, equal
from tests.stages.device import DEVICE, DTYPE
from tests.stages.pipeline import (
    MAX_TOKENS,
    RECEIVE,
    Batch,
    Count,
    Group,
    Model,
    engine_config,
    start_distributed,
    text_batch,
)
from vllm_pp_fixes.models.qwen3_vl import Qwen3VLForConditionalGeneration as Ours
from vllm_pp_fixes.runtime.agreement import StagesDisagree
from vllm_pp_fixes.runtime.deepstack import key

ASKED = batches("qwen3_vl")


def zeros(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, 64, dtype=DTYPE, device=DEVICE)


def wipe(stage: Model) -> None:
    """Leave no level to the tests that share the stage."""
    for buffer in stage.model.deepstack_input_embeds:
        buffer.zero_()
    stage.model.deepstack_input_embeds_num_tokens = 0


def test_a_token_attends_to_those_before_it(build: Build) -> None:
    """Attention is real: without a slot for each key it would look at zeros, and each token stand alone."""
    one = text_batch(12, 2)
    other = Batch(one.input_ids.clone())
    other.input_ids[0] += 1
    a, b = answers(build((1, 5)), [one, other])
    assert not torch.equal(a[-1], b[-1])


@pytest.mark.skipif("start-layer" in FAULTS["qwen3_vl"], reason="upstream is right nowhere")
@pytest.mark.parametrize("split", [(3, 3), (4, 2)])
def test_where_upstream_is_right_nothing_more_is_sent(build: Build, split: tuple[int, ...]) -> None:
    theirs, ours = build(split, UPSTREAM), build(split)
    assert equal(answers(theirs, ASKED), answers(ours, ASKED))
    assert [list(sent) for sent in ours.sent] == [list(sent) for sent in theirs.sent] == [["hidden_states", "residual"]]


def test_a_level_beyond_the_last_layer_is_not_sent(build: Build) -> None:
    pipeline = build((1, 1), levels=4, layers=2)
    assert equal(answers(pipeline, ASKED), answers(build((2,), UPSTREAM, levels=4, layers=2), ASKED))
    assert list(pipeline.sent[0]) == ["hidden_states", "residual", key(1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factory_declares_shape_dtype_device(build: Build, dtype: torch.dtype) -> None:
    _, middle, last = build((1, 1, 4)).stages
    for stage, received in ((middle, (1, 2)), (last, (2,))):
        declared = stage.model.make_empty_intermediate_tensors(7, dtype, DEVICE)
        assert list(declared.tensors) == ["hidden_states", "residual", *map(key, received)]
        for tensor in declared.tensors.values():
            assert (tensor.shape, tensor.dtype, tensor.device.type) == ((7, 64), dtype, DEVICE.type)
            assert not tensor.any()


def test_what_a_stage_sends_outlives_its_buffers(build: Build) -> None:
    """A send may still be under way when the next step writes into the buffers."""
    first, middle, _ = build((1, 1, 4)).stages
    batch, positions = ASKED[0], first.positions(ASKED[0].input_ids.numel())
    sent = first.step(None, positions, None, first.embed(batch)).tensors
    kept = {name: tensor.clone() for name, tensor in sent.items()}
    assert kept[key(2)].any()
    for buffer in first.model.deepstack_input_embeds:
        buffer.fill_(7)
    assert all(torch.equal(sent[name], kept[name]) for name in sent)
    wipe(first)

    received = RECEIVE["V2"](middle.buffers, sent, batch.input_ids.numel())
    forwarded = middle.step(None, positions, received, None)[key(2)]
    assert torch.equal(forwarded, kept[key(2)])
    middle.buffers[key(2)].fill_(7)
    assert torch.equal(forwarded, kept[key(2)])


@pytest.mark.parametrize("dummy", [False, True], ids=["nothing between", "a dummy batch between"])
def test_levels_of_a_replayed_graph_are_dropped(build: Build, dummy: bool) -> None:
    """A replayed full CUDA graph does not run `forward`; the next batch must still find clean buffers.

    A dummy batch of one token, run plainly between the two, clears its own row only.
    """

    def left_behind(package: str) -> bool:
        (first,) = build((LAYERS,), package).stages
        first.embed(ASKED[0])
        assert any(buffer.any() for buffer in first.model.deepstack_input_embeds)
        if dummy:
            first.step(None, first.positions(1), None, zeros(1))
        first.embed(ASKED[1])
        stale = any(bool(buffer.any()) for buffer in first.model.deepstack_input_embeds)
        wipe(first)
        return stale

    assert left_behind(UPSTREAM)
    assert not left_behind(OURS)


def test_a_padded_batch_finds_levels(build: Build) -> None:
    """A GPU pads a batch to the size of a graph; 0.20.0 refuses (#41485)."""
    batch = ASKED[0]
    tokens = batch.input_ids.numel()
    for package in (UPSTREAM, OURS):
        (first,) = build((LAYERS,), package).stages
        first.embed(batch)
        refuses = "Requested more deepstack tokens" in inspect.getsource(type(first.model)._get_deepstack_input_embeds)
        assert package == UPSTREAM or not refuses
        with pytest.raises(ValueError, match="Requested more") if refuses else nullcontext():
            levels = first.model._get_deepstack_input_embeds(tokens + 8)
            assert all(levels[key(k)][:tokens].any() and not levels[key(k)][tokens:].any() for k in range(3))
            first.model._clear_deepstack_input_embeds(tokens + 8)
        wipe(first)


@pytest.mark.skipif("compiled-drops-levels" not in FAULTS["qwen3_vl"], reason="the getter is upstream's")
def test_a_batch_beyond_the_buffers_finds_levels(build: Build) -> None:
    (first,) = build((LAYERS,)).stages
    first.embed(ASKED[0])
    tokens, more = ASKED[0].input_ids.numel(), MAX_TOKENS + 8
    levels = first.model._get_deepstack_input_embeds(more)
    assert all(levels[key(k)].size(0) == more and levels[key(k)][:tokens].any() for k in range(3))
    wipe(first)


def test_stages_that_do_not_agree_find_out_at_the_first_step(qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store that torch.distributed keeps, which is real here; the engine's tests have two real hosts."""
    start_distributed()
    monkeypatch.setattr(Group, "ranks", [5, 6], raising=False)

    def stage(rank: int) -> Model:
        return Model(Ours, engine_config(str(qwen3_vl)), (1, 5), rank)

    last = stage(1)
    positions = last.positions(4)
    received = lambda: last.buffers[:4]  # noqa: E731
    with pytest.raises(StagesDisagree, match=r"levels \[1, 2\] with stage 1, which runs vLLM's own class"):
        last.step(None, positions, received(), None)
    first = stage(0)
    first.step(None, positions, None, zeros(4))
    last.step(None, positions, received(), None)
    assert first.model.agreements == last.model.agreements == (), "asked once"

    monkeypatch.setattr(Group, "ranks", [7, 8])
    last = stage(1)
    last.model.launched_apart = True
    with last.on_stage(), set_forward_context(None, last.config, num_tokens=4):
        last.model(input_ids=None, positions=positions, intermediate_tensors=received())
    assert last.model.agreements, "a warm-up of an external launcher may run before the others stand"
    with pytest.raises(StagesDisagree):
        last.step(None, positions, received(), None)


@pytest.mark.skipif("compiled-drops-levels" in FAULTS["qwen3_vl"], reason="the zeros that upstream leaves out")
def test_one_stage_costs_no_operation_more(build: Build) -> None:
    counted = []
    for package in (UPSTREAM, OURS):
        pipeline = build((LAYERS,), package)
        for batch in ASKED[:2]:
            with Count() as count:
                pipeline.run(batch)
            counted.append(count.operations)
    assert counted[:2] == counted[2:]
    assert len(counted[0]) > 100
