"""Ring 3: what else an engine does with these models, at 1+5, against one stage of upstream's class.

The first cell runs always, the others where `tests/matrix.py` asks for them by `VLLM_PP_FIXES_FEATURES`, which names
the file that takes down what was the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoint
from tests.engine import variants
from tests.engine.cells import (
    AHEAD,
    DEFAULT_COMPILE,
    EAGER,
    LOADED,
    PIECEWISE,
    PIECEWISE_ENV,
    SMALL_CHUNKS,
    UPSTREAM,
    log_lines,
)
from tests.models import ROWS
from vllm_pp_fixes.demo.engine import Cell, distance
from vllm_pp_fixes.demo.forkserver import ForkServer, Outcome

Parts = dict[str, dict[str, Any]]
VL, MOE, OMNI = "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"
CHOICES = {"a red sofa", "a window", "two cats"}
"""What the structured output may be."""
TO_POOL = [["text"], ["picture"], ["text2"], ["text", "picture", "pictures", "video", "large"]]
POOLING = {"runner": "pooling"}
WHOLE = {"max_num_batched_tokens": 1024}
"""A pooler of all tokens wants a prompt in one piece."""
RERANKER = {
    "architectures": ["Qwen3VLForSequenceClassification"],
    "classifier_from_token": ["a", "b"],
    "is_original_qwen3_reranker": True,
}


def nothing(_: Any) -> None:
    pass


def check_many(parts: Parts) -> None:
    """Each of the features was at work: the comparison alone would not notice one that does nothing."""
    many, few = parts["40 at once"], len(parts["choice"]["texts"])
    assert many["cached"]
    assert {*parts["choice"]["texts"]} <= CHOICES
    assert all(len(tokens) > 50 for tokens in parts["of prompts"]["tokens"][:4])
    assert parts["reloaded, others"]["tokens"] != parts["reloaded, the same"]["tokens"]
    assert parts["reloaded, the same"]["tokens"][: few - 1] == many["tokens"][: few - 1]


def check_adapter(parts: Parts) -> None:
    assert parts["with"]["tokens"] != parts["without"]["tokens"]
    assert parts["both"]["tokens"] == parts["with"]["tokens"] + parts["without"]["tokens"]


def check_tower_adapter(parts: Parts) -> None:
    """The first prompt is text alone, the others have media."""
    (same, *others), (text, *media) = (parts[name]["tokens"] for name in ("without", "with"))
    assert same == text
    assert all(one != other for one, other in zip(others, media, strict=True))


@dataclass(frozen=True)
class Feature:
    """A checkpoint, how its engine is started, and what it is asked: a function of `features.py`."""

    name: str
    ask: str = "batches"
    change: Callable[[Path], None] = nothing
    """Makes the checkpoint from the tiny one of `model_type`."""
    model_type: str = VL
    engine: dict[str, Any] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)
    """Where not those of the model_type."""
    v2: bool = False
    check: Callable[[Parts], None] = nothing
    """What one stage's answers must be like."""
    tolerance: float = 1e-4


