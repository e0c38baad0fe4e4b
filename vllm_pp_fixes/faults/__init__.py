"""The faults, one file each: what the user meets, in which releases, how it is recognised, what cures it, until when.

A file that is added is found; a file that is deleted retires its fault, and nothing else changes.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..fault import EFFECTS, Fault
from ..registry import MODELS
from ..source import Tree

FAULTS: tuple[Fault, ...] = tuple(
    sorted(
        (import_module(f"{__name__}.{module.name}").FAULT for module in iter_modules(__path__)),
        key=lambda fault: (EFFECTS.index(fault.effect), fault.id),
    )
)
"""All of them, those with the worst effect first."""


def present(tree: Tree, model: str, cls: str | None = None) -> tuple[Fault, ...]:
    """Return the faults that `model` (its class `cls`) has in `tree`. Raises `CannotTell`."""
    cls = cls or MODELS[model].class_name
    return tuple(fault for fault in FAULTS if model in fault.models and fault.probe(tree, model, cls))
