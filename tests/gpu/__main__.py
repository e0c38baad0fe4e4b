"""What only a GPU can show, in one command: `python -m tests.gpu`, for one GPU and ten minutes, without a network.

CONTRIBUTING.md says how such a machine is set up. The table stands at the end whatever happens; the exit status is 1
if a part failed. Without a GPU one line says so, and a dry part runs on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path

from tests.gpu.jobs import run_parts
from tests.gpu.parts import dry_parts, gpu_parts

BUDGET = 540
"""Seconds for all parts; a minute of ten is left to start and to print."""


def why_no_gpu() -> str:
    """Say why no GPU can be used here; empty if one can."""
    import torch
    from vllm.platforms import current_platform

    if not torch.cuda.is_available():
        return "torch sees none"
    return (
        "" if current_platform.is_cuda() else f"vLLM's build runs on {current_platform.device_type or 'nothing here'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where logs, results and checkpoints go (default: a temporary one)")
    options = parser.parse_args()
    deadline = time.monotonic() + BUDGET
    if why := why_no_gpu():
        print(f"no GPU here: {why}, running the dry part", flush=True)
    if not entry_points(group="vllm.general_plugins", name="vllm_pp_fixes"):
        print("vllm_pp_fixes is not installed here: vLLM would not find its plugin")
        return 2
    folder = options.folder or Path(tempfile.mkdtemp(prefix="vllm_pp_fixes-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    at_once = max(2, min(8, (os.cpu_count() or 2) // 2))
    return 0 if run_parts(dry_parts(folder) if why else gpu_parts(folder), deadline, at_once) else 1


if __name__ == "__main__":
    sys.exit(main())
