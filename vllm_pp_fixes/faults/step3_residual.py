"""Stages of Step3 send hidden states and residual, and declare the hidden states only.

Upstream: #37543, PR 37622.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Cure, Fault
from ..releases import OLDEST
from ..shapes import FACTORY
from ..source import CannotTell, Tree, assigns, enclosed, mentions, own_method, path_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the factory's list of names lacks the residual."""
    init = own_method(tree.cls(path_of(model), "Step3TextModel"), "__init__")
    made = enclosed(init, lambda s: assigns(s, f"self.{FACTORY}") is not None) if init else ()
    factories = [found[-1] for found in made]
    if not factories:
        raise CannotTell(f"Step3TextModel makes no {FACTORY}")
    return not any(mentions(factory, "residual") for factory in factories)


def cure() -> Cure:
    """Declare all that `forward` sends."""
    from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory

    from ..runtime.compose import DropIn

    class DeclaresResidual(DropIn):
        """Mixin over upstream's Step3."""

        def built(self, vllm_config: VllmConfig) -> None:
            super().built(vllm_config)
            self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
                ["hidden_states", "residual"], self.config.hidden_size
            )

    return Cure(mixins=(DeclaresResidual,))


FAULT = Fault(
    id="step3-residual",
    hits=("step3_text",),
    ranges=((OLDEST, "0.22.1"),),
    effect="refuses",
    symptom="PP>1: `KeyError: 'residual'`: the factory declares hidden_states only",
    upstream="#37543, PR 37622; fixed 0.23.0",
    remedy="the factory declares the residual too",
    until="0.23.0",
    probe=probe,
    cure=cure,
    rests_on={
        "forward": "returns what the model inside returns",
        "model.forward": "sends hidden states and residual, each `(num_tokens, hidden_size)`",
    },
)