FEATURES = [
    Feature(
        "40 picture requests at once with prefix caching, prompt log-probabilities, structured output, reloaded "
        "weights; tied embeddings",
        "many_at_once_then_more",
        variants.tied,
        engine={"max_num_seqs": 40},
        check=check_many,
    ),
    Feature(
        "40 picture requests at once, and the rest of the row above, under V2",
        "many_at_once_then_more",
        variants.tied,
        engine={"max_num_seqs": 40, **EAGER},
        v2=True,
        check=check_many,
    ),
    Feature("tied embeddings, said at the top only", change=partial(variants.tied, levels=("",))),
    Feature("tied embeddings, the checkpoint has the output layer too", change=partial(variants.tied, copied=True)),
    Feature(
        "LoRA under V2",
        "with_adapter",
        variants.with_adapter,
        # On the CPU, a prompt without adapter beside one with it is given what is in the last slot: leave that empty.
        engine={"enable_lora": True, "max_loras": 2, **EAGER},
        v2=True,
        check=check_adapter,
    ),
    Feature(
        "LoRA on the tower, under V2",
        "with_adapter",
        partial(variants.with_adapter, part=variants.TOWER, modules=("qkv", "linear_fc1")),
        engine={"enable_lora": True, "enable_tower_connector_lora": True, "max_loras": 2, **EAGER},
        v2=True,
        check=check_tower_adapter,
    ),
    # 8e-5 was seen in the batch of all, and the same of upstream's class at 3+3.
    Feature("bfloat16", engine={"dtype": "bfloat16"}, tolerance=1e-3),
    Feature("eight bits", change=variants.in_eight_bits),
    Feature("Qwen3-VL as embedding model", "pooled", engine={**POOLING, "convert": "embed"}, batches=TO_POOL),
    Feature("Qwen3-VL as reranker", "pooled", engine={**POOLING, "hf_overrides": RERANKER}, batches=TO_POOL),
    Feature("ColQwen3", "pooled", variants.colqwen3, engine=POOLING | WHOLE, batches=TO_POOL),
    Feature("Cosmos3", change=variants.cosmos3),
    Feature("Clef-Omni", "pooled", variants.clef_omni, OMNI, POOLING | WHOLE, [*TO_POOL, ["sound"]]),
]
REPORT = os.environ.get("VLLM_PP_FIXES_FEATURES")


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two parts are apart: in nats, or the largest difference of vectors."""
    if "vectors" not in one:
        assert one["tokens"] == other["tokens"]
        return distance(*({name: [part[name]] for name in ("tokens", "logprobs")} for part in (one, other)))
    pairs = list(zip(one["vectors"], other["vectors"], strict=True))
    return max(abs(a - b) for vector, theirs in pairs for a, b in zip(vector, theirs, strict=True))


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("feature", FEATURES if REPORT else FEATURES[:1], ids=lambda feature: feature.name)
def test_feature(feature: Feature, request: pytest.FixtureRequest, checkpoint: Checkpoint) -> None:
    engines: ForkServer = request.getfixturevalue("engines_v2" if feature.v2 else "engines")
    model = variants.variant(checkpoint(feature.model_type), feature.name, feature.change)

    def ask(*split: int, env: dict[str, str]) -> Parts:
        cell = Cell(
            str(model),
            feature.batches or ROWS[feature.model_type].asked,
            feature.model_type,
            [*split],
            env=env,
            engine=SMALL_CHUNKS | feature.engine,
            call=f"tests.engine.features:{feature.ask}",
        )
        # Triton's interpreter takes minutes for 40 requests.
        outcome = engines.run(cell, timeout=900)
        assert outcome.result, outcome.log[-6000:]
        assert len(log_lines(outcome.log)) == len(split), "one line a stage that the drop-in serves"
        return outcome.result

    reference, ours = ask(env=UPSTREAM), ask(1, 5, env={})
    feature.check(reference)
    distances = {part: apart(ours[part], reference[part]) for part in reference}
    assert max(distances.values()) <= feature.tolerance, distances
    if REPORT:
        with Path(REPORT).open("a") as file:
            print(json.dumps({"feature": feature.name, "apart": max(distances.values())}), file=file)


SPECULATED: list[tuple[str, str, tuple[int, ...], dict[str, Any]]] = [
    ("EAGLE-3", VL, (1, 5), EAGER),
    ("EAGLE-3", OMNI, (1, 1, 4), EAGER),
    ("EAGLE-3", MOE, (3, 3), EAGER),
    ("EAGLE-3", VL, (1,) * 6, EAGER),
    ("EAGLE-3", VL, (1, 1, 4), DEFAULT_COMPILE),
    ("EAGLE-3", VL, (3, 3), PIECEWISE),
    ("DFlash", VL, (1, 5), EAGER),
    ("DFlash", MOE, (1, 1, 4), EAGER),
]
DRAFTS = {"EAGLE-3": ("eagle3", variants.with_draft), "DFlash": ("dflash", variants.with_dflash)}
MODES = {"eager": EAGER, "compiled": DEFAULT_COMPILE, "piecewise, cold and warm": PIECEWISE}


@pytest.mark.skipif(not REPORT, reason="the matrix runs it; CI has a cell of it in test_release.py")
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("kind", "model_type", "split", "how"), SPECULATED, ids=str)
def test_draft(
    engines_v2: ForkServer,
    checkpoint: Checkpoint,
    kind: str,
    model_type: str,
    split: tuple[int, ...],
    how: dict[str, Any],
    cache: Path,
) -> None:
    """A draft: the tokens are those without it, and as many of its are accepted as at one stage."""
    method, make = DRAFTS[kind]
    model = variants.variant(checkpoint(model_type), f"drafted-{method}", make)

    def ask(*split: int, engine: dict[str, Any], env: dict[str, str]) -> Outcome:
        engine = {**SMALL_CHUNKS, "disable_log_stats": False, **engine}
        call = "tests.engine.features:drafted"
        cell = Cell(
            str(model), ROWS[model_type].asked, model_type, [*split], max_tokens=24, env=env, engine=engine, call=call
        )
        outcome = engines_v2.run(cell, timeout=900)
        assert outcome.result, outcome.log[-6000:]
        return outcome

    draft = variants.speculating(model, method)
    without, one = (ask(engine=engine, env=UPSTREAM).result for engine in (EAGER, draft | EAGER))
    assert without is not None
    assert one is not None
    assert one["counts"]["vllm:spec_decode_num_accepted_tokens"] > 0
    without["counts"] = one["counts"]
    env = AHEAD | ({PIECEWISE_ENV: "1", "VLLM_CACHE_ROOT": str(cache)} if how is PIECEWISE else {})
    for loaded in (0, len(split)) if how is PIECEWISE else (0,):
        outcome = ask(*split, engine=draft | how, env=env)
        ours = outcome.result
        assert ours is not None
        assert outcome.log.count(LOADED) >= loaded, "a warm start loads each stage's graph"
        assert ours["counts"] == one["counts"]
        parts = without.keys() - {"counts"}
        assert all(ours[part]["tokens"] == one[part]["tokens"] == without[part]["tokens"] for part in parts)
        far = max(apart(ours[part], without[part]) for part in parts)
        assert far <= 1e-4
    if REPORT:
        mode = next(name for name, mode in MODES.items() if mode is how)
        name = f"{kind} draft under V2, {model_type}, {'+'.join(map(str, split))}, {mode}"
        with Path(REPORT).open("a") as file:
            print(json.dumps({"feature": name, "apart": far}), file=file)
