"""One entry of the compile cache serves towers on and off: the second start loads the graph of the first.

Upstream: #50891, PR 50908, PR 54642.
"""

from __future__ import annotations

from ..fault import Cure, Fault
from ..releases import OLDEST
from ..shapes import OWN_GRAPHS_REST_ON
from ..source import CannotTell, Tree, mentions, own_method


def probe(tree: Tree, model: str, cls: str) -> bool:
    """Tell whether the key of the cache knows nothing of `--limit-mm-per-prompt`."""
    compute_hash = own_method(tree.cls("config/model.py", "ModelConfig"), "compute_hash")
    if compute_hash is None:
        raise CannotTell("config/model.py: ModelConfig has no compute_hash")
    return not mentions(compute_hash, "limit_per_prompt")


def cure() -> Cure:
    """Ask for nothing more than a drop-in: each has a key of its own, which names its towers."""
    from ..runtime.compose import DropIn

    return Cure(mixins=(DropIn,))


FAULT = Fault(
    id="compile-cache-shared",
    hits=("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "moss_audio"),
    ranges=((OLDEST, "0.32.0"),),
    effect="wrong answers",
    symptom="one compile-cache entry for towers on and off, so that the second start loads the first one's graph: "
    "`AttributeError: 'NoneType' object has no attribute 'size'`, or, Omni with sound alone and then with "
    "pictures, **wrong answers** (from 0.28.0 on); a drop-in would load upstream's graph too",
    upstream="#50891, PR 50908, PR 54642; fixed 0.33.0",
    remedy="package version, overrides and towers are part of the cache's key (`additional_config`)",
    until="0.33.0 (every drop-in keeps a key of its own: upstream's graph is not its own)",
    probe=probe,
    cure=cure,
    rests_on=OWN_GRAPHS_REST_ON,
)
