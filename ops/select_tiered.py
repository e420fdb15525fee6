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
LAST_TILE = 4096  # positions that one program can still hold
WARP_TILE = 512  # positions a warp
GROUP = 4  # positions that play as one for a first threshold, where it need not be exact
ROUND_BITS, LAST_BITS = 2, 2  # of a threshold, found in one pass over a tile


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
def _find_threshold(key, count, most, BITS: tl.constexpr):
    """A number that at least `count` of the keys >= 0 reach, and at most `most` if there is such a one; how many do.

    Where fewer than `count` keys are >= 0, both are 0. Each pass over the keys finds the next BITS bits, by all their
    values at once: what takes time is the sum over all threads.
    """
    digits = tl.arange(0, 1 << BITS)
    players = key[None, :]
    threshold = tl.max(key, 0) * 0
    found = threshold
    shift = 31 - BITS
    while shift >= 0:
        # By the sign of a difference: comparisons would take longer to count.
        reached = -tl.sum(((threshold - 1) + (digits << shift)[:, None] - players) >> 31, 1)
        best = tl.max(tl.where(reached >= count, (digits << 24) | reached, 0), 0)
        digit, found = best >> 24, best & 0xFFFFFF
        threshold += digit << shift
        shift = tl.where((found <= most) | (shift == 0), -1, tl.maximum(shift - BITS, 0))
    return threshold, found


@triton.jit
def _highest(key, count, most, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Mask of the highest of the keys >= 0: at least `count` of them and at most `most`; of equal ones the first.

    What `count` groups of GROUP keys reach by their best, at least `count` keys reach, and mostly few more.
    """
    if GROUP == 1:
        threshold, found = _find_threshold(key, count, most, BITS)
    else:
        best = tl.max(tl.reshape(key, [GROUP, key.shape[0] // GROUP]), 0)
        threshold, found = _find_threshold(best, count, (count + most) // 2, BITS)
        found = tl.sum((key >= threshold).to(tl.int32), 0)
        if found > most:
            threshold, found = _find_threshold(key, count, most, BITS)
    chosen = key >= threshold
    if found > most:
        above, equal = key > threshold, key == threshold
        needed = most - tl.sum(above.to(tl.int32), 0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= needed))
    return chosen


@triton.jit
def _load_keys(scores, mask):
    """Scores as integers of the same order."""
    return tl.maximum(tl.load(scores, mask=mask, other=0.0).to(tl.int32, bitcast=True), 0)  # a -0.0 becomes a zero


@triton.jit
def _select_round_kernel(
    draft_scores, target_scores, seq_lens, entrants, winners, indices, counts,
    draft_stride_b, draft_stride_n, target_stride_b, target_stride_n, capacity, entrant_count,
    budget, sinks, window, draft_share, winner_count,
    FIRST: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens + row), capacity)
    slot = tile * TILE + tl.arange(0, TILE)
    if FIRST:
        position = slot
        readable = slot < capacity  # a mask within a vector would break it into single loads
        playing = (slot >= sinks) & (slot < tl.where(length > budget, length - window, 0))
    else:
        position = tl.load(entrants + row * entrant_count + slot, mask=slot < entrant_count, other=-1)
        playing = position >= 0
        readable = playing
    place = position.to(tl.int64)
    target_share = budget - sinks - window - draft_share
    draft_most, target_most = draft_share, target_share
    if not LAST:  # an inexact round ends sooner; room for more winners there is
        room = winner_count - draft_share - target_share
        draft_most += room // 2
        target_most += room // 2
    draft_key = _load_keys(draft_scores + row * draft_stride_b + place * draft_stride_n, readable)
    target_key = _load_keys(target_scores + row * target_stride_b + place * target_stride_n, readable)
    by_draft = _highest(tl.where(playing, draft_key, -1), draft_share, draft_most, GROUP, BITS)
    target_key = tl.where(playing & ~by_draft, target_key, -1)
    chosen = by_draft | _highest(target_key, target_share, target_most, GROUP, BITS)
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LAST:
        output = indices + row * budget
        tl.store(output + sinks + rank, position, mask=chosen)
        place = tl.arange(0, BLOCK)
        # A row within the budget has no players: its positions are all sinks, and there is no window.
        sinks = tl.where(length > budget, sinks, budget)
        shift = tl.where(length > budget, length - budget, 0)
        frame = tl.where(place < tl.minimum(sinks, length), place, 0)
        frame = tl.where(place < sinks, frame, place + shift)
        tl.store(output + place, frame, mask=(place < budget) & ((place < sinks) | (place >= budget - window)))
        tl.store(counts + row, tl.minimum(length, budget))
    else:
        output = winners + (row * tl.num_programs(0) + tile) * winner_count
        tl.store(output + rank, position, mask=chosen)
        place = tl.arange(0, BLOCK)
        tl.store(output + place, -1, mask=(place > tl.max(rank, 0)) & (place < winner_count))


def select_tiered_triton(
    draft_scores: Tensor, target_scores: Tensor, seq_lens: Tensor, budget: int, sinks: int, window: int,
    draft_share: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel, on CUDA or interpreted."""
    batch, capacity = draft_scores.shape
    indices = torch.empty(batch, budget, dtype=torch.int32, device=draft_scores.device)
    counts = torch.empty_like(seq_lens)
    chosen = max(1, budget - sinks - window)
    least = 2 * triton.next_power_of_2(chosen)  # a smaller tile could let all its players through
    entrants, entrant_count = indices, capacity  # in the first round every position plays, and none is read
    first = True
    while True:
        last = entrant_count <= max(LAST_TILE, least)
        tile = max(512, triton.next_power_of_2(entrant_count)) if last else max(ROUND_TILE, least)
        tiles = triton.cdiv(entrant_count, tile)
        # The next round's tiles are powers of two: what is free there is room for more winners.
        winner_count = 0 if last else max(chosen, triton.next_power_of_2(tiles * chosen) // tiles // 16 * 16)
        winners = torch.empty(batch * tiles * winner_count, dtype=torch.int32, device=draft_scores.device)
        _select_round_kernel[(tiles, batch)](
            draft_scores, target_scores, seq_lens, entrants, winners, indices, counts,
            *draft_scores.stride(), *target_scores.stride(), capacity, entrant_count,
            budget, sinks, window, draft_share, winner_count,
            first, last, tile, triton.next_power_of_2(budget if last else winner_count), 1 if last else GROUP,
            LAST_BITS if last else ROUND_BITS, num_warps=max(1, min(32, tile // WARP_TILE)),
        )  # fmt: skip
        if last:
            return indices, counts
        entrants, entrant_count, first = winners, tiles * winner_count, False


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
