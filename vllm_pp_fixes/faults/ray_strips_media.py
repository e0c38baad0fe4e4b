"""Ray's compiled-graph executor takes the media of a request away: later stages work out positions of plain text.

Upstream: PR 35405, made for #35403.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ..fault import Cure, Fault
from ..releases import OLDEST
from ..shapes import POSITIONS_REST_ON
from ..source import Tree

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXECUTOR = "v1/executor/ray_executor"


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the worker of Ray's executor empties `mm_features`, and the model's positions depend on them."""

    def empties(node: ast.AST) -> bool:
        return isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "mm_features" for target in node.targets
        )

    positions = tree.method(model, cls, "get_mrope_input_positions")
    return positions is not None and tree.mentions("v1/executor/ray_utils.py", empties)


def compiled_graph(vllm_config: Any) -> bool:
    """Tell whether the executor is Ray's compiled graph, or one made of it; an executor that none can tell is."""
    from vllm.v1.executor.abstract import Executor

    try:
        executor = Executor.get_class(vllm_config)
    except Exception:
        return True
    return any(f"vllm/{EXECUTOR}" == base.__module__.replace(".", "/") for base in executor.__mro__)


def cure() -> Cure:
    """Send the first stage's positions along."""
    from ..runtime.construction import asked_for
    from ..runtime.positions import PositionsOverStages

    class PositionsUnderRay(PositionsOverStages):
        """Mixin over an upstream M-RoPE model: sends positions where the executor is Ray's compiled graph."""

        def needs_positions(self, vllm_config: VllmConfig) -> bool:
            needed = bool(asked_for(vllm_config, "audio", "image", "video")) and compiled_graph(vllm_config)
            return needed or super().needs_positions(vllm_config)

    return Cure(mixins=(PositionsUnderRay,))


FAULT = Fault(
    id="ray-strips-media",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"),
    ranges=((OLDEST, "0.32.0"),),
    effect="wrong answers",
    symptom="PP>1 with Ray's compiled-graph executor (the default of `--distributed-executor-backend ray` up to "
    "0.20.2, later only with `VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0`): later stages do not see the media and use "
    "positions of plain text: **wrong answers** for pictures, video and sound",
    upstream="PR 35405 brought it, for #35403; 0.33.0 has no such executor",
    remedy="under that executor the first stage sends its positions along, and later stages use them",
    until="0.33.0",
    no_diff="the fault is in Ray's executor, which 0.33.0 no longer has, so that there is nothing to send; positions "
    "need grids and lengths that lie among the pixels in a request's media, and only each model knows which they "
    "are: no small change strips less. The other executors are right, use one of them",
    probe=probe,
    cure=cure,
    rests_on=POSITIONS_REST_ON,
)
