"""What the makers of tiny checkpoints share: tokenizer, weights, the text model's configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Example:
    """A model in small: how its checkpoint is made, how it is asked, how its engine is started."""

    make: Callable[..., None]
    """Writes a checkpoint into a folder; takes sizes by name."""
    marks: Mapping[str, str]
    """What stands in a prompt for one item of each modality."""
    media: tuple[str, ...]
    """Prompts (keys of `PROMPTS`) beyond text, the telling one first."""
    alone: tuple[str, ...] = ()
    """Prompts to ask in a batch of their own too (`talkie` only so: where a chunk ends inside it, upstream's answer
    moves, at one stage too)."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM` without which it does not load."""
    wrong_when_traced: bool = False
    """Upstream is wrong at one stage too, once the model is compiled: only its eager answers are a reference."""


def chat_template(marks: Mapping[str, str]) -> str:
    """Return a chat template that shows media by these marks."""
    template = _CHAT_TEMPLATE
    for kind in ("image", "video", "audio"):
        template = template.replace(kind.upper(), marks.get(kind, ""))
    return template


def make_tokenizer(marks: Mapping[str, str]):
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
    tokenizer.chat_template = chat_template(marks)
    return tokenizer


def draw(shapes: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
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


def text_configuration(tokenizer, layers: int, **more: Any) -> dict[str, Any]:
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
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        **more,
    }


def write(path: Path, content: dict) -> None:
    """Write `content` as JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")
