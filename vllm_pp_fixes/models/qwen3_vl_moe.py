"""Drop-in for `vllm.model_executor.models.qwen3_vl_moe` (faults split-refused, split-refused-towerless)."""

from vllm.model_executor.models import qwen3_vl_moe as upstream

from vllm_pp_fixes.deepstack import drop_in

Qwen3VLMoeForConditionalGeneration = drop_in(upstream.Qwen3VLMoeForConditionalGeneration, __name__)
