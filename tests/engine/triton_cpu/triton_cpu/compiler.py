"""The compiler half; under TRITON_INTERPRET=1 it is never asked to compile."""

from typing import Any

from triton.backends.compiler import BaseBackend as _BaseBackend


class CpuBackend(_BaseBackend):
    """Compiles nothing."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu"

    def parse_options(self, options: dict) -> object:
        return options

    def add_stages(self, stages: dict, options: object) -> None:
        raise RuntimeError("this backend compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict:
        return {}
