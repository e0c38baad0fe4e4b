"""`python -m tests.gpu` on a machine without a GPU: its dry part."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the command itself")
def test_the_dry_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    first, *_ = lines = done.stdout.splitlines()
    assert first.startswith("no GPU here: "), done
    assert first.endswith("running the dry part")
    rows = lines[-3:]
    assert [row.split()[0] for row in rows] == ["full", "sleep", "engine,"], done.stdout
    assert all("  ok  " in row for row in rows), done.stdout
    assert done.returncode == 0
