"""`vllm-pp-fixes demo`: the real engine on one stage and on several, upstream's class and the drop-in, compared."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..demo.engine import Cell, distance
from ..demo.examples import EXAMPLES, tiny
from ..demo.forkserver import ForkServer, ForkServerError, Outcome
from ..releases import OLDEST, too_old
from ..runtime.stages import parse_split
from . import CommandError
from .configuration import Configuration
from .progress import Progress

NAME = "demo"
HELP = "run a tiny Qwen3-VL (or a checkpoint of yours) on one stage and on several, upstream and ours, and compare"

INSTALL = (
    "`uv run vllm-pp-fixes demo` in a checkout of vllm_pp_fixes installs one that runs on any x86-64 CPU; "
    "on a machine with GPUs, `pip install vllm`"
)
UPSTREAM = {"VLLM_PP_FIXES_DISABLE": "1"}
OURS = {"VLLM_PP_FIXES_DISABLE": "0", "VLLM_PP_FIXES_FORCE": "1"}
TOLERANCE = {"float32": 1e-4, "auto": 2e-2}
"""Largest difference of log-probabilities, in nats, by dtype, that counts as the same where the tokens are."""


@dataclass
class Row:
    """One scenario: what upstream and the drop-in did."""

    scenario: str
    upstream: str
    ours: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "--model-type",
        type=example_called,
        default="qwen3_vl",
        metavar="TYPE",
        help=f"which tiny checkpoint: {', '.join(EXAMPLES)}, or the beginning of one (default: qwen3_vl)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a checkpoint, as `vllm serve` takes it (default: a tiny one is made)"
    )
    parser.add_argument("--split", metavar="1,5", help="layers a stage (default: 1 and the rest)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for one engine (default: 900)")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; return 1 if the drop-in is not the same as one stage. Raises `CommandError` on bad input."""
    if find_spec("vllm") is None:
        raise CommandError(f"vLLM is not installed: {INSTALL}")
    model_type, layers = read_model(arguments.model) if arguments.model else (arguments.model_type, 6)
    try:
        split = parse_split(arguments.split, layers) if arguments.split else [1, layers - 1]
    except ValueError as error:
        raise CommandError(f"--split: {error}") from None
    with tempfile.TemporaryDirectory(prefix="vllm-pp-fixes-") as folder:
        rows = _compare(arguments, model_type, split, Path(folder))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print_table(rows)
    return 0 if all(row.ours.startswith(("same", "reference")) for row in rows) else 1


def example_called(name: str) -> str:
    """Return the example called `name`, or whose name alone begins so."""
    found = [name] if name in EXAMPLES else [example for example in EXAMPLES if example.startswith(name)]
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; known are {', '.join(EXAMPLES)}")
    return found[0]


def read_model(model: str) -> tuple[str, int]:
    """Return model type and number of text layers of a checkpoint; refuse one that no engine is made for here."""
    configuration = Configuration.read(model)
    if configuration.model not in EXAMPLES:
        raise CommandError(f"--model: no demo for {configuration.architecture}; known are {', '.join(EXAMPLES)}")
    return configuration.model, configuration.layers


def _compare(arguments: argparse.Namespace, model_type: str, split: list[int], folder: Path) -> list[Row]:
    """Run the engines: one stage and `split`, upstream and ours, and a reference where upstream's is none."""
    say, example = Progress(), EXAMPLES[model_type]
    say("making a tiny checkpoint" if not arguments.model else f"checkpoint {arguments.model}")
    model = arguments.model or str(tiny(model_type))
    dtype = "auto" if arguments.model else "float32"
    # A checkpoint of the user's may be a name whose weights are still to be fetched.
    hub = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")} if arguments.model else {}
    media = example.media
    batches = [["text"], [media[0]], ["text2"], ["text", *media], *([alone] for alone in example.alone)]
    say("importing vLLM")
    try:
        with ForkServer(folder, hub) as engines:
            if too_old(engines.version):
                raise CommandError(f"vLLM {engines.version} is older than {OLDEST}: install a newer one")
            if engines.device == "none":
                raise CommandError(f"this build of vLLM finds no device that it can run on here: {INSTALL}")

            def outcome(scenario: str, stages: list[int], env: dict[str, str], **engine: Any) -> Outcome:
                say(scenario)
                engine["dtype"] = dtype
                cell = Cell(model, batches, model_type, split=stages, env={**hub, **env}, engine=engine)
                try:
                    return engines.run(cell, arguments.timeout, wait=lambda: say.tick(scenario))
                except TimeoutError:
                    return Outcome(None, f"TimeoutError: not over after {arguments.timeout:.0f} s")

            reference, more = None, {}
            if example.wrong_when_traced:
                reference = outcome("reference: upstream, 1 stage, eager", [], UPSTREAM, enforce_eager=True)
                if engines.device == "cpu":
                    # As traced as on a GPU, without the minute that compiling takes.
                    more = {"compilation_config": {"mode": 2, "backend": "eager"}}
            results = []
            for stages in ([], split):
                theirs, mine = (
                    outcome(f"{who}, {_scenario(stages)}", stages, env, **more)
                    for who, env in (("upstream", UPSTREAM), ("ours", OURS))
                )
                results.append((stages, theirs, mine))
    except ForkServerError as error:
        raise CommandError(f"vLLM cannot run here ({str(error).strip().splitlines()[-1]}): {INSTALL}") from None
    say.end()
    _, upstream, ours = results[0]
    against = reference or (upstream if upstream.result else ours)

    def said(one: Outcome) -> str:
        return "reference" if one is against and one.result else verdict(one, against, TOLERANCE[dtype])

    return [Row(_scenario(stages), said(theirs), said(mine)) for stages, theirs, mine in results]


def _scenario(split: list[int]) -> str:
    return f"{len(split)} stages, {'+'.join(map(str, split))}" if len(split) > 1 else "1 stage"


def verdict(outcome: Outcome, reference: Outcome, tolerance: float) -> str:
    """Say whether an outcome is the same as the reference, within `tolerance` nats."""
    if outcome.result is None:
        return f"refused: {first_error(outcome.log)}"
    if reference.result is None:
        return "no reference to compare with"
    apart = distance(outcome.result, reference.result)
    same = outcome.result["tokens"] == reference.result["tokens"] and apart <= tolerance
    return f"{'same' if same else 'wrong'} (log-probabilities differ by up to {apart:.1g})"


def first_error(log: str) -> str:
    """Return the first exception that a log names: what follows is the engine reporting it."""
    named = re.search(r"\b[A-Za-z_.]*(?:Error|Exception): .+", log)
    return named[0].strip() if named else "no exception in the log"


def _print_table(rows: list[Row]) -> None:
    header = Row("scenario", "upstream", "ours")
    widths = [
        max(len(value) for value in column)
        for column in zip(*(asdict(r).values() for r in (header, *rows)), strict=True)
    ]
    for row in (header, Row(*("-" * width for width in widths)), *rows):
        print("  ".join(value.ljust(width) for value, width in zip(asdict(row).values(), widths, strict=True)).rstrip())
