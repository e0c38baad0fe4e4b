"""What the cells of `test_features.py` ask of an engine: called in the forked cell, named by `Cell.call`.

Each function takes the engine and the cell, and returns parts by name: `{"tokens": [[id, ...] a prompt], "logprobs":
the same shape, in nats}`, or `{"vectors": [[number, ...] a prompt]}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import LLM, PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from vllm_pp_fixes.demo.engine import Cell
from vllm_pp_fixes.demo.examples import EXAMPLES
from vllm_pp_fixes.demo.make_qwen3 import VISION_MARKS
from vllm_pp_fixes.demo.prompts import picture, prompt

Part = dict[str, Any]
OTHER = "reloaded"
"""Ends the name of a checkpoint's twin with other weights."""
ADAPTER = "adapter"
"""Folder beside the weights with a LoRA adapter."""
SCHEMA = {
    "joint_schema": {
        "question_types": [1, 0],
        "question_spans": [[-12, -9], [-5, -3]],
        "option_spans": [[-9, -7], [-7, -6], [-6, -5], [-3, -2], [-2, -1]],
        "option_counts": [3, 2],
    }
}
"""Two questions on the last tokens of a prompt, with three options and two."""
CHOICES = ["a red sofa", "a window", "two cats"]


def shown(seed: int) -> dict[str, Any]:
    """A question about two pictures; every fourth shows the same first one, inside which a cached prefix then ends."""
    marks, first = VISION_MARKS["image"], picture(20 + seed % 4, 256, 192)
    return {
        "prompt": f"<|im_start|>user\n{marks}{marks}What is in picture {seed}?<|im_end|>\n<|im_start|>assistant\n",
        "multi_modal_data": {"image": [first, picture(40 + seed, 64, 64)]},
    }


def generated(llm: LLM, prompts: list[Any], adapters: Any = None, **sampling: Any) -> Part:
    sampling = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True, **sampling}
    outputs = llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False, lora_request=adapters)
    firsts = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(first.token_ids) for first in firsts],
        "logprobs": [[at[t].logprob for at, t in zip(f.logprobs, f.token_ids, strict=True)] for f in firsts],
        "texts": [first.text for first in firsts],
        "cached": sum(output.num_cached_tokens for output in outputs),
    }


def batches(llm: LLM, cell: Cell) -> dict[str, Part]:
    """The cell's batches, one after the other."""
    marks = EXAMPLES[cell.model_type].marks
    return {" + ".join(batch): generated(llm, [prompt(name, marks) for name in batch]) for batch in cell.batches}


def of_prompts(llm: LLM, prompts: list[Any]) -> Part:
    """Log-probabilities of the prompts' own tokens, from the second on."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "tokens": [list(o.prompt_token_ids[1:]) for o in outputs],
        "logprobs": [
            [at[t].logprob for at, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
            for o in outputs
        ],
    }


def many_at_once_then_more(llm: LLM, cell: Cell) -> dict[str, Part]:
    """Many at once, the same again from the prefix cache, prompts' log-probabilities, structured output, a reload."""
    forty = [shown(seed) for seed in range(40)]
    few = [*forty[:4], prompt("text", VISION_MARKS)]
    parts = {
        "40 at once": generated(llm, forty),
        "again": generated(llm, forty[:8]),
        "of prompts": of_prompts(llm, few),
        "choice": generated(
            llm, few, structured_outputs=StructuredOutputsParams(choice=CHOICES), ignore_eos=False, max_tokens=32
        ),
    }
    for name, path in (("reloaded, others", Path(f"{cell.model}-{OTHER}")), ("reloaded, the same", Path(cell.model))):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()
        parts[name] = generated(llm, few)
    return parts


def with_adapter(llm: LLM, cell: Cell) -> dict[str, Part]:
    """The same prompts with the LoRA adapter and without, in one batch and each alone."""
    adapter = LoRARequest("tiny", 1, str(Path(cell.model) / ADAPTER))
    prompts = [prompt(name, VISION_MARKS) for name in ("text", "picture", "pictures", "video")]
    return {
        "with": generated(llm, prompts, [adapter] * len(prompts)),
        "without": generated(llm, prompts),
        "both": generated(llm, prompts * 2, [adapter] * len(prompts) + [None] * len(prompts)),
    }


def drafted(llm: LLM, cell: Cell) -> dict[str, Part]:
    """The batches, of more tokens each; and how many were drafted and accepted over all of them."""
    marks = EXAMPLES[cell.model_type].marks
    parts = {
        " + ".join(batch): generated(llm, [prompt(name, marks) for name in batch], max_tokens=cell.max_tokens)
        for batch in cell.batches
    }
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec_decode_num" in metric.name and hasattr(metric, "value")
    }
    return {**parts, "counts": counts}


def pooled(llm: LLM, cell: Cell) -> dict[str, Part]:
    """What the pooler makes of each prompt: one vector, or one a token."""
    marks, task, parts = EXAMPLES[cell.model_type].marks, llm.pooling_task, {}
    # A score without the activation that squeezes it: what is lost shows.
    extra: dict[str, Any] = {"use_activation": False} if task.endswith("classify") else {}
    if task == "token_classify":
        extra["extra_kwargs"] = SCHEMA
    for batch in cell.batches:
        outputs = llm.encode(
            [prompt(name, marks) for name in batch],
            PoolingParams(**extra),
            pooling_task=task,
            use_tqdm=False,
        )
        parts[" + ".join(batch)] = {"vectors": [output.outputs.data.flatten().tolist() for output in outputs]}
    return parts
