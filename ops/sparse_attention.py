"""sparse_attention: causal attention of new tokens over a few chosen positions and a short tail of a row's cache.

This is Dustin's verification (arXiv 2606.24957): one set of positions for all layers and heads, read out of a cache
that stays whole. The sparse draft uses it too, with the tail that has grown since the positions were chosen.
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
from dustin_compile.ops.checks import check_attention, check_rows, check_tensor
from dustin_compile.ops.dependent_launch import can_overlap, follow_previous

TAIL = 16  # positions of the block that every launch ends with; tl.dot's least


def sparse_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, counts: Tensor, tail_start: Tensor,
    start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The op on any device; it reads the lengths, and computes in fp32."""
    tokens = query.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lengths = zip(counts.tolist(), tail_start.tolist(), start.tolist(), strict=True)
    for row, (count, tail, first) in enumerate(lengths):
        split, end = max(tail, first + 1), first + tokens  # before the split, what every query sees
        key, value = key_cache[row], value_cache[row]
        past = torch.cat((indices[row, :count], torch.arange(tail, split, dtype=torch.int32, device=indices.device)))
        gathered = key.index_select(0, past), value.index_select(0, past)
        out[row] = attend_past_and_block(query[row], gathered, (key[split:end], value[split:end]), scale)
    return out


