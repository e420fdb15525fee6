"""Attention recovery of SmolLM2 with its 4-layer draft by profile: the default one, the paper's, the searched one.

    python bench/bench_profile.py

It profiles the pair for each budget (what is cached is used), records steps on passages of the book that no profile
has seen, and appends to bench/results/profile.jsonl: the time of profiling, the frontier of ARR against the cost of
scoring on the steps that were searched on, and ARR on those that were held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dustin_compile import DustinConfig, Profile, profile_pair, smol
from dustin_compile.benchmark.results import RESULTS, append_rows, make_row
from dustin_compile.graphs.verify import smooth
from dustin_compile.loading import LoadedPair, load_pair
from dustin_compile.profile import Head, default_profile
from dustin_compile.profiling.fingerprint import fingerprint
from dustin_compile.profiling.haystack import BOOK_PART, read_book
from dustin_compile.profiling.reader import Reader
from dustin_compile.profiling.search import combine, oracle_rate, recovery_rate, scoring_cost, streaming_rate
from dustin_compile.profiling.trajectories import Groups, Recording, record
from dustin_compile.quality.bootstrap import interval

BUDGETS = (512, 256, 128)
CONTEXTS = (2048, 4096, 8128)  # SmolLM2 ends at 8192
STEPS = 6  # a passage and context, 64 tokens apart
FIELDS = ("target_heads", "draft_heads", "draft_share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=8, help="held-out passages, which overlap")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--profile-context", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=RESULTS / "profile.jsonl")
    options = parser.parse_args()
    shortest = 64 * (STEPS - 1) + max(BUDGETS)
    if min(options.contexts) <= shortest:
        parser.error(f"--contexts {min(options.contexts)} must be more than {shortest}, for its first step's history")

    pair = load_pair(smol.target_directory(), smol.draft_directory())
    models = pair.target, pair.draft
    configs = {budget: DustinConfig(budget=budget) for budget in BUDGETS}
    searched = {
        budget: profile_pair(*models, config=config, tokenizer=pair.tokenizer, context=options.profile_context)
        for budget, config in configs.items()
    }
    rows = []

    def add(name: str, value: float, unit: str, conditions: str, **fields) -> None:
        names = {"model": smol.MODEL, "draft": smol.DRAFT, "dtype": str(pair.target.dtype).removeprefix("torch.")}
        rows.append(make_row(f"profile/{name}", value, unit, pair.target.device, conditions, **names, **fields))

    for budget, profile in searched.items():
        record = profile.record
        how = f"context {record['context']}, {record['texts']} texts, {record['steps']} steps"
        seconds = {**record["seconds"], "total": sum(record["seconds"].values())}
        for phase, value in seconds.items():  # budgets share all phases but the search, where their steps are the same
            add(f"seconds/{phase.replace(' ', '_')}/{budget}", value, "s", how, phase=phase, budget=budget)
        for i, point in enumerate((record["paper"], *record["frontier"])):
            selector = f"frontier{i}" if i else "paper"
            add(
                f"frontier/smollm2/{record['context']}/{budget}/{selector}", point["arr"], "share",
                f"on the steps searched on; {how}", metric="frontier_arr", selector=selector, budget=budget,
                context=record["context"], chosen=all(point[n] == getattr(profile, n) for n in FIELDS[:2]),
                **{name: point[name] for name in (*FIELDS, "cost", "equal_cost_arr")},
            )  # fmt: skip

    print("recording held-out passages")
    profiles = {}
    for budget, config in configs.items():
        default = default_profile(pair.target.config, pair.draft.config, config)
        paper = searched[budget].record["paper"]
        profiles[budget] = {
            "default": default,
            "paper": replace(searched[budget], **{name: paper[name] for name in FIELDS}),
            "searched": searched[budget],
            f"searched for {BUDGETS[0]}": replace(searched[BUDGETS[0]], path=None).fit(config),
            "history only": replace(searched[budget], draft_share=0),
            "draft only": replace(searched[budget], draft_share=budget - config.sinks - config.window),
        }  # fmt: skip
    used = [profile for by_name in profiles.values() for profile in by_name.values()]
    groups = tuple(
        Groups(tuple(sorted({group for profile in used for group in by_layer(getattr(profile, name))})), ())
        for name in ("target_heads", "draft_heads")
    )
    recording, passage = record_held_out(pair, groups, options.passages, options.contexts)

    table = Table(title="Attention recovery rate on held-out passages, %")
    columns = [(context, budget) for context in options.contexts for budget in BUDGETS]
    for heading in ("selector", "scoring reads, % of K and V", *(f"{context}/{budget}" for context, budget in columns)):
        table.add_column(heading, justify="right")
    cells: dict[str, list[str]] = {}
    costs: dict[str, dict[int, str]] = {}
    for context, budget in columns:
        config = configs[budget]
        chosen = torch.isin(recording.lengths.cpu(), torch.tensor(steps_of(context))).to(recording.lengths.device)
        part = Recording(**{name: tensor[chosen] for name, tensor in vars(recording).items()})
        rates = {name: (rate(part, groups, profile, config), profile) for name, profile in profiles[budget].items()}
        rates["oracle"] = oracle_rate(part, budget, config.sinks, config.window), None
        rates["streaming"] = streaming_rate(part, budget, config.sinks), None
        for name, (values, profile) in rates.items():
            at = passage[chosen.cpu()]
            mean, low, high = interval(torch.stack([values.cpu()[at == i].mean() for i in at.unique()]))
            cells.setdefault(name, []).append(f"{100 * mean:.1f}")
            fields = {}
            if profile is not None:
                heads = profile.target_heads, profile.draft_heads
                cost = scoring_cost(*heads, *map(fingerprint, models))
                costs.setdefault(name, {})[budget] = f"{100 * cost:.1f}"
                fields = {
                    "draft_share": profile.draft_share,
                    "cost": cost,
                    "target_heads": heads[0],
                    "draft_heads": heads[1],
                }
            add(
                f"arr/smollm2/{context}/{budget}/{name.replace(' ', '_')}", mean, "share",
                f"{options.passages} held-out passages of Moby Dick, {STEPS} steps each; 95% bootstrap over passages",
                metric="arr", selector=name, context=context, budget=budget, low=low, high=high, **fields,
            )  # fmt: skip
    for name, values in cells.items():
        table.add_row(name, "/".join(costs.get(name, {}).values()), *values)
    Console(width=150).print(table)
    append_rows(options.output, rows)
    print(f"appended {len(rows)} rows to {options.output}")


def by_layer(heads: Sequence[Head]) -> list[tuple[Head, ...]]:
    """Heads as groups of one layer each."""
    return [tuple(head for head in heads if head[0] == layer) for layer in sorted({layer for layer, _ in heads})]


def steps_of(context: int) -> list[int]:
    """Histories of a context's steps."""
    return [context - 64 * step for step in range(STEPS)]


