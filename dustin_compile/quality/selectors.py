"""Ways to choose what a verification reads of the history, at the same budget, sinks and window included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dustin_compile.graphs.verify import smooth
from dustin_compile.ops.select_tiered import select_tiered
from dustin_compile.profile import Head
from dustin_compile.quality.engine import Cache, Engine, Keep, attention

PAGE = 16  # positions, of Quest
OBSERVED = 64  # last prompt tokens whose queries SnapKV asks
POOL = 7  # positions that SnapKV averages over
LAYER_GROUPS = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a selector goes by; the names are those of DustinConfig and Profile.

    Attributes:
        reduce: how the draft's γ queries are put together.
    """

    budget: int
    sinks: int = 4
    window: int = 64
    draft_share: int
    target_heads: tuple[Head, ...]
    draft_heads: tuple[Head, ...]
    reduce: Literal["mean", "max"] = "mean"

    @property
    def free(self) -> int:
        return self.budget - self.sinks - self.window


@dataclass
class Step:
    """A verification step of B rows: what a selector may look at.

    Attributes:
        lengths: of the histories, [B] int64.
        cache, draft_cache: of target and draft.
        last_queries: of the last token that went through the target, a layer [B, Hq, 1, D].
        draft_queries: of the draft's γ tokens, a layer [B, Hq, γ, D].
        observed: SnapKV's scores, pooled, a layer [B, Hkv, N].
        prompt: lengths of the prompts, when these were asked, [B] int64.
        mass: mean attention of the verify queries in a dense pass, [layers, B, N]; what an oracle knows.
    """

    target: Engine
    draft: Engine
    lengths: Tensor
    cache: Cache
    draft_cache: Cache
    last_queries: Sequence[Tensor]
    draft_queries: Sequence[Tensor]
    observed: Tensor
    prompt: Tensor
    mass: Tensor | None = None
    scores: dict = field(default_factory=dict)

    def target_scores(self, heads: tuple[Head, ...], raw: bool = False) -> Tensor:
        """Mean attention of heads with the last query, [B, N], smoothed as in the engine, or raw."""
        if heads not in self.scores:
            self.scores[heads] = score(self.target, self.last_queries, self.cache, self.lengths, heads)
        return self.scores[heads] if raw else smooth(self.scores[heads])

    def draft_scores(self, heads: tuple[Head, ...], reduce: str) -> Tensor:
        """Attention of heads with the draft's queries, their mean or maximum, [B, N]."""
        name = "draft", heads, reduce
        if name not in self.scores:
            self.scores[name] = score(self.draft, self.draft_queries, self.draft_cache, self.lengths, heads, reduce)
        return self.scores[name]


def score(
    engine: Engine,
    queries: Sequence[Tensor] | Mapping[int, Tensor],
    cache: Cache,
    lengths: Tensor,
    heads: tuple[Head, ...],
    reduce: str = "mean",
) -> Tensor:
    """Mean attention of heads to the history, over the mean or maximum of their queries [B, N]."""
    total = torch.zeros(cache.key.shape[1], cache.key.shape[3], device=engine.device)
    for layer in sorted({layer for layer, _ in heads}):
        columns = [head for at, head in heads if at == layer]
        probs = attention(queries[layer], cache.key[layer], lengths, engine.scale)[:, columns]
        total += (probs.mean(2) if reduce == "mean" else probs.amax(2)).sum(1)
    return total / len(heads)


Selector = Callable[[Step, Settings], Keep]


def choose(step: Step, settings: Settings, draft_scores: Tensor, target_scores: Tensor, draft_share: int) -> Tensor:
    """The set that `ops.select_tiered` chooses, [B, 1, 1, N]."""
    indices, counts = select_tiered(
        draft_scores.contiguous(),
        target_scores.contiguous(),
        step.lengths.int(),
        settings.budget,
        settings.sinks,
        settings.window,
        draft_share,
    )
    chosen = torch.zeros_like(target_scores, dtype=torch.int32)
    valid = torch.arange(settings.budget, device=indices.device) < counts[:, None]
    return chosen.scatter_add_(1, indices.long(), valid.int()).bool()[:, None, None]


def everywhere(chosen: Tensor) -> Keep:
    """One set for all layers, heads and queries."""
    return lambda layer, query: chosen


