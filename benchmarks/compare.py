"""Upstream against ours at splits that upstream accepts: time for the same batches, bytes sent, operations a forward.

    uv run python -m benchmarks.compare [--pairs 20]

Machines are noisy. Both engines are alive at once and are asked the same batches in turn; which one is first changes
from pair to pair. Each pair gives two ratios of ours to upstream: of CPU seconds (user and system, all processes of the
engine) and of wall time. Where the quartiles of a ratio include 1, no difference is seen. The splits: one stage, and
3+3, where the first stage holds all three levels; run plainly (mode 1 on the CPU) and compiled by inductor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engine.cells import DEFAULT_COMPILE, UPSTREAM
from tests.stages.pipeline import Count, Model, Pipeline, engine_config, picture_batch, start_distributed, text_batch
from vllm_pp_fixes.demo.engine import Cell
from vllm_pp_fixes.demo.examples import tiny
from vllm_pp_fixes.demo.forkserver import ForkServer, Running

BATCH = ["text", "picture", "text2", "pictures", "video", "text", "picture2", "text2"]
WARM_UP = 2
MAX_TOKENS = 16
TIMEOUT = 600
OURS: dict[str, str] = {}
SPLITS: tuple[tuple[int, ...], ...] = ((6,), (3, 3))
Ratios = dict[str, list[float]]


def pairs_of(engines: ForkServer, model: Path, split: tuple[int, ...], pairs: int, **engine: Any) -> Ratios:
    """Ratios of ours to upstream, one a pair of batches, of CPU seconds and of wall time."""
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, env: dict[str, str]) -> Running:
            turns = Path(folder) / name
            turns.mkdir()
            stages = list(split) if len(split) > 1 else []
            settings = {"dtype": "float32", "enable_prefix_caching": False, **engine}
            batches = [BATCH] * (WARM_UP + pairs)
            cell = Cell(str(model), batches, split=stages, max_tokens=MAX_TOKENS, env=env, engine=settings)
            cell.turns = str(turns)
            return engines.start(cell)

        running = {"upstream": start("upstream", UPSTREAM), "ours": start("ours", OURS)}
        for i in range(WARM_UP + pairs):
            for name in ("upstream", "ours") if i % 2 else ("ours", "upstream"):
                turn, deadline = Path(running[name].cell.turns) / str(i), time.monotonic() + TIMEOUT
                turn.with_suffix(".go").touch()
                while not turn.with_suffix(".done").exists() and not running[name].over():
                    assert time.monotonic() < deadline, f"{name}: batch {i} is not over after {TIMEOUT} s"
                    time.sleep(0.005)
        outcomes = {name: each.outcome(TIMEOUT) for name, each in running.items()}
    for name, outcome in outcomes.items():
        assert outcome.result, f"{name}: {outcome.log[-4000:]}"
    theirs, ours = (outcomes[name].result or {} for name in ("upstream", "ours"))
    assert theirs["tokens"] == ours["tokens"]
    return {
        kind: [b / a for a, b in zip(theirs[kind][WARM_UP:], ours[kind][WARM_UP:], strict=True)]
        for kind in ("cpu_seconds", "seconds")
    }


def verdict(ratios: list[float]) -> str:
    """Median and quartiles of some ratios, and what they say."""
    low, median, high = statistics.quantiles(ratios, n=4)
    said = "no difference seen" if low <= 1 <= high else "ours takes more" if low > 1 else "ours takes less"
    return f"{median:.3f} ({low:.3f} to {high:.3f}): {said}"


def counts(cls: type, model: Path, split: tuple[int, ...]) -> tuple[int, list[int]]:
    """Bytes over all boundaries, and operations of each stage's forward, for a batch of a picture and one of text."""
    pipeline = Pipeline([Model(cls, engine_config(str(model)), split, rank) for rank in range(len(split))])
    sent, operations = 0, []
    for batch in (picture_batch(1), text_batch(16, 2)):
        with Count() as count:
            pipeline.run(batch)
        operations.append(len(count.operations))
        sent += sum(tensor.nbytes for boundary in pipeline.sent for tensor in boundary.values())
    return sent, operations


def show(split: tuple[int, ...]) -> str:
    return "+".join(map(str, split)) if len(split) > 1 else "1 stage"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of batches after warm-up (default: 20)")
    pairs = parser.parse_args().pairs
    model = tiny("qwen3_vl")
    print(f"ours : upstream, {pairs} pairs of batches, median (quartiles)")
    row = "{:<9}{:<10}{:<48}{}".format
    print(row("split", "", "CPU seconds", "wall time"), flush=True)
    with tempfile.TemporaryDirectory() as folder, ForkServer(Path(folder)) as engines:
        for split in SPLITS:
            for name, engine in (("plain", {}), ("compiled", DEFAULT_COMPILE)):
                ratios = pairs_of(engines, model, split, pairs, **engine)
                print(row(show(split), name, verdict(ratios["cpu_seconds"]), verdict(ratios["seconds"])), flush=True)

    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Upstream

    from vllm_pp_fixes.models.qwen3_vl import Qwen3VLForConditionalGeneration as Ours

    start_distributed()
    row = "{:<9}{:<10}{:<14}{}".format
    # Printed in the end: vLLM logs to the same place while it builds the models.
    table = [row("split", "", "bytes sent", "operations (picture, text)")]
    for split in SPLITS:
        for name, cls in (("upstream", Upstream), ("ours", Ours)):
            table.append(row(show(split), name, *map(str, counts(cls, model, split))))
    table.append(row("1+5", "ours", *map(str, counts(Ours, model, (1, 5)))) + " (upstream refuses)")
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
