"""Processes with a time-out each, and the table of what they left: `tests.gpu.parts` says which, and judges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """A process, and how it ended."""

    name: str
    command: list[str]
    out: Path
    """JSON that it may write; its log lies beside it."""
    env: dict[str, str] = field(default_factory=dict)
    limit: float = 300
    status: int | None = None
    """Exit status; None if its time ran out."""
    seconds: float = 0

    def run(self, deadline: float) -> None:
        """Run it, in a process group of its own, which ends with it."""
        begun = time.monotonic()
        left = min(self.limit, deadline - begun)
        if left <= 0:
            self.log.write_text("not started: no time was left\n")
            return
        with self.log.open("w") as log:
            env = {**os.environ, **self.env}
            process = subprocess.Popen(
                self.command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                self.status = process.wait(left)
            except subprocess.TimeoutExpired:
                log.write(f"\nended after {left:.0f} s\n")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.seconds = time.monotonic() - begun
        print(f"{self.name}: {self.ending}", flush=True)

    @property
    def log(self) -> Path:
        return self.out.with_suffix(".log")

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def ending(self) -> str:
        return "out of time" if self.status is None else f"exit status {self.status}"

    def result(self) -> Any:
        """Return what it wrote; None where it wrote nothing."""
        return json.loads(self.out.read_text()) if self.out.exists() else None


@dataclass
class Part:
    """A row of the table: its processes, and what is read off them: whether it is right, and in words."""

    name: str
    what: str
    jobs: list[Job]
    judge: Callable[[list[Job]], tuple[bool, str]]
    alone: bool = False
    """Nothing else may use the GPU meanwhile."""

    def verdict(self) -> tuple[bool, str]:
        try:
            return self.judge(self.jobs)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"


def run_parts(parts: list[Part], deadline: float, at_once: int) -> bool:
    """Run all parts, print the ends of failed ones' logs and the table; return whether every part is right."""
    with ThreadPoolExecutor(at_once) as pool:
        for job in (job for part in parts if not part.alone for job in part.jobs):
            pool.submit(job.run, deadline)
    for job in (job for part in parts if part.alone for job in part.jobs):
        job.run(deadline)
    verdicts = [part.verdict() for part in parts]
    for part, (right, _) in zip(parts, verdicts, strict=True):
        for job in part.jobs if not right else []:
            print(f"\n---- {job.name}, {job.ending}, the end of {job.log}\n{job.said[-1500:]}")
    rows = [("part", "what", "", "result", "took")]
    for part, (right, words) in zip(parts, verdicts, strict=True):
        took = f"{sum(job.seconds for job in part.jobs):.0f} s"
        rows.append((part.name, part.what, "ok" if right else "FAILED", words, took))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return all(right for right, _ in verdicts)
