"""Recorded verification steps: what the target attends to, and what each candidate group of heads would have said.

The attention recovery rate of a set I is the mean, over layers, heads and the γ + 1 verify queries, of the attention
mass on I over that on the history. It is linear in I, so one vector a step holds all of it: the mean of the softmax
over the history, whose sum over I is ARR(I).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dustin_compile.profile import Head
from dustin_compile.profiling.reader import Reader

STEPS = 6  # recorded in each text


@dataclass(frozen=True)
class Groups:
    """Groups of a model's heads that the search may score with.

    Attributes:
        layers: the retrieval heads of each layer, one group a layer.
        units: all query heads of one KV head, which cost no more to read than one of them, for each KV head that one
            of the retrieval heads reads.
    """

    layers: tuple[tuple[Head, ...], ...]
    units: tuple[tuple[Head, ...], ...]

    @staticmethod
    def of(retrieval_heads: Sequence[Sequence[Head]], query_heads: int, kv_heads: int) -> Groups:
        size = query_heads // kv_heads
        read = sorted({(layer, head // size) for heads in retrieval_heads for layer, head in heads})
        units = (tuple((layer, head) for head in range(kv * size, kv * size + size)) for layer, kv in read)
        return Groups(tuple(tuple(sorted(heads)) for heads in retrieval_heads), tuple(units))

    @property
    def all(self) -> tuple[tuple[Head, ...], ...]:
        return self.layers + self.units


@dataclass(frozen=True)
class Recording:
    """Verification steps.

    Attributes:
        lengths: history of each step, [S] int32.
        mass: mean attention of the verify queries to each position of the history, [S, N] fp32, 0 behind it.
        target: mean attention of each group of target heads with the last verified token's query, [S, groups, N].
        draft: the same of the draft's groups, over the γ draft queries.
    """

    lengths: Tensor
    mass: Tensor
    target: Tensor
    draft: Tensor

    @staticmethod
    def join(parts: Sequence[Recording]) -> Recording:
        """One recording of several."""
        return Recording(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Recording)})

    def to(self, device: torch.device) -> Recording:
        """The recording on a device."""
        return Recording(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def choose_lengths(tokens: int, budget: int) -> list[int]:
    """Histories at which to record a text: spread over its second half, longer than the budget, a token behind them."""
    first, last = max(tokens // 2, budget + 1), tokens - 1
    count = min(STEPS, last - first + 1)
    return [first + i * (last - first) // max(count - 1, 1) for i in range(count)]


def record(
    target: Reader, draft: Reader, groups: tuple[Groups, Groups], tokens: Tensor, lengths: Sequence[int], gamma: int
) -> Recording:
    """Read a text with both models and, at some lengths, run a step on it: the draft proposes, the target verifies.

    Both attend to the whole cache, so that what is recorded depends on no choice of heads. The text itself goes on
    as it stands, whatever was proposed.

    Args:
        groups: of target and draft.
        tokens: the text, [n] int64, longer than the last of the ascending `lengths`.
        gamma: tokens that the draft proposes, greedily.

    Returns:
        a Recording on the CPU, N the target's capacity.
    """
    steps, read = [], 0
    for length in lengths:
        _, queries = target.read(tokens[read:length], read)
        draft.read(tokens[read:length], read)
        read = length
        signal = score_groups(target, queries, length, groups[0].all)

        block, draft_queries = [tokens[length : length + 1]], []
        for i in range(gamma):
            hidden, queries = draft.forward(block[-1], length + i)
            block.append(draft.choose(hidden))
            draft_queries.append(queries)
        look_ahead = score_groups(draft, torch.cat(draft_queries, dim=1), length, groups[1].all)

        _, verify_queries = target.forward(torch.cat(block), length)
        steps.append((target.mean_attention(verify_queries, length).cpu(), signal, look_ahead))
    masses, signals, look_aheads = zip(*steps, strict=True)
    return Recording(
        torch.tensor(lengths, dtype=torch.int32), torch.stack(masses), torch.stack(signals), torch.stack(look_aheads)
    )


def score_groups(reader: Reader, queries: Tensor, length: int, groups: Sequence[Sequence[Head]]) -> Tensor:
    """Mean attention of each group of heads, which are of one layer each, over the queries, [groups, capacity] fp32.

    It is `score_heads` of the group. That of several groups is the mean of theirs, weighted by their numbers of heads.
    """
    scores = torch.zeros(len(groups), reader.cache.key.shape[2], device=queries.device)
    for layer, probs in enumerate(reader.attention(queries, length)):
        by_head = probs.mean(0)
        for row, group in enumerate(groups):
            if group[0][0] == layer:
                scores[row, :length] = by_head[[head for _, head in group]].mean(0)
    return scores.cpu()
