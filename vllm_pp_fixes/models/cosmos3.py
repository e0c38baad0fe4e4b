"""Drop-in for `vllm.model_executor.models.cosmos3`."""

from vllm.model_executor.models import cosmos3 as upstream

from vllm_pp_fixes.runtime.compose import drop_in

Cosmos3ForConditionalGeneration = drop_in(upstream.Cosmos3ForConditionalGeneration, __name__)
