"""Stages that do not agree on what is sent find out before the first answer, whatever the other host runs.

Each stage that a drop-in serves writes into the store that torch.distributed keeps for all ranks what it runs and
what it exchanges, and reads what its neighbours wrote. It never waits: vLLM asks every worker for its cache's layout,
and so has heard from each that its model stands, before any of them runs its first step.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Protocol

from ..version import identity

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.vllm_pp_fixes")


class Store(Protocol):
    """As much of `torch.distributed.Store` as is asked here."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102


class Exchange(Protocol):
    """What a stage receives from the one before and forwards to the next, by number: a `Stage`, for one."""

    @property
    def received(self) -> range: ...  # noqa: D102
    @property
    def forwarded(self) -> range: ...  # noqa: D102


class StagesDisagree(RuntimeError):
    """A neighbour that something comes from or goes to does not run what this stage runs."""


class Agreement:
    """What one stage has said to its neighbours, and has still to hear from them."""

    what = "DeepStack levels"
    """What is exchanged, in the messages."""
    number = 0
    """How many models of the class were built on this rank before."""

    def __init__(
        self,
        store: Store,
        ranks: list[int],
        rank_in_group: int,
        model: str,
        stage: Exchange,
        what: str = what,
    ) -> None:
        self.store, self.ranks, self.rank_in_group = store, ranks, rank_in_group
        self.model, self.stage, self.what = model, stage, what
        said = {"version": identity(), "received": [*stage.received], "forwarded": [*stage.forwarded]}
        # A draft of the same class is built after its target, on the same rank: it is another matter.
        while store.check([self._key(rank_in_group)]):
            self.number += 1
        store.set(self._key(rank_in_group), json.dumps(said))

    def _key(self, rank_in_group: int) -> str:
        return f"vllm_pp_fixes/{self.ranks[rank_in_group]}/{self.model}/{self.what}/{self.number}"

    def check(self) -> None:
        """Hear the neighbours that something comes from or goes to.

        Raises `StagesDisagree`, one line that names this stage, what it runs and what to install.
        """
        if self.stage.received:
            self._hear(self.rank_in_group - 1, "forwarded", [*self.stage.received])
        if self.stage.forwarded:
            self._hear(self.rank_in_group + 1, "received", [*self.stage.forwarded])

    def _hear(self, neighbour: int, exchanged: str, numbers: list[int]) -> None:
        key = self._key(neighbour)
        try:
            said: dict[str, Any] = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        except Exception as error:
            logger.warning("vllm_pp_fixes cannot hear what stage %d runs: %s", neighbour + 1, error)
            return
        if said.get("version") == identity() and said[exchanged] == numbers:
            return
        theirs = (
            f"vllm_pp_fixes {said['version']}, {exchanged} {said[exchanged]}" if said else "vLLM's own class, it seems"
        )
        raise StagesDisagree(
            f"stage {self.rank_in_group + 1} of {len(self.ranks)} serves {self.model} with vllm_pp_fixes "
            f"{identity()} and exchanges {self.what} {numbers} with stage {neighbour + 1}, which runs {theirs}: "
            "install the same vllm-pp-fixes and the same vLLM on every host, and set VLLM_PP_FIXES_DISABLE and "
            "VLLM_PLUGINS alike on all"
        )


def announce(group: Any, model: str, stage: Exchange, what: str = Agreement.what) -> Agreement | None:
    """Say what this stage of the pipeline group `group` runs; None where there is no store to say it in."""
    ranks = getattr(group, "ranks", None)
    if not ranks or len(ranks) == 1:
        return None
    from torch.distributed import distributed_c10d

    try:
        return Agreement(distributed_c10d._get_default_store(), ranks, group.rank_in_group, model, stage, what)
    except Exception as error:
        logger.debug("vllm_pp_fixes cannot say what this stage runs: %s", error)
        return None


def all_stages_stand(launched_apart: bool) -> bool:
    """Tell whether every stage has been built: the ranks of an external launcher warm up each on its own."""
    from vllm.forward_context import get_forward_context

    return not launched_apart or get_forward_context().attn_metadata is not None
