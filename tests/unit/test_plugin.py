"""The plugin against vLLM's real registry and its real plugin loader."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import Snippet
from vllm_pp_fixes import plugin
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.releases import too_old

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
OURS = "vllm_pp_fixes.models.qwen3_vl"
UPSTREAM = "vllm.model_executor.models.qwen3_vl"
OTHER = f'ModelRegistry.register_model("{ARCHITECTURE}", "other_plugin.model:Model")\n'
LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
WHO = f"""
entry = ModelRegistry.models["{ARCHITECTURE}"]
print("owner:", getattr(entry, "module_name", None) or entry.model_cls.__module__)
"""


def owner(lines: list[str]) -> str:
    return lines[-1].removeprefix("owner: ")


def said(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(r"vllm_pp_fixes |VLLM_PP_FIXES|overwritten", line)]


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    code = """if True:
        import sys, vllm_pp_fixes
        assert not {"torch", "vllm", "transformers", "numpy"} & set(sys.modules)
        assert callable(vllm_pp_fixes.register)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_in_the_package_is_an_attribute_error() -> None:
    import vllm_pp_fixes

    with pytest.raises(AttributeError, match="Qwen4"):
        vllm_pp_fixes.Qwen4  # noqa: B018


def test_entry_point_replaces_upstream_without_a_word_or_an_import(snippet: Snippet) -> None:
    lines = snippet(LOAD + "import vllm_pp_fixes; vllm_pp_fixes.register()\n" + WHO)
    assert owner(lines) == OURS
    assert said(lines) == []
    own_alone = """
import sys
before = set(sys.modules)
from vllm_pp_fixes import register; register()
print(sorted(m for m in set(sys.modules) - before if m.split(".")[0] != "vllm_pp_fixes"))
"""
    assert snippet(own_alone)[-1] == "[]"


def test_what_vllm_remembers_of_a_class_is_of_one_release(snippet: Snippet, tmp_path: Path) -> None:
    """Ours is the same file beside every vLLM; what upstream's class can do (LoRA, say) is not."""
    inspect = f"{LOAD}entry = ModelRegistry.models['{ARCHITECTURE}']; print(entry.inspect_model_cls().supports_pp)\n"
    assert snippet(inspect, VLLM_CACHE_ROOT=str(tmp_path))[-1] == "True"
    (kept,) = (tmp_path / "modelinfos").iterdir()
    assert kept.name.startswith("vllm-0.")
    newer = "vllm.__version__ = '0.99.0'\n" + inspect
    assert snippet(newer, VLLM_CACHE_ROOT=str(tmp_path))[-1] == "True"
    assert len([*(tmp_path / "modelinfos").iterdir()]) == 2


def test_plugin_left_out_of_vllm_plugins(snippet: Snippet) -> None:
    assert owner(snippet(LOAD + WHO, VLLM_PLUGINS="some_other")) == UPSTREAM
    assert owner(snippet(LOAD + WHO, VLLM_PLUGINS="some_other,vllm_pp_fixes")) == OURS


@pytest.mark.parametrize(
    ("disable", "serves", "warnings"),
    [
        ("1", UPSTREAM, 0),
        ("qwen3_vl", UPSTREAM, 0),
        ("0", OURS, 0),
        ("", OURS, 0),
        ("moss_audio", OURS, 0),
        ("qwen3_vl,step3_text", UPSTREAM, 0),
        ("qwen4,qwen3_vl", UPSTREAM, 1),
    ],
)
def test_disable(snippet: Snippet, disable: str, serves: str, warnings: int) -> None:
    lines = snippet(LOAD + WHO, VLLM_PP_FIXES_DISABLE=disable)
    assert owner(lines) == serves
    assert len(said(lines)) == warnings


@pytest.mark.parametrize(("force", "serves", "warnings"), [("", "other_plugin.model", 1), ("1", OURS, 0)])
def test_another_plugin_keeps_what_it_registered_unless_forced(
    snippet: Snippet, force: str, serves: str, warnings: int
) -> None:
    lines = snippet(OTHER + LOAD + WHO, VLLM_PP_FIXES_FORCE=force)
    assert owner(lines) == serves
    assert len(said(lines)) == warnings


