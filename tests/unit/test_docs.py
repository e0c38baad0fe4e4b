"""README, `docs/` and the patches' texts say what the data says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import matrix, report
from vllm_pp_fixes.faults import FAULTS
from vllm_pp_fixes.releases import numbers

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "patches" / "README.md"]
DATA = json.loads(matrix.DATA.read_text())


def test_the_committed_matrix_has_no_failure() -> None:
    assert not [release for release, result in DATA.items() if matrix.failed(result)]


def test_cells_that_ran_later_stand_beside_those_that_are_recorded() -> None:
    def record(**cells: str) -> dict[str, Any]:
        listed = [{"cell": name, "upstream": "wrong by 1", "ours": ours} for name, ours in cells.items()]
        passed = sum(ours == "same" for ours in cells.values())
        return {"engine": {"passed": passed, "failed": len(cells) - passed}, "cells": listed}

    made = matrix.beside(record(a="same", b="same"), record(b="same", c="same"))
    assert {cell["cell"] for cell in made["cells"]} == {"a", "b", "c"}
    assert made["engine"] == {"passed": 3, "failed": 0}
    assert made["later"][0]["cells"] == ["b", "c"]
    assert matrix.failed(matrix.beside(record(a="same"), record(b="wrong by 1")))


def test_what_is_written_from_data_is_what_the_data_says() -> None:
    assert [path for path, text in report.texts(DATA).items() if path.read_text() != text] == []


def test_no_two_faults_are_called_the_same() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert re.fullmatch(r"[a-z0-9-]+", fault.id)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 140


ALWAYS = {
    "text-architectures",
    "start-layer",
    "split-refused",
    "split-drops-levels",
    "compiled-drops-levels",
    "moss-compiled-drops-levels",
    "step3-residual",
}
"""Faults that need no special option to be met, but for stages; the table of README counts these."""
NEEDS = re.search(r"(?ms)^\| +\| 0\.17.*?(?=\n\n)", README)
MODELS = {
    "Qwen3-VL": "qwen3_vl",
    "Qwen3-Omni": "qwen3_omni_moe_thinker",
    "MOSS-Audio": "moss_audio",
    "Step3": "step3_text",
}


def test_who_needs_it() -> None:
    """README's first table: in each range of releases, each model's effects are those of the records."""
    assert NEEDS
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in NEEDS[0].splitlines()]
    assert {row[0].split(",")[0].split(" ")[0] for row in rows} == set(MODELS)
    for row in rows:
        model = MODELS[row[0].split(",")[0].split(" ")[0]]
        for span, cell in zip(header[1:], row[1:], strict=True):
            first, last = (numbers(each) for each in span.split(" to "))
            met = {
                fault.effect
                for fault in FAULTS
                if fault.id in ALWAYS and model in fault.models
                for start, end in fault.ranges
                if numbers(start) <= (*last[:2], 99) and first <= numbers(end)
            }
            said = {effect for effect in ("refuses", "wrong answers") if effect in cell}
            assert said == met, (row[0], span, cell)
            assert bool(met) != (cell in ("fine", "-")), (row[0], span, cell)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
