import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Snippet = Callable[..., list[str]]


def name_distribution(folder: Path, version: str) -> None:
    """Make `folder`, on PYTHONPATH, say that the distribution `vllm` is installed, in `version`.

    vLLM takes itself for a CPU build by a `cpu` in it.
    """
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


@pytest.fixture(scope="session")
def snippet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snippet]:
    """Run code in a process that has vLLM imported and no plugin loaded; return the lines that it printed."""
    out = tmp_path_factory.mktemp("snippets") / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.snippets"],
        env={k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, replies = process.stdin, process.stdout
    while (line := replies.readline()) != "ready\n":
        assert line, "vLLM could not be imported"

    def run(code: str, **env: str) -> list[str]:
        print(json.dumps({"code": code, "env": env, "out": str(out)}), file=requests, flush=True)
        status = replies.readline().strip()
        text = out.read_text(errors="replace")
        assert status == "0", text
        return text.splitlines()

    yield run
    requests.close()
    process.wait(timeout=30)
