"""Drop-in for `vllm.model_executor.models.step3_text`: upstream's own class, which is right since 0.23.0 (PR 37622)."""

from vllm.model_executor.models.step3_text import Step3TextForCausalLM

__all__ = ["Step3TextForCausalLM"]
