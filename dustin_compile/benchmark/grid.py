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
from dustin_compile.benchmark.timing import copy_bandwidth, median_us, ready
from dustin_compile.graphs.draft import propose
from dustin_compile.graphs.state import State, new_state
from dustin_compile.graphs.verify import choose_set, score_history, verify
from dustin_compile.kv_cache import MemoryPlan, plan_memory

HEADROOM = 256  # positions behind the context for what the timed steps commit
STEP_ERROR = 0.02  # relative, of queries, keys and values: of a replay against a call
BASELINES = (VANILLA, "classic", TRANSFORMERS)


class WrongResult(RuntimeError):
    """A check failed, so nothing was timed."""


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        contexts, batches: the grid, in the order in which it is measured. A batch size compiles; a context does not.
        engines: of ENGINES, in the order in which a point measures them. transformers, which compiles the whole model
            for each point, comes after all other points, unless it is the first.
        acceptance: chance of each draft token.
        gamma: of the rows that every engine has.
        gammas: among which the best of a point is chosen, from the measured parts of dustin+.
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
        for name, values, least in (("contexts", self.contexts, 2), ("batches", self.batches, 1)):
            if not values or min(values) < least:
                raise ValueError(f"{name}={list(values)} must be integers of at least {least}")
        unknown = set(self.engines) - set(ENGINES)
        if unknown or not self.engines:
            raise ValueError(f"engines={list(self.engines)} must be some of {', '.join(ENGINES)}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance={self.acceptance} must be in 0..1")
        largest = HEADROOM // (self.repeats + 4) - 1  # all steps of a timing, accepted in full, stay in the cache
        if not 1 <= self.gamma <= largest:
            raise ValueError(f"gamma={self.gamma} must be in 1..{largest}")
        if not self.gammas or not all(1 <= gamma <= largest for gamma in self.gammas):
            raise ValueError(f"gammas={list(self.gammas)} must be in 1..{largest}")


