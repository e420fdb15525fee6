"""Everything that a generation keeps on the device between steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dustin_compile.adapter import CachedModel, VerificationSet
from dustin_compile.config import DustinConfig
from dustin_compile.kv_cache import KVCache

MAX_EOS_TOKENS = 16


@dataclass
class Sampling:
    """How tokens are drawn from logits, one value a generation, on the device."""

    temperature: Tensor  # [] fp32
    top_k: Tensor  # [] int64; the vocabulary's size: off
    top_p: Tensor  # [] fp32; 1: off
    seed: Tensor  # [B] int64
    stream: Tensor  # [B] int64, separates rows of one seed


@dataclass
class State:
    """Fixed-size buffers that a step reads and writes in place; a captured graph holds their addresses.

    Row b's confirmed text is `tokens[b, : seq_lens[b] + 1]`: the last of them, at seq_lens[b], is pending, in
    neither cache yet. The draft's proposals follow it.
    """

    tokens: Tensor  # [B, capacity] int64
    seq_lens: Tensor  # [B] int32, L
    limits: Tensor  # [B] int32, tokens of the row at which it ends, prompt included
    finished: Tensor  # [B] bool; a finished row keeps running and changes nothing
    eos_token_ids: Tensor  # [MAX_EOS_TOKENS] int64, padded with -1
    query: Tensor  # [B, 1, target heads, D], of the last token that went through the target
    verification_set: VerificationSet
    sampling: Sampling
    step: Tensor  # [] int64; 0 is the prefill
    accepted_counts: Tensor  # [B, gamma + 1] int64, steps of the row by accepted draft tokens
    read_share: Tensor  # [B] fp32, sum over steps of (positions that verify read / positions that exist)
    target_cache: KVCache
    draft_cache: KVCache

    def __post_init__(self) -> None:
        torch._dynamo.mark_dynamic(self.tokens, 1)  # as in the caches, so that a larger capacity compiles nothing anew

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @property
    def pending(self) -> Tensor:
        """x, the newest confirmed token of each row, [B, 1]."""
        return self.tokens.gather(1, self.seq_lens[:, None].long())

    def first_rows(self, count: int) -> State:
        """The state of the first rows, in the same memory."""
        chosen, sampling = self.verification_set, self.sampling
        return State(
            tokens=self.tokens[:count],
            seq_lens=self.seq_lens[:count],
            limits=self.limits[:count],
            finished=self.finished[:count],
            eos_token_ids=self.eos_token_ids,
            query=self.query[:count],
            verification_set=VerificationSet(chosen.indices[:count], chosen.counts[:count], chosen.length[:count]),
            sampling=replace(sampling, seed=sampling.seed[:count], stream=sampling.stream[:count]),
            step=self.step,
            accepted_counts=self.accepted_counts[:count],
            read_share=self.read_share[:count],
            target_cache=self.target_cache.first_rows(count),
            draft_cache=self.draft_cache.first_rows(count),
        )


def new_state(target: CachedModel, draft: CachedModel, config: DustinConfig, batch: int, capacity: int) -> State:
    """Allocate the state of `batch` rows of `capacity` positions; every row is finished."""
    device = target.device

    def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return State(
        tokens=full(batch, capacity, dtype=torch.int64),
        seq_lens=full(batch, value=1),
        limits=full(batch),
        finished=full(batch, value=True, dtype=torch.bool),
        eos_token_ids=full(MAX_EOS_TOKENS, value=-1, dtype=torch.int64),
        query=torch.zeros(batch, 1, len(target.heads), target.head_dim, dtype=target.dtype, device=device),
        verification_set=VerificationSet(indices=full(batch, config.budget), counts=full(batch), length=full(batch)),
        sampling=Sampling(
            temperature=full(value=1, dtype=torch.float32),
            top_k=full(value=target.vocab_size, dtype=torch.int64),
            top_p=full(value=1, dtype=torch.float32),
            seed=full(batch, dtype=torch.int64),
            stream=full(batch, dtype=torch.int64),
        ),
        step=full(dtype=torch.int64),
        accepted_counts=full(batch, config.gamma + 1, dtype=torch.int64),
        read_share=full(batch, dtype=torch.float32),
        target_cache=target.new_cache(batch, capacity),
        draft_cache=draft.new_cache(batch, capacity),
    )
