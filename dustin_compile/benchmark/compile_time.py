"""How long a pair takes until its first step can run: `python -m dustin_compile.benchmark.compile_time PAIR BATCH`."""

from __future__ import annotations

import sys

import torch

from dustin_compile.benchmark.pairs import compile_models, make_models
from dustin_compile.benchmark.timing import now, ready
from dustin_compile.graphs.state import new_state


def seconds_until_ready(name: str, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of compile_pair, of compiling the greedy step's regions, and, on a GPU, of its capture.

    The models are in memory before; the prefill's regions come on top at the first `generate`.
    """
    models = make_models(name, device, dtype)
    started = now(device)
    pair = compile_models(models.target, models.draft)
    generation = pair._generation
    state = new_state(generation.target, generation.draft, pair.config, batch, capacity)
    with torch.no_grad():
        ready(lambda: generation.step(state, "greedy"), device)
    return now(device) - started


if __name__ == "__main__":
    print(seconds_until_ready(sys.argv[1], int(sys.argv[2]), 4096, torch.device("cuda"), torch.bfloat16))
