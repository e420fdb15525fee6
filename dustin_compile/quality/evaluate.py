"""What a selector loses: on steps along a true text, and in text that it generates itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_compile.quality.engine import Cache, Engine, Keep, Observe, attention, history
from dustin_compile.quality.selectors import (
    OBSERVED,
    PAGE,
    SELECTORS,
    Selector,
    Settings,
    Step,
    first_set,
    observe_prompt,
)

Key = tuple[str, Settings]


@dataclass(frozen=True)
class Scores:
    """A selector's marks, means over the verify queries of each step, [B, steps] fp32 on the CPU.

    Attributes:
        kl: divergence of the next token's distribution, full from sparse, in nats.
        arr: attention recovery rate.
        agreement: share of queries with the full cache's likeliest token.
        delta_loglik: of the true next token, sparse minus full, in nats; only of queries with the true text before
            them.
        positions_read: of the history, by a KV head for all queries of its heads; mean over KV heads and layers.
        arr_by_layer: [layers, B, steps].
    """

    kl: Tensor
    arr: Tensor
    agreement: Tensor
    delta_loglik: Tensor
    positions_read: Tensor
    arr_by_layer: Tensor


@torch.no_grad()
def compare_on_text(
    target: Engine,
    draft: Engine,
    texts: Tensor,
    prompt: int,
    offsets: Sequence[int],
    gamma: int,
    selectors: Mapping[str, Selector],
    settings: Iterable[Settings],
) -> dict[Key, Scores]:
    """Verification steps along true texts, at histories of prompt + offset tokens.

    As in a real step the draft proposes, greedily, and the target verifies its proposals; every selector sees the same
    block over the same dense K and V, and the text goes on as it stands. The draft reads its whole cache: no step came
    before whose set it could read.

    Args:
        texts: [B, n] int64, n at least prompt + offset + gamma + 2.
        prompt: tokens after which SnapKV chooses.

    Raises:
        ValueError: the texts are too short.
    """
    need = prompt + max(offsets) + gamma + 2
    if texts.shape[1] < need or prompt <= OBSERVED:
        raise ValueError(f"texts of {texts.shape[1]} tokens must have {need}, of which the prompt more than {OBSERVED}")
    settings = list(settings)
    texts = texts.to(target.device)
    cache, draft_cache = (engine.new_cache(len(texts), _round_up(texts.shape[1])) for engine in (target, draft))
    target.prefill(texts, cache)
    draft.prefill(texts, draft_cache)
    prompts = torch.full((len(texts),), prompt, device=texts.device)
    observed = observe_prompt(target, texts, prompts, cache)
    found: dict[Key, list[tuple[Tensor, ...]]] = {}
    for offset in offsets:
        lengths = prompts + offset
        at = prompt + offset
        last_queries = ask(target, texts[:, at - 1 : at], lengths - 1, cache)
        block, draft_queries = propose(draft, texts[:, at : at + 1], lengths, draft_cache, gamma)
        step = Step(target, draft, lengths, cache, draft_cache, last_queries, draft_queries, observed, prompts)
        full, queries, step.mass = look(target, block, lengths, cache)
        truth = texts[:, at + 1 : at + gamma + 2]
        on_text = torch.cat((torch.ones_like(block[:, :1]), (block[:, 1:] == truth[:, :-1]).cumprod(1)), dim=1)
        for setting in settings:
            for name, selector in selectors.items():
                keep = selector(step, setting)
                sparse = target.run(block, lengths, cache, keep).log_softmax(-1)
                by_layer = recovery(target, queries, step, keep)
                gain = (sparse - full).gather(2, truth[..., None])[..., 0]
                found.setdefault((name, setting), []).append(
                    (
                        divergence(full, sparse).mean(1),
                        by_layer.mean(0),
                        (full.argmax(-1) == sparse.argmax(-1)).float().mean(1),
                        (gain * on_text).sum(1) / on_text.sum(1),
                        positions_read(target, queries, step, keep),
                        by_layer,
                    )
                )
    return {key: Scores(*(torch.stack(part, -1).cpu() for part in zip(*steps, strict=True)))
            for key, steps in found.items()}  # fmt: skip


def propose(
    draft: Engine, tokens: Tensor, start: Tensor, cache: Cache, gamma: int, keep: Keep | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The draft's greedy proposals behind tokens [B, T] at positions start[b]...

    Returns:
        tokens and proposals, [B, T + gamma], and the draft's queries of all of these but the last, a layer.
    """
    for _ in range(gamma):
        queries: list[Tensor] = []
        logits = draft.run(tokens, start, cache, keep, lambda layer, query, probs: queries.append(query))  # noqa: B023
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    return tokens, queries


def ask(engine: Engine, tokens: Tensor, start: Tensor, cache: Cache) -> list[Tensor]:
    """Queries of a block in a dense pass, a layer."""
    queries: list[Tensor] = []
    engine.run(tokens, start, cache, observe=lambda layer, query, probs: queries.append(query))
    return queries


