"""Prompts into both caches, densely, and the first token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dustin_compile.adapter import PREFILL_MULTIPLE, CachedModel
from dustin_compile.config import DustinConfig
from dustin_compile.graphs.draft import Choose
from dustin_compile.graphs.state import State
from dustin_compile.graphs.verify import choose_set
from dustin_compile.ops.accept import uniform


def chunk_bounds(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Cut a prompt of `length` positions, rounded up to PREFILL_MULTIPLE, into chunks."""
    end = -(-length // PREFILL_MULTIPLE) * PREFILL_MULTIPLE
    chunk -= chunk % PREFILL_MULTIPLE
    return ((low, min(low + chunk, end)) for low in range(0, end, chunk))


def prefill(
    target: CachedModel,
    draft: CachedModel,
    state: State,
    lengths: Tensor,
    width: int,
    config: DustinConfig,
    choose: Choose,
) -> None:
    """Run the prompts in state.tokens[:, :width], left-aligned, through both models, and emit one token a row.

    Rows shorter than the longest are followed by garbage, which causality keeps from mattering: it lies behind L.

    Args:
        lengths: [B] int32, tokens of each prompt, at least 1.
        width: the longest of them.
        choose: takes logits to a token, as in the step.
    """
    last_hidden, last_query = torch.zeros((), dtype=target.dtype, device=lengths.device), state.query
    for low, high in chunk_bounds(width, config.prefill_chunk):
        tokens = state.tokens[:, low:high]
        start = torch.full_like(lengths, low)
        draft.forward(tokens, start, state.draft_cache, None)
        hidden, query = target.forward(tokens, start, state.target_cache, None)
        slot = (lengths - 1 - low).long()
        inside = ((slot >= 0) & (slot < high - low))[:, None, None]
        slot = slot.clamp(0, high - low - 1)[:, None, None]
        hidden = hidden.gather(1, slot.expand(-1, 1, hidden.shape[-1]))
        query = query.gather(1, slot[..., None].expand(-1, 1, *query.shape[2:]))
        last_hidden = torch.where(inside, hidden, last_hidden)
        last_query = torch.where(inside[..., None], query, last_query)
    state.query.copy_(last_query)
    logits = target.logits(last_hidden)
    sampling = state.sampling
    token, _ = choose(state, logits, uniform(sampling.seed, sampling.stream, state.step, 1))
    state.seq_lens.copy_(lengths)
    state.tokens.scatter_(1, lengths[:, None].long(), token)
    state.finished.logical_or_((token == state.eos_token_ids).any(-1) | (lengths + 1 >= state.limits))
    state.step.fill_(1)
    if "sparse" in (config.verify, config.draft_attention):
        # There is no look-ahead yet: the draft's first set is the target's choice alone, of the history that
        # ends before the position which the first draft pass repeats.
        scores = target.score(state.query, state.target_cache, lengths - 1)
        choose_set(state, scores, scores, lengths - 1, config)
