"""Ring 2: every stage of the real models in one process, bit-equal to one stage of upstream's class."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import StageMissingLayer

from tests.conftest import Checkpoint
from tests.installed import FAULTS, right
from tests.models import OTHERS, ROWS
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, Build, OneStage, answers, batches, equal, model_class
from tests.stages.pipeline import MAX_TOKENS, RECEIVE, Model, Pipeline, engine_config, splits
from vllm_pp_fixes.runtime.deepstack import key
from vllm_pp_fixes.runtime.stages import stages

OMNI = "qwen3_omni_moe_thinker"
SPLITS = [split for count in (2, 3, 6) for split in splits(LAYERS, count)]
if "VLLM_PP_FIXES_FEW_SPLITS" in os.environ:
    SPLITS = [(1, 5), (2, 4), (1, 1, 4), (1,) * LAYERS]
CASES: list[tuple[str, bool, dict[str, int]]] = [
    *(("qwen3_vl", True, {"levels": levels}) for levels in (1, 2, 3, 4)),
    ("moss_audio", True, {"levels": 3, "injected": 2}),
    *((model_type, True, {}) for model_type in OTHERS),
    *((model_type, False, {}) for model_type, row in ROWS.items() if row.no_tower),
]
CASES = [case for case in CASES if case[0] in FAULTS]


def case_id(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(f"{k}{v}" for k, v in value.items())
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def levels(model_type: str, tower: bool, sizes: dict[str, int]) -> int:
    return sizes.get("injected") or sizes.get("levels") or ROWS[model_type].levels if tower else 0


@pytest.mark.parametrize("runner", RECEIVE)
@pytest.mark.parametrize(("model_type", "tower", "sizes"), CASES, ids=case_id)
@pytest.mark.parametrize("split", SPLITS, ids=case_id)
def test_every_split_answers_as_one_stage(
    build: Build,
    one_stage: OneStage,
    split: tuple[int, ...],
    model_type: str,
    tower: bool,
    sizes: dict[str, int],
    runner: str,
) -> None:
    pipeline = build(split, model_type=model_type, tower=tower, **sizes)
    assert equal(answers(pipeline, batches(model_type, tower), runner), one_stage(model_type, tower, **sizes))
    expected = stages(split, levels(model_type, tower, sizes))
    for sent, stage, receiver in zip(pipeline.sent, pipeline.stages[1:], expected[1:], strict=True):
        assert set(sent) == set(stage.buffers.tensors) == {"hidden_states", "residual", *map(key, receiver.received)}


@pytest.mark.parametrize("model_type", [model_type for model_type in FAULTS if ROWS[model_type].no_tower])
def test_towers_on_the_first_stage_only(
    one_stage: OneStage, checkpoint: Checkpoint, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.33 on, runner V2 skips the towers of later stages: a missing tower there does not mean no levels."""
    if right(model_type) and "is_first_rank" not in inspect.getsource(SupportsMultiModal):
        pytest.skip("a patched release that skips none")
    mark = SupportsMultiModal._mark_tower_model
    none = SimpleNamespace(get_limit_per_prompt=lambda modality: 0)
    left_out = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=none, get_multimodal_config=lambda: none),
        use_v2_model_runner=False,
    )

    def mark_on_first(self, vllm_config, modalities, **more):
        return mark(self, vllm_config if get_pp_group().is_first_rank else left_out, modalities, **more)

    reference = one_stage(model_type)
    monkeypatch.setattr(SupportsMultiModal, "_mark_tower_model", mark_on_first)
    folder, cls = str(checkpoint(model_type)), model_class(model_type, OURS)
    pipeline = Pipeline([Model(cls, engine_config(folder), (1, 1, 4), rank) for rank in range(3)])
    assert equal(answers(pipeline, batches(model_type)), reference)
    last = pipeline.stages[2].model
    tower = last.audio_encoder if model_type == "moss_audio" else last.visual
    assert isinstance(tower, StageMissingLayer)
    assert key(2) in pipeline.sent[1]


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", OMNI])
def test_buffers_exist_on_the_first_stage_with_a_tower_only(build: Build, model_type: str) -> None:
    first, last = (stage.model for stage in build((1, 5), model_type=model_type).stages)
    assert [tuple(buffer.shape) for buffer in first.deepstack_input_embeds] == [(MAX_TOKENS, 64)] * 3
    without = [last, *(stage.model for stage in build((1, 5), model_type=model_type, tower=False).stages)]
    assert not any(getattr(model, "deepstack_input_embeds", None) for model in without)
    if model_type == OMNI and not right(model_type):
        assert build((1, 5), UPSTREAM, model_type=model_type).stages[1].model.deepstack_input_embeds


