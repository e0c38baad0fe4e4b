"""Under torch.compile the levels are ignored: the getter answers None as long as no batch had any.

vLLM traces the inner model once, before the first picture, drops the guards, and so an input that was None then is
ignored for ever. Upstream: PR 40145 brought it, #41485, PR 43617.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Cure, Fault
from ..shapes import hides_empty_buffers

if TYPE_CHECKING:
    import torch
    from vllm.sequence import IntermediateTensors


def cure() -> Cure:
    """Hand levels over in each batch, zeros where it has none."""
    from torch.nn.functional import pad
    from vllm.sequence import IntermediateTensors

    from ..runtime.deepstack import key

    class ZeroBackedLevels:
        """Mixin over an upstream model: its buffers are handed out whether a batch has levels or not."""

        deepstack_input_embeds: list[torch.Tensor]

        def _get_deepstack_input_embeds(self, num_tokens: int) -> IntermediateTensors | None:
            if not self.deepstack_input_embeds:
                return None
            missing = num_tokens - self.deepstack_input_embeds[0].size(0)
            if missing > 0:
                self.deepstack_input_embeds = [pad(b, (0, 0, 0, missing)) for b in self.deepstack_input_embeds]
            return IntermediateTensors({key(k): b[:num_tokens] for k, b in enumerate(self.deepstack_input_embeds)})

        def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
            # 0.20.0 refuses to clear more than was filled (#41485); the rest is zero as it is.
            filled = getattr(self, "deepstack_input_embeds_num_tokens", 0)
            super()._clear_deepstack_input_embeds(min(num_tokens, filled))  # type: ignore[misc]

    return Cure(mixins=(ZeroBackedLevels,))


FAULT = Fault(
    id="compiled-drops-levels",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"),
    ranges=(("0.20.0", "0.22.1"),),
    effect="wrong answers",
    symptom="under torch.compile, the default, the levels are ignored, at one stage too: **wrong answers**; "
    "on 0.20.0 also `ValueError: Requested more deepstack tokens than available in buffer`",
    upstream="PR 40145 brought it, #41485, PR 43617; fixed 0.23.0",
    remedy="levels are handed over in each batch, zeros where it has none, so that the one trace of the model "
    "sees them",
    until="0.23.0",
    probe=hides_empty_buffers,
    cure=cure,
    rests_on={
        "_get_deepstack_input_embeds": "gives views of `deepstack_input_embeds`, a list of buffers, a level each",
        "_clear_deepstack_input_embeds": "zeroes what `deepstack_input_embeds_num_tokens` says was filled",
    },
)
