"""append_kv: write the keys and values of new tokens into the caches, at each row's own position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.checks import FLOATS, check_heads, check_rows


def append_kv_reference(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, start: Tensor) -> None:
    """The op on any device; it reads the lengths, so it can refuse what does not fit."""
    tokens, capacity = key.shape[1], key_cache.shape[1]
    starts = start.tolist()
    for row, first in enumerate(starts):
        if first < 0 or first + tokens > capacity:
            raise ValueError(f"start[{row}] = {first}: {tokens} tokens from there do not fit in {capacity} positions")
    for row, first in enumerate(starts):
        key_cache[row, first : first + tokens] = key[row]
        value_cache[row, first : first + tokens] = value[row]


@triton.jit
def _append_kv_kernel(
    key_cache, value_cache, key, value, start, tokens, capacity,
    key_cache_stride_b, key_cache_stride_n, key_cache_stride_h,
    value_cache_stride_b, value_cache_stride_n, value_cache_stride_h,
    key_stride_b, key_stride_t, key_stride_h, value_stride_b, value_stride_t, value_stride_h,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    position = tl.load(start + row) + token
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (dim < HEAD_DIM)
    inside = mask & (head < tl.where((position >= 0) & (position < capacity), HEADS, 0))  # outside, no head is written
    new_key = tl.load(key + row * key_stride_b + token * key_stride_t + head * key_stride_h + dim, mask=mask)
    new_value = tl.load(value + row * value_stride_b + token * value_stride_t + head * value_stride_h + dim, mask=mask)
    key_slot = row * key_cache_stride_b + position * key_cache_stride_n + head * key_cache_stride_h
    value_slot = row * value_cache_stride_b + position * value_cache_stride_n + head * value_cache_stride_h
    tl.store(key_cache + key_slot + dim, new_key, mask=inside)
    tl.store(value_cache + value_slot + dim, new_value, mask=inside)


def append_kv_triton(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, start: Tensor) -> None:
    """The kernel, on CUDA or interpreted. What does not fit is not written."""
    batch, tokens, heads, head_dim = key.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, 1024 // block_d))
    _append_kv_kernel[(batch * tokens, triton.cdiv(heads, block_h))](
        key_cache, value_cache, key, value, start, tokens, key_cache.shape[1],
        *key_cache.stride()[:3], *value_cache.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        heads, head_dim, block_h, block_d, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("dustin_compile::append_kv", mutates_args=("key_cache", "value_cache"))
def _append_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, start: Tensor) -> None:
    if key_cache.is_cuda:
        with torch.cuda.device_of(key_cache):
            append_kv_triton(key_cache, value_cache, key, value, start)
    else:
        append_kv_reference(key_cache, value_cache, key, value, start)


@_append_kv.register_fake
def _(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, start: Tensor) -> None:
    return None


def append_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, start: Tensor) -> None:
    """Write token t of row b at position start[b] + t of both caches, in place.

    Args:
        key_cache, value_cache: [B, N, Hkv, D] fp32, fp16 or bf16, last dimension contiguous; changed.
        key, value: [B, T, Hkv, D], dtype of the caches, last dimension contiguous.
        start: [B] int32.

    Raises:
        ValueError: a shape, device or layout is wrong; on CPU also when start[b] + T > N. On CUDA, where looking would
            stall the device, tokens past the cache are dropped instead.
        TypeError: a dtype is wrong.
    """
    check_heads("key_cache", key_cache, [None, None, None, None], FLOATS, key_cache.device)
    check_heads("value_cache", value_cache, key_cache.shape, [key_cache.dtype], key_cache.device)
    batch, _, heads, head_dim = key_cache.shape
    check_heads("key", key, [batch, None, heads, head_dim], [key_cache.dtype], key_cache.device)
    check_heads("value", value, key.shape, [key_cache.dtype], key_cache.device)
    check_rows("start", start, batch, key_cache.device)
    _append_kv(key_cache, value_cache, key, value, start)
