"""select_tiered: the verification set, chosen from the draft's and the target's scores (Dustin, arXiv 2606.24957).

The kernel is a tournament. A position that is chosen among all is also chosen among any part of them, by the same
rule. So each program finds the winners of one tile of positions, and perhaps a few more, and the next round plays among
these, until one tile holds them all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.checks import check_at_least, check_rows, check_tensor

ROUND_TILE = 8192  # positions a program; smaller tiles leave more winners to the next round
LAST_TILE = 16384  # positions that one program can still hold


def _highest_reference(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` highest scores; of equal ones the first."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.topk(count).values[-1]
    above, equal = scores > threshold, scores == threshold
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def select_tiered_reference(
    draft_scores: Tensor, target_scores: Tensor, seq_lens: Tensor, budget: int, sinks: int, window: int,
    draft_share: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op on any device; it reads the lengths."""
    indices = torch.zeros(draft_scores.shape[0], budget, dtype=torch.int32, device=draft_scores.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length <= budget:
            indices[row, :length] = torch.arange(length, dtype=torch.int32, device=indices.device)
            continue
        chosen = torch.ones(length, dtype=torch.bool, device=indices.device)
        rest = slice(sinks, length - window)
        by_draft = _highest_reference(draft_scores[row, rest], draft_share)
        left = target_scores[row, rest].masked_fill(by_draft, -1.0)
        chosen[rest] = by_draft | _highest_reference(left, budget - sinks - window - draft_share)
        indices[row] = chosen.nonzero()[:, 0]
    return indices, seq_lens.clamp(max=budget)


@triton.jit
def _highest(key, count, most):
    """Mask of the highest of the keys >= 0: at least `count` of them and at most `most`; of equal ones the first."""
    threshold = tl.max(key, 0) * 0  # found bit by bit: a number that at least `count` keys reach
    bit = tl.where(tl.sum((key >= 0).to(tl.int32), 0) <= most, -1, 30)
    while bit >= 0:
        candidate = threshold | (1 << bit)
        reached = tl.sum((key >= candidate).to(tl.int32), 0)
        threshold = tl.where(reached >= count, candidate, threshold)
        bit = tl.where((reached >= count) & (reached <= most), -1, bit - 1)
    above, equal = key > threshold, key == threshold
    chosen = above | equal
    needed = most - tl.sum(above.to(tl.int32), 0)
    if tl.sum(equal.to(tl.int32), 0) > needed:
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= needed))
    return chosen


@triton.jit
def _keys(scores, mask):
    """Scores as integers of the same order, -1 where masked."""
    bits = tl.load(scores, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(mask, tl.maximum(bits, 0), -1)  # the maximum makes -0.0 a zero


@triton.jit
def _select_round_kernel(
    draft_scores, target_scores, seq_lens, entrants, winners, indices, counts,
    draft_stride_b, draft_stride_n, target_stride_b, target_stride_n, capacity, entrant_count,
    budget, sinks, window, draft_share,
    FIRST: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, WINNERS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens + row), capacity)
    slot = tile * TILE + tl.arange(0, TILE)
    if FIRST:
        position = slot
        playing = (slot >= sinks) & (slot < tl.where(length > budget, length - window, 0))
    else:
        position = tl.load(entrants + row * entrant_count + slot, mask=slot < entrant_count, other=-1)
        playing = position >= 0
    place = position.to(tl.int64)
    target_share = budget - sinks - window - draft_share
    draft_most, target_most = draft_share, target_share
    if not LAST:  # an inexact round ends sooner; room for more winners there is
        room = WINNERS - draft_share - target_share
        draft_most += room // 2
        target_most += room // 2
    draft_key = _keys(draft_scores + row * draft_stride_b + place * draft_stride_n, playing)
    by_draft = _highest(draft_key, draft_share, draft_most)
    target_key = _keys(target_scores + row * target_stride_b + place * target_stride_n, playing & ~by_draft)
    chosen = by_draft | _highest(target_key, target_share, target_most)
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LAST:
        output = indices + row * budget
        tl.store(output + sinks + rank, position, mask=chosen)
        place = tl.arange(0, BLOCK_K)
        # A row within the budget has no players: its positions are all sinks, and there is no window.
        sinks = tl.where(length > budget, sinks, budget)
        shift = tl.where(length > budget, length - budget, 0)
        frame = tl.where(place < tl.minimum(sinks, length), place, 0)
        frame = tl.where(place < sinks, frame, place + shift)
        tl.store(output + place, frame, mask=(place < budget) & ((place < sinks) | (place >= budget - window)))
        tl.store(counts + row, tl.minimum(length, budget))
    else:
        output = winners + (row * tl.num_programs(0) + tile) * WINNERS
        tl.store(output + rank, position, mask=chosen)
        place = tl.arange(0, WINNERS)
        tl.store(output + place, -1, mask=place > tl.max(rank, 0))


