"""Drop-in for `vllm.model_executor.models.qwen3_vl_moe`."""

from vllm.model_executor.models import qwen3_vl_moe as upstream

from vllm_pp_fixes.runtime.compose import drop_in

Qwen3VLMoeForConditionalGeneration = drop_in(upstream.Qwen3VLMoeForConditionalGeneration, __name__)
