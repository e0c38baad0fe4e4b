"""What runs in a process of its own: `python -m tests.gpu.engine ask|sleep CELL OUT`, or `… configure CELL…`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.installed import inspect_here
from vllm_pp_fixes.demo.engine import Cell, arguments, ask, run, start


def held(model: Any) -> float:
    """Return the largest number in a model's buffers of levels, whoever made them; infinite if one is none."""
    from tests.stages.graphs import level_buffers

    largest = max((float(each.abs().max()) for each in level_buffers(model)), default=0.0)
    return largest if largest < float("inf") else float("inf")


def sleep_and_wake(cell: Cell) -> dict[str, Any]:
    """Ask an engine, let it sleep at level 2, wake it as vLLM's documentation does, ask it again.

    The weights are zeroed in between: on a CPU sleep takes nothing away, and there too they must come from the disk.
    """
    llm = start(cell)
    before = ask(llm, cell)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reset_weights")
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    (left,) = llm.apply_model(held)
    return {"before": before, "after": ask(llm, cell), "left": left}


def configure(cells: list[Cell]) -> None:
    """Let vLLM check the arguments of each cell, as far as it does so on a CPU."""
    from vllm.engine.arg_utils import EngineArgs

    for cell in cells:
        given = EngineArgs(**arguments(cell))
        if not given.enable_sleep_mode:  # which only a GPU has
            given.create_engine_config()


def main(verb: str, *paths: str) -> None:
    inspect_here()
    if verb == "configure":
        configure([Cell(**json.loads(Path(path).read_text())) for path in paths])
        return
    cell, out = Cell(**json.loads(Path(paths[0]).read_text())), Path(paths[1])
    out.write_text(json.dumps(run(cell) if verb == "ask" else sleep_and_wake(cell)))
    # A result is a result, however the engine's threads end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
