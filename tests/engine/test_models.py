"""Ring 3 for the other models: each cell equals one stage of upstream's class, run plainly.

That upstream's own does not is seen in `test_release.py`, fault by fault.
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
from vllm_pp_fixes.commands.warm import Warm

OMNI, MOSS = "qwen3_omni_moe_thinker", "moss_audio"
RIGHT_UPSTREAM = {"step3_text"}
SPLITS = [(family, split) for family in OTHERS for split in ((1, 5), (1, 1, 4))]
MORE_SPLITS = [(OMNI, (2, 4)), (OMNI, (1,) * 6)]


@pytest.mark.parametrize(("family", "split"), [*SPLITS, *MORE_SPLITS])
def test_split(warm: Warm, checkpoint: Checkpoint, reference: Reference, family: str, split: tuple[int, ...]) -> None:
    outcome = warm.run(cell(checkpoint(family), *split, family=family))
    assert_same(outcome, reference(family))
    assert len(log_lines(outcome.log)) == (0 if family in RIGHT_UPSTREAM else len(split))


@pytest.mark.parametrize(("family", "split"), SPLITS)
def test_v2(warm_v2: Warm, checkpoint: Checkpoint, reference: Reference, family: str, split: tuple[int, ...]) -> None:
    outcome = warm_v2.run(cell(checkpoint(family), *split, family=family, **EAGER))
    assert "Using V2 Model Runner" in outcome.log
    assert_same(outcome, reference(family))


@pytest.mark.parametrize("family", OTHERS)
def test_compiled(warm: Warm, checkpoint: Checkpoint, reference: Reference, family: str) -> None:
    engine = DEFAULT_COMPILE if family == MOSS else TRACE_ONCE
    assert_same(warm.run(cell(checkpoint(family), 1, 5, family=family, **engine)), reference(family))


@pytest.mark.parametrize("family", OTHERS)
def test_piecewise_after_upstream(
    warm: Warm, checkpoint: Checkpoint, reference: Reference, cache: Path, family: str
) -> None:
    """On one cache and one split: upstream, whose graph may be wrong, then ours, which compiles its own."""
    model, split = checkpoint(family), ROWS[family].upstream_splits[0]
    theirs = warm.run(piecewise(model, cache, *split, family=family, env=UPSTREAM))
    if family in (OMNI, MOSS):
        assert_wrong(theirs, reference(family))
    else:
        assert_same(theirs, reference(family))
    ours = warm.run(piecewise(model, cache, *split, family=family))
    assert_same(ours, reference(family))
    assert (LOADED in ours.log) == (family in RIGHT_UPSTREAM)


@pytest.mark.parametrize("family", [family for family in OTHERS if ROWS[family].no_tower])
def test_no_tower(warm: Warm, checkpoint: Checkpoint, reference: Reference, family: str) -> None:
    row = ROWS[family]
    asked = [*row.text, *([name] for name in row.left)]
    outcome = warm.run(cell(checkpoint(family), 1, 5, family=family, batches=asked, **row.without_tower))
    assert_same(outcome, part_of(reference(family), row.asked, asked))
