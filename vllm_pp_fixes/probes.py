"""Which faults a vLLM has, read off the shape of its code: no import of torch or vLLM, no version number.

Forks, nightlies and backports carry misleading versions, and a tree that somebody has patched carries its release's.
A probe answers for one model; where it does not find what it knows the shape of, it says so instead of guessing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from .catalog import FAULTS, MODELS

Function = ast.FunctionDef


class CannotTell(Exception):
    """A probe does not know the shape that it found; the message says what it looked for, in one line."""


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
        return (self.root / _file(model)).is_file()

    def cls(self, path: str, name: str) -> ast.ClassDef:
        """Return a class of the file `path`. Raises `CannotTell`."""
        for node in self._parse(path).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise CannotTell(f"{path} has no class {name}")

    def mro(self, model: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """Give a class of a model's module and what it inherits from in vLLM's models, each with its module's name."""
        node = self.cls(_file(model), name)
        yield model, node
        for base in node.bases:
            if isinstance(base, ast.Name) and (home := self._home(model, base.id)):
                yield from self.mro(home, base.id)

    def _home(self, model: str, name: str) -> str | None:
        """Return the module of vLLM's models that defines what `model` calls `name`."""
        for node in self._parse(_file(model)).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return model
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                home = (node.module or "").removeprefix("vllm.model_executor.models.")
                return home if node.level < 2 and "." not in home and self.has(home) else None
        return None

    def method(self, model: str, cls: str, name: str) -> Function | None:
        """Return a method of a class or of what it inherits from; None where there is none."""
        found = (_own(node, name) for _, node in self.mro(model, cls))
        return next((function for function in found if function), None)

    def builder(self, model: str, cls: str) -> tuple[str, str, Function]:
        """Return the class whose constructor builds the text model: its module, its name, the constructor.

        A constructor that only calls its parent's is passed over. Raises `CannotTell`.
        """
        for module, node in self.mro(model, cls):
            init = _own(node, "__init__")
            if init is None:
                continue
            if re.search(r"self\.language_model = |self\.model = ", text := ast.unparse(init)):
                return module, node.name, init
            if "super().__init__(vllm_config=" not in text:
                break
        raise CannotTell(f"no constructor of {cls} in {model}.py builds a text model")


def _file(model: str) -> str:
    return f"model_executor/models/{model}.py"


