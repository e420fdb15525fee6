"""The real pair on real prose, nothing synthetic: whole greedy generations of every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dustin_compile import smol
from dustin_compile.benchmark.engines import MODES, TRANSFORMERS, VANILLA, TransformersDecoder
from dustin_compile.benchmark.grid import Grid, Run
from dustin_compile.benchmark.pairs import BenchPair
from dustin_compile.benchmark.results import Row, make_row
from dustin_compile.benchmark.timing import now

HELD_OUT = 0.19  # of the text before the passage's end: what lies in the last quarter of the book


@dataclass(frozen=True)
class Decode:
    """A decode of a batch.

    Attributes:
        tokens: [B, new].
        seconds: of all tokens but each row's first, which comes with the prefill.
        steps: until the last row ended.
        tokens_per_step: per row, while it runs.
        acceptance_rate: accepted share of the draft tokens; None: there are none.
    """

    tokens: Tensor
    seconds: float
    steps: int
    tokens_per_step: float
    acceptance_rate: float | None


class TextRun(Run):
    """A grid with real weights on passages of a book.

    Args:
        bench: the pair, with its tokenizer.
        grid: what to measure; a context that leaves no room for the new tokens is cut to the model's last positions.
        new_tokens: to add to each row.
        tell: called with each thing that is begun or left out, in a line.

    Raises:
        ValueError: a batch is no power of two, to which a pair would fill it up.
    """

    def __init__(self, bench: BenchPair, grid: Grid, new_tokens: int, tell: Callable[[str], None]):
        if any(batch & (batch - 1) for batch in grid.batches):
            raise ValueError(f"batches={list(grid.batches)} must be powers of two: a pair runs no others")
        super().__init__(bench, grid, tell, None)
        self.new_tokens = new_tokens
        self.text = smol.passage(cast(PreTrainedTokenizerBase, bench.models.tokenizer), 10**6)[0]
        self.vanilla: dict[tuple[int, int], Tensor] = {}  # its tokens

    def needed(self, context: int, batch: int) -> int:
        return self.plan.total(batch, context + self.new_tokens)

    def measure_steps(self, context: int, batch: int) -> Iterator[Row]:
        prompts = self._prompts(context, batch)
        for engine in (engine for engine in self.grid.engines if engine != TRANSFORMERS):
            if not self.is_late(context, batch, engine):
                self.tell(f"{context}x{batch}: {engine}")
                yield from self._rows(engine, context, prompts, self._generate(engine, prompts))

    def measure_transformers(self, context: int, batch: int) -> Iterator[Row]:
        prompts = self._prompts(context, batch)
        self.tell(f"{context}x{batch}: {TRANSFORMERS}")
        yield from self._rows(TRANSFORMERS, context, prompts, self._decode_by_transformers(prompts))

    def _rows(self, engine: str, context: int, prompts: Tensor, decode: Decode) -> Iterator[Row]:
        batch, point = prompts.shape[0], (context, prompts.shape[0])
        if engine == VANILLA:
            self.vanilla[point] = decode.tokens
        same = None
        if point in self.vanilla:
            same = round(float((decode.tokens == self.vanilla[point]).float().mean()), 4)
        fields: dict[str, Any] = {
            "tokens_per_step": round(decode.tokens_per_step, 4),
            "acceptance_rate": decode.acceptance_rate,
            "steps": decode.steps,
            "agreement_with_vanilla": same,
        }
        condition = self.describe_transformers() if engine == TRANSFORMERS else None
        step_us = self.step_us[point][engine] = decode.seconds / decode.steps * 1e6
        if engine == VANILLA:
            roofline, condition = self.roofline_fields(step_us, prompts.shape[1] + self.new_tokens / 2, batch)
            fields |= roofline
        rate = self.rates[point][engine] = batch * (self.new_tokens - 1) / decode.seconds
        yield self._row("tokens_per_second", engine, context, prompts, rate, "tokens/s", condition, **fields)
        # What a server sees, which fills the places of rows that ended: every row runs at its mean rate.
        steady = batch * decode.tokens_per_step * decode.steps / decode.seconds
        yield self._row("steady_tokens_per_second", engine, context, prompts, steady, "tokens/s", condition, **fields)
        yield self._row("step_us", engine, context, prompts, step_us, "us", condition, **fields)
        for baseline, faster, ratio in self.speedups(context, batch, engine):
            compared, condition = self.describe_baseline(context, batch, baseline)
            yield self._row(
                f"decode_speedup_vs_{baseline}", faster, context, prompts, ratio, "x", condition, **compared
            )

    def _prompts(self, context: int, batch: int) -> Tensor:
        """Passages [B, context], each ending at another place of the text that the draft has not seen."""
        length = min(context, self.bench.pair.max_length - self.new_tokens)
        if length < context:
            self.tell(f"{context}x{batch}: prompts of {length} tokens, which leave room for {self.new_tokens} new ones")
        places = int(len(self.text) * HELD_OUT)
        ends = [len(self.text) - row * places // batch for row in range(batch)]
        if ends[-1] < length:
            raise ValueError(f"context={context} is longer than the book before its last prompt ends")
        return torch.stack([self.text[end - length : end] for end in ends]).to(self.device)

    def _generate(self, engine: str, prompts: Tensor) -> Decode:
        pair = self.engines.engine_pair(engine, self.grid.gamma)
        output = pair.generate(prompts, max_new_tokens=self.new_tokens, eos_token_id=[])
        stats = output.stats
        return Decode(
            tokens=output.sequences[:, prompts.shape[1] :],
            seconds=stats.decode_seconds,
            steps=stats.steps,
            tokens_per_step=stats.tokens_per_step,
            acceptance_rate=round(stats.acceptance_rate, 4) if engine in MODES else None,
        )

    def _decode_by_transformers(self, prompts: Tensor) -> Decode:
        batch, length = prompts.shape
        compile = bool(self.bench.pair.config.compile)
        decoder = TransformersDecoder(self.bench.models.target, batch, length + self.new_tokens, compile)
        first = decoder.prefill(prompts)
        position = torch.full((1, 1), length, device=self.device)
        for _ in range(3 if compile else 0):  # compiles and records, and is taken back
            decoder.decode(first, position)
        decoder.rewind(length)
        tokens, token = [first], first
        started = now(self.device)
        for _ in range(self.new_tokens - 1):
            token = decoder.decode(token, position)
            tokens.append(token)
            position += 1
        ended = now(self.device)
        return Decode(torch.cat(tokens, dim=1), ended - started, self.new_tokens - 1, 1.0, None)

    def _row(
        self, metric: str, engine: str, context: int, prompts: Tensor, value: float, unit: str,
        condition: str | None = None, **fields: Any,
    ) -> Row:  # fmt: skip
        batch, length = prompts.shape
        owner = "" if engine == "dustin+" and metric.startswith(("decode_speedup", "step_us")) else f"{engine}/"
        speculative = {"gamma": self.grid.gamma} if engine in MODES else {}
        conditions = [
            f"{smol.MODEL} with {smol.DRAFT}",
            f"prompts of {length} tokens of Moby Dick",
            f"{self.new_tokens} new tokens a row",
            "greedy",
            f"budget {self.bench.pair.config.budget}",
            self.bench.profile,
            "nothing synthetic",
            "decode only",
            str(self.bench.models.target.dtype).removeprefix("torch."),
        ]
        if engine != TRANSFORMERS and not self.config.compile:
            conditions.append("not compiled")
        if engine in MODES:
            conditions += [f"gamma {self.grid.gamma}", self.describe_scoring()]
        if condition is not None:
            conditions.append(condition)
        return make_row(
            f"{metric}/{owner}{self.bench.name}/{context}x{batch}", value, unit, self.device, ", ".join(conditions),
            pair=self.bench.name, engine=engine, context=context, batch=batch, synthetic=False,
            new_tokens=self.new_tokens, **speculative, **fields,
        )  # fmt: skip
