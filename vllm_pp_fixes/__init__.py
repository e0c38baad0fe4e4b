"""Pipeline parallelism of multimodal models in vLLM, repaired by drop-in model classes.

Importing the package loads neither torch nor vLLM. `register()` is what vLLM's plugin loader calls; in a custom
runner import a class from `vllm_pp_fixes.models`, or, for short, from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .catalog import MODELS
from .plugin import register

if TYPE_CHECKING:
    from .models.clef_omni import ClefOmniForJointSchema
    from .models.colqwen3 import ColQwen3Model
    from .models.cosmos3 import Cosmos3ForConditionalGeneration
    from .models.moss_audio import MossAudioModel
    from .models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration
    from .models.qwen3_vl import Qwen3VLForConditionalGeneration
    from .models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
    from .models.step3_text import Step3TextForCausalLM

__version__ = "0.1.0"
__all__ = [
    "ClefOmniForJointSchema",
    "ColQwen3Model",
    "Cosmos3ForConditionalGeneration",
    "MossAudioModel",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Step3TextForCausalLM",
    "__version__",
    "register",
]

_LAZY = {class_name: model for model, served in MODELS.items() for class_name in served.values()}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".models.{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