def full(step: Step, settings: Settings) -> Keep:
    """The whole cache."""
    return everywhere(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=step.lengths.device))


def hybrid(step: Step, settings: Settings) -> Keep:
    """Dustin: the draft's look-ahead first, then the target's history."""
    ahead = step.draft_scores(settings.draft_heads, settings.reduce)
    return everywhere(choose(step, settings, ahead, step.target_scores(settings.target_heads), settings.draft_share))


def first_set(step: Step, settings: Settings) -> Keep:
    """What the draft reads in its first step, where no look-ahead was yet: the target's choice, not smoothed."""
    scores = step.target_scores(settings.target_heads, raw=True)
    return everywhere(choose(step, settings, scores, scores, 0))


def history(step: Step, settings: Settings) -> Keep:
    """The target's history alone."""
    scores = step.target_scores(settings.target_heads)
    return everywhere(choose(step, settings, scores, scores, 0))


def draft(step: Step, settings: Settings) -> Keep:
    """The draft's look-ahead alone."""
    scores = step.draft_scores(settings.draft_heads, settings.reduce)
    return everywhere(choose(step, settings, scores, scores, 0))


def total(step: Step, settings: Settings) -> Keep:
    """The sum of both scores, each of which sums to 1."""
    scores = step.target_scores(settings.target_heads) + step.draft_scores(settings.draft_heads, "mean")
    return everywhere(choose(step, settings, scores, scores, 0))


def unsmoothed(step: Step, settings: Settings) -> Keep:
    """The hybrid without `smooth`."""
    ahead = step.draft_scores(settings.draft_heads, settings.reduce)
    scores = step.target_scores(settings.target_heads, raw=True)
    return everywhere(choose(step, settings, ahead, scores, settings.draft_share))


def streaming(step: Step, settings: Settings) -> Keep:
    """StreamingLLM: sinks, and a window of all the rest."""
    place = torch.arange(step.cache.key.shape[3], device=step.lengths.device, dtype=torch.float32)
    scores = place.expand(len(step.lengths), -1)
    return everywhere(choose(step, settings, scores, scores, 0))


def oracle(step: Step, settings: Settings) -> Keep:
    """One set of the highest true attention of the verify queries."""
    scores = _mass(step).mean(0)
    return everywhere(choose(step, settings, scores, scores, 0))


def oracle_3(step: Step, settings: Settings) -> Keep:
    """The oracle with a set for each third of the layers."""
    parts = [_mass(step)[group].mean(0) for group in _layer_groups(step)]
    return _by_group(step, [choose(step, settings, part, part, 0) for part in parts])


def hybrid_3(step: Step, settings: Settings) -> Keep:
    """The hybrid with a set for each third of the layers, by its own target heads, or by all where it has none."""
    ahead = step.draft_scores(settings.draft_heads, settings.reduce)
    sets = []
    for group in _layer_groups(step):
        heads = tuple(head for head in settings.target_heads if head[0] in group)
        scores = step.target_scores(heads or settings.target_heads)
        sets.append(choose(step, settings, ahead, scores, settings.draft_share))
    return _by_group(step, sets)


def reselect(step: Step, settings: Settings) -> Keep:
    """The hybrid, chosen anew in each layer with target heads, by what these attend to with the block's own queries."""
    first = hybrid(step, settings)
    chosen = first(0, step.last_queries[0])

    def keep(layer: int, query: Tensor) -> Tensor:
        nonlocal chosen
        if layer == 0:  # of a new pass, which asks for the layers in their order
            chosen = first(0, query)
        if heads := tuple(head for head in settings.target_heads if head[0] == layer):
            scores = score(step.target, {layer: query}, step.cache, step.lengths, heads)
            chosen = choose(step, settings, scores, scores, 0)
        return chosen

    return keep


def snapkv(step: Step, settings: Settings) -> Keep:
    """SnapKV (arXiv 2404.14469): a set for each KV head, chosen once at the prompt's end, and the window."""
    place = torch.arange(step.cache.key.shape[3], device=step.lengths.device)
    prompt, lengths = step.prompt[:, None, None], step.lengths[:, None, None]
    old = (place >= settings.sinks) & (place < prompt - settings.window)
    framed = (place < settings.sinks) | (place >= lengths - settings.window) | (lengths <= settings.budget)
    group = step.target.config.num_attention_heads // step.observed.shape[2]

    def keep(layer: int, query: Tensor) -> Tensor:
        chosen = _highest(step.observed[layer].masked_fill(~old, -1.0), settings.free)
        return ((chosen & old) | framed).repeat_interleave(group, dim=1)[:, :, None]

    return keep


