"""score_heads: how much a few chosen heads attend to each position of the history.

These are both of Dustin's signals (arXiv 2606.24957): the semantic retrieval heads (CompressKV, arXiv 2508.02401) of
the target with the last verified query, and those of the draft with its look-ahead queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.attention_blocks import LOG2_E
from dustin_compile.ops.checks import (
    FLOATS,
    check_at_least,
    check_contiguous,
    check_heads,
    check_rows,
    check_tensor,
)

TILE_ELEMENTS = 2**14  # of the keys, that a program of the scoring kernel reads
MEAN_ELEMENTS = 2048  # stored logits that a program of the averaging kernel reads at once,
MEAN_ROWS = 8  # of at most so many query rows,
MEAN_WARPS = 1  # in so many warps
MASS_TILES = 128  # whose masses it reads at once


def score_heads_reference(
    query: Tensor, key_cache: Tensor, groups: Tensor, max_count: int, seq_lens: Tensor, scale: float
) -> Tensor:
    """The op on any device; it reads the lengths and the groups, and computes in fp32."""
    batch, tokens, heads, _ = query.shape
    out = torch.zeros(batch, key_cache.shape[2], dtype=torch.float32, device=query.device)
    lengths = seq_lens.tolist()
    for layer, kv_head, first, count in groups.tolist():
        for row, length in enumerate(lengths):
            if length:
                rows = query[row, :, first : first + count].float().flatten(0, 1)
                logits = rows @ key_cache[layer, row, :length, kv_head].float().T * scale
                out[row, :length] += logits.softmax(-1).sum(0)
    return out / (tokens * heads)


@triton.jit
def _score_tile_kernel(
    query, key_cache, groups, seq_lens, offsets, tops, masses, scale_log2, tokens, tiles,
    query_stride_b, query_stride_t, query_stride_h,
    key_stride_layer, key_stride_b, key_stride_n, key_stride_h,
    HEADS: tl.constexpr, MAX_COUNT: tl.constexpr, ROW_TILES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of a tile of positions, stored as offsets from the tile's top, with their log-sum-exp.

    A tile is stored whole, with -inf behind the length: a mask within rows would break every store into single numbers.
    """
    tile, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    group, row_tile = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES
    length = tl.load(seq_lens + row)
    layer, kv_head = tl.load(groups + group * 4).to(tl.int64), tl.load(groups + group * 4 + 1).to(tl.int64)
    first, count = tl.load(groups + group * 4 + 2), tl.load(groups + group * 4 + 3)
    if tile * BLOCK_N >= length:
        return

    packed = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, member = packed // MAX_COUNT, packed % MAX_COUNT
    head = first + member
    used = (token < tokens) & (member < count)
    dim = tl.arange(0, BLOCK_D)
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = position < length

    query_offset = row * query_stride_b + token.to(tl.int64) * query_stride_t + head.to(tl.int64) * query_stride_h
    key_base = key_cache + layer * key_stride_layer + row * key_stride_b + kv_head * key_stride_h
    in_dim = (dim < HEAD_DIM)[None, :]
    q = tl.load(query + query_offset[:, None] + dim[None, :], mask=used[:, None] & in_dim, other=0.0)
    k = tl.load(
        key_base + position.to(tl.int64)[:, None] * key_stride_n + dim[None, :],
        mask=valid[:, None] & in_dim, other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    logits = tl.where(valid[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    logits -= top[:, None]

    flat = row * (tokens * HEADS) + token * HEADS + head
    tl.store(
        offsets + flat[:, None] * (tiles * BLOCK_N) + position[None, :], logits.to(offsets.dtype.element_ty),
        mask=used[:, None],
    )  # fmt: skip
    tl.store(tops + flat * tiles + tile, top, mask=used)
    tl.store(masses + flat * tiles + tile, top + tl.log2(tl.sum(tl.exp2(logits), 1)), mask=used)


@triton.jit
def _score_mean_kernel(
    offsets, tops, masses, seq_lens, out, query_rows, capacity, tiles,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MASS_TILES: tl.constexpr,
):  # fmt: skip
    """Mean of the softmax over the query rows, for TILES tiles of positions."""
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(seq_lens + row)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    written = (tile * BLOCK_N < length)[None, :]
    position = tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    scores = tl.zeros([TILES, BLOCK_N], tl.float32)
    for chunk in range(0, tl.where(tl.program_id(0) * TILES * BLOCK_N < length, query_rows, 0), ROWS):
        query_row = chunk + tl.arange(0, ROWS)
        used = (query_row < query_rows)[:, None]
        flat = row * query_rows + query_row
        top = tl.load(tops + flat[:, None] * tiles + tile[None, :], mask=used & written, other=0.0)
        offset = tl.load(
            offsets + (flat * (tiles * BLOCK_N))[:, None, None] + position[None, :, :],
            mask=(used & written)[:, :, None], other=float("-inf"),
        )  # fmt: skip
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for first in range(0, tl.cdiv(length, BLOCK_N), MASS_TILES):
            other = first + tl.arange(0, MASS_TILES)
            there = used & (other * BLOCK_N < length)[None, :]
            mass = tl.load(masses + flat[:, None] * tiles + other[None, :], mask=there, other=-1e30)
            higher = tl.maximum(highest, tl.max(mass, 1))
            total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(mass - higher[:, None]), 1)
            highest = higher
        shift = top - (highest + tl.log2(total))[:, None]
        scores += tl.sum(tl.exp2(offset.to(tl.float32) + shift[:, :, None]), 0)
    tl.store(out + row * capacity + position, scores / query_rows, mask=position < capacity)


def score_heads_triton(
    query: Tensor, key_cache: Tensor, groups: Tensor, max_count: int, seq_lens: Tensor, scale: float
) -> Tensor:
    """The kernels, on CUDA or interpreted."""
    batch, tokens, heads, head_dim = query.shape
    capacity = key_cache.shape[2]
    query_rows = tokens * heads
    exact = query.dtype == torch.float32
    block_d = max(16, triton.next_power_of_2(head_dim))
    if exact:  # exact fp32 products run on FMA units: small tiles
        block_m, block_n = 16, 64
    else:
        block_m = min(64, max(16, triton.next_power_of_2(tokens * max_count)))
        block_n = min(256, TILE_ELEMENTS // block_d) if block_m < 64 else 128
    row_tiles, tiles = triton.cdiv(tokens * max_count, block_m), triton.cdiv(capacity, block_n)
    out = torch.empty(batch, capacity, dtype=torch.float32, device=query.device)
    # As base-2 logits below the tile's top: in half precision the largest are the most exact, and none underflows.
    offsets = torch.empty(
        batch, query_rows, tiles * block_n, dtype=torch.float32 if exact else torch.float16, device=query.device
    )
    tops = torch.empty(batch, query_rows, tiles, dtype=torch.float32, device=query.device)
    masses = torch.empty_like(tops)
    _score_tile_kernel[(tiles, groups.shape[0] * row_tiles, batch)](
        query, key_cache, groups, seq_lens, offsets, tops, masses, scale * LOG2_E, tokens, tiles,
        *query.stride()[:3], *key_cache.stride()[:4], heads, max_count, row_tiles, head_dim, block_m, block_n, block_d,
        num_warps=8 if block_n * block_m >= 8192 else 4,
    )  # fmt: skip
    mean_rows = min(MEAN_ROWS, triton.next_power_of_2(query_rows))
    mean_tiles = max(1, MEAN_ELEMENTS // (mean_rows * block_n))
    _score_mean_kernel[(triton.cdiv(tiles, mean_tiles), batch)](
        offsets, tops, masses, seq_lens, out, query_rows, capacity, tiles, block_n, mean_tiles, mean_rows,
        MASS_TILES, num_warps=MEAN_WARPS,
    )  # fmt: skip
    return out


@torch.library.custom_op("dustin_compile::score_heads", mutates_args=())
def _score_heads(
    query: Tensor, key_cache: Tensor, groups: Tensor, max_count: int, seq_lens: Tensor, scale: float
) -> Tensor:
    if query.is_cuda:
        with torch.cuda.device_of(query):
            return score_heads_triton(query, key_cache, groups, max_count, seq_lens, scale)
    return score_heads_reference(query, key_cache, groups, max_count, seq_lens, scale)


@_score_heads.register_fake
def _(query: Tensor, key_cache: Tensor, groups: Tensor, max_count: int, seq_lens: Tensor, scale: float) -> Tensor:
    return torch.empty(query.shape[0], key_cache.shape[2], dtype=torch.float32, device=query.device)


def score_heads(
    query: Tensor, key_cache: Tensor, groups: Tensor, max_count: int, seq_lens: Tensor, scale: float
) -> Tensor:
    """Mean attention of chosen heads and query tokens to every position j < seq_lens[b] of row b's history.

    Args:
        query: [B, T, H, D] fp32, fp16 or bf16, last dimension contiguous: T tokens of the H chosen heads, sorted so
            that heads that read one key/value head are neighbours. Every query sees the whole history.
        key_cache: [layers, B, N, Hkv, D], dtype of the query, last dimension contiguous; D up to 256.
        groups: [G, 4] int32 with columns layer, kv_head, first, count: the heads first .. first + count - 1 of `query`
            read kv_head of layer. Each of the H heads is in one group.
        max_count: the largest count.
        seq_lens: [B] int32, 0 to N.
        scale: factor of the logits, usually D ** -0.5.

    Returns:
        [B, N] fp32: scores that sum to 1 in each row, 0 from seq_lens[b] on (and everywhere where it is 0).

    Raises:
        ValueError: a shape, device, layout or max_count is wrong.
        TypeError: a dtype is wrong.
    """
    check_heads("query", query, [None, None, None, None], FLOATS, query.device)
    batch, _, _, head_dim = query.shape
    check_heads("key_cache", key_cache, [None, batch, None, None, head_dim], [query.dtype], query.device)
    check_tensor("groups", groups, [None, 4], [torch.int32], query.device)
    check_contiguous("groups", groups)
    check_at_least("max_count", max_count, 1)
    check_rows("seq_lens", seq_lens, batch, query.device)
    return _score_heads(query, key_cache, groups, max_count, seq_lens, scale)
