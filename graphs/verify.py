"""The target's part of a step: choose the verification set, and run the block against it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dustin_compile.adapter import CachedModel
from dustin_compile.config import DustinConfig
from dustin_compile.graphs.state import State
from dustin_compile.ops.select_tiered import select_tiered

NEIGHBOURS = 17
SMOOTHING = 0.1


def smooth(scores: Tensor) -> Tensor:
    """Target scores [B, N], each with SMOOTHING times the mean of its NEIGHBOURS, itself in the middle of them.

    A retrieval head looks at the one token that comes next, and the query it is asked with is up to gamma + 1 tokens
    old by the time the block is verified: what the rest of the block needs lies behind. SnapKV (arXiv 2404.14469) pools
    its scores for a like reason.
    """
    near = torch.nn.functional.avg_pool1d(scores[:, None], NEIGHBOURS, 1, NEIGHBOURS // 2)[:, 0]
    return scores + SMOOTHING * near


def score_history(target: CachedModel, state: State) -> Tensor:
    """The target's scores of the history with its last query, smoothed, fp32 [B, capacity]."""
    return smooth(target.score(state.query, state.target_cache, state.seq_lens))


def choose_set(state: State, draft_scores: Tensor, target_scores: Tensor, length: Tensor, config: DustinConfig) -> None:
    """Write the verification set of a history of length[B] positions into the state."""
    draft_share = cast(int, config.draft_share)  # the pair has resolved it
    indices, counts = select_tiered(
        draft_scores, target_scores, length, config.budget, config.sinks, config.window, draft_share
    )
    state.verification_set.indices.copy_(indices)
    state.verification_set.counts.copy_(counts)
    state.verification_set.length.copy_(length)


def score_and_choose(
    draft: CachedModel, state: State, target_scores: Tensor, draft_queries: Tensor, config: DustinConfig
) -> None:
    """Choose this step's set from the target's scores and the draft's look-ahead [B, gamma, heads, D]."""
    draft_scores = draft.score(draft_queries, state.draft_cache, state.seq_lens)
    choose_set(state, draft_scores, target_scores, state.seq_lens, config)


def verify(target: CachedModel, state: State, gamma: int, sparse: bool, lookback: int = 0) -> tuple[Tensor, Tensor]:
    """One target pass over the pending token and the gamma proposals.

    Args:
        sparse: read the state's verification set; otherwise the whole cache.
        lookback: confirmed tokens before the pending one that go through the target once more, which rewrites
            their K/V.

    Returns:
        logits [B, gamma + 1, vocab] and the retrieval heads' queries [B, gamma + 1, heads, D] of the block.
    """
    start = (state.seq_lens - lookback).clamp(min=0)
    offsets = torch.arange(lookback + gamma + 1, device=start.device)
    feed = state.tokens.gather(1, (start[:, None] + offsets).long())
    hidden, queries = target.forward(feed, start, state.target_cache, state.verification_set if sparse else None)
    if lookback:
        # A row shorter than the lookback has its block earlier, and unread garbage after it.
        slots = ((state.seq_lens - start)[:, None] + offsets[: gamma + 1]).long()
        hidden = hidden.gather(1, slots[..., None].expand(-1, -1, hidden.shape[-1]))
        queries = queries.gather(1, slots[..., None, None].expand(-1, -1, *queries.shape[2:]))
    return target.logits(hidden), queries
