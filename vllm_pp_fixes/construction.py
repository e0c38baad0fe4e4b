"""Running upstream's constructor under corrected conditions, without a copy of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig

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
    (faults split-refused, start-layer). Modules other than `upstream`'s, the text model's among them, still see the
    real stage.
    """
    module = sys.modules[upstream.__module__]
    first = _AsFirst(module.get_pp_group())
    with mock.patch.object(module, "get_pp_group", return_value=first):
        yield


@contextmanager
def named_architecture(upstream: type) -> Iterator[None]:
    """Give the configuration that `upstream`'s constructor makes for its text model the architecture that it lacks.

    Published checkpoints name none there, and vLLM looks it up with more than one stage (fault text-architectures,
    #43271). The text model's class inherits from the one that bears the name. The checkpoint's own configuration is
    left as it is: vLLM copies what it gives an architecture to.
    """
    of_experts = hasattr(sys.modules[upstream.__module__], "Qwen3MoeForCausalLM")
    derive = VllmConfig.with_hf_config

    def with_hf_config(self: Any, hf_config: Any, architectures: list[str] | None = None) -> Any:
        if architectures is None and not getattr(hf_config, "architectures", None):
            architectures = ["Qwen3MoeForCausalLM" if of_experts else "Qwen3ForCausalLM"]
        return derive(self, hf_config, architectures)

    with mock.patch.object(VllmConfig, "with_hf_config", with_hf_config):
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


CONDITIONS: dict[str, Callable[[type], AbstractContextManager[None]]] = {
    "text-architectures": named_architecture,
    "start-layer": as_first_stage,
    "split-refused": as_first_stage,
    "split-refused-towerless": as_first_stage,
    "moss-audio-off": readable_tensors,
}
"""What has to hold while upstream's constructor runs, by the fault that it cures."""


@contextmanager
def corrected(upstream: type, faults: tuple[str, ...]) -> Iterator[None]:
    """Run the constructor of `upstream` under the conditions that cure its `faults`."""
    with ExitStack() as stack:
        for condition in {CONDITIONS[fault] for fault in faults if fault in CONDITIONS}:
            stack.enter_context(condition(upstream))
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
    towers = "+".join(asked_for(vllm_config, "audio", "image", "video"))
    vllm_config.additional_config = {**extra, "vllm_pp_fixes": f"{__version__} {overrides} {towers}"}


def asked_for(vllm_config: Any, *modalities: str) -> list[str]:
    """Return those modalities that `--limit-mm-per-prompt` does not leave out.

    Asked of the limits, not of the towers: from 0.33 on, runner V2 builds towers on the first stage only.
    """
    limit = vllm_config.model_config.multimodal_config.get_limit_per_prompt
    return [modality for modality in modalities if limit(modality) > 0]
