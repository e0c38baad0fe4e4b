"""Engine cells forked from a process that has imported vLLM already: seconds a cell where a fresh start takes minutes.

`python -m vllm_pp_fixes.demo.forkserver [MODULE ...]` is that process (the modules are imported in it too);
`ForkServer` drives it. A cell and its workers run in a process group of their own, with a log of their own, and are
killed by that group's id when their time is up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .cpu import close_gaps, fork_workers, inspect_in_forks, know_instructions
from .engine import ENGINE_ENV, Cell, run


@dataclass
class Outcome:
    """What a cell gave: its result (see `engine.run`) or None, and its whole log."""

    result: dict[str, Any] | None
    log: str


class ForkServerError(RuntimeError):
    """The process did not start; the message is the end of its log."""


class ForkServer:
    """A process that has imported vLLM, started on entering the context; `run` forks a cell from it."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, modules: tuple[str, ...] = ()) -> None:
        self.folder, self.env, self.modules, self.cells = folder, env or {}, modules, 0

    def __enter__(self) -> ForkServer:
        log = self.folder / "forkserver.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *self.modules],
            env={**os.environ, **ENGINE_ENV, **self.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        ready = self.replies.readline().split()
        if not ready:
            raise ForkServerError(log.read_text(errors="replace")[-2000:])
        self.device, self.version = ready
        return self

    def __exit__(self, *error: object) -> None:
        self.requests.close()
        self.process.wait(timeout=60)

    def start(self, cell: Cell) -> Running:
        """Fork `cell`; it goes on while others are started."""
        self.cells += 1
        base = self.folder / f"cell{self.cells}"
        for suffix in (".done", ".json"):
            base.with_suffix(suffix).unlink(missing_ok=True)
        print(json.dumps({"cell": asdict(cell), "base": str(base)}), file=self.requests, flush=True)
        return Running(cell, base, int(self.replies.readline()))

    def run(self, cell: Cell, timeout: float = 300, wait: Callable[[], None] = lambda: time.sleep(0.05)) -> Outcome:
        """Run `cell`, calling `wait` until it is over. Raises `TimeoutError` after `timeout` seconds."""
        return self.start(cell).outcome(timeout, wait)


@dataclass
class Running:
    """A cell under way, and the process group that it runs in."""

    cell: Cell
    base: Path
    group: int

    def over(self) -> bool:
        """Tell whether it has ended, with a result or without."""
        return self.base.with_suffix(".done").exists()

    def outcome(self, timeout: float, wait: Callable[[], None] = lambda: time.sleep(0.05)) -> Outcome:
        """Call `wait` until it is over; end what is left of it. Raises `TimeoutError` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            while not self.over() and time.monotonic() < deadline:
                wait()
        finally:
            # The cell is over or out of time; its group may hold workers that a failed engine left.
            with suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
        log = self.base.with_suffix(".log").read_text(errors="replace")
        _remove_shared_memory(log)
        if not self.over():
            raise TimeoutError(f"not over after {timeout:.0f} s: {self.cell}\n{log[-4000:]}")
        result = self.base.with_suffix(".json")
        return Outcome(json.loads(result.read_text()) if result.exists() else None, log)


def _remove_shared_memory(log: str) -> None:
    """Remove what the CPU backend's ranks shared: it outlives them, and another engine on the same port dies of it."""
    for port in set(re.findall(r"distributed_init_method=tcp://[^ ]*:(\d+)", log)):
        for left in Path("/dev/shm").glob(f"{port}-*cpushm_*"):
            left.unlink(missing_ok=True)


def _child(cell: Cell, base: Path) -> None:
    """Run the cell in the forked child, and end it; a result is written only when there is one."""
    os.setsid()
    log = os.open(base.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        base.with_suffix(".json").write_text(json.dumps(run(cell)))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        base.with_suffix(".done").touch()
        os._exit(0)


def main(modules: list[str]) -> None:
    """Import vLLM, say which device it found, then fork a cell for each request."""
    # Older releases log to standard output, which the replies go to.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The engine core runs in the cell itself: one process less to start.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        print("none", vllm.__version__, file=replies, flush=True)
        return
    for module in (
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.qwen3_vl",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.multiproc_executor",
    ):
        import_module(module)
    if current_platform.is_cpu():
        fork_workers()
        close_gaps()
        inspect_in_forks()
        know_instructions()
    for module in modules:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: a cell says by a file that it is over
    print(current_platform.device_type, vllm.__version__, file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _child(Cell(**request["cell"]), Path(request["base"]))
        print(pid, file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
