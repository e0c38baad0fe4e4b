"""What an engine is asked: text, pictures, video and sound, each made from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def picture(seed: int, width: int = 96, height: int = 64):
    """Return a PIL image of noise blocks, `height` x `width` pixels, the same for the same arguments."""
    import numpy as np
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(8, 0).repeat(8, 1))


def video(seed: int, frames: int = 4, size: int = 64):
    """Return `(frames, metadata)` as vLLM takes a video: uint8 `(frames, size, size, 3)`, not to be sampled again."""
    import numpy as np

    pixels = np.stack([np.asarray(picture(seed + i, size, size)) for i in range(frames)])
    return pixels, {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def sound(seed: int, seconds: float = 1.5):
    """Return `(samples, 16000)`: tones that change every tenth of a second, over noise; float32 in steps of 16 bits."""
    import numpy as np

    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * 16000)) / 16000
    pitch = random.uniform(100, 3000, int(seconds * 10) + 1)[(time * 10).astype(int)]
    wave = np.sin(2 * np.pi * pitch * time) / 2 + random.normal(0, 0.05, time.size)
    return (np.round(wave * 32767) / 32768).astype(np.float32), 16000


_Question = tuple[str, dict[str, Any]]

PROMPTS: dict[str, Callable[[], _Question]] = {
    "text": lambda: ("Pipeline parallelism splits the layers", {}),
    "text2": lambda: ("What is a stage? Describe.", {}),
    "text3": lambda: ("How many people walk from left to right beside the open window? " * 4, {}),
    "picture": lambda: ("What is in this picture?", {"image": picture(1)}),
    "picture2": lambda: ("Describe the picture", {"image": picture(2, 64, 128)}),
    "pictures": lambda: ("How many cats?", {"image": [picture(3), picture(4, 128, 64), picture(5, 64, 64)]}),
    "video": lambda: ("Describe the video", {"video": video(6)}),
    "videos": lambda: ("Describe both videos", {"video": [video(14), video(15, 2, 96)]}),
    "scene": lambda: ("Look at the door behind the table in this video. |Who is there?", {"video": video(17, 8, 96)}),
    "large": lambda: ("What is in this picture?", {"image": picture(7, 256, 192)}),
    "sound": lambda: ("What do you hear?", {"audio": sound(8)}),
    "sound2": lambda: ("What do you hear?", {"audio": sound(9, 4.0)}),
    "sounds": lambda: ("Which is longer?", {"audio": [sound(10, 1.1), sound(11, 2.2)]}),
    "talkie": lambda: ("What?", {"video": [video(12)], "audio": [sound(13, 1.0)]}),
}
"""Questions by name: the text, and media by modality, each made from a seed of its own. Media stand before the text,
or in it where it has a bar: vLLM fails to prune a video that less text precedes than its first timestamp has tokens.

In `talkie` the sound is the video's own. No sound is shorter than a second: Qwen3-Omni's encoder pads the last piece
of a second to the longest that it encodes beside it, so that a shorter one's answers move with its neighbours."""


def prompt(name: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """Return the prompt `name` as `vllm.LLM.generate` takes it; `embeds` is one of embeddings, of hidden size 64.

    `marks` is what stands in a prompt for one item of each modality.
    """
    if name == "embeds":
        import torch

        return {"prompt_embeds": torch.randn(9, 64, generator=torch.Generator().manual_seed(16)) * 0.25}
    text, media = PROMPTS[name]()
    shown = {kind: items for kind, items in media.items() if not (name == "talkie" and kind == "audio")}
    shown_as = "".join(marks[kind] * (len(items) if isinstance(items, list) else 1) for kind, items in shown.items())
    before, _, after = text.rpartition("|")
    asked = f"{before}{shown_as}{after}"
    made: dict[str, Any] = {"prompt": f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"}
    if media:
        made["multi_modal_data"] = media
    if name == "talkie":
        made["mm_processor_kwargs"] = {"use_audio_in_video": True}
    return made
