"""Ring 1: the arithmetic of stages, over every depth, split and number of levels."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pp_fixes.runtime.stages import parse_split, stages

split = st.lists(st.integers(1, 40), min_size=1, max_size=12)
levels = st.integers(0, 60)


@given(split, levels)
def test_what_a_stage_forwards_is_what_the_next_receives(split: list[int], levels: int) -> None:
    pipeline = stages(split, levels)
    for sender, receiver in pairwise(pipeline):
        assert list(sender.forwarded) == list(receiver.received)
    assert not pipeline[0].received
    assert not pipeline[-1].forwarded


@given(split, levels)
def test_each_level_is_used_once_after_its_own_layer(split: list[int], levels: int) -> None:
    pipeline = stages(split, levels)
    assert [level for stage in pipeline for level in stage.used] == list(range(min(levels, sum(split))))
    for stage in pipeline:
        assert all(stage.start <= level < stage.end for level in stage.used)


@given(split, levels)
def test_nothing_is_received_that_neither_it_nor_a_later_stage_uses(split: list[int], levels: int) -> None:
    pipeline = stages(split, levels)
    for rank, stage in enumerate(pipeline):
        still_used = {level for later in pipeline[rank:] for level in later.used}
        assert set(stage.received) <= still_used
        if not stage.first:
            assert set(stage.received) == still_used
        assert set(stage.received) <= set(stage.used) | set(stage.forwarded)


@given(split)
def test_no_level_crosses_without_a_tower(split: list[int]) -> None:
    assert not any(stage.received or stage.used or stage.forwarded for stage in stages(split, 0))


def test_the_layers_are_the_splits() -> None:
    assert [(s.start, s.end, s.first) for s in stages([1, 1, 4], 3)] == [(0, 1, True), (1, 2, False), (2, 6, False)]
    assert [list(s.received) for s in stages([1, 1, 4], 3)] == [[], [1, 2], [2]]
    assert [list(s.forwarded) for s in stages([1, 1, 4], 3)] == [[1, 2], [2], []]


def test_parse_split() -> None:
    assert parse_split("1,5", 6) == [1, 5]
    assert parse_split("6") == [6]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,4", "adds up to 5 layers, the model has 6"),
        ("0,6", "a stage without layers"),
        ("1;5", "no list"),
        ("", "no list"),
    ],
)
def test_bad_split_says_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse_split(text, 6)
    assert "\n" not in str(error.value)
