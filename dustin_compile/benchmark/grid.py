"""The whole step of every engine over a grid of contexts and batches, on states filled with random K/V."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dustin_compile.benchmark.engines import (
    ENGINES,
    MODES,
    TRANSFORMERS,
    VANILLA,
    Engines,
    TransformersDecoder,
    expected_tokens,
)
from dustin_compile.benchmark.pairs import BenchPair
from dustin_compile.benchmark.results import Row, make_row
from dustin_compile.benchmark.timing import median_us, ready
from dustin_compile.graphs.draft import propose
from dustin_compile.graphs.state import State, new_state
from dustin_compile.graphs.verify import choose_set, score_history, verify
from dustin_compile.kv_cache import MemoryPlan, plan_memory

HEADROOM = 256  # positions behind the context for what the timed steps commit
STEP_ERROR = 0.02  # relative, of the last query: of a replay against a call
PARTS = ("draft", "score", "select", "verify", "accept")


class WrongResult(RuntimeError):
    """A check failed, so nothing was timed."""


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        contexts, batches: the grid, in the order in which it is measured. A batch size compiles; a context does not.
        engines: of ENGINES.
        acceptance: chance of each draft token.
        gamma: of the rows that every engine has.
        gammas: among which the best of a point is chosen, from the measured parts.
        repeats: replays of which the median counts.
        minutes: after which no new measurement begins.
    """

    contexts: Sequence[int]
    batches: Sequence[int]
    engines: Sequence[str] = ENGINES
    acceptance: float = 0.75
    gamma: int = 4
    gammas: Sequence[int] = (1, 2, 3, 4, 6, 8)
    repeats: int = 15
    minutes: float = 5.0

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("batches", self.batches), ("gammas", self.gammas)):
            if not values or min(values) < 1:
                raise ValueError(f"{name}={list(values)} must be integers of at least 1")
        unknown = set(self.engines) - set(ENGINES)
        if unknown or not self.engines:
            raise ValueError(f"engines={list(self.engines)} must be some of {', '.join(ENGINES)}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance={self.acceptance} must be in 0..1")
        if not 1 <= self.gamma < HEADROOM // (self.repeats + 4):
            raise ValueError(f"gamma={self.gamma} must be in 1..{HEADROOM // (self.repeats + 4) - 1}")


