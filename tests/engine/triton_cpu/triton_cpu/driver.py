"""The driver half: always active, on torch's CPU device."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase as _DriverBase


class CpuDriver(_DriverBase):
    """Launches nothing."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("this driver runs nothing")
