"""Tiny checkpoints with real random weights, made on the spot: no download, real loading code.

Six text layers and three DeepStack levels, hidden size 64, float32. Weights are drawn large enough that
losing one level moves log-probabilities by more than 1 (initial weights of 1e-3 would hide every fault).
"""

from __future__ import annotations

import os
from pathlib import Path

from ..version import __version__
from .make_others import MOSS_AUDIO, STEP3_TEXT
from .make_qwen3 import QWEN3_OMNI, QWEN3_VL, QWEN3_VL_MOE


def cache_folder() -> Path:
    """Return the folder that holds what this version's commands make (`XDG_CACHE_HOME` is honoured)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm_pp_fixes" / __version__


EXAMPLES = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_omni_moe_thinker": QWEN3_OMNI,
    "moss_audio": MOSS_AUDIO,
    "step3_text": STEP3_TEXT,
}
"""How each model is shown, by the name of its module."""


def tiny(model_type: str, folder: Path | None = None, **sizes: int) -> Path:
    """Return the folder of a tiny checkpoint of `model_type`, making it on first use.

    A checkpoint that was left half made is made again: the last file written marks it whole.
    """
    name = "-".join([model_type, *(f"{k}{v}" for k, v in sorted(sizes.items()))])
    path = (folder or cache_folder()) / name
    done = path / ".complete"
    if not done.exists():
        from transformers.utils import logging

        logging.disable_progress_bar()
        path.mkdir(parents=True, exist_ok=True)
        EXAMPLES[model_type].make(path, **sizes)
        done.touch()
    return path
