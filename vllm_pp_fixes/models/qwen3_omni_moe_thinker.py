"""Drop-in for `vllm.model_executor.models.qwen3_omni_moe_thinker`."""

from vllm.model_executor.models import qwen3_omni_moe_thinker as upstream

from vllm_pp_fixes.runtime.compose import drop_in

Qwen3OmniMoeThinkerForConditionalGeneration = drop_in(upstream.Qwen3OmniMoeThinkerForConditionalGeneration, __name__)
