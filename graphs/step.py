"""One draft-verify step, all on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dustin_compile.adapter import CachedModel
from dustin_compile.config import DustinConfig
from dustin_compile.graphs.capture import compile_by_batch, launch_beside
from dustin_compile.graphs.draft import Choose, Proposal, propose
from dustin_compile.graphs.state import State
from dustin_compile.graphs.verify import score_and_choose, score_history, verify
from dustin_compile.ops.accept import accept_greedy, accept_sampling, greedy, process_logits, sample, uniform

Decoding = Literal["greedy", "sampling", "truncated_sampling"]


class Step:
    """The step of one pair. Its regions are compiled at first use, for each batch size and way of decoding.

    Args:
        target, draft: the pair.
        config: its settings, draft_share resolved.
    """

    def __init__(self, target: CachedModel, draft: CachedModel, config: DustinConfig):
        self.target, self.draft, self.config = target, draft, config
        choose: dict[Decoding, Choose] = {
            "greedy": choose_greedy,
            "sampling": choose_sampled,
            "truncated_sampling": choose_truncated,
        }
        finish: dict[Decoding, Callable[..., Any]] = {
            "greedy": accept_and_commit_greedy,
            "sampling": accept_and_commit_sampled,
            "truncated_sampling": accept_and_commit_truncated,
        }
        if config.compile:
            choose = {decoding: compile_by_batch(function) for decoding, function in choose.items()}
            finish = {decoding: compile_by_batch(function) for decoding, function in finish.items()}
        self.choose, self.finish = choose, finish

    def __call__(self, state: State, decoding: Decoding, refresh: bool = False) -> None:
        """Run one step on every row: draft, score, select, verify, accept, commit.

        Args:
            refresh: verify densely, and rewrite the K/V of all tokens since the last refresh.
        """
        config, gamma = self.config, self.config.gamma
        uniforms = draft_uniforms = None
        if decoding != "greedy":
            sampling = state.sampling
            uniforms = uniform(sampling.seed, sampling.stream, state.step, 2 * gamma + 1)
            draft_uniforms = uniforms[:, :gamma]
        sparse_draft = config.draft_attention == "sparse"
        choosing = sparse_draft or config.verify == "sparse"
        if choosing:  # from the last step's query: the draft, which leaves most of the device idle, hides it
            target_scores = launch_beside(lambda: score_history(self.target, state), self.target.device)
        proposal = propose(self.draft, state, gamma, sparse_draft, self.choose[decoding], draft_uniforms)
        if choosing:
            score_and_choose(self.draft, state, target_scores(), proposal.queries, config)
        sparse = config.verify == "sparse" and not refresh
        lookback = (config.refresh_every - 1) * (gamma + 1) if refresh else 0
        logits, queries = verify(self.target, state, gamma, sparse, lookback)
        self.finish[decoding](state, proposal, logits, queries, uniforms, sparse)


def choose_greedy(state: State, logits: Tensor, draw: Tensor | None) -> tuple[Tensor, None]:
    return greedy(logits), None


def choose_sampled(state: State, logits: Tensor, draw: Tensor | None, truncate: bool = False) -> tuple[Tensor, Tensor]:
    sampling = state.sampling
    probs = process_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p, truncate)
    return sample(probs, cast(Tensor, draw)), probs


def choose_truncated(state: State, logits: Tensor, draw: Tensor | None) -> tuple[Tensor, Tensor]:
    return choose_sampled(state, logits, draw, truncate=True)


def accept_and_commit_greedy(
    state: State, proposal: Proposal, logits: Tensor, queries: Tensor, uniforms: Tensor | None, sparse: bool
) -> None:
    accepted, tokens = accept_greedy(proposal.tokens, logits)
    commit(state, accepted, tokens, queries, sparse)


def accept_and_commit_sampled(
    state: State,
    proposal: Proposal,
    logits: Tensor,
    queries: Tensor,
    uniforms: Tensor,
    sparse: bool,
    truncate: bool = False,
) -> None:
    sampling, gamma = state.sampling, proposal.tokens.shape[1]
    probs = process_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p, truncate)
    draft_probs = cast(Tensor, proposal.probs)
    accepted, tokens = accept_sampling(
        proposal.tokens, draft_probs, probs, uniforms[:, gamma : 2 * gamma], uniforms[:, 2 * gamma]
    )
    commit(state, accepted, tokens, queries, sparse)


def accept_and_commit_truncated(
    state: State, proposal: Proposal, logits: Tensor, queries: Tensor, uniforms: Tensor, sparse: bool
) -> None:
    accept_and_commit_sampled(state, proposal, logits, queries, uniforms, sparse, truncate=True)


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
    state.finished.logical_or_(alive & ((kept == kept_until_stop) | (kept == room)))
    state.seq_lens.add_(kept)
    state.step.add_(1)
