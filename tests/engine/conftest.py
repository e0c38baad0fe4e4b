from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cells import UPSTREAM, V2_ENV, cell
from vllm_pp_fixes.commands.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Runner V1."""
    folder = tmp_path_factory.mktemp("v1")
    with Warm(folder, {"VLLM_CACHE_ROOT": str(folder / "cache")}, ("tests.engine.piecewise",)) as process:
        yield process


@pytest.fixture(scope="session")
def warm_v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Runner V2."""
    folder = tmp_path_factory.mktemp("v2")
    env = {"VLLM_CACHE_ROOT": str(folder / "cache"), **V2_ENV}
    with Warm(folder, env, ("tests.engine.piecewise",)) as process:
        yield process


@pytest.fixture(scope="session")
def one_stage(warm: Warm, qwen3_vl: Path) -> dict[str, Any]:
    """What upstream's class answers on one stage: the reference of every other cell."""
    outcome = warm.run(cell(qwen3_vl, env=UPSTREAM))
    assert outcome.result, outcome.log
    return outcome.result
