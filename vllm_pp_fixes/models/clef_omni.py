"""Drop-in for `vllm.model_executor.models.clef_omni`."""

from vllm.model_executor.models import clef_omni as upstream

from vllm_pp_fixes.runtime.compose import drop_in

ClefOmniForJointSchema = drop_in(upstream.ClefOmniForJointSchema, __name__)
