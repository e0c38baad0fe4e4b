"""Tiny checkpoints with real random weights, made on the spot: no download, real loading code.

Six text layers and three DeepStack levels, hidden size 64, float32. Weights are drawn large enough that
losing one level moves log-probabilities by more than 1 (initial weights of 1e-3 would hide every fault).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

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
]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cache_folder() -> Path:
    """Return the folder that holds what the commands make (`XDG_CACHE_HOME` is honoured)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm_pp_fixes"


def _tokenizer():
    """Return a byte-level BPE tokenizer trained on a few sentences, with the model's special tokens."""
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
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _draw_weights(model, seed: int) -> None:
    """Fill `model` in place: norms 1, biases small, everything else normal, scaled by the fan-in of a Linear."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.02, generator=generator)
            else:
                weight.normal_(0.0, 0.25, generator=generator)


def make_qwen3_vl(folder: Path, *, levels: int = 3, layers: int = 6) -> None:
    """Write a tiny Qwen3-VL checkpoint into `folder`: weights (float32), configuration, tokenizer, processor.

    As in published checkpoints, `text_config` names no architecture.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = _tokenizer()
    token = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": max(4, levels),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(levels)),
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    model = Qwen3VLForConditionalGeneration(config).float()
    _draw_weights(model, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = {
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
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        },
    )
    _write(
        folder / "video_preprocessor_config.json",
        {
            **pixels,
            "processor_class": "Qwen3VLProcessor",
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 8 * 128 * 128},
        },
    )
    _write(folder / "chat_template.json", {"chat_template": _CHAT_TEMPLATE})


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


MAKERS: dict[str, Callable[..., None]] = {"qwen3_vl": make_qwen3_vl}
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
