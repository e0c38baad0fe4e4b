"""Tiny checkpoints beyond those of the demo, each made from one of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_pp_fixes.demo.making import draw

from .features import ADAPTER, OTHER

WEIGHTS = "model.safetensors"
TEXT, TOWER = ".language_model.layers.", ".visual.blocks."
DRAFT = "draft"
"""Folder beside the weights with an EAGLE-3 draft."""
ADAPTED = "q_proj", "v_proj", "o_proj", "down_proj"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def tied(folder: Path, levels: tuple[str, ...] = ("", "text_config"), copied: bool = False) -> None:
    """The output layer is the embeddings: not in the checkpoint, or, `copied`, there as well.

    `tie_word_embeddings` stands at `levels` of the configuration. Beside it stand other weights of the same shapes.
    """
    weights = load_file(folder / WEIGHTS)
    del weights["lm_head.weight"]
    if copied:
        weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_file(weights, folder / WEIGHTS, {"format": "pt"})

    def say(config: dict[str, Any]) -> None:
        for level in ("", "text_config"):
            at = config[level] if level else config
            at.pop("tie_word_embeddings", None)
            if level in levels:
                at["tie_word_embeddings"] = True

    edit(folder / "config.json", say)
    twin = folder.with_name(f"{folder.name}-{OTHER}")
    shutil.copytree(folder, twin)
    save_file(draw({n: w.shape for n, w in weights.items()}, seed=1), twin / WEIGHTS, {"format": "pt"})


def with_adapter(folder: Path, part: str = TEXT, modules: tuple[str, ...] = ADAPTED) -> None:
    """A LoRA adapter beside the weights, on some of the linear layers of each layer of the text model or the tower."""
    rank, shapes = 8, {}
    for name, weight in load_file(folder / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if part in module and module.endswith(modules):
            outputs, inputs = weight.shape
            shapes[f"base_model.model.{module}.lora_A.weight"] = rank, inputs
            shapes[f"base_model.model.{module}.lora_B.weight"] = outputs, rank
    (folder / ADAPTER).mkdir()
    save_file(draw(shapes, seed=2), folder / ADAPTER / "adapter_model.safetensors", {"format": "pt"})
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": [*modules]}
    (folder / ADAPTER / "adapter_config.json").write_text(json.dumps(said))


def in_eight_bits(folder: Path) -> None:
    """The text layers' linear weights in eight bits, a scale a row; activations are scaled token by token."""
    weights: dict[str, Any] = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        if ".language_model.layers." in name and name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scale).round().to(torch.int8)
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = weight
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    how = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**bits, "symmetric": False, "strategy": "token", "dynamic": True},
            }
        },
    }
    edit(folder / "config.json", lambda config: config.update(quantization_config=how))


def colqwen3(folder: Path) -> None:
    """A ColQwen3: a Qwen3-VL that projects each token's hidden state."""
    weights = load_file(folder / WEIGHTS)
    save_file({**weights, **draw({"custom_text_proj.weight": (32, 64)})}, folder / WEIGHTS, {"format": "pt"})
    said = {"architectures": ["ColQwen3"], "model_type": "colqwen3", "embed_dim": 32}
    edit(folder / "config.json", lambda config: config.update(said))


def cosmos3(folder: Path) -> None:
    """A Cosmos3: a Qwen3-VL whose weights are named without prefixes, text and tower in folders of their own."""
    parts: dict[str, dict[str, Any]] = {"transformer": {}, "vision_encoder": {}}
    for name, weight in load_file(folder / WEIGHTS).items():
        part = "vision_encoder" if ".visual." in name else "transformer"
        parts[part][re.sub(r"^model\.(language_model|visual)\.", "", name)] = weight
    (folder / WEIGHTS).unlink()
    for part, weights in parts.items():
        (folder / part).mkdir()
        save_file(weights, folder / part / WEIGHTS, {"format": "pt"})
    said = {"architectures": ["Cosmos3ForConditionalGeneration"], "model_type": "cosmos3_omni"}
    edit(folder / "config.json", lambda config: config.update(said))


