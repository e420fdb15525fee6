"""Exported pairs against the compiled pair on a GPU: tokens, step time, and what the export costs.

    python bench/export.py [--layers 4 4] [--backends aot-inductor,tensorrt] [--pairs smollm2,qwen2.5-7b]

Rows are appended to bench/results/export.jsonl. A part that fails prints its traceback, and the others go on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

from dustin_compile import CompiledPair, DustinConfig, compile_pair, load_exported, smol
from dustin_compile.benchmark.pairs import SHAPES, SMOLLM2, make_models, random_model
from dustin_compile.benchmark.results import RESULTS, append_rows, make_row
from dustin_compile.benchmark.timing import median_us
from dustin_compile.profile import default_profile

OUTPUT = RESULTS / "export.jsonl"
CUDA = torch.device("cuda")
ROUNDS = 5  # of timing, exported and compiled in turn
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
    config = DustinConfig(**settings)
    profile = default_profile(target.config, draft.config, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_pair(target, draft, config=config, profile=profile)


def prompt_for(name: str, context: int) -> torch.Tensor:
    if name == SMOLLM2:
        from transformers import AutoTokenizer

        return smol.passage(AutoTokenizer.from_pretrained(smol.target_directory()), context).to(CUDA)
    return torch.randint(0, 50_000, (1, context), generator=torch.Generator().manual_seed(0)).to(CUDA)


def step_us(generate, generation, prompt: torch.Tensor) -> float:
    """A replay of the captured step, on rows that have ended: they compute all the same."""
    generate(prompt, max_new_tokens=8, eos_token_id=[])
    replay = generation.replays[("greedy", False)]
    return median_us(replay, CUDA, 30)


def compare_tokens(name: str, backend: str, context: int, tokens: int) -> None:
    """fp32 tokens of the exported pair and of the pair, sparse and dense."""
    equal, parts = True, []
    for verify in ("sparse", "dense"):
        pair = make(name, torch.float32, [], verify=verify, draft_attention=verify, prefill_chunk=64)
        prompt = prompt_for(name, context)
        with tempfile.TemporaryDirectory() as folder:
            directory = pair.export(Path(folder) / "pair", backend=backend, batch=1, max_length=context + tokens)
            expected = pair.generate(prompt, max_new_tokens=tokens, eos_token_id=[]).sequences
            found = load_exported(directory).generate(prompt, max_new_tokens=tokens, eos_token_id=[]).sequences
        same = int((expected == found)[0, context:].long().cumprod(0).sum())
        parts.append(f"{verify} {same} of {tokens}")
        equal = equal and same == tokens
        tell(f"{name} {backend} fp32 {verify}: the first {same} of {tokens} tokens are equal")
    conditions = f"fp32, {context} prompt tokens, greedy; equal from the start: {', '.join(parts)}"
    append_rows(OUTPUT, [make_row(f"export_tokens_equal/{name}/{backend}", equal, "1 or 0", CUDA, conditions)])


def compare_steps(name: str, backend: str, context: int, layers: list[int]) -> None:
    """bf16 step times, both captured as one CUDA graph, in turn in one process; and what the export costs."""
    pair = make(name, torch.bfloat16, layers, prefill_chunk=64)
    prompt = prompt_for(name, context)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        directory = pair.export(Path(folder) / "pair", backend=backend, batch=1, max_length=context + 64)
        export_seconds = time.perf_counter() - began
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        programs = sum(size for file, size in sizes.items() if file.endswith((".pt2", ".engine")))
        began = time.perf_counter()
        exported = load_exported(directory)
        torch.cuda.synchronize()
        load_seconds = time.perf_counter() - began
    tell(
        f"{name} {backend}: export {export_seconds:.1f} s, load {load_seconds:.2f} s, programs {programs / 1e6:.1f} MB"
    )
    times: dict[str, list[float]] = {"exported": [], "compiled": []}
    for _ in range(ROUNDS):
        times["exported"].append(step_us(exported.generate, exported._generation, prompt))
        times["compiled"].append(step_us(pair.generate, pair._generation, prompt))
    medians = {key: sorted(values)[len(values) // 2] for key, values in times.items()}
    ratio = medians["exported"] / medians["compiled"]
    tell(f"{name} {backend}: exported {medians['exported']:.0f} us, compiled {medians['compiled']:.0f} us, {ratio:.3f}")
    depth = f", {layers[0]} and {layers[1]} layers, random weights" if name != SMOLLM2 else ""
    conditions = (
        f"bf16, {context} positions, batch 1, gamma {pair.config.gamma}, budget {pair.config.budget}, sparse{depth}; "
        f"one CUDA graph replay, median of {ROUNDS} medians, both in turn in one process"
    )
    fields = {"step_us": {key: round(value, 1) for key, value in medians.items()}}
    rows = [make_row(f"export_step_ratio/{name}/{backend}", ratio, "ratio", CUDA, conditions, **fields)]
    for key, value, unit in (
        ("export_s", export_seconds, "s"),
        ("export_load_s", load_seconds, "s"),
        ("export_size_mb", sum(sizes.values()) / 1e6, "MB"),
        ("export_programs_mb", programs / 1e6, "MB"),
    ):
        rows.append(make_row(f"{key}/{name}/{backend}", value, unit, CUDA, f"bf16, batch 1{depth}"))
    append_rows(OUTPUT, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 4])
    parser.add_argument("--backends", default="aot-inductor,tensorrt")
    parser.add_argument("--pairs", default="smollm2,qwen2.5-7b")
    parser.add_argument("--context", type=int, default=2048)
    options = parser.parse_args()
    failures = 0
    for backend in options.backends.split(","):
        for name in options.pairs.split(","):
            parts = [lambda: compare_steps(name, backend, options.context, options.layers)]  # noqa: B023
            if name == SMOLLM2:
                parts.append(lambda: compare_tokens(name, backend, options.context, 64))  # noqa: B023
            for part in parts:
                try:
                    part()
                except Exception:
                    failures += 1
                    traceback.print_exc()
                torch._dynamo.reset()
                torch.cuda.empty_cache()
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
