"""Each fault's cure alone: something is composed for it, what it rests on is there, and it breaks nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from tests.conftest import Checkpoint, edited
from tests.installed import FAULTS as HERE
from tests.installed import right
from tests.models import ROWS
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, Build, OneStage, answers, batches, equal, model_class
from tests.stages.pipeline import Model, Pipeline, engine_config, start_distributed
from vllm_pp_fixes import faults
from vllm_pp_fixes.fault import Cure, Fault
from vllm_pp_fixes.faults import FAULTS
from vllm_pp_fixes.runtime.compose import DropIn, drop_in

for _model_type in HERE:
    # The drop-ins decide when they are imported, which must not be while a test says that there is one fault only.
    model_class(_model_type, OURS)
CASES = [(fault, model_type) for fault in FAULTS for model_type in fault.hits if model_type in HERE]
each = pytest.mark.parametrize(
    ("fault", "model_type"), CASES, ids=lambda value: value.id if isinstance(value, Fault) else value
)
CARRY = {fault.id for fault in FAULTS if any(mixin.__name__ == "DeepStackOverStages" for mixin in fault.cure().mixins)}


def composed(model_type: str, monkeypatch: pytest.MonkeyPatch, *present: Fault | str) -> type:
    """The drop-in of a vLLM that has these faults and no other."""
    only = [fault for fault in FAULTS if fault in present or fault.id in present]
    monkeypatch.setattr(faults, "FAULTS", tuple(replace(fault, probe=lambda *_: True) for fault in only))
    return drop_in(model_class(model_type, UPSTREAM), __name__)


def pipeline(
    cls: type, checkpoint: Checkpoint, model_type: str, *split: int, tower: bool = True, published: bool = False
) -> Pipeline:
    start_distributed()
    folder = checkpoint(model_type) if published else edited(checkpoint(model_type))
    limits = None if tower else ROWS[model_type].no_tower
    return Pipeline([Model(cls, engine_config(str(folder), limits), split, rank) for rank in range(len(split))])


@each
def test_a_cure_is_composed_alone(
    fault: Fault, model_type: str, checkpoint: Checkpoint, one_stage: OneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = composed(model_type, monkeypatch, fault)
    cure = fault.cure()
    assert issubclass(cls, DropIn)
    assert cls.cured == (fault.id,)
    assert len(cls.conditions) == (cure.condition is not None)
    names = {base.__name__ for base in cls.__mro__}
    assert {mixin.__name__ for mixin in cure.mixins} <= names
    if "start-layer" in HERE[model_type] and fault.id not in CARRY:
        pytest.skip("no later stage of this model can be built here without that cure")
    split = (1, 5) if fault.id in CARRY else (3, 3)
    made = pipeline(cls, checkpoint, model_type, *split, published=fault.id == "text-architectures")
    assert equal(answers(made, batches(model_type)), one_stage(model_type))


@each
def test_what_a_cure_rests_on_is_there(fault: Fault, model_type: str, build: Build, checkpoint: Checkpoint) -> None:
    """Each path leads to a function of the model of the installed vLLM, or of its configuration."""
    (stage,) = build((LAYERS,), UPSTREAM, model_type).stages
    roots = {"vllm_config": stage.config}
    for path in fault.rests_on:
        root, _, rest = path.partition(".")
        found = attrgetter(rest.partition(":")[0])(roots[root]) if root in roots else attrgetter(path)(stage.model)
        assert callable(found), path
    assert fault.rests_on


def test_the_refusal_stands_where_levels_are_not_carried(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lifts it without a tower does not lift it with one."""
    if right("qwen3_vl"):
        pytest.skip("a patched tree: it does not refuse")
    cls = composed("qwen3_vl", monkeypatch, "split-refused-towerless")
    with pytest.raises((AssertionError, AttributeError), match="start_layer"):
        pipeline(cls, checkpoint, "qwen3_vl", 1, 5)
    asked = batches("qwen3_vl", tower=False)
    one = answers(pipeline(cls, checkpoint, "qwen3_vl", LAYERS, tower=False), asked)
    assert equal(answers(pipeline(cls, checkpoint, "qwen3_vl", 1, 5, tower=False), asked), one)


@pytest.mark.skipif("moss_audio" not in HERE, reason="this release does not have the model")
def test_moss_declares_from_its_first_layer_on(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list that the factory of 0.24.0 reads without a question; what the stage sends is another list."""
    cls = composed("moss_audio", monkeypatch, "moss-factory")
    wrapper = pipeline(cls, checkpoint, "moss_audio", 1, 5).stages[1].model.language_model
    assert [*wrapper.deepstack_inject_layer_indices] == [1, 2]
    assert [*wrapper.model.deepstack_inject_layer_indices] == [0, 1, 2]


@pytest.mark.skipif("moss-levels-without-tower" not in HERE.get("moss_audio", ()), reason="not in this release")
def test_moss_declares_no_level_without_its_tower(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own lists say so, with no buffers of ours; without this cure they still declare levels."""
    asked = batches("moss_audio", tower=False)
    for present, levels in ((["moss-audio-off"], True), (["moss-audio-off", "moss-levels-without-tower"], False)):
        made = pipeline(composed("moss_audio", monkeypatch, *present), checkpoint, "moss_audio", 1, 5, tower=False)
        answers(made, asked)
        for names in (made.sent[0], made.stages[1].buffers.tensors):
            assert ({*names} != {"hidden_states", "residual"}) == levels


class Sealed(type):
    """A metaclass that no upstream class has: nothing can inherit from both."""


def fails(error: Exception) -> Callable[..., Any]:
    def function(*args: object) -> Any:
        raise error

    return function


WRONG: dict[str, dict[str, Any]] = {
    "a probe that trips": {"probe": fails(KeyError("shape"))},
    "a cure whose import is gone": {"probe": lambda *_: True, "cure": fails(ImportError("no name pad"))},
    "bases that do not fit": {"probe": lambda *_: True, "cure": lambda: Cure(mixins=(Sealed("Mixin", (), {}),))},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_whatever_goes_wrong_the_class_is_upstreams_and_one_line_says_why(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    broken = [replace(fault, **WRONG[wrong]) if fault.id == "split-refused" else fault for fault in FAULTS]
    monkeypatch.setattr(faults, "FAULTS", tuple(broken))
    cls = model_class("qwen3_vl", UPSTREAM)
    with caplog.at_level("WARNING"):
        assert drop_in(cls, __name__) is cls
    (line,) = {record.getMessage() for record in caplog.records}
    assert f"vllm_pp_fixes leaves {cls.__name__} as it is, what cures it cannot be composed: " in line


def test_without_any_fault_each_class_is_upstreams_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FAULTS", ())
    for model_type in HERE:
        cls = model_class(model_type, UPSTREAM)
        assert drop_in(cls, __name__) is cls
