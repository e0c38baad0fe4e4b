"""Tiny checkpoints beyond those of the demo, each made from one of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from vllm_pp_fixes.demo.making import draw

from .features import ADAPTER, OTHER

WEIGHTS = "model.safetensors"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def tied(folder: Path, levels: tuple[str, ...] = ("", "text_config")) -> None:
    """No weights of an output layer; `tie_word_embeddings` at the top or in the text's configuration, or at neither.

    Beside it stand other weights of the same shapes.
    """
    weights = load_file(folder / WEIGHTS)
    del weights["lm_head.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})

    def say(config: dict[str, Any]) -> None:
        for level in ("", "text_config"):
            at = config[level] if level else config
            at.pop("tie_word_embeddings", None)
            if level in levels:
                at["tie_word_embeddings"] = True

    edit(folder / "config.json", say)
    twin = folder.with_name(f"{folder.name}-{OTHER}")
    shutil.copytree(folder, twin)
    save_file(draw({n: w.shape for n, w in weights.items()}, seed=1), twin / WEIGHTS, {"format": "pt"})


def variant(base: Path, name: str, change: Callable[[Path], None]) -> Path:
    """Return a changed copy of a checkpoint, made on first use."""
    copy = base.with_name(f"{base.name}-{name}")
    if not copy.exists():
        shutil.copytree(base, copy)
        change(copy)
    return copy
