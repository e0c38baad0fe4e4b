from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import pytest
import torch

from tests.conftest import Checkpoint, edited
from tests.installed import FAULTS
from tests.models import ROWS
from tests.stages.device import same
from tests.stages.pipeline import (
    Batch,
    Model,
    Pipeline,
    engine_config,
    picture_batch,
    sound_batch,
    start_distributed,
    text_batch,
)

LAYERS = 6
UPSTREAM, OURS = "vllm.model_executor.models", "vllm_pp_fixes.models"

Build = Callable[..., Pipeline]
OneStage = Callable[..., list[torch.Tensor]]


def model_class(model_type: str, package: str) -> type:
    return getattr(import_module(f"{package}.{model_type}"), ROWS[model_type].class_name)


def batches(model_type: str, tower: bool = True) -> list[Batch]:
    """With media, without (shorter and longer: stale levels would show), with others."""
    short, long = text_batch(12, 2), text_batch(60, 3)
    if not tower or not ROWS[model_type].no_tower:
        return [long, short]
    if model_type == "moss_audio":
        return [sound_batch(1, 100), short, long, sound_batch(4, 203), sound_batch(5, 41)]
    return [picture_batch(1), short, long, picture_batch(4, 64, 128), picture_batch(5, 32, 32)]


def answers(pipeline: Pipeline, asked: list[Batch], runner: str = "V1") -> list[torch.Tensor]:
    return [pipeline.run(batch, runner) for batch in asked]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="session")
def build(checkpoint: Checkpoint) -> Build:
    """Build a pipeline; stages are shared across tests."""
    start_distributed()

    @cache
    def model(
        package: str,
        model_type: str,
        tower: bool,
        split: tuple[int, ...],
        rank: int,
        sizes: tuple[tuple[str, int], ...],
    ) -> Model:
        folder = checkpoint(model_type, **dict(sizes))
        if package == UPSTREAM:
            folder = edited(folder)
        config = engine_config(str(folder), None if tower else ROWS[model_type].no_tower)
        return Model(model_class(model_type, package), config, split, rank)

    def pipeline(
        split: tuple[int, ...] = (LAYERS,),
        package: str = OURS,
        model_type: str = "qwen3_vl",
        *,
        tower: bool = True,
        **sizes: int,
    ) -> Pipeline:
        made = tuple(sorted(sizes.items()))
        return Pipeline([model(package, model_type, tower, split, rank, made) for rank in range(len(split))])

    return pipeline


@pytest.fixture(scope="session")
def one_stage(build: Build) -> OneStage:
    """What one stage of upstream's class answers; of the drop-in where upstream does not start without a tower."""

    @cache
    def answer(model_type: str, tower: bool, sizes: tuple[tuple[str, int], ...]) -> list[torch.Tensor]:
        package = OURS if not tower and {"moss-audio-off", "buffers-on-meta"} & FAULTS[model_type] else UPSTREAM
        return answers(build((LAYERS,), package, model_type, tower=tower, **dict(sizes)), batches(model_type, tower))

    return lambda model_type, tower=True, **sizes: answer(model_type, tower, tuple(sorted(sizes.items())))
