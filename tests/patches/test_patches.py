"""The diffs of `patches/`: whole, in upstream's terms, and, on the installed release, they apply and cure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.installed import NO_DIFF
from vllm_pp_fixes.cli import CommandError, diff, main
from vllm_pp_fixes.cli.installed import tree, version_of
from vllm_pp_fixes.faults import FAULTS, present
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.releases import numbers
from vllm_pp_fixes.source import Tree

TREE = tree(Path(os.environ["VLLM_PP_FIXES_TREE"]) if "VLLM_PP_FIXES_TREE" in os.environ else None)
"""The vLLM that the patches are tried on: the installed one, or one that is unpacked (0.33.0 has no CPU build)."""
INSTALLED = TREE.root
RELEASE = ".".join(map(str, numbers(version_of(TREE))))
FOLDERS = sorted((path for path in diff.patches_folder().iterdir() if path.is_dir()), key=lambda p: numbers(p.name))
ALL = [path for folder in FOLDERS for path in sorted(folder.glob("*.patch"))]
HERE = diff.patches_of(RELEASE) if RELEASE in {folder.name for folder in FOLDERS} else []
here = pytest.mark.skipif(not HERE, reason=f"no patches for {RELEASE}")


def name(value: object) -> str:
    if isinstance(value, diff.Patch):
        return value.fault
    return str(value.relative_to(value.parents[1])) if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_release_has_a_patch_and_a_text_for_each_of_its_faults(folder: Path) -> None:
    patches = diff.patches_of(folder.name)
    wanted = {fault.id for fault in FAULTS if fault.expected(folder.name) and not fault.no_diff}
    assert {patch.fault for patch in patches} == wanted
    assert [patch.path.name[:4] for patch in patches] == [f"{i:04}" for i in range(1, len(patches) + 1)]
    for patch in patches:
        text = patch.path.with_suffix(".md").read_text()
        assert text.startswith("# [")
        assert folder.name in text
        assert all(required < patch.path.name for required in patch.requires)
    listed = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert listed == sorted({file for patch in patches for file in patch.files})


@pytest.mark.parametrize("path", ALL, ids=name)
def test_a_patch_is_upstreams_in_form(path: Path) -> None:
    header, _, body = path.read_text().partition("\ndiff --git ")
    # The newest release's are a series for `git am`, whose message ends at three dashes.
    start = "From 0{40} Mon Sep 17 00:00:00 2001\nFrom: .+ <.+>\nDate: .+\nSubject: \\[PATCH\\] \\["
    assert re.match(start if path.parent == FOLDERS[-1] else r"Subject: \[", header)
    assert "\nUpstream: " in header
    assert not re.search(r"pp.fixes", body), "no trace of this package"
    for hunk in re.split(r"(?m)^@@ .*\n", body)[1:]:
        lines = hunk.split("\ndiff --git ")[0].splitlines()
        leading = next(i for i, line in enumerate(lines) if line[0] in "+-")
        trailing = next(i for i, line in enumerate(reversed(lines)) if line[0] in "+-")
        assert max(leading, trailing) <= 1, "one line of context"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The installed package's files that the patches change or the probes read, and what names the release."""
    root = tmp_path / "site" / "vllm"
    models = [f"model_executor/models/{model}.py" for model in ("interfaces", "utils", *MODELS)]
    for path in ("config/model.py", *models):
        if (INSTALLED / path).is_file():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(INSTALLED / path, root / path)
    (root / "_version.py").write_text(f"__version__ = version = {RELEASE!r}\n")
    return root


def faults(root: Path) -> set[str]:
    return {fault.id for model in MODELS if Tree(root).has(model) for fault in present(Tree(root), model)}


def sources(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}


