"""The command line, dustin-compile."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any, Literal, NoReturn

import torch
import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dustin_compile import smol
from dustin_compile.benchmark.engines import ENGINES
from dustin_compile.benchmark.grid import Grid, GridRun
from dustin_compile.benchmark.pairs import PAIRS, SMOLLM2, make_pair
from dustin_compile.benchmark.report import draw_plots, make_table
from dustin_compile.benchmark.results import RESULTS, append_rows, read_rows
from dustin_compile.benchmark.text import TextRun
from dustin_compile.config import AttentionMode, DustinConfig
from dustin_compile.demo import COMPARE_STAGES, Comparison, compare, decode_rate
from dustin_compile.export import Backend, check_export, export_pair
from dustin_compile.generation import Pair, check_decoding
from dustin_compile.layer_skip import layer_skip as skip_layers
from dustin_compile.loading import LoadedPair, choose_place, load_pair
from dustin_compile.packages import BuildError
from dustin_compile.pair import CompiledPair, compile_pair, resolve_pair
from dustin_compile.profile import Profile, default_profile
from dustin_compile.profiling.pipeline import is_cut, profile_pair
from dustin_compile.quality.report import draw_plots as draw_quality
from dustin_compile.quality.report import make_sensitivity_table
from dustin_compile.quality.report import make_table as make_quality_table
from dustin_compile.quality.run import KEPT_LAYERS, PARTS, SKIPPING, QualityRun
from dustin_compile.runtime import load_exported, read_manifest

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
FIXED_BY_EXPORT = ("target", "draft", "profile", "budget", "gamma", "verify", "device", "dtype", "compile")
EXPORT_LENGTH = 8192

TargetOption = Annotated[str, typer.Option(help="Hugging Face name or directory of the model that verifies.")]
DraftOption = Annotated[str, typer.Option(help="Name or directory of the model that proposes.")]
PromptOption = Annotated[typer.FileText, typer.Option(encoding="utf-8", help="Text to continue; - is standard input.")]
ProfileOption = Annotated[Path | None, typer.Option(help="File of the pair's profile; default: the cached one.")]
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
        place = _place(device, dtype)
        stage("weights")
        directories = smol.target_directory(), smol.draft_directory()
        stage("loading")
        pair = load_pair(*directories, **place)
        input_ids = smol.passage(pair.tokenizer, context)
        profile = default_profile(pair.target.config, pair.draft.config, config)  # whatever is cached here
        comparison = compare(pair, input_ids, max_new_tokens, config, profile, stage)
    _report(smol.MODEL, smol.DRAFT, pair, input_ids, config, comparison, time.perf_counter() - started, as_json)


@app.command("compare")
def compare_command(
    target: TargetOption,
    draft: DraftOption,
    prompt_file: PromptOption,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to add.")] = 64,
    profile: ProfileOption = None,
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
        chosen = None if profile is None else Profile.load(profile)
        place = _place(device, dtype)
        prompt = _read_text("--prompt-file", prompt_file)
        stage("loading")
        pair = load_pair(target, draft, **place)
        input_ids = pair.tokenizer(prompt, return_tensors="pt").input_ids
        comparison = compare(pair, input_ids, max_new_tokens, config, chosen, stage)
    _report(target, draft, pair, input_ids, config, comparison, time.perf_counter() - started, as_json)


@app.command()
def generate(
    context: typer.Context,
    prompt_file: PromptOption,
    target: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    draft: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    exported: Annotated[
        Path | None, typer.Option(help="Directory that export wrote, instead of --target and --draft.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Name or directory, with --exported; default: the exported target's.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, tokens are sampled.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    profile: ProfileOption = None,
    budget: BudgetOption = 512,
    gamma: GammaOption = 4,
    verify: Annotated[AttentionMode, typer.Option(help="sparse: approximate; dense: lossless.")] = "sparse",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with any pair, or with one that was exported."""
    started = time.perf_counter()
    with _messages(), _progress(2) as stage:
        check_decoding(max_new_tokens, temperature, top_k, top_p)
        load: Callable[[], tuple[PreTrainedTokenizerBase, Pair]]
        if exported is not None:
            sources = {name: context.get_parameter_source(name) for name in FIXED_BY_EXPORT}
            given = [f"--{name}" for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
            if given:
                raise ValueError(f"{', '.join(given)}: what was exported has its own")
            named = read_manifest(exported)["tokenizer"]
            if tokenizer is None and named is None:
                raise ValueError(f"{exported} names no tokenizer: give --tokenizer")
            load = partial(_load_exported, exported, tokenizer, named)
        elif target is None or draft is None or tokenizer is not None:
            raise ValueError("give --target and --draft, or --exported and perhaps --tokenizer")
        else:
            config = DustinConfig(gamma=gamma, budget=budget, verify=verify, compile=compile)
            chosen = None if profile is None else Profile.load(profile)
            load = partial(_load_compiled, target, draft, _place(device, dtype), config, chosen)
        prompt = _read_text("--prompt-file", prompt_file)
        stage("loading")
        text_tokenizer, pair = load()
        input_ids = text_tokenizer(prompt, return_tensors="pt").input_ids
        stage("generating")
        output = pair.generate(
            input_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
    stats = output.stats
    text = text_tokenizer.decode(output.sequences[0, input_ids.shape[1] :], skip_special_tokens=True)
    rate = decode_rate(output)
    if not as_json:
        print(text)
    Console(stderr=True).print(
        f"{stats.new_tokens[0]} tokens, {rate:.1f} tokens/s after the prefill, {stats.tokens_per_step:.2f} tokens a "
        f"step, {stats.acceptance_rate:.0%} of the drafts accepted, {stats.cache_read_share:.0%} of the cache read"
    )
    if as_json:
        _print_json(
            model=target if exported is None else str(exported),
            draft=draft,
            text=text,
            context=input_ids.shape[1],
            budget=pair.config.budget,
            gamma=pair.config.gamma,
            new_tokens=stats.new_tokens[0],
            finish_reason=stats.finish_reasons[0],
            tokens_per_step=stats.tokens_per_step,
            acceptance_rate=stats.acceptance_rate,
            tokens_per_second=rate,
            cache_read_share=stats.cache_read_share,
            seconds=time.perf_counter() - started,
        )


@app.command("export")
def export_command(
    target: TargetOption,
    draft: DraftOption,
    out: Annotated[Path, typer.Option(help="New or empty directory.")],
    backend: Annotated[Backend, typer.Option(help="aot-inductor needs a C++ compiler, not TensorRT.")] = "tensorrt",
    batch: Annotated[list[int], typer.Option(help="Rows of a request; may be repeated.")] = [1],  # noqa: B006
    max_length: Annotated[
        int | None,
        typer.Option(help=f"Tokens that a row may have, prompt included; default: {EXPORT_LENGTH}, or all positions."),
    ] = None,
    profile: ProfileOption = None,
    budget: BudgetOption = 512,
    gamma: GammaOption = 4,
    verify: Annotated[AttentionMode, typer.Option(help="sparse: approximate; dense: lossless.")] = "sparse",
    refresh_every: Annotated[int, typer.Option(help="Verify densely every so many sparse steps; 0: never.")] = 0,
    prefill_chunk: Annotated[
        int, typer.Option(help="Prompt tokens that go through a model at once; 64 makes the fewest programs.")
    ] = 2048,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write a pair for deployment, to be run by generate --exported or load_exported on hardware like this."""
    started = time.perf_counter()
    with _messages(), _progress(None) as stage:
        _check_output("--out", out, folder=True)
        config = DustinConfig(
            gamma=gamma, budget=budget, verify=verify, refresh_every=refresh_every, prefill_chunk=prefill_chunk
        )
        chosen = None if profile is None else Profile.load(profile)
        place = _place(device, dtype)
        configs = [AutoConfig.from_pretrained(name) for name in (target, draft)]
        # What has no such limit is no supported model, which compile_pair says.
        positions = min(getattr(each, "max_position_embeddings", max_length or EXPORT_LENGTH) for each in configs)
        if max_length is None:
            max_length = min(EXPORT_LENGTH, positions)
        check_export(
            out, backend=backend, batch=batch, max_length=max_length, device=place["device"], positions=positions
        )
        stage("loading")
        _, pair = _load_compiled(target, draft, place, config, chosen)
        export_pair(pair, out, backend=backend, batch=batch, max_length=max_length, progress=stage)
    size, seconds = sum(path.stat().st_size for path in out.iterdir()), time.perf_counter() - started
    Console(stderr=True).print(Text(f"wrote {out}: {size / 1e6:,.1f} MB in {seconds:.1f} s"), soft_wrap=True)
    if as_json:
        _print_json(path=str(out), backend=backend, batch=batch, max_length=max_length, bytes=size, seconds=seconds)


@app.command("profile")
def profile_command(
    target: Annotated[str | None, typer.Option(help=f"As for generate; without it and --draft, {smol.MODEL}.")] = None,
    draft: Annotated[str | None, typer.Option(help="As for generate.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the profile, besides the cached one.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Directory for figures.")] = None,
    text_file: Annotated[
        list[typer.FileText] | None,
        typer.Option(encoding="utf-8", help="Prose to profile with; may be repeated. Default: Moby Dick."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of the passages to read.")] = 4096,
    budget: BudgetOption = 512,
    gamma: GammaOption = 4,
    budget_seconds: Annotated[float | None, typer.Option(help="Begin nothing new after so many seconds.")] = None,
    seed: Annotated[int, typer.Option(help="Of the search for the split.")] = 0,
    layer_skip: Annotated[
        bool, typer.Option("--layer-skip", help=f"Profile {smol.MODEL} with 24 of its own layers for a draft.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find the heads and the split that serve a pair best. Interrupted, the same command goes on from there."""
    started = time.perf_counter()
    with _messages():
        _check_output("--out", out)
        _check_output("--plot", plot, folder=True)
        _check_models(target, draft, layer_skip)
        config = DustinConfig(gamma=gamma, budget=budget)
        place = _place(device, dtype)
        texts = [_read_text("--text-file", file) for file in text_file or ()]
        pair = load_pair(target or smol.target_directory(), draft or smol.draft_directory(), **place)
        draft_name = SKIPPING if layer_skip else draft or smol.DRAFT
        profile = profile_pair(
            pair.target,
            skip_layers(pair.target, KEPT_LAYERS) if layer_skip else pair.draft,
            config=config,
            texts=texts or None,
            tokenizer=pair.tokenizer,
            assistant_tokenizer=pair.assistant_tokenizer,
            context=context,
            budget_seconds=budget_seconds,
            seed=seed,
            plot=plot,
        )
        if out is not None:
            profile.save(out)
    record = profile.record
    console = Console(stderr=as_json)
    table = Table("", "heads (layer, head)", title=Text(f"{target or smol.MODEL} with {draft_name}"))
    table.add_row("target", ", ".join(map(str, profile.target_heads)))
    table.add_row("draft", ", ".join(map(str, profile.draft_heads)))
    console.print(table)
    console.print(
        f"{profile.draft_share} of {config.budget - config.sinks - config.window} free positions go to the draft. "
        f"Attention recovered: {profile.arr:.1%}; oracle {record['oracle_arr']:.1%}, sinks and window "
        f"{record['streaming_arr']:.1%}. Scoring reads {record['cost']:.1%} of the target's K and V."
    )
    for role, forced in record["teacher_forced"].items():
        if forced:
            console.print(f"The {role} answered no question about a needle: answers fed to it had to do.")
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in record["seconds"].items())
    console.print(f"{record['steps']} steps on {record['texts']} texts; {seconds}.", soft_wrap=True)
    if is_cut(profile):
        haystacks = ", ".join(f"{count} ({role})" for role, count in record["haystacks"].items())
        console.print(
            f"Cut short by --budget-seconds: {record['texts']} of {record['texts_planned']} texts; of "
            f"{record['haystacks_planned']} haystacks {haystacks}."
        )
    for path in (profile.path, out):
        if path is not None:
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    if as_json:
        _print_json(
            model=target or smol.MODEL,
            draft=draft_name,
            path=profile.path and str(profile.path),
            target_heads=profile.target_heads,
            draft_heads=profile.draft_heads,
            draft_share=profile.draft_share,
            arr=profile.arr,
            oracle_arr=record["oracle_arr"],
            streaming_arr=record["streaming_arr"],
            cost=record["cost"],
            phase_seconds=record["seconds"],
            seconds=time.perf_counter() - started,
        )


@app.command()
def bench(
    pair: Annotated[str, typer.Option(help=f"One of {', '.join(PAIRS)}; all but {SMOLLM2} have random weights.")] = (
        "qwen2.5-7b"
    ),
    contexts: Annotated[str, typer.Option(help="Positions in the cache, in the order of measuring.")] = (
        "32768,4096,8192,16384,65536,131072"
    ),
    batches: Annotated[str, typer.Option(help="Rows. Each number compiles anew.")] = "1,4,8,16,32",
    engines: Annotated[
        str, typer.Option(help="What to measure, in this order; transformers after all points, unless it is first.")
    ] = ",".join(ENGINES),
    acceptance: Annotated[float, typer.Option(help="Chance of each draft token, drawn: for random weights.")] = 0.75,
    gamma: GammaOption = 4,
    gammas: Annotated[str, typer.Option(help="Among which each point's best is chosen, with dustin+.")] = "1,2,3,4,6,8",
    budget: BudgetOption = 512,
    profile: Annotated[Path | None, typer.Option(help="File of the pair's profile; default: unprofiled.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help=f"Tokens to add, for {SMOLLM2}.")] = 128,
    minutes: Annotated[
        float,
        typer.Option(help="No measurement begins later than this, and what is left out is printed. All takes longer."),
    ] = 5.0,
    output: Annotated[Path, typer.Option(help="Rows are appended to it as they come.")] = RESULTS / "step.jsonl",
    plots: Annotated[Path | None, typer.Option(help="Directory for plots of all that the output file holds.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
) -> None:
    """Time a whole step of every engine over a grid of contexts and batches."""
    console = Console(stderr=True)
    rows = []
    with _messages():
        _check_output("--output", output)
        _check_output("--plots", plots, folder=True)
        grid = Grid(
            contexts=_integers("contexts", contexts),
            batches=_integers("batches", batches),
            engines=engines.split(","),
            acceptance=acceptance,
            gamma=gamma,
            gammas=_integers("gammas", gammas),
            minutes=minutes,
        )
        place = _place(device, dtype)
        made = make_pair(pair, **place, profile=profile, gamma=gamma, budget=budget, compile=compile)
        tell = lambda message: console.print(Text(message))  # noqa: E731
        run = GridRun(made, grid, tell) if made.models.tokenizer is None else TextRun(made, grid, new_tokens, tell)
        for row in run:
            append_rows(output, [row])
            rows.append(row)
        Console().print(make_table(rows, f"{pair}, γ {gamma}, {budget} positions"))
        if plots is not None:
            for path in draw_plots(read_rows(output), plots):
                console.print(Text(f"wrote {path}"))
    if run.failures:
        raise typer.Exit(1)


@app.command()
def quality(
    target: Annotated[str | None, typer.Option(help=f"As for generate; without it and --draft, {smol.MODEL}.")] = None,
    draft: Annotated[str | None, typer.Option(help="As for generate.")] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of the texts.")] = "2048,4096",
    budgets: Annotated[str, typer.Option(help="Positions in the sets.")] = "512,256,128",
    prompts: Annotated[int, typer.Option(help="Of each kind and context.")] = 24,
    gamma: GammaOption = 4,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="File of a profile of the pair, for its own budget; may be repeated. Default: cached ones."),
    ] = None,
    layer_skip_profile: Annotated[list[Path] | None, typer.Option(help="The same, of the layer-skip draft.")] = None,
    layer_skip: Annotated[
        bool, typer.Option("--layer-skip", help=f"Also measure {smol.MODEL} with 24 of its own layers for a draft.")
    ] = False,
    text_file: Annotated[
        typer.FileText | None, typer.Option(encoding="utf-8", help="Prose to measure with. Default: Moby Dick.")
    ] = None,
    parts: Annotated[str, typer.Option(help="What to measure, in this order.")] = ",".join(PARTS),
    minutes: Annotated[float, typer.Option(help="No part begins later than this.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Rows are appended to it as they come.")] = RESULTS / "quality.jsonl",
    plots: Annotated[Path | None, typer.Option(help="Directory for plots of all that the output file holds.")] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[Dtype, typer.Option(help="auto: float32.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure what a sparse verification loses, against other ways to choose what it reads."""
    console, rows = Console(stderr=True), []
    with _messages():
        _check_output("--out", out)
        _check_output("--plots", plots, folder=True)
        _check_models(target, draft, layer_skip)
        if layer_skip_profile and not layer_skip:
            raise ValueError(f"--layer-skip-profile {layer_skip_profile[0]} needs --layer-skip")
        text = None if text_file is None else _read_text("--text-file", text_file)
        label = draft or smol.DRAFT
        profiles = {label: [Profile.load(path) for path in profile or ()],
                    SKIPPING: [Profile.load(path) for path in layer_skip_profile or ()]}  # fmt: skip
        place = _place(device, "float32" if dtype == "auto" else dtype)
        pair = load_pair(target or smol.target_directory(), draft or smol.draft_directory(), **place)
        resolve_pair(pair.target, pair.draft, pair.tokenizer, pair.assistant_tokenizer)  # which refuses what differs
        drafts = {label: pair.draft}
        if layer_skip:
            drafts[SKIPPING] = skip_layers(pair.target, KEPT_LAYERS)
        run = QualityRun(
            pair.target,
            drafts,
            pair.tokenizer,
            model=target or smol.MODEL,
            profiles=profiles,
            contexts=_integers("contexts", contexts),
            budgets=_integers("budgets", budgets),
            prompts=prompts,
            parts=parts.split(","),
            gamma=gamma,
            text=text,
            minutes=minutes,
            tell=lambda message: console.print(Text(message)),
        )
        for row in run:
            append_rows(out, [row])
            rows.append(row)
        if not rows:
            why = f"left out: {', '.join(run.left_out)}" if run.left_out else f"parts={parts!r} needs --layer-skip"
            raise ValueError(f"nothing was measured; {why}")
        for name in dict.fromkeys(row["draft"] for row in rows):
            for metric in ("kl", "arr", "needle"):
                if any((row["metric"], row["draft"]) == (metric, name) for row in rows):
                    (console if as_json else Console()).print(make_quality_table(rows, metric, name))
            if any((row["metric"], row["draft"]) == ("kl_by_sinks", name) for row in rows):
                (console if as_json else Console()).print(make_sensitivity_table(rows, name))
        if plots is not None:
            for path in draw_quality(read_rows(out), plots):
                console.print(Text(f"wrote {path}"))
    if as_json:
        print(json.dumps({"rows": rows, "left_out": run.left_out}, ensure_ascii=False))


def _integers(name: str, text: str) -> list[int]:
    try:
        return [int(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}={text!r} must be integers with commas between") from None


def _check_models(target: str | None, draft: str | None, layer_skip: bool) -> None:
    if (target is None) != (draft is None):
        raise ValueError("--target and --draft go together")
    if layer_skip and target is not None:
        raise ValueError(f"--layer-skip is of {smol.MODEL}, without --target and --draft")


def _check_output(option: str, path: Path | None, folder: bool = False) -> None:
    """Refuse a file, or a folder of files, that something is in the way of; None is not asked for."""
    if path is None:
        return
    if not folder and path.is_dir():
        raise ValueError(f"{option} {path} is a directory")
    existing = next(each for each in ((path, *path.parents) if folder else path.parents) if each.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {path}: {existing} is not a directory")


def _place(device: str, dtype: Dtype) -> dict[str, Any]:
    """Where to run and in what, as keyword arguments."""
    place, kind = choose_place(None if device == "auto" else device, None if dtype == "auto" else getattr(torch, dtype))
    return {"device": place, "dtype": kind}


def _load_compiled(
    target: str, draft: str, place: dict[str, Any], config: DustinConfig, profile: Profile | None
) -> tuple[PreTrainedTokenizerBase, CompiledPair]:
    """The target's tokenizer and the pair."""
    loaded = load_pair(target, draft, **place)
    pair = compile_pair(
        loaded.target,
        loaded.draft,
        config=config,
        profile=profile,
        tokenizer=loaded.tokenizer,
        assistant_tokenizer=loaded.assistant_tokenizer,
    )
    return loaded.tokenizer, pair


def _load_exported(directory: Path, tokenizer: str | None, named: str) -> tuple[PreTrainedTokenizerBase, Pair]:
    """A tokenizer, by default the one that the export names, and the exported pair."""
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer or named)
    except (OSError, ValueError) as error:
        if tokenizer is not None:
            raise
        raise ValueError(f"the tokenizer {named} that {directory} names is not here: give --tokenizer") from error
    return loaded, load_exported(directory)


@contextmanager
def _messages() -> Iterator[None]:
    """Warnings, and errors that the user can put right, as a line each instead of source lines and tracebacks."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = Console(stderr=True)
    tell = lambda text, style: console.print(Text(text, style=style), soft_wrap=True)  # noqa: E731
    with warnings.catch_warnings(), _leaving_on_signals():
        warnings.showwarning = lambda message, *_: tell(f"Warning: {message}", "yellow")
        try:
            yield
        except (ValueError, OSError, ImportError, BuildError) as error:
            tell(f"Error: {error}", "red")
            raise typer.Exit(1) from error


@contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that what is unfinished is removed; nohup and others' handlers stay."""
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
        numbers = [n for n in signal.Signals if n.name in names and signal.getsignal(n) is signal.SIG_DFL]

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        for number in numbers:
            signal.signal(number, leave)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _read_text(option: str, file: IO[str]) -> str:
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file.name}: {error}") from None
    if not text.strip():
        raise ValueError(f"{option} {file.name} holds no text")
    return text


@contextmanager
def _progress(stages: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, None for unknown stages; call what this gives with each stage's name as it begins.

    Where stderr is no terminal, the names are lines.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: console.print(Text(name), soft_wrap=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
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

    table = Table(title=Text(f"{model} with {draft}: γ {config.gamma}, {config.budget} positions"))
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
