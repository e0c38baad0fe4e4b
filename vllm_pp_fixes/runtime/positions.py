"""M-RoPE positions over pipeline stages: the first stage's are sent along where later ones cannot work them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors

from .compose import DropIn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "mrope_positions"


@dataclass(frozen=True)
class Rows:
    """The rows of the positions that a stage receives and forwards: all or none."""

    received: range = range(0)
    forwarded: range = range(0)


def with_positions(factory: Callable[..., IntermediateTensors], rows: int) -> Callable[..., IntermediateTensors]:
    """Return a factory that declares what `factory` does, and positions `(batch_size, rows)`, int64, zero."""

    def make_empty_intermediate_tensors(
        batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        empty = factory(batch_size, dtype, device)
        empty[KEY] = torch.zeros(batch_size, rows, dtype=torch.int64, device=device)
        return empty

    return make_empty_intermediate_tensors


class PositionsOverStages(DropIn):
    """Mixin over an upstream M-RoPE model: every stage runs on the positions of the first one.

    Each stage works out positions from the media of a request. A cure whose fault keeps later stages from it is a
    subclass that says in `needs_positions` which configurations can meet it; the others send nothing more.
    """

    outermost = True
    rows = Rows()

    def needs_positions(self, vllm_config: VllmConfig) -> bool:
        """Tell whether the positions of later stages can be wrong under this configuration."""
        return False

    def built(self, vllm_config: VllmConfig) -> None:
        """Declare the positions that the stage receives; say to the neighbours what it exchanges."""
        super().built(vllm_config)
        group, config = get_pp_group(), vllm_config.model_config
        if group.world_size > 1 and config.uses_mrope and self.needs_positions(vllm_config):
            # Up to 0.29 the runners know no other number than 3.
            every = range(getattr(config, "mrope_num_dims", 3))
            none = range(0)
            self.rows = Rows(none if group.is_first_rank else every, none if group.is_last_rank else every)
        if self.rows.received:
            self.make_empty_intermediate_tensors = with_positions(
                self.make_empty_intermediate_tensors, len(self.rows.received)
            )
        self.say(self.rows, "rows of M-RoPE positions")

    def exchange(self) -> str:
        """Say that positions are exchanged, where they are."""
        return super().exchange() + (", M-RoPE positions of stage 1" if self.rows != Rows() else "")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this stage's layers on the first stage's positions, `(3, num_tokens)`.

        Raises `StagesDisagree` at the first step if a neighbour does not exchange positions, and this stage does.
        """
        self.hear()
        rows = self.rows
        if rows.received:
            assert intermediate_tensors is not None
            tensors = dict(intermediate_tensors.items())
            # In place: CUDA graphs have read the runner's buffer at its address, and drafts read it too.
            positions.copy_(tensors.pop(KEY).t())
            intermediate_tensors = IntermediateTensors(tensors)
        if rows.forwarded:
            # A copy: the send may still be under way when the runner writes the next batch's.
            payload = {KEY: positions.t().clone(memory_format=torch.contiguous_format)}
        output: Any = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]
        return IntermediateTensors({**output.tensors, **payload}) if rows.forwarded else output
