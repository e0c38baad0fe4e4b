"""Drop-in for `vllm.model_executor.models.qwen3_vl`."""

from vllm.model_executor.models import qwen3_vl as upstream

from vllm_pp_fixes.runtime.compose import drop_in

Qwen3VLForConditionalGeneration = drop_in(upstream.Qwen3VLForConditionalGeneration, __name__)
