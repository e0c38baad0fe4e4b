"""Each fault's cure alone: something is composed for it, what it rests on is there, and it breaks nothing."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from operator import attrgetter

import pytest

from tests.conftest import Checkpoint
from tests.installed import FAULTS as HERE
from tests.installed import right
from tests.models import ROWS
from tests.stages.conftest import LAYERS, UPSTREAM, Build, OneStage, answers, batches, equal, model_class
from tests.stages.pipeline import Model, Pipeline, engine_config, start_distributed
from vllm_pp_fixes import faults
from vllm_pp_fixes.fault import Fault
from vllm_pp_fixes.faults import FAULTS
from vllm_pp_fixes.runtime.compose import DropIn, drop_in

CASES = [(fault, model_type) for fault in FAULTS for model_type in fault.hits if model_type in HERE]
each = pytest.mark.parametrize(
    ("fault", "model_type"), CASES, ids=lambda value: value.id if isinstance(value, Fault) else value
)
CARRY = {fault.id for fault in FAULTS if any(mixin.__name__ == "DeepStackOverStages" for mixin in fault.cure().mixins)}


def composed(fault: Fault, model_type: str, monkeypatch: pytest.MonkeyPatch) -> type:
    """The drop-in of a vLLM that has this fault and no other."""
    monkeypatch.setattr(faults, "FAULTS", (replace(fault, probe=lambda *_: True),))
    return drop_in(model_class(model_type, UPSTREAM), __name__)


def pipeline(cls: type, checkpoint: Checkpoint, model_type: str, *split: int, tower: bool = True) -> Pipeline:
    start_distributed()
    config = engine_config(str(checkpoint(model_type)), None if tower else ROWS[model_type].no_tower)
    return Pipeline([Model(cls, config, split, rank) for rank in range(len(split))])


@each
def test_a_cure_is_composed_alone(
    fault: Fault, model_type: str, checkpoint: Checkpoint, one_stage: OneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = composed(fault, model_type, monkeypatch)
    cure = fault.cure()
    assert issubclass(cls, DropIn)
    assert cls.cured == (fault.id,)
    assert len(cls.conditions) == (cure.condition is not None)
    names = {base.__name__ for base in cls.__mro__}
    assert {mixin.__name__ for mixin in cure.mixins} <= names
    if "text-architectures" in HERE[model_type] and fault.id != "text-architectures":
        pytest.skip("no checkpoint as published can be built here without that cure")
    split = (1, 5) if fault.id in CARRY else (3, 3)
    asked = batches(model_type)
    assert equal(answers(pipeline(cls, checkpoint, model_type, *split), asked), one_stage(model_type))


@each
def test_what_a_cure_rests_on_is_there(fault: Fault, model_type: str, build: Build, checkpoint: Checkpoint) -> None:
    """Each path leads to a function of the model of the installed vLLM, or of its configuration."""
    (stage,) = build((LAYERS,), UPSTREAM, model_type).stages
    roots = {"vllm_config": stage.config}
    for path in fault.rests_on:
        root, _, rest = path.partition(".")
        found = attrgetter(rest)(roots[root]) if root in roots else attrgetter(path)(stage.model)
        assert callable(found), path
    assert fault.rests_on


def test_the_refusal_stands_where_levels_are_not_carried(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lifts it without a tower does not lift it with one."""
    (towerless,) = [fault for fault in FAULTS if fault.id == "split-refused-towerless"]
    if right("qwen3_vl") or "start-layer" in HERE["qwen3_vl"] or "text-architectures" in HERE["qwen3_vl"]:
        pytest.skip("there is no such refusal here, or another one comes first")
    cls = composed(towerless, "qwen3_vl", monkeypatch)
    with pytest.raises(AssertionError, match="start_layer"):
        pipeline(cls, checkpoint, "qwen3_vl", 1, 5)
    asked = batches("qwen3_vl", tower=False)
    one = answers(pipeline(cls, checkpoint, "qwen3_vl", LAYERS, tower=False), asked)
    assert equal(answers(pipeline(cls, checkpoint, "qwen3_vl", 1, 5, tower=False), asked), one)


def test_every_module_of_the_drop_ins_decides_by_the_faults_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any fault each class is upstream's own."""
    monkeypatch.setattr(faults, "FAULTS", ())
    for model_type in HERE:
        cls = model_class(model_type, UPSTREAM)
        assert drop_in(cls, import_module(f"vllm_pp_fixes.models.{model_type}").__name__) is cls
