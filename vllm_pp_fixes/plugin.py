"""The `vllm.general_plugins` entry point: registers the drop-ins with vLLM's `ModelRegistry`, by name.

vLLM calls it in the API server, the engine core and every worker, before it looks at the model. Whether upstream is
wrong is decided later, when a drop-in's module is imported, which happens only where its model is served.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .registry import MODELS
from .releases import OLDEST, too_old

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.vllm_pp_fixes.plugin")

UPSTREAM = "vllm.model_executor.models"


def register() -> None:
    """Register the drop-ins; idempotent, imports no model, never raises.

    `VLLM_PP_FIXES_DISABLE` turns off all (`1`) or some (`qwen3_vl,step3_text`); `VLLM_PP_FIXES_FORCE=1` takes
    architectures that another plugin has registered too.
    """
    try:
        _register()
    except Exception as error:
        # An exception here would stop the start of every model.
        logger.warning("vllm_pp_fixes is not active, upstream's models serve: %s: %s", type(error).__name__, error)


def _register() -> None:
    models = enabled(os.environ.get("VLLM_PP_FIXES_DISABLE", ""))
    if not models:
        return
    import vllm

    if too_old(vllm.__version__):
        _warn("vllm_pp_fixes is not active: it needs vLLM %s or newer, this is %s", OLDEST, vllm.__version__)
        return
    from vllm import ModelRegistry

    failed: dict[str, list[str]] = {}
    force = os.environ.get("VLLM_PP_FIXES_FORCE", "") == "1"
    for model in models:
        class_name = MODELS[model].class_name
        for architecture in MODELS[model].architectures:
            entry = ModelRegistry.models.get(architecture)
            owner, found = origin(entry)
            if entry is None or _inside(owner, __package__):
                continue  # this release does not have the model, or a plugin function ran twice
            if _inside(owner, "vllm") and (owner, found) != (f"{UPSTREAM}.{model}", class_name):
                # A drop-in made of what is not there would stop the start of the model.
                _warn("vllm_pp_fixes leaves %s as it is: in this vLLM it is %s of %s", architecture, found, owner)
                continue
            if not _inside(owner, "vllm") and not force:
                _warn(
                    "vllm_pp_fixes leaves %s to %s, which registered it first; VLLM_PP_FIXES_FORCE=1 takes it",
                    architecture,
                    owner,
                )
                continue
            try:
                with _quiet("vllm.model_executor.models.registry"):
                    ModelRegistry.register_model(architecture, f"{__package__}.models.{model}:{class_name}")
                ModelRegistry.models[architecture] = _remembered_by_release(ModelRegistry.models[architecture])
            except Exception as error:
                ModelRegistry.models[architecture] = entry
                failed.setdefault(f"{type(error).__name__}: {error}", []).append(architecture)
    for error_text, architectures in failed.items():
        _warn("vllm_pp_fixes leaves %s to vLLM, registering failed: %s", ", ".join(architectures), error_text)


def _remembered_by_release(entry: Any) -> Any:
    """Return a registry entry whose class vLLM looks at anew when vLLM changes.

    What it can do (LoRA, say) is written down under the hash of its file, and ours is the same beside every vLLM.
    """
    import vllm

    kind = type(entry)
    if not hasattr(kind, "_get_cache_filename"):
        return entry

    def _get_cache_filename(self: Any) -> str:
        return f"vllm-{vllm.__version__}-{kind._get_cache_filename(self)}"

    try:
        by_release = type(kind.__name__, (kind,), {"_get_cache_filename": _get_cache_filename})
        return by_release(entry.module_name, entry.class_name)
    except (AttributeError, TypeError):
        return entry  # another vLLM keeps its entries otherwise: the class serves all the same


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep vLLM from warning, in each process of each start, that an architecture is overwritten: it is meant to be."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def enabled(disable: str) -> list[str]:
    """Return the models that `disable`, the value of `VLLM_PP_FIXES_DISABLE`, leaves on.

    A name that is none of ours gets one warning that lists the known ones.
    """
    off = {name.strip() for name in disable.split(",")} - {"", "0"}
    if "1" in off:
        return []
    if unknown := sorted(off - set(MODELS)):
        _warn(
            "VLLM_PP_FIXES_DISABLE names %s, which is not known; known are 1 (all), %s",
            ", ".join(unknown),
            ", ".join(MODELS),
        )
    return [model for model in MODELS if model not in off]


def _warn(message: str, *values: object) -> None:
    """Say a line once a start: the engine core and the workers are children of the process that said it."""
    if multiprocessing.parent_process() is None:
        logger.warning(message, *values)


def origin(entry: Any) -> tuple[str, str]:
    """Return module and name of a registry entry's class; an entry is lazy (has the names) or has the class."""
    if (cls := getattr(entry, "model_cls", None)) is not None:
        return cls.__module__, cls.__name__
    return getattr(entry, "module_name", ""), getattr(entry, "class_name", "")


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