def _own(node: ast.ClassDef, name: str) -> Function | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def _around(function: Function, wanted: Callable[[ast.stmt], bool]) -> Iterator[list[ast.stmt]]:
    """Give each statement that is `wanted` and, before it, those that it stands in, outermost first."""

    def walk(statements: list[ast.stmt], outer: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
        for statement in statements:
            if wanted(statement):
                yield [*outer, statement]
            for part in ("body", "orelse", "finalbody"):
                yield from walk(getattr(statement, part, []), [*outer, statement])

    yield from walk(function.body, [])


def _conditions(statements: list[ast.stmt]) -> str:
    return " ".join(ast.unparse(statement.test) for statement in statements if isinstance(statement, ast.If))


def _assigns(attribute: str, value: str = "") -> Callable[[ast.stmt], bool]:
    """Return a test for `self.<attribute> = <value>...`."""
    pattern = re.compile(rf"self\.{attribute}(: [^=]+)? = {re.escape(value)}")
    return lambda statement: (
        isinstance(statement, ast.Assign | ast.AnnAssign) and bool(pattern.match(ast.unparse(statement)))
    )


_FACTORY = "make_empty_intermediate_tensors"
_LEVELS = "deepstack_input_embeds"


def takes_over_factory(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the constructor takes the factory of its text model, which declares no levels, for its own."""
    _, _, init = tree.builder(model, cls)
    if any(_around(init, _assigns(_FACTORY, f"self.language_model.{_FACTORY}"))):
        return True
    if any(_around(init, _assigns(_FACTORY))) or tree.method(model, cls, _FACTORY):
        return False
    raise CannotTell(f"{cls} in {model}.py has no {_FACTORY}")


def _refusals(tree: Tree, model: str, cls: str) -> list[list[ast.stmt]]:
    def refuses(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Assert) and "start_layer" in ast.unparse(statement.test)

    return [*_around(tree.builder(model, cls)[2], refuses)]


def _text_architectures(tree: Tree, model: str, cls: str) -> bool:
    calls = [
        node
        for node in ast.walk(tree.builder(model, cls)[2])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".with_hf_config")
    ]
    if not calls:
        raise CannotTell(f"the constructor of {cls} in {model}.py makes no configuration for its text model")
    return not all(len(call.args) > 1 or any(k.arg == "architectures" for k in call.keywords) for call in calls)


def _start_layer(tree: Tree, model: str, cls: str) -> bool:
    return any("self.language_model.start_layer" in ast.unparse(found[-1]) for found in _refusals(tree, model, cls))


def _asks_for_tower(text: str) -> bool:
    return "StageMissingLayer" in text or "get_limit_per_prompt" in text


def _refused_towerless(tree: Tree, model: str, cls: str) -> bool:
    init = tree.builder(model, cls)[2]
    knowing = [
        name
        for name in ("use_deepstack", "deepstack_num_level")
        if any(_asks_for_tower(ast.unparse(found[-1])) for found in _around(init, _assigns(name)))
    ]

    def asks(found: list[ast.stmt]) -> bool:
        asked = _conditions(found)
        return _asks_for_tower(asked) or any(f"self.{name}" in asked for name in knowing)

    return not all(map(asks, _refusals(tree, model, cls)))


def _buffers(tree: Tree, model: str, cls: str) -> list[list[ast.stmt]]:
    return [*_around(tree.builder(model, cls)[2], _assigns(_LEVELS, "["))]


def _buffers_everywhere(tree: Tree, model: str, cls: str) -> bool:
    return not all("is_first_rank" in _conditions(found) for found in _buffers(tree, model, cls))


def _buffers_on_meta(tree: Tree, model: str, cls: str) -> bool:
    def in_tower(found: list[ast.stmt]) -> bool:
        return any(isinstance(s, ast.With) and "_mark_tower_model" in ast.unparse(s.items[0]) for s in found)

    # A getter that answers None until a batch has levels never hands them out.
    return any(map(in_tower, _buffers(tree, model, cls))) and not _compiled_drops_levels(tree, model, cls)


def _compiled_drops_levels(tree: Tree, model: str, cls: str) -> bool:
    getter = tree.method(model, cls, f"_get_{_LEVELS}")
    return getter is not None and f"{_LEVELS}_num_tokens" in ast.unparse(getter)


def _compile_cache_shared(tree: Tree, model: str, cls: str) -> bool:
    compute_hash = _own(tree.cls("config/model.py", "ModelConfig"), "compute_hash")
    if compute_hash is None:
        raise CannotTell("config/model.py: ModelConfig has no compute_hash")
    return not any(isinstance(n, ast.Attribute) and n.attr == "limit_per_prompt" for n in ast.walk(compute_hash))


def _moss_compiled_drops_levels(tree: Tree, model: str, cls: str) -> bool:
    return any(_around(tree.builder(model, cls)[2], _assigns(_LEVELS, "None")))


def _moss_audio_off(tree: Tree, model: str, cls: str) -> bool:
    init = _own(tree.cls(_file(model), "MossAudioEncoder"), "__init__")
    return init is not None and ".item()" in ast.unparse(init)


def _moss_levels_without_tower(tree: Tree, model: str, cls: str) -> bool:
    return not _asks_for_tower(ast.unparse(tree.builder(model, cls)[2]))


def _moss_factory(tree: Tree, model: str, cls: str) -> bool:
    factory = _own(tree.cls(_file(model), "MossQwen3ForCausalLM"), _FACTORY)
    if factory is None:
        raise CannotTell(f"MossQwen3ForCausalLM has no {_FACTORY}")
    return "start_layer" not in ast.unparse(factory)


def _step3_residual(tree: Tree, model: str, cls: str) -> bool:
    init = _own(tree.cls(_file(model), "Step3TextModel"), "__init__")
    factories = [f[-1] for f in _around(init, _assigns(_FACTORY))] if init else []
    if not factories:
        raise CannotTell(f"Step3TextModel makes no {_FACTORY}")
    return not any("'residual'" in ast.unparse(factory) for factory in factories)


PROBES: dict[str, Callable[[Tree, str, str], bool]] = {
    "text-architectures": _text_architectures,
    "start-layer": _start_layer,
    "split-refused": takes_over_factory,
    "split-refused-towerless": _refused_towerless,
    "split-drops-levels": takes_over_factory,
    "buffers-on-meta": _buffers_on_meta,
    "compiled-drops-levels": _compiled_drops_levels,
    "buffers-everywhere": _buffers_everywhere,
    "compile-cache-shared": _compile_cache_shared,
    "moss-factory": _moss_factory,
    "moss-compiled-drops-levels": _moss_compiled_drops_levels,
    "moss-audio-off": _moss_audio_off,
    "moss-levels-without-tower": _moss_levels_without_tower,
    "step3-residual": _step3_residual,
}
"""Probe of each fault: `(tree, module, class)` to whether the model has it. Raises `CannotTell`."""


def present(tree: Tree, model: str, cls: str | None = None) -> tuple[str, ...]:
    """Return the ids of the faults that `model` (its class `cls`) has in `tree`, in the catalogue's order.

    Raises `CannotTell`.
    """
    cls = cls or next(iter(MODELS[model].values()))
    return tuple(fault.id for fault in FAULTS if model in fault.models and PROBES[fault.id](tree, model, cls))
