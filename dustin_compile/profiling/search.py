"""The search for a pair's heads and split on recorded steps: Algorithm 1 of the Dustin paper, and what goes beyond it.

The paper's way scores with the four retrieval heads of one target layer and of up to three draft layers. The frontier
starts with the KV heads of the target's strongest retrieval heads and grows by single KV heads, target's and draft's,
wherever the next one recovers most attention. The choice along it is made at equal cost: a set that reads fewer keys
for its scores may verify with more positions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_compile.config import DustinConfig
from dustin_compile.graphs.verify import smooth
from dustin_compile.ops.select_tiered import select_tiered
from dustin_compile.profile import Head
from dustin_compile.profiling.fingerprint import Fingerprint
from dustin_compile.profiling.trajectories import Groups, Recording

EPSILON = 1e-3  # of ARR, that a further draft layer must add
MAX_DRAFT_LAYERS = 3
MAX_UNITS = 8  # KV heads of the frontier's last set
# KV heads of retrieval heads that every set of the frontier holds. Recovery alone passes them over, since most of the
# attention on prose is elsewhere, and then facts far back are lost.
SEEDS = 2
SPLITS = (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of the free budget, tried along the frontier
STUDY_TRIALS = 48
# Time of a byte of gathered K and V over that of a byte of keys read in a row, on an H200 (bench/results/kernels.jsonl:
# 512 positions of Qwen2.5-7B take 16.3 µs, the keys of one KV head 44.6 µs).
GATHER_COST = 3


@dataclass(frozen=True)
class HeadSet:
    """Groups of heads, by their places in `Groups.all` of target and draft, and the draft's share of the budget.

    Attributes:
        arr: mean attention recovery rate on the recording.
        cost: bytes of keys that scoring reads, as a share of the target's K and V.
    """

    target: tuple[int, ...]
    draft: tuple[int, ...]
    draft_share: int
    arr: float
    cost: float


@dataclass(frozen=True)
class SearchResult:
    """What the search found.

    Attributes:
        layer_arr: ARR of each target layer's retrieval heads alone.
        draft_arr: ARR of the best target layer with no, one, two... draft layers at an even split.
        paper: the set that Algorithm 1 ends with.
        seeds: the retrieval heads that the frontier starts with, as in `HeadSet.target`.
        frontier: sets in the order in which they grew.
        equal_cost_arr: ARR of the paper's set and of those of the frontier, at the cost of the dearest of them.
        chosen: the best of the frontier, with its split tuned.
        share_arr: (draft_share, ARR) of the chosen heads, ascending.
        oracle, streaming: ARR of the best possible set for all layers, and of sinks and window alone.
    """

    layer_arr: list[float]
    draft_arr: list[float]
    paper: HeadSet
    seeds: tuple[int, ...]
    frontier: list[HeadSet]
    equal_cost_arr: list[float]
    chosen: HeadSet
    share_arr: list[tuple[int, float]]
    oracle: float
    streaming: float


def recovery_rate(
    recording: Recording,
    draft_scores: Tensor,
    target_scores: Tensor,
    budget: int,
    sinks: int,
    window: int,
    draft_share: int,
) -> Tensor:
    """ARR of the set that `select_tiered` chooses from scores [S, N], for each recorded step, [S] fp32."""
    indices, counts = select_tiered(draft_scores, target_scores, recording.lengths, budget, sinks, window, draft_share)
    mass = recording.mass.gather(1, indices.long())
    return mass.masked_fill(torch.arange(budget, device=mass.device) >= counts[:, None], 0).sum(1)


def oracle_rate(recording: Recording, budget: int, sinks: int, window: int) -> Tensor:
    """ARR of the best set for all layers that holds sinks and window, [S]."""
    return recovery_rate(recording, recording.mass, recording.mass, budget, sinks, window, 0)


def streaming_rate(recording: Recording, budget: int, sinks: int) -> Tensor:
    """ARR of sinks and a window that takes the rest of the budget (StreamingLLM, arXiv 2309.17453), [S]."""
    return recovery_rate(recording, recording.mass, recording.mass, budget, sinks, budget - sinks, 0)


def combine(scores: Tensor, groups: Sequence[Sequence[Head]], chosen: Sequence[int]) -> Tensor:
    """Mean attention of all heads of the chosen groups, from that of each group [S, groups, N]; [S, N]."""
    total = torch.zeros_like(scores[:, 0])
    for group in chosen:
        total += scores[:, group] * len(groups[group])
    return total / max(sum(len(groups[group]) for group in chosen), 1)


def strongest_units(groups: Groups, scores: Tensor) -> tuple[int, ...]:
    """Places in `Groups.all` of the SEEDS units with the highest head by scores [layers, heads], the best first."""
    best = [max(float(scores[head]) for head in unit) for unit in groups.units]
    order = sorted(range(len(best)), key=lambda unit: -best[unit])
    return tuple(len(groups.layers) + unit for unit in order[:SEEDS])


class Search:
    """Head sets evaluated on one recording.

    Args:
        recording: steps, on the device that is to work on them.
        groups: of target and draft, as recorded.
        models: fingerprints of target and draft, for the bytes.
        config: budget, sinks and window.
        retrieval_scores: of the target's heads, [layers, heads].
        seed: of Optuna's sampler.
        tick: called after each evaluation.
    """

    def __init__(
        self,
        recording: Recording,
        groups: tuple[Groups, Groups],
        models: tuple[Fingerprint, Fingerprint],
        config: DustinConfig,
        retrieval_scores: Tensor,
        seed: int,
        tick: Callable[[], None] = lambda: None,
    ):
        self.recording, self.groups, self.models = recording, groups, models
        self.config, self.seed, self.tick = config, seed, tick
        self.seeds = strongest_units(groups[0], retrieval_scores)
        self.free = config.budget - config.sinks - config.window

    def run(self, proceed: Callable[[], bool] = lambda: True) -> SearchResult:
        """Search. The frontier grows while proceed() says so."""
        layer_arr, draft_arr, paper = self.follow_paper()
        frontier = self.grow_frontier(proceed)
        candidates = [paper, *frontier]
        equal_cost_arr = self.compare_at_equal_cost(candidates)
        best = frontier[max(range(len(frontier)), key=lambda i: equal_cost_arr[1 + i])]
        chosen, share_arr = self.tune_share(best.target, best.draft)
        config = self.config
        return SearchResult(
            layer_arr=layer_arr,
            draft_arr=draft_arr,
            paper=paper,
            seeds=self.seeds,
            frontier=frontier,
            equal_cost_arr=equal_cost_arr,
            chosen=chosen,
            share_arr=share_arr,
            oracle=float(oracle_rate(self.recording, config.budget, config.sinks, config.window).mean()),
            streaming=float(streaming_rate(self.recording, config.budget, config.sinks).mean()),
        )

    def evaluations(self) -> int:
        """Evaluations that `run` makes at most."""
        layers = len(self.groups[0].layers) + MAX_DRAFT_LAYERS * len(self.groups[1].layers)
        units = MAX_UNITS * sum(len(groups.units) for groups in self.groups)
        return layers + units + MAX_UNITS * (len(SPLITS) + 1) + 2 * STUDY_TRIALS

    def follow_paper(self) -> tuple[list[float], list[float], HeadSet]:
        """Algorithm 1: the best target layer, draft layers greedily at an even split, then the split."""
        no_layers: tuple[int, ...] = ()
        layer_arr = [self.evaluate((layer,), no_layers, 0).arr for layer in range(len(self.groups[0].layers))]
        target = (max(range(len(layer_arr)), key=lambda layer: layer_arr[layer]),)
        draft_arr, draft = [max(layer_arr)], no_layers
        left = list(range(len(self.groups[1].layers)))
        while left and len(draft) < MAX_DRAFT_LAYERS:
            best = self.best([self.evaluate(target, (*draft, layer), self.free // 2) for layer in left])
            if draft and best.arr <= draft_arr[-1] + EPSILON:
                break
            draft = best.draft
            draft_arr.append(best.arr)
            left.remove(draft[-1])
        return layer_arr, draft_arr, self.tune_share(target, draft)[0]

    def grow_frontier(self, proceed: Callable[[], bool]) -> list[HeadSet]:
        """The seeds with the KV heads that add most, one by one, the split adapted on the way."""
        units = [range(len(groups.layers), len(groups.all)) for groups in self.groups]
        joined = [(*self.seeds, unit) for unit in units[0] if unit not in self.seeds]
        starts = [
            self.seeds,
            *([self.best([self.evaluate(heads, (), 0) for heads in joined]).target] if joined else []),
        ]
        frontier = []
        for target in starts:  # the first further head by history alone: beside weak seeds the draft would get all
            draft = self.best([self.evaluate(target, (unit,), self.free // 2) for unit in units[1]]).draft
            frontier.append(self.adapt_share(target, draft))
        while sum(map(len, (frontier[-1].target, frontier[-1].draft))) < MAX_UNITS and proceed():
            now = frontier[-1]
            share = now.draft_share
            grown = [self.evaluate((*now.target, u), now.draft, share) for u in units[0] if u not in now.target]
            share = max(share, self.free // 8)  # or the draft could never show what it is worth
            grown += [self.evaluate(now.target, (*now.draft, u), share) for u in units[1] if u not in now.draft]
            if not grown:
                break
            best = self.best(grown)
            frontier.append(self.adapt_share(best.target, best.draft))
        return frontier

    def compare_at_equal_cost(self, candidates: Sequence[HeadSet]) -> list[float]:
        """ARR of each set, given as many further positions as its scoring is cheaper than the dearest set's."""
        history = float(self.recording.lengths.float().mean())
        dearest = max(candidate.cost for candidate in candidates)
        rates = []
        for candidate in candidates:
            budget = self.config.budget + round((dearest - candidate.cost) * history / GATHER_COST)
            rates.append(self.evaluate(candidate.target, candidate.draft, candidate.draft_share, budget).arr)
        return rates

    def adapt_share(self, target: tuple[int, ...], draft: tuple[int, ...]) -> HeadSet:
        """The set with the best of a few splits."""
        return self.best([self.evaluate(target, draft, int(split * self.free)) for split in SPLITS])

    def tune_share(self, target: tuple[int, ...], draft: tuple[int, ...]) -> tuple[HeadSet, list[tuple[int, float]]]:
        """The set with the best draft_share in 0..free that Optuna (TPE) finds, and all that were tried."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        tried: dict[int, HeadSet] = {}

        def objective(trial: optuna.Trial) -> float:
            share = trial.suggest_int("draft_share", 0, self.free)
            if share not in tried:
                tried[share] = self.evaluate(target, draft, share)
            return tried[share].arr

        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=self.seed))
        for split in SPLITS:
            study.enqueue_trial({"draft_share": int(split * self.free)}, skip_if_exists=True)
        study.optimize(objective, n_trials=STUDY_TRIALS)
        ascending = [tried[share] for share in sorted(tried)]
        return self.best(ascending), [(found.draft_share, found.arr) for found in ascending]

    def evaluate(
        self, target: tuple[int, ...], draft: tuple[int, ...], draft_share: int, budget: int | None = None
    ) -> HeadSet:
        """ARR and cost of a set."""
        target_scores = smooth(combine(self.recording.target, self.groups[0].all, target))
        draft_scores = combine(self.recording.draft, self.groups[1].all, draft)
        config = self.config
        rates = recovery_rate(
            self.recording,
            draft_scores,
            target_scores,
            budget or config.budget,
            config.sinks,
            config.window,
            draft_share,
        )
        self.tick()
        heads = [head for group in target for head in self.groups[0].all[group]]
        draft_heads = [head for group in draft for head in self.groups[1].all[group]]
        return HeadSet(target, draft, draft_share, float(rates.mean()), scoring_cost(heads, draft_heads, *self.models))

    @staticmethod
    def best(sets: Sequence[HeadSet]) -> HeadSet:
        """The one with the highest ARR; of equal ones the first."""
        return max(sets, key=lambda found: found.arr)


def scoring_cost(
    target_heads: Sequence[Head], draft_heads: Sequence[Head], target: Fingerprint, draft: Fingerprint
) -> float:
    """Bytes of keys that scoring reads, as a share of the bytes of the target's whole K and V."""

    def read(heads: Sequence[Head], model: Fingerprint) -> int:
        size = model.query_heads // model.kv_heads
        return len({(layer, head // size) for layer, head in heads}) * model.head_dim

    return (read(target_heads, target) + read(draft_heads, draft)) / (
        2 * target.layers * target.kv_heads * target.head_dim
    )
