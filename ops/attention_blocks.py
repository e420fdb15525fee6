"""What dense_attention and sparse_attention share: the reference of one row, and the parts of a split Triton kernel.

In the kernels the query heads of one key/value head (the group) and the new tokens are packed into the rows of one
tile, so that a key is read once for all of them. Long rows are split over programs; each leaves a normalised partial
output and its base-2 log-sum-exp (`mass`, -inf where it saw nothing), which `combine_splits` merges.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.dependent_launch import can_overlap, follow_previous

MAX_SPLITS = 64
MAX_PARTIAL_ELEMENTS = 2**25  # fp32 workspace of a split launch: at most 128 MiB
COMBINE_BLOCKS = 4  # what the combining kernel costs, in blocks of keys
LOG2_E = 1.4426950408889634


class Launch(NamedTuple):
    """Tile sizes of an attention kernel: query rows, keys a block; and how it runs."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int  # programs that share a multiprocessor's 227 KB


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of fp32 [X, H, T, D] queries, and its log-sum-exp [X, H, T]."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    logits = query @ key.transpose(-1, -2) * scale
    if causal:
        logits += torch.full(logits.shape[-2:], float("-inf"), device=logits.device).triu(1)
    return logits.softmax(-1) @ value, logits.logsumexp(-1)


def attend_past_and_block(
    query: Tensor, past: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """One row: every query attends to the whole past, and the last queries causally to the block as well.

    Two attentions without a mask, merged by their log-sum-exps, are faster on CPU than one with a mask.

    Args:
        query: [T, Hq, D].
        past, block: (key, value), each [positions, Hkv, D]; the block has at most T positions, either may have none.

    Returns:
        [T, Hq, D] in the query's dtype, computed in fp32; 0 where a query sees nothing.
    """
    tokens, query_heads, head_dim = query.shape
    kv_heads = past[0].shape[1]
    group = query_heads // kv_heads
    rows = query.float().reshape(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out, mass = torch.zeros_like(rows), rows.new_full(rows.shape[:-1], float("-inf"))
    if past[0].shape[0]:
        key, value = (x.float().transpose(0, 1)[None] for x in past)
        packed = rows.reshape(1, kv_heads, group * tokens, head_dim)
        packed_out, packed_mass = _attend(packed, key, value, False, scale)
        out, mass = packed_out.reshape(rows.shape), packed_mass.reshape(mass.shape)
    if size := block[0].shape[0]:
        key, value = (x.float().transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in block)
        block_out, block_mass = _attend(rows[:, :, -size:], key, value, True, scale)
        past_share = torch.sigmoid(mass[:, :, -size:] - block_mass)
        out[:, :, -size:] = torch.lerp(block_out, out[:, :, -size:], past_share[..., None])
    return out.permute(2, 0, 1, 3).reshape(query.shape).to(query.dtype)


@functools.cache
def choose_splits(programs: int, blocks: int, resident: int, out_elements: int, device: torch.device) -> int:
    """Over how many programs each of `programs` pieces of work, up to `blocks` blocks long, is split.

    The estimate is in blocks: waves of programs, each with a start that costs as much as two blocks, and the second
    kernel. Within 4% of the best, more splits win: they even out rows of different length, which shapes do not show.
    `resident` is how many programs share a multiprocessor.
    """
    multiprocessors = 4  # so that interpreted tests split too
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    most = max(1, min(MAX_SPLITS, blocks, MAX_PARTIAL_ELEMENTS // max(1, out_elements)))

    def estimate(splits: int) -> int:
        waves = triton.cdiv(programs * splits, multiprocessors * resident)
        return waves * (triton.cdiv(blocks, splits) + 2) + (COMBINE_BLOCKS if splits > 1 else 0)

    best = min(map(estimate, range(1, most + 1)))
    return max(splits for splits in range(1, most + 1) if estimate(splits) <= 1.04 * best)


@triton.jit
def load_packed_queries(
    query, stride_batch, stride_token, stride_head, row, kv_head, tile, tokens,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of query rows [BLOCK_M, BLOCK_D] with each row's token and head; tokens past the last are padding."""
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, BLOCK_D)
    offset = row.to(tl.int64) * stride_batch + token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    mask = (token < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(query + offset[:, None] + dim[None, :], mask=mask, other=0.0), token, head


@triton.jit
def attend_block(query, key, value, visible, acc, top, total, scale_log2, MASKED: tl.constexpr):
    """One step of the online softmax (base 2) over a block of keys and values [BLOCK_N, BLOCK_D]."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = new_top
    if MASKED:  # a row that has seen nothing yet: -inf - -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def store_packed_rows(
    out, partial, mass, acc, top, total, row, token, head, tokens, split, rows,
    QUERY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Normalise a tile and store it: as the output when WHOLE (there is one split), else as this split's partial."""
    dim = tl.arange(0, BLOCK_D)
    flat = (row.to(tl.int64) * tokens + token) * QUERY_HEADS + head
    mask = (token < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    total = tl.where(total > 0, total, 1.0)  # a row that saw nothing: output 0, mass -inf
    acc = acc / total[:, None]
    if WHOLE:
        tl.store(out + flat[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        flat += split.to(tl.int64) * rows
        tl.store(partial + flat[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
        tl.store(mass + flat, top + tl.log2(total), mask=token < tokens)


@triton.jit
def _combine_kernel(
    partial, mass, out, rows, splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    flat = split.to(tl.int64) * rows + row
    exists = split < splits
    masses = tl.load(mass + flat, mask=exists, other=float("-inf"))
    # A split that saw nothing left zeros, so this load need not wait for the masses.
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    parts = tl.load(partial + flat[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    weights = tl.where(masses > float("-inf"), tl.exp2(masses - tl.max(masses, 0)), 0.0)
    total = tl.sum(weights, 0)
    combined = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dim, combined.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def combine_splits(partial: Tensor, mass: Tensor, out: Tensor) -> None:
    """Merge partial [S, rows, D] and mass [S, rows], both fp32, into the contiguous output of those rows."""
    splits, rows, head_dim = partial.shape
    block_d, block_s = triton.next_power_of_2(head_dim), triton.next_power_of_2(splits)
    warps = 4 if block_d * block_s > 2048 else 2
    overlap = can_overlap(out.device)
    _combine_kernel[(rows,)](
        partial, mass, out, rows, splits, head_dim, block_d, block_s, overlap, num_warps=warps, launch_pdl=overlap
    )
