from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from vllm_pp_fixes.commands.checkpoint import tiny

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Give the folder of a tiny checkpoint of a family; each is made once a session."""
    return partial(tiny, folder=tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3_vl(checkpoint: Checkpoint) -> Path:
    return checkpoint("qwen3_vl")