@triton.jit
def _sparse_attention_kernel(
    query, key_cache, value_cache, indices, counts, tail_start, start, out, partial, mass, scale_log2,
    tokens, rows, splits, budget,
    query_stride_b, query_stride_t, query_stride_h, key_stride_b, key_stride_n, key_stride_h,
    value_stride_b, value_stride_n, value_stride_h, indices_stride_b, indices_stride_k,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
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
    index = indices + row.to(tl.int64) * indices_stride_b

    # The last TAIL positions are one small block of their own, loaded ahead and read by the first split. What is left
    # is numbered in slots: 0 .. count-1 are the chosen positions, those after them the rest of a longer tail.
    count = tl.minimum(tl.load(counts + row), budget)
    tail, length = tl.load(tail_start + row), tl.load(start + row)
    end = length + tokens
    dim = tl.arange(0, BLOCK_D)
    in_dim = (dim < HEAD_DIM)[None, :]
    tail_position = end - TAIL + tl.arange(0, TAIL)
    tail_valid = tail_position >= tl.where(split == 0, tl.maximum(tail, 0), end)
    tail_offset = tail_position.to(tl.int64)[:, None]
    tail_mask = tail_valid[:, None] & in_dim
    tail_key = tl.load(key + tail_offset * key_stride_n + dim[None, :], mask=tail_mask, other=0.0)
    tail_value = tl.load(value + tail_offset * value_stride_n + dim[None, :], mask=tail_mask, other=0.0)

    slots = count + tl.maximum(end - TAIL - tail, 0)
    seen = tl.minimum(count + tl.maximum(length + token + 1 - tail, 0), slots)
    share = tl.cdiv(tl.cdiv(slots, splits), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, slots)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for block in range(first, last, BLOCK_N):
        slot = block + tl.arange(0, BLOCK_N)
        # Masked by the budget, so that the load need not wait for the count; what is behind the count is not used.
        chosen = tl.load(index + slot.to(tl.int64) * indices_stride_k, mask=slot < budget, other=0)
        position = tl.where(slot < count, chosen, tail + slot - count).to(tl.int64)[:, None]
        mask = (slot < slots)[:, None] & in_dim
        k = tl.load(key + position * key_stride_n + dim[None, :], mask=mask, other=0.0)
        v = tl.load(value + position * value_stride_n + dim[None, :], mask=mask, other=0.0)
        visible = slot[None, :] < seen[:, None]
        acc, top, total = attend_block(q, k, v, visible, acc, top, total, scale_log2, True)
    visible = tail_valid[None, :] & (tail_position[None, :] <= (length + token)[:, None])
    acc, top, total = attend_block(q, tail_key, tail_value, visible, acc, top, total, scale_log2, True)
    store_packed_rows(
        out, partial, mass, acc, top, total, row, token, head, tokens, split, rows,
        KV_HEADS * GROUP, HEAD_DIM, BLOCK_D, WHOLE,
    )  # fmt: skip


def _launch(query_rows: int, block_d: int, dtype: torch.dtype) -> Launch:
    """Tiles whose pipelined keys and values fit shared memory.

    Index loads take half the pipeline's depth: on an H200, 7 stages of 64 keys beat 4 of 128 by a quarter.
    """
    if dtype == torch.float32:  # exact fp32 products run on FMA units: small tiles
        return Launch(16, 32, warps=4, stages=2, resident=1)
    block_m = min(64, max(16, triton.next_power_of_2(query_rows)))
    return Launch(block_m, min(64, 2**13 // block_d), warps=4, stages=7, resident=1)


def sparse_attention_triton(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, counts: Tensor, tail_start: Tensor,
    start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The kernel, on CUDA or interpreted."""
    batch, tokens, query_heads, head_dim = query.shape
    kv_heads, budget = key_cache.shape[2], indices.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rows = batch * tokens * query_heads
    group = query_heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch = _launch(tokens * group, block_d, query.dtype)
    tiles = triton.cdiv(tokens * group, launch.block_m)
    blocks = triton.cdiv(budget, launch.block_n)
    splits = choose_splits(tiles * batch * kv_heads, blocks, launch.resident, out.numel(), out.device)
    partial = torch.empty(splits if splits > 1 else 0, rows, head_dim, dtype=torch.float32, device=query.device)
    mass = torch.empty(partial.shape[:2], dtype=torch.float32, device=query.device)
    overlap = can_overlap(query.device)
    _sparse_attention_kernel[(tiles, batch * kv_heads, splits)](
        query, key_cache, value_cache, indices, counts, tail_start, start, out, partial, mass, scale * LOG2_E,
        tokens, rows, splits, budget,
        *query.stride()[:3], *key_cache.stride()[:3], *value_cache.stride()[:3], *indices.stride(),
        kv_heads, group, head_dim, launch.block_m, launch.block_n, block_d, TAIL, splits == 1, overlap,
        num_warps=launch.warps, num_stages=launch.stages, launch_pdl=overlap,
    )  # fmt: skip
    if splits > 1:
        combine_splits(partial, mass, out)
    return out


@torch.library.custom_op("dustin_compile::sparse_attention", mutates_args=())
def _sparse_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, counts: Tensor, tail_start: Tensor,
    start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    if query.is_cuda:
        with torch.cuda.device_of(query):
            return sparse_attention_triton(query, key_cache, value_cache, indices, counts, tail_start, start, scale)
    return sparse_attention_reference(query, key_cache, value_cache, indices, counts, tail_start, start, scale)


@_sparse_attention.register_fake
def _(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, counts: Tensor, tail_start: Tensor,
    start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def sparse_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, indices: Tensor, counts: Tensor, tail_start: Tensor,
    start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Attend from token t of row b to indices[b, :counts[b]] and to the tail tail_start[b] .. start[b] + t.

    The new tokens' own keys and values must already be in the cache (`append_kv`). No other position is read.
    Verification has tail_start = start; a draft keeps tail_start at the length at which its indices were chosen.

    Args:
        query: [B, T, Hq, D] fp32, fp16 or bf16; D up to 256, last dimension contiguous.
        key_cache, value_cache: [B, N, Hkv, D], dtype of the query, last dimension contiguous; Hkv divides Hq, query
            head h reads key/value head h // (Hq / Hkv).
        indices: [B, K] int32, distinct positions below tail_start; entries from counts[b] on have no meaning.
        counts: [B] int32, 0 to K.
        tail_start: [B] int32.
        start: [B] int32, tokens before the new ones; start + T <= N.
        scale: factor of the logits, usually D ** -0.5.

    Returns:
        [B, T, Hq, D] contiguous, dtype of the query; 0 for a token that sees no position.

    Raises:
        ValueError: a shape, device or layout is wrong.
        TypeError: a dtype is wrong.
    """
    check_attention(query, key_cache, value_cache)
    batch = query.shape[0]
    check_tensor("indices", indices, [batch, None], [torch.int32], query.device)
    check_rows("counts", counts, batch, query.device)
    check_rows("tail_start", tail_start, batch, query.device)
    check_rows("start", start, batch, query.device)
    return _sparse_attention(query, key_cache, value_cache, indices, counts, tail_start, start, scale)
