"""What is installed here, read without importing vLLM; and what only an import can tell, asked of another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..fault import Fault
from ..faults import FAULTS
from ..plugin import enabled, origin
from ..registry import MODELS
from ..releases import NEWEST, OLDEST, TESTED, numbers
from ..seen import recognised
from ..source import CannotTell, Tree
from . import CommandError

PLUGINS = "vllm.general_plugins"
OWN = "vllm_pp_fixes"
_DECIDES = "a drop-in serves where it has seen all the code that it rests on"


def tree(path: Path | None = None) -> Tree:
    """Return the source of the vLLM at `path` (its package, or a folder that holds it), or of the installed one.

    Raises `CommandError` where there is none.
    """
    if path is None:
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            raise CommandError("vLLM is not installed here: install it, or name an unpacked one with --tree PATH")
        path = Path(spec.origin).parent
    for root in (path, path / "vllm"):
        if (root / "model_executor").is_dir():
            return Tree(root)
    raise CommandError(f"{path} holds no vLLM: name the folder of its package, which holds model_executor/")


def version_of(source: Tree) -> str:
    """Return the version that a tree says it is, or "unknown"."""
    for path, pattern in (
        (source.root / "_version.py", r"^(?:__version__ = )?version = ['\"](.+)['\"]|^__version__ = ['\"](.+)['\"]"),
        (source.root.parent / "PKG-INFO", r"^Version: (.+)$()"),
    ):
        if path.is_file() and (found := re.search(pattern, path.read_text(), re.M)):
            return found[1] or found[2]
    return "unknown"


def range_warning(version: str) -> str:
    """Say in one line what is to be known of a vLLM outside the tested releases; empty inside."""
    release = numbers(version)
    if release == (0, 0, 0):
        return f"not tested with this release ({version} names none): {_DECIDES}"
    if release < numbers(OLDEST):
        return f"vLLM {version} is older than {OLDEST}, which the drop-ins begin with: the plugin does nothing here"
    if release > numbers(TESTED):
        known = f" (its sources were probed, and ran over {TESTED}'s binaries)" if release <= numbers(NEWEST) else ""
        return f"not tested with this release{known}: tested are {OLDEST} to {TESTED}; {_DECIDES}"
    return ""


@dataclass
class Finding:
    """What the probe of one fault found in a tree: the models that have it, that do not, that it cannot tell of."""

    fault: Fault
    affected: list[str]
    right: list[str]
    unknown: dict[str, str]
    expected: bool | None
    """What the catalogue says of the release."""

    @property
    def differs(self) -> bool:
        """Whether the catalogue would have said otherwise."""
        seen = bool(self.affected)
        return self.expected is not None and bool(self.affected or self.right) and seen != self.expected


def findings(source: Tree, version: str) -> list[Finding]:
    """Probe a tree for every fault."""
    found = []
    for fault in FAULTS:
        finding = Finding(fault, [], [], {}, fault.expected(version))
        for model in fault.models:
            if not source.has(model):
                continue
            try:
                has = fault.probe(source, model, MODELS[model].class_name)
                (finding.affected if has else finding.right).append(model)
            except CannotTell as error:
                finding.unknown[model] = str(error)
        found.append(finding)
    return found


def left(source: Tree) -> dict[str, str]:
    """Return the models of a tree that stay upstream's since code is new that their drop-in rests on, and why."""
    why = {}
    for model in MODELS:
        if source.has(model):
            try:
                recognised(source, model)
            except CannotTell as error:
                why[model] = str(error)
    return why


def plugin_state() -> tuple[set[str], str]:
    """Tell which models the plugin would serve if vLLM were started in this environment, and say why (not all)."""
    plugins = {point.name: point.value for point in entry_points(group=PLUGINS)}
    allowed = os.environ.get("VLLM_PLUGINS")
    disable = os.environ.get("VLLM_PP_FIXES_DISABLE", "")
    if OWN not in plugins:
        return set(), "is not installed as a distribution here: `pip install` it where vLLM is"
    if allowed is not None and OWN not in allowed.split(","):
        return set(), f"is left out by VLLM_PLUGINS={allowed}: add {OWN} to it"
    served = {*enabled(disable)}
    if not served:
        return served, f"is turned off by VLLM_PP_FIXES_DISABLE={disable}: unset it"
    off = [model for model in MODELS if model not in served]
    return served, f"is loaded by vLLM{', but off for ' + ', '.join(off) if off else ''}"


def other_plugins() -> list[str]:
    """Return the names of the general plugins that vLLM would load, but for this one and vLLM's own."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return sorted(
        point.name
        for point in entry_points(group=PLUGINS)
        if point.name != OWN
        and not point.value.startswith("vllm.")
        and (allowed is None or point.name in allowed.split(","))
    )


def ask_vllm(request: dict[str, Any], wait: Any) -> dict[str, Any]:
    """Import vLLM in another process, load its plugins, and ask it (see `answer`); call `wait` until it has answered.

    Raises `CommandError` with the end of its error where it cannot be imported.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while True:
        try:
            out, err = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            wait()
    if process.returncode != 0:
        raise CommandError(f"vLLM cannot be imported here: {(err.strip() or 'no error printed').splitlines()[-1]}")
    return json.loads(out)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return who holds each architecture, which class serves the one to `load`, the layers of each stage."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    said: dict[str, Any] = {"owners": {}}
    for architecture in request["architectures"]:
        if entry := ModelRegistry.models.get(architecture):
            said["owners"][architecture] = origin(entry)[0]
    if (architecture := request.get("load")) in said["owners"]:
        cls = ModelRegistry.models[architecture].load_model_cls()
        said["class"] = f"{cls.__module__}.{cls.__qualname__}"
        said["cured"] = list(getattr(cls, "cured", ()))
    if stages := request.get("stages"):
        from vllm.distributed.utils import get_pp_indices

        layers = [get_pp_indices(request["layers"], rank, stages) for rank in range(stages)]
        said["split"] = [end - start for start, end in layers]
    return said


def main() -> None:
    """Answer the request on the command line; whatever vLLM prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(answer(json.loads(sys.argv[1]))), file=out)


if __name__ == "__main__":
    main()
