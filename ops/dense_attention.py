"""dense_attention: causal attention of new tokens over a row's whole cache.

One op for decoding (1 token), dense verification (gamma + 1 tokens) and chunked prefill (thousands).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.attention_blocks import (
    LOG2_E,
    Launch,
    attend_block,
    attend_past_and_block,
    choose_splits,
    combine_splits,
    load_packed_queries,
    store_packed_rows,
)
from dustin_compile.ops.checks import check_attention, check_rows
from dustin_compile.ops.dependent_launch import can_overlap, follow_previous


def dense_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, scale: float
) -> Tensor:
    """The op on any device; it reads the lengths, and computes in fp32."""
    tokens = query.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for row, first in enumerate(start.tolist()):
        split, end = first + 1, first + tokens  # before the split, all that the first query and so every query sees
        key, value = key_cache[row], value_cache[row]
        past, block = (key[:split], value[:split]), (key[split:end], value[split:end])
        out[row] = attend_past_and_block(query[row], past, block, scale)
    return out


@triton.jit
def _attend_positions(
    query, key, value, key_stride, value_stride, first, last, end, seen, acc, top, total, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the positions first..last-1 of one head; MASKED: row i sees positions < seen[i], none reaches end."""
    dim = tl.arange(0, BLOCK_D)
    for block in range(first, last, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        readable = (dim < HEAD_DIM)[None, :]
        if MASKED:
            readable = readable & (position < end)[:, None]
        offset = position.to(tl.int64)[:, None]
        if MASKED or HEAD_DIM != BLOCK_D:
            k = tl.load(key + offset * key_stride + dim[None, :], mask=readable, other=0.0)
            v = tl.load(value + offset * value_stride + dim[None, :], mask=readable, other=0.0)
        else:
            k = tl.load(key + offset * key_stride + dim[None, :])
            v = tl.load(value + offset * value_stride + dim[None, :])
        visible = position[None, :] < seen[:, None]
        acc, top, total = attend_block(query, k, v, visible, acc, top, total, scale_log2, MASKED)
    return acc, top, total


@triton.jit
def _dense_attention_kernel(
    query, key_cache, value_cache, start, out, partial, mass, scale_log2, tokens, rows, splits,
    query_stride_b, query_stride_t, query_stride_h, key_stride_b, key_stride_n, key_stride_h,
    value_stride_b, value_stride_n, value_stride_h,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr, UNMASKED_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow_previous(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(2)
    row, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    q, token, head = load_packed_queries(
        query, query_stride_b, query_stride_t, query_stride_h, row, kv_head, tile, tokens,
        GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    key = key_cache + row.to(tl.int64) * key_stride_b + kv_head.to(tl.int64) * key_stride_h
    value = value_cache + row.to(tl.int64) * value_stride_b + kv_head.to(tl.int64) * value_stride_h

    length = tl.load(start + row)
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, tokens - 1)
    end = length + last_token + 1
    share = tl.cdiv(tl.cdiv(end, splits), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, end)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    seen = length + token + 1
    if UNMASKED_FIRST:  # the blocks that every query of the tile sees whole
        whole = tl.minimum(last, length + tile * BLOCK_M // GROUP + 1)
        middle = first + tl.maximum(whole - first, 0) // BLOCK_N * BLOCK_N
        acc, top, total = _attend_positions(
            q, key, value, key_stride_n, value_stride_n, first, middle, end, seen, acc, top, total, scale_log2,
            HEAD_DIM, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
        first = middle
    acc, top, total = _attend_positions(
        q, key, value, key_stride_n, value_stride_n, first, last, end, seen, acc, top, total, scale_log2,
        HEAD_DIM, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip
    store_packed_rows(
        out, partial, mass, acc, top, total, row, token, head, tokens, split, rows,
        KV_HEADS * GROUP, HEAD_DIM, BLOCK_D, WHOLE,
    )  # fmt: skip


def _launch(query_rows: int, block_d: int, dtype: torch.dtype) -> Launch:
    """Tiles whose pipelined keys and values fit shared memory; wgmma (64 query rows or more) holds one more stage."""
    if dtype == torch.float32:  # exact fp32 products run on FMA units: small tiles
        return Launch(16, 32, warps=4, stages=2, resident=1)
    if query_rows > 64:
        return Launch(128, min(128, 2**14 // block_d), warps=8, stages=3 if block_d <= 128 else 2, resident=1)
    block_m = max(16, triton.next_power_of_2(query_rows))
    return Launch(block_m, min(128, 2**13 // block_d), warps=4, stages=3 if block_m == 64 else 4, resident=2)


def dense_attention_triton(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, scale: float
) -> Tensor:
    """The kernel, on CUDA or interpreted."""
    batch, tokens, query_heads, head_dim = query.shape
    capacity, kv_heads = key_cache.shape[1:3]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rows = batch * tokens * query_heads
    group = query_heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch = _launch(tokens * group, block_d, query.dtype)
    tiles = triton.cdiv(tokens * group, launch.block_m)
    blocks = triton.cdiv(capacity, launch.block_n)
    splits = choose_splits(tiles * batch * kv_heads, blocks, launch.resident, out.numel(), out.device)
    partial = torch.empty(splits if splits > 1 else 0, rows, head_dim, dtype=torch.float32, device=query.device)
    mass = torch.empty(partial.shape[:2], dtype=torch.float32, device=query.device)
    overlap = can_overlap(query.device)
    _dense_attention_kernel[(tiles, batch * kv_heads, splits)](
        query, key_cache, value_cache, start, out, partial, mass, scale * LOG2_E, tokens, rows, splits,
        *query.stride()[:3], *key_cache.stride()[:3], *value_cache.stride()[:3],
        kv_heads, group, head_dim, launch.block_m, launch.block_n, block_d,
        splits == 1, tiles > 1, overlap, num_warps=launch.warps, num_stages=launch.stages, launch_pdl=overlap,
    )  # fmt: skip
    if splits > 1:
        combine_splits(partial, mass, out)
    return out


@torch.library.custom_op("dustin_compile::dense_attention", mutates_args=())
def _dense_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, scale: float) -> Tensor:
    if query.is_cuda:
        with torch.cuda.device_of(query):
            return dense_attention_triton(query, key_cache, value_cache, start, scale)
    return dense_attention_reference(query, key_cache, value_cache, start, scale)


@_dense_attention.register_fake
def _(query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, scale: float) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def dense_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, scale: float) -> Tensor:
    """Attend from token t of row b to the positions 0 .. start[b] + t of that row's cache.

    The new tokens' own keys and values must already be in the cache (`append_kv`). Nothing past them is read.

    Args:
        query: [B, T, Hq, D] fp32, fp16 or bf16; D up to 256, last dimension contiguous.
        key_cache, value_cache: [B, N, Hkv, D], dtype of the query, last dimension contiguous; Hkv divides Hq, query
            head h reads key/value head h // (Hq / Hkv).
        start: [B] int32, tokens before the new ones; start + T <= N.
        scale: factor of the logits, usually D ** -0.5.

    Returns:
        [B, T, Hq, D] contiguous, dtype of the query.

    Raises:
        ValueError: a shape, device or layout is wrong.
        TypeError: a dtype is wrong.
    """
    check_attention(query, key_cache, value_cache)
    check_rows("start", start, query.shape[0], query.device)
    return _dense_attention(query, key_cache, value_cache, start, scale)
