"""Drop-in for `vllm.model_executor.models.step3_text`."""

from vllm.model_executor.models import step3_text as upstream

from vllm_pp_fixes.runtime.compose import drop_in

Step3TextForCausalLM = drop_in(upstream.Step3TextForCausalLM, __name__)