def with_patch(patch: diff.Patch, folder: Path) -> None:
    command = ["patch", "-p1", "--fuzz=0", "--input", str(patch.path)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


TOOLS = {"git": diff.apply_one, "patch": with_patch}
tools = pytest.mark.parametrize(
    "tool",
    [pytest.param(tool, marks=pytest.mark.skipif(not shutil.which(tool), reason=f"no {tool}")) for tool in TOOLS],
)


@here
@tools
def test_in_order_they_cure_all(copy: Path, tool: str) -> None:
    for patch in HERE:
        TOOLS[tool](patch, copy.parent)
    for path in copy.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
    assert faults(copy) <= NO_DIFF


@here
@tools
@pytest.mark.parametrize("patch", HERE, ids=name)
def test_alone_it_cures_its_own(copy: Path, tool: str, patch: diff.Patch) -> None:
    before = faults(copy)
    for each in diff.chosen(HERE, patch.fault):
        TOOLS[tool](each, copy.parent)
    assert patch.fault in before
    assert patch.fault not in faults(copy)


@pytest.mark.skipif(FOLDERS[-1].name != RELEASE, reason="a series for the newest release alone")
@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_git_takes_the_series(copy: Path) -> None:
    """The message of each ends above the lines that are ours; upstream's own tests are there or left out."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=copy.parent, check=True, capture_output=True, text=True).stdout

    own = TREE.root.parent / "tests"
    series = [path for path in ALL if path.parent == FOLDERS[-1] and (own.is_dir() or not path.stem.endswith("-test"))]
    if own.is_dir():
        shutil.copytree(own, copy.parent / "tests")
    git("init", "--quiet")
    git("config", "user.name", "A Person")
    git("config", "user.email", "person@example.com")
    git("add", ".")
    git("commit", "--quiet", "--message", "the release")
    git("am", "--quiet", "--keep-non-patch", "--signoff", *map(str, series))
    *_, log = git("log", "--reverse", "--format=%B").partition("\n\n")
    assert log.count("Signed-off-by: ") == log.count("Signed-off-by: A Person <person@example.com>") == len(series)
    subjects = re.findall(r"(?m)^Subject: \[PATCH\] (.+)", "".join(path.read_text() for path in series))
    assert git("log", "--reverse", "--format=%s").splitlines()[1:] == subjects
    assert faults(copy) <= NO_DIFF


@here
def test_apply_and_revert(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diff", "--tree", str(copy), "--yes"]
    before = sources(copy)
    assert main([*command, "--apply"]) == 0
    assert "0002-" in capsys.readouterr().out
    assert faults(copy) <= NO_DIFF
    assert main(["status", "--tree", str(copy)]) == 0
    assert "affected: qwen3" not in capsys.readouterr().out
    assert main([*command, "--apply"]) == 2
    assert "is patched already: `vllm-pp-fixes diff --revert` takes that back first" in capsys.readouterr().err
    assert main([*command, "--revert"]) == 0
    assert sources(copy) == before
    assert not (copy / diff.BACKUP).exists()
    assert main([*command, "--revert"]) == 2
    assert "has no backup" in capsys.readouterr().err


@here
def test_apply_leaves_an_installers_hard_links_alone(copy: Path) -> None:
    file = copy / "model_executor/models/qwen3_vl.py"
    cached = copy.parent / "cached.py"
    cached.hardlink_to(file)
    before = cached.read_bytes()
    assert main(["diff", "--tree", str(copy), "--yes", "--apply"]) == 0
    assert cached.read_bytes() == before != file.read_bytes()


@here
def test_it_refuses_what_is_not_the_release(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model_executor/models/qwen3_vl.py"
    before = file.read_text()
    file.write_text(before + "# mine\n")
    assert main(["diff", "--tree", str(copy), "--yes", "--apply"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"qwen3_vl.py is not that of vLLM {RELEASE}: it is patched already, or from another build" in err
    file.write_text(before)
    assert main(["diff", "--tree", str(copy), "--yes", "--apply"]) == 0
    file.write_text(file.read_text() + "# mine\n")
    assert main(["diff", "--tree", str(copy), "--yes", "--revert"]) == 2
    assert "has changed since it was patched" in capsys.readouterr().err


@here
def test_one_fault(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--tree", str(copy), "--fault", "split-refused"]) == 0
    printed = re.findall(r"(?m)^# .*/(.+)\.patch$", capsys.readouterr().out)
    assert [path[5:] for path in printed][-2:] == ["split-refused-towerless", "split-refused"], "what it requires first"
    assert len(printed) < len(HERE)
    assert main(["diff", "--tree", str(copy), "--fault", "split-refused", "--apply", "--yes"]) == 0
    assert not {"split-refused", "split-refused-towerless"} & faults(copy)
    capsys.readouterr()
    for fault, says in (
        ("gone", "is not known; there are patches for"),
        ("start-layer", "is not wrong in this release"),
    ):
        if fault not in {patch.fault for patch in HERE}:
            assert main(["diff", "--tree", str(copy), "--fault", fault]) == 2
            assert f"{fault} {says}" in capsys.readouterr().err


@here
def test_nobody_to_ask(copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources(copy)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["diff", "--tree", str(copy), "--apply"]) == 2
    assert "nobody to ask whether to apply: --yes does without" in capsys.readouterr().err
    assert sources(copy) == before


@here
def test_a_temporary_folder_inside_somebodys_repository(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There git skips, without a word, what it does not track, unless it is kept from looking up."""
    subprocess.run(["git", "init", "--quiet", str(copy.parent)], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(copy.parent))
    assert main(["diff", "--tree", str(copy), "--yes", "--apply"]) == 0
    assert faults(copy) <= NO_DIFF


def test_the_folders_table_is_the_folder() -> None:
    rows = [line.split(" | ") for line in (diff.patches_folder() / "README.md").read_text().splitlines() if "|" in line]
    cells = {row[0].strip("| "): [cell.strip(" |") for cell in row[1:]] for row in rows}
    assert cells["fault"] == [folder.name for folder in FOLDERS]
    for fault in FAULTS:
        numbered = [[p.path.name[:4] for p in diff.patches_of(f.name) if p.fault == fault.id] for f in FOLDERS]
        assert cells.get(fault.id, [""] * len(FOLDERS)) == ["".join(number) for number in numbered], fault.id


def test_the_wheel_holds_them(tmp_path: Path) -> None:
    """`vllm-pp-fixes diff` where the package is installed, without a checkout; and what was seen right."""
    root = Path(__file__).parents[2]
    uv = os.environ.get("UV", "uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(root)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert (tmp_path / "site" / "vllm_pp_fixes" / "seen.json").is_file(), "without it no drop-in is composed"
    code = f"from vllm_pp_fixes.cli.diff import *; print(patches_folder(), len(patches_of({FOLDERS[-1].name!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [
        str(tmp_path / "site" / "vllm_pp_fixes" / "patches"),
        str(len(diff.patches_of("0.33.0"))),
    ]


def test_a_release_without_a_folder_names_the_nearest() -> None:
    with pytest.raises(
        CommandError, match=r"no patches for vLLM 0.25.1: the nearest are patches/0.24.0 and patches/0.27"
    ):
        diff.patches_of("0.25.1")
    with pytest.raises(CommandError, match=r"the nearest are patches/0.33.0; the plugin"):
        diff.patches_of("0.40.0")
