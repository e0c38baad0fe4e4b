"""Stages that do not agree find out; a stage never waits for one that does not know how to say anything."""

from __future__ import annotations

import logging

import pytest
from torch.distributed import HashStore, distributed_c10d

from vllm_pp_fixes.runtime import agreement
from vllm_pp_fixes.runtime.agreement import Agreement, StagesDisagree
from vllm_pp_fixes.runtime.stages import stages
from vllm_pp_fixes.version import identity

RANKS = [4, 9, 2]


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def say(store: HashStore, rank: int, split: tuple[int, ...] = (1, 1, 4), levels: int = 3) -> Agreement:
    return Agreement(store, RANKS, rank, "Model", stages(split, levels)[rank])


def test_stages_that_agree(store: HashStore) -> None:
    for agreed in [say(store, rank) for rank in range(3)]:
        agreed.check()


def test_a_neighbour_that_said_nothing(store: HashStore) -> None:
    first, middle = say(store, 0), say(store, 1)
    first.check()
    with pytest.raises(StagesDisagree) as raised:
        middle.check()
    line = str(raised.value)
    assert "\n" not in line
    assert "stage 2 of 3 serves Model" in line
    assert "levels [2] with stage 3, which runs vLLM's own class" in line
    assert f"serves Model with vllm_pp_fixes {identity()} and exchanges" in line
    assert "install the same vllm-pp-fixes and the same vLLM on every host" in line


def test_a_stage_before_that_said_nothing(store: HashStore) -> None:
    last = say(store, 2)
    with pytest.raises(StagesDisagree, match=r"levels \[2\] with stage 2, which runs vLLM's own class"):
        last.check()


def test_another_commit_of_the_same_version(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "identity", lambda: "0.2.0+0ddba11")
        say(store, 1)
    with pytest.raises(StagesDisagree, match=r"runs vllm_pp_fixes 0.2.0\+0ddba11, received \[1, 2\]"):
        say(store, 0).check()


def test_another_split(store: HashStore) -> None:
    """`VLLM_PP_LAYER_PARTITION` set on one host only."""
    say(store, 1, (2, 2, 2))
    with pytest.raises(StagesDisagree, match=r"received \[2\]"):
        say(store, 0).check()


def test_where_no_level_crosses_nobody_is_asked(store: HashStore) -> None:
    say(store, 0, (3, 1, 2)).check()
    say(store, 1, levels=0).check()


def test_another_model_beside_it_is_another_matter(store: HashStore) -> None:
    say(store, 0)
    Agreement(store, RANKS, 1, "Draft", stages((1, 1, 4), 3)[1])
    with pytest.raises(StagesDisagree):
        say(store, 0).check()


def test_a_draft_of_the_same_class_leaves_its_targets_word_alone(store: HashStore) -> None:
    """It is built after its target, on the last stage, which runs all of it."""
    first, last = say(store, 0, (1, 5)), say(store, 1, (1, 5))
    Agreement(store, RANKS, 1, "Model", stages((6,), 3)[0])
    first.check()
    last.check()


class Broken(HashStore):
    """A store that does not answer."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset")


def test_a_store_that_fails_stops_nothing(
    store: HashStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    first = say(store, 0)
    first.store = Broken()
    first.check()
    said = {record.getMessage() for record in caplog.records}
    assert said == {"vllm_pp_fixes cannot hear what stage 2 runs: connection reset"}

    class Group:
        ranks = (0, 1)
        rank_in_group = 0

    monkeypatch.setattr(distributed_c10d, "_get_default_store", Broken)
    assert agreement.announce(Group(), "Model", stages((1, 5), 3)[0]) is None


def test_no_store_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    # A test before this one may have left its process group.
    monkeypatch.setattr(distributed_c10d._world, "default_pg", None)

    class Group:
        ranks = (0, 1)
        rank_in_group = 0

    stage = stages((1, 5), 3)[0]
    assert agreement.announce(object(), "Model", stage) is None
    assert agreement.announce(Group(), "Model", stage) is None