def record_held_out(
    pair: LoadedPair, groups: tuple[Groups, Groups], passages: int, contexts: Sequence[int]
) -> tuple[Recording, Tensor]:
    """Steps on passages of the book behind the part that profiles are made with, and the passage of each step."""
    book = read_book((BOOK_PART[1], 1.0))
    tokens = pair.tokenizer(book, return_tensors="pt", verbose=False).input_ids[0].to(pair.target.device)
    lengths = sorted({length for context in contexts for length in steps_of(context)})
    last = len(tokens) - lengths[-1] - 1
    if last < 0:
        raise ValueError(f"contexts: the held-out part has {len(tokens)} tokens, a passage needs {lengths[-1] + 1}")
    with torch.no_grad():
        readers = [
            Reader(model, pair.target.config.vocab_size, lengths[-1] + 16) for model in (pair.target, pair.draft)
        ]
        parts = [
            record(*readers, groups, tokens[start : start + lengths[-1] + 1], lengths, DustinConfig().gamma)
            for start in (i * last // max(passages - 1, 1) for i in range(passages))
        ]
    recording = Recording.join(parts).to(pair.target.device)
    return recording, torch.arange(passages).repeat_interleave(len(lengths))


def rate(recording: Recording, groups: tuple[Groups, Groups], profile: Profile, config: DustinConfig) -> Tensor:
    """ARR of each step with a profile."""
    draft, target = (
        combine(scores, side.all, [side.all.index(group) for group in by_layer(heads)])
        for scores, side, heads in (
            (recording.draft, groups[1], profile.draft_heads),
            (recording.target, groups[0], profile.target_heads),
        )
    )
    return recovery_rate(
        recording, draft, smooth(target), config.budget, config.sinks, config.window, profile.draft_share
    )


if __name__ == "__main__":
    main()
