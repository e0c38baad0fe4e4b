"""What a checkpoint's configuration says of its stages: architecture, layers, DeepStack levels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..catalog import MODELS
from . import CommandError


@dataclass(frozen=True)
class Configuration:
    """The `config.json` of a checkpoint that a drop-in serves."""

    architecture: str
    model: str
    """The module of `MODELS` that serves it."""
    layers: int
    levels: int

    @classmethod
    def read(cls, folder: Path) -> Configuration:
        """Read the configuration in `folder`. Raises `CommandError`: none there, or no drop-in for it."""
        path = folder / "config.json"
        if not path.is_file():
            raise CommandError(f"{path} does not exist: name the folder of a checkpoint")
        config = json.loads(path.read_text())
        known = {architecture: model for model, served in MODELS.items() for architecture in served}
        architectures = config.get("architectures") or ["no architecture"]
        architecture = next((name for name in architectures if name in known), None)
        if architecture is None:
            raise CommandError(f"{path} names {', '.join(architectures)}; known are {', '.join(known)}")
        config = config.get("thinker_config", config)
        text = config.get("text_config") or config.get("language_config") or config
        vision, audio = config.get("vision_config") or {}, config.get("audio_config") or {}
        levels = len(vision.get("deepstack_visual_indexes") or audio.get("deepstack_encoder_layer_indexes") or ())
        return cls(architecture, known[architecture], text["num_hidden_layers"], levels)
