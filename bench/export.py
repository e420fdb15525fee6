"""Exported pairs against the compiled pair on a GPU: tokens, logits, step time, and what the export costs.

    python bench/export.py [--backends aot-inductor tensorrt] [--pairs smollm2 qwen2.5-7b] [--layers 4 4] [--batch 1]

Rows are appended to bench/results/export.jsonl as they are measured. A part that fails or takes too long prints why,
and the others go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dustin_compile import CompiledPair, load_exported, smol
from dustin_compile.benchmark.pairs import SHAPES, SMOLLM2, compile_models, make_models, random_model
from dustin_compile.benchmark.results import RESULTS, append_rows, make_row
from dustin_compile.benchmark.timing import median_us, now
from dustin_compile.export import BUILDERS, Backend, export_pair
from dustin_compile.runtime import TENSORRT_PACKAGES, ExportedPair, read_manifest

OUTPUT = RESULTS / "export.jsonl"
CUDA = torch.device("cuda")
ROUNDS = 5  # of timing, exported and compiled in turn
CHUNK = 64  # prompt tokens a pass: one size of program; the step does not depend on it
started = time.perf_counter()


def tell(message: str) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s] {message}", flush=True)


def make(name: str, dtype: torch.dtype, layers: list[int], **settings) -> CompiledPair:
    """A compiled pair; of a random one, only so many layers."""
    if name == SMOLLM2:
        models = make_models(name, CUDA, dtype)
        target, draft = models.target, models.draft
    else:
        shape = SHAPES[name]
        target, draft = (
            random_model({**sizes, "num_hidden_layers": count}, CUDA, dtype)
            for sizes, count in zip((shape.target, shape.draft), layers, strict=True)
        )
    return compile_models(target, draft, prefill_chunk=CHUNK, **settings)


def prompts_for(name: str, batch: int, context: int) -> torch.Tensor:
    if name == SMOLLM2:
        from transformers import AutoTokenizer

        passage = smol.passage(AutoTokenizer.from_pretrained(smol.target_directory()), context)
        return passage.expand(batch, -1).to(CUDA)
    return torch.randint(0, 50_000, (batch, context), generator=torch.Generator().manual_seed(0)).to(CUDA)


def step_us(pair: CompiledPair | ExportedPair, prompts: torch.Tensor) -> float:
    """A replay of the captured step, on rows that have ended: they compute all the same."""
    pair.generate(prompts, max_new_tokens=8, eos_token_id=[])
    return median_us(pair._generation.replays[(len(prompts), "greedy", False)], CUDA, 30)


def record(name: str, value: float, unit: str, conditions: str, **fields) -> None:
    """Append a row at once: what comes after it may fail."""
    append_rows(OUTPUT, [make_row(name, value, unit, CUDA, conditions, **fields)])
    tell(f"{name}: {value:.4g} ({unit}); {conditions}")


def engines_of(directory: Path) -> str:
    """For the conditions of a row: the TensorRT that built what is in a directory, or nothing."""
    platform = read_manifest(directory)["platform"]
    return "".join(f", {name} {platform[name]}" for name in TENSORRT_PACKAGES if name in platform)


@contextmanager
def build_once(backend: Backend, built: Path) -> Iterator[None]:
    """Within, exports build each program once, in a folder; programs are named by what is in them."""
    build = BUILDERS[backend]

    def build_missing(programs, progress):
        missing = {built / path.name: program for path, program in programs.items()}
        build({path: program for path, program in missing.items() if not path.exists()}, progress)
        for path in programs:
            shutil.copy(built / path.name, path)

    BUILDERS[backend] = build_missing
    try:
        yield
    finally:
        BUILDERS[backend] = build


FIRST_REQUEST = """
import sys, time, torch
from dustin_compile import load_exported
pair = load_exported(sys.argv[1])
began = time.perf_counter()
pair.generate(torch.arange(64, device="cuda")[None], max_new_tokens=8, eos_token_id=[])
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def record_first_requests(label: str, directory: Path, conditions: str) -> None:
    """Seconds of a new process's first request, behind the load: it compiles small functions and Triton kernels."""
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/i", "TRITON_CACHE_DIR": f"{caches}/t"}
        for state in ("empty", "filled"):  # in this order: the first fills them
            command = [sys.executable, "-c", FIRST_REQUEST, str(directory)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            record(
                f"export_first_request_s/{label}/{state}_caches",
                float(done.stdout.splitlines()[-1]),
                "s",
                f"{conditions}; 64 prompt and 8 new tokens, {state} caches of inductor and Triton",
            )


def compare_tokens(name: str, backend: Backend, context: int, tokens: int) -> None:
    """fp32 tokens of the exported pair and of the pair, sparse and dense, which have the same programs."""
    prompts = prompts_for(name, 1, context)
    row = f"export_tokens_equal/{name}/{backend}"
    prompt = f"fp32, {context} prompt tokens, greedy; equal from the start: "
    equal = {}
    with tempfile.TemporaryDirectory() as folder, build_once(backend, Path(folder)):
        for verify in ("sparse", "dense"):
            pair = make(name, torch.float32, [], verify=verify, draft_attention=verify)
            directory = Path(folder) / verify
            export_pair(pair, directory, backend=backend, batch=1, max_length=context + tokens, progress=tell)
            exported = load_exported(directory)
            engines = engines_of(directory)
            tell(f"{verify}: loaded")
            found = exported.generate(prompts, max_new_tokens=tokens, eos_token_id=[]).sequences
            tell(f"{verify}: the exported pair has generated")
            expected = pair.generate(prompts, max_new_tokens=tokens, eos_token_id=[]).sequences
            equal[verify] = int((expected == found)[0, context:].long().cumprod(0).sum())
            conditions = f"{prompt}{equal[verify]} of {tokens}{engines}"
            record(f"{row}/{verify}", equal[verify] == tokens, "1 or 0", conditions)
            del pair, exported
            torch.cuda.empty_cache()
    parts = ", ".join(f"{verify} {same} of {tokens}" for verify, same in equal.items())
    record(row, all(same == tokens for same in equal.values()), "1 or 0", prompt + parts + engines)


@torch.no_grad()
def logits_errors(name: str, pair: CompiledPair, exported: ExportedPair, tokens: torch.Tensor) -> dict[str, float]:
    """Relative error of bf16 logits against fp32, of both, over a passage read densely."""
    exact = make(name, torch.float32, [], compile=False)._generation.target
    models = {"exact": exact, "compiled": pair._generation.target, "exported": exported._generation.target}
    start = torch.zeros(len(tokens), dtype=torch.int32, device=CUDA)
    block = exported.config.gamma + 1
    logits = {}
    for key, model in models.items():
        cache = model.new_cache(len(tokens), tokens.shape[1])
        hidden, _ = model.forward(tokens, start, cache, None)
        logits[key] = model.logits(hidden[:, -block:]).float()
    exact_logits = logits.pop("exact")
    return {key: float((found - exact_logits).norm() / exact_logits.norm()) for key, found in logits.items()}


def compare_steps(name: str, backend: Backend, batch: int, context: int, layers: list[int]) -> None:
    """bf16 step times, both captured as one CUDA graph, in turn in one process; and what the export costs."""
    pair = make(name, torch.bfloat16, layers)
    prompts = prompts_for(name, batch, context)
    what = f", {layers[0]} and {layers[1]} layers, random weights" if name != SMOLLM2 else ""
    label = f"{name}/{backend}" if batch == 1 else f"{name}/{backend}/{batch}"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "pair"
        began = now(CUDA)
        export_pair(pair, directory, backend=backend, batch=batch, max_length=context + 64, progress=tell)
        export_seconds = now(CUDA) - began
        what += engines_of(directory)
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        programs = [size for file, size in sizes.items() if file.endswith((".pt2", ".engine"))]
        conditions = f"bf16, batch {batch}, prefill_chunk {CHUNK}, {len(programs)} programs{what}"
        record(f"export_s/{label}", export_seconds, "s", f"{conditions}; {len(os.sched_getaffinity(0))} cores")
        record(f"export_size_mb/{label}", sum(sizes.values()) / 1e6, "MB", conditions)
        record(f"export_programs_mb/{label}", sum(programs) / 1e6, "MB", conditions)
        began = now(CUDA)
        exported = load_exported(directory)
        record(f"export_load_s/{label}", now(CUDA) - began, "s", conditions)
        record_first_requests(label, directory, conditions)
    times: dict[str, list[float]] = {"exported": [], "compiled": []}
    try:
        for _ in range(ROUNDS):
            for key, each in (("exported", exported), ("compiled", pair)):
                times[key].append(step_us(each, prompts))
                tell(f"{label}: a step of the {key} pair, {times[key][-1]:.0f} us")
    finally:
        if times["compiled"]:  # out of time, fewer rounds count
            medians = {key: statistics.median(values) for key, values in times.items()}
            conditions = (
                f"bf16, {context} positions, batch {batch}, gamma {pair.config.gamma}, budget {pair.config.budget}, "
                f"prefill_chunk {CHUNK}, sparse{what}; one CUDA graph replay, median of {len(times['compiled'])} "
                "medians, both in turn in one process"
            )
            fields = {"step_us": {key: round(value, 1) for key, value in medians.items()}}
            record(
                f"export_step_ratio/{label}", medians["exported"] / medians["compiled"], "ratio", conditions, **fields
            )
    if name == SMOLLM2:
        errors = logits_errors(name, pair, exported, prompts[:, :256])
        conditions = (
            f"bf16, logits of 5 positions behind 251, relative to fp32{what}; "
            f"the compiled pair's: {errors['compiled']:.4g}"
        )
        record(f"export_logits_error/{label}", errors["exported"], "ratio", conditions, errors=errors)


def stop(*_) -> None:
    raise TimeoutError("the part took longer than --part-seconds")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", nargs="+", default=["aot-inductor", "tensorrt"])
    parser.add_argument("--pairs", nargs="+", default=["smollm2", "qwen2.5-7b"])
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 4])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--parts", nargs="+", default=["steps", "tokens"], choices=["steps", "tokens"])
    parser.add_argument("--part-seconds", type=int, default=240)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, stop)
    failures = 0
    for backend in options.backends:
        for name in options.pairs:
            parts = {"steps": lambda: compare_steps(name, backend, options.batch, options.context, options.layers)}  # noqa: B023
            if name == SMOLLM2:
                parts["tokens"] = lambda: compare_tokens(name, backend, options.context, 64)  # noqa: B023
            for part in [part for part in options.parts if part in parts]:
                tell(f"{name} {backend}: {part}")
                signal.alarm(options.part_seconds)
                try:
                    parts[part]()
                except Exception:
                    failures += 1
                    traceback.print_exc()
                finally:
                    signal.alarm(0)
                torch._dynamo.reset()
                torch.cuda.empty_cache()
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
