"""Drop-in for `vllm.model_executor.models.colqwen3`."""

from vllm.model_executor.models import colqwen3 as upstream

from vllm_pp_fixes.runtime.compose import drop_in

ColQwen3Model = drop_in(upstream.ColQwen3Model, __name__)
