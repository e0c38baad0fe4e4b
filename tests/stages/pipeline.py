"""All stages of a pipeline in one process: real classes, weights and attention; only the PP group is stood in for.

What goes from stage to stage is copied by hand as the runners copy it, into receive buffers that outlive a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.installed import inspect_here
from tests.stages.device import DEVICE, DTYPE
from vllm_pp_fixes.demo.engine import ENGINE_ENV
from vllm_pp_fixes.demo.prompts import picture

Weights = dict[str, torch.Tensor]

MAX_TOKENS = 256
MEDIA_TOKEN = 405
"""The tiny checkpoints' picture token: Qwen3-Omni looks at it, the others go by the mask alone."""
BLOCK = 64


@dataclass
class Group:
    """As much of a PP group as a model asks for."""

    rank_in_group: int
    world_size: int

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


@lru_cache(maxsize=1)
def start_distributed() -> None:
    os.environ.update(ENGINE_ENV)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    inspect_here()
    backend = "gloo"
    if DEVICE.type == "cuda":
        # As a GPU's worker does; its experts take their scratch memory from the second.
        backend = "nccl"
        torch.cuda.set_device(0)
        import_module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cuda", 0))
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method="tcp://127.0.0.1:0", backend=backend
        )
        parallel_state.initialize_model_parallel()


def engine_config(model: str, limits: dict[str, int] | None = None, **more: Any) -> VllmConfig:
    settings: dict[str, Any] = {"enforce_eager": True, "trust_remote_code": True, "block_size": BLOCK}
    return EngineArgs(
        model=model,
        dtype=str(DTYPE).removeprefix("torch."),
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        limit_mm_per_prompt=limits or {},
        **(settings | more),
    ).create_engine_config()


def cache_shape(backend: Any, blocks: int, layer: Any) -> tuple[int, ...]:
    """Shape of a layer's cache; from 0.29 on it is the same for every backend, and none says it."""
    if hasattr(backend, "get_kv_cache_shape"):
        return backend.get_kv_cache_shape(blocks, BLOCK, layer.num_kv_heads, layer.head_size)
    return blocks, layer.num_kv_heads, BLOCK, 2 * layer.head_size


class Attention:
    """The attention caches of a stage's layers, and what they are told of a batch; no tensor of it ever moves."""

    def __init__(self, config: VllmConfig, model: torch.nn.Module) -> None:
        own = set(model.modules())
        context = config.compilation_config.static_forward_context
        self.layers = {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache") and layer in own}
        layer = next(iter(self.layers.values()))
        blocks, backend = MAX_TOKENS // BLOCK, layer.get_attn_backend()
        self.caches = []
        for each in self.layers.values():
            cache = torch.zeros(cache_shape(backend, blocks, each), dtype=DTYPE, device=DEVICE)
            self.caches.append(cache)
            # Up to 0.18 a list, one for each virtual engine.
            each.kv_cache = [cache] if isinstance(each.kv_cache, list) else cache
        with set_current_vllm_config(config):
            spec = layer.get_kv_cache_spec(config)
            self.builder = backend.get_builder_cls()(spec, list(self.layers), config, DEVICE)
        self.start = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self.length = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.table = torch.arange(blocks, dtype=torch.int32, device=DEVICE).unsqueeze(0)
        self.slot_mapping = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=DEVICE)

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """Where each layer writes keys and values: a layer that is not told writes none, and attends to zeros."""
        return {name: metadata.slot_mapping for name, metadata in self.metadata.items()}

    def plan(self, tokens: int, size: int = 0) -> None:
        """Empty the caches for one sequence of `tokens` tokens, prefilled in one step, padded to `size`.

        Padding belongs to no sequence and has no slot, as in vLLM's runners. What a graph keeps of a batch as numbers
        is the same for all batches of that size.
        """
        size = size or tokens
        for cache in self.caches:
            cache.zero_()
        start = torch.tensor([0, tokens], dtype=torch.int32)
        self.start.copy_(start)
        self.length.fill_(tokens)
        self.slot_mapping.fill_(-1)
        self.slot_mapping[:tokens] = torch.arange(tokens, device=DEVICE)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=self.start,
                query_start_loc_cpu=start,
                seq_lens=self.length,
                num_reqs=1,
                num_actual_tokens=size,
                max_query_len=size,
                max_seq_len=size,
                block_table_tensor=self.table,
                slot_mapping=self.slot_mapping[:size],
            ),
        )
        self.metadata = dict.fromkeys(self.layers, metadata)


