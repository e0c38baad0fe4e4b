"""Which code of upstream's the drop-ins were seen right with: no cure acts on any other.

A cure restates functions of upstream's, steps round them, or takes for granted what they do (`Fault.rests_on`). Where
one of them is written otherwise, the drop-in could answer wrongly without a word. So the matrix (`tests/matrix.py`)
records a digest of each of them for every release that passed, in `seen.json`, and a drop-in is composed only where
all of them are, together, those of one of these releases.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from . import faults
from .fault import EFFECTS, Fault
from .registry import MODELS
from .releases import NEWEST
from .source import CannotTell, Tree, mentions

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.vllm_pp_fixes")

UNSEEN = "VLLM_PP_FIXES_UNSEEN"
"""Environment variable that, set to 1, has the drop-ins composed on code that was not seen, too."""
COMPILED = "support_torch_compile"


def recognised(tree: Tree, model: str, cls: str | None = None) -> tuple[Fault, ...]:
    """Return the faults that `model` (its class `cls`) has in `tree`; all that their cures rest on was seen.

    Raises `CannotTell` where it was not, or where a probe cannot read the code. With `VLLM_PP_FIXES_UNSEEN=1` code
    that was not seen gets a warning, no exception.
    """
    cls = cls or MODELS[model].class_name
    # A probe's "no" is believed only of code that was seen, so that what the newest release has is asked for too.
    resting = [
        fault
        for fault in faults.FAULTS
        if model in fault.models and (fault.expected(NEWEST) or _found(fault, tree, model, cls))
    ]
    new = unseen(tree, model, cls, sorted({path for fault in resting for path in fault.rests_on}))
    if new and os.environ.get(UNSEEN) == "1":
        logger.warning("vllm_pp_fixes serves %s all the same (%s=1): %s", cls, UNSEEN, new)
    elif new:
        raise CannotTell(f"{new}. {_consequence(resting)}. {UNSEEN}=1 uses the drop-in all the same")
    return faults.present(tree, model, cls)


def unseen(tree: Tree, model: str, cls: str, paths: Iterable[str]) -> str:
    """Say which of these functions differ from those of the nearest release that was seen; empty where none does.

    Raises `CannotTell` where a path leads nowhere.
    """
    here = {path: digest(tree, model, cls, path) for path in paths}
    records = _seen().get(model) or [{"releases": ["none"], "functions": {}}]

    def new(record: dict[str, Any]) -> list[str]:
        return [path for path in here if record["functions"].get(path) != here[path]]

    nearest = min(records, key=lambda record: len(new(record)))
    names = [
        name for path in new(nearest) for name in _names(tree, model, cls, path, nearest["functions"].get(path, ""))
    ]
    if not names:
        return ""
    verb, releases = "is" if len(names) == 1 else "are", ", ".join(nearest["releases"])
    return f"{', '.join(names)} {verb} not as in a vLLM that it was seen right with (nearest: {releases})"


def digests(tree: Tree, model: str) -> dict[str, str]:
    """Return the digest of each function that a cure for `model` rests on, by its path. Raises `CannotTell`."""
    cls = MODELS[model].class_name
    paths = {path for fault in faults.FAULTS if model in fault.models for path in fault.rests_on}
    return {path: digest(tree, model, cls, path) for path in sorted(paths)}


def digest(tree: Tree, model: str, cls: str, path: str) -> str:
    """Return digests of the function that `path` leads to and of what it calls by `super()`, with how it is compiled.

    Comments, docstrings and formatting do not count. `compute_hash:additional_config` leads to those statements of
    the function alone that mention the name. "absent" where there is no such function.
    """
    return " ".join(digest for _, digest in _links(tree, model, cls, path)) or "absent"


def _links(tree: Tree, model: str, cls: str, path: str) -> list[tuple[str, str]]:
    """Return name and digest of each function that a path leads to."""
    path, _, mentioned = path.partition(":")
    links = []
    for module, node, function in tree.definitions(model, cls, path):
        compiled = [decorator for decorator in node.decorator_list if mentions(decorator, COMPILED)]
        part = [s for s in function.body if mentions(s, mentioned)] if mentioned else function
        text = f"{node.name} {_text(compiled)} {_text(part)}"
        links.append((f"{node.name}.{function.name} of {module}", hashlib.sha256(text.encode()).hexdigest()[:12]))
    return links


def _names(tree: Tree, model: str, cls: str, path: str, known: str) -> list[str]:
    """Name the functions of a path that are not among those that are known; the path itself where one is missing."""
    links = _links(tree, model, cls, path)
    return [name for name, digest in links if digest not in known.split()] or [f"{path} (gone)"]


def _text(node: Any) -> str:
    """Write a syntax tree out: the same on every Python, whose own dump tells of fields that others do not have."""
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: getattr(node, name, None) for name in node._fields}
    if isinstance(node, ast.JoinedStr):
        # Some 3.12 end a format with an empty text.
        fields["values"] = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    said = (f"{name}={_text(value)}" for name, value in fields.items() if value is not None and value != [])
    return f"{type(node).__name__}({','.join(said)})"


def _consequence(resting: Iterable[Fault]) -> str:
    """Say what upstream's class may have, the worst first."""
    has: dict[str, list[str]] = {}
    for fault in resting:
        has.setdefault(fault.effect, []).append(fault.id)
    known = "; ".join(f"{effect}: {', '.join(has[effect])}" for effect in EFFECTS if effect in has)
    return f"Upstream's class serves, with the faults that it may have ({known})"


def _found(fault: Fault, tree: Tree, model: str, cls: str) -> bool:
    """Tell what a probe finds; nothing in code that it does not know."""
    try:
        return fault.probe(tree, model, cls)
    except CannotTell:
        return False


@cache
def _seen() -> dict[str, list[dict[str, Any]]]:
    """Return the records: for each model what its functions were, and in which releases."""
    return json.loads(Path(__file__).with_suffix(".json").read_text())
