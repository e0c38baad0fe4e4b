"""The source of a vLLM, read as syntax trees: no import of torch or vLLM, no version number.

Forks, nightlies and backports carry misleading versions, and a tree that somebody has patched carries its release's.
What is read is compared node by node; where it has not the shape that is known, `CannotTell` says so.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

Function = ast.FunctionDef


class CannotTell(Exception):
    """The code has not the shape that is known; the message says what was looked for, in one line."""


class Tree:
    """The source of a vLLM: `root` is the folder of the package `vllm`, installed or unpacked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parse = cache(self._parse_file)

    def _parse_file(self, path: str) -> ast.Module:
        file = self.root / path
        try:
            return ast.parse(file.read_text())
        except (OSError, SyntaxError, ValueError) as error:
            raise CannotTell(f"{file} cannot be read: {error}") from None

    def has(self, model: str) -> bool:
        """Tell whether this vLLM has the module of `model`."""
        return (self.root / path_of(model)).is_file()

    def mentions(self, path: str, wanted: Callable[[ast.AST], object]) -> bool:
        """Tell whether anything in the file `path` is `wanted`; nothing is in a file that is not there."""
        return (self.root / path).is_file() and any(map(wanted, ast.walk(self._parse(path))))

    def cls(self, path: str, name: str) -> ast.ClassDef:
        """Return a class of the file `path`. Raises `CannotTell`."""
        for node in self._parse(path).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise CannotTell(f"{path} has no class {name}")

    def mro(self, model: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """Give a class of a model's module and what it inherits from in vLLM's models, each with its module's name."""
        node = self.cls(path_of(model), name)
        yield model, node
        for base in node.bases:
            if isinstance(base, ast.Name) and (home := self._home(model, base.id)):
                yield from self.mro(home, base.id)

    def _home(self, model: str, name: str) -> str | None:
        """Return the module of vLLM's models that defines what `model` calls `name`."""
        for node in self._parse(path_of(model)).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return model
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                home = (node.module or "").removeprefix("vllm.model_executor.models.")
                return home if node.level < 2 and "." not in home and self.has(home) else None
        return None

    def method(self, model: str, cls: str, name: str) -> Function | None:
        """Return a method of a class or of what it inherits from; None where there is none."""
        found = (own_method(node, name) for _, node in self.mro(model, cls))
        return next((function for function in found if function), None)

    def builder(self, model: str, cls: str) -> tuple[str, str, Function]:
        """Return the class whose constructor builds the text model: its module, its name, the constructor.

        A constructor that only calls its parent's is passed over. Raises `CannotTell`.
        """
        for module, node in self.mro(model, cls):
            init = own_method(node, "__init__")
            if init is None:
                continue
            if any(enclosed(init, lambda s: assigns(s, "self.language_model") or assigns(s, "self.model"))):
                return module, node.name, init
            if not any(map(_calls_parent_with_config, ast.walk(init))):
                break
        raise CannotTell(f"no constructor of {cls} in {model}.py builds a text model")

    def definitions(self, model: str, cls: str, path: str) -> list[tuple[str, ast.ClassDef, Function]]:
        """Return the function that `path` leads to from a class, and those that it calls by `super()`.

        `forward` is the class's own, `language_model.model.forward` that of what its constructors build under these
        names, `vllm_config.compute_hash` that of vLLM's configuration. Each comes with its module and class; none
        where there is no such function. Raises `CannotTell`.
        """
        *owners, name = path.split(".")
        if owners == ["vllm_config"]:
            chain = [("config.vllm", self.cls("config/vllm.py", "VllmConfig"))]
        else:
            for owner in owners:
                model, cls = self._built(model, cls, owner)
            chain = [*self.mro(model, cls)]
        found = []
        while chain:
            (module, node), *chain = chain
            if (function := own_method(node, name)) is None:
                continue
            found.append((module, node, function))
            calls = [part for part in ast.walk(function) if isinstance(part, ast.Call)]
            parent = next((call for call in calls if dotted(call.func) == "super"), None)
            if parent is None:
                break
            # `super(Parent, self)` passes over that parent, and over what comes before it.
            after = dotted(parent.args[0]) if parent.args else node.name
            if after != node.name:
                names = [each.name for _, each in chain]
                chain = chain[names.index(after) + 1 :] if after in names else []
        return found

    def _built(self, model: str, cls: str, attribute: str) -> tuple[str, str]:
        """Return module and name of the class that the constructors of a class build as `attribute`."""
        for module, node in self.mro(model, cls):
            init = own_method(node, "__init__")
            made = enclosed(init, lambda s: assigns(s, f"self.{attribute}") is not None) if init else ()
            values = [assigns(found[-1], f"self.{attribute}") for found in made]
            names = {dotted(value.func) if isinstance(value, ast.Call) else "" for value in values}
            if len(names) == 1 and (home := self._home(module, name := names.pop())):
                return home, name
            if names:
                break
        raise CannotTell(f"the constructor of {cls} in {model}.py builds no {attribute} of a class that is known")


def path_of(model: str) -> str:
    """Return the file of a model's module, from the folder of the package `vllm`."""
    return f"model_executor/models/{model}.py"


def own_method(node: ast.ClassDef, name: str) -> Function | None:
    """Return a method that the class itself defines; None where there is none."""
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def enclosed(function: Function, wanted: Callable[[ast.stmt], object]) -> Iterator[list[ast.stmt]]:
    """Give each statement that is `wanted` and, before it, those that it stands in, outermost first."""

    def walk(statements: list[ast.stmt], outer: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
        for statement in statements:
            if wanted(statement):
                yield [*outer, statement]
            for part in ("body", "orelse", "finalbody"):
                yield from walk(getattr(statement, part, []), [*outer, statement])

    yield from walk(function.body, [])


def dotted(node: ast.AST | None) -> str:
    """Return the name that a node is, with what it is an attribute of: `self.model.layers`; empty for all else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def mentions(node: ast.AST, name: str) -> bool:
    """Tell whether `name` stands anywhere in a node: `a.b` as it is; a name without a dot as an attribute too.

    As a string it counts as well: `getattr(self, "name", None)`.
    """

    def is_it(part: ast.AST) -> bool:
        return (
            dotted(part) == name
            or (isinstance(part, ast.Attribute) and part.attr == name)
            or (isinstance(part, ast.Constant) and part.value == name)
        )

    return any(map(is_it, ast.walk(node)))


def assigns(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return what a statement assigns to `name`; None where it assigns nothing to it."""
    if isinstance(statement, ast.Assign):
        return statement.value if dotted(statement.targets[0]) == name else None
    if isinstance(statement, ast.AnnAssign):
        return statement.value if dotted(statement.target) == name else None
    return None


def is_none(node: ast.AST | None) -> bool:
    """Tell whether a node is the constant None; no node is none of them."""
    return isinstance(node, ast.Constant) and node.value is None


def _calls_parent_with_config(node: ast.AST) -> bool:
    """Tell whether a node is `super().__init__(vllm_config=...)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "__init__"
        and isinstance(parent := node.func.value, ast.Call)
        and dotted(parent.func) == "super"
        and not parent.args
        and any(keyword.arg == "vllm_config" for keyword in node.keywords)
    )
