"""Drop-in for `vllm.model_executor.models.colqwen3` (faults split-refused, split-refused-towerless)."""

from vllm.model_executor.models import colqwen3 as upstream

from vllm_pp_fixes.deepstack import drop_in

ColQwen3Model = drop_in(upstream.ColQwen3Model, __name__)