BUFFERED = {
    model_type: "moss-compiled-drops-levels" if model_type == "moss_audio" else "buffers-everywhere"
    for model_type in FAULTS
    if ROWS[model_type].no_tower
}


@pytest.mark.parametrize("model_type", [each for each, fault in BUFFERED.items() if fault in FAULTS[each]])
def test_buffers_are_saved_when_the_server_sleeps(model_type: str, build: Build) -> None:
    """At sleep level 2 vLLM keeps registered buffers, and nothing else; a checkpoint has none of them."""
    first, last = (stage.model for stage in build((1, 5), model_type=model_type).stages)
    kept = {name: buffer for name, buffer in first.named_buffers() if name.startswith("level_buffer")}
    assert [tuple(buffer.shape) for buffer in kept.values()] == [(MAX_TOKENS, 64)] * 3
    read = first.level_buffers if model_type == "moss_audio" else first.deepstack_input_embeds
    assert all(kept[f"level_buffer_{k}"] is buffer for k, buffer in enumerate(read))
    assert not [name for name in first.state_dict() if "level_buffer" in name]
    assert not [name for name, _ in last.named_buffers() if "level_buffer" in name]


@pytest.mark.parametrize("model_type", FAULTS)
def test_a_lost_tensor_would_be_noticed(
    build: Build, one_stage: OneStage, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, asked = ROWS[model_type], batches(model_type)
    copy = RECEIVE["V1"]

    def lose(buffers, sent, tokens):
        return copy(buffers, {**sent, row.lost: torch.zeros_like(sent[row.lost])}, tokens)

    monkeypatch.setitem(RECEIVE, "V1", lose)
    lost = answers(build((1, 5), model_type=model_type), asked)
    differs = [(a - b).abs().max().item() > 0.1 for a, b in zip(lost, one_stage(model_type), strict=True)]
    # A lost level is felt where there are media, a lost residual everywhere.
    assert differs == [bool(batch.media) or not row.no_tower for batch in asked]


@pytest.mark.skipif(right(OMNI), reason="cured in this tree")
def test_omni_upstream_drops_levels(build: Build, one_stage: OneStage) -> None:
    theirs = answers(build((1, 5), UPSTREAM, model_type=OMNI), batches(OMNI))
    assert (theirs[0] - one_stage(OMNI)[0]).abs().max() > 0.1


@pytest.mark.skipif(right("qwen3_vl"), reason="cured in this tree")
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("tower", [True, False])
def test_upstream_refuses(build: Build, model_type: str, tower: bool) -> None:
    with pytest.raises((AssertionError, AttributeError), match="start_layer"):
        build((1, 5), UPSTREAM, model_type=model_type, tower=tower)


@pytest.mark.skipif("step3-residual" not in FAULTS["step3_text"], reason="cured in this release")
def test_step3_upstream_declares_no_residual(build: Build) -> None:
    with pytest.raises(KeyError, match="residual"):
        answers(build((1, 5), UPSTREAM, model_type="step3_text"), batches("step3_text"))


@pytest.mark.skipif("moss-audio-off" not in FAULTS.get("moss_audio", ()), reason="cured in this release")
def test_moss_upstream_does_not_start_without_tower(build: Build) -> None:
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        build((LAYERS,), UPSTREAM, model_type="moss_audio", tower=False)


@pytest.mark.parametrize("model_type", FAULTS)
def test_where_nothing_is_wrong_the_class_is_upstreams_own(model_type: str) -> None:
    assert (model_class(model_type, OURS) is model_class(model_type, UPSTREAM)) == (not FAULTS[model_type])
