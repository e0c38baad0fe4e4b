"""What a file of `faults/` holds: the record of a fault, how it is recognised, what cures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from .registry import MODELS
from .releases import NEWEST, OLDEST, numbers
from .source import Tree

Condition = Callable[[type, Any], AbstractContextManager[None]]
"""Given the upstream class and the `VllmConfig`: the context in which its constructor runs."""
Effect = Literal["wrong answers", "refuses", "wastes"]
EFFECTS: tuple[Effect, ...] = "wrong answers", "refuses", "wastes"
"""What a fault does, the worst first."""


@dataclass(frozen=True)
class Cure:
    """What a drop-in is made of where the fault is. Raises `ValueError` if that is nothing."""

    condition: Condition | None = None
    mixins: tuple[type, ...] = ()
    """Classes that go above the upstream class."""

    def __post_init__(self) -> None:
        if self.condition is None and not self.mixins:
            raise ValueError("a cure that composes nothing cures nothing")


@dataclass(frozen=True)
class Fault:
    """A fault of upstream's, under the id that messages and documents use."""

    id: str
    hits: tuple[str, ...]
    """Module names of the models, as in `MODELS`; what inherits from them is hit too."""
    ranges: tuple[tuple[str, str], ...]
    """Releases that have it: ranges, both ends included."""
    effect: Effect
    symptom: str
    upstream: str
    """Issue or pull request, or "none"."""
    remedy: str
    """What is done about it here, in words."""
    until: str
    """When the cure can go."""
    probe: Callable[[Tree, str, str], bool]
    """`(tree, module, class)` to whether the model has it, as its code shows. Raises `CannotTell`."""
    cure: Callable[[], Cure]
    """Called where the fault is; only then may torch and vLLM be imported."""
    rests_on: Mapping[str, str] = field(default_factory=dict)
    """What the cure takes for granted: a function of upstream's, by its path from the model or from `vllm_config`,
    to what is assumed of it."""

    crossing: bool = False
    """Whether it is met only where DeepStack levels cross stages."""
    drafts: bool = False
    """Whether it is met only with a draft that reads auxiliary states."""
    no_diff: str = ""
    """Why `patches/` has no diff of it, where it has none."""

    @property
    def models(self) -> tuple[str, ...]:
        """Module names of all models that it hits."""
        return tuple(name for name, model in MODELS.items() if (model.inherits or name) in self.hits)

    @property
    def releases(self) -> str:
        """The ranges as text."""
        return ", ".join(first if first == last else f"{first} to {last}" for first, last in self.ranges)

    def expected(self, version: str) -> bool | None:
        """Tell whether the record says that release `version` has the fault; None for one that it does not know."""
        release = numbers(version)
        if not numbers(OLDEST) <= release <= numbers(NEWEST):
            return None
        return any(numbers(first) <= release <= numbers(last) for first, last in self.ranges)
