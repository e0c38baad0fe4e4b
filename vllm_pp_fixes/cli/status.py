"""`vllm-pp-fixes status`: which faults the installed vLLM has, as its code shows, and what is done about them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..registry import ARCHITECTURES, MODELS
from ..version import identity
from . import CommandError
from .installed import Finding, ask_vllm, findings, left, other_plugins, plugin_state, range_warning, tree, version_of
from .progress import Progress

NAME = "status"
HELP = "say which faults the installed vLLM has, and what is done about them"
SETTINGS = {
    "VLLM_PP_FIXES_KEEP_TOWERS": "towers stay on every stage",
    "VLLM_PP_FIXES_UNSEEN": "drop-ins serve on code that was not seen, too",
    "VLLM_PP_FIXES_FORCE": "architectures are taken from other plugins",
}
"""What a drop-in does otherwise where the environment sets these to 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("--all", action="store_true", help="print the faults that this vLLM does not have, too")
    parser.add_argument("--json", action="store_true", help="print it for machines")
    parser.add_argument("--tree", type=Path, metavar="PATH", help="an unpacked vLLM instead of the installed one")


def run(arguments: argparse.Namespace) -> int:
    """Print the faults. Raises `CommandError` where there is no vLLM."""
    source = tree(arguments.tree)
    version = version_of(source)
    found = findings(source, version)
    served, state = plugin_state()
    holders, problem = _holders() if arguments.tree is None else ({}, "")
    new = left(source)
    held = {model for model in MODELS if all(name in holders for name in MODELS[model].architectures)}
    served -= {*new} | held
    warning = range_warning(version)
    settings = {name: means for name, means in SETTINGS.items() if os.environ.get(name) == "1"}
    if arguments.json:
        report = {
            "vllm_pp_fixes": identity(),
            "vllm": version,
            "path": str(source.root),
            "warning": warning,
            "plugin": {"loaded": bool(served), "state": state},
            "settings": settings,
            "held_by_others": holders,
            "left": new,
            "faults": [_as_json(finding, served) for finding in found],
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"vllm_pp_fixes {identity()}, vLLM {version} in {source.root}")
    if warning:
        print(warning)
    if arguments.tree is None:
        print(f"the plugin {state}")
    for name, means in settings.items():
        print(f"{name}=1 is set: {means}")
    for architecture, holder in holders.items():
        print(
            f"{architecture} is held by {holder}: upstream's faults there are its own; VLLM_PP_FIXES_FORCE=1 takes it"
        )
    if problem:
        print(f"whether another plugin holds an architecture is not known: {problem}")
    for model, why in new.items():
        print(f"{model} stays upstream's: {why}")
    print()
    matter = [finding for finding in found if finding.affected or finding.unknown or finding.differs]
    for finding in matter:
        _print(finding, served, new)
    if not any(finding.affected for finding in found):
        print("no fault is known in this vLLM: the plugin finds nothing to do")
    if rest := [finding for finding in found if finding not in matter]:
        if arguments.all:
            print(f"not in this vLLM: {', '.join(finding.fault.id for finding in rest)}")
        else:
            print(
                f"{len(rest)} more {'fault is' if len(rest) == 1 else 'faults are'} not in this vLLM (--all names them)"
            )
    return 0


def _holders() -> tuple[dict[str, str], str]:
    """Return the architectures that other plugins hold, and why that cannot be told, if so."""
    others = other_plugins()
    if not others:
        return {}, ""
    say = Progress()
    doing = f"importing vLLM and its plugins, to see what {', '.join(others)} registered"
    say(doing)
    try:
        owners = ask_vllm({"architectures": [*ARCHITECTURES]}, lambda: say.tick(doing))["owners"]
    except CommandError as error:
        return {}, str(error)
    finally:
        say.end()
    return {a: owner for a, owner in owners.items() if owner.split(".")[0] not in ("vllm", "vllm_pp_fixes")}, ""


def _as_json(finding: Finding, served: set[str]) -> dict[str, Any]:
    fault = finding.fault
    return {
        "id": fault.id,
        "effect": fault.effect,
        "affected": finding.affected,
        "cured": [model for model in finding.affected if model in served],
        "right": finding.right,
        "cannot_tell": finding.unknown,
        "catalogue": finding.expected,
        "differs": finding.differs,
        "symptom": fault.symptom,
        "cure": fault.remedy,
        "upstream": fault.upstream,
        "unnecessary_from": fault.until,
    }


def _print(finding: Finding, served: set[str], new: dict[str, str]) -> None:
    fault = finding.fault
    for now, models in (
        ("cured", [model for model in finding.affected if model in served]),
        ("not cured, its code is new", [model for model in finding.affected if model in new]),
        ("not cured now; the plugin would", [m for m in finding.affected if m not in served and m not in new]),
    ):
        if models:
            print(f"{fault.id} ({', '.join(models)}): {now}: {fault.remedy}")
    for model, message in finding.unknown.items():
        print(f"{fault.id}: cannot tell of {model}, which stays upstream's: {message}")
    if finding.differs:
        print(f"{fault.id}: the catalogue says otherwise: affected are {fault.releases}")