class Run(ABC):
    """Measures a grid; iterating gives rows as they are measured.

    Args:
        bench: the pair.
        grid: what to measure.
        tell: called with each thing that is begun, left out or refused, in a line.
        acceptance: chance of each draft token, drawn; None: as the models have it.
        spare: positions behind the context that a point needs.

    Attributes:
        failures: checks that failed.
        rates: tokens a second of each engine at (context, batch).
    """

    def __init__(self, bench: BenchPair, grid: Grid, tell: Callable[[str], None], acceptance: float | None, spare: int):
        self.bench, self.grid, self.tell, self.spare = bench, grid, tell, spare
        self.engines = Engines(bench.pair, acceptance)
        self.config = replace(bench.pair.config, gamma=grid.gamma)
        self.device = bench.models.target.device
        self.deadline = time.monotonic() + 60 * grid.minutes
        self.plan: MemoryPlan = plan_memory(bench.models.target, bench.models.draft, self.config)
        self.failures: list[str] = []
        self.rates: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)

    def __iter__(self) -> Iterator[Row]:
        points = [(context, batch) for batch in self.grid.batches for context in self.grid.contexts]
        with torch.no_grad():
            for batch in self.grid.batches:
                for context in self.grid.contexts:
                    yield from self._attempt(self.measure_steps, context, batch)
                for context in self.grid.contexts:  # after all of the batch size, since another gamma compiles
                    if (context, batch) in self.rates and not self.late():
                        yield from self._attempt(self.measure_best_gamma, context, batch)
            if TRANSFORMERS not in self.grid.engines:
                return
            if self.bench.models.slice_factor != 1:
                self.tell(f"{TRANSFORMERS}: left out, it is not scaled from a slice")
                return
            # Last: each of its points compiles the whole model anew, for its shape as a user's would be.
            for context, batch in points:
                torch._dynamo.reset()
                yield from self._attempt(self.measure_transformers, context, batch)

    @abstractmethod
    def measure_steps(self, context: int, batch: int) -> Iterator[Row]:
        """One point, with every engine but transformers."""

    def measure_best_gamma(self, context: int, batch: int) -> Iterator[Row]:
        """One point with each engine's best gamma, where the run can tell."""
        return iter(())

    @abstractmethod
    def measure_transformers(self, context: int, batch: int) -> Iterator[Row]:
        """One point with transformers."""

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def _attempt(self, measure: Callable[[int, int], Iterator[Row]], context: int, batch: int) -> Iterator[Row]:
        """One point, if there is time and room for it."""
        place = f"{context}x{batch}"
        if self.late():
            self.tell(f"{place}: left out, {self.grid.minutes:g} minutes are over")
            return
        needed, available = self.plan.total(batch, context + self.spare), self.plan.available
        if needed > available:
            self.tell(f"{place}: left out, it needs {needed / 2**30:.1f} of {available / 2**30:.1f} GiB")
            return
        try:
            yield from measure(context, batch)
        except WrongResult as error:
            self.failures.append(f"{place}: {error}")
            self.tell(self.failures[-1])
        except torch.OutOfMemoryError:
            self.tell(f"{place}: left out, it ran out of memory")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class GridRun(Run):
    """A grid on states filled with random K/V, with acceptance drawn."""

    def __init__(self, bench: BenchPair, grid: Grid, tell: Callable[[str], None]):
        super().__init__(bench, grid, tell, grid.acceptance, HEADROOM)
        self.parts: dict[tuple[int, int], dict[str, float]] = {}  # of each point, as PointTimer.time_parts

    def measure_steps(self, context: int, batch: int) -> Iterator[Row]:
        grid, point = self.grid, PointTimer(self, context, batch)
        rates = self.rates[context, batch]
        if VANILLA in grid.engines and not self.late():
            self.tell(f"{context}x{batch}: {VANILLA}")
            us = point.time_step(VANILLA, grid.gamma)
            rates[VANILLA] = batch / us * 1e6
            yield self._row("step_us", VANILLA, context, batch, us, "us", tokens_per_step=1.0)
            yield self._row("tokens_per_second", VANILLA, context, batch, rates[VANILLA], "tokens/s")
        tokens = expected_tokens(grid.acceptance, grid.gamma)
        for engine in (engine for engine in MODES if engine in grid.engines):
            if self.late():
                return
            self.tell(f"{context}x{batch}: {engine}")
            us = point.time_step(engine, grid.gamma)
            rates[engine] = batch * tokens / us * 1e6
            fields: dict[str, Any] = {
                "gamma": grid.gamma,
                "tokens_per_step": tokens,
                "drawn_tokens_per_step": point.drawn,
            }
            yield self._row("step_us", engine, context, batch, us, "us", **fields)
            yield self._row("tokens_per_second", engine, context, batch, rates[engine], "tokens/s", **fields)
        yield from self._speedups(context, batch, (VANILLA, "classic"))
        if self.late():
            return
        if self.device.type == "cuda" and self.bench.models.slice_factor == 1:
            workspace, peak = point.measure_memory()
            length = context + HEADROOM
            planned = self.plan.weights + self.plan.caches(batch, length) + self.plan.step_workspace(batch, length)
            yield self._row(
                "step_workspace_gib", "dustin+", context, batch, workspace / 2**30, "GiB",
                peak_gib=round(peak / 2**30, 3), planned_gib=round(planned / 2**30, 3),
            )  # fmt: skip
        self.tell(f"{context}x{batch}: parts")
        parts = self.parts[context, batch] = point.time_parts()
        for part, us in parts.items():
            yield self._row(f"step_part_us/{part}", "dustin+", context, batch, us, "us", gamma=grid.gamma)

    def measure_best_gamma(self, context: int, batch: int) -> Iterator[Row]:
        grid, rates = self.grid, self.rates[context, batch]
        if (context, batch) not in self.parts:
            return
        best = {engine: best_gamma(engine, self.parts[context, batch], grid) for engine in MODES if engine in rates}
        point = None if set(best.values()) == {grid.gamma} else PointTimer(self, context, batch)
        for engine, gamma in best.items():
            if self.late():
                return
            tokens, rate = expected_tokens(grid.acceptance, gamma), rates[engine]
            if point is not None and gamma != grid.gamma:
                self.tell(f"{context}x{batch}: {engine}, gamma {gamma}")
                rate = batch * tokens / point.time_step(engine, gamma) * 1e6
            yield self._row(
                "tokens_per_second_best_gamma", engine, context, batch, rate, "tokens/s",
                gamma=gamma, tokens_per_step=tokens, best_of_gammas=list(grid.gammas),
                step_us=round(batch * tokens / rate * 1e6, 1),
            )  # fmt: skip

    def measure_transformers(self, context: int, batch: int) -> Iterator[Row]:
        self.tell(f"{context}x{batch}: {TRANSFORMERS}")
        compile = bool(self.config.compile)
        decoder = TransformersDecoder(self.bench.models.target, batch, context + HEADROOM, compile)
        decoder.fill(context)
        token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        position = torch.full((1, 1), context, dtype=torch.int64, device=self.device)
        for _ in range(3):
            decoder.decode(token, position)
        us = median_us(lambda: decoder.decode(token, position), self.device, min(5, self.grid.repeats))
        self.rates[context, batch][TRANSFORMERS] = batch / us * 1e6
        yield self._row("step_us", TRANSFORMERS, context, batch, us, "us", tokens_per_step=1.0)
        yield self._row("tokens_per_second", TRANSFORMERS, context, batch, batch / us * 1e6, "tokens/s")
        yield from self._speedups(context, batch, (TRANSFORMERS,))

    def _speedups(self, context: int, batch: int, baselines: Sequence[str]) -> Iterator[Row]:
        rates = self.rates[context, batch]
        tokens = expected_tokens(self.grid.acceptance, self.grid.gamma)
        for baseline in baselines:
            for engine in ("dustin", "dustin+"):
                if engine in rates and baseline in rates:
                    yield self._row(
                        f"decode_speedup_vs_{baseline}", engine, context, batch, rates[engine] / rates[baseline], "x",
                        gamma=self.grid.gamma, tokens_per_step=tokens,
                    )  # fmt: skip

    def _row(self, metric: str, engine: str, context: int, batch: int, value: float, unit: str, **fields: Any) -> Row:
        config, bench = self.config, self.bench
        # The key rows are dustin+'s; the others say whose they are.
        key = metric.startswith(("step_", "decode_speedup"))
        owner = "" if engine == "dustin+" and key else f"{engine}/"
        synthetic = engine in MODES
        conditions = [
            "random weights and K/V",
            f"budget {config.budget}",
            "greedy",
            bench.profile,
            str(bench.models.target.dtype).removeprefix("torch."),
        ]
        if self.device.type == "cuda" and engine != TRANSFORMERS:
            conditions.append(f"one CUDA graph replay, median of {self.grid.repeats}")
        if engine == TRANSFORMERS:
            conditions.append("StaticCache, torch.compile(mode='reduce-overhead', fullgraph=True), median of 5 calls")
        if synthetic:
            conditions.append(
                f"acceptance synthetic: {self.grid.acceptance:g} a draft token, drawn with a fixed seed; tokens a step "
                "are the expectation"
            )
            fields = {"acceptance": self.grid.acceptance, **fields}
        factor = bench.models.slice_factor
        if factor != 1:
            layers = bench.models.target.config.num_hidden_layers
            whole = round(layers * factor)
            conditions.append(
                f"a slice of {layers} of {whole} layers, scaled: what was measured + {factor - 1:g} x the target's "
                "pass through the slice's layers, measured alone"
            )
            fields["slice"] = f"{layers} of {whole} layers"
        return make_row(
            f"{metric}/{owner}{bench.name}/{context}x{batch}", value, unit, self.device, ", ".join(conditions),
            pair=bench.name, engine=engine, context=context, batch=batch, synthetic=synthetic, **fields,
        )  # fmt: skip


