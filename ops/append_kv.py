"""append_kv: rotate the queries and keys of new tokens (RoPE, arXiv 2104.09864), and write the keys and the values into
the caches, at each row's own position.

One kernel for what would be three: beside the small products of a step, launches are what costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.checks import FLOATS, check_heads, check_rows
from dustin_compile.ops.dependent_launch import can_overlap, follow_previous


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, H, D] in fp32."""
    low, high = x.float().chunk(2, dim=-1)
    return x * cos[:, :, None].float() + torch.cat((-high, low), dim=-1) * sin[:, :, None].float()


def append_kv_reference(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    start: Tensor,
) -> Tensor:  # fmt: skip
    """The op on any device; it reads the lengths, so it can refuse what does not fit, and computes in fp32."""
    tokens, capacity = key.shape[1], key_cache.shape[1]
    starts = start.tolist()
    for row, first in enumerate(starts):
        if first < 0 or first + tokens > capacity:
            raise ValueError(f"start[{row}] = {first}: {tokens} tokens from there do not fit in {capacity} positions")
    rotated = _rotate_reference(key, cos, sin).to(key_cache.dtype)
    for row, first in enumerate(starts):
        key_cache[row, first : first + tokens] = rotated[row]
        value_cache[row, first : first + tokens] = value[row]
    return _rotate_reference(query, cos, sin).to(query.dtype).contiguous()


@triton.jit
def _rotate(x, stride_h, head, dim, mask, cos_low, cos_high, sin_low, sin_high, HALF: tl.constexpr):
    """Both halves of rotated heads; x points at the first head of a token."""
    low = tl.load(x + head * stride_h + dim, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + head * stride_h + HALF + dim, mask=mask, other=0.0).to(tl.float32)
    return low * cos_low - high * sin_low, high * cos_high + low * sin_high


