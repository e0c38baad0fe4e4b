"""What the engine tests ask, how an engine is made to run as on a GPU, and how answers are compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.models import ROWS
from vllm_pp_fixes.demo.engine import Cell, distance
from vllm_pp_fixes.demo.forkserver import Outcome

UPSTREAM = {"VLLM_PP_FIXES_DISABLE": "1"}
"""Environment that leaves upstream's classes in place."""

SMALL_CHUNKS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 48, "block_size": 32}
"""Chunks and cache blocks that end inside pictures and sounds (the largest picture is 48 tokens alone)."""

EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {}}
DEFAULT_COMPILE: dict[str, Any] = {"compilation_config": {}}
"""The CPU's default: traced once, guards dropped, compiled by inductor."""
TRACE_ONCE: dict[str, Any] = {"compilation_config": {"mode": 2, "backend": "eager"}}
"""Traced once, guards dropped, not compiled."""
PIECEWISE: dict[str, Any] = {
    "compilation_config": {
        "mode": 3,
        "backend": "inductor",
        "cudagraph_mode": "NONE",
        "compile_sizes": [],
        "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False, "fuse_attn_quant": False},
    }
}
PIECEWISE_ENV = "VLLM_PP_FIXES_TEST_PIECEWISE"
ASYNC_ENV = "VLLM_PP_FIXES_TEST_ASYNC"
AHEAD = {ASYNC_ENV: "1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60"}
"""Environment in which runner V2 takes drafts over stages, and a stage that dies is noticed in a minute."""
RAY_ENV = "VLLM_PP_FIXES_TEST_RAY"
UNDER_RAY = {RAY_ENV: "1"}
"""Environment in which stages run as under Ray's compiled-graph executor."""
POSITIONS = "M-RoPE positions of stage 1"
"""What a stage's line says where they cross."""
PRUNED: dict[str, Any] = {"video_pruning_rate": 0.5}

V2_ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": str(Path(__file__).parent / "triton_cpu"),
}
"""Environment in which runner V2 runs on the CPU."""

LOADED = "Directly load AOT compilation"
REFUSAL = "start_layer should be greater than or equal to len(deepstack_visual_indexes)"


def cell(
    model: Path,
    *split: int,
    model_type: str = "qwen3_vl",
    batches: list[list[str]] | None = None,
    env: dict[str, str] | None = None,
    tensor_parallel_size: int = 1,
    **engine: Any,
) -> Cell:
    return Cell(
        model=str(model),
        batches=batches or ROWS[model_type].asked,
        model_type=model_type,
        split=list(split),
        tensor_parallel_size=tensor_parallel_size,
        env=env or {},
        engine=SMALL_CHUNKS | engine,
    )


def piecewise(model: Path, cache: Path, *split: int, env: dict[str, str] | None = None, **more: Any) -> Cell:
    """A cell that compiles as on a GPU, with its cache of graphs in `cache`."""
    env = {"VLLM_CACHE_ROOT": str(cache), PIECEWISE_ENV: "1", **(env or {})}
    return cell(model, *split, env=env, **PIECEWISE, **more)


def log_lines(log: str) -> list[str]:
    return re.findall(r"vllm_pp_fixes .* serves .*", log)


def assert_same(outcome: Outcome, reference: dict[str, Any], tolerance: float = 1e-4) -> None:
    assert outcome.result, outcome.log[-6000:]
    assert outcome.result["tokens"] == reference["tokens"]
    assert distance(outcome.result, reference) <= tolerance


def assert_wrong(outcome: Outcome, reference: dict[str, Any]) -> None:
    """Upstream's answers are far off: the comparison notices the fault that the drop-in cures."""
    assert outcome.result, outcome.log[-6000:]
    assert distance(outcome.result, reference) > 0.1, "upstream is right: is the drop-in still needed?"


def part_of(result: dict[str, Any], asked: list[list[str]], part: list[list[str]]) -> dict[str, Any]:
    """The part of a result on the batches `asked` that `part` asks too."""
    keep = [asked.index(batch) for batch in part]
    return {key: [result[key][i] for i in keep] for key in ("tokens", "logprobs")}
