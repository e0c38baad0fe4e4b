"""Drop-in for `vllm.model_executor.models.clef_omni` (fault split-drops-levels)."""

from vllm.model_executor.models import clef_omni as upstream

from vllm_pp_fixes.deepstack import drop_in

ClefOmniForJointSchema = drop_in(upstream.ClefOmniForJointSchema, __name__)