def look(engine: Engine, block: Tensor, lengths: Tensor, cache: Cache) -> tuple[Tensor, list[Tensor], Tensor]:
    """A dense pass: log-probabilities, queries of each layer, and mean attention to the history [layers, B, N]."""
    queries, mass = [], []

    def observe(layer: int, query: Tensor, probs: Tensor) -> None:
        queries.append(query)
        mass.append((probs / probs.sum(-1, keepdim=True)).mean((1, 2)))

    logits = engine.run(block, lengths, cache, observe=observe)
    return logits.log_softmax(-1), queries, torch.stack(mass)


def recovery(engine: Engine, queries: Sequence[Tensor], step: Step, keep: Keep) -> Tensor:
    """Attention recovery rate of each layer, mean over heads and verify queries, [layers, B]."""
    rates = []
    for layer, query in enumerate(queries):
        kept = keep(layer, query)
        if kept.shape[1:3] == (1, 1) and step.mass is not None:
            rates.append((step.mass[layer] * kept[:, 0, 0]).sum(-1))
        else:
            probs = attention(query, step.cache.key[layer], step.lengths, engine.scale)
            rates.append((probs * kept).sum(-1).mean((1, 2)))
    return torch.stack(rates)


def positions_read(engine: Engine, queries: Sequence[Tensor], step: Step, keep: Keep) -> Tensor:
    """Positions of the history that a KV head reads: those that any query of its heads may see. Mean over all, [B]."""
    seen, kv_heads = history(step.cache.key, step.lengths), engine.config.num_key_value_heads
    counts = []
    for layer, query in enumerate(queries):
        kept = keep(layer, query) & seen
        if kept.shape[1:3] != (1, 1):
            kept = kept.unflatten(1, (kv_heads, -1)).any(2).any(2)
        counts.append(kept.sum(-1).float().flatten(1).mean(1))
    return torch.stack(counts).mean(0)


def divergence(full: Tensor, sparse: Tensor) -> Tensor:
    """KL(full ‖ sparse) of log-probabilities [.., vocab], in nats."""
    return (full.exp() * (full - sparse)).sum(-1).clamp(min=0)


@dataclass(frozen=True)
class Generated:
    """Greedy text, on the CPU.

    Attributes:
        tokens: [B, new] int64.
        tokens_per_step: [B].
        places, kl, active: of each step and row, [steps, B], where asked for: tokens generated before the step, its
            KL(dense ‖ sparse) over the tokens that it accepts, and whether the row was still unfinished. The dense
            model reads the same text with dense K and V.
    """

    tokens: Tensor
    tokens_per_step: Tensor
    places: Tensor | None = None
    kl: Tensor | None = None
    active: Tensor | None = None


@dataclass(frozen=True)
class Prompts:
    """Prompts that both models have read, to generate from any number of times.

    Attributes:
        text: [B, N] int64, with room for what is generated.
        lengths: of the prompts, [B] int64.
        cache, draft_cache: dense K and V of all prompt tokens.
        observed, last_queries: as in `Step`, of all prompt tokens but the last, which is pending.
    """

    target: Engine
    draft: Engine
    text: Tensor
    lengths: Tensor
    cache: Cache
    draft_cache: Cache
    observed: Tensor
    last_queries: list[Tensor]


@torch.no_grad()
def read_prompts(target: Engine, draft: Engine, prompts: Tensor, prompt_lengths: Tensor, room: int) -> Prompts:
    """Prefill.

    Args:
        prompts: [B, n] int64, padded on the right.
        prompt_lengths: [B] int64, more than OBSERVED + 1.
        room: positions behind the longest prompt.
    """
    prompts, lengths = prompts.to(target.device), prompt_lengths.to(target.device)
    text = torch.nn.functional.pad(prompts, (0, _round_up(prompts.shape[1] + room) - prompts.shape[1]))
    cache, draft_cache = (engine.new_cache(*text.shape) for engine in (target, draft))
    target.prefill(prompts, cache)
    draft.prefill(prompts, draft_cache)
    observed = observe_prompt(target, text, lengths - 1, cache)
    last_queries = ask(target, text.gather(1, lengths[:, None] - 2), lengths - 2, cache)
    return Prompts(target, draft, text, lengths, cache, draft_cache, observed, last_queries)


