"""Drop-in for `vllm.model_executor.models.moss_audio`."""

from vllm.model_executor.models import moss_audio as upstream

from vllm_pp_fixes.runtime.compose import drop_in

MossAudioModel = drop_in(upstream.MossAudioModel, __name__)
