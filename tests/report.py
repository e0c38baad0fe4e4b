"""What is written from data: the tables of README and `docs/`, and in the text of each patch how it was tested.

The data are the faults, the registry of the drop-ins and `tests/matrix.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from vllm_pp_fixes.cli.diff import Patch, patches_of
from vllm_pp_fixes.faults import FAULTS
from vllm_pp_fixes.registry import MODELS, UNTOUCHED
from vllm_pp_fixes.releases import numbers

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- written by `python -m tests.matrix --table` -->", "<!-- end of what is written -->"
Cells = list[dict[str, str]]


def texts(data: dict[str, Any]) -> dict[Path, str]:
    """Return the files that say what the data says, and what they must hold."""
    tables = {
        ROOT / "README.md": markdown(models()),
        ROOT / "docs" / "faults.md": fault_page(),
        ROOT / "docs" / "verification.md": "\n\n".join(
            map(markdown, (matrix(data), releases(data), code(data), features(data)))
        ),
    }
    files = {path: _between_marks(path.read_text(), text) for path, text in tables.items()}
    files[ROOT / "vllm_pp_fixes" / "seen.json"] = json.dumps(seen(data), indent=1) + "\n"
    for release, result in data.items():
        if "patched" in result and "versions" in result:
            for patch in patches_of(release):
                path = patch.path.with_suffix(".md")
                files[path] = _with_section(path.read_text(), tested(release, result, patch))
    return files


def markdown(rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _between_marks(text: str, written: str) -> str:
    """Return a page with what stands between its marks written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def models() -> list[list[str]]:
    """Return README's table of the drop-ins: a row a model."""
    table = [["module", "architectures", "class"]]
    for module, model in MODELS.items():
        table.append([module, ", ".join(model.architectures), f"`vllm_pp_fixes.models.{module}.{model.class_name}`"])
    return table


def fault_page() -> str:
    """Return what `docs/faults.md` says of the faults, and of the architectures that are left alone."""
    table = [["fault", "effect", "models", "releases", "what you meet", "upstream", "what is done here", "until"]]
    rests = [["fault", "function of upstream's", "what is assumed of it"]]
    for fault in FAULTS:
        row = [fault.id, fault.effect, ", ".join(fault.models), fault.releases, fault.symptom, fault.upstream]
        table.append([*row, fault.remedy, fault.until])
        rests.extend([fault.id, f"`{path}`", assumed] for path, assumed in fault.rests_on.items())
    left = [["architecture", "why"], *([architecture, why] for architecture, why in UNTOUCHED.items())]
    return "\n\n".join(
        (
            markdown(table),
            "## What each cure rests on",
            "A path leads to the function from the model, or from `vllm_config`.",
            markdown(rests),
            "## Left alone",
            "Architectures that inherit from or build one of these models, and need nothing from here:",
            markdown(left),
        )
    )


def matrix(data: dict[str, Any]) -> list[list[str]]:
    """Return the first table of the matrix: a row a fault (and runner), a column a release, upstream / ours in each."""
    engine = [release for release in sorted(data, key=numbers) if "cells" in data[release]]
    table = [["", *engine]]
    for fault in FAULTS:
        for v2 in (False, True):
            row = [_entry(_cells(data[release]["cells"], fault.id, v2)) for release in engine]
            if any(entry != "-" for entry in row):
                table.append([f"{fault.id}{' (V2)' if v2 else ''}", *row])
    return table


def releases(data: dict[str, Any]) -> list[list[str]]:
    """Return the second table of the matrix: a row a release, how many tests passed in each kind."""
    kinds = ("engine cells", "one process", "patches apply", "patched: engine cells", "patched: one process")
    table = [["", "when", *kinds]]
    for release in sorted(data, key=numbers):
        result = data[release]
        table.append(
            [
                release,
                result.get("date", "-"),
                *(_count(result.get(name)) for name in ("engine", "splits", "patches")),
                *(_count(result.get("patched", {}).get(name)) for name in ("engine", "splits")),
            ]
        )
    return table


def recorded(data: dict[str, Any]) -> dict[str, dict[str, dict[str, str]]]:
    """Return the digests of each release, and of its patched tree, that are on record: by model, by function."""
    found = {}
    for release in sorted(data, key=numbers):
        for name, result in ((release, data[release]), (f"{release} patched", data[release].get("patched", {}))):
            if "code" in result:
                found[name] = result["code"]
    return found