def best_gamma(engine: str, parts: dict[str, float], grid: Grid) -> int:
    """The gamma that should give the most tokens a second.

    A draft pass costs the same at every gamma; a verify pass is taken to, since it reads weights and K/V once.
    """
    draft, verify = MODES[engine]
    a_pass = parts["draft" if draft == "sparse" else "draft_dense"] / grid.gamma
    rest = parts["verify" if verify == "sparse" else "verify_dense"] + parts["accept"]
    if "sparse" in (draft, verify):
        rest += parts["score"] + parts["select"]

    def rate(gamma: int) -> float:
        return expected_tokens(grid.acceptance, gamma) / (gamma * a_pass + rest)

    return max(grid.gammas, key=rate)


class PointTimer:
    """One point of the grid: a filled state, and timers on it.

    Attributes:
        drawn: tokens a step and row in the last timed steps.
    """

    def __init__(self, run: GridRun, context: int, batch: int):
        self.run, self.context, self.batch = run, context, batch
        self.engines, self.device = run.engines, run.device
        config = run.config
        self.state = new_state(self.engines.target, self.engines.draft, config, batch, context + HEADROOM)
        for cache in (self.state.target_cache, self.state.draft_cache):
            for key, value in cache.layers:
                key.normal_()
                value.normal_()
        self.query = torch.randn_like(self.state.query)
        self.tokens = torch.randint_like(self.state.tokens, self.engines.target.vocab_size)
        self.drawn = 1.0

    def state_of(self, gamma: int) -> State:
        """The state as a step of this gamma takes it."""
        counts = self.state.accepted_counts.new_zeros(self.batch, gamma + 1)
        return replace(self.state, accepted_counts=counts)

    def reset(self, state: State) -> None:
        budget = state.verification_set.indices.shape[1]
        count = min(budget, self.context - 1)
        state.tokens.copy_(self.tokens)
        state.seq_lens.fill_(self.context)
        state.limits.fill_(state.capacity)
        state.finished.fill_(False)
        state.query.copy_(self.query)
        spread = torch.arange(budget, device=self.device) * (self.context - 1) // count
        state.verification_set.indices.copy_(spread)
        state.verification_set.counts.fill_(count)
        state.verification_set.length.fill_(self.context - 1)
        state.sampling.stream.copy_(torch.arange(self.batch, device=self.device))
        state.step.fill_(1)
        state.accepted_counts.zero_()

    def time_step(self, engine: str, gamma: int) -> float:
        """Microseconds of a step, scaled to the whole target where it is a slice.

        Raises:
            WrongResult: the replay does something else than the step.
        """
        step = self.engines.step(engine, gamma)
        state = self.state_of(gamma)
        self.reset(state)

        def call() -> None:
            step(state, "greedy")

        call()
        expected_lens, expected_query = state.seq_lens.clone(), state.query.float().clone()
        self.reset(state)
        function = ready(call, self.device)
        self.reset(state)
        function()
        self._check(state, expected_lens, expected_query)
        self.reset(state)
        us = median_us(function, self.device, self.run.grid.repeats)
        self.drawn = round(float((state.seq_lens - self.context).float().mean()) / self.run.grid.repeats, 3)
        sparse = engine != VANILLA and step.config.verify == "sparse"
        return us + self._missing_layers(state, 1 if engine == VANILLA else gamma + 1, sparse)

    def measure_memory(self) -> tuple[int, int]:
        """Bytes that a step of dustin+ allocates for a moment, and those that are then allocated in all."""
        step = self.engines.step("dustin+", self.run.grid.gamma)
        state = self.state_of(self.run.grid.gamma)
        self.reset(state)
        step(state, "greedy")
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        step(state, "greedy")
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        return peak - before, peak

    def _check(self, state: State, lens: torch.Tensor, query: torch.Tensor) -> None:
        if not torch.equal(state.seq_lens, lens):
            raise WrongResult(f"the replay advanced rows to {state.seq_lens.tolist()}, the step to {lens.tolist()}")
        error = float((state.query.float() - query).norm() / query.norm())
        if not error <= STEP_ERROR:
            raise WrongResult(f"the replay's last query differs from the step's by {error:.3g} relative")

    def _missing_layers(self, state: State, tokens: int, sparse: bool) -> float:
        """Microseconds of the target's layers that the slice leaves out, in a pass of some tokens."""
        factor = self.run.bench.models.slice_factor
        if factor == 1:
            return 0.0
        feed = state.tokens[:, :tokens].contiguous()
        chosen = state.verification_set if sparse else None
        target = self.engines.target

        def layers() -> None:
            target.forward(feed, state.seq_lens, state.target_cache, chosen)

        self.reset(state)
        return (factor - 1) * median_us(ready(layers, self.device), self.device, self.run.grid.repeats)

    def time_parts(self) -> dict[str, float]:
        """Microseconds of each part of dustin+'s step, alone, and of a dense draft and a dense verify."""
        gamma, repeats = self.run.grid.gamma, self.run.grid.repeats
        step = self.engines.step("dustin+", gamma)
        state, config = self.state_of(gamma), step.config
        target, draft, choose = step.target, step.draft, step.choose["greedy"]
        self.reset(state)
        proposal = propose(draft, state, gamma, True, choose, None)
        target_scores = score_history(target, state)
        draft_scores = draft.score(proposal.queries, state.draft_cache, state.seq_lens)
        logits, queries = verify(target, state, gamma, True)

        def score() -> None:
            score_history(target, state)
            draft.score(proposal.queries, state.draft_cache, state.seq_lens)

        functions: dict[str, Callable[[], Any]] = {
            "draft": lambda: propose(draft, state, gamma, True, choose, None),
            "score": score,
            "select": lambda: choose_set(state, draft_scores, target_scores, state.seq_lens, config),
            "verify": lambda: verify(target, state, gamma, True),
            "accept": lambda: step.finish["greedy"](state, proposal, logits, queries, None, True),
            "draft_dense": lambda: propose(draft, state, gamma, False, choose, None),
            "verify_dense": lambda: verify(target, state, gamma, False),
        }
        times = {}
        for name, function in functions.items():
            self.reset(state)
            replay = ready(function, self.device)
            self.reset(state)
            times[name] = median_us(replay, self.device, repeats)
        times["verify"] += self._missing_layers(state, gamma + 1, sparse=True)
        times["verify_dense"] += self._missing_layers(state, gamma + 1, sparse=False)
        return times
