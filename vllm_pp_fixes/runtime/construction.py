"""Running upstream's constructor under corrected conditions, without a copy of it; the key of its compiled graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..version import identity


class Instead:
    """An object with some attributes of its own; all others stay those of `real`."""

    def __init__(self, real: Any, **own: Any) -> None:
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def as_first_stage(upstream: type, vllm_config: Any) -> Iterator[None]:
    """Let the constructor of `upstream` believe that it builds the first stage.

    The Qwen3-VL constructors refuse a split only off the first stage, and ask for nothing else there. Modules other
    than `upstream`'s, the text model's among them, still see the real stage.
    """
    module = sys.modules[upstream.__module__]
    first = Instead(module.get_pp_group(), is_first_rank=True)
    with mock.patch.object(module, "get_pp_group", return_value=first):
        yield


def mark_compile_cache(vllm_config: Any, cured: str) -> None:
    """Make the key of vLLM's compile cache see the drop-in and its towers (#50891).

    The key is made of the config, the environment and the traced files; the inner model's file is upstream's with
    or without a drop-in, and up to 0.32 the towers that `--limit-mm-per-prompt` leaves out are in none of them, so
    that a start would load a graph that another one traced. `additional_config` is part of the key and is handed
    down to the inner model's config; a platform that puts an object of its own there keeps it, and this does nothing.
    """
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return
    towers = "+".join(asked_for(vllm_config, "audio", "image", "video"))
    vllm_config.additional_config = {**extra, "vllm_pp_fixes": f"{identity()} {cured} {towers}"}


def asked_for(vllm_config: Any, *modalities: str) -> list[str]:
    """Return those modalities that `--limit-mm-per-prompt` does not leave out; none of a model of text alone.

    Asked of the limits, not of the towers: from 0.33 on, runner V2 builds towers on the first stage only.
    """
    config = vllm_config.model_config.multimodal_config
    return [modality for modality in modalities if config is not None and config.get_limit_per_prompt(modality) > 0]
