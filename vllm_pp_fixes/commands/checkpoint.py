"""Tiny checkpoints with real random weights, made on the spot: no download, real loading code.

Six text layers and three DeepStack levels, hidden size 64, float32. Weights are drawn large enough that
losing one level moves log-probabilities by more than 1 (initial weights of 1e-3 would hide every fault).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .families import FAMILIES

_CORPUS = (
    "A picture shows two cats on a red sofa beside an open window; the first cat sleeps, the second watches birds. "
    "What is in this picture? Describe the video and say how many people walk from left to right. "
    "Pipeline parallelism splits the layers of a model into stages, and every stage runs on a device of its own. "
)
_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type in ('image', 'image_url') %}IMAGE{% elif c.type in ('video', 'video_url') %}VIDEO"
    "{% elif c.type in ('audio', 'audio_url', 'input_audio') %}AUDIO"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _chat_template(family: str) -> str:
    template = _CHAT_TEMPLATE
    for kind in ("image", "video", "audio"):
        template = template.replace(kind.upper(), FAMILIES[family].placeholder.get(kind, ""))
    return template


def cache_folder() -> Path:
    """Return the folder that holds what the commands make (`XDG_CACHE_HOME` is honoured)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm_pp_fixes"


def _tokenizer(family: str):
    """Return a byte-level BPE tokenizer trained on a few sentences, with the model's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [_CORPUS],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.chat_template = _chat_template(family)
    return tokenizer


def _draw(shapes: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Return a float32 tensor for each name and shape: norms 1, biases small, all else wide enough to be felt."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if "norm" in name:
            weights[name] = torch.full(shape, 1.0 if name.endswith("weight") else 0.0)
        else:
            weights[name] = torch.randn(shape, generator=generator) * (0.02 if name.endswith("bias") else 0.25)
    return weights


def _save_hf(model, folder: Path, tokenizer, publish: Callable[[str, Any], tuple[str, Any]] | None = None) -> None:
    """Save a transformers model with drawn weights; `publish` maps a name and a tensor to what is published."""
    from safetensors.torch import load_file, save_file

    model = model.float()
    model.load_state_dict(_draw({name: weight.shape for name, weight in model.named_parameters()}), strict=False)
    model.save_pretrained(folder)
    if publish:
        path = folder / "model.safetensors"
        save_file(dict(publish(name, weight) for name, weight in load_file(path).items()), path, {"format": "pt"})
    tokenizer.save_pretrained(folder)


def _text(tokenizer, layers: int, **more: Any) -> dict[str, Any]:
    """Return the text model's configuration; as in published checkpoints, it names no architecture."""
    return {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        **more,
    }


_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def _vision(levels: int) -> dict[str, Any]:
    return {
        "depth": max(4, levels),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(range(levels)),
    }


def _vision_ids(tokenizer) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _write_processor(folder: Path, family: str, processor: str, **more: Any) -> None:
    """Write the processor's files for pictures and video; `more` goes into the first one."""
    pixels = {
        "processor_class": processor,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    _write(
        folder / "preprocessor_config.json",
        {
            **pixels,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
            **more,
        },
    )
    _write(
        folder / "video_preprocessor_config.json",
        {
            **pixels,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 8 * 128 * 128},
        },
    )
    _write(folder / "chat_template.json", {"chat_template": _chat_template(family)})


