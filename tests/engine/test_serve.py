"""`vllm serve` as a user types it, PP=2, asked by the `openai` client; nothing of the tests inside the server."""

from __future__ import annotations

import io
import json
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Checkpoint
from tests.engine.cells import TRACE_ONCE, UPSTREAM
from tests.engine.conftest import Reference
from tests.engine.servers import TIMEOUT, ask, encoded, free_port, picture_part, serve, started
from tests.models import ROWS
from vllm_pp_fixes.demo.prompts import sound

pytestmark = pytest.mark.timeout(TIMEOUT + 300)
OMNI = "qwen3_omni_moe_thinker"


def assert_one_line_a_worker(log: Path, class_name: str) -> None:
    lines = [line for line in log.read_text().splitlines() if "vllm_pp_fixes" in line]
    assert len(lines) == 2, "one line a worker, none elsewhere"
    assert all(class_name in line for line in lines)


def test_serve_answers_a_picture_as_one_stage(qwen3_vl: Path, one_stage: dict[str, Any], tmp_path: Path) -> None:
    with serve(qwen3_vl, tmp_path, "--compilation-config", '{"mode": 1}') as (client, log):
        tokens, logprobs = ask(client, picture_part(), "What is in this picture?")
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


def two_nodes() -> tuple[list[str], list[str]]:
    """VLLM's own options for the two hosts of one server; the second has no front end."""
    both = ["--compilation-config", '{"mode": 1}', "--nnodes", "2", "--master-addr", "127.0.0.1"]
    both += ["--master-port", str(free_port())]
    return [*both, "--node-rank", "0"], [*both, "--node-rank", "1", "--headless"]


def test_two_hosts_that_agree(qwen3_vl: Path, one_stage: dict[str, Any], tmp_path: Path) -> None:
    first, second = two_nodes()
    with (
        started(qwen3_vl, tmp_path / "second", *second) as (_, log),
        serve(qwen3_vl, tmp_path / "first", *first) as (client, _),
    ):
        tokens, logprobs = ask(client, picture_part(), "What is in this picture?")
        assert tokens == one_stage["tokens"][1][0]
        assert logprobs == pytest.approx(one_stage["logprobs"][1][0], abs=1e-4)
        assert "stage 2 of 2, layers 1 to 5, receives [1, 2]" in log.read_text()


def test_two_hosts_that_do_not_agree(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Qwen3-Omni, which upstream would answer wrongly (or V2 stop with a KeyError): the second has the plugin off."""
    first, second = two_nodes()
    with (
        started(checkpoint(OMNI), tmp_path / "first", *first) as (one, ours),
        started(checkpoint(OMNI), tmp_path / "second", *second, **UPSTREAM) as (two, theirs),
    ):
        deadline = time.monotonic() + TIMEOUT
        while "StagesDisagree" not in ours.read_text():
            assert time.monotonic() < deadline, ours.read_text()[-6000:]
            assert one.poll() is None or two.poll() is None, f"{ours.read_text()[-3000:]}\n{theirs.read_text()[-3000:]}"
            time.sleep(1)
        one.wait(timeout=120)
    said = ours.read_text()
    assert "stage 1 of 2 serves Qwen3OmniMoeThinkerForConditionalGeneration with vllm_pp_fixes" in said
    assert "levels [1, 2] with stage 2, which runs vLLM's own class, it seems: install" in said
