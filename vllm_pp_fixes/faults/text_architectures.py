"""The configuration of the text model names no architecture, and vLLM looks it up with more than one stage.

Upstream: #43271, PR 43272, PR 53699.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..fault import Cure, Fault
from ..releases import OLDEST
from ..source import CannotTell, Tree


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether a configuration is derived for the text model without its architecture."""
    calls = [
        node
        for node in ast.walk(tree.builder(model, cls)[2])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "with_hf_config"
    ]
    if not calls:
        raise CannotTell(f"the constructor of {cls} in {model}.py makes no configuration for its text model")
    return not all(len(call.args) > 1 or any(k.arg == "architectures" for k in call.keywords) for call in calls)


@contextmanager
def named_architecture(upstream: type, vllm_config: Any) -> Iterator[None]:
    """Give the configuration that the constructor derives for its text model the architecture that it lacks.

    The text model's class inherits from the one that bears the name. The checkpoint's own configuration is left as it
    is: vLLM copies what it gives an architecture to.
    """
    from vllm.config import VllmConfig

    of_experts = hasattr(sys.modules[upstream.__module__], "Qwen3MoeForCausalLM")
    derive = VllmConfig.with_hf_config

    def with_hf_config(self: Any, hf_config: Any, architectures: list[str] | None = None) -> Any:
        if architectures is None and not getattr(hf_config, "architectures", None):
            architectures = ["Qwen3MoeForCausalLM" if of_experts else "Qwen3ForCausalLM"]
        return derive(self, hf_config, architectures)

    with mock.patch.object(VllmConfig, "with_hf_config", with_hf_config):
        yield


FAULT = Fault(
    id="text-architectures",
    hits=("qwen3_vl", "qwen3_vl_moe"),
    ranges=((OLDEST, "0.29.0"),),
    effect="refuses",
    symptom="PP>1, a checkpoint as published: `No model architectures are specified`: the text model's "
    "configuration names none (0.29.0's CPU build at one stage too: `IndexError: list index out of range`)",
    upstream="#43271, PR 43272, PR 53699; fixed 0.30.0",
    remedy="the constructor gives the text model's configuration its architecture",
    until="0.30.0",
    probe=probe,
    cure=lambda: Cure(named_architecture),
    rests_on={
        "__init__": "derives one configuration, its text model's, by `with_hf_config`",
        "vllm_config.with_hf_config": "takes the configuration and a list of architectures",
    },
)
