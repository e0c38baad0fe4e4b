"""Tiny MOSS-Audio and Step3 checkpoints, written name by name: transformers has no class for them."""

from __future__ import annotations

from pathlib import Path

from .making import Example, draw, make_tokenizer, text_configuration, write

SOUND_MARKS = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
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

    tokenizer = make_tokenizer(SOUND_MARKS)
    text = text_configuration(tokenizer, layers, rope_scaling=None)
    width, hidden, inner, heads, mel, channels, depth = 64, 64, 128, 4, 128, 16, max(4, levels)
    write(
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
    write(
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
            shapes[f"{layer}self_attn.{name}.weight"] = width, width
            if name != "k_proj":
                shapes[f"{layer}self_attn.{name}.bias"] = (width,)
        for name, shape in {"fc1": (inner, width), "fc2": (width, inner)}.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{layer}{name}.weight": (width,), f"{layer}{name}.bias": (width,)}
    shapes |= _gated("audio_adapter.", width, inner, hidden)
    for i in range(injected or levels):
        shapes |= _gated(f"deepstack_audio_merger_list.{i}.", width, inner, hidden)
    save_file(draw(shapes), folder / "model.safetensors", {"format": "pt"})
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

    tokenizer = make_tokenizer({})
    hidden, heads, head, share, inner, expert, experts = 64, 4, 32, 64, 128, 32, 4
    sparse = list(range(2, layers))
    write(
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
    save_file(draw(shapes), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)


MOSS_AUDIO = Example(
    make_moss_audio,
    SOUND_MARKS,
    ("sound", "sounds", "sound2"),
    engine={"trust_remote_code": True},
    wrong_when_traced=True,
)
STEP3_TEXT = Example(make_step3_text, {}, ("text3",))
