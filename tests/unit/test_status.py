"""`status` and `check`: what is installed, without an import where none is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.unit.conftest import Snippet
from tests.unit.test_probes import INSTALLED, TAKEN, VL, Edit, edited  # noqa: F401
from vllm_pp_fixes.cli import check, main
from vllm_pp_fixes.cli.check import takes_draft
from vllm_pp_fixes.cli.configuration import Configuration, Draft
from vllm_pp_fixes.cli.installed import findings, tree
from vllm_pp_fixes.faults import FAULTS
from vllm_pp_fixes.version import identity

KEEP = "VLLM_PP_FIXES_KEEP_TOWERS"
OTHER = """
[vllm.general_plugins]
other = other_plugin:register
"""
REGISTER = """
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("Qwen3VLForConditionalGeneration", "other_plugin:Model")
"""


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_status_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_pp_fixes.cli import main; assert main(['status']) == 0; "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"vllm_pp_fixes {identity()}, vLLM ")
    assert "\nthe plugin is loaded by vLLM\n" in done.stdout
    assert "\nsplit-refused (qwen3_vl, qwen3_vl_moe, colqwen3, cosmos3): cured: the constructor no" in done.stdout
    assert re.search(r"\n\d more faults are not in this vLLM \(--all names them\)\n$", done.stdout)
    assert "start-layer" not in done.stdout
    assert done.stderr == ""


def test_status_names_all_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--all"]) == 0
    text = printed(capsys)
    assert all(fault.id in text for fault in FAULTS)
    assert "start-layer" in text.splitlines()[-1]


def test_status_names_the_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP, "1")
    assert main(["status"]) == 0
    assert f"\n{KEEP}=1 is set: towers stay on every stage\n" in printed(capsys)
    assert main(["status", "--json"]) == 0
    assert json.loads(printed(capsys))["settings"] == {KEEP: "towers stay on every stage"}


def test_status_into_a_pipe_that_is_closed() -> None:
    """`status | head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vllm_pp_fixes.cli", "status"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_status_calls_nothing_cured_of_a_model_that_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_FIXES_DISABLE", "qwen3_vl")
    assert main(["status", "--json"]) == 0
    for fault in json.loads(printed(capsys))["faults"]:
        assert fault["cured"] == [model for model in fault["affected"] if model != "qwen3_vl"]
    assert main(["status"]) == 0
    text = printed(capsys)
    assert "the plugin is loaded by vLLM, but off for qwen3_vl\n" in text
    assert "split-refused (qwen3_vl_moe, colqwen3, cosmos3): cured: " in text
    assert "split-refused (qwen3_vl): not cured now; the plugin would: " in text


def test_status_as_json_names_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    report = json.loads(printed(capsys))
    assert [fault["id"] for fault in report["faults"]] == [fault.id for fault in FAULTS]
    assert not any(fault["differs"] or fault["cannot_tell"] for fault in report["faults"])
    refused = next(fault for fault in report["faults"] if fault["id"] == "split-refused")
    assert "qwen3_vl" in refused["affected"]
    assert refused["cured"] == refused["affected"]
    assert {"symptom", "effect", "cure", "upstream", "unnecessary_from"} <= set(refused)


def test_status_of_a_newer_tree(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    tree = edited(VL, (TAKEN, "self.make_empty_intermediate_tensors = self.declare_levels"), version="0.40.0")
    assert main(["status", "--tree", str(tree.root)]) == 0
    text = printed(capsys)
    assert "vLLM 0.40.0 in" in text
    assert "not tested with this release: tested are" in text
    assert "the catalogue says otherwise" not in text


def test_status_where_catalogue_and_code_differ(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    tree = edited(VL, (TAKEN, "pass"), version="0.21.0")
    assert main(["status", "--tree", str(tree.root)]) == 0
    text = printed(capsys)
    assert "split-refused: cannot tell of qwen3_vl, which stays upstream's: " in text
    assert "\nstart-layer: the catalogue says otherwise: affected are 0.17.0 to 0.21.0\n" in text


@pytest.mark.parametrize("env", [{"VLLM_PP_FIXES_DISABLE": "1"}, {"VLLM_PLUGINS": "lora"}])
def test_status_and_check_where_the_plugin_is_off(
    env: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, value), *_ = env.items()
    monkeypatch.setenv(name, value)
    assert main(["status"]) == 0
    assert "not cured now; the plugin would" in printed(capsys)
    assert main(["check"]) == 1
    assert f"{name}={value}" in printed(capsys)


def test_no_vllm_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--tree", str(tmp_path)]) == 2
    assert "holds no vLLM: name the folder of its package" in capsys.readouterr().err


def test_status_says_who_else_holds_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "other_plugin.py").write_text(REGISTER)
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text(OTHER)
    done = subprocess.run(
        [sys.executable, "-c", "from vllm_pp_fixes.cli import main; main(['status'])"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "importing vLLM and its plugins, to see what other registered" in done.stderr
    assert "Qwen3VLForConditionalGeneration is held by other_plugin" in done.stdout


def config(folder: Path, **more: object) -> str:
    text = {"num_hidden_layers": 6}
    vision = {"deepstack_visual_indexes": [0, 1, 2]}
    content = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps({**content, **more}))
    return str(folder)


def test_check_a_split_that_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config(tmp_path), "--split", "1,5"]) == 0
    text = printed(capsys)
    served = (
        "Qwen3VLForConditionalGeneration is served by vllm_pp_fixes.models.qwen3_vl.Qwen3VLForConditionalGeneration"
    )
    assert re.search(rf"{re.escape(served)}, which cures compile-cache-shared, .*split-refused, ", text)
    assert "the split 1+5 needs it: DeepStack levels cross stages ([1, 2] after stage 1)" in text


def draft(folder: Path, **more: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Eagle3Qwen3vlForCausalLM"], **more}))
    return str(folder)


def test_check_of_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states by the layers that they enter, as EAGLE-3 says them, and by those that they leave, as DFlash does."""
    eagle = draft(tmp_path / "eagle", eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    flash = draft(tmp_path / "flash", architectures=["DFlashDraftModel"], dflash_config={"target_layer_ids": [0, 3]})
    chosen = draft(tmp_path / "chosen")
    other = draft(tmp_path / "other", architectures=["LlamaForCausalLM"])
    assert main(["check", config(tmp_path), "--split", "1,5", "--speculative", eagle]) == 0
    assert "takes the draft under runner V2, VLLM_USE_V2_MODEL_RUNNER=1: [1] cross stages" in printed(capsys)

    # What else `check` says of one, without asking vLLM each time which class serves.
    source, ours = tree(), {"cured": ["aux-states-lost"]}
    found = findings(source, "unknown")

    def takes(folder: str, split: list[int], answer: dict[str, Any]) -> bool:
        return takes_draft(Draft.read(folder), Configuration.read(str(tmp_path)), split, source, found, answer)

    for folder, split, answer, right, says in (
        (eagle, [3, 3], ours, True, "[1, 3] cross stages"),
        (flash, [3, 3], ours, True, "[1] cross stages"),
        (eagle, [6], {}, True, "takes the draft: none of its states crosses a stage"),
        (chosen, [3, 3], {}, False, "reads the auxiliary states [2, 3], which upstream chooses by itself"),
        (chosen, [3, 3], {}, False, "does not take the draft: upstream's class loses its states, or refuses it"),
        (other, [3, 3], {}, True, "LlamaForCausalLM reads no auxiliary states"),
    ):
        assert takes(folder, split, answer) is right
        assert says in printed(capsys)
    monkeypatch.setattr(check, "sends_states", lambda _: False)
    assert not takes(eagle, [3, 3], {})
    assert "[1, 3] come from earlier stages, and this vLLM sends none: use 0.30 or later" in printed(capsys)
    assert takes(eagle, [1, 5], {}) is False
    config(tmp_path, architectures=["MossAudioModel"])
    assert not takes(eagle, [3, 3], ours)
    assert "MossAudioModel gives no auxiliary states: serve it without this draft" in printed(capsys)


def test_check_with_the_plugin_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_FIXES_DISABLE", "1")
    assert main(["check", config(tmp_path), "-pp", "2"]) == 0
    text = printed(capsys)
    assert "is served by vllm.model_executor.models.qwen3_vl.Qwen3VLForConditionalGeneration\n" in text
    assert "the split 3+3 does not need it" in text
    assert main(["check", config(tmp_path), "-pp", "3"]) == 1
    assert "the split 2+2+2 needs it: DeepStack levels cross stages ([2] after stage 1)" in printed(capsys)


def test_a_name_that_is_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--Qwen--Tiny-VL"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    config(repository / "snapshots" / "abc")
    assert Configuration.read("Qwen/Tiny-VL") == Configuration("Qwen3VLForConditionalGeneration", "qwen3_vl", 6, 3)


def test_check_of_a_name_that_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before vLLM is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["check", "Qwen/Tiny-VL"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Qwen/Tiny-VL is no folder, nor in the local Hugging Face cache, and cannot be fetched (" in err
    assert err.endswith("): name the folder of a checkpoint\n")


def test_check_says_what_serves_step3_where_it_is_cured(snippet: Snippet) -> None:
    """Up to 0.22.1; here its probe is made to say so of this release."""
    lines = snippet(
        "from dataclasses import replace\n"
        "from vllm_pp_fixes import faults\n"
        "faults.FAULTS = tuple(\n"
        "    replace(f, probe=lambda *_: True) if f.models == ('step3_text',) else f for f in faults.FAULTS\n"
        ")\n"
        "from vllm_pp_fixes.cli.installed import answer\n"
        "said = answer({'architectures': ['Step3TextForCausalLM'], 'load': 'Step3TextForCausalLM'})\n"
        "print(said['class'], said['cured'])\n"
    )
    assert lines[-1] == "vllm_pp_fixes.models.step3_text.Step3TextForCausalLM ['step3-residual']"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--split", "1,4"], "--split: split '1,4' adds up to 5 layers, the model has 6"),
        (["--split", "1,5", "-pp", "3"], "has 2 stages, --pipeline-parallel-size is 3: make them agree"),
    ],
)
def test_check_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["check", config(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert main(["check", config(tmp_path, architectures=["Llama"])]) == 2
    assert "names Llama; known are Qwen3VL" in capsys.readouterr().err
    assert main(["check", "-pp", "2"]) == 2
    assert "a split and a draft need a model" in capsys.readouterr().err
