"""The arithmetic of splits: which one is best, exactly; which one vLLM takes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Score = Callable[[int, int, int], int]
"""`(stage, start, end)` to how good it is that the stage runs the layers `[start, end)`; a split is as good as its
worst stage."""


def own_split(layers: int, stages: int) -> list[int]:
    """Return the layers a stage that vLLM takes where nobody says one.

    Each stage gets the same number. What is left over goes one each to the stages before the last, from the back.
    """
    share, over = divmod(layers, stages)
    return [share + (stages - 1 - over <= stage < stages - 1) for stage in range(stages)]


def worth(split: Sequence[int], score: Score) -> int:
    """Return how good a split is: the score of its worst stage."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return min(score(stage, end - size, end) for stage, (size, end) in enumerate(zip(split, ends, strict=True)))


def best_split(layers: int, stages: int, score: Score) -> list[int]:
    """Return the split into `stages` stages whose worst stage scores best; of equals, the most even one.

    Raises `ValueError` where there are more stages than layers.
    """
    if stages > layers:
        raise ValueError(f"{stages} stages are more than the model's {layers} layers: use at most {layers}")
    scores = {
        (stage, start, end): score(stage, start, end)
        for stage in range(stages)
        for start in range(stage, layers - stages + stage + 1)
        for end in range(start + 1, layers - stages + stage + 2)
    }
    # best[end]: the best worst score of the stages so far, over the layers before `end`.
    best = {end: scores[0, 0, end] for end in range(1, layers - stages + 2)}
    for stage in range(1, stages):
        best = {
            end: max(min(best[start], scores[stage, start, end]) for start in range(stage, end))
            for end in range(stage + 1, layers - stages + stage + 2)
        }
    bar = best[layers]
    # The same once more over the stages that reach it: the least sum of squares is the most even.
    even: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(stages):
        reached: dict[int, tuple[int, list[int]]] = {}
        for start, (cost, sizes) in even.items():
            for end in range(start + 1, layers - stages + stage + 2):
                if scores[stage, start, end] >= bar:
                    found = (cost + (end - start) ** 2, [*sizes, end - start])
                    reached[end] = min(found, reached.get(end, found))
        even = reached
    return even[layers][1]
