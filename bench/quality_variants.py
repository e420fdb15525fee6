"""Other ways to put the draft's and the target's scores together than the tiers, under teacher forcing.

    python bench/quality_variants.py --profile p512.json [--profile p128.json] [--layer-skip] [--contexts 2048,4096]

SmolLM2 with its 4-layer draft, or with 24 of its own layers; profiles are of that draft. Each budget is measured with
its own profile, and with the first one. Rows kl_experiment, kl_experiment_minus_hybrid and arr_experiment, means over
the contexts, go to bench/results/quality.jsonl.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dustin_compile import Profile, smol
from dustin_compile.benchmark.results import RESULTS, append_rows, make_row
from dustin_compile.compatibility import shared_vocab_size
from dustin_compile.graphs.verify import smooth
from dustin_compile.layer_skip import layer_skip
from dustin_compile.loading import load_pair
from dustin_compile.profile import Head
from dustin_compile.profiling.haystack import read_book
from dustin_compile.quality.bootstrap import interval
from dustin_compile.quality.engine import Cache, Engine, Keep, attention
from dustin_compile.quality.evaluate import compare_on_text
from dustin_compile.quality.prompts import TEST_PART, take_passages
from dustin_compile.quality.run import KEPT_LAYERS, OFFSETS, SKIPPING, TAIL, TEACHER_FORCED, QualityRun
from dustin_compile.quality.selectors import Selector, Settings, Step, choose, everywhere, hybrid

PROMPTS, GAMMA = 24, 4


def highest_by_head(engine: Engine, queries, cache: Cache, lengths: Tensor, heads: tuple[Head, ...]) -> Tensor:
    """Attention of each head to the history, mean over the queries; of all heads the maximum, [B, N]."""
    found = []
    for layer in sorted({layer for layer, _ in heads}):
        probs = attention(queries[layer], cache.key[layer], lengths, engine.scale).mean(2)
        found.append(probs[:, [head for at, head in heads if at == layer]])
    return torch.cat(found, dim=1).amax(1)


def scores_of(step: Step, settings: Settings, by_head: bool) -> tuple[Tensor, Tensor]:
    """The draft's scores and the target's, smoothed: means over heads, or of each position that of its best head."""
    if not by_head:
        return step.draft_scores(settings.draft_heads, "mean"), step.target_scores(settings.target_heads)
    sides = (
        (step.draft, step.draft_queries, step.draft_cache, settings.draft_heads),
        (step.target, step.last_queries, step.cache, settings.target_heads),
    )
    draft, target = (highest_by_head(*side[:3], step.lengths, side[3]) for side in sides)
    return draft, smooth(target)


def add(step: Step, settings: Settings, weight: float = 1, tier: float = 0, by_head: bool = False) -> Keep:
    """The draft's first `tier` times its share, then the target's scores with `weight` times the draft's."""
    draft, target = scores_of(step, settings, by_head)
    return everywhere(choose(step, settings, draft, target + weight * draft, int(tier * settings.draft_share)))


def take_greater(step: Step, settings: Settings) -> Keep:
    """The greater of both scores."""
    draft, target = scores_of(step, settings, by_head=False)
    return everywhere(choose(step, settings, draft, torch.maximum(draft, target), 0))


VARIANTS: dict[str, Selector] = {
    "hybrid": hybrid,
    "sum": add,
    "tiersum": partial(add, tier=1),
    "tiersum.5": partial(add, weight=0.5, tier=1),
    "halftiersum": partial(add, tier=0.5),
    "sum.5": partial(add, weight=0.5),
    "sum.25": partial(add, weight=0.25),
    "sum2": partial(add, weight=2),
    "summax": partial(add, by_head=True),
    "tiermaxsum": partial(add, tier=1, by_head=True),
    "elmax": take_greater,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, action="append", required=True)
    parser.add_argument("--layer-skip", action="store_true")
    parser.add_argument("--contexts", default="2048,4096,8192")
    parser.add_argument("--output", type=Path, default=RESULTS / "quality.jsonl")
    options = parser.parse_args()
    contexts = [int(context) for context in options.contexts.split(",")]
    profiles = [Profile.load(path) for path in options.profile]

    pair = load_pair(smol.target_directory(), smol.draft_directory(), dtype=torch.float32)
    name, draft = (SKIPPING, layer_skip(pair.target, KEPT_LAYERS)) if options.layer_skip else (smol.DRAFT, pair.draft)
    vocab_size = shared_vocab_size(pair.target, draft, pair.tokenizer)
    engines = Engine(pair.target, vocab_size), Engine(draft, vocab_size)
    places: dict[tuple[int, int], Settings] = {}
    for own in profiles:
        for profile in (own, profiles[0]):
            run = QualityRun(
                pair.target, {name: draft}, pair.tokenizer, profiles={name: [profile]}, contexts=contexts,
                budgets=[own.budget], gamma=GAMMA,
            )  # fmt: skip
            places[own.budget, profile.budget] = run.settings(name, own.budget)

    kl, arr = {}, {}
    for context in contexts:
        texts = take_passages(pair.tokenizer, read_book(TEST_PART), PROMPTS, context)
        settings = dict.fromkeys(places.values())
        found = compare_on_text(*engines, texts, context - TAIL, OFFSETS, GAMMA, VARIANTS, settings)
        for (variant, setting), scores in found.items():
            kl.setdefault((variant, setting), []).append(scores.kl.mean(1))
            arr.setdefault((variant, setting), []).append(scores.arr.mean(1))
    for (budget, made_for), setting in places.items():
        for variant in VARIANTS:
            loss, base = (torch.stack(kl[key, setting]).mean(0) for key in (variant, "hybrid"))
            marks = {
                "kl_experiment": loss,
                "kl_experiment_minus_hybrid": loss - base,
                "arr_experiment": torch.stack(arr[variant, setting]).mean(0),
            }
            for metric, by_prompt in marks.items():
                value, low, high = interval(by_prompt.numpy())
                row = make_row(
                    f"quality/{metric}/{variant}/{name}/all/{budget}/profile{made_for}", value,
                    "nats" if metric.startswith("kl") else "share", pair.target.device,
                    f"{TEACHER_FORCED}, {len(OFFSETS)} steps in the last {TAIL} tokens, mean over contexts "
                    f"{options.contexts}; {PROMPTS} prompts of the end of Moby Dick, which overlap; float32, γ {GAMMA}"
                    f", heads and split of the profile for budget {made_for}; 95% bootstrap interval over prompts",
                    model=smol.MODEL, draft=name, selector=variant, metric=metric, budget=budget, context=None,
                    low=float(f"{low:.4g}"), high=float(f"{high:.4g}"), prompts=PROMPTS,
                )  # fmt: skip
                append_rows(options.output, [row])


if __name__ == "__main__":
    main()
