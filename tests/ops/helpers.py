"""What the op tests share: one error metric, fp64 references, and ways to lay a cache out in memory."""

import math
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (FP32, FP16, BF16)
HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS = ((9, 3), (28, 4), (8, 1), (4, 4))  # query heads, key/value heads
INTERPRETED_LAYOUTS = ((FP32, "contiguous"), (FP32, "heads_first"), (FP16, "sliced"))
HEADS_AND_DIMS = tuple(zip((*HEADS, (64, 8)), HEAD_DIMS, strict=True))  # each kernel variant compiles for seconds
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 5e-3}
INTERPRETED = (FP32, FP16)  # Triton's interpreter multiplies bf16 wrongly, without an error
GARBAGE = (1e4, float("nan"))
MAP_NORESERVE = 0x4000  # Linux's; Python names it from 3.13 on
LAYOUTS = ("contiguous", "heads_first", "sliced")
gpu = pytest.mark.gpu  # tests/conftest.py skips these without a CUDA device


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative Frobenius error; a NaN or an infinity on either side never passes."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    error, size = (actual - expected).norm().item(), expected.norm().item()
    assert math.isfinite(size)
    assert error <= tolerance * size, f"relative error {error / size if size else error:.3g} > {tolerance:.3g}"


def ints(*values: int) -> Tensor:
    """int32 on the device, as lengths are."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def queries(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """[B, T, H, D] as a model hands it over: the transposed view of [B, H, T, D]."""
    return randn(batch, heads, tokens, dim, dtype=dtype, seed=seed).transpose(1, 2)


def cache(
    batch: int,
    capacity: int,
    heads: int,
    dim: int,
    dtype: torch.dtype = FP32,
    layout: str = "contiguous",
    seed: int = 1,
) -> Tensor:
    """[B, N, Hkv, D] random, in one of LAYOUTS."""
    content = randn(batch, capacity, heads, dim, dtype=dtype, seed=seed)
    if layout == "contiguous":
        return content
    if layout == "heads_first":
        return content.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((batch, capacity + 2, heads + 1, dim + 16), float("nan"), dtype=dtype, device=DEVICE)
    view = wide[:, 1 : 1 + capacity, 1:, 16:]
    view.copy_(content)
    return view


def far_apart(shape: tuple[int, ...], far: int, dtype: torch.dtype = FP16) -> Tensor:
    """Random, with 2^30 elements between neighbours of dimension `far`, so that the third lies past 2^31.

    There are as many in front: an offset that wraps to a negative int32 reads zeros instead of crashing. On CPU the
    memory is mapped but, but for a few pages, never touched.
    """
    near = [1] * len(shape)
    for dimension in reversed(range(len(shape) - 1)):
        near[dimension] = near[dimension + 1] * shape[dimension + 1]
    strides = [2**30 if dimension == far else stride for dimension, stride in enumerate(near)]
    elements = 2**31 + shape[far] * 2**30
    if CUDA:
        memory = torch.zeros(elements, dtype=dtype, device=DEVICE)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
    view = memory.as_strided(shape, strides, 2**31)
    view.copy_(randn(*shape).to(dtype))
    return view


def exact_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, visible: Tensor, scale: float) -> Tensor:
    """fp64 attention of [B, T, Hq, D] to the positions where visible [B, T, N]; 0 where there are none."""
    group = query.shape[2] // key_cache.shape[2]
    unseen = ~visible.any(1)[:, :, None, None]
    key, value = (x.double().masked_fill(unseen, 0).repeat_interleave(group, 2) for x in (key_cache, value_cache))
    logits = torch.einsum("bthd,bnhd->bhtn", query.double(), key) * scale
    weights = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1).nan_to_num(0)
    return torch.einsum("bhtn,bnhd->bthd", weights, value)


def causal(start: Tensor, tokens: int, capacity: int) -> Tensor:
    """[B, T, N]: position <= start[b] + t."""
    position, token = torch.arange(capacity, device=DEVICE), torch.arange(tokens, device=DEVICE)
    return position <= (start[:, None] + token)[:, :, None]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True)
