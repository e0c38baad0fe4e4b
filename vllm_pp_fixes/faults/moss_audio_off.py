"""MOSS-Audio without its tower: the constructor reads a value back from a tensor on the meta device."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..fault import Cure, Fault
from ..source import Tree, own_method, path_of


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the constructor of the tower calls `.item()`."""
    init = own_method(tree.cls(path_of(model), "MossAudioEncoder"), "__init__")
    return init is not None and any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"
        for node in ast.walk(init)
    )


@contextmanager
def readable_tensors(upstream: type, vllm_config: Any) -> Iterator[None]:
    """Let the module of `upstream` read values back from the tensors that it writes down with `torch.tensor`.

    A tower that is skipped is built on the meta device, where `Tensor.item` fails.
    """
    import torch

    class TorchWithTensorsOnCpu:
        """`torch` whose `tensor` makes tensors that hold their values, whatever device is the default."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def tensor(self, data: Any, **options: Any) -> torch.Tensor:
            return torch.tensor(data, **{"device": "cpu", **options})

    with mock.patch.object(sys.modules[upstream.__module__], "torch", TorchWithTensorsOnCpu()):
        yield


FAULT = Fault(
    id="moss-audio-off",
    hits=("moss_audio",),
    ranges=(("0.24.0", "0.32.0"),),
    effect="refuses",
    symptom="audio=0: `Tensor.item() cannot be called on meta tensors` while the tower is built",
    upstream="fixed 0.33.0",
    remedy="the constructor reads its sizes from tensors on the CPU",
    until="0.33.0",
    probe=probe,
    cure=lambda: Cure(readable_tensors),
    rests_on={
        "audio_encoder.__init__": "reads back, with `.item()`, only tensors that it wrote down with `torch.tensor`"
    },
)
