"""What the engine tests ask, and how an engine is made to run as on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_pp_fixes.commands.engine import Cell

UPSTREAM = {"VLLM_PP_FIXES_DISABLE": "1"}
"""Environment that leaves upstream's classes in place."""

NO_TOWER: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}

TEXT = [["text"], ["text2", "text"]]
ALL = [["text"], ["picture"], ["text2"], ["text", "picture", "pictures", "video", "large"], ["large"], *TEXT]
"""Text, a picture, text without payload after it, everything at once, a picture that the prefix cache holds in part,
and text again."""

SMALL_CHUNKS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 48, "block_size": 32}
"""Chunks and cache blocks that end inside pictures (`large` is 48 tokens of picture alone)."""

EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {}}
DEFAULT_COMPILE: dict[str, Any] = {"compilation_config": {}}
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

V2_ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": str(Path(__file__).parent / "triton_cpu"),
}
"""Environment in which runner V2 runs on the CPU."""


def cell(
    model: Path,
    *split: int,
    batches: list[list[str]] | None = None,
    env: dict[str, str] | None = None,
    tensor_parallel_size: int = 1,
    **engine: Any,
) -> Cell:
    return Cell(
        model=str(model),
        batches=batches or ALL,
        split=list(split),
        tensor_parallel_size=tensor_parallel_size,
        env=env or {},
        engine=SMALL_CHUNKS | engine,
    )