def make_qwen3_vl(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = _tokenizer("qwen3_vl")
    config = Qwen3VLConfig(
        text_config=_text(tokenizer, layers), vision_config=_vision(levels), **_vision_ids(tokenizer)
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    _save_hf(Qwen3VLForConditionalGeneration(config), folder, tokenizer)
    _write_processor(folder, "qwen3_vl", "Qwen3VLProcessor")


def make_qwen3_vl_moe(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-VL-MoE: four experts a layer, two of them used a token."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    tokenizer = _tokenizer("qwen3_vl_moe")
    config = Qwen3VLMoeConfig(
        text_config=_text(tokenizer, layers, **_EXPERTS), vision_config=_vision(levels), **_vision_ids(tokenizer)
    )
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]

    def publish(name: str, weight: Any) -> tuple[str, Any]:
        # transformers multiplies by the transposed experts of the published checkpoints
        return name, weight.transpose(1, 2).contiguous() if ".experts." in name else weight

    _save_hf(Qwen3VLMoeForConditionalGeneration(config), folder, tokenizer, publish)
    _write_processor(folder, "qwen3_vl_moe", "Qwen3VLProcessor")


def make_qwen3_omni(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-Omni: the thinker's weights, which are all that vLLM loads."""
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

    tokenizer = _tokenizer("qwen3_omni_moe_thinker")
    marks = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    tokenizer.init_kwargs["extra_special_tokens"] = marks
    tokenizer._set_model_specific_special_tokens(special_tokens=marks)
    token = tokenizer.convert_tokens_to_ids
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": _text(tokenizer, layers, **_EXPERTS),
            "vision_config": {**_vision(levels), "image_size": 128, "apply_vit_abs_pos_embed": True},
            "audio_config": {
                "num_mel_bins": 128,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "d_model": 64,
                "output_dim": 64,
                "downsample_hidden_size": 16,
            },
            **_vision_ids(tokenizer),
            "audio_token_id": token("<|audio_pad|>"),
            "audio_start_token_id": token("<|audio_start|>"),
            "audio_end_token_id": token("<|audio_end|>"),
        },
        enable_audio_output=False,
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config.thinker_config)
    _save_hf(thinker, folder, tokenizer, lambda name, weight: (f"thinker.{name}", weight))
    config.save_pretrained(folder)
    _write_processor(
        folder,
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeProcessor",
        feature_extractor_type="WhisperFeatureExtractor",
        feature_size=128,
        sampling_rate=16000,
        hop_length=160,
        n_fft=400,
        chunk_length=30,
    )


_MOSS_CONFIGURATION = '''"""Configuration of a tiny MOSS-Audio, read by transformers with trust_remote_code."""

from transformers import PretrainedConfig, Qwen3Config


class MossAudioConfig(PretrainedConfig):
    """The text model's configuration, the audio encoder's as a dict."""

    model_type = "moss_audio"

    def __init__(self, language_config=None, audio_config=None, adapter_hidden_size=128,
                 deepstack_num_inject_layers=None, **kwargs):
        self.language_config = Qwen3Config(**(language_config or {}))
        self.audio_config = audio_config or {}
        self.adapter_hidden_size = adapter_hidden_size
        self.deepstack_num_inject_layers = deepstack_num_inject_layers
        super().__init__(**kwargs)

    def get_text_config(self, decoder=False, **kwargs):
        return self.language_config
'''


def make_moss_audio(folder: Path, *, levels: int = 3, layers: int = 6, injected: int = 0) -> None:
    """Write a tiny MOSS-Audio; with `injected`, only so many of the encoder's `levels` are injected."""
    from safetensors.torch import save_file

    tokenizer = _tokenizer("moss_audio")
    text = _text(tokenizer, layers, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    width, hidden, inner, heads, mel, channels, depth = 64, 64, 128, 4, 128, 16, max(4, levels)
    _write(
        folder / "config.json",
        {
            "architectures": ["MossAudioModel"],
            "model_type": "moss_audio",
            "auto_map": {"AutoConfig": "configuration_moss_audio.MossAudioConfig"},
            "dtype": "float32",
            "language_config": text,
            "audio_config": {
                "d_model": width,
                "output_dim": width,
                "num_mel_bins": mel,
                "encoder_layers": depth,
                "encoder_attention_heads": heads,
                "encoder_ffn_dim": inner,
                "downsample_hidden_size": channels,
                "deepstack_encoder_layer_indexes": list(range(levels)),
            },
            "adapter_hidden_size": inner,
            "deepstack_num_inject_layers": injected or None,
            "eos_token_id": text["eos_token_id"],
            "pad_token_id": text["pad_token_id"],
        },
    )
    (folder / "configuration_moss_audio.py").write_text(_MOSS_CONFIGURATION)
    ids = {"audio_token_id": "<|AUDIO|>", "audio_start_id": "<|audio_bos|>", "audio_end_id": "<|audio_eos|>"}
    _write(
        folder / "processor_config.json",
        {name: tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    q, kv = text["num_attention_heads"] * text["head_dim"], text["num_key_value_heads"] * text["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.embed_tokens.weight": (text["vocab_size"], hidden),
        "language_model.norm.weight": (hidden,),
        "lm_head.weight": (text["vocab_size"], hidden),
        "audio_encoder.conv1.weight": (channels, 1, 3, 3),
        "audio_encoder.conv2.weight": (channels, channels, 3, 3),
        "audio_encoder.conv3.weight": (channels, channels, 3, 3),
        **{f"audio_encoder.conv{i}.bias": (channels,) for i in (1, 2, 3)},
        "audio_encoder.stem_proj.weight": (width, channels * mel // 8),
        "audio_encoder.stem_proj.bias": (width,),
        "audio_encoder.layer_norm.weight": (width,),
        "audio_encoder.layer_norm.bias": (width,),
    }
    for i in range(layers):
        layer = f"language_model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_norm.weight": (text["head_dim"],),
            layer + "self_attn.k_norm.weight": (text["head_dim"],),
            layer + "self_attn.q_proj.weight": (q, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q),
            **_gated(layer + "mlp.", hidden, text["intermediate_size"], hidden),
        }
    for i in range(depth):
        layer = f"audio_encoder.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {
                f"{layer}self_attn.{name}.weight": (width, width),
                f"{layer}self_attn.{name}.bias": (width,),
            }
        for name, shape in {"fc1": (inner, width), "fc2": (width, inner)}.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{layer}{name}.weight": (width,), f"{layer}{name}.bias": (width,)}
    shapes |= _gated("audio_adapter.", width, inner, hidden)
    for i in range(injected or levels):
        shapes |= _gated(f"deepstack_audio_merger_list.{i}.", width, inner, hidden)
    save_file(_draw(shapes), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)


def _gated(prefix: str, width: int, inner: int, out: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a gated MLP from `width` over `inner` to `out`."""
    return {
        prefix + "gate_proj.weight": (inner, width),
        prefix + "up_proj.weight": (inner, width),
        prefix + "down_proj.weight": (out, inner),
    }


def make_step3_text(folder: Path, *, layers: int = 6) -> None:
    """Write a tiny Step3 text model: two dense layers, then layers of experts with a shared one."""
    from safetensors.torch import save_file

    tokenizer = _tokenizer("step3_text")
    hidden, heads, head, share, inner, expert, experts = 64, 4, 32, 64, 128, 32, 4
    sparse = list(range(2, layers))
    _write(
        folder / "config.json",
        {
            "architectures": ["Step3TextForCausalLM"],
            "model_type": "step3_text",
            "dtype": "float32",
            "vocab_size": 512,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_attention_groups": 1,
            "num_hidden_layers": layers,
            "head_dim": head,
            "share_q_dim": share,
            "moe_intermediate_size": expert,
            "moe_num_experts": experts,
            "moe_top_k": 2,
            "share_expert_dim": expert,
            "norm_expert_weight": False,
            "moe_layers_enum": ",".join(map(str, sparse)),
            "max_position_embedding": 4096,
            "max_seq_len": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        },
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (512, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (share, hidden),
            layer + "self_attn.k_proj.weight": (head, hidden),
            layer + "self_attn.v_proj.weight": (head, hidden),
            layer + "self_attn.o_proj.weight": (hidden, heads * head),
            layer + "self_attn.inter_norm.weight": (share,),
            layer + "self_attn.wq.weight": (heads * head, share),
        }
        if i in sparse:
            shapes |= {
                layer + "moe.gate.weight": (experts, hidden),
                layer + "moe.gate_proj.weight": (experts, expert, hidden),
                layer + "moe.up_proj.weight": (experts, expert, hidden),
                layer + "moe.down_proj.weight": (experts, hidden, expert),
                **_gated(layer + "share_expert.", hidden, expert, hidden),
            }
        else:
            shapes |= _gated(layer + "mlp.", hidden, inner, hidden)
    save_file(_draw(shapes), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


MAKERS: dict[str, Callable[..., None]] = {
    "qwen3_vl": make_qwen3_vl,
    "qwen3_vl_moe": make_qwen3_vl_moe,
    "qwen3_omni_moe_thinker": make_qwen3_omni,
    "moss_audio": make_moss_audio,
    "step3_text": make_step3_text,
}
"""Maker of a tiny checkpoint, by the model's module name."""


def tiny(model_type: str, folder: Path | None = None, **sizes: int) -> Path:
    """Return the folder of a tiny checkpoint of `model_type`, making it on first use.

    A checkpoint that was left half made is made again: the last file written marks it whole.
    """
    name = "-".join([model_type, *(f"{k}{v}" for k, v in sorted(sizes.items()))])
    path = (folder or cache_folder()) / name
    done = path / ".complete"
    if not done.exists():
        from transformers.utils import logging

        logging.disable_progress_bar()
        path.mkdir(parents=True, exist_ok=True)
        MAKERS[model_type](path, **sizes)
        done.touch()
    return path
