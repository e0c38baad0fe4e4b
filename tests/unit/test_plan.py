"""`plan`: what each part weighs, which split is best, what is said of it; headers alone, no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations, pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from tests import plan_table
from tests.checkpoints import BITS, Named, published, write_checkpoint, write_file
from tests.unit.conftest import Snippet
from vllm_pp_fixes.cli import main
from vllm_pp_fixes.planning.headers import of_folder
from vllm_pp_fixes.planning.split import best_split, own_split, worth
from vllm_pp_fixes.planning.weights import Model, weigh

VL8 = "Qwen/Qwen3-VL-8B-Instruct"
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Ask `plan --json`; return what it answers."""

    def ask(folder: Path | str, *options: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["plan", str(folder), *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture
def vl8(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "vl8", *published(VL8))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def llama(*, dtype: str = "BF16", layers: int = 4) -> list[Named]:
    """A text model of four layers, 1000 tokens."""
    tensors: list[Named] = [("model.embed_tokens.weight", "BF16", (1000, 64)), ("model.norm.weight", "BF16", (64,))]
    for i in range(layers):
        tensors += [
            (f"model.layers.{i}.input_layernorm.weight", "BF16", (64,)),
            (f"model.layers.{i}.self_attn.q_proj.weight", dtype, (64, 64)),
            (f"model.layers.{i}.self_attn.rotary_emb.inv_freq", "F32", (8,)),
        ]
    return tensors


# The arithmetic of splits.


def every_split(layers: int, stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield [end - start for start, end in pairwise((0, *cuts, layers))]


@given(st.data())
def test_the_best_split_is_the_best_of_all(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 4))
    weights = data.draw(st.lists(st.integers(0, 20), min_size=stages, max_size=9))
    memory = data.draw(st.lists(st.integers(0, 120), min_size=stages, max_size=stages))
    fixed = data.draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages))

    def score(stage: int, start: int, end: int) -> int:
        room = memory[stage] - fixed[stage] - sum(weights[start:end])
        return room // (3 * (end - start)) if room >= 0 else room

    best = best_split(len(weights), stages, score)
    bar = max(worth(split, score) for split in every_split(len(weights), stages))
    assert worth(best, score) == bar
    equals = [split for split in every_split(len(weights), stages) if worth(split, score) == bar]
    assert sum(n * n for n in best) == min(sum(n * n for n in split) for split in equals)


def test_the_own_split_is_vllms(snippet: Snippet) -> None:
    lines = snippet(
        "from vllm.distributed.utils import get_pp_indices\n"
        "for layers in range(1, 100):\n"
        "    for stages in range(1, min(layers, 16) + 1):\n"
        "        ends = [get_pp_indices(layers, rank, stages) for rank in range(stages)]\n"
        "        print('split', layers, stages, *(end - start for start, end in ends))\n"
    )
    theirs = [[int(word) for word in line.split()[1:]] for line in lines if line.startswith("split ")]
    assert len(theirs) > 1000
    assert [row for row in theirs if own_split(row[0], row[1]) != row[2:]] == []


# What is read.


def test_parts_of_a_text_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLAMA, llama(layers=5))
    weights = weigh(of_folder(folder), Model.read(LLAMA))
    assert weights.layers == [2 * (64 + 64 * 64)] * 4
    assert weights.embedding == 2 * 1024 * 64, "the vocabulary is padded to a multiple of 64"
    assert weights.tied, "the files have no head"
    assert weights.unserved == 4 * 5 * 8 + 2 * (64 + 64 * 64), "rotary frequencies, and a layer for speculation"


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3", "I32"])
def test_floats_are_cast_and_quantised_weights_keep_their_bytes(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path, LLAMA, llama(dtype=dtype))
    held = 2 if dtype == "F32" else BITS[dtype] // 8
    assert weigh(of_folder(folder), Model.read(LLAMA)).layers == [2 * 64 + held * 64 * 64] * 4


