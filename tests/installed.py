"""What the installed vLLM has: its models, and which faults in them, as the probes read its code."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tests.models import ROWS
from vllm_pp_fixes import faults
from vllm_pp_fixes.faults import present
from vllm_pp_fixes.source import Tree

_spec = find_spec("vllm")
assert _spec is not None
assert _spec.origin is not None
TREE = Tree(Path(_spec.origin).parent)
FAULTS = {model_type: {fault.id for fault in present(TREE, model_type)} for model_type in ROWS if TREE.has(model_type)}
"""Ids of the faults of each model under test; models that this release does not have are not in it."""
NO_DIFF = {fault.id for fault in faults.FAULTS if fault.no_diff}
"""Ids of the faults that a patched tree keeps."""


def right(model_type: str) -> bool:
    """Whether the class of upstream is right under every split: the drop-in cures nothing but what lies outside it."""
    return FAULTS[model_type] <= NO_DIFF


def inspect_here() -> None:
    """Let vLLM look at a model's class in this process, which imports it anyhow, and not in a fresh one: a minute."""
    registry = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()  # type: ignore[attr-defined]
