"""One draft-verify step, all on the device."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dustin_compile.adapter import CausalModel
from dustin_compile.config import DustinConfig
from dustin_compile.graphs.capture import compile_region
from dustin_compile.graphs.draft import Proposal, propose
from dustin_compile.graphs.state import State
from dustin_compile.graphs.verify import score_and_choose, verify
from dustin_compile.ops.accept import accept_greedy, accept_sampling, process_logits, uniform

Decoding = Literal["greedy", "sampling", "truncated_sampling"]


class Step:
    """The step of one pair. Its regions are compiled at first use, for each batch size and way of decoding.

    Args:
        target, draft: the pair.
        config: its settings, draft_share resolved.
    """

    def __init__(self, target: CausalModel, draft: CausalModel, config: DustinConfig):
        self.target, self.draft, self.config = target, draft, config
        self.commit = {
            decoding: compile_region(function) if config.compile else function
            for decoding, function in (
                ("greedy", _commit_greedy),
                ("sampling", _commit_sampling),
                ("truncated_sampling", _commit_truncated_sampling),
            )
        }

    def __call__(self, state: State, decoding: Decoding, refresh: bool = False) -> None:
        """Run one step on every row: draft, score, select, verify, accept, commit.

        Args:
            refresh: verify densely, and rewrite the K/V of all tokens since the last refresh.
        """
        config, gamma = self.config, self.config.gamma
        uniforms = None
        if decoding != "greedy":
            sampling = state.sampling
            uniforms = uniform(sampling.seed, sampling.stream, state.step, 2 * gamma + 1)
        proposal = propose(
            self.draft,
            state,
            gamma,
            sparse=config.draft_attention == "sparse",
            truncate=decoding == "truncated_sampling",
            uniforms=None if uniforms is None else uniforms[:, :gamma],
        )
        if "sparse" in (config.verify, config.draft_attention):
            score_and_choose(self.target, self.draft, state, proposal.queries, config)
        sparse = config.verify == "sparse" and not refresh
        lookback = config.refresh_every * (gamma + 1) if refresh else 0
        logits, queries = verify(self.target, state, gamma, sparse, lookback)
        self.commit[decoding](state, proposal, logits, queries, uniforms, sparse)


def _commit_greedy(state, proposal, logits, queries, uniforms, sparse) -> None:
    accepted, tokens = accept_greedy(proposal.tokens, logits)
    commit(state, accepted, tokens, queries, sparse)


def _commit_sampling(state, proposal, logits, queries, uniforms, sparse, truncate: bool = False) -> None:
    sampling, gamma = state.sampling, proposal.tokens.shape[1]
    probs = process_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p, truncate)
    accepted, tokens = accept_sampling(
        proposal.tokens, proposal.probs, probs, uniforms[:, gamma : 2 * gamma], uniforms[:, 2 * gamma]
    )
    commit(state, accepted, tokens, queries, sparse)


def _commit_truncated_sampling(state, proposal, logits, queries, uniforms, sparse) -> None:
    _commit_sampling(state, proposal, logits, queries, uniforms, sparse, truncate=True)


def commit(state: State, accepted: Tensor, tokens: Tensor, queries: Tensor, sparse: bool) -> None:
    """Append each row's emitted tokens, cut at its end, and advance it.

    Args:
        accepted: [B] int32, draft tokens that the target accepted.
        tokens: [B, gamma + 1], of which the first accepted + 1 are emitted.
        queries: [B, gamma + 1, heads, D] of the block; that of the last token kept stays in the state.
        sparse: whether the pass read the verification set only (for the statistics).
    """
    block = tokens.shape[1]
    slots = torch.arange(block, dtype=torch.int32, device=tokens.device)
    is_eos = (tokens[..., None] == state.eos_token_ids).any(-1)
    stops = is_eos & (slots <= accepted[:, None])
    kept_until_stop = torch.where(stops, slots + 1, block + 1).amin(1)
    room = state.limits - (state.seq_lens + 1)
    kept = torch.minimum(torch.minimum(accepted + 1, kept_until_stop), room)
    kept = torch.where(state.finished, 0, kept).int()
    alive = kept > 0

    history = state.seq_lens
    available = history + block
    read = state.verification_set.counts + block if sparse else available
    state.read_share.add_(torch.where(alive, read / available, 0.0))
    counted = torch.minimum(accepted, kept).long()
    state.accepted_counts.scatter_add_(1, counted[:, None], alive[:, None].long())

    state.tokens.scatter_(1, (history[:, None] + 1 + slots).long(), tokens)
    last = (kept - 1).clamp(min=0).long()[:, None, None, None].expand(-1, 1, *queries.shape[2:])
    state.query.copy_(torch.where(alive[:, None, None, None], queries.gather(1, last), state.query))
    stopped = (kept_until_stop <= kept) & alive
    state.finished.logical_or_(stopped | (alive & (kept == room)))
    state.seq_lens.add_(kept)
    state.step.add_(1)
