"""`python -m tests.stages.plan_real FOLDER`: bytes of each stage of a Qwen3-VL-2B, real and planned.

Writes a checkpoint of that size with random weights into FOLDER (4.3 GB) where there is none, loads it stage by stage
into upstream's class and ours, and prints what each stage's parameters take beside what `plan` says.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.checkpoints import published
from tests.stages import pipeline as ring
from tests.stages.conftest import OURS, UPSTREAM, model_class
from tests.stages.test_plan import planned, stage_bytes
from vllm_pp_fixes.demo.examples import tiny


def make(folder: Path) -> None:
    """Write the checkpoint: sizes of the published one, tokenizer and processors of the tiny one."""
    small = tiny("qwen3_vl")
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    sizes, tensors = published("Qwen/Qwen3-VL-2B-Instruct")
    config = json.loads((small / "config.json").read_text())
    for part in ("text_config", "vision_config"):
        config[part] = {**config[part], "dtype": "bfloat16", "rope_theta": 5e6, **sizes[part]}
    del config["text_config"]["rope_parameters"]  # The small one's, which the published form replaces.
    config |= {"dtype": "bfloat16", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) for name, _, shape in tensors}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def main(folder: Path) -> None:
    if not (folder / "model.safetensors").exists():
        make(folder)
    ring.start_distributed()
    kept = []
    with (
        mock.patch.object(ring, "DTYPE", torch.bfloat16),
        mock.patch.object(ring, "process_weights_after_loading"),
    ):
        for package in (UPSTREAM, OURS):
            for split in ((14, 14), (10, 18)):
                plan = planned(folder, 2, ours=package == OURS, towers_first=package == OURS, dtype=torch.bfloat16)
                for rank, held in enumerate(plan.over(split)):
                    stage = ring.Model(model_class("qwen3_vl", package), ring.engine_config(str(folder)), split, rank)
                    said = sum(size for part, size in held.parts.items() if part != "buffers")
                    print(package.split(".")[0], split, rank, f"real {stage_bytes(stage.model):,} planned {said:,}")
                    for parameter in stage.model.parameters():
                        parameter.data = torch.empty(0)
                    kept.append(stage)  # vLLM remembers what is missing of a model by its address.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
