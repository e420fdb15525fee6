"""What a selector loses: on steps along a true text, and in text that it generates itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_compile.quality.engine import Cache, Engine, Keep, Observe, attention
from dustin_compile.quality.selectors import OBSERVED, PAGE, SELECTORS, Selector, Settings, Step, observe_prompt

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
        arr_by_layer: [layers, B, steps].
    """

    kl: Tensor
    arr: Tensor
    agreement: Tensor
    delta_loglik: Tensor
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
    block over the same dense K and V, and the text goes on as it stands.

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
        block, draft_queries = propose(draft, texts[:, at], lengths, draft_cache, gamma)
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
                        by_layer,
                    )
                )
    return {key: Scores(*(torch.stack(part, -1).cpu() for part in zip(*steps, strict=True)))
            for key, steps in found.items()}  # fmt: skip


def propose(draft: Engine, pending: Tensor, lengths: Tensor, cache: Cache, gamma: int) -> tuple[Tensor, list[Tensor]]:
    """The draft's greedy proposals: the block [B, gamma + 1], pending token first, and the draft's queries."""
    block = pending[:, None]
    for _ in range(gamma):
        queries: list[Tensor] = []
        logits = draft.run(block, lengths, cache, observe=lambda layer, query, probs: queries.append(query))  # noqa: B023
        block = torch.cat((block, logits[:, -1:].argmax(-1)), dim=1)
    return block, queries


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


@torch.no_grad()
def generate(
    target: Engine,
    draft: Engine,
    prompts: Tensor,
    prompt_lengths: Tensor,
    new_tokens: int,
    gamma: int,
    selector: str,
    settings: Settings,
    refresh_every: int = 0,
    measure: bool = False,
) -> Generated:
    """Greedy draft-verify generation, where later steps read the K and V that sparse verification wrote.

    Args:
        prompts: [B, n] int64, padded on the right.
        prompt_lengths: [B] int64, more than OBSERVED + 1.
        selector: a name of SELECTORS.
        refresh_every: every so many steps, verify densely and rewrite the K and V since the last time; 0: never.
        measure: compare each step with the dense model.
    """
    device, batch = target.device, len(prompts)
    prompts, prompt = prompts.to(device), prompt_lengths.to(device)
    # A refresh of the row that has most to refresh runs past the end of the others.
    capacity = _round_up(prompts.shape[1] + new_tokens + (2 + refresh_every) * (gamma + 1))
    text = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
    text[:, : prompts.shape[1]] = prompts
    rows = torch.arange(batch, device=device)
    cache, draft_cache = target.new_cache(batch, capacity), draft.new_cache(batch, capacity)
    target.prefill(prompts, cache)
    draft.prefill(prompts, draft_cache)
    dense_cache = Cache(cache.key.clone(), cache.value.clone()) if measure else cache
    lengths = prompt - 1
    observed = observe_prompt(target, text, lengths, cache)
    last_queries = ask(target, text[rows, lengths - 1][:, None], lengths - 1, cache)
    refreshed, steps = lengths, torch.zeros(batch, device=device)
    trace: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    while bool((active := lengths + 1 < prompt + new_tokens).any()):
        count += 1
        block, draft_queries = propose(draft, text[rows, lengths], lengths, draft_cache, gamma)
        draft.run(block, lengths, draft_cache, write=True)
        keep = None
        if refresh_every and count % refresh_every == 0:
            if stale := int((lengths - refreshed).max()):
                span = refreshed[:, None] + torch.arange(stale, device=device)
                target.run(text.gather(1, span), refreshed, cache, write=True)
            refreshed = lengths
        else:
            step = Step(target, draft, lengths, cache, draft_cache, last_queries, draft_queries, observed, prompt - 1)
            if selector.startswith("oracle"):
                step.mass = look(target, block, lengths, cache)[2]
            keep = SELECTORS[selector](step, settings)
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


def _round_up(positions: int) -> int:
    return -(-positions // PAGE) * PAGE
