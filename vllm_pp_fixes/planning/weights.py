"""Which part of a model each tensor belongs to, and how many bytes of it vLLM holds on one GPU."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .headers import Tensor

FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "half": 2, "float": 4}
"""Bytes of the types in which a model can be held."""

ALL_ON_ALL = re.compile(
    r"bloom|chatglm|cohere|cohere2|cohere2_moe|dbrx|falcon|gemma|gemma2|gemma3_text|gemma3n_text|gemma4_text|gpt2|gptj"
    r"|gpt_oss|granitemoe|granitemoehybrid|granitemoeshared|internlm2|jamba|lfm2|lfm2_moe|mamba|mamba2|minicpm|mixtral"
    r"|molmo|molmo2|nemotron_h|olmoe|opt|orion|phimoe|plamo3|qwen2_moe|qwen3_5_moe_text|qwen3_5_text|qwen3_moe"
    r"|qwen3_next|qwen3_omni_moe_text|qwen3_vl_moe_text|stablelm"
)
"""Types of text models of which vLLM 0.32.0 holds the embedding, the last norm and the head on every stage."""
HEAD_LAST = re.compile(r"qwen3_5_moe_text|qwen3_5_text")
"""Those of them whose head stands on the last stage alone."""

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings)\.")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer|output)\.")
_NORM = re.compile(r"(^|\.)(norm|norm_f|ln_f|final_layernorm|final_layer_norm|final_norm)\.\w+$")
_UNSERVED = re.compile(r"(^|\.)(talker|code2wav|token2wav|mtp)\.|rotary_emb\.inv_freq$")
_BESIDE = re.compile(r"vis|image|vit|audio|speech|encoder|tower|projector|talker|code2wav|mtp")
"""Words in the names of layers that are not the text model's."""
_KEPT = re.compile(r"(scale|scale_inv|scale_2|absmax|bias_correction|score_correction_bias)$|quant_map|quant_state")
"""Floats of quantised checkpoints that are not cast."""
_WHOLE = re.compile(
    r"norm|(^|\.)ln_|(^|\.)(gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|proj1|proj2|stem_proj)\."
    r"|patch_embed|pos_embed|embed_positions|class_embed|cls_token|conv_out\.|(^|\.)conv(\dd)?\d*\.(weight|bias)$"
    r"|(o_proj|out_proj|down_proj|fc2|linear_fc2|attn\.proj|dense|dense_4h_to_h|c_proj|mlp\.2)\.bias$"
)
"""What every GPU of a tensor-parallel group holds whole: norms, routers, convolutions, some biases."""
_LAYERS = re.compile(r"(^|\.)(layers|h|blocks)$")
_KEYS = re.compile(r"\.(k_proj|v_proj)\.")


@dataclass(frozen=True)
class Model:
    """What the configuration of a checkpoint says of the sizes of its text model. Raises `ValueError` from `read`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    kv_width: int
    """Elements of keys and values of one token in one layer on one GPU."""
    vocabulary: int
    positions: int
    rotary: int
    """Elements of the table of rotary positions, which a stage holds once."""
    dtype: str
    levels: int
    tied: bool | None
    """Whether the head is the embedding; None where the configuration does not say."""
    multimodal: bool
    type: str
    shared_query: bool
    """Whether the projections of attention stand whole on each GPU of a group (Step3)."""
    other_layers: tuple[str, ...] = ()
    """Kinds of layers whose cache is not that of full attention."""

    @classmethod
    def read(cls, config: dict[str, Any], tp: int = 1, dtype: str = "auto") -> Model:
        """Read the content of a `config.json`, for `tp` GPUs a stage.

        Raises `ValueError` where it lacks a number without which nothing can be said.
        """
        text, vision, audio = sections(config)
        layers, hidden = (_number(text, name) for name in ("num_hidden_layers n_layer", "hidden_size n_embd"))
        heads = _number(text, "num_attention_heads n_head")
        kv_heads = text.get("num_key_value_heads") or text.get("num_attention_groups") or text.get("num_kv_heads")
        kv_heads = kv_heads or (1 if text.get("multi_query") else heads)
        head = text.get("head_dim") or hidden // heads
        width = 2 * max(1, kv_heads // tp) * head
        if rank := text.get("kv_lora_rank"):
            width = rank + text.get("qk_rope_head_dim", 64)
            head = text.get("qk_rope_head_dim", 64)
        said = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16")
        said = str(said).removeprefix("torch.") if dtype == "auto" else dtype
        if said == "float32" and dtype == "auto":
            said = "bfloat16"  # vLLM casts float32 down, unless told not to.
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        positions = text.get("max_position_embeddings") or text.get("max_position_embedding") or 0
        # Outside the Qwen3-VL family the table of M-RoPE is four times as long: videos count on beyond the tokens.
        longer = (
            4 if "mrope_section" in rope and not str(text.get("model_type")).startswith(("qwen3_vl", "qwen3_5")) else 1
        )
        part = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1
        kinds = sorted({*text.get("layer_types", ())} - {"full_attention", "attention"})
        if text.get("sliding_window") and text.get("use_sliding_window", not kinds) and not kinds:
            kinds = ["sliding_attention"]
        return cls(
            layers,
            hidden,
            heads,
            kv_heads,
            width,
            text.get("vocab_size", 0),
            positions,
            int(positions * longer * head * part),
            said,
            len(vision.get("deepstack_visual_indexes") or audio.get("deepstack_encoder_layer_indexes") or ()),
            next((c["tie_word_embeddings"] for c in (text, config) if "tie_word_embeddings" in c), None),
            bool(vision or audio),
            str(text.get("model_type", "")),
            "share_q_dim" in text,
            tuple(kinds),
        )

    @property
    def itemsize(self) -> int:
        """Bytes an element of the type in which the model is held."""
        return FLOATS.get(self.dtype, 2)


def sections(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the parts of a configuration that speak of the text model, the vision and the audio tower."""
    config = config.get("thinker_config", config)
    text = next((config[k] for k in ("text_config", "language_config", "llm_config") if config.get(k)), config)
    return text, config.get("vision_config") or {}, config.get("audio_config") or {}