def quest(step: Step, settings: Settings) -> Keep:
    """Quest (arXiv 2406.10774): for each head and query, the pages whose keys may have the highest logits."""
    place = torch.arange(step.cache.key.shape[3], device=step.lengths.device)
    lengths = step.lengths[:, None, None, None]
    middle = (place >= settings.sinks) & (place < lengths - settings.window)
    framed = ((place < settings.sinks) | (place >= lengths - settings.window)) | (lengths <= settings.budget)

    def keep(layer: int, query: Tensor) -> Tensor:
        bound = page_bounds(query, step.cache.key[layer], step.lengths).repeat_interleave(PAGE, dim=-1)
        chosen = _highest(bound.masked_fill(~middle, float("-inf")), settings.free)
        return (chosen & middle) | framed

    return keep


def page_bounds(query: Tensor, key: Tensor, lengths: Tensor) -> Tensor:
    """Upper bounds of q·k in each page of PAGE positions below lengths[b], [B, Hq, T, N / PAGE]; unscaled.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, N, D], N a multiple of PAGE.
    """
    here = (torch.arange(key.shape[2], device=key.device) < lengths[:, None])[:, None, :, None]
    group = query.shape[1] // key.shape[1]
    low, high = (key.masked_fill(~here, end).unflatten(2, (-1, PAGE)) for end in (float("inf"), float("-inf")))
    empty = ~here.unflatten(2, (-1, PAGE)).any(3)
    low, high = low.amin(3).masked_fill(empty, 0), high.amax(3).masked_fill(empty, 0)
    low, high = (x.repeat_interleave(group, dim=1).mT for x in (low, high))
    return (query.clamp(min=0) @ high + query.clamp(max=0) @ low).float()


SELECTORS: dict[str, Selector] = {
    "full": full,
    "hybrid": hybrid,
    "history": history,
    "draft": draft,
    "streaming": streaming,
    "snapkv": snapkv,
    "quest": quest,
    "oracle": oracle,
    "sum": total,
    "oracle_3": oracle_3,
    "hybrid_3": hybrid_3,
    "unsmoothed": unsmoothed,
    "reselect": reselect,
}


def observe_prompt(engine: Engine, tokens: Tensor, prompt: Tensor, cache: Cache) -> Tensor:
    """SnapKV's scores: attention of the prompt's last queries to what is before them, [layers, B, Hkv, N].

    Args:
        tokens: [B, n], the prompts with whatever is behind them.
        prompt: [B] int64, at least OBSERVED + 1.
    """
    scores = []

    def observe(layer: int, query: Tensor, probs: Tensor) -> None:
        by_head = probs.sum(2).unflatten(1, (engine.config.num_key_value_heads, -1)).mean(2)
        scores.append(torch.nn.functional.avg_pool1d(by_head, POOL, 1, POOL // 2))

    places = (prompt - OBSERVED)[:, None] + torch.arange(OBSERVED, device=prompt.device)
    engine.run(tokens.gather(1, places), prompt - OBSERVED, cache, observe=observe)
    return torch.stack(scores)


def _mass(step: Step) -> Tensor:
    if step.mass is None:
        raise ValueError("the oracle needs the mass of a dense pass")
    return step.mass


def _by_group(step: Step, sets: list[Tensor]) -> Keep:
    set_of = {layer: chosen for group, chosen in zip(_layer_groups(step), sets, strict=True) for layer in group}
    return lambda layer, query: set_of[layer]


def _layer_groups(step: Step) -> list[list[int]]:
    layers = torch.arange(step.target.layers)
    return [group.tolist() for group in layers.tensor_split(min(LAYER_GROUPS, len(layers)))]


def _highest(scores: Tensor, count: int) -> Tensor:
    """Mask of the highest scores of the last dimension."""
    count = min(count, scores.shape[-1])
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count).indices, True)
