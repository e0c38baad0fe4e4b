"""What each stage of a split holds, what that leaves for the cache of keys and values, which split leaves the most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.stages import Stage
from .split import best_split, own_split, worth
from .weights import ALL_ON_ALL, HEAD_LAST, Model, Weights


@dataclass(frozen=True)
class Held:
    """One stage of a split, in bytes on each of its GPUs."""

    start: int
    end: int
    parts: dict[str, int]
    """`layers`, `towers` (of a text model `other`), `embedding`, `head` and `buffers`, those that it has."""
    memory: int
    """Of the whole GPU; where none was said, what it needs."""
    spared: int
    """What vLLM leaves alone (`--gpu-memory-utilization`), and the reserve."""
    blocks: int
    """Blocks of keys and values that fit into the rest."""
    tokens: int
    """Tokens of context in these blocks."""

    @property
    def room(self) -> int:
        """Bytes left for the cache of keys and values; negative where the stage does not fit."""
        return self.memory - self.spared - sum(self.parts.values())


@dataclass(frozen=True)
class Pipeline:
    """A model over stages, in bytes on one GPU: what a stage of it holds, whichever layers it runs."""

    model: Model
    weights: Weights
    stages: int
    memory: tuple[int, ...]
    """Of the GPUs of each stage; empty where it is asked for."""
    context: int
    """Tokens of context that must fit where the memory is asked for."""
    ours: bool
    """Whether the drop-ins serve: levels are sent on, and buffered on the first stage only."""
    towers_first: bool
    batched_tokens: int
    kv_itemsize: int
    block: int
    reserve: int
    utilization: float

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block * self.model.kv_width * self.kv_itemsize

    def parts(self, stage: int, start: int, end: int) -> dict[str, int]:
        """Return the bytes of each part that a stage of the layers `[start, end)` holds."""
        first, last = stage == 0, stage == self.stages - 1
        on_all = bool(ALL_ON_ALL.fullmatch(self.model.type))
        weights = self.weights
        again = weights.tied and last and not first  # The head is the embedding, which stands there once more.
        head_here = last or (on_all and not HEAD_LAST.fullmatch(self.model.type))
        token = self.model.hidden * self.model.itemsize * self.batched_tokens
        levels = min(self.model.levels, self.model.layers)
        received = len(Stage(start, end, levels, first).received) if self.ours else 0
        buffered = levels if first or not self.ours else 0
        found = {
            "layers": sum(weights.layers[start:end]) + (weights.norm if last or on_all else 0),
            "towers" if self.model.multimodal else "other": weights.other if first or not self.towers_first else 0,
            "embedding": weights.embedding if first or on_all else 0,
            "head": weights.head if head_here else 0,
            "buffers": self.model.rotary * self.model.itemsize + token * (buffered + (0 if first else 2 + received)),
        }
        if again and not on_all:
            found["head"] = weights.embedding
        return {part: size for part, size in found.items() if size}

    def held(self, stage: int, start: int, end: int) -> Held:
        """Return what a stage of the layers `[start, end)` holds, and what that leaves."""
        parts = self.parts(stage, start, end)
        layer_block = self.block_bytes * (end - start)
        if not self.memory:
            blocks = -(-self.context // self.block)
            memory = math.ceil((sum(parts.values()) + self.reserve + blocks * layer_block) / self.utilization)
        else:
            memory = self.memory[stage]
        spared = memory - int(memory * self.utilization) + self.reserve
        if self.memory:
            blocks = max(0, memory - spared - sum(parts.values())) // layer_block
        return Held(start, end, parts, memory, spared, blocks, blocks * self.block)

    def score(self, stage: int, start: int, end: int) -> int:
        """Return the blocks that fit, or minus the bytes that lack; where no memory is said, minus those needed."""
        held = self.held(stage, start, end)
        return -held.memory if not self.memory else held.blocks if held.room >= 0 else held.room

    def best(self) -> list[int]:
        """Return the best split, vLLM's own where none is better.

        Raises `ValueError` where there are more stages than layers.
        """
        best = best_split(self.model.layers, self.stages, self.score)
        own = own_split(self.model.layers, self.stages)
        return own if worth(own, self.score) == worth(best, self.score) else best

    def over(self, split: Sequence[int]) -> list[Held]:
        """Return what each stage of a split holds."""
        ends = [sum(split[: stage + 1]) for stage in range(len(split))]
        return [self.held(stage, end - size, end) for stage, (size, end) in enumerate(zip(split, ends, strict=True))]