@torch.no_grad()
def generate(
    prompts: Prompts,
    new_tokens: int,
    gamma: int,
    selector: str,
    settings: Settings,
    refresh_every: int | Sequence[int] = 0,
    measure: bool = False,
) -> Generated:
    """Greedy draft-verify generation, where later steps read the K and V that sparse verification wrote.

    Whatever the selector, the draft is that of a compiled pair by default (draft_attention="sparse"): it reads what
    `hybrid` chose in the step before, and all that came since.

    Args:
        prompts: with room for `room_for(new_tokens, gamma, refresh_every)` positions; they stay as they are.
        selector: a name of SELECTORS.
        refresh_every: every so many steps, verify densely and rewrite the K and V since the last time; 0: never. One
            number, or one a row.
        measure: compare each step with the dense model.

    Raises:
        ValueError: the prompts have too little room.
    """
    target, draft, prompt = prompts.target, prompts.draft, prompts.lengths
    text, cache, draft_cache = prompts.text.clone(), prompts.cache.copy(), prompts.draft_cache.copy()
    (batch, capacity), device = text.shape, text.device
    periods = [refresh_every] * batch if isinstance(refresh_every, int) else list(refresh_every)
    if (room := int(capacity - prompt.max())) < (need := room_for(new_tokens, gamma, periods)):
        raise ValueError(f"prompts have room for {room} tokens; {new_tokens} new ones need {need}")
    rows = torch.arange(batch, device=device)
    dense_cache = cache.copy() if measure else cache
    lengths, last_queries = prompt - 1, prompts.last_queries
    refreshed, steps = lengths.clone(), torch.zeros(batch, device=device)
    before = Step(target, draft, lengths - 1, cache, draft_cache, last_queries, [], prompts.observed, prompt - 1)
    draft_keep = _with_later(first_set(before, settings), cache, lengths - 1)
    trace: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    while bool((active := lengths + 1 < prompt + new_tokens).any()):
        count += 1
        feed = text[rows[:, None], torch.stack((lengths - 1, lengths), dim=1)]  # as graphs.draft.propose does
        block, draft_queries = propose(draft, feed, lengths - 1, draft_cache, gamma, draft_keep)
        draft.run(block, lengths - 1, draft_cache, draft_keep, write=True)
        block, draft_queries = block[:, 1:], [queries[:, :, 1:] for queries in draft_queries]
        if due := [row for row, period in enumerate(periods) if period and count % period == 0]:
            rewrite(target, text, due, refreshed, lengths, cache)
            refreshed[due] = lengths[due]
        step = Step(
            target, draft, lengths, cache, draft_cache, last_queries, draft_queries, prompts.observed, prompt - 1
        )
        if selector.startswith("oracle"):
            step.mass = look(target, block, lengths, cache)[2]
        keep = SELECTORS[selector](step, settings)
        if due:
            keep = _dense_in(keep, torch.isin(rows, torch.tensor(due, device=device)))
        draft_keep = _with_later(SELECTORS["hybrid"](step, settings), cache, lengths)
        queries: list[Tensor] = []
        observe: Observe = lambda layer, query, probs: queries.append(query)  # noqa: B023, E731
        logits = target.run(block, lengths, cache, keep, observe, write=True)
        chosen = logits.argmax(-1)
        accepted = (chosen[:, :-1] == block[:, 1:]).cumprod(1).sum(1)
        if measure:
            dense = target.run(block, lengths, dense_cache, write=True).log_softmax(-1)
            counted = torch.arange(gamma + 1, device=device) <= accepted[:, None]
            kl = (divergence(dense, logits.log_softmax(-1)) * counted).sum(1) / (accepted + 1)
            trace.append((lengths + 1 - prompt, kl, active))
        grown = torch.where(active, accepted + 1, 0)
        places = lengths[:, None] + 1 + torch.arange(gamma + 1, device=device)
        proposed = torch.cat((block[:, 1:], chosen[:, -1:]), dim=1)
        proposed[rows, accepted] = chosen[rows, accepted]
        text.scatter_(1, places, torch.where(active[:, None], proposed, text.gather(1, places)))
        last_queries = [
            torch.where(active[:, None, None, None], new[rows, :, accepted][:, :, None], old)
            for new, old in zip(queries, last_queries, strict=True)
        ]
        steps += active
        lengths = lengths + grown
    new = prompt[:, None] + torch.arange(new_tokens, device=device)
    rates = (lengths + 1 - prompt) / steps
    traces = [torch.stack(part).cpu() for part in zip(*trace, strict=True)] if measure else [None] * 3
    return Generated(text.gather(1, new).cpu(), rates.cpu(), *traces)


def room_for(new_tokens: int, gamma: int, refresh_every: int | Sequence[int] = 0) -> int:
    """Positions that a generation may write behind the longest prompt."""
    longest = refresh_every if isinstance(refresh_every, int) else max(refresh_every)
    # A refresh of the row that has most to refresh runs past the end of the others.
    return new_tokens + (2 + longest) * (gamma + 1)


def rewrite(engine: Engine, text: Tensor, rows: list[int], start: Tensor, end: Tensor, cache: Cache) -> None:
    """Write dense K and V of the tokens start[b]..end[b] of some rows."""
    start = start[rows]
    if stale := int((end[rows] - start).max()):
        part = Cache(cache.key[:, rows], cache.value[:, rows])  # a copy
        places = start[:, None] + torch.arange(stale, device=start.device)
        engine.run(text[rows].gather(1, places), start, part, write=True)
        cache.key[:, rows], cache.value[:, rows] = part.key, part.value


def _dense_in(keep: Keep, rows: Tensor) -> Keep:
    """The same, but all in some rows, [B] bool."""
    return lambda layer, query: keep(layer, query) | rows[:, None, None, None]


def _with_later(keep: Keep, cache: Cache, lengths: Tensor) -> Keep:
    """The same, and all positions from lengths[b] on."""
    later = ~history(cache.key, lengths)
    return lambda layer, query: keep(layer, query) | later


def _round_up(positions: int) -> int:
    return -(-positions // PAGE) * PAGE
