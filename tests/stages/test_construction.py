"""The key of vLLM's compile cache sees drop-in, towers and version; the class keeps upstream's name and place."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Upstream

import vllm_pp_fixes
from tests.installed import TREE
from tests.stages.pipeline import Group, engine_config
from vllm_pp_fixes.models.qwen3_vl import Qwen3VLForConditionalGeneration as Ours
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.runtime import compose, construction
from vllm_pp_fixes.version import identity


def marked(model: Path, limits: dict[str, int] | None = None, overrides: str = "A") -> VllmConfig:
    config = engine_config(str(model), limits)
    construction.mark_compile_cache(config, overrides)
    return config


def test_key_of_the_compile_cache(qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = engine_config(str(qwen3_vl)).compute_hash()
    ours = marked(qwen3_vl).compute_hash()
    assert marked(qwen3_vl).compute_hash() == ours, "the same start finds its own graph"
    others = {
        upstream,
        ours,
        marked(qwen3_vl, {"image": 0, "video": 0}).compute_hash(),
        marked(qwen3_vl, {"video": 0}).compute_hash(),
        marked(qwen3_vl, overrides="B").compute_hash(),
    }
    monkeypatch.setattr(construction, "identity", lambda: "0.0.1+0")
    others.add(marked(qwen3_vl).compute_hash())
    assert len(others) == 6


def test_the_inner_models_config_inherits_the_mark(qwen3_vl: Path) -> None:
    config = marked(qwen3_vl)
    inner = config.with_hf_config(config.model_config.hf_config.text_config, architectures=["Qwen3ForCausalLM"])
    assert inner.additional_config == config.additional_config
    assert identity() in inner.additional_config["vllm_pp_fixes"]


def test_what_else_is_in_additional_config_stays(qwen3_vl: Path) -> None:
    config = engine_config(str(qwen3_vl))
    config.additional_config = given = {"platform": 1}
    construction.mark_compile_cache(config, "A")
    assert config.additional_config["platform"] == 1
    assert given == {"platform": 1}, "the caller's own dict is not written to"
    config.additional_config = own = object()
    construction.mark_compile_cache(config, "A")
    assert config.additional_config is own


def test_as_first_stage_is_seen_by_upstreams_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import qwen3, qwen3_vl

    monkeypatch.setattr(parallel_state, "_PP", Group(2, 3))
    with construction.as_first_stage(Upstream, None):
        seen = qwen3_vl.get_pp_group()
        assert (seen.is_first_rank, seen.is_last_rank, seen.rank_in_group) == (True, True, 2)
        assert not qwen3.get_pp_group().is_first_rank
    assert not qwen3_vl.get_pp_group().is_first_rank


def test_the_drop_in_is_upstreams_class_by_name_and_by_descent() -> None:
    assert issubclass(Ours, Upstream)
    assert Ours.__name__ == Upstream.__name__
    assert Ours.__module__ == "vllm_pp_fixes.models.qwen3_vl"
    assert vllm_pp_fixes.Qwen3VLForConditionalGeneration is Ours
    assert compose.upstream_of(Ours) is Upstream


@pytest.mark.parametrize("module", [model for model in MODELS if TREE.has(model)])
def test_each_class_is_importable_by_its_module_and_for_short(module: str) -> None:
    classes = import_module(f"vllm_pp_fixes.models.{module}")
    class_name = MODELS[module].class_name
    assert getattr(vllm_pp_fixes, class_name) is getattr(classes, class_name)
    assert class_name in vllm_pp_fixes.__all__


def test_a_class_that_none_can_tell_of_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    unknown: dict[str, type] = {"Upstream": Upstream}
    exec("class Unknown(Upstream):\n    def __init__(self): pass", unknown)
    unknown["Unknown"].__module__ = "vllm.model_executor.models.qwen3_vl"
    with caplog.at_level("WARNING"):
        assert compose.drop_in(unknown["Unknown"], __name__) is unknown["Unknown"]
    assert len({record.getMessage() for record in caplog.records}) == 1, [r.getMessage() for r in caplog.records]
    record = caplog.records[0]
    assert "leaves Unknown as it is, it cannot tell what it does" in record.getMessage()
