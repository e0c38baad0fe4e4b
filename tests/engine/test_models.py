"""Ring 3 for the other models: each cell equals one stage of upstream's class, run plainly.

That upstream's own does not is seen in `test_release.py`, fault by fault; 1+5 is asked there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Checkpoint
from tests.engine.cells import (
    DEFAULT_COMPILE,
    EAGER,
    LOADED,
    TRACE_ONCE,
    UPSTREAM,
    assert_same,
    assert_wrong,
    cell,
    log_lines,
    part_of,
    piecewise,
)
from tests.engine.conftest import Reference
from tests.models import OTHERS, ROWS
from vllm_pp_fixes.demo.forkserver import ForkServer

OMNI, MOSS = "qwen3_omni_moe_thinker", "moss_audio"
RIGHT_UPSTREAM = {"step3_text"}
SPLITS = [*((model_type, (1, 1, 4)) for model_type in OTHERS), (OMNI, (2, 4)), (OMNI, (1,) * 6)]


@pytest.mark.parametrize(("model_type", "split"), SPLITS)
def test_split(
    engines: ForkServer, checkpoint: Checkpoint, reference: Reference, model_type: str, split: tuple[int, ...]
) -> None:
    outcome = engines.run(cell(checkpoint(model_type), *split, model_type=model_type))
    assert_same(outcome, reference(model_type))
    assert len(log_lines(outcome.log)) == (0 if model_type in RIGHT_UPSTREAM else len(split))


@pytest.mark.parametrize("model_type", OTHERS)
def test_v2(engines_v2: ForkServer, checkpoint: Checkpoint, reference: Reference, model_type: str) -> None:
    outcome = engines_v2.run(cell(checkpoint(model_type), 1, 1, 4, model_type=model_type, **EAGER))
    assert "Using V2 Model Runner" in outcome.log
    assert_same(outcome, reference(model_type))


@pytest.mark.parametrize("model_type", OTHERS)
def test_compiled(engines: ForkServer, checkpoint: Checkpoint, reference: Reference, model_type: str) -> None:
    engine = DEFAULT_COMPILE if model_type == MOSS else TRACE_ONCE
    assert_same(engines.run(cell(checkpoint(model_type), 1, 5, model_type=model_type, **engine)), reference(model_type))


@pytest.mark.parametrize("model_type", [OMNI, MOSS])
def test_piecewise_after_upstream(
    engines: ForkServer, checkpoint: Checkpoint, reference: Reference, cache: Path, model_type: str
) -> None:
    """On one cache and one split: upstream, whose graph is wrong, then ours, which compiles its own."""
    model, split = checkpoint(model_type), ROWS[model_type].upstream_splits[0]
    assert_wrong(
        engines.run(piecewise(model, cache, *split, model_type=model_type, env=UPSTREAM)), reference(model_type)
    )
    ours = engines.run(piecewise(model, cache, *split, model_type=model_type))
    assert_same(ours, reference(model_type))
    assert LOADED not in ours.log


@pytest.mark.parametrize("model_type", [model_type for model_type in OTHERS if ROWS[model_type].no_tower])
def test_no_tower(engines: ForkServer, checkpoint: Checkpoint, reference: Reference, model_type: str) -> None:
    row = ROWS[model_type]
    asked = [*row.text, *([name] for name in row.left)]
    outcome = engines.run(cell(checkpoint(model_type), 1, 5, model_type=model_type, batches=asked, **row.without_tower))
    assert_same(outcome, part_of(reference(model_type), row.asked, asked))
