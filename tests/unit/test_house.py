"""The rules of the house: a fault is a file, what serves imports nothing of what shows, private names stay private."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_pp_fixes
from tests.models import ROWS
from tests.unit.conftest import Snippet
from vllm_pp_fixes.demo.examples import EXAMPLES
from vllm_pp_fixes.fault import Cure
from vllm_pp_fixes.faults import FAULTS
from vllm_pp_fixes.registry import ARCHITECTURES, MODELS, UNTOUCHED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_pp_fixes"
SHOWS = "vllm_pp_fixes.cli", "vllm_pp_fixes.demo", "vllm_pp_fixes.planning"
SERVES = [
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("cli", "demo", "planning")
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every module that a file imports, at its top or in a function, and the name that is taken from it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*home, *filter(None, [node.module])))
            yield from ((module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", SERVES, ids=name)
def test_what_serves_imports_nothing_of_what_shows(path: Path) -> None:
    named = {f"{module}.{taken}" for module, taken in imports(path)}
    assert not [each for each in named if each.startswith(SHOWS)]


def test_that_rule_would_be_noticed() -> None:
    assert any(f"{module}.{taken}".startswith(SHOWS) for module, taken in imports(PACKAGE / "cli" / "demo.py"))


def test_a_private_name_is_imported_by_no_other_module() -> None:
    files = [path for folder in ("vllm_pp_fixes", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    private = [
        f"{name(path)}: {taken} of {module}"
        for path in files
        for module, taken in imports(path)
        if taken.startswith("_") and not taken.endswith("__") and module.split(".")[0] in ("vllm_pp_fixes", "tests")
    ]
    assert private == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_named_in_its_file_alone(fault) -> None:
    own = PACKAGE / "faults" / f"{fault.id.replace('-', '_')}.py"
    mentioned = re.compile(rf"(?<![\w-]){fault.id}(?![\w-])")
    assert [path for path in PACKAGE.rglob("*.py") if mentioned.search(path.read_text())] == [own]


def test_a_cure_that_composes_nothing_cannot_be_written_down() -> None:
    with pytest.raises(ValueError, match="composes nothing"):
        Cure()


def test_a_model_is_a_file_an_entry_a_row_and_a_maker() -> None:
    files = {path.stem for path in (PACKAGE / "models").glob("[!_]*.py")}
    assert files == set(MODELS)
    assert {model for fault in FAULTS for model in fault.models} == set(MODELS)
    own = {module for module, model in MODELS.items() if not model.inherits}
    assert own == set(ROWS) == set(EXAMPLES)
    assert not set(ARCHITECTURES) & set(UNTOUCHED)
    assert {model.class_name for model in MODELS.values()} <= set(vllm_pp_fixes.__all__)


def copy(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "vllm_pp_fixes", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "vllm_pp_fixes"


def identity(folder: Path) -> str:
    code = "from vllm_pp_fixes.version import identity; print(identity())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_two_commits_of_one_version_are_told_apart(tmp_path: Path) -> None:
    package = copy(tmp_path)
    before = identity(tmp_path)
    assert before == identity(ROOT)
    assert before.startswith(f"{vllm_pp_fixes.__version__}+")
    with (package / "runtime" / "deepstack.py").open("a") as file:
        file.write("# another commit\n")
    after = identity(tmp_path)
    assert after != before
    with (package / "seen.json").open("a") as file:
        file.write(" ")
    assert identity(tmp_path) != after, "what is composed depends on it"


WITHOUT = """
import sys
sys.path.insert(0, {folder!r})
import importlib, vllm_pp_fixes
assert vllm_pp_fixes.__file__.startswith({folder!r}), vllm_pp_fixes.__file__
from pathlib import Path
from vllm_pp_fixes.cli import main
from vllm_pp_fixes.faults import FAULTS, present
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.source import Tree
assert {fault!r} not in {{fault.id for fault in FAULTS}} and len(FAULTS) == {left}
assert main(["status", "--all"]) == 0
tree = Tree(Path(vllm.__file__).parent)
for module, model in MODELS.items():
    upstream = getattr(importlib.import_module(f"vllm.model_executor.models.{{module}}"), model.class_name)
    ours = getattr(importlib.import_module(f"vllm_pp_fixes.models.{{module}}"), model.class_name)
    cured = tuple(fault.id for fault in present(tree, module))
    assert (ours is upstream) == (not cured)
    assert getattr(ours, "cured", ()) == cured, (ours, cured)
    print("composed", module, *cured)
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_deleting_its_file_retires_a_fault(fault, tmp_path: Path, snippet: Snippet) -> None:
    """No other edit: the package imports, `status` runs without it, the drop-ins are composed without it."""
    (copy(tmp_path) / "faults" / f"{fault.id.replace('-', '_')}.py").unlink()
    lines = snippet(WITHOUT.format(folder=str(tmp_path), fault=fault.id, left=len(FAULTS) - 1))
    assert len([line for line in lines if line.startswith("composed ")]) == len(MODELS)
    assert not [line for line in lines if re.search(rf"(?<![\w-]){fault.id}(?![\w-])", line)]
