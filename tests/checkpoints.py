"""Checkpoints of any size without weights: a `config.json`, true headers, and a hole where the numbers would be."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SIZES = json.loads((Path(__file__).parent / "sizes.json").read_text())
"""Published models: the fields of their configuration that count, and their tensors: name, then shape. `{36}` in a
name stands for the numbers 0 to 35."""
BITS = {"BF16": 16, "F16": 16, "F32": 32, "I32": 32, "F8_E4M3": 8, "U8": 8}

Named = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


def published(model: str) -> tuple[dict[str, Any], list[Named]]:
    """Return the configuration and the tensors of a model of `sizes.json`, in bfloat16."""
    entry = SIZES[model]
    tensors: list[Named] = []
    for pattern, *shape in entry["tensors"]:
        count = re.search(r"\{(\d+)\}", pattern)
        names = [pattern.replace(count[0], str(i)) for i in range(int(count[1]))] if count else [pattern]
        tensors += [(name, "BF16", tuple(shape)) for name in names]
    return entry["config"], tensors


def write_file(path: Path, tensors: Iterable[Named]) -> None:
    """Write a safetensors file with a header and a hole."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Iterable[Named]) -> Path:
    """Write a checkpoint of one file; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return folder
