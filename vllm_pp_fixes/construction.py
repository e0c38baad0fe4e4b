"""Running upstream's constructor under corrected conditions, without a copy of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from . import __version__


class _AsFirst:
    """A pipeline group that says it is the first stage; all else, `is_last_rank` too, stays true to life."""

    is_first_rank = True

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def as_first_stage(upstream: type) -> Iterator[None]:
    """Let the constructor of `upstream` believe that it builds the first stage.

    The Qwen3-VL constructors refuse a split only off the first stage, and ask for nothing else there
    (fault split-refused). Modules other than `upstream`'s, the text model's among them, still see the real stage.
    """
    module = sys.modules[upstream.__module__]
    first = _AsFirst(module.get_pp_group())
    with mock.patch.object(module, "get_pp_group", return_value=first):
        yield


class _OnCpu:
    """`torch` whose `tensor` makes tensors that hold their values, whatever device is the default."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **{"device": "cpu", **options})


@contextmanager
def readable_tensors(upstream: type) -> Iterator[None]:
    """Let the module of `upstream` read values back from the tensors that it writes down with `torch.tensor`.

    A tower that is skipped is built on the meta device, where `Tensor.item` fails (fault moss-audio-off).
    """
    with mock.patch.object(sys.modules[upstream.__module__], "torch", _OnCpu()):
        yield


def mark_compile_cache(vllm_config: Any, overrides: str) -> None:
    """Make the key of vLLM's compile cache see the drop-in and its towers (fault compile-cache-shared, #50891).

    The key is made of the config, the environment and the traced files; the inner model's file is upstream's with
    or without a drop-in, and up to 0.32 the towers that `--limit-mm-per-prompt` leaves out are in none of them, so
    that a start would load a graph that another one traced. `additional_config` is part of the key and is handed
    down to the inner model's config; a platform that puts an object of its own there keeps it, and this does nothing.
    """
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return
    limit = vllm_config.model_config.multimodal_config.get_limit_per_prompt
    towers = [modality for modality in ("audio", "image", "video") if limit(modality) > 0]
    vllm_config.additional_config = {**extra, "vllm_pp_fixes": f"{__version__} {overrides} {'+'.join(towers)}"}
