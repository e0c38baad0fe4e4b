"""The probes against the installed vLLM, and against trees made of it: patched, newer, of a shape that none knows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_pp_fixes.cli.installed import findings, version_of
from vllm_pp_fixes.faults import FAULTS, present
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.releases import NEWEST, OLDEST, numbers
from vllm_pp_fixes.source import CannotTell, Tree

SPEC = find_spec("vllm")
assert SPEC is not None
assert SPEC.origin is not None
INSTALLED = Path(SPEC.origin).parent
READ = "config", "model_executor/models", "v1/executor", "v1/worker", "v1/worker/gpu/model_states"
Edit = Callable[..., Tree]


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """Make a tree of the installed vLLM's files that are read, with replacements in one of them."""

    def make(file: str, *replacements: tuple[str, str], version: str = "") -> Tree:
        root = tmp_path / "vllm"
        shutil.rmtree(root, ignore_errors=True)
        for folder in READ:
            (root / folder).mkdir(parents=True)
            for path in (INSTALLED / folder).glob("*.py"):
                (root / folder / path.name).symlink_to(path)
        text = (root / file).read_text()
        (root / file).unlink()
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        (root / file).write_text(text)
        if version:
            (root / "_version.py").write_text(f"__version__ = version = {version!r}\n")
        return Tree(root)

    return make


def ids(tree: Tree, model: str) -> set[str]:
    return {fault.id for fault in present(tree, model)}


def test_the_records_say_of_the_installed_release_what_its_code_shows() -> None:
    tree = Tree(INSTALLED)
    version = version_of(tree)
    assert numbers(OLDEST) <= numbers(version) <= numbers(NEWEST)
    for model in MODELS:
        if tree.has(model):
            expected = {fault.id for fault in FAULTS if model in fault.models and fault.expected(version)}
            assert ids(tree, model) == expected, model


FACTORY = "make_empty_intermediate_tensors"
TAKEN = f"self.{FACTORY} = (\n            self.language_model.{FACTORY}\n        )"
VL = "model_executor/models/qwen3_vl.py"


def test_a_tree_whose_factory_declares_levels(edited: Edit) -> None:
    tree = edited(VL, (TAKEN, "self.make_empty_intermediate_tensors = self.declare_levels"))
    for model in ("qwen3_vl", "colqwen3", "cosmos3"):
        if tree.has(model):
            assert "split-refused" not in ids(tree, model), f"{model} inherits the cure"
    assert "split-refused" in ids(tree, "qwen3_vl_moe"), "which has a constructor of its own"


def test_a_factory_as_a_method(edited: Edit) -> None:
    method = "    def make_empty_intermediate_tensors(self, batch_size, dtype, device): ...\n\n"
    where = "    def _get_deepstack_input_embeds("
    tree = edited(VL, (TAKEN, "pass"), (where, method + where))
    assert "split-refused" not in ids(tree, "qwen3_vl")


def test_a_shape_that_none_knows(edited: Edit) -> None:
    tree = edited(VL, (TAKEN, "pass"))
    with pytest.raises(CannotTell, match=r"in qwen3_vl.py has no make_empty_intermediate_tensors"):
        present(tree, "qwen3_vl")
    with pytest.raises(CannotTell, match="has no class Qwen9"):
        present(tree, "qwen3_vl", "Qwen9")
    broken = edited(VL, ("def forward(", "def forward("), ("class ", "class class "))
    with pytest.raises(CannotTell, match="cannot be read"):
        present(broken, "qwen3_vl")


def test_findings_say_where_the_records_differ(edited: Edit) -> None:
    tree = edited(VL, (TAKEN, "pass"), version="0.21.0")
    found = {finding.fault.id: finding for finding in findings(tree, "0.21.0")}
    assert "qwen3_vl" in found["split-refused"].unknown
    assert found["text-architectures"].differs, "0.21.0 has it, this tree does not"
    assert not found["buffers-everywhere"].differs
    assert not any(finding.differs for finding in findings(Tree(INSTALLED), "0.40.0")), "a release that none knows"


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.34.0rc1", (0, 34, 0)),
        ("0.34.dev0", (0, 34, 0)),
        ("0.34.0.dev3+g1234", (0, 34, 0)),
        ("0.1.dev0", (0, 0, 0)),
        ("0.17", (0, 17, 0)),
        ("0.1.dev17+g1234", (0, 0, 0)),
        ("dev", (0, 0, 0)),
    ],
)
def test_numbers(version: str, release: tuple[int, ...]) -> None:
    assert numbers(version) == release
