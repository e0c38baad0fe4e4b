"""The rows of the table of `python -m tests.gpu`: what each one runs, and when it is right."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engine.cells import SMALL_CHUNKS, UPSTREAM, log_lines
from tests.gpu.jobs import Job, Part
from tests.installed import FAULTS
from tests.models import ROWS
from vllm_pp_fixes.demo.engine import ENGINE_ENV, Cell, distance
from vllm_pp_fixes.demo.examples import tiny

ENV = {
    **ENGINE_ENV,
    # The engine's core in the process that is asked, so that its model can be looked at.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # No network: nothing looks for this machine's address, and nothing is reported.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer would compile its sampler, which no greedy answer goes through.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
}
GPU = SMALL_CHUNKS | {
    # Little memory for each engine, none of it measured: others run on the same GPU.
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 28,
    # As for a server's many requests: else vLLM captures 16 tokens at most for the 8 here, and no chunk with media.
    "max_cudagraph_capture_size": SMALL_CHUNKS["max_num_batched_tokens"],
}

TOLERANCES = {"float32": 0.02, "bfloat16": 0.4}
"""How far log-probabilities may be from those of the plain forward (nats). A GPU multiplies float32 in TF32 in places,
and compiled kernels round otherwise than plain ones. Seen on a CPU, in bfloat16: MOSS-Audio compiled is off by 0.08,
without its levels by 1.6; it and Qwen3-VL are off by 0.4 from float32."""
WRONG = 0.8

RING = [f"tests/stages/test_{name}.py" for name in ("splits", "qwen3_vl", "positions")]
GRAPHS = ["tests/stages/test_graphs.py"]


def suite_part(name: str, device: str, dtype: str, folder: Path, *asked: str) -> Part:
    """Return a part that is tests in one process: the ring, or graphs around its stages."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
    env = ENV | {"VLLM_PP_FIXES_FEW_SPLITS": "1", "VLLM_PP_FIXES_DEVICE": device, "VLLM_PP_FIXES_DTYPE": dtype}

    def judge(jobs: list[Job]) -> tuple[bool, str]:
        (job,) = jobs
        counts = re.findall(r"^(\d+ \w+.*) in [\d.]+s", job.said, re.M)
        words = counts[-1] if counts else job.ending
        return job.status == 0 and "passed" in words, words

    return Part(
        name, f"{device}, {dtype}", [Job(f"{name} {dtype}", command, folder / f"{name}-{dtype}.json", env)], judge
    )


def cell(model_type: str, dtype: str, folder: Path, env: dict[str, str] | None = None, **engine: Any) -> Cell:
    """Return an engine at one stage, on the device and in the mode that are vLLM's default, but for `engine`."""
    checkpoint = tiny(model_type, folder / "checkpoints")
    return Cell(
        str(checkpoint), ROWS[model_type].asked, model_type, env=env or {}, engine=GPU | {"dtype": dtype} | engine
    )


def cell_job(folder: Path, name: str, cell: Cell, verb: str = "ask") -> Job:
    """Return the process that runs `cell`; each has a compile cache of its own."""
    base = folder / name.replace(" ", "-")
    base.with_suffix(".cell").write_text(json.dumps(asdict(cell)))
    command = [sys.executable, "-m", "tests.gpu.engine", verb, f"{base}.cell", f"{base}.json"]
    return Job(name, command, base.with_suffix(".json"), ENV | {"VLLM_CACHE_ROOT": str(base)})


def served(job: Job, model_type: str) -> tuple[bool, str]:
    """Tell whether an engine ran the class that it should have, and say which."""
    if left := re.search(rf"vllm_pp_fixes leaves .*{ROWS[model_type].class_name}.*", job.said):
        return False, left[0]
    if not FAULTS[model_type]:
        return True, "upstream's own class"
    return (True, "drop-in") if log_lines(job.said) else (False, "no drop-in, and no line says why")


def how(job: Job) -> str:
    """Say which runner and which attention an engine used, and whether it captured graphs, as its log has it."""
    attention = dict.fromkeys(re.findall(r"Using (\w+) attention backend", job.said))
    runner = "V2" if "Using V2 Model Runner" in job.said else "V1"
    return ", ".join([runner, *attention, "graphs" if "Graph capturing finished" in job.said else "no graphs"])