def test_two_gpus_a_stage_divide_all_but_norms(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLAMA, llama())
    weights = weigh(of_folder(folder), Model.read(LLAMA, 2), 2)
    assert weights.layers == [2 * 64 + 64 * 64] * 4
    assert weights.embedding == 1024 * 64


@pytest.mark.parametrize(
    ("layers", "embedding", "head", "towers"),
    [
        (
            "language_model.model.layers",
            "language_model.model.embed_tokens",
            "language_model.lm_head",
            "vision_tower.layers",
        ),
        ("model.language_model.layers", "model.language_model.embed_tokens", "lm_head", "model.visual.blocks"),
        ("language_model.model.layers", "language_model.model.tok_embeddings", "language_model.output", "mlp1"),
        ("model.layers", "model.embed_tokens", "lm_head", "model.vision_embed_tokens.layers"),
        ("transformer.h", "transformer.wte", "lm_head", "transformer.visual.resblocks"),
    ],
)
def test_names_of_other_families(tmp_path: Path, layers: str, embedding: str, head: str, towers: str) -> None:
    names = [f"{layers}.{i}.mlp.experts.{k}.up_proj" for i in range(4) for k in range(2)]
    tensors: list[Named] = [(f"{name}.weight", "BF16", (8, 8)) for name in names]
    tensors += [(f"{towers}.{i}.weight", "BF16", (1024, 8)) for i in range(6)]
    tensors += [(f"{name}.weight", "BF16", (1024, 8)) for name in (embedding, head)]
    found = weigh(of_folder(write_checkpoint(tmp_path, LLAMA, tensors)), Model.read(LLAMA))
    assert found.layers == [2 * 2 * 64] * 4
    assert (found.embedding, found.head, found.other, found.unserved) == (16384, 16384, 6 * 16384, 0)


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    tensors = llama()
    write_file(tmp_path / "a.safetensors", tensors[:6])
    write_file(tmp_path / "b.safetensors", tensors[6:])
    write_file(tmp_path / "consolidated.safetensors", tensors)
    assert len(of_folder(tmp_path)) == len(tensors)
    index = {name: "a.safetensors" for name, *_ in tensors[:5]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert {tensor.name for tensor in of_folder(tmp_path)} == {*index}


# What is said.


def test_plan_imports_nothing_heavy(vl8: Path) -> None:
    code = (
        f"import sys; from vllm_pp_fixes.cli import main; assert main(['plan', {str(vl8)!r}, '--stages', '2']) == 0; "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert "needs" in done.stdout


def test_the_best_split_of_unequal_gpus(vl8: Path, plan: Plan) -> None:
    answer = plan(vl8, "--memory", "16GiB,32GiB")
    best, own = answer["best"], answer["own"]
    assert answer["chosen"] == best
    assert own["split"] == [18, 18]
    assert best["split"][0] < 18
    assert best["tokens"] > 2 * own["tokens"]
    first, last = best["stages"]
    assert set(first["parts"]) == {"layers", "towers", "embedding", "buffers"}
    assert set(last["parts"]) == {"layers", "head", "buffers"}
    for stage in best["stages"]:
        assert sum(stage["parts"].values()) + stage["spared"] + stage["room"] == stage["memory"]
        assert stage["tokens"] == 16 * stage["blocks"]
        assert stage["blocks"] == stage["room"] // (16 * 2 * 8 * 128 * 2 * (stage["end"] - stage["start"]))
    assert sum(sum(stage["parts"].values()) for stage in best["stages"]) > 2 * 8_767_123_696, "all of its parameters"
    assert answer["command"].startswith(
        f"VLLM_PP_LAYER_PARTITION={best['split'][0]},{best['split'][1]} vllm serve {vl8} "
    )
    assert f"--pipeline-parallel-size 2 --max-model-len {best['tokens']}" in answer["command"]


def test_what_is_proposed_for_no_memory_is_what_then_fits(vl8: Path, plan: Plan) -> None:
    asked = plan(vl8, "--stages", "3", "--max-model-len", "32768")["best"]
    told = plan(vl8, "--memory", f"{asked['needs'] / (1 << 20) + 1:.0f}MiB", "--stages", "3")
    assert told["best"]["tokens"] >= 32768
    less = plan(vl8, "--memory", f"{asked['needs'] / (1 << 20) - 64:.0f}MiB", "--stages", "3")
    assert less["best"]["tokens"] < 32768


def test_towers_stand_where_the_settings_say(vl8: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def towers(answer: dict[str, Any]) -> list[bool]:
        return ["towers" in stage["parts"] for stage in answer["own"]["stages"]]

    assert towers(plan(vl8, "--stages", "2")) == [True, False]
    assert towers(plan(vl8, "--stages", "2", "--keep-towers")) == [True, True]
    monkeypatch.setenv("VLLM_PP_FIXES_KEEP_TOWERS", "1")
    assert towers(plan(vl8, "--stages", "2")) == [True, True]
    monkeypatch.delenv("VLLM_PP_FIXES_KEEP_TOWERS")
    monkeypatch.setenv("VLLM_PP_FIXES_DISABLE", "1")
    answer = plan(vl8, "--stages", "2")
    assert towers(answer) == [True, True]
    assert any("the plugin is turned off by VLLM_PP_FIXES_DISABLE=1" in note for note in answer["notes"])
    assert "not cured" in answer["upstream"][-1]


def test_a_given_split_is_judged_and_upstream_too(vl8: Path, plan: Plan) -> None:
    answer = plan(vl8, "--memory", "24GiB,32GiB", "--split", "1,35", "--kv-cache-dtype", "fp8")
    assert answer["chosen"]["split"] == [1, 35]
    assert answer["chosen"]["tokens"] < answer["best"]["tokens"]
    here, own, always, cured = answer["upstream"]
    assert here.startswith("this split (1,35): DeepStack levels cross stages ([1, 2] after stage 1): vLLM ")
    assert "split-refused (refuses)" in here
    assert own == "vLLM's own split (18,18): no DeepStack level crosses a stage"
    assert "pruned-positions (wrong answers)" in always
    assert cured == "the plugin cures all of these here"
    half = plan(vl8, "--memory", "24GiB,32GiB", "--split", "1,35")["chosen"]["stages"][0]
    assert abs(answer["chosen"]["stages"][0]["blocks"] - 2 * half["blocks"]) <= 1


def test_where_there_is_no_vllm(vl8: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    here = plan(vl8, "--memory", "24GiB,32GiB", "--split", "1,35")
    monkeypatch.setitem(sys.modules, "vllm", None)
    there = plan(vl8, "--memory", "24GiB,32GiB", "--split", "1,35")
    assert there["chosen"] == here["chosen"]
    assert "vLLM, by the records and by its release, alone has split-refused (refuses)" in there["upstream"][0]


def test_a_model_without_a_drop_in(tmp_path: Path, plan: Plan) -> None:
    folder = write_checkpoint(tmp_path, {**LLAMA, "layer_types": ["sliding_attention"] * 4}, llama())
    answer = plan(folder, "--memory", "1GiB", "--stages", "2", "--reserve", "100MiB")
    assert answer["upstream"] == []
    assert any("sliding attention" in note for note in answer["notes"])
    first, last = answer["own"]["stages"]
    assert first["parts"]["embedding"] == last["parts"]["head"], "tied: the last stage holds it again"


def test_the_picture(vl8: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(vl8), "--memory", "16GiB,32GiB"]) == 0
    text = capsys.readouterr().out
    assert "\nstage 1: 10 layers, 0 to 9, of 16.00 GiB\n" in text
    for part in ("layers", "towers", "embedding", "head", "buffers", "left alone", "KV cache"):
        assert f"\n  {part} " in text
    assert "█" in text
    assert "tokens more than vLLM's own\n" in text
    assert "\nVLLM_PP_LAYER_PARTITION=10,26 vllm serve " in text
    assert "\nnot counted: activations, CUDA graphs" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "say what there is: --memory 16GiB,32GiB, or --stages N"),
        (("--memory", "16"), "--memory: '16' is no size: write a number and GiB"),
        (("--memory", "16GiB,8GiB", "--stages", "3"), "--memory names 2 stages, --stages 3: make them agree"),
        (
            ("--memory", "8GiB,8GiB"),
            "stage 2 (layers 16 to 35) lacks 3.08 GiB beside its 8.00 GiB at the best split 16,20: more memory",
        ),
        (("--stages", "37"), "37 stages are more than the model's 36 layers: use at most 36"),
        (("--stages", "2", "--split", "1,2"), "adds up to 3 layers, the model has 36"),
        (("--stages", "2", "--split", "1,1,34"), "split 1,1,34 has 3 stages, not 2: make them agree"),
        (("--stages", "2", "--reserve", "much"), "--reserve: 'much' is no size"),
    ],
)
def test_bad_input_is_one_line(
    vl8: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert main(["plan", str(vl8), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_what_has_no_headers_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for content, says in (
        (None, "holds no whole set of safetensors files"),
        (b"nothing", "is no whole safetensors file"),
    ):
        if content:
            (tmp_path / "model.safetensors").write_bytes(content)
        assert main(["plan", str(tmp_path), "--stages", "2"]) == 2
        assert says in (err := capsys.readouterr().err)
        assert err.count("\n") == 1
    write_file(tmp_path / "model.safetensors", llama(layers=3))
    assert main(["plan", str(tmp_path), "--stages", "2"]) == 2
    assert "no tensors are named by the numbers of 4 layers" in capsys.readouterr().err


def test_a_name_whose_headers_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--who--what"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    for name, says in (("who/what", "no headers of who/what: not in the local"), ("who/else", "who/else is no folder")):
        assert main(["plan", name, "--stages", "2"]) == 2
        assert says in (err := capsys.readouterr().err)
        assert err.count("\n") == 1
    write_checkpoint(repository / "snapshots" / "abc", LLAMA, llama())
    assert main(["plan", "who/what", "--stages", "2"]) == 0


def test_without_rich(vl8: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["plan", str(vl8), "--stages", "2"]) == 2
    assert "pip install rich, or ask for --json" in capsys.readouterr().err


class Hub(SimpleHTTPRequestHandler):
    """As much of a hub as headers need: files by name, by range, with what its client asks of an answer's head."""

    asked: list[str]

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.replace("/resolve/main/", "/"))

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        super().end_headers()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            files = [{"type": "file", "path": path.name, "size": 1} for path in Path(self.directory).rglob("*.*")]
            return self._send(json.dumps(files if "/tree/" in self.path else {"siblings": files}).encode())
        if "Range" not in self.headers:
            return super().do_GET()
        start, end = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        self.asked.append(self.headers["Range"])
        with Path(self.translate_path(self.path)).open("rb") as file:
            file.seek(start)
            return self._send(file.read(end - start + 1), 206)

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_headers_of_a_name_are_fetched_by_range(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hub" / "who" / "what", *published(VL8))
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(tmp_path / "hub")))
    Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    try:
        command = [sys.executable, "-m", "vllm_pp_fixes.cli", "plan", "who/what", "--stages", "2", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"] == 36
    assert Hub.asked, "no header was asked for by range"
    read = sum(path.stat().st_size for path in (tmp_path / "home").rglob("*") if path.is_file())
    assert read < 100_000, "weights were fetched"


def test_the_page_says_what_plan_answers() -> None:
    page = plan_table.PAGE.read_text()
    assert plan_table.written(page) == page