def clef_omni(folder: Path) -> None:
    """A Clef-Omni: a Qwen3-Omni with a head beside it that scores the options of questions."""
    from vllm.model_executor.models.clef_omni import JOINT_HEAD_WEIGHTS, JointSchemaHead

    head = {"hidden_size": 64, "width": 32, "routing_layers": 1, "layers": 1, "heads": 2, "feedforward": 64}
    shapes = {name: weight.shape for name, weight in JointSchemaHead(**head).state_dict().items()}
    save_file(draw(shapes, seed=3), folder / JOINT_HEAD_WEIGHTS, {"format": "pt"})
    (folder / "joint_head_config.json").write_text(json.dumps(head))
    # As published: an index names the thinker's files, so that the head's is not read among them.
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def variant(base: Path, name: str, change: Callable[[Path], None]) -> Path:
    """Return a changed copy of a checkpoint, made on first use."""
    copy = base.with_name(f"{base.name}-{name}")
    if not copy.exists():
        shutil.copytree(base, copy)
        change(copy)
    return copy


def speculating(model: Path, method: str = "eagle3") -> dict[str, Any]:
    """Return the arguments of an engine that has the draft beside the weights guess two tokens a step."""
    draft = {"method": method, "model": str(model / DRAFT), "num_speculative_tokens": 2}
    return {"speculative_config": draft, "disable_log_stats": False}


HIDDEN, HEADS, DIM, INNER = 64, 4, 32, 128
"""Of a draft's one layer."""


def with_draft(folder: Path) -> None:
    """An EAGLE-3 draft beside the weights: the sum of its states, put through the target's own output layer.

    So it proposes what the target said last, which is right now and then.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    made = {name: weight * 0.1 for name, weight in draw(shapes, seed=5).items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        made[f"{name}.weight"] = torch.ones(HIDDEN)
    said = {"model_type": "llama", "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    _save_draft(folder, "Eagle3Qwen3vlForCausalLM", made, said)


def with_dflash(folder: Path) -> None:
    """A DFlash draft beside the weights: it attends to the states of the nearest tokens, and proposes what those say.

    Queries and keys are constant, so that the distance alone counts; the tokens of the query add nothing of their own.
    """
    attention, identity = "layers.0.self_attn", torch.eye(HEADS * DIM)
    made = {f"{attention}.{part}_proj.weight": torch.zeros(HEADS * DIM, HIDDEN) for part in "qk"}
    made |= {f"{attention}.{part}_proj.bias": torch.ones(HEADS * DIM) for part in "qk"}
    made |= {f"{attention}.{part}_norm.weight": torch.full((DIM,), 2.0) for part in "qk"}
    made[f"{attention}.v_proj.weight"] = identity[:, :HIDDEN].clone()
    made[f"{attention}.o_proj.weight"] = identity[:HIDDEN].clone()
    made |= {f"{attention}.v_proj.bias": torch.zeros(HEADS * DIM), f"{attention}.o_proj.bias": torch.zeros(HIDDEN)}
    shapes: dict[str, tuple[int, ...]] = {
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    made |= {name: weight * 0.1 for name, weight in draw(shapes, seed=5).items()}
    made["layers.0.input_layernorm.weight"] = torch.zeros(HIDDEN)
    for name in ("layers.0.post_attention_layernorm", "hidden_norm", "norm"):
        made[f"{name}.weight"] = torch.ones(HIDDEN)
    # The ids count the layers that a state leaves, the other draft's those that it enters.
    flash = {"target_layer_ids": [0, 2, 4], "mask_token_id": MASK}
    said = {"model_type": "qwen3", "dflash_config": flash, "is_causal": True, "attention_bias": True}
    _save_draft(folder, "DFlashDraftModel", made, said)


MASK = 0
"""The token that stands for one to be guessed; no prompt has it."""


def _save_draft(folder: Path, architecture: str, made: dict[str, torch.Tensor], said: dict[str, Any]) -> None:
    """Save a draft of three states, the last of which weighs most, with the target's own embedding and output layer."""
    weights, draft = load_file(folder / WEIGHTS), folder / DRAFT
    made["fc.weight"] = torch.cat([torch.eye(HIDDEN) * weight for weight in (0.3, 0.3, 1.0)], 1)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        made[name] = next(weight for each, weight in weights.items() if each.endswith(name)).clone()
    if "dflash_config" in said:
        made["embed_tokens.weight"][MASK] = 0
    draft.mkdir()
    save_file(made, draft / WEIGHTS, {"format": "pt"})
    rows = made["lm_head.weight"].shape[0]
    shape = {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "vocab_size": rows,
        "draft_vocab_size": rows,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (draft / "config.json").write_text(json.dumps(shape | said))
