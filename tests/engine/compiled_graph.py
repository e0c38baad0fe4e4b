"""What Ray's compiled-graph executor does to a stage, without Ray, which does not start on the CPU platform.

Imported in the process that engines are forked from. Where `RAY_ENV` is set the model is built under the configuration
of that executor, and every stage but the first gets its requests without their media (`v1/executor/ray_utils.py`).
"""

import os
from contextlib import suppress
from importlib import import_module
from typing import Any
from unittest import mock

from vllm.distributed import get_pp_group

from .cells import RAY_ENV


def _stand_in(runner: Any, loads: Any) -> None:
    """Wrap `execute_model` of the class `runner`, and `load_model` of `loads`, which inherits from it."""
    execute, load = runner.execute_model, loads.load_model

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **more: Any) -> Any:
        if RAY_ENV in os.environ and not get_pp_group().is_first_rank:
            for request in scheduler_output.scheduled_new_reqs:
                request.mm_features = []
        return execute(self, scheduler_output, *args, **more)

    def load_model(self: Any, *args: Any, **more: Any) -> Any:
        if RAY_ENV not in os.environ:
            return load(self, *args, **more)
        parallel = self.vllm_config.parallel_config
        own, parallel.distributed_executor_backend = parallel.distributed_executor_backend, "ray"
        os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0"
        try:
            # The text model's configuration is made of this one, and asks for Ray.
            with mock.patch("vllm.v1.executor.ray_utils.assert_ray_available"):
                return load(self, *args, **more)
        finally:
            parallel.distributed_executor_backend = own

    runner.execute_model, loads.load_model = execute_model, load_model


_stand_in(
    import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner,
    import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner,
)
with suppress(ImportError):  # older than runner V2, or without a Triton that it takes
    _v2 = import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    _stand_in(_v2, _v2)
