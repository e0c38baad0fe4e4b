"""Pipeline parallelism of multimodal models in vLLM, repaired by drop-in model classes.

Importing the package loads neither torch nor vLLM. `register()` is what vLLM's plugin loader calls; in a custom
runner import a class from `vllm_pp_fixes.models`, or, for short, from here.
"""

from importlib import import_module
from typing import Any

from .plugin import register
from .registry import MODELS
from .version import __version__

_MODULES = {model.class_name: module for module, model in MODELS.items()}

__all__ = ["__version__", "register", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".models.{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
