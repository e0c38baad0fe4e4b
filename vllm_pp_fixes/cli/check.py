"""`vllm-pp-fixes check`: before a start, on each host: is the plugin on, what will serve this model, is it needed."""

from __future__ import annotations

import argparse
import os

from ..runtime.stages import parse_split, stages
from ..version import identity
from . import CommandError
from .configuration import Configuration
from .installed import ask_vllm, findings, left, plugin_state, range_warning, tree, version_of
from .progress import Progress

NAME = "check"
HELP = "say, before a start, whether the plugin is on, which class will serve a model, and whether a split needs it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the checkpoint to be served, as `vllm serve` takes it"
    )
    parser.add_argument("--split", metavar="1,5", help="layers a stage (default: VLLM_PP_LAYER_PARTITION)")
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="stages, split as vLLM does")


def run(arguments: argparse.Namespace) -> int:
    """Print what will happen; return 1 if the model or the split needs what is not on. Raises `CommandError`."""
    source = tree()
    version = version_of(source)
    configuration = Configuration.read(arguments.model) if arguments.model else None
    served, state = plugin_state()
    print(f"vllm_pp_fixes {identity()}, vLLM {version}: every host must say the same")
    if warning := range_warning(version):
        print(warning)
    print(f"the plugin {state}")
    if configuration is None:
        if arguments.split or arguments.pipeline_parallel_size:
            raise CommandError("a split needs a model to be held against: name its checkpoint")
        return 0 if served else 1
    split = arguments.split or os.environ.get("VLLM_PP_LAYER_PARTITION")
    try:
        given = parse_split(split, configuration.layers) if split else []
    except ValueError as error:
        raise CommandError(f"--split: {error}" if arguments.split else f"VLLM_PP_LAYER_PARTITION: {error}") from None
    size = arguments.pipeline_parallel_size
    if given and size and size != len(given):
        raise CommandError(
            f"split {split} has {len(given)} stages, --pipeline-parallel-size is {size}: make them agree"
        )
    say = Progress()
    doing = "importing vLLM and its plugins, to see which class serves it"
    say(doing)
    request = {
        "architectures": [configuration.architecture],
        "load": configuration.architecture,
        "stages": size if size and not given else 0,
        "layers": configuration.layers,
    }
    try:
        answer = ask_vllm(request, lambda: say.tick(doing))
    finally:
        say.end()
    if "class" not in answer:
        raise CommandError(f"vLLM {version} does not serve {configuration.architecture}")
    ours = "cured" in answer and bool(answer["cured"])
    cured = f", which cures {', '.join(answer['cured'])}" if ours else ""
    print(f"{configuration.architecture} is served by {answer['class']}{cured}")
    has = [f.fault.id for f in findings(source, version) if configuration.model in f.affected]
    if has and not ours:
        print(f"upstream's class has {', '.join(has)}")
    if not ours and (why := left(source).get(configuration.model)):
        print(f"{configuration.model} stays upstream's: {why}")
    split_given = given or answer.get("split", [])
    if not split_given:
        return 0 if ours or not has else 1
    crossing = [stage.forwarded for stage in stages(split_given, configuration.levels)]
    needs = any(crossing)
    name = "+".join(map(str, split_given))
    if needs:
        sent = "; ".join(f"{[*levels]} after stage {i + 1}" for i, levels in enumerate(crossing) if levels)
        print(f"the split {name} needs it: DeepStack levels cross stages ({sent})")
    else:
        rest = f"; without it {', '.join(has)} may show" if has else ""
        print(f"the split {name} does not need it for DeepStack levels, none crosses a stage{rest}")
    return 1 if needs and not ours else 0
