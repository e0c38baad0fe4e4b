"""What a checkpoint's safetensors files say of their tensors, read from the headers alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """A tensor as a header names it."""

    name: str
    dtype: str
    """As safetensors writes it: `BF16`, `F8_E4M3`, `I32`."""
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> float:
        """Bytes an element, from the digits of the dtype: 0.5 for `F4`, 1 for `BOOL`."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits[0]) / 8 if digits else 1

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.ceil(math.prod(self.shape) * self.itemsize)


def of_folder(folder: Path) -> list[Tensor]:
    """Return the tensors of the checkpoint in `folder`, those of its index where it has one; none without its files.

    Raises `ValueError`: a file is no safetensors file, or the index is broken.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    files = sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith(("consolidated", "adapter"))
    )
    wanted: dict[str, str] | None = None
    if index.is_file():
        try:
            wanted = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} holds no weight_map ({error}): fetch it anew") from None
        files = [folder / name for name in sorted(set(wanted.values()))]
        if not all(path.is_file() for path in files):
            return []
    tensors = []
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    if wanted is None or wanted.get(name) == path.name:
                        part = file.get_slice(name)
                        tensors.append(Tensor(name, part.get_dtype(), tuple(part.get_shape())))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no whole safetensors file ({error}): fetch it anew") from None
    return tensors


def of_hub(name: str) -> list[Tensor]:
    """Return the tensors of a checkpoint on the Hugging Face hub, by range requests for its headers.

    Raises what `huggingface_hub` raises: no such name, no network, no safetensors files.
    """
    from huggingface_hub import HfApi

    found = HfApi().get_safetensors_metadata(name)
    return [
        Tensor(tensor, info.dtype, tuple(info.shape))
        for file in found.files_metadata.values()
        for tensor, info in file.tensors.items()
    ]