class Model:
    """One stage: the model, its attention caches, and the receive buffers that its factory makes."""

    def __init__(
        self,
        cls: type,
        config: VllmConfig,
        split: tuple[int, ...],
        rank: int,
        publish: Callable[[Weights], Weights] = lambda weights: weights,
    ) -> None:
        self.config, self.group = config, Group(rank, len(split))
        # On a processor with AMX 0.24 counts the layers of the text model's configuration, which knows of no stages.
        without_amx = mock.patch("torch.cpu._is_amx_tile_supported", return_value=False)
        own_split = mock.patch.dict(os.environ, VLLM_PP_LAYER_PARTITION=",".join(map(str, split)))
        with self.on_stage(), own_split, without_amx, DEVICE:
            self.model = cls(vllm_config=config, prefix="").eval()
        weights = publish(load_file(os.path.join(config.model_config.model, "model.safetensors")))
        with self.on_stage():
            self.model.load_weights(iter(weights.items()))
            process_weights_after_loading(self.model, config.model_config, DEVICE)
        self.buffers: Any = None
        if not self.group.is_first_rank:
            self.buffers = self.model.make_empty_intermediate_tensors(MAX_TOKENS, DTYPE, DEVICE)

    @contextmanager
    def on_stage(self):
        group = mock.patch.object(parallel_state, "_PP", self.group)
        with set_current_vllm_config(self.config), group, set_default_torch_dtype(DTYPE):
            yield

    @cached_property
    def attention(self) -> Attention:
        return Attention(self.config, self.model)

    @torch.inference_mode()
    def embed(self, batch: Batch) -> torch.Tensor | None:
        """Return the input embeddings as a runner asks for them in each step; None for a model of text alone."""
        if not hasattr(self.model, "embed_multimodal") or not self.config.model_config.is_multimodal_model:
            return None
        with self.on_stage(), set_forward_context(None, self.config, num_tokens=batch.input_ids.numel()):
            media = list(self.model.embed_multimodal(**batch.media)) if batch.media else []
            return self.model.embed_input_ids(batch.input_ids, media, is_multimodal=batch.input_ids == MEDIA_TOKEN)

    def positions(self, tokens: int) -> torch.Tensor:
        positions = torch.arange(tokens, device=DEVICE)
        return positions.expand(3, -1).contiguous() if self.config.model_config.uses_mrope else positions

    def step(self, input_ids, positions, intermediate, inputs_embeds):
        """Run the stage on a batch that fills its inputs, `positions.size(-1)` tokens."""
        self.attention.plan(positions.size(-1))
        return self.forward(input_ids, positions, intermediate, inputs_embeds)

    @contextmanager
    def in_step(self, size: int):
        """Set what a runner sets around `forward`: the batch that attention has been told of, padded to `size`."""
        metadata, slots = self.attention.metadata, self.attention.slots
        with self.on_stage(), set_forward_context(metadata, self.config, num_tokens=size, slot_mapping=slots):
            yield

    @torch.inference_mode()
    def forward(self, input_ids, positions, intermediate, inputs_embeds):
        with self.in_step(positions.size(-1)):
            return self.model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=intermediate,
                inputs_embeds=inputs_embeds,
            )


def receive_v1(buffers: IntermediateTensors, sent: dict[str, torch.Tensor], tokens: int) -> IntermediateTensors:
    """Copy as runner V1 does: every received key; what the buffer holds beyond them stays as it was."""
    for name, tensor in sent.items():
        buffers[name][:tokens].copy_(tensor[:tokens])
    return IntermediateTensors({name: tensor[:tokens] for name, tensor in buffers.items()})


