import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from vllm_pp_fixes.demo.examples import tiny

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Give the folder of a tiny checkpoint of a model_type; each is made once a session."""
    return partial(tiny, folder=tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3_vl(checkpoint: Checkpoint) -> Path:
    return checkpoint("qwen3_vl")


def edited(checkpoint: Path) -> Path:
    """Return a copy whose text configuration names its architecture, as users edit theirs for an upstream that asks.

    It is what upstream's other faults are seen with where text-architectures would hide them.
    """
    copy = checkpoint.with_name(f"{checkpoint.name}-edited")
    if not copy.exists():
        shutil.copytree(checkpoint, copy)
        config = json.loads((copy / "config.json").read_text())
        if text := config.get("text_config"):
            text["architectures"] = ["Qwen3MoeForCausalLM" if "num_experts" in text else "Qwen3ForCausalLM"]
        (copy / "config.json").write_text(json.dumps(config))
    return copy
