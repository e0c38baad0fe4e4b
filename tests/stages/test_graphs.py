"""Ring 2: full graphs around each stage's outer `forward`; real CUDA graphs on a GPU, a stand-in elsewhere."""

from __future__ import annotations

import pytest

from tests.conftest import Checkpoint, edited
from tests.installed import FAULTS, right
from tests.models import ROWS
from tests.stages.conftest import LAYERS, OURS, UPSTREAM, batches, model_class
from tests.stages.graphs import FULL, Graphs, wrong_in_replay
from tests.stages.pipeline import Model, engine_config, start_distributed

SPLIT = (1, 1, 4)
"""A first stage, one between two, and a last one."""


def graphs(checkpoint: Checkpoint, model_type: str, *split: int, package: str = OURS) -> Graphs:
    start_distributed()
    folder, cls = checkpoint(model_type), model_class(model_type, package)
    folder = edited(folder) if package == UPSTREAM else folder
    return Graphs([Model(cls, engine_config(str(folder), **FULL), split, rank) for rank in range(len(split))])


@pytest.mark.parametrize("model_type", [model_type for model_type in FAULTS if ROWS[model_type].levels])
def test_replayed_as_run(checkpoint: Checkpoint, model_type: str) -> None:
    assert wrong_in_replay(graphs(checkpoint, model_type, *SPLIT), batches(model_type)) == []


@pytest.mark.skipif(right("qwen3_vl"), reason="cured in this tree")
def test_upstream_leaves_levels_behind(checkpoint: Checkpoint) -> None:
    """It clears them in Python, which a graph that was captured without media holds nothing of."""
    theirs = graphs(checkpoint, "qwen3_vl", LAYERS, package=UPSTREAM)
    assert wrong_in_replay(theirs, batches("qwen3_vl")) == [
        "batch 1 is answered otherwise",
        "batch 2 is answered otherwise",
        "levels are left in the buffers of a batch of text",
    ]
