"""A GPU's compile mode on the CPU: piecewise, with the cache of compiled graphs. Imported in the warm process.

The CPU platform turns it into tracing once, whose cache never loads. Where `PIECEWISE_ENV` is set this keeps the mode
and the backend as they were asked for.
"""

import os
from typing import Any

from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.platforms.cpu import CpuPlatform

from .cells import PIECEWISE_ENV

_check = CpuPlatform.check_and_update_config.__func__


def _check_and_update_config(cls: type, vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    asked = compilation.mode, compilation.backend
    _check(cls, vllm_config)
    if PIECEWISE_ENV in os.environ:
        compilation.mode, compilation.backend = asked


CpuPlatform.check_and_update_config = classmethod(_check_and_update_config)
# It looks for CUDA ops by name, which the CPU build does not have; only piecewise compilation runs it.
FixFunctionalizationPass.__call__ = lambda self, graph: None
