"""Drop-in for `vllm.model_executor.models.step3_text` (fault step3-residual, #37543; upstream's own since 0.23.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models import step3_text as upstream
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory

from vllm_pp_fixes.deepstack import faults_of, log_service, named

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FAULTS = faults_of(upstream.Step3TextForCausalLM)


class _DeclaresResidual(upstream.Step3TextForCausalLM):
    """Step3 whose stages declare all that their forward sends: `hidden_states` and `residual`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], self.config.hidden_size
        )
        log_service(self, _FAULTS)


Step3TextForCausalLM = (
    named(upstream.Step3TextForCausalLM.__name__, __name__, (_DeclaresResidual,))
    if _FAULTS
    else upstream.Step3TextForCausalLM
)
