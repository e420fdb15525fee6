"""The draft's part of a step: gamma passes, one token each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_compile.adapter import CachedModel
from dustin_compile.graphs.state import State


@dataclass
class Proposal:
    """What the draft hands to the verifier."""

    tokens: Tensor  # [B, gamma] int64
    probs: Tensor | None  # [B, gamma, vocab] fp32, the distributions they were drawn from; None: greedy
    queries: Tensor  # [B, gamma, draft heads, D]


Choose = Callable[[State, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def propose(
    draft: CachedModel, state: State, gamma: int, sparse: bool, choose: Choose, uniforms: Tensor | None
) -> Proposal:
    """Propose gamma tokens a row and write them behind the pending token.

    The first pass feeds two tokens, the confirmed one at L-1 again and the pending one at L: where the last step
    accepted all its tokens, the draft has no K/V of the former yet.

    Args:
        sparse: read the previous step's verification set; otherwise the whole cache.
        choose: takes logits [B, T, vocab] to one token a row, [B, 1], and the distribution it is from.
        uniforms: [B, gamma] in [0, 1) to sample with; None: greedy.
    """
    start = state.seq_lens - 1
    feed = state.tokens.gather(1, (start[:, None] + torch.arange(2, device=start.device)).long())
    verification_set = state.verification_set if sparse else None
    tokens, queries = [], []
    probs: list[Tensor] = []
    for i in range(gamma):
        hidden, query = draft.forward(feed, start, state.draft_cache, verification_set)
        draw = None if uniforms is None else uniforms[:, i : i + 1]
        feed, distribution = choose(state, draft.logits(hidden[:, -1:].contiguous()), draw)
        tokens.append(feed)
        if distribution is not None:
            probs.append(distribution)
        queries.append(query[:, -1:])
        start = state.seq_lens + 1 + i
    proposed = torch.cat(tokens, dim=1)
    slots = state.seq_lens[:, None] + 1 + torch.arange(gamma, device=start.device)
    state.tokens.scatter_(1, slots.long(), proposed)
    return Proposal(proposed, torch.cat(probs, dim=1) if probs else None, torch.cat(queries, dim=1))