class Run(ABC):
    """Measures a grid; iterating gives rows as they are measured.

    Args:
        bench: the pair.
        grid: what to measure.
        tell: called with each thing that is begun, left out or refused, in a line.
        acceptance: chance of each draft token, drawn; None: as the models have it.

    Attributes:
        failures: checks that failed.
        bandwidth: bytes a second of a copy on the device.
        rates, step_us: tokens a second, and microseconds of a step, of each engine at (context, batch).
        parts: of each point where they are measured, as of `PointTimer.time_parts`.
    """

    def __init__(self, bench: BenchPair, grid: Grid, tell: Callable[[str], None], acceptance: float | None):
        self.bench, self.grid, self.tell = bench, grid, tell
        self.engines = Engines(bench.pair, acceptance)
        self.config = replace(bench.pair.config, gamma=grid.gamma)
        self.device = bench.models.target.device
        self.bandwidth = copy_bandwidth(self.device, 2**31 if self.device.type == "cuda" else 2**24)
        self.deadline = time.monotonic() + 60 * grid.minutes
        self.plan: MemoryPlan = plan_memory(bench.models.target, bench.models.draft, self.config)
        self.failures: list[str] = []
        self.rates: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
        self.step_us: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
        self.parts: dict[tuple[int, int], dict[str, float]] = {}

    def __iter__(self) -> Iterator[Row]:
        others = [engine for engine in self.grid.engines if engine != TRANSFORMERS]
        with torch.no_grad():
            if self.grid.engines[0] == TRANSFORMERS:
                yield from self._measure_all_transformers()
            for batch in self.grid.batches if others else ():
                for context in self.grid.contexts:
                    yield from self._attempt(self.measure_steps, context, batch, others)
                for context in self.grid.contexts:  # after all of the batch size, since another gamma compiles
                    if (context, batch) in self.parts:
                        yield from self._attempt(self.measure_best_gamma, context, batch, ["best gamma"])
            if TRANSFORMERS in self.grid.engines[1:]:
                yield from self._measure_all_transformers()

    def _measure_all_transformers(self) -> Iterator[Row]:
        if self.bench.models.slice_factor != 1:
            self.tell(f"{TRANSFORMERS}: left out, it is not scaled from a slice")
            return
        for batch in self.grid.batches:
            for context in self.grid.contexts:
                torch._dynamo.reset()  # each point compiles anew, for its shape as a user's would be
                yield from self._attempt(self.measure_transformers, context, batch, [TRANSFORMERS])

    @abstractmethod
    def measure_steps(self, context: int, batch: int) -> Iterator[Row]:
        """One point, with every engine but transformers."""

    def measure_best_gamma(self, context: int, batch: int) -> Iterator[Row]:
        """One point with each engine's best gamma, where the run can tell."""
        return iter(())

    @abstractmethod
    def measure_transformers(self, context: int, batch: int) -> Iterator[Row]:
        """One point with transformers."""

    @abstractmethod
    def needed(self, context: int, batch: int) -> int:
        """Bytes that a point takes, weights included."""

    def is_late(self, context: int, batch: int, what: str) -> bool:
        """Whether the time is over; if so, tells that `what` is left out."""
        if late := time.monotonic() > self.deadline:
            self.tell(f"{context}x{batch}: {what}: left out, {self.grid.minutes:g} minutes are over")
        return late

    def vanilla_roofline(self, context: float, batch: int) -> float:
        """Microseconds in which the weights that a step of vanilla reads and `context` positions of K/V move."""
        target, factor = self.bench.models.target, self.bench.models.slice_factor
        layers = sum(parameter.nbytes for parameter in target.model.layers.parameters())
        head = target.get_output_embeddings().weight.nbytes + target.model.norm.weight.nbytes
        nbytes = factor * (layers + batch * context * self.plan.target_position) + head
        return nbytes / self.bandwidth * 1e6

    def roofline_fields(self, us: float, context: float, batch: int) -> tuple[dict[str, float], str]:
        """What a row of vanilla says of its roofline: fields, and a condition. `us`: of the measured step."""
        roofline = self.vanilla_roofline(context, batch)
        fields = {"roofline_us": round(roofline, 1), "roofline_ratio": round(us / roofline, 3)}
        return fields, (
            f"roofline {roofline:.1f} us: layers, norm and head, and K and V of {context:g} positions a row, at the "
            f"{self.bandwidth / 1e12:.3g} TB/s of a copy in the same run"
        )

    def speedups(self, context: int, batch: int, measured: str) -> Iterator[tuple[str, str, float]]:
        """(baseline, engine, ratio of tokens a second) of what can be compared since `measured` has been."""
        rates = self.rates[context, batch]
        for baseline in BASELINES:
            for engine in ("dustin", "dustin+"):
                if measured in (baseline, engine) and {baseline, engine} <= rates.keys():
                    yield baseline, engine, rates[engine] / rates[baseline]

    def describe_baseline(self, context: int, batch: int, baseline: str) -> tuple[dict[str, float], str]:
        """What a speed-up says of what it is measured against: fields, and a condition."""
        us = self.step_us[context, batch][baseline]
        how = f", {self.describe_transformers()}" if baseline == TRANSFORMERS else ""
        return {"baseline_us": float(f"{us:.4g}")}, f"baseline {baseline} {us:.4g} us a step{how}"

    def describe_transformers(self) -> str:
        if not self.config.compile:
            return "StaticCache, eager"
        return "StaticCache, torch.compile(mode='reduce-overhead', fullgraph=True)"

    def describe_scoring(self) -> str:
        """Which heads score, in numbers."""
        counts = [
            f"{len(model.heads)} heads in {len(model.heads.layers)} layers of the {role}"
            for role, model in (("target", self.engines.target), ("draft", self.engines.draft))
        ]
        return f"scores of {' and '.join(counts)}"

    def _attempt(
        self, measure: Callable[[int, int], Iterator[Row]], context: int, batch: int, what: Sequence[str]
    ) -> Iterator[Row]:
        """One point, if there is time and room for it."""
        place = f"{context}x{batch}"
        if self.is_late(context, batch, ", ".join(what)):
            return
        needed, available = self.needed(context, batch), self.plan.available
        if needed > available:
            sizes = f"{needed / 2**30:.1f} of {available / 2**30:.1f} GiB"
            self.tell(f"{place}: {', '.join(what)}: left out, it needs {sizes}")
            return
        try:
            yield from measure(context, batch)
        except WrongResult as error:
            self.failures.append(f"{place}: {error}; the rest of this point is left out")
            self.tell(self.failures[-1])
        except torch.OutOfMemoryError:
            self.tell(f"{place}: left out, it ran out of memory")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class GridRun(Run):
    """A grid on states filled with random K/V, with acceptance drawn.

    Raises:
        ValueError: a context is longer than the models' positions.
    """

    def __init__(self, bench: BenchPair, grid: Grid, tell: Callable[[str], None]):
        if max(grid.contexts) + HEADROOM > bench.pair.max_length:
            raise ValueError(
                f"contexts={list(grid.contexts)} must be at most {bench.pair.max_length - HEADROOM}: the models have "
                f"{bench.pair.max_length} positions, and the timed steps take {HEADROOM}"
            )
        super().__init__(bench, grid, tell, grid.acceptance)

    def needed(self, context: int, batch: int) -> int:
        """Nothing is prefilled, so that a step's workspace is enough."""
        length = context + HEADROOM
        return self.plan.weights + self.plan.caches(batch, length) + self.plan.step_workspace(batch, length)

    def measure_steps(self, context: int, batch: int) -> Iterator[Row]:
        grid, point = self.grid, PointTimer(self, context, batch)
        for engine in (engine for engine in grid.engines if engine != TRANSFORMERS):
            if self.is_late(context, batch, engine):
                continue
            self.tell(f"{context}x{batch}: {engine}")
            us = point.time_step(engine, grid.gamma)
            drawn = {"drawn_tokens_per_step": point.drawn} if engine in MODES else {}
            yield from self._engine_rows(engine, context, batch, us, **drawn)
        if "dustin+" not in grid.engines or self.is_late(context, batch, "parts"):
            return
        if self.device.type == "cuda" and self.bench.models.slice_factor == 1:
            workspace, peak = point.measure_memory()
            planned = self.needed(context, batch)
            yield self._row(
                "step_workspace_gib", "dustin+", context, batch, workspace / 2**30, "GiB",
                gamma=grid.gamma, peak_gib=round(peak / 2**30, 3), planned_gib=round(planned / 2**30, 3),
            )  # fmt: skip
        self.tell(f"{context}x{batch}: parts")
        parts = self.parts[context, batch] = point.time_parts()
        for part, us in parts.items():
            yield self._row(f"step_part_us/{part}", "dustin+", context, batch, us, "us", gamma=grid.gamma)

    def _engine_rows(self, engine: str, context: int, batch: int, us: float, **fields: Any) -> Iterator[Row]:
        """The rows of an engine's step of so many microseconds, and the speed-ups that it completes."""
        gamma, tokens, condition = self.grid.gamma, 1.0, None
        if engine in MODES:
            tokens = expected_tokens(self.grid.acceptance, gamma)
            fields["gamma"] = gamma
        if engine == VANILLA:
            roofline, condition = self.roofline_fields(us, context + 1, batch)
            fields |= roofline
        fields["tokens_per_step"] = tokens
        self.step_us[context, batch][engine] = us
        rate = self.rates[context, batch][engine] = batch * tokens / us * 1e6
        yield self._row("step_us", engine, context, batch, us, "us", condition, **fields)
        yield self._row("tokens_per_second", engine, context, batch, rate, "tokens/s", condition, **fields)
        for baseline, faster, ratio in self.speedups(context, batch, engine):
            fields, condition = self.describe_baseline(context, batch, baseline)
            yield self._row(
                f"decode_speedup_vs_{baseline}", faster, context, batch, ratio, "x", condition,
                gamma=gamma, tokens_per_step=expected_tokens(self.grid.acceptance, gamma), **fields,
            )  # fmt: skip

    def measure_best_gamma(self, context: int, batch: int) -> Iterator[Row]:
        grid, rates = self.grid, self.rates[context, batch]
        best = {engine: best_gamma(engine, self.parts[context, batch], grid) for engine in MODES if engine in rates}
        point = None if set(best.values()) == {grid.gamma} else PointTimer(self, context, batch)
        for engine, gamma in best.items():
            if self.is_late(context, batch, f"{engine}, best gamma"):
                continue
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
        yield from self._engine_rows(TRANSFORMERS, context, batch, us)

    def _row(
        self, metric: str, engine: str, context: int, batch: int, value: float, unit: str,
        condition: str | None = None, **fields: Any,
    ) -> Row:  # fmt: skip
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
        if engine != TRANSFORMERS and not config.compile:
            conditions.append("not compiled")
        if engine != TRANSFORMERS and self.device.type == "cuda":
            conditions.append(f"one CUDA graph replay, median of {self.grid.repeats}")
        if engine == TRANSFORMERS:
            conditions.append(f"{self.describe_transformers()}, median of {min(5, self.grid.repeats)} calls")
        if synthetic:
            conditions += [f"gamma {fields['gamma']}", self.describe_scoring()]
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
        if condition is not None:
            conditions.append(condition)
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


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare what a replay wrote with what the step launched by hand wrote: integers exactly.

    Raises:
        WrongResult: they differ.
    """
    for name, value in found.items():
        wanted = expected[name]
        if value.is_floating_point():
            error = float((value.float() - wanted.float()).norm() / wanted.float().norm())
            if not error <= STEP_ERROR:
                raise WrongResult(f"the replay's {name} differ from the step's by {error:.3g} relative")
        elif not torch.equal(value, wanted):
            raise WrongResult(f"the replay's {name} are {value.tolist()}, the step's {wanted.tolist()}")


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

        block = 1 if engine == VANILLA else gamma + 1
        call()
        expected = {name: value.clone() for name, value in self._written(state, block).items()}
        self.reset(state)
        function = ready(call, self.device)
        self.reset(state)
        found = self._written(state, block)
        found["keys"].zero_()
        found["values"].zero_()
        function()
        check_same(found, expected)
        self.reset(state)
        us = median_us(function, self.device, self.run.grid.repeats)
        self.drawn = round(float((state.seq_lens - self.context).float().mean()) / self.run.grid.repeats, 3)
        sparse = engine != VANILLA and step.config.verify == "sparse"
        return us + self._missing_layers(state, block, sparse)

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

    def _written(self, state: State, block: int) -> dict[str, torch.Tensor]:
        """What a step of `block` tokens leaves of its work, by name; views of the state."""
        key, value = (cache[:, self.context : self.context + block] for cache in state.target_cache.layers[-1])
        return {
            "lengths": state.seq_lens,
            "tokens": state.tokens[:, self.context : self.context + block + 1],
            "query": state.query,
            "keys": key,  # of the last layer, which follow from all that is read in those before
            "values": value,
        }

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