def _number(text: dict[str, Any], names: str) -> int:
    for name in names.split():
        if isinstance(text.get(name), int):
            return text[name]
    raise ValueError(f"config.json does not say {names.split()[0]}: name a checkpoint with a full configuration")


@dataclass
class Weights:
    """Bytes that one GPU of a stage holds, by part of the model."""

    layers: list[int]
    embedding: int = 0
    head: int = 0
    """0 where it is the embedding."""
    norm: int = 0
    other: int = 0
    """The towers of a multimodal model; whatever else a text model has."""
    unserved: int = 0
    """Bytes in the files that vLLM does not load (a talker, extra layers for speculation)."""
    tied: bool = False


def weigh(tensors: Iterable[Tensor], model: Model, tp: int = 1) -> Weights:
    """Return where the bytes of the tensors go on one of `tp` GPUs of a stage.

    Raises `ValueError` where no list of tensors is named by the number of a layer.
    """
    tensors = list(tensors)
    layer = _layers(tensors, model.layers)
    found = Weights([0] * model.layers)
    for tensor in tensors:
        number = int(match[1]) if (match := layer.match(tensor.name)) else None
        if _UNSERVED.search(tensor.name) or (number is not None and number >= model.layers):
            found.unserved += tensor.nbytes
        elif number is not None:
            found.layers[number] += _on_one_gpu(tensor, model, tp)
        elif _BESIDE.search(tensor.name) or not (part := _part(tensor.name)):
            found.other += _on_one_gpu(tensor, model, tp)
        elif part == "norm":
            found.norm += _held(tensor, model)
        else:
            rows = _padded(model.vocabulary or tensor.shape[0]) / tensor.shape[0] if len(tensor.shape) > 1 else 1
            setattr(found, part, getattr(found, part) + math.ceil(_held(tensor, model) * rows / tp))
    found.tied = not found.head if model.tied is None else model.tied
    if found.tied:
        found.head = 0
    return found


def _layers(tensors: list[Tensor], count: int) -> re.Pattern[str]:
    """Return the pattern of the names of the text model's layers, the number of the layer in its group."""
    numbers: dict[str, set[int]] = defaultdict(set)
    size: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if match := re.match(r"(.*?)\.(\d+)\.", tensor.name):
            numbers[match[1]].add(int(match[2]))
            size[match[1]] += tensor.nbytes
    whole = [prefix for prefix, seen in numbers.items() if seen >= set(range(count))]
    if not whole:
        raise ValueError(
            f"no tensors are named by the numbers of {count} layers: its headers do not fit its config.json"
        )
    prefix = max(whole, key=lambda name: (not _BESIDE.search(name), bool(_LAYERS.search(name)), size[name]))
    return re.compile(rf"{re.escape(prefix)}\.(\d+)\.")


def _part(name: str) -> str:
    return (
        "embedding"
        if _EMBEDDING.search(name)
        else "head"
        if _HEAD.search(name)
        else "norm"
        if _NORM.search(name)
        else ""
    )


def _padded(rows: int) -> int:
    """Return the rows of a vocabulary as vLLM holds them: a multiple of 64."""
    return -(-rows // 64) * 64


def _held(tensor: Tensor, model: Model) -> int:
    """Return the bytes of a whole tensor as vLLM holds it: floats in the model's type, all else as it is."""
    if tensor.dtype in ("F64", "F32", "F16", "BF16") and not _KEPT.search(tensor.name):
        return math.prod(tensor.shape) * model.itemsize
    return tensor.nbytes


def _on_one_gpu(tensor: Tensor, model: Model, tp: int) -> int:
    """Return the bytes of a tensor on one of the `tp` GPUs of a tensor-parallel group."""
    held, name = _held(tensor, model), tensor.name
    if tp == 1 or _WHOLE.search(name):
        return held
    if model.shared_query and re.search(r"\.(q_proj|k_proj|v_proj)\.", name):
        return held
    if _KEYS.search(name) and not _BESIDE.search(name):
        return held // min(tp, model.kv_heads)
    if ".qkv_proj." in name and not _BESIDE.search(name):
        queries, keys = model.heads / tp, 2 * max(1, model.kv_heads / tp)
        return round(held * (queries + keys) / (model.heads + 2 * model.kv_heads))
    return held // tp
