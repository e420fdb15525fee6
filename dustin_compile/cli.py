"""The command line: dustin-compile demo, compare and generate."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers.utils import logging as transformers_logging

from dustin_compile import smol
from dustin_compile.config import AttentionMode, DustinConfig
from dustin_compile.demo import COMPARE_STAGES, Comparison, compare, decode_rate
from dustin_compile.loading import LoadedPair, load_pair
from dustin_compile.pair import compile_pair

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Dtype = Literal["auto", "float32", "float16", "bfloat16"]

TargetOption = Annotated[str, typer.Option(help="Hugging Face name or directory of the model that verifies.")]
DraftOption = Annotated[str, typer.Option(help="Name or directory of the model that proposes.")]
PromptOption = Annotated[typer.FileText, typer.Option(help="Text to continue; - is standard input.")]
BudgetOption = Annotated[int, typer.Option(help="Positions in the verification set.")]
GammaOption = Annotated[int, typer.Option(help="Tokens that the draft proposes in a step.")]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")]
CompileOption = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Compile, or run eagerly; default: compile on a GPU.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout, the rest to stderr.")]


@app.callback()
def main() -> None:
    """Long-context speculative decoding with sparse verification (Dustin, arXiv 2606.24957)."""


@app.command()
def demo(
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to add.")] = 64,
    budget: BudgetOption = 256,
    gamma: GammaOption = 4,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a passage of Moby Dick with SmolLM2-135M in three ways, side by side."""
    started = time.perf_counter()
    with _messages(), _progress(2 + COMPARE_STAGES) as stage:
        config = DustinConfig(gamma=gamma, budget=budget, compile=compile)
        if context + max_new_tokens + gamma > smol.MAX_POSITIONS:
            raise ValueError(
                f"context={context}, max_new_tokens={max_new_tokens} and gamma={gamma} add up to more than the "
                f"{smol.MAX_POSITIONS} positions of {smol.MODEL}"
            )
        stage("weights")
        directories = smol.target_directory(), smol.draft_directory()
        stage("loading")
        pair = _load(*directories, device, dtype)
        input_ids = smol.passage(pair.tokenizer, context)
        comparison = compare(pair, input_ids, max_new_tokens, config, stage)
    _report(smol.MODEL, smol.DRAFT, pair, input_ids, config, comparison, time.perf_counter() - started, as_json)


@app.command("compare")
def compare_command(
    target: TargetOption,
    draft: DraftOption,
    prompt_file: PromptOption,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to add.")] = 64,
    budget: BudgetOption = 512,
    gamma: GammaOption = 4,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
    as_json: JsonOption = False,
) -> None:
    """The demo's three ways, for any pair and prompt."""
    started = time.perf_counter()
    with _messages(), _progress(1 + COMPARE_STAGES) as stage:
        config = DustinConfig(gamma=gamma, budget=budget, compile=compile)
        stage("loading")
        pair = _load(target, draft, device, dtype)
        input_ids = pair.tokenizer(prompt_file.read(), return_tensors="pt").input_ids
        comparison = compare(pair, input_ids, max_new_tokens, config, stage)
    _report(target, draft, pair, input_ids, config, comparison, time.perf_counter() - started, as_json)