def test_another_plugin_that_registered_a_class(snippet: Snippet) -> None:
    """A class, where others register a name."""
    register = (
        f"from {UPSTREAM} import {ARCHITECTURE} as Up\n"
        "Other = type('Other', (Up,), {'__module__': 'other_plugin'})\n"
        f"ModelRegistry.register_model('{ARCHITECTURE}', Other)\n"
    )
    assert owner(snippet(register + LOAD + WHO)) == "other_plugin"


def test_a_worker_does_not_say_it_again(snippet: Snippet) -> None:
    in_child = (
        "import multiprocessing\n"
        "from vllm.plugins import load_general_plugins\n"
        "child = multiprocessing.get_context('fork').Process(target=load_general_plugins)\n"
        "child.start(); child.join(); assert child.exitcode == 0\n"
    )
    assert said(snippet(in_child + "print()", VLLM_PP_FIXES_DISABLE="qwen4")) == []


def test_an_error_leaves_upstream_and_says_one_line(snippet: Snippet) -> None:
    broken = "def broken(*_): raise RuntimeError('registry is broken')\ntype(ModelRegistry).register_model = broken\n"
    lines = snippet(broken + LOAD + WHO)
    assert owner(lines) == UPSTREAM
    (line,) = said(lines)
    assert "registry is broken" in line


def test_what_fails_half_way_is_upstreams_and_nothing_else(snippet: Snippet) -> None:
    """One architecture that cannot be registered: it stays whole, one line names it, all others are ours."""
    broken = (
        "register = type(ModelRegistry).register_model\n"
        "def half(self, architecture, model):\n"
        "    register(self, architecture, model)\n"
        f"    if architecture == '{ARCHITECTURE}': raise RuntimeError('half way')\n"
        "type(ModelRegistry).register_model = half\n"
    )
    other = "print(ModelRegistry.models['MossAudioModel'].module_name)\n"
    lines = snippet(broken + LOAD + other + WHO)
    assert owner(lines) == UPSTREAM
    assert lines[-2] == "vllm_pp_fixes.models.moss_audio"
    (line,) = said(lines)
    assert f"leaves {ARCHITECTURE} to vLLM, registering failed: RuntimeError: half way" in line


def test_an_old_vllm_gets_one_warning_and_nothing_registered(snippet: Snippet) -> None:
    lines = snippet("vllm.__version__ = '0.16.3'\n" + LOAD + WHO)
    assert owner(lines) == UPSTREAM
    (line,) = said(lines)
    assert "0.17.0 or newer, this is 0.16.3" in line


def test_a_release_that_has_the_model_elsewhere_is_left_alone(snippet: Snippet) -> None:
    moved = f'ModelRegistry.register_model("{ARCHITECTURE}", "vllm.models.qwen3_vl:{ARCHITECTURE}")\n'
    lines = snippet(moved + LOAD + WHO)
    assert owner(lines) == "vllm.models.qwen3_vl"
    (line,) = said(lines)
    assert "in this vLLM it is Qwen3VLForConditionalGeneration of vllm.models.qwen3_vl" in line


def test_a_release_without_the_model_gets_nothing(snippet: Snippet) -> None:
    lines = snippet(f"del ModelRegistry.models['{ARCHITECTURE}']\n" + LOAD + "print(len(ModelRegistry.models))")
    assert said(lines) == []


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("0.16.3", True),
        ("0.9.2", True),
        ("0.16.1rc2.dev3+g12", True),
        ("0.17.0", False),
        ("0.34.dev0", False),
        ("0.32.0+cpu", False),
        ("1.0.0", False),
        ("0.1.dev17+g1234", False),
        ("dev", False),
    ],
)
def test_too_old(version: str, old: bool) -> None:
    assert too_old(version) is old


def test_unknown_name_lists_the_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plugin.enabled("llama") == list(MODELS)
    (record,) = caplog.records
    assert all(model in record.getMessage() for model in MODELS)
