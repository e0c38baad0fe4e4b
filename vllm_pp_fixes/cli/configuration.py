"""What a checkpoint's configuration says of its stages: architecture, layers, DeepStack levels."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..planning.weights import sections
from ..registry import ARCHITECTURES
from . import CommandError

TARGETS = "target_layer_ids"


def read(model: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of the `config.json` of `model`, as `vllm serve` takes it.

    That is a folder, or a name on the Hugging Face hub. Raises `CommandError` where there is none.
    """
    path = _locate(model)
    try:
        return path, json.loads(path.read_text())
    except ValueError as error:
        raise CommandError(f"{path} is no JSON: {error}") from None


@dataclass(frozen=True)
class Configuration:
    """The `config.json` of a checkpoint that a drop-in serves."""

    architecture: str
    model: str
    """The module of `MODELS` that serves it."""
    layers: int
    levels: int

    @classmethod
    def read(cls, model: str) -> Configuration:
        """Read the configuration of `model`. Raises `CommandError`: none there, or no drop-in for it."""
        path, config = read(model)
        architectures = config.get("architectures") or ["no architecture"]
        architecture = next((name for name in architectures if name in ARCHITECTURES), None)
        if architecture is None:
            raise CommandError(f"{path} names {', '.join(architectures)}; known are {', '.join(ARCHITECTURES)}")
        text, vision, audio = sections(config)
        levels = len(vision.get("deepstack_visual_indexes") or audio.get("deepstack_encoder_layer_indexes") or ())
        if "num_hidden_layers" not in text:
            raise CommandError(f"{path} does not say num_hidden_layers: name a checkpoint with a full configuration")
        return cls(architecture, ARCHITECTURES[architecture], text["num_hidden_layers"], levels)


@dataclass(frozen=True)
class Draft:
    """The `config.json` of a draft for speculative decoding."""

    architecture: str
    reads: bool
    """Whether it reads auxiliary states of the target."""
    states: tuple[int, ...]
    """Those that it names, `L` being what enters layer `L`; none where the target's class chooses."""

    @classmethod
    def read(cls, model: str) -> Draft:
        """Read the configuration of a draft. Raises `CommandError`: none there, or it names no architecture."""
        path, config = read(model)
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture is None:
            raise CommandError(f"{path} names no architecture: name the checkpoint of a draft")
        nested = {**(config.get("eagle_config") or {}), **(config.get("dflash_config") or {})}
        entered = config.get("eagle_aux_hidden_state_layer_ids")
        # DFlash and DSpark count the layers that a state leaves.
        left = next(filter(None, (nested.get(TARGETS), *map(config.get, ("dspark_target_layer_ids", TARGETS)))), ())
        states = entered or [layer + 1 for layer in left] or nested.get("layer_ids") or ()
        kinds = ("eagle3", "dflash", "dspark")
        return cls(architecture, any(kind in architecture.lower() for kind in kinds), tuple(sorted({*states})))


def _locate(model: str) -> Path:
    """Return the `config.json` of a folder; of a name, from the hub's local cache, or fetched alone."""
    folder = Path(model).expanduser()
    if (path := folder / "config.json").is_file():
        return path
    if folder.exists() or folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CommandError(f"{path} does not exist: name a checkpoint by its folder, or as ORGANISATION/MODEL")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    except ImportError:
        raise CommandError(
            f"{model} is no folder, and huggingface_hub, which looks a name up, is not installed here: name a folder"
        ) from None
    try:
        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            get_hf_file_metadata(hf_hub_url(model, "config.json"))  # the download itself tries for half a minute
            cached = hf_hub_download(model, "config.json")
        return Path(cached)
    except Exception as error:
        # The library's errors, and those of the one below it, differ from release to release.
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CommandError(
            f"{model} is no folder, nor in the local Hugging Face cache, and cannot be fetched ({why}): name the "
            "folder of a checkpoint"
        ) from None