def receive_v2(buffers: IntermediateTensors, sent: dict[str, torch.Tensor], tokens: int) -> IntermediateTensors:
    """Copy as runner V2 does: every key of the buffer; a received key beyond them is dropped."""
    return IntermediateTensors({name: tensor[:tokens].copy_(sent[name][:tokens]) for name, tensor in buffers.items()})


RECEIVE = {"V1": receive_v1, "V2": receive_v2}


@dataclass
class Batch:
    """One prefill of one sequence: `(tokens,)` token ids and, with media, the tower's inputs.

    What counts something stays on the CPU, as vLLM's runners leave it.
    """

    input_ids: torch.Tensor
    media: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.input_ids = self.input_ids.to(DEVICE)
        self.media = {name: each.to(DEVICE) if each.is_floating_point() else each for name, each in self.media.items()}


def text_batch(tokens: int, seed: int) -> Batch:
    return Batch(torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(seed)))


def _around(tokens: int, media: dict[str, torch.Tensor], seed: int) -> Batch:
    ends = text_batch(16, seed).input_ids.cpu()
    return Batch(torch.cat([ends[:7], torch.full((tokens,), MEDIA_TOKEN), ends[7:]]), media)


def picture_batch(seed: int, width: int = 96, height: int = 64) -> Batch:
    """Text, a picture (`height` x `width` pixels, a token a 32 x 32 patch), text."""
    patch, merge, frames = 16, 2, 2
    rows, columns = height // patch, width // patch
    pixels = np.asarray(picture(seed, width, height), dtype=np.float32) / 127.5 - 1
    patches = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    patches = patches.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :].repeat(frames, -3)
    media = {
        "pixel_values": torch.from_numpy(patches.reshape(rows * columns, -1).copy()),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
    return _around(rows * columns // merge**2, media, seed)


def sound_batch(seed: int, frames: int) -> Batch:
    """Text, two sounds (`frames` and 40 mel frames, a token for eight), text."""
    lengths = [frames, 40]
    random = torch.Generator().manual_seed(seed)
    mel = torch.randn(2, 128, max(lengths), generator=random)
    mel[1, :, 40:] = 0
    media = {"audio_data": mel, "audio_data_seqlens": torch.tensor(lengths)}
    return _around(sum((length + 7) // 8 for length in lengths), media, seed)


class Pipeline:
    """The stages of a split, chained; `sent` holds what crossed each boundary in the last batch."""

    def __init__(self, stages: list[Model]) -> None:
        self.stages = stages
        self.sent: list[dict[str, torch.Tensor]] = []

    def run(self, batch: Batch, runner: str = "V1", firsts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states `(tokens, hidden_size)` of the last stage.

        `firsts` are the first stage's positions, where they are not those of plain text, as all later stages' are.
        """
        first, *later = self.stages
        embeds = first.embed(batch)
        tokens = batch.input_ids.numel()
        positions = first.positions(tokens)
        own = positions if firsts is None else firsts
        output = first.step(batch.input_ids if embeds is None else None, own, None, embeds)
        self.sent = []
        for stage in later:
            # As over the wire: bytes of their own, so that nothing the sender clears or overwrites later shows through.
            self.sent.append({name: tensor.clone() for name, tensor in output.items()})
            received = RECEIVE[runner](stage.buffers, self.sent[-1], tokens)
            ids = batch.input_ids if runner == "V1" else None
            output = stage.step(ids, positions.clone(), received, None)
        return output.clone()


def splits(layers: int, count: int) -> list[tuple[int, ...]]:
    """Every split of `layers` layers into `count` stages of at least one."""
    if count == 1:
        return [(layers,)]
    return [(n, *rest) for n in range(1, layers - count + 2) for rest in splits(layers - n, count - 1)]


class Count(TorchDispatchMode):
    """Names of the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))
