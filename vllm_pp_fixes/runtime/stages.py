"""The arithmetic of stages: which DeepStack levels and auxiliary states a stage receives, uses and forwards.

Level `k` is added to the hidden states after layer `k`. The factory of receive buffers and the sender both ask
here, so that they cannot disagree: vLLM's V1 runner loops over the received keys, V2 over the buffer's, and a set
that is not the same on both sides is a KeyError in one of them and stale data in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, running the layers `[start, end)` of a model with `levels` DeepStack levels.

    `levels` counts those that some layer uses: at most one a layer of the whole model, 0 without a tower.
    """

    start: int
    end: int
    levels: int
    first: bool

    @property
    def received(self) -> range:
        """Levels that come from the stage before: those at or after `start`; none on the first stage."""
        return range(0) if self.first else range(self.start, self.levels)

    @property
    def used(self) -> range:
        """Levels that a layer of this stage adds."""
        return range(self.start, min(self.end, self.levels))

    @property
    def forwarded(self) -> range:
        """Levels that a later stage adds: those at or after `end`; none on the last stage."""
        return range(self.end, self.levels)


@dataclass(frozen=True)
class States:
    """The auxiliary states that a stage receives, captures and forwards, by number: in the order of their layers.

    State `L` is what enters layer `L`, or leaves the last one. Between two stages it is captured by the earlier one.
    """

    received: range = range(0)
    captured: range = range(0)
    forwarded: range = range(0)
    layers: tuple[int, ...] = ()
    """Which states this stage captures."""

    @classmethod
    def of(cls, wanted: tuple[int, ...], start: int, end: int, first: bool, last: bool) -> States:
        """Return those of the stage that runs the layers `[start, end)`, where `wanted` (sorted) are asked for."""
        before = 0 if first else sum(layer <= start for layer in wanted)
        until = sum(layer <= end for layer in wanted)
        none = range(0)
        return cls(range(before), range(before, until), none if last else range(until), wanted[before:until])


def parse_split(text: str, layers: int | None = None) -> list[int]:
    """Read a split such as `"1,5"`, the layers a stage, as in `VLLM_PP_LAYER_PARTITION`.

    Raises `ValueError`, one line that says what to do, when it is no list of whole numbers, a stage is empty, or
    (with `layers`) it does not add up.
    """
    try:
        split = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"split {text!r} is no list of layer counts: write one number a stage, as in 1,5") from None
    if min(split) < 1:
        raise ValueError(f"split {text!r} has a stage without layers: give every stage at least 1")
    if layers is not None and sum(split) != layers:
        raise ValueError(f"split {text!r} adds up to {sum(split)} layers, the model has {layers}: make it add up")
    return split


def stages(split: Sequence[int], levels: int) -> list[Stage]:
    """Return the stages of a split (layers a stage) of a model with `levels` DeepStack levels."""
    levels = min(levels, sum(split))
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    return [Stage(end - size, end, levels, first=i == 0) for i, (size, end) in enumerate(zip(split, ends, strict=True))]
