"""One real engine, asked a list of batches: the cell that the demo, the tests and the benchmark are made of."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from .examples import EXAMPLES
from .prompts import prompt

ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    # The CPU backend binds each rank to a NUMA node of its own unless told not to: with more ranks it would not start.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Cell:
    """What one engine is started with and asked: `batches`, lists of prompts (keys of `PROMPTS`), in turn."""

    model: str
    batches: list[list[str]]
    model_type: str = "qwen3_vl"
    """Which of `EXAMPLES` it is."""
    split: list[int] = field(default_factory=list)
    """Layers a stage, `[1, 5]`; empty for one stage."""
    tensor_parallel_size: int = 1
    max_tokens: int = 8
    env: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""
    turns: str = ""
    """Folder by which batches take turns with another engine's: batch `i` waits for the file `<i>.go` and leaves
    `<i>.done`. Empty: one batch follows the other."""
    call: str = ""
    """`module:function`, called with the engine and the cell to give the result, where not by asking `batches`."""


def run(cell: Cell) -> dict[str, Any]:
    """Start the engine of `cell`, ask it every batch, stop it.

    Returns `{"tokens": [[[id, ...] a prompt] a batch], "logprobs": the same shape, in nats, "seconds": [a batch],
    "cpu_seconds": [a batch]}`, the last one user and system time of all processes of the engine; or what `cell.call`
    returns. Whatever vLLM raises is passed on.
    """
    parent = os.getppid()
    llm = start(cell)
    if cell.call:
        module, _, function = cell.call.partition(":")
        result = getattr(import_module(module), function)(llm, cell)
    else:
        result = ask(llm, cell, parent)
    llm.llm_engine.engine_core.shutdown()
    return result


def start(cell: Cell) -> Any:
    """Start the engine of `cell` (a `vllm.LLM`) in the environment that it asks for."""
    os.environ.update({**ENGINE_ENV, **cell.env})
    if cell.split:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, cell.split))
    from vllm import LLM

    return LLM(**arguments(cell))


def arguments(cell: Cell) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for `cell`, on the device that vLLM found."""
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "disable_log_stats": True}
    if current_platform.is_cpu():
        # Stock compile runs the plain forward; eager mode fails there with more than one stage, whatever the model.
        settings["compilation_config"] = {"mode": 1}
    return {
        "model": cell.model,
        "pipeline_parallel_size": max(1, len(cell.split)),
        "tensor_parallel_size": cell.tensor_parallel_size,
        **(settings | {**EXAMPLES[cell.model_type].engine} | cell.engine),
    }


def ask(llm: Any, cell: Cell, parent: int = 0) -> dict[str, Any]:
    """Ask a started engine every batch of `cell`; give up waiting for a turn when `parent` is this one's no more."""
    from vllm import SamplingParams

    marks = EXAMPLES[cell.model_type].marks
    sampling = SamplingParams(temperature=0.0, max_tokens=cell.max_tokens, logprobs=0, ignore_eos=True)
    tokens, logprobs, seconds, cpu_seconds = [], [], [], []
    for i, batch in enumerate(cell.batches):
        turn = Path(cell.turns) / str(i)
        while cell.turns and not turn.with_suffix(".go").exists():
            if os.getppid() != parent:
                raise RuntimeError("nobody is left to give this engine its turn")
            time.sleep(0.005)
        cpu, begun = cpu_time(), time.perf_counter()
        outputs = [
            o.outputs[0] for o in llm.generate([prompt(name, marks) for name in batch], sampling, use_tqdm=False)
        ]
        seconds.append(time.perf_counter() - begun)
        cpu_seconds.append(cpu_time() - cpu)
        if cell.turns:
            turn.with_suffix(".done").touch()
        tokens.append([list(o.token_ids) for o in outputs])
        logprobs.append([[step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs])
    return {"tokens": tokens, "logprobs": logprobs, "seconds": seconds, "cpu_seconds": cpu_seconds}


def cpu_time() -> float:
    """Return the seconds of user and system time that this process and those that it started have used."""
    import psutil  # vLLM brings it

    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far two results are apart: the largest difference of log-probabilities, in nats.

    Steps after the first differing token are conditioned on other texts, so each prompt is compared up to and
    including that step; a differing token itself counts for at least 1e-3, however near the two were. What is no
    number is infinitely far from everything.
    """
    worst = 0.0
    for tokens_a, tokens_b, logs_a, logs_b in zip(
        _flat(one["tokens"]), _flat(other["tokens"]), _flat(one["logprobs"]), _flat(other["logprobs"]), strict=True
    ):
        for token_a, token_b, log_a, log_b in zip(tokens_a, tokens_b, logs_a, logs_b, strict=True):
            apart = abs(log_a - log_b)
            worst = max(worst, math.inf if math.isnan(apart) else apart, 0.0 if token_a == token_b else 1e-3)
            if token_a != token_b:
                break
    return worst


def _flat(batches: list[list[Any]]) -> list[Any]:
    return [prompt for batch in batches for prompt in batch]
