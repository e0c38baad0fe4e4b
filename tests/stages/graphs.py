"""Full graphs of a stage's outer `forward`: captured once, replayed for every batch that is padded to their size.

On a GPU these are CUDA graphs. On the CPU a tape stands in: the operations that reached torch's dispatcher while the
call ran, run again on the same tensors. Like a graph it runs none of the model's Python and moves no tensor. Unlike
one it runs the inside of vLLM's own operations anew (attention reads its plan there), and it says nothing of CUDA: not
which kernels can be captured, nor what streams and memory pools do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.stages.device import DEVICE, DTYPE, same
from tests.stages.pipeline import RECEIVE, Batch, Model

SIZE = 64
"""Tokens that every batch is padded to."""
FULL: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [SIZE]},
}
"""A configuration in which attention plans for full graphs, and nothing is compiled."""


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """The operations of a call, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tensors(result)))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, before in self.operations:
            for old, new in zip(before, tensors(func(*args, **kwargs)), strict=True):
                # A view, or what the operation writes into, is where it was.
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class Graph:
    """A call, captured: `replay` runs it again on the same inputs, and `output` holds what comes out."""

    def __init__(self, call: Callable[[], Any]) -> None:
        call()  # kernels are compiled and scratch memory grows before the capture
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            self.graph: Any = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(self.graph):
                self.output = call()
        else:
            self.graph = Tape()
            with self.graph:
                self.output = call()

    def replay(self) -> Any:
        self.graph.replay()
        return self.output


class Padded:
    """A stage whose inputs never move and are `SIZE` tokens in every batch; run plainly until it is captured."""

    graph: Graph | None = None

    def __init__(self, model: Model) -> None:
        self.model = model
        self.positions = model.positions(SIZE)
        hidden = model.config.model_config.get_hidden_size()
        self.embeds = torch.zeros(SIZE, hidden, dtype=DTYPE, device=DEVICE)
        self.received = None if model.buffers is None else model.buffers[:SIZE]

    def call(self) -> Any:
        embeds = self.embeds if self.received is None else None
        return self.model.forward(None, self.positions, self.received, embeds)

    def capture(self) -> None:
        """Capture as vLLM does: on a dummy batch that fills the graph and holds no media."""
        self.model.attention.plan(SIZE)
        self.graph = Graph(self.call)

    def step(self, tokens: int) -> Any:
        self.model.attention.plan(tokens, SIZE)
        if self.graph is None:
            return self.call()
        with self.model.in_step(SIZE):
            return self.graph.replay()

    def addresses(self) -> dict[str, int]:
        """Where everything lies that a graph reads and another hand writes."""
        held = dict(self.model.model.named_buffers())
        held |= {f"level {k}": buffer for k, buffer in enumerate(level_buffers(self.model.model))}
        held |= {f"cache {k}": cache for k, cache in enumerate(self.model.attention.caches)}
        held |= {} if self.received is None else self.received.tensors
        return {name: tensor.data_ptr() for name, tensor in held.items()}


def level_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a first stage's levels lie in: MOSS-Audio's are ours, the others' are upstream's."""
    own = getattr(model, "level_buffers", None)
    return own if own is not None else getattr(model, "deepstack_input_embeds", None) or []


class Graphs:
    """The stages of a split, chained as on a GPU that pads each batch to the size of a graph."""

    def __init__(self, stages: list[Model]) -> None:
        self.stages = stages
        self.padded = [Padded(stage) for stage in stages]

    def capture(self) -> None:
        for stage in self.padded:
            stage.capture()

    def run(self, batch: Batch, runner: str = "V1") -> torch.Tensor:
        """Return the hidden states `(tokens, hidden_size)` of the last stage, without the padding's."""
        first, *later = self.padded
        tokens = batch.input_ids.numel()
        embeds = first.model.embed(batch)
        assert embeds is not None
        first.embeds[:tokens].copy_(embeds)
        output = first.step(tokens)
        for stage in later:
            sent = {name: tensor.clone() for name, tensor in output.items()}
            # Into the buffers that `stage.received` is a view of.
            RECEIVE[runner](stage.model.buffers, sent, SIZE)
            output = stage.step(tokens)
        return output[:tokens].clone()


def wrong_in_replay(graphs: Graphs, asked: list[Batch]) -> list[str]:
    """Run the batches plainly, capture every stage, replay the same batches; say what is not as it was."""
    plain = [graphs.run(batch) for batch in asked]
    before = [stage.addresses() for stage in graphs.padded]
    graphs.capture()
    replayed = [graphs.run(batch) for batch in asked]
    wrong = [
        f"batch {i} is answered otherwise"
        for i, (one, other) in enumerate(zip(plain, replayed, strict=True))
        if not same(one, other)
    ]
    media, text = (next(batch for batch in asked if bool(batch.media) == wanted) for wanted in (True, False))
    graphs.run(media)
    graphs.stages[0].embed(text)
    if any(bool(buffer.any()) for buffer in level_buffers(graphs.stages[0].model)):
        wrong.append("levels are left in the buffers of a batch of text")
    if [stage.addresses() for stage in graphs.padded] != before:
        wrong.append("a tensor has moved that the graphs read")
    return wrong
