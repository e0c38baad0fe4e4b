from pathlib import Path

import pytest

from vllm_pp_fixes.commands.checkpoint import tiny


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for tiny checkpoints, made anew each session."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def qwen3_vl(checkpoints: Path) -> Path:
    return tiny("qwen3_vl", checkpoints)
