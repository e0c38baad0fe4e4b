"""`vllm-pp-fixes diff`: the same fixes as diffs of the installed vLLM: printed, applied to it, taken back."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..faults import FAULTS
from ..releases import numbers
from . import CommandError
from .installed import tree, version_of

NAME = "diff"
HELP = "print the fixes as diffs of the installed vLLM, apply them to it (--apply), take them back (--revert)"

BACKUP = ".vllm_pp_fixes_backup"
"""Folder in vLLM's package that holds what `--apply` changed, as it was, and `MANIFEST`."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Patch:
    """One file of `patches/<release>/`."""

    path: Path
    fault: str
    requires: tuple[str, ...]
    """Names of the patches that must be applied before it."""
    files: tuple[str, ...]
    """What it changes, from the folder that holds `vllm/`."""

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Read a patch's name and header."""
        text = path.read_text()
        header = text.partition("\ndiff --git ")[0]
        required = re.search(r"^Requires: (.+)$", header, re.M)
        return cls(
            path,
            path.stem.partition("-")[2],
            tuple(name.strip() for name in required[1].split(",")) if required else (),
            tuple(re.findall(r"^\+\+\+ b/(\S+)", text, re.M)),
        )


def patches_folder() -> Path:
    """Return the folder of the patches: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "patches", package.parent / "patches") if path.is_dir())


def patches_of(release: str) -> list[Patch]:
    """Return a release's patches in the order in which they apply; upstream's unit tests are not among them.

    Raises `CommandError` with the nearest releases where it has none.
    """
    known = sorted((path.name for path in patches_folder().iterdir() if path.is_dir()), key=numbers)
    name = ".".join(map(str, numbers(release)))
    if name not in known:
        older = [other for other in known if numbers(other) < numbers(name)][-1:]
        newer = [other for other in known if numbers(other) > numbers(name)][:1]
        nearest = " and ".join(f"patches/{other}" for other in (*older, *newer))
        raise CommandError(f"no patches for vLLM {release}: the nearest are {nearest}; the plugin needs none")
    return [
        Patch.read(path)
        for path in sorted((patches_folder() / name).glob("[0-9]*.patch"))
        if not path.stem.endswith("-test")
    ]


def chosen(patches: list[Patch], fault: str | None) -> list[Patch]:
    """Return the patches for `fault` and what they require, or all. Raises `CommandError` where there is none."""
    if fault is None:
        return patches
    wanted = {patch.path.name for patch in patches if patch.fault == fault}
    if not wanted:
        known = ", ".join(patch.fault for patch in patches)
        records = {record.id: record.no_diff for record in FAULTS}
        what = "is not wrong in this release" if fault in records else "is not known"
        if records.get(fault):
            what = f"has no patch: {records[fault]}"
        raise CommandError(f"--fault: {fault} {what}; there are patches for {known}")
    for patch in reversed(patches):
        if patch.path.name in wanted:
            wanted.update(patch.requires)
    return [patch for patch in patches if patch.path.name in wanted]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("--fault", metavar="ID", help="only this fault (and what its patch requires)")
    parser.add_argument("--tree", type=Path, metavar="PATH", help="an unpacked vLLM instead of the installed one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--apply", action="store_true", help="write them into vLLM's files; keeps a backup")
    what.add_argument("--revert", action="store_true", help="put the backup back, byte for byte")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Print, apply or take back. Raises `CommandError` where the tree is not what it should be."""
    root = tree(arguments.tree).root
    if arguments.revert:
        revert(root, arguments.yes)
        return 0
    release = version_of(tree(arguments.tree))
    patches = chosen(patches_of(release), arguments.fault)
    if arguments.apply:
        apply(root, release, patches, arguments.yes)
        return 0
    for patch in patches:
        print(f"# {patch.path}")
        print(patch.path.read_text(), end="")
    return 0


def apply(root: Path, release: str, patches: list[Patch], yes: bool) -> None:
    """Write `patches` into the vLLM at `root`, all or none; keep what they change in `BACKUP`.

    Raises `CommandError`: the tree is patched already or is not the release's, no tool to patch with, or no consent.
    """
    if (root / BACKUP).exists():
        raise CommandError(f"{root} is patched already: `vllm-pp-fixes diff --revert` takes that back first")
    files = sorted({file for patch in patches for file in patch.files})
    sums = (patches[0].path.parent / "SHA256SUMS").read_text()
    for file in files:
        path = root.parent / file
        if not path.is_file() or f"{digest(path)}  {file}\n" not in sums:
            raise CommandError(f"{path} is not that of vLLM {release}: it is patched already, or from another build")
    with tempfile.TemporaryDirectory(prefix="vllm-pp-fixes-") as temporary:
        made = Path(temporary)
        for file in files:
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root.parent / file, made / file)
        for patch in patches:
            apply_one(patch, made)
        for file in files:
            compile((made / file).read_text(), file, "exec")
        print(f"patches for vLLM {release}, to be written into {root}:")
        print("\n".join(f"    {patch.path.name}: {', '.join(patch.files)}" for patch in patches))
        _consent(yes, "apply")
        backup = root / BACKUP
        for file in files:
            (backup / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root.parent / file, backup / file)
        (backup / MANIFEST).write_text(json.dumps({file: digest(made / file) for file in files}, indent=1))
        for file in files:
            _replace(made / file, root.parent / file)
    print(f"applied; `vllm-pp-fixes diff --revert` takes it back from {backup}")


def apply_one(patch: Patch, folder: Path) -> None:
    """Apply a patch to the files under `folder`, with git or patch, whichever there is. Raises `CommandError`."""
    if shutil.which("git"):
        # Inside somebody's repository git would skip, without a word, what it does not track.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
        command = ["git", "apply", str(patch.path.resolve())]
    elif shutil.which("patch"):
        env, command = {**os.environ}, ["patch", "-p1", "--fuzz=0", "--input", str(patch.path.resolve())]
    else:
        raise CommandError("neither git nor patch is on the PATH: install one of them")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CommandError(f"{patch.path.name} does not apply: {said[0] if said else command[0]}")


def revert(root: Path, yes: bool) -> None:
    """Put back what `apply` changed. Raises `CommandError`: nothing to put back, or the files have changed since."""
    backup = root / BACKUP
    if not (backup / MANIFEST).is_file():
        raise CommandError(f"{root} has no backup: `vllm-pp-fixes diff --apply` has not patched it")
    manifest = json.loads((backup / MANIFEST).read_text())
    for file, patched in manifest.items():
        path = root.parent / file
        if path.is_file() and digest(path) not in (patched, digest(backup / file)):
            raise CommandError(f"{path} has changed since it was patched: install vLLM anew, or undo that first")
    print(f"to be put back in {root}:")
    print("\n".join(f"    {file}" for file in manifest))
    _consent(yes, "put back")
    for file in manifest:
        _replace(backup / file, root.parent / file)
    shutil.rmtree(backup)
    print("put back")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(source: Path, target: Path) -> None:
    """Put a copy of `source` in the place of `target`, whose other names (an installer's hard links) keep the old."""
    beside = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, beside)
    shutil.copymode(target if target.exists() else source, beside)
    beside.replace(target)


def _consent(yes: bool, doing: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"nobody to ask whether to {doing}: --yes does without")
    if input(f"{doing}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was changed")