def seen(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what the package keeps of the digests: for each model, what its functions were, and in which releases."""
    kept: dict[str, list[dict[str, Any]]] = {model: [] for model in MODELS}
    for release, by_model in recorded(data).items():
        for model, functions in by_model.items():
            same = [record for record in kept[model] if record["functions"] == functions]
            if not same:
                kept[model].append({"releases": [], "functions": functions})
            (same or kept[model])[-1]["releases"].append(release)
    return kept


def code(data: dict[str, Any]) -> list[list[str]]:
    """Return the third table: a row a release, for each model a digest of all the functions that its cures rest on."""
    table = [["", *MODELS]]
    for release, by_model in recorded(data).items():
        table.append([release, *(_short(by_model.get(model)) for model in MODELS)])
    return table


def _short(functions: dict[str, str] | None) -> str:
    return hashlib.sha256(json.dumps(functions, sort_keys=True).encode()).hexdigest()[:6] if functions else "-"


def features(data: dict[str, Any]) -> list[list[str]]:
    """Return the fourth table: a row a feature, a column a release, how far ours at 1+5 was from one stage."""
    ran = {
        release: data[release]["features"]["apart"]
        for release in sorted(data, key=numbers)
        if "features" in data[release]
    }
    rows = dict.fromkeys(name for apart in ran.values() for name in apart)
    return [
        ["", *ran],
        *([name, *(f"{apart[name]:.2g}" if name in apart else "-" for apart in ran.values())] for name in rows),
    ]


def tested(release: str, result: dict[str, Any], patch: Patch) -> str:
    """Return the section of a patch's text that says how it was tested."""
    after = result["patched"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    command = result.get("command", f"uv run python -m tests.matrix {release}")
    said = [
        "In the repository that carries this patch, with that repository's own plugin off, on the CPU, with tiny "
        f"checkpoints (random weights, float32): `{command}`, {after.get('date', result['date'])}, {versions}.",
        "- The patches of this release in order, and each alone after what it requires, with `git apply` and "
        f"`patch -p1`; the result compiles: {_count(result.get('patches'))}.",
        "- All of them applied, all stages of the models in one process: 1+5, 2+4, 1+1+4 and six stages of 6 layers, "
        "with and without towers, the copy rules of both model runners; equal to one stage to the last bit, what is "
        "sent is what is declared, and buffers are where they are used: " + _count(after.get("splits")) + ".",
    ]
    if "states" in after and patch.fault == "aux-states-lost":
        said.append(
            "- What a draft reads of all layers, of some, and on boundaries, over the same splits, all three models, "
            "in one process: that of one stage, to the last bit, with that repository's plugin off and on: "
            f"{_count(after['states'])}."
        )
    if "unit" in after:
        said.append(
            f"- The unit tests that the `-test.patch` files bring, on the patched tree: {_count(after['unit'])}."
        )
    cells = _cells(result.get("cells", []), patch.fault)
    then = {cell["cell"]: cell["ours"] for cell in after.get("cells", [])}
    shown = [cell for cell in cells if cell["cell"] in then]
    if shown:
        said.append(
            "- The real engine, the release as it is -> with all patches applied, against one stage of the release as "
            "it is, run eagerly (`same`: same tokens, log-probabilities within 1e-4):"
        )
    lines = [textwrap.fill(line, 119, subsequent_indent="  " if line[0] == "-" else "") for line in said]
    width = max((len(cell["cell"]) for cell in shown), default=0)
    rows = [f"      {each['cell']:{width}}  {each['upstream']}  ->  {then[each['cell']]}" for each in shown]
    return "\n".join([lines[0], "", *lines[1:], *([""] if rows else []), *rows])


def _with_section(text: str, section: str) -> str:
    """Return a patch's text with the section that says how it was tested."""
    return re.sub(r"(?s)(?<=\n## How it was tested\n\n).*?(?=\n\n## )", lambda _: section, text, count=1)


def _cells(cells: Cells, fault: str, v2: bool | None = None) -> Cells:
    """Return the cells of a fault: under runner V2, under V1, or both."""
    named = [cell for cell in cells if cell["cell"].split(", ")[0] == fault]
    return [cell for cell in named if v2 is None or (", V2" in cell["cell"]) == v2]


def _count(counts: dict[str, int] | None) -> str:
    if not counts:
        return "-"
    wrong = counts.get("failed", 0) + counts.get("error", 0)
    return f"{wrong} failed" if wrong else f"{counts['passed']} passed"


def _entry(cells: Cells) -> str:
    """Say what upstream and ours did in some cells: the worst of each."""

    def worst(who: str) -> str:
        for word, mark in (("failed", "failed"), ("refused", "stops"), ("wrong", "wrong")):
            if any(cell[who].startswith(word) for cell in cells):
                return mark
        return "same"

    return f"{worst('upstream')} / {worst('ours')}" if cells else "-"
