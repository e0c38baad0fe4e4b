"""One record a fault: what the user meets, where, and what is done about it here.

README's table and the tests read it. Releases are ranges, both ends included; "fixed" names the first release
without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault of upstream's, under the id that messages and documents use."""

    id: str
    models: tuple[str, ...]
    """Module names of the models, as in `MODELS`."""
    releases: str
    symptom: str
    upstream: str
    """Issue or pull request, or "none"."""
    cure: str
    until: str
    """When the cure can go."""


MODELS = {"qwen3_vl": {"Qwen3VLForConditionalGeneration": "Qwen3VLForConditionalGeneration"}}
"""Module name of each drop-in: the architectures that it serves, and the class that serves each."""

FAULTS = (
    Fault(
        id="split-refused",
        models=("qwen3_vl",),
        releases="0.17.0 to 0.33.0",
        symptom="a first stage with fewer layers than DeepStack levels: `AssertionError: start_layer should be "
        "greater than or equal to len(deepstack_visual_indexes)`",
        upstream="none",
        cure="the constructor no longer refuses; a stage sends each level that a later stage uses, and that stage's "
        "factory declares exactly those",
        until="a release whose factory declares levels",
    ),
    Fault(
        id="split-refused-towerless",
        models=("qwen3_vl",),
        releases="0.17.0 to 0.33.0",
        symptom="the same refusal with image=0 and video=0 in `--limit-mm-per-prompt`, where no level exists",
        upstream="none",
        cure="the constructor no longer refuses; nothing is declared or sent without a tower",
        until="a release that asks for the tower first",
    ),
    Fault(
        id="buffers-everywhere",
        models=("qwen3_vl",),
        releases="0.17.0 to 0.33.0",
        symptom="every stage holds DeepStack buffers (levels x max_num_batched_tokens x hidden_size); only the first "
        "uses them",
        upstream="none",
        cure="buffers exist on the first stage only, and only with a tower (whole towers still stand on every stage)",
        until="a release that asks is_first_rank before it makes them",
    ),
    Fault(
        id="compile-cache-shared",
        models=("qwen3_vl",),
        releases="releases with AOT compile (torch 2.10 or newer) to 0.32.0",
        symptom="one compile-cache entry for towers on and off, so that the second start loads the first one's graph: "
        "`AttributeError: 'NoneType' object has no attribute 'size'`; a drop-in would load upstream's graph too",
        upstream="#50891, PR 50908, PR 54642; fixed 0.33.0",
        cure="package version, overrides and towers are part of the cache's key (`additional_config`)",
        until="as long as there is a drop-in",
    ),
)