@triton.jit
def _append_kv_kernel(
    key_cache, value_cache, query, key, value, cos, sin, start, rotated, tokens, capacity,
    key_cache_stride_b, key_cache_stride_n, key_cache_stride_h,
    value_cache_stride_b, value_cache_stride_n, value_cache_stride_h,
    query_stride_b, query_stride_t, query_stride_h, key_stride_b, key_stride_t, key_stride_h,
    value_stride_b, value_stride_t, value_stride_h, cos_stride_b, cos_stride_t, sin_stride_b, sin_stride_t,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, i) takes the i-th BLOCK_H of the token's heads: first query heads, then key/value heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    follow_previous(OVERLAP)
    row, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    in_half = dim < HALF
    cos += row * cos_stride_b + token * cos_stride_t + dim
    sin += row * sin_stride_b + token * sin_stride_t + dim
    cos_low, cos_high = tl.load(cos, mask=in_half, other=0.0), tl.load(cos + HALF, mask=in_half, other=0.0)
    sin_low, sin_high = tl.load(sin, mask=in_half, other=0.0), tl.load(sin + HALF, mask=in_half, other=0.0)
    cos_low, cos_high = cos_low.to(tl.float32), cos_high.to(tl.float32)
    sin_low, sin_high = sin_low.to(tl.float32), sin_high.to(tl.float32)
    query_blocks = tl.cdiv(QUERY_HEADS, BLOCK_H)
    block = tl.program_id(1)
    # A name in both branches would have to be of one type.
    if block < query_blocks:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        mask = (head < QUERY_HEADS) & in_half
        token_query = query + row * query_stride_b + token * query_stride_t
        low, high = _rotate(token_query, query_stride_h, head, dim, mask, cos_low, cos_high, sin_low, sin_high, HALF)
        place = rotated + ((row * tokens + token) * QUERY_HEADS + head) * HEAD_DIM + dim
        tl.store(place, low.to(rotated.dtype.element_ty), mask=mask)
        tl.store(place + HALF, high.to(rotated.dtype.element_ty), mask=mask)
    else:
        kv_head = ((block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        read = (kv_head < KV_HEADS) & in_half
        position = tl.load(start + row) + token
        write = read & (kv_head < tl.where((position >= 0) & (position < capacity), KV_HEADS, 0))  # else no head at all
        token_key = key + row * key_stride_b + token * key_stride_t
        k_low, k_high = _rotate(token_key, key_stride_h, kv_head, dim, read, cos_low, cos_high, sin_low, sin_high, HALF)
        new_value = value + row * value_stride_b + token * value_stride_t + kv_head * value_stride_h + dim
        v_low, v_high = tl.load(new_value, mask=read), tl.load(new_value + HALF, mask=read)
        key_slot = key_cache + row * key_cache_stride_b + position * key_cache_stride_n
        key_slot += kv_head * key_cache_stride_h + dim
        value_slot = value_cache + row * value_cache_stride_b + position * value_cache_stride_n
        value_slot += kv_head * value_cache_stride_h + dim
        tl.store(key_slot, k_low.to(key_cache.dtype.element_ty), mask=write)
        tl.store(key_slot + HALF, k_high.to(key_cache.dtype.element_ty), mask=write)
        tl.store(value_slot, v_low, mask=write)
        tl.store(value_slot + HALF, v_high, mask=write)


def append_kv_triton(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    start: Tensor,
) -> Tensor:  # fmt: skip
    """The kernel, on CUDA or interpreted. What does not fit is not written."""
    batch, tokens, query_heads, head_dim = query.shape
    kv_heads = key.shape[2]
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block_d = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(query_heads), max(1, 1024 // block_d))
    blocks = triton.cdiv(query_heads, block_h) + triton.cdiv(kv_heads, block_h)
    overlap = can_overlap(query.device)
    _append_kv_kernel[(batch * tokens, blocks)](
        key_cache, value_cache, query, key, value, cos, sin, start, rotated, tokens, key_cache.shape[1],
        *key_cache.stride()[:3], *value_cache.stride()[:3], *query.stride()[:3], *key.stride()[:3],
        *value.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
        query_heads, kv_heads, head_dim, block_h, block_d, overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return rotated


@torch.library.custom_op("dustin_compile::append_kv", mutates_args=("key_cache", "value_cache"))
def _append_kv(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    start: Tensor,
) -> Tensor:  # fmt: skip
    if key_cache.is_cuda:
        with torch.cuda.device_of(key_cache):
            return append_kv_triton(key_cache, value_cache, query, key, value, cos, sin, start)
    return append_kv_reference(key_cache, value_cache, query, key, value, cos, sin, start)


@_append_kv.register_fake
def _(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    start: Tensor,
) -> Tensor:  # fmt: skip
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def append_kv(
    key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    start: Tensor,
) -> Tensor:  # fmt: skip
    """Rotate new queries and keys, and write token t of row b at position start[b] + t of both caches, in place.

    x becomes x * cos + rotate_half(x) * sin, as in transformers' `apply_rotary_pos_emb`, rounded once.

    Args:
        key_cache, value_cache: [B, N, Hkv, D] fp32, fp16 or bf16, D even, last dimension contiguous; changed.
        query: [B, T, Hq, D], dtype of the caches, last dimension contiguous.
        key, value: [B, T, Hkv, D], likewise.
        cos, sin: [B, T, D] of the tokens' positions, dtype of the caches, last dimension contiguous.
        start: [B] int32.

    Returns:
        The rotated queries, [B, T, Hq, D] contiguous.

    Raises:
        ValueError: a shape, device or layout is wrong; on CPU also when start[b] + T > N. On CUDA, where looking would
            stall the device, tokens past the cache are dropped instead.
        TypeError: a dtype is wrong.
    """
    check_heads("key_cache", key_cache, [None, None, None, None], FLOATS, key_cache.device)
    check_heads("value_cache", value_cache, key_cache.shape, [key_cache.dtype], key_cache.device)
    batch, _, heads, head_dim = key_cache.shape
    if head_dim % 2:
        raise ValueError(f"key_cache must have an even head_dim, got {head_dim}")
    check_heads("query", query, [batch, None, None, head_dim], [key_cache.dtype], key_cache.device)
    tokens = query.shape[1]
    check_heads("key", key, [batch, tokens, heads, head_dim], [key_cache.dtype], key_cache.device)
    check_heads("value", value, key.shape, [key_cache.dtype], key_cache.device)
    check_heads("cos", cos, [batch, tokens, head_dim], [key_cache.dtype], key_cache.device)
    check_heads("sin", sin, cos.shape, [key_cache.dtype], key_cache.device)
    check_rows("start", start, batch, key_cache.device)
    return _append_kv(key_cache, value_cache, query, key, value, cos, sin, start)
