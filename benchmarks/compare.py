"""Upstream against ours at splits that upstream accepts: tokens a second, bytes sent a step, operations a forward.

    uv run python -m benchmarks.compare

Machines are noisy: speed is printed as a ratio of engines that took turns in this one run, never as a figure alone.
The splits: one stage, and 3+3, where the first stage holds all three levels.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.engine.cells import UPSTREAM
from tests.stages.pipeline import Count, Model, Pipeline, engine_config, picture_batch, start_distributed, text_batch
from vllm_pp_fixes.commands.checkpoint import tiny
from vllm_pp_fixes.commands.engine import Cell
from vllm_pp_fixes.commands.warm import Warm

TURNS = 3
BATCH = ["text", "picture", "text2", "pictures", "video", "text", "picture2", "text2"]
WARM_UP, COUNTED = 1, 4
MAX_TOKENS = 64


def tokens_per_second(warm: Warm, model: Path, split: list[int], env: dict[str, str]) -> list[float]:
    """Speeds of the counted batches of one engine."""
    cell = Cell(
        str(model),
        [BATCH] * (WARM_UP + COUNTED),
        split=split,
        max_tokens=MAX_TOKENS,
        env=env,
        engine={"dtype": "float32"},
    )
    outcome = warm.run(cell, timeout=600)
    assert outcome.result, outcome.log
    return [len(BATCH) * MAX_TOKENS / seconds for seconds in outcome.result["seconds"][WARM_UP:]]


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


def main() -> None:
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Upstream

    from vllm_pp_fixes.models.qwen3_vl import Qwen3VLForConditionalGeneration as Ours

    model = tiny("qwen3_vl")
    splits: tuple[tuple[int, ...], ...] = ((6,), (3, 3))
    speeds: dict[tuple[tuple[int, ...], str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Warm(Path(folder)) as warm:
        for split in splits:
            for _ in range(TURNS):
                for name, env in (("upstream", UPSTREAM), ("ours", {})):
                    stages = list(split) if len(split) > 1 else []
                    speeds.setdefault((split, name), []).extend(tokens_per_second(warm, model, stages, env))
    start_distributed()
    print(f"{'split':<8}{'':<12}{'tokens/s, ours : upstream':<28}{'bytes sent':<24}operations (picture, text)")
    for split in splits:
        ratio = statistics.median(speeds[split, "ours"]) / statistics.median(speeds[split, "upstream"])
        for name, cls in (("upstream", Upstream), ("ours", Ours)):
            sent, operations = counts(cls, model, split)
            shown = f"{ratio:.2f}" if name == "ours" else "1"
            print(f"{'+'.join(map(str, split)):<8}{name:<12}{shown:<28}{sent:<24}{operations}")
    sent, operations = counts(Ours, model, (1, 5))
    print(f"{'1+5':<8}{'ours':<12}{'upstream refuses':<28}{sent:<24}{operations}")


if __name__ == "__main__":
    main()
