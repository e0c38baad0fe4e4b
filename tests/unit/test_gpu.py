"""What `python -m tests.gpu` makes of what its processes leave; `tests/engine/test_gpu.py` runs its dry part."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import parts
from tests.gpu.jobs import Job, Part, run_parts
from tests.gpu.parts import engine_part, sleep_part, suite_part

SERVED = "vllm_pp_fixes 0.2.0 serves MossAudioModel in place of vLLM's\n"
GRAPHS = "Graph capturing finished in 3 secs\n"
LEFT = "vllm_pp_fixes leaves MossAudioModel as it is, it cannot tell what it does: forward is written otherwise\n"


@pytest.fixture(autouse=True)
def no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "tiny", lambda model_type, folder: folder / model_type)
    monkeypatch.setattr(
        parts, "FAULTS", {"moss_audio": {"moss-compiled-drops-levels"}, "qwen3_vl": {"a"}, "step3_text": ()}
    )


def answer(logprob: float) -> dict:
    return {"tokens": [[[1]]], "logprobs": [[[logprob]]]}


def left_behind(job: Job, result: object, log: str) -> None:
    job.log.write_text(log)
    if result is not None:
        job.out.write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("model_type", "ours", "theirs", "log", "right"),
    [
        ("moss_audio", -1.0, -3.0, SERVED + GRAPHS, True),
        ("moss_audio", -1.0, -1.0, SERVED + GRAPHS, False),  # upstream is right: nothing is shown
        ("moss_audio", -3.0, -3.0, SERVED + GRAPHS, False),
        ("moss_audio", -1.1, -3.0, SERVED + GRAPHS, False),
        ("moss_audio", float("nan"), -3.0, SERVED + GRAPHS, False),
        ("moss_audio", -1.0, -3.0, SERVED, False),
        ("moss_audio", -1.0, -3.0, GRAPHS, False),
        ("moss_audio", -1.0, -3.0, LEFT + GRAPHS, False),
        ("moss_audio", None, -3.0, SERVED + GRAPHS, False),
        ("qwen3_vl", -1.0, None, SERVED + GRAPHS, True),
        ("qwen3_vl", -3.0, None, SERVED + GRAPHS, False),
        ("step3_text", -1.0, None, GRAPHS, True),
    ],
)
def test_an_engine(
    tmp_path: Path, model_type: str, ours: float | None, theirs: float | None, log: str, right: bool
) -> None:
    part = engine_part(model_type, "float32", tmp_path)
    assert len(part.jobs) == len({job.out for job in part.jobs}) == (3 if model_type == "moss_audio" else 2)
    for job, logprob in zip(part.jobs, (-1.0, ours, theirs), strict=False):
        left_behind(job, None if logprob is None else answer(logprob), log)
    said, words = part.verdict()
    assert said == right, words
    if log.startswith(LEFT):
        assert LEFT.strip() in words


@pytest.mark.parametrize(
    ("after", "left", "right"), [(-1.0, 0.0, True), (-3.0, 0.0, False), (-1.0, 0.5, False), (float("nan"), 0.0, False)]
)
def test_sleep(tmp_path: Path, after: float, left: float, right: bool) -> None:
    part = sleep_part("moss_audio", tmp_path)
    left_behind(part.jobs[0], {"before": answer(-1.0), "after": answer(after), "left": left}, SERVED)
    assert part.verdict()[0] == right, part.verdict()


@pytest.mark.parametrize(
    ("status", "log", "right"),
    [
        (0, "12 passed, 3 skipped in 4.20s\n", True),
        (1, "1 failed, 11 passed in 4.20s\n", False),
        (0, "3 skipped in 4.20s\n", False),
        (2, "ImportError\n", False),
        (None, "....\n", False),
    ],
)
def test_tests(tmp_path: Path, status: int | None, log: str, right: bool) -> None:
    part = suite_part("stages", "cuda", "bfloat16", tmp_path)
    part.jobs[0].status = status
    left_behind(part.jobs[0], None, log)
    assert part.verdict()[0] == right, part.verdict()


def test_the_table_stands_whatever_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def part(name: str, code: str, limit: float = 60, alone: bool = False) -> Part:
        job = Job(name, [sys.executable, "-c", code], tmp_path / f"{name}.json", limit=limit)
        return Part(name, "", [job], lambda jobs: (jobs[0].status == 0, jobs[0].ending), alone)

    def unreadable(jobs: list[Job]) -> tuple[bool, str]:
        raise OSError("cannot be read")

    lasts = part("lasts", "import time; time.sleep(600)", limit=0.5)
    asked = [part("fine", "pass"), part("dies", "import sys; sys.exit('of something')"), lasts]
    asked += [part("alone", "pass", alone=True), Part("odd", "", [], unreadable)]
    assert not run_parts(asked, time.monotonic() + 600, 2)
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.split("took\n")[1].splitlines()}
    assert "ok" in rows["fine"]
    assert "ok" in rows["alone"]
    assert "FAILED  exit status 1" in rows["dies"]
    assert "FAILED  out of time" in rows["lasts"]
    assert "FAILED  OSError: cannot be read" in rows["odd"]
    assert "of something" in said
    assert run_parts([part("fine", "pass")], time.monotonic() + 600, 2)
    assert not run_parts([part("late", "pass")], time.monotonic(), 2)