@app.command()
def generate(
    target: TargetOption,
    draft: DraftOption,
    prompt_file: PromptOption,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, tokens are sampled.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    budget: BudgetOption = 512,
    gamma: GammaOption = 4,
    verify: Annotated[AttentionMode, typer.Option(help="sparse: approximate; dense: lossless.")] = "sparse",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with any pair."""
    started = time.perf_counter()
    with _messages(), _progress(2) as stage:
        config = DustinConfig(gamma=gamma, budget=budget, verify=verify, compile=compile)
        stage("loading")
        pair = _load(target, draft, device, dtype)
        input_ids = pair.tokenizer(prompt_file.read(), return_tensors="pt").input_ids.to(pair.target.device)
        stage("generating")
        output = compile_pair(
            pair.target,
            pair.draft,
            config=config,
            tokenizer=pair.tokenizer,
            assistant_tokenizer=pair.assistant_tokenizer,
        ).generate(
            input_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
    stats = output.stats
    text = pair.tokenizer.decode(output.sequences[0, input_ids.shape[1] :], skip_special_tokens=True)
    rate = decode_rate(output)
    if not as_json:
        print(text)
    Console(stderr=True).print(
        f"{stats.new_tokens[0]} tokens, {rate:.1f} tokens/s after the prefill, {stats.tokens_per_step:.2f} tokens a "
        f"step, {stats.acceptance_rate:.0%} of the drafts accepted, {stats.cache_read_share:.0%} of the cache read"
    )
    if as_json:
        _print_json(
            model=target,
            draft=draft,
            text=text,
            context=input_ids.shape[1],
            budget=budget,
            gamma=gamma,
            new_tokens=stats.new_tokens[0],
            finish_reason=stats.finish_reasons[0],
            tokens_per_step=stats.tokens_per_step,
            acceptance_rate=stats.acceptance_rate,
            tokens_per_second=rate,
            cache_read_share=stats.cache_read_share,
            seconds=time.perf_counter() - started,
        )


def _load(target: str | Path, draft: str | Path, device: str, dtype: Dtype) -> LoadedPair:
    return load_pair(
        target,
        draft,
        device=None if device == "auto" else device,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
    )


@contextmanager
def _messages() -> Iterator[None]:
    """Warnings, and errors that the user can put right, as a line each instead of source lines and tracebacks."""
    console = Console(stderr=True)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(Text(f"Warning: {message}", style="yellow"))
        try:
            yield
        except (ValueError, OSError) as error:
            console.print(Text(f"Error: {error}", style="red"))
            raise typer.Exit(1) from error


@contextmanager
def _progress(stages: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call what this gives with each stage's name as it begins."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=stages)
        completed = itertools.count()
        yield lambda name: progress.update(task, description=name, completed=next(completed))


def _report(
    model: str,
    draft: str,
    pair: LoadedPair,
    input_ids: Tensor,
    config: DustinConfig,
    comparison: Comparison,
    seconds: float,
    as_json: bool,
) -> None:
    runs = {"target only": comparison.target_only, "dense": comparison.dense, "Dustin": comparison.sparse}
    console = Console(stderr=as_json)
    prompt = pair.tokenizer.decode(input_ids[0, -100:])
    console.print(Panel(Text(f"… {prompt}"), title=f"end of the prompt of {input_ids.shape[1]} tokens"))
    for name, run in runs.items():
        console.print(Panel(Text(pair.tokenizer.decode(run.tokens).strip()), title=name))

    table = Table(title=f"{model} with {draft}: γ {config.gamma}, {config.budget} positions")
    for heading in ("", "tokens/s", "speed-up", "tokens/step", "acceptance", "cache read"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, run in runs.items():
        speed_up = run.tokens_per_second / comparison.target_only.tokens_per_second
        table.add_row(
            name,
            f"{run.tokens_per_second:.1f}",
            f"{speed_up:.2f}×",
            f"{run.tokens_per_step:.2f}",
            "" if run.acceptance_rate is None else f"{run.acceptance_rate:.0%}",
            f"{run.cache_read_share:.0%}",
        )
    console.print(table)
    console.print(
        f"Dense {'equals' if comparison.dense_equals_target_only else 'differs from'} target only. "
        f"Dustin has the same token as dense at {comparison.sparse_agreement:.0%} of the positions.\n"
        "Tokens/s: decode only, after the prefill and all compilation. EOS tokens end no run."
    )
    if as_json:
        _print_json(
            model=model,
            draft=draft,
            context=input_ids.shape[1],
            budget=config.budget,
            gamma=config.gamma,
            new_tokens=len(comparison.sparse.tokens),
            tokens_per_step=comparison.sparse.tokens_per_step,
            acceptance_rate=comparison.sparse.acceptance_rate,
            tokens_per_second=comparison.sparse.tokens_per_second,
            dense_tokens_per_second=comparison.dense.tokens_per_second,
            target_only_tokens_per_second=comparison.target_only.tokens_per_second,
            dense_equals_target_only=comparison.dense_equals_target_only,
            sparse_agreement=comparison.sparse_agreement,
            cache_read_share=comparison.sparse.cache_read_share,
            seconds=seconds,
        )


def _print_json(**result: Any) -> None:
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}))
