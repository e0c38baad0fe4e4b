"""Tiny Qwen3-VL, -MoE and Qwen3-Omni checkpoints, initialised and saved by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .making import Example, chat_template, draw, make_tokenizer, text_configuration, write

VISION_MARKS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
OMNI_MARKS = {**VISION_MARKS, "audio": "<|audio_start|><|audio_pad|><|audio_end|>"}


def _save_hf(model, folder: Path, tokenizer, publish: Callable[[str, Any], tuple[str, Any]] | None = None) -> None:
    """Save a transformers model with drawn weights; `publish` maps a name and a tensor to what is published."""
    from safetensors.torch import load_file, save_file

    model = model.float()
    model.load_state_dict(draw({name: weight.shape for name, weight in model.named_parameters()}), strict=False)
    model.save_pretrained(folder)
    if publish:
        path = folder / "model.safetensors"
        save_file(dict(publish(name, weight) for name, weight in load_file(path).items()), path, {"format": "pt"})
    tokenizer.save_pretrained(folder)


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


def _write_processor(folder: Path, marks: Mapping[str, str], processor: str, **more: Any) -> None:
    """Write the processor's files for pictures and video; `more` goes into the first one."""
    pixels = {
        "processor_class": processor,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    write(
        folder / "preprocessor_config.json",
        {
            **pixels,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
            **more,
        },
    )
    write(
        folder / "video_preprocessor_config.json",
        {
            **pixels,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 8 * 128 * 128},
        },
    )
    write(folder / "chat_template.json", {"chat_template": chat_template(marks)})


def make_qwen3_vl(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = make_tokenizer(VISION_MARKS)
    config = Qwen3VLConfig(
        text_config=text_configuration(tokenizer, layers), vision_config=_vision(levels), **_vision_ids(tokenizer)
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    _save_hf(Qwen3VLForConditionalGeneration(config), folder, tokenizer)
    _write_processor(folder, VISION_MARKS, "Qwen3VLProcessor")


def make_qwen3_vl_moe(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-VL-MoE: four experts a layer, two of them used a token."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, __version__

    transposed = int(__version__.partition(".")[0]) >= 5
    tokenizer = make_tokenizer(VISION_MARKS)
    config = Qwen3VLMoeConfig(
        text_config=text_configuration(tokenizer, layers, **_EXPERTS),
        vision_config=_vision(levels),
        **_vision_ids(tokenizer),
    )
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]

    def publish(name: str, weight: Any) -> tuple[str, Any]:
        # From 5 on transformers multiplies by the transposed experts of the published checkpoints.
        return name, weight.transpose(1, 2).contiguous() if transposed and ".experts." in name else weight

    _save_hf(Qwen3VLMoeForConditionalGeneration(config), folder, tokenizer, publish)
    _write_processor(folder, VISION_MARKS, "Qwen3VLProcessor")


def make_qwen3_omni(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-Omni: the thinker's weights, which are all that vLLM loads."""
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

    tokenizer = make_tokenizer(OMNI_MARKS)
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
            "text_config": text_configuration(tokenizer, layers, **_EXPERTS),
            "vision_config": {**_vision(levels), "image_size": 128, "apply_vit_abs_pos_embed": True},
            "audio_config": {
                "num_mel_bins": 128,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "d_model": 64,
                "output_dim": 64,
                "downsample_hidden_size": 16,
                "n_window": 50,
                "n_window_infer": 800,
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
        OMNI_MARKS,
        "Qwen3OmniMoeProcessor",
        feature_extractor_type="WhisperFeatureExtractor",
        feature_size=128,
        sampling_rate=16000,
        hop_length=160,
        n_fft=400,
        chunk_length=30,
    )


_VISION_PROMPTS = ("picture", "pictures", "video", "videos", "large")

QWEN3_VL = Example(make_qwen3_vl, VISION_MARKS, _VISION_PROMPTS)
QWEN3_VL_MOE = Example(make_qwen3_vl_moe, VISION_MARKS, _VISION_PROMPTS)
QWEN3_OMNI = Example(make_qwen3_omni, OMNI_MARKS, (*_VISION_PROMPTS, "sound", "sounds"), ("talkie", "sound"))
