"""`vllm-pp-fixes status`: which faults the installed vLLM has, as its code shows, and what is done about them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import __version__
from ..catalog import MODELS
from . import CommandError
from .installed import (
    Finding,
    ask_vllm,
    findings,
    other_plugins,
    plugin_state,
    range_warning,
    tree,
    version_of,
)
from .progress import Progress

NAME = "status"
HELP = "say which faults the installed vLLM has, and what is done about them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print it for machines")
    parser.add_argument("--tree", type=Path, metavar="PATH", help="an unpacked vLLM instead of the installed one")


def run(arguments: argparse.Namespace) -> int:
    """Print the faults. Raises `CommandError` where there is no vLLM."""
    source = tree(arguments.tree)
    version = version_of(source)
    found = findings(source, version)
    loaded, state = plugin_state()
    holders, problem = _holders() if arguments.tree is None else ({}, "")
    warning = range_warning(version)
    if arguments.json:
        report = {
            "vllm_pp_fixes": __version__,
            "vllm": version,
            "path": str(source.root),
            "warning": warning,
            "plugin": {"loaded": loaded, "state": state},
            "held_by_others": holders,
            "faults": [_as_json(finding) for finding in found],
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"vllm_pp_fixes {__version__}, vLLM {version} in {source.root}")
    if warning:
        print(warning)
    if arguments.tree is None:
        print(f"the plugin {state}")
    for architecture, holder in holders.items():
        print(
            f"{architecture} is held by {holder}: upstream's faults there are its own; VLLM_PP_FIXES_FORCE=1 takes it"
        )
    if problem:
        print(f"whether another plugin holds an architecture is not known: {problem}")
    print()
    for finding in found:
        _print(finding, active=loaded)
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
        asked = {"architectures": [architecture for served in MODELS.values() for architecture in served]}
        owners = ask_vllm(asked, lambda: say.tick(doing))["owners"]
    except CommandError as error:
        return {}, str(error)
    finally:
        say.end()
    return {a: owner for a, owner in owners.items() if owner.split(".")[0] not in ("vllm", "vllm_pp_fixes")}, ""


def _as_json(finding: Finding) -> dict[str, Any]:
    fault = finding.fault
    return {
        "id": fault.id,
        "affected": finding.affected,
        "right": finding.right,
        "cannot_tell": finding.unknown,
        "catalogue": finding.expected,
        "differs": finding.differs,
        "symptom": fault.symptom,
        "cure": fault.cure,
        "upstream": fault.upstream,
        "unnecessary_from": fault.until,
    }


def _print(finding: Finding, active: bool) -> None:
    fault = finding.fault
    if finding.affected:
        print(f"{fault.id}: affected: {', '.join(finding.affected)}")
        print(f"    {'cured' if active else 'not cured now; the plugin would'}: {fault.cure}")
    elif finding.right:
        print(f"{fault.id}: not affected")
    elif not finding.unknown:
        print(f"{fault.id}: not in this release, nor are the models: {', '.join(fault.models)}")
    for model, message in finding.unknown.items():
        print(f"{fault.id}: cannot tell of {model}, which stays upstream's: {message}")
    if finding.differs:
        print(f"    the catalogue says otherwise: affected are {fault.releases}")
    print(f"    upstream: {fault.upstream}; unnecessary from: {fault.until}")
