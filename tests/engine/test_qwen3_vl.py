"""Ring 3: the real engine. Any split gives the tokens and log-probabilities of one stage of upstream's class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.cells import (
    DEFAULT_COMPILE,
    EAGER,
    LOADED,
    POSITIONS,
    REFUSAL,
    UNDER_RAY,
    UPSTREAM,
    assert_same,
    cell,
    log_lines,
    part_of,
    piecewise,
)
from tests.models import ROWS
from vllm_pp_fixes.demo.forkserver import ForkServer

ROW = ROWS["qwen3_vl"]
NO_TOWER = ROW.without_tower


@pytest.fixture(scope="session")
def text_alone(one_stage: dict[str, Any]) -> dict[str, Any]:
    return part_of(one_stage, ROW.asked, ROW.text)


def test_three_stages(engines: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any]) -> None:
    outcome = engines.run(cell(qwen3_vl, 1, 1, 4))
    assert_same(outcome, one_stage, tolerance=0)
    assert len(log_lines(outcome.log)) == 3, "one line a process that serves"


def test_disabled_upstream_refuses(engines: ForkServer, qwen3_vl: Path) -> None:
    outcome = engines.run(cell(qwen3_vl, 1, 5, env=UPSTREAM))
    assert outcome.result is None
    assert REFUSAL in outcome.log
    assert not log_lines(outcome.log)


def test_no_tower(engines: ForkServer, qwen3_vl: Path, text_alone: dict[str, Any]) -> None:
    assert_same(engines.run(cell(qwen3_vl, 1, 5, batches=ROW.text, **NO_TOWER)), text_alone)


def test_compiled(engines: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any]) -> None:
    assert_same(engines.run(cell(qwen3_vl, 1, 5, **DEFAULT_COMPILE)), one_stage)


@pytest.mark.parametrize(("mode", "env"), [("weights", UNDER_RAY), ("data", {})], ids=["weights, Ray", "data"])
def test_tensor_parallel(
    engines: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any], mode: str, env: dict[str, str]
) -> None:
    """A rank of a stage sends a slice of each tensor; under Ray's compiled graph positions are among them."""
    outcome = engines.run(cell(qwen3_vl, 1, 5, env=env, tensor_parallel_size=2, mm_encoder_tp_mode=mode))
    assert_same(outcome, one_stage)
    assert outcome.log.count(POSITIONS) == (4 if env else 0)


def test_piecewise_cold_warm_and_towers(
    engines: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any], text_alone: dict[str, Any], cache: Path
) -> None:
    """On one cache: towers off, then on (a graph of its own), then on again (loads that graph)."""
    assert_same(engines.run(piecewise(qwen3_vl, cache, 1, 5, batches=ROW.text, **NO_TOWER)), text_alone)
    assert_same(engines.run(piecewise(qwen3_vl, cache, 1, 5)), one_stage)
    again = engines.run(piecewise(qwen3_vl, cache, 1, 5))
    assert_same(again, one_stage)
    assert again.log.count(LOADED) == 2, "each stage loads the graph that the same start made"


def test_piecewise_after_upstream(engines: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any], cache: Path) -> None:
    """On one cache: upstream with towers, upstream without (loads the wrong graph), ours (compiles its own)."""
    assert_same(engines.run(piecewise(qwen3_vl, cache, env=UPSTREAM)), one_stage)
    wrong = engines.run(piecewise(qwen3_vl, cache, env=UPSTREAM, batches=ROW.text, **NO_TOWER))
    assert LOADED in wrong.log
    assert wrong.result is None, "upstream's compile-cache-shared is gone: is the cure still needed?"
    ours = engines.run(piecewise(qwen3_vl, cache))
    assert_same(ours, one_stage)
    assert LOADED not in ours.log


@pytest.mark.parametrize("engine", [EAGER, DEFAULT_COMPILE], ids=["eager", "compiled"])
def test_v2(engines_v2: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any], engine: dict[str, Any]) -> None:
    outcome = engines_v2.run(cell(qwen3_vl, 1, 5, **engine))
    assert "Using V2 Model Runner" in outcome.log
    assert_same(outcome, one_stage)


def test_v2_piecewise_under_ray(engines_v2: ForkServer, qwen3_vl: Path, one_stage: dict[str, Any], cache: Path) -> None:
    for loaded in (0, 3):
        outcome = engines_v2.run(piecewise(qwen3_vl, cache, 1, 1, 4, env=UNDER_RAY))
        assert outcome.log.count(POSITIONS) == 3
        assert "Using V2 Model Runner" in outcome.log
        assert outcome.log.count(LOADED) == loaded
        assert_same(outcome, one_stage)
