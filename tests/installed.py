"""What the installed vLLM has: its models, and which faults in them, as the probes read its code."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.models import ROWS
from vllm_pp_fixes.probes import Tree, present

_spec = find_spec("vllm")
assert _spec is not None
assert _spec.origin is not None
TREE = Tree(Path(_spec.origin).parent)
FAULTS: dict[str, set[str]] = {family: set(present(TREE, family)) for family in ROWS if TREE.has(family)}
"""Faults of each family's model; families that this release does not have are not in it."""


def right(family: str) -> bool:
    """Whether the drop-in is upstream's own class."""
    return not FAULTS[family]
