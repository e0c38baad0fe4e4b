"""Where the one-process tests run, and how near two answers must be: said here, and nowhere else."""

import os

import torch

DEVICE_ENV, DTYPE_ENV = "VLLM_PP_FIXES_DEVICE", "VLLM_PP_FIXES_DTYPE"

DEVICE = torch.device(os.environ.get(DEVICE_ENV, "cpu"))
DTYPE: torch.dtype = getattr(torch, os.environ.get(DTYPE_ENV, "float32"))

TOLERANCE = 0.0
"""How far two answers may be apart that must be the same. One stage and several run the same kernels on the same
shapes, so bit for bit on the CPU; nothing is known that would make it otherwise on a GPU, and no GPU has run it."""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=TOLERANCE)