def select_tiered_triton(
    draft_scores: Tensor, target_scores: Tensor, seq_lens: Tensor, budget: int, sinks: int, window: int,
    draft_share: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel, on CUDA or interpreted."""
    batch, capacity = draft_scores.shape
    indices = torch.empty(batch, budget, dtype=torch.int32, device=draft_scores.device)
    counts = torch.empty_like(seq_lens)
    block_w = triton.next_power_of_2(max(1, budget - sinks - window))
    round_tile = max(ROUND_TILE, 2 * block_w)
    entrants, entrant_count = indices, capacity  # in the first round every position plays, and none is read
    first = True
    while True:
        last = entrant_count <= max(LAST_TILE, round_tile)
        tile = max(512, triton.next_power_of_2(entrant_count)) if last else round_tile
        tiles = triton.cdiv(entrant_count, tile)
        winners = torch.empty(0 if last else batch * tiles * block_w, dtype=torch.int32, device=draft_scores.device)
        _select_round_kernel[(tiles, batch)](
            draft_scores, target_scores, seq_lens, entrants, winners, indices, counts,
            *draft_scores.stride(), *target_scores.stride(), capacity, entrant_count,
            budget, sinks, window, draft_share,
            first, last, tile, block_w, triton.next_power_of_2(budget), num_warps=min(32, tile // 512),
        )  # fmt: skip
        if last:
            return indices, counts
        entrants, entrant_count, first = winners, tiles * block_w, False


@torch.library.custom_op("dustin_compile::select_tiered", mutates_args=())
def _select_tiered(
    draft_scores: Tensor, target_scores: Tensor, seq_lens: Tensor, budget: int, sinks: int, window: int,
    draft_share: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if draft_scores.is_cuda:
        with torch.cuda.device_of(draft_scores):
            return select_tiered_triton(draft_scores, target_scores, seq_lens, budget, sinks, window, draft_share)
    return select_tiered_reference(draft_scores, target_scores, seq_lens, budget, sinks, window, draft_share)


@_select_tiered.register_fake
def _(
    draft_scores: Tensor, target_scores: Tensor, seq_lens: Tensor, budget: int, sinks: int, window: int,
    draft_share: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return seq_lens.new_empty(draft_scores.shape[0], budget), torch.empty_like(seq_lens)


def select_tiered(
    draft_scores: Tensor, target_scores: Tensor, seq_lens: Tensor, budget: int, sinks: int, window: int,
    draft_share: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose at most `budget` of the positions below seq_lens[b], for each row b.

    In order: the first `sinks` positions, the last `window`, the `draft_share` highest draft scores of the rest, and
    the highest target scores of what is still left. Of equal scores the lower position wins. A row no longer than the
    budget gets all its positions.

    Args:
        draft_scores, target_scores: [B, N] fp32, finite and >= 0 below seq_lens[b]; what lies behind is not read.
        seq_lens: [B] int32, 0 to N.
        budget: size of the set, sinks and window included.
        sinks, window, draft_share: numbers of positions, together at most `budget`.

    Returns:
        indices: [B, budget] int32, ascending; 0 from counts[b] on.
        counts: [B] int32, min(seq_lens[b], budget).

    Raises:
        ValueError: a shape, device or number is wrong.
        TypeError: a dtype is wrong.
    """
    check_tensor("draft_scores", draft_scores, [None, None], [torch.float32], draft_scores.device)
    check_tensor("target_scores", target_scores, draft_scores.shape, [torch.float32], draft_scores.device)
    check_rows("seq_lens", seq_lens, draft_scores.shape[0], draft_scores.device)
    check_at_least("budget", budget, 1)
    check_at_least("sinks", sinks, 0)
    check_at_least("window", window, 0)
    check_at_least("draft_share", draft_share, 0)
    if sinks + window + draft_share > budget:
        raise ValueError(
            f"sinks + window + draft_share must be at most budget = {budget}, got {sinks} + {window} + {draft_share}"
        )
    return _select_tiered(draft_scores, target_scores, seq_lens, budget, sinks, window, draft_share)
