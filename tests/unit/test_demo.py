"""Bad input of `demo` gets one clear line, before any engine starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import name_distribution
from vllm_pp_fixes.cli import main
from vllm_pp_fixes.cli.demo import example_called, first_error, read_model, verdict
from vllm_pp_fixes.demo.engine import distance
from vllm_pp_fixes.demo.forkserver import Outcome

TEXT = {"text_config": {"num_hidden_layers": 8}}


def checkpoint(folder: Path, architecture: str) -> str:
    config = {"architectures": [architecture], **TEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("split", "says"),
    [("1,4", "adds up to 5 layers, the model has 6"), ("0,6", "a stage without layers"), ("one,5", "no list of layer")],
)
def test_bad_split(split: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--split", split]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


def test_split_is_held_against_the_users_own_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint(tmp_path, "Qwen3VLForConditionalGeneration")
    assert main(["demo", "--model", model, "--split", "1,5"]) == 2
    assert "the model has 8" in capsys.readouterr().err


def test_unknown_architecture_lists_the_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", checkpoint(tmp_path, "LlamaForCausalLM")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "names LlamaForCausalLM; known are Qwen3VLForConditionalGeneration, Qwen3VLMoe" in err


def test_model_type_by_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    assert example_called("qwen3_omni") == "qwen3_omni_moe_thinker"
    assert example_called("qwen3_vl") == "qwen3_vl"
    with pytest.raises(SystemExit):
        main(["demo", "--model-type", "qwen3"])
    assert "'qwen3' is not known; known are qwen3_vl, qwen3_vl_moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": TEXT}, "qwen3_omni_moe_thinker"),
        ({"architectures": ["MossAudioModel"], "language_config": TEXT["text_config"]}, "moss_audio"),
        ({"architectures": ["Step3TextForCausalLM"], **TEXT["text_config"]}, "step3_text"),
    ],
)
def test_layers_of_the_users_own_checkpoint(tmp_path: Path, config: dict, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(str(tmp_path)) == (model_type, 8)


def test_no_checkpoint_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert "does not exist: name a checkpoint by its folder, or as" in capsys.readouterr().err


def demo_with(folder: Path, vllm: str | None) -> subprocess.CompletedProcess[str]:
    """`demo` where `import vllm` runs the text `vllm` (the real one if empty), or where there is none."""
    hide = "import sys\nimport vllm_pp_fixes.cli as c\n"
    if vllm is None:
        hide += "from vllm_pp_fixes.cli import demo\ndemo.find_spec = lambda name: None\n"
    elif vllm:
        (folder / "vllm").mkdir()
        (folder / "vllm" / "__init__.py").write_text(vllm)
    return subprocess.run(
        [sys.executable, "-c", hide + "sys.exit(c.main(['demo']))"],
        env={"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_no_vllm(tmp_path: Path) -> None:
    done = demo_with(tmp_path, None)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "vLLM is not installed: `uv run vllm-pp-fixes demo`" in done.stderr


def test_a_vllm_that_cannot_run_here(tmp_path: Path) -> None:
    done = demo_with(tmp_path, "raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vllm-pp-fixes:")]
    assert "libcudart.so.13" in line
    assert "uv run vllm-pp-fixes demo" in line


def test_a_build_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    """What a CUDA build of vLLM is on a machine without a GPU."""
    name_distribution(tmp_path, "0.32.0")
    done = demo_with(tmp_path, "")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vllm-pp-fixes:")]
    assert "finds no device that it can run on here: `uv run vllm-pp-fixes demo`" in line


def result(*prompts: tuple[list[int], list[float]]) -> dict:
    return {"tokens": [[tokens for tokens, _ in prompts]], "logprobs": [[logs for _, logs in prompts]]}


def test_distance() -> None:
    one = result(([1, 2, 3], [-1.0, -1.0, -1.0]))
    assert distance(one, one) == 0
    assert distance(one, result(([1, 2, 3], [-1.0, -1.5, -1.0]))) == 0.5
    # what follows a differing token answers another text
    assert distance(one, result(([1, 4, 3], [-1.0, -1.25, -9.0]))) == 0.25
    assert distance(one, result(([1, 4, 3], [-1.0, -1.0, -1.0]))) == 1e-3
    assert distance(one, result(([1, 2, 3], [-1.0, float("nan"), -1.0]))) == float("inf")


def testverdict() -> None:
    reference = Outcome(result(([1], [-1.0])), "")
    assert verdict(Outcome(result(([1], [-1.0])), ""), reference, 1e-4).startswith("same")
    assert verdict(Outcome(result(([2], [-2.5])), ""), reference, 1e-4).startswith(
        "wrong (log-probabilities differ by up to 2"
    )
    near = Outcome(result(([2], [-1.0])), "")
    assert verdict(near, reference, 2e-2).startswith("wrong"), "another token is another answer, however near"
    assert verdict(Outcome(None, "ERROR AssertionError: start_layer\nRuntimeError: later"), reference, 1e-4) == (
        "refused: AssertionError: start_layer"
    )
    assert first_error("all fine") == "no exception in the log"