def engine_part(model_type: str, dtype: str, folder: Path) -> Part:
    """Return a part that compares our engine in its default mode with upstream's, run plainly.

    Where upstream is wrong once compiled, the part shows that too: else nobody knows that it would be noticed.
    """
    cells = {
        "plain": cell(model_type, dtype, folder, UPSTREAM, enforce_eager=True),
        "ours": cell(model_type, dtype, folder),
    }
    if "moss-compiled-drops-levels" in FAULTS[model_type]:
        cells["upstream"] = cell(model_type, dtype, folder, UPSTREAM)
    jobs = [cell_job(folder, f"{model_type} {dtype} {name}", each) for name, each in cells.items()]

    def judge(jobs: list[Job]) -> tuple[bool, str]:
        plain, ours, *theirs = jobs
        unfinished = [f"{job.name}: {job.ending}" for job in jobs if not job.result()]
        if unfinished:
            return False, "; ".join(unfinished)
        fit, who = served(ours, model_type)
        far, *lost = (distance(job.result(), plain.result()) for job in (ours, *theirs))
        words = [who, f"off by {far:.2g}", *(f"upstream by {each:.2g}" for each in lost), how(ours)]
        shown = all(each > WRONG for each in lost) and "no graphs" not in how(ours)
        return fit and shown and far <= TOLERANCES[dtype], "; ".join(words)

    return Part("engine, default mode", f"{model_type}, {dtype}", jobs, judge)


def sleep_part(model_type: str, folder: Path, **engine: Any) -> Part:
    """Return a part in which our engine sleeps at level 2, wakes, and answers as before; no level may be left."""
    slept = cell(model_type, "float32", folder, **engine)
    jobs = [cell_job(folder, f"{model_type} sleep", slept, "sleep")]

    def judge(jobs: list[Job]) -> tuple[bool, str]:
        (job,) = jobs
        if not (result := job.result()):
            return False, job.ending
        fit, who = served(job, model_type)
        far, left = distance(result["after"], result["before"]), result["left"]
        words = f"{who}; off by {far:.2g}; buffers hold up to {left:.2g}; {how(job)}"
        return fit and far <= TOLERANCES["float32"] and left == 0, words

    # vLLM asserts that falling asleep frees memory of the whole GPU.
    return Part("sleep level 2, wake", f"{model_type}, float32", jobs, judge, alone=True)


def gpu_parts(folder: Path) -> list[Part]:
    """Return every part, the most telling first, as they are begun in this order."""
    return [
        suite_part("full graphs", "cuda", "bfloat16", folder, *GRAPHS),
        engine_part("moss_audio", "float32", folder),
        suite_part("stages", "cuda", "bfloat16", folder, *RING),
        suite_part("full graphs", "cuda", "float32", folder, *GRAPHS),
        engine_part("moss_audio", "bfloat16", folder),
        suite_part("stages", "cuda", "float32", folder, *RING),
        *(engine_part(model_type, "float32", folder) for model_type in ROWS if model_type != "moss_audio"),
        *(sleep_part(model_type, folder, enable_sleep_mode=True) for model_type in ("moss_audio", "qwen3_vl")),
    ]


def dry_parts(folder: Path) -> list[Part]:
    """Return what a CPU can do of it: a stand-in for graphs, an engine that loads its weights again, configurations.

    It says nothing of CUDA. It shows that the command, its processes and its judgement work.
    """
    jobs = [job for part in gpu_parts(folder) for job in part.jobs]
    cells = [str(path) for job in jobs if (path := job.out.with_suffix(".cell")).exists()]
    command = [sys.executable, "-m", "tests.gpu.engine", "configure", *cells]

    def configured(jobs: list[Job]) -> tuple[bool, str]:
        return jobs[0].status == 0, f"{jobs[0].ending}, {len(cells)} cells, none run"

    return [
        suite_part("full graphs", "cpu", "bfloat16", folder, *GRAPHS, "-k", "moss_audio"),
        sleep_part("qwen3_vl", folder),
        Part(
            "engine, sleep", "configurations", [Job("configure", command, folder / "configure.json", ENV)], configured
        ),
    ]
