"""`vllm-pp-fixes check`: before a start, on each host: is the plugin on, what will serve this model, is it needed."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..faults import FAULTS
from ..runtime.stages import States, parse_split, stages
from ..shapes import sends_states
from ..source import Tree
from ..version import identity
from . import CommandError
from .configuration import Configuration, Draft
from .installed import Finding, ask_vllm, findings, left, plugin_state, range_warning, tree, version_of
from .progress import Progress

NAME = "check"
HELP = "say, before a start, whether the plugin is on, which class will serve a model, and whether a split needs it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the checkpoint to be served, as `vllm serve` takes it"
    )
    parser.add_argument("--split", metavar="1,5", help="layers a stage (default: VLLM_PP_LAYER_PARTITION)")
    parser.add_argument(
        "--speculative", metavar="DRAFT", help="the draft's checkpoint: do its auxiliary states cross stages?"
    )
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="stages, split as vLLM does")


def run(arguments: argparse.Namespace) -> int:
    """Print what will happen; return 1 if the model or the split needs what is not on. Raises `CommandError`."""
    source = tree()
    version = version_of(source)
    configuration = Configuration.read(arguments.model) if arguments.model else None
    draft = Draft.read(arguments.speculative) if arguments.speculative and configuration else None
    served, state = plugin_state()
    print(f"vllm_pp_fixes {identity()}, vLLM {version}: every host must say the same")
    if warning := range_warning(version):
        print(warning)
    print(f"the plugin {state}")
    if configuration is None:
        if arguments.split or arguments.pipeline_parallel_size or arguments.speculative:
            raise CommandError("a split and a draft need a model to be held against: name its checkpoint")
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
    found = findings(source, version)
    has = [finding.fault.id for finding in found if configuration.model in finding.affected]
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
    takes = draft is None or takes_draft(draft, configuration, split_given, source, found, answer)
    return 1 if (needs and not ours) or not takes else 0


def takes_draft(
    draft: Draft,
    target: Configuration,
    split: list[int],
    source: Tree,
    found: list[Finding],
    answer: dict[str, Any],
) -> bool:
    """Say whether a draft can be served at this split, and what that needs."""
    if not draft.reads:
        print(f"{draft.architecture} reads no auxiliary states: a split matters to it no more than without a draft")
        return True
    layers, name = target.layers, "+".join(map(str, split))
    wanted = draft.states or tuple(sorted({2, layers // 2, layers - 3}))
    whose = "" if draft.states else ", which upstream chooses by itself"
    print(f"{draft.architecture} reads the auxiliary states {[*wanted]}{whose}")
    lost = {fault.id for fault in FAULTS if fault.drafts and target.model in fault.models}
    if not lost:
        print(f"{target.architecture} gives no auxiliary states: serve it without this draft")
        return False
    received = States.of(wanted, layers - split[-1], layers, first=len(split) == 1, last=True).received
    crossing = [*wanted[: len(received)]]
    right = {finding.fault.id for finding in found if target.model in finding.right}
    if not sends_states(source):
        if crossing:
            print(
                f"the split {name} does not take the draft: {crossing} come from earlier stages, and this vLLM sends "
                "none: use 0.30 or later, or a split whose last stage has these layers"
            )
            return False
    elif len(split) > 1 and lost - right - {*answer.get("cured", ())}:
        print(f"the split {name} does not take the draft: upstream's class loses its states, or refuses it")
        return False
    if crossing:
        print(f"the split {name} takes the draft under runner V2, VLLM_USE_V2_MODEL_RUNNER=1: {crossing} cross stages")
    else:
        print(f"the split {name} takes the draft: none of its states crosses a stage")
    return True
