"""`vllm-pp-fixes plan`: before a start, which split of the layers leaves the most room for context, and how much."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..fault import Fault
from ..faults import FAULTS
from ..planning import headers
from ..planning.split import own_split
from ..planning.stages import Held, Pipeline
from ..planning.weights import FLOATS, Model, weigh
from ..registry import ARCHITECTURES
from ..runtime.stages import parse_split, stages
from . import CommandError
from .configuration import read
from .installed import findings, left, plugin_state, tree, version_of

NAME = "plan"
HELP = "say, before a start, which split of a model's layers leaves the most room for context on your GPUs"
KEEP = "VLLM_PP_FIXES_KEEP_TOWERS"
KV_CACHE = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6}
NOT_COUNTED = "activations, CUDA graphs, CUDA's own memory, LoRA, quantisation at load (--quantization), draft models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("model", metavar="MODEL", help="the checkpoint to be served, as `vllm serve` takes it")
    parser.add_argument("--memory", metavar="16GiB,32GiB", help="of the GPUs of each stage, as nvidia-smi prints it")
    parser.add_argument(
        "--stages", "-pp", type=_positive, metavar="N", help="how many; without --memory: what they need"
    )
    parser.add_argument("--split", metavar="1,35", help="judge this one: layers a stage")
    parser.add_argument("--tp", type=_positive, default=1, metavar="N", help="GPUs a stage, alike (default: 1)")
    parser.add_argument("--max-model-len", type=_positive, metavar="N", help="tokens (default: the model's own)")
    parser.add_argument(
        "--max-num-batched-tokens", type=_positive, metavar="N", help="tokens a step (default: as `vllm serve`)"
    )
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE, default="auto")
    parser.add_argument("--dtype", choices=["auto", *FLOATS], default="auto")
    parser.add_argument("--block-size", type=_positive, default=16, metavar="N", help="tokens a block (default: 16)")
    parser.add_argument("--gpu-memory-utilization", type=_fraction, default=0.92, metavar="X", help="(default: 0.92)")
    parser.add_argument(
        "--reserve", default="2GiB", metavar="2GiB", help=f"left on each GPU for what is not counted: {NOT_COUNTED}"
    )
    parser.add_argument("--keep-towers", action="store_true", help="count vision and audio towers on every stage")
    parser.add_argument("--json", action="store_true", help="print it for machines")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises `CommandError`: no headers, what does not fit, options that do not agree."""
    memory = _memory(arguments)
    path, config = read(arguments.model)
    architecture = (config.get("architectures") or ["no architecture"])[0]
    served, state = plugin_state()
    module = ARCHITECTURES.get(architecture, "")
    ours = module in served and not (find_spec("vllm") and module in left(tree()))
    count = len(memory) or arguments.stages
    try:
        model = Model.read(config, arguments.tp, arguments.dtype)
        pipeline = Pipeline(
            model,
            weigh(_tensors(arguments.model, path.parent), model, arguments.tp),
            count,
            memory,
            arguments.max_model_len or model.positions,
            ours,
            ours and not arguments.keep_towers and os.environ.get(KEEP) != "1",
            arguments.max_num_batched_tokens or _batched_tokens(memory),
            KV_CACHE[arguments.kv_cache_dtype] or model.itemsize,
            arguments.block_size,
            _size(arguments.reserve, "--reserve"),
            arguments.gpu_memory_utilization,
        )
        best = pipeline.best()
        split = parse_split(arguments.split, model.layers) if arguments.split else best
    except ValueError as error:
        raise CommandError(str(error)) from None
    if len(split) != count:
        raise CommandError(f"split {arguments.split} has {len(split)} stages, not {count}: make them agree")
    chosen = pipeline.over(split)
    if memory and min(held.blocks for held in chosen) == 0:
        raise CommandError(_lack(chosen, pipeline, "" if arguments.split else "the best "))
    own = own_split(model.layers, count)
    report = {
        "model": arguments.model,
        "architecture": architecture,
        "layers": model.layers,
        "dtype": model.dtype,
        "tp": arguments.tp,
        "unserved": pipeline.weights.unserved,
        "chosen": _judged(split, chosen),
        "best": _judged(best, pipeline.over(best)),
        "own": _judged(own, pipeline.over(own)),
        "command": _command(arguments, split, chosen, model),
        "upstream": _upstream(module, model.levels, split, own, ours, state),
        "notes": _notes(pipeline, arguments, module, ours, state),
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _draw(report, chosen, pipeline, bool(arguments.split))
    return 0


def _lack(chosen: list[Held], pipeline: Pipeline, which: str) -> str:
    """Say which stage lacks the most, counting one block of keys and values."""
    lacks = [pipeline.block_bytes * (held.end - held.start) - held.room for held in chosen]
    number = lacks.index(max(lacks))
    held, split = chosen[number], [held.end - held.start for held in chosen]
    return (
        f"stage {number + 1} (layers {held.start} to {held.end - 1}) lacks {_gib(lacks[number])} beside its "
        f"{_gib(held.memory)} at {which}split {_shown(split)}: more memory or stages, a smaller --reserve, or a "
        "quantised checkpoint"
    )


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _size(text: str, option: str) -> int:
    """Return the bytes of a size such as 16GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)", text.strip())
    if not match:
        raise CommandError(f"{option}: {text!r} is no size: write a number and GiB, MiB, GB or MB, as in 16GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _memory(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the bytes of a GPU of each stage; none where only the number of stages is said."""
    count = arguments.stages
    if not arguments.memory:
        if not count:
            raise CommandError("say what there is: --memory 16GiB,32GiB, or --stages N to hear what is needed")
        return ()
    sizes = tuple(_size(part, "--memory") for part in arguments.memory.split(","))
    if len(sizes) == 1 and count:
        sizes *= count
    if count and len(sizes) != count:
        raise CommandError(f"--memory names {len(sizes)} stages, --stages {count}: make them agree")
    return sizes


def _tensors(name: str, folder: Path) -> list[headers.Tensor]:
    """Return the tensors beside a `config.json`; of a name whose files are not here, from the hub."""
    try:
        if tensors := headers.of_folder(folder):
            return tensors
        if Path(name).expanduser().exists():
            raise CommandError(f"{folder} holds no whole set of safetensors files: plan reads their headers")
        return headers.of_hub(name)
    except ImportError as error:
        raise CommandError(f"plan reads headers with {error.name}: pip install {error.name}") from None
    except (CommandError, ValueError):
        raise
    except Exception as error:
        # The library's errors differ from release to release.
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CommandError(
            f"no headers of {name}: not in the local Hugging Face cache, and cannot be fetched ({why}): name a folder"
        ) from None


def _batched_tokens(memory: tuple[int, ...]) -> int:
    """Return the tokens a step that `vllm serve` takes by the memory of the first GPU."""
    first = memory[0] if memory else 0
    return 16384 if first >= 160 << 30 else 8192 if first >= 70 << 30 else 2048


def _judged(split: list[int], held: list[Held]) -> dict[str, Any]:
    """Return a split for machines: bytes and tokens."""
    return {
        "split": split,
        "tokens": min(stage.tokens for stage in held),
        "needs": max(stage.memory for stage in held),
        "lacks": max(max(0, -stage.room) for stage in held),
        "stages": [{**asdict(stage), "room": stage.room} for stage in held],
    }


def _command(arguments: argparse.Namespace, split: list[int], held: list[Held], model: Model) -> str:
    """Return what to type, with the options that the plan was made for."""
    tokens = min(stage.tokens for stage in held)
    context = arguments.max_model_len or (tokens if tokens < model.positions else None)
    options = [
        ("--pipeline-parallel-size", len(split)),
        ("--tensor-parallel-size", arguments.tp if arguments.tp > 1 else None),
        ("--max-model-len", context),
        ("--max-num-batched-tokens", arguments.max_num_batched_tokens),
        ("--kv-cache-dtype", arguments.kv_cache_dtype if arguments.kv_cache_dtype != "auto" else None),
        ("--dtype", arguments.dtype if arguments.dtype != "auto" else None),
        (
            "--gpu-memory-utilization",
            arguments.gpu_memory_utilization if arguments.gpu_memory_utilization != 0.92 else None,
        ),
    ]
    said = [f"{name} {value}" for name, value in options if value is not None]
    return " ".join([f"VLLM_PP_LAYER_PARTITION={_shown(split)} vllm serve", shlex.quote(arguments.model), *said])


def _upstream(module: str, levels: int, split: list[int], own: list[int], ours: bool, state: str) -> list[str]:
    """Say what upstream's class does at the split: read off the installed vLLM, or from the records."""
    if not module:
        return []
    if find_spec("vllm"):
        version = version_of(source := tree())
        bad = [f.fault for f in findings(source, version) if module in f.affected and f.fault.effect != "wastes"]
        where = f"vLLM {version}"
    else:
        bad = [fault for fault in FAULTS if module in fault.models and fault.effect != "wastes"]
        where = "vLLM, by the records and by its release,"
    said = []
    at_crossing = [fault for fault in bad if fault.crossing]
    for name, each in (("this split", split), *([("vLLM's own split", own)] if own != split else [])):
        sent = [f"{[*s.forwarded]} after stage {i}" for i, s in enumerate(stages(each, levels), 1) if s.forwarded]
        met = f": {where} alone has {_named(at_crossing)}" if at_crossing and sent else ""
        crosses = f"DeepStack levels cross stages ({'; '.join(sent)})" if sent else "no DeepStack level crosses a stage"
        said.append(f"{name} ({_shown(each)}): {crosses}{met}")
    if rest := [fault for fault in bad if not fault.crossing]:
        said.append(f"at any split, {where} alone has {_named(rest)}, some of them with some options only")
    if bad:
        said.append("the plugin cures all of these here" if ours else f"they are not cured: the plugin {state}")
    return said


def _named(faults: list[Fault]) -> str:
    return ", ".join(f"{fault.id} ({fault.effect})" for fault in faults)


def _notes(pipeline: Pipeline, arguments: argparse.Namespace, module: str, ours: bool, state: str) -> list[str]:
    """Return what is to be known of the figures, a line each."""
    model, notes = pipeline.model, []
    notes.append(f"not counted: {NOT_COUNTED}; {_gib(pipeline.reserve)} a GPU are left for it (--reserve)")
    if pipeline.model.multimodal and not pipeline.towers_first:
        why = "asked for" if ours else f"the plugin {state}" if module else "no drop-in serves this model"
        notes.append(f"towers stand on every stage: {why}")
    if model.other_layers:
        kinds = ", ".join(kind.replace("_", " ") for kind in model.other_layers)
        known = "at least so many" if "linear" not in kinds and "mamba" not in kinds else "not known"
        notes.append(f"layers of another kind ({kinds}) are counted as full attention: the tokens are {known}")
    if pipeline.weights.unserved:
        notes.append(f"{_gib(pipeline.weights.unserved)} of the files are not loaded (talker, vocoder, extra layers)")
    if pipeline.memory and (tokens := min(h.tokens for h in pipeline.over(pipeline.best()))) < pipeline.context:
        notes.append(f"{pipeline.context:,} tokens of one request do not fit: {tokens:,} are the most at any split")
    return notes


def _shown(split: list[int]) -> str:
    return ",".join(map(str, split))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 10 << 20 else f"{size / (1 << 20):.2f} MiB"


def _draw(report: dict[str, Any], chosen: list[Held], pipeline: Pipeline, given: bool) -> None:
    """Draw the stages of the chosen split, and the splits beside each other."""
    try:
        from rich.bar import Bar
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise CommandError("the picture is drawn by rich: pip install rich, or ask for --json") from None
    console = Console(highlight=False, markup=False, emoji=False)
    scale = max(stage.memory for stage in chosen)
    gpus = f", {report['tp']} GPUs a stage" if report["tp"] > 1 else ""
    console.print(
        f"{report['model']}: {report['architecture']}, {report['layers']} layers, {report['dtype']}{gpus}",
        soft_wrap=True,
    )
    for number, stage in enumerate(chosen, 1):
        table = Table.grid(padding=(0, 1))
        for justify in ("left", "right", "left", "left"):
            table.add_column(justify=justify, no_wrap=True)
        begin = 0
        rows = {**stage.parts, "left alone": stage.spared, "KV cache": stage.room}
        for part, size in rows.items():
            tokens = f"{stage.tokens:,} tokens" if part == "KV cache" else ""
            table.add_row(f"  {part}", _gib(size), Bar(scale, begin, begin + size, width=36), tokens)
            begin += size
        layers = f"{stage.end - stage.start} layers, {stage.start} to {stage.end - 1}"
        console.print(f"\nstage {number}: {layers}, {'of' if pipeline.memory else 'needs'} {_gib(stage.memory)}")
        console.print(table)
    table = Table(
        "", "layers a stage", "tokens of context" if pipeline.memory else "memory a GPU", box=None, pad_edge=False
    )
    table.columns[2].justify = "right"
    rows_of = [("judged" if given else "best", report["chosen"]), *([("best", report["best"])] if given else [])]
    for name, judged in [*rows_of, ("vLLM's own", report["own"])]:
        fits = f"{judged['tokens']:,}" if not judged["lacks"] else f"does not fit: lacks {_gib(judged['lacks'])}"
        table.add_row(name, _shown(judged["split"]), fits if pipeline.memory else _gib(judged["needs"]))
    console.print()
    console.print(table)
    better, own = report["best"], report["own"]
    if pipeline.memory and not own["lacks"] and (gain := better["tokens"] - own["tokens"]):
        console.print(f"the best split holds {gain:,} tokens more than vLLM's own")
    console.print(f"\n{report['command']}\n", soft_wrap=True)
    for line in (*report["upstream"], *report["notes"]):
        console.print(line, soft_wrap=True)
