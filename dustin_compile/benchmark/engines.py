"""What a step is measured against: the same models decoded in the ways that a user may pick today.

All but one are steps of one form, captured alike:

| engine | draft reads | target reads |
|---|---|---|
| vanilla | | everything, one token a step |
| classic | everything | everything |
| magicdec | the verification set | everything |
| dustin | everything | the verification set |
| dustin+ | the verification set | the verification set |

The sixth, transformers, is a `StaticCache` and `torch.compile(mode="reduce-overhead")`, as its documentation says.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from dustin_compile.config import AttentionMode
from dustin_compile.generation import Generation
from dustin_compile.graphs.capture import compile_by_batch
from dustin_compile.graphs.draft import Proposal
from dustin_compile.graphs.state import State
from dustin_compile.graphs.step import Decoding, Step, commit
from dustin_compile.kv_cache import head_dim
from dustin_compile.ops.accept import accept_greedy, greedy, uniform
from dustin_compile.pair import CompiledPair

MODES: dict[str, tuple[AttentionMode, AttentionMode]] = {  # draft, verify
    "classic": ("dense", "dense"),
    "magicdec": ("sparse", "dense"),
    "dustin": ("dense", "sparse"),
    "dustin+": ("sparse", "sparse"),
}
VANILLA, TRANSFORMERS = "vanilla", "transformers"
ENGINES = (VANILLA, TRANSFORMERS, *MODES)


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens that a step yields on average where each draft token is accepted with this chance, if those before are."""
    return sum(acceptance**i for i in range(gamma + 1))


class TargetStep(Step):
    """One token a step, by the target alone: greedy decoding over the same cache, with the same bookkeeping."""

    def __init__(self, step: Step):
        super().__init__(step.target, step.draft, step.config)
        self.commit = compile_by_batch(commit_greedy) if self.config.compile else commit_greedy

    def __call__(self, state: State, decoding: Decoding, refresh: bool = False) -> None:
        hidden, queries = self.target.forward(state.pending, state.seq_lens, state.target_cache, None)
        self.commit(state, self.target.logits(hidden), queries)


def commit_greedy(state: State, logits: Tensor, queries: Tensor) -> None:
    commit(state, torch.zeros_like(state.seq_lens), greedy(logits), queries, False)


def accept_drawn(acceptance: float) -> Callable[..., None]:
    """A step's `finish` that accepts by lot, for models whose random weights would accept nothing.

    It does the greedy one's work; but how many draft tokens count is drawn, from the seed and the number of the step.
    """

    def finish(
        state: State, proposal: Proposal, logits: Tensor, queries: Tensor, uniforms: Tensor | None, sparse: bool
    ) -> None:
        gamma = proposal.tokens.shape[1]
        draws = uniform(state.sampling.seed, state.sampling.stream, state.step, gamma)
        accepted = (draws < acceptance).int().cumprod(1).sum(1, dtype=torch.int32)
        _, tokens = accept_greedy(proposal.tokens, logits)
        is_draft = torch.arange(gamma + 1, device=tokens.device) < accepted[:, None]
        tokens = torch.where(is_draft, nn.functional.pad(proposal.tokens, (0, 1)), tokens)
        commit(state, accepted, tokens, queries, sparse)

    return finish


class Engines:
    """The steps of one pair: they share its models, its caches' form and all that is compiled.

    Args:
        pair: whose models and settings the engines have.
        acceptance: chance of each draft token, drawn; None: as the models have it.
    """

    def __init__(self, pair: CompiledPair, acceptance: float | None):
        self.pair, self.acceptance = pair, acceptance
        self.target, self.draft = pair._generation.target, pair._generation.draft
        self._steps: dict[int, Step] = {}
        self._vanilla = TargetStep(pair._generation.step)

    def step(self, engine: str, gamma: int) -> Step:
        """An engine's step; vanilla has no gamma."""
        if engine == VANILLA:
            return self._vanilla
        if gamma not in self._steps:
            config = dataclasses.replace(self.pair.config, gamma=gamma)
            base = Step(self.target, self.draft, config)
            base.choose = self._vanilla.choose  # the same for every gamma, so compiled once
            if self.acceptance is not None:
                finish = accept_drawn(self.acceptance)
                base.finish = {**base.finish, "greedy": compile_by_batch(finish) if config.compile else finish}
            self._steps[gamma] = base
        step = copy.copy(self._steps[gamma])
        draft_attention, verify = MODES[engine]
        step.config = dataclasses.replace(step.config, draft_attention=draft_attention, verify=verify)
        return step

    def engine_pair(self, engine: str, gamma: int) -> CompiledPair:
        """The pair, generating by an engine's steps."""
        pair, step = copy.copy(self.pair), self.step(engine, gamma)
        pair.config = step.config
        pair._generation = Generation(self.target, self.draft, step.config)
        pair._generation.step = step
        return pair


class TransformersDecoder:
    """One token a step, greedily, as transformers' documentation does it with a static cache and torch.compile.

    Args:
        model: the target.
        batch, capacity: of the cache.
        compile: False runs it eagerly.
    """

    def __init__(self, model: PreTrainedModel, batch: int, capacity: int, compile: bool):
        self.model = model
        config = model.config
        self.cache = StaticCache(config=config, max_cache_len=capacity)
        self.cache.early_initialization(
            batch, config.num_key_value_heads, head_dim(config), model.dtype, torch.device(model.device)
        )
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_argument: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": self.cache}
        self.forward: Callable[..., Any] = model
        if compile:
            self.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def fill(self, length: int) -> None:
        """Let the cache hold `length` random positions."""
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.rewind(length)

    def rewind(self, length: int) -> None:
        """Forget all positions from `length` on."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    def prefill(self, input_ids: Tensor, chunk: int = 2048) -> Tensor:
        """Run prompts [B, L], eagerly, and return the first token of each, [B, 1]."""
        for low in range(0, input_ids.shape[1], chunk):
            tokens = input_ids[:, low : low + chunk]
            positions = torch.arange(low, low + tokens.shape[1], device=tokens.device)[None]
            logits = self.model(tokens, position_ids=positions, logits_to_keep=1, **self.cache_argument).logits
        return logits.argmax(-1)

    def decode(self, token: Tensor, position: Tensor) -> Tensor:
        """The token after `token` [B, 1], which stands at `position` [1, 1]."""
        logits = self.forward(token, position_ids=position, **self.cache_argument).logits
        return logits[:, -1].argmax(-1, keepdim=True)
