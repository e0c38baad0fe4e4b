"""What vLLM's CPU platform needs to run engines quickly and at all: none of it concerns a model."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def fork_workers() -> None:
    """Make the CPU platform, which spawns its workers (a minute each), fork them; a GPU's forks by itself."""
    import_module("vllm.v1.worker.cpu_worker")
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def know_instructions() -> None:
    """Find out once, for all forks, which vector instructions inductor may use: it imports torch anew to try each."""
    cpu_vec_isa = import_module("torch._inductor.cpu_vec_isa")
    cpu_vec_isa.pick_vec_isa()


def close_gaps() -> None:
    """Repair what keeps older releases from running some models on a machine without a GPU.

    0.20 trips over its own log line where cores are not bound; 0.21 and 0.22 pin the memory of what they copy to the
    device; up to 0.24 the experts' activation is built in each forward, outside the engine's configuration. In
    all releases the CPU's runner V1, unlike a GPU's, does not ask whether the model prunes video.
    """
    import torch
    from vllm.utils import torch_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **more: Any) -> None:
        load(self, *args, **more)
        config, model = self.model_config.multimodal_config, self.get_model()
        self.is_multimodal_pruning_enabled = (
            config is not None
            and config.is_multimodal_pruning_enabled()
            and getattr(model, "supports_multimodal_pruning", False)
        )

    CPUModelRunner.load_model = load_model

    if find_spec("vllm.utils.ompmultiprocessing"):
        manager = import_module("vllm.utils.ompmultiprocessing").OMPProcessManager
        parse = manager._parse_omp_threads_bind_env

        def parse_quietly(self: Any) -> None:
            with suppress(IndexError):
                parse(self)

        manager._parse_omp_threads_bind_env = parse_quietly

    if defaults := getattr(torch_utils.async_tensor_h2d, "__defaults__", None):
        torch_utils.async_tensor_h2d.__defaults__ = tuple(False if d is True else d for d in defaults)
    try:
        experts = import_module("vllm.model_executor.layers.fused_moe.cpu_fused_moe")
    except ModuleNotFoundError:
        return
    activations = getattr(experts, "_CPU_MOE_ACT_FN", {})
    for activation in activations:
        if getattr(activation, "value", activation) == "silu":

            def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
                gate, up = x.chunk(2, dim=-1)
                return torch.nn.functional.silu(gate) * up

            activations[activation] = silu_and_mul


def inspect_in_forks() -> None:
    """Make vLLM inspect a model's class in a fork of the process, which takes no import, instead of a fresh one.

    It does so apart because a model may initialise a GPU on import: here there is none.
    """
    from vllm.model_executor.models import registry

    def run_apart(function: Callable[[], Any]) -> Any:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with os.fdopen(write, "wb") as file:
                    pickle.dump(function(), file)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            result = file.read()
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError("the class of the model cannot be inspected")
        return pickle.loads(result)

    registry._run_in_subprocess = run_apart
