"""How long a pair takes until its first step can run: `python -m dustin_compile.benchmark.compile_time PAIR BATCH`."""

from __future__ import annotations

import sys
import warnings

import torch

from dustin_compile.benchmark.pairs import make_models
from dustin_compile.benchmark.timing import now, ready
from dustin_compile.config import DustinConfig
from dustin_compile.graphs.state import new_state
from dustin_compile.pair import compile_pair
from dustin_compile.profile import default_profile


def seconds_until_ready(name: str, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of compile_pair, of compiling the greedy step's regions, and, on a GPU, of its capture.

    The models are in memory before; the prefill's regions come on top at the first `generate`.
    """
    models = make_models(name, device, dtype)
    config = DustinConfig()
    profile = default_profile(models.target.config, models.draft.config, config)
    started = now(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="vocab_size is")
        pair = compile_pair(models.target, models.draft, config=config, profile=profile)
    generation = pair._generation
    state = new_state(generation.target, generation.draft, pair.config, batch, capacity)
    with torch.no_grad():
        ready(lambda: generation.step(state, "greedy"), device)
    return now(device) - started


if __name__ == "__main__":
    print(seconds_until_ready(sys.argv[1], int(sys.argv[2]), 4096, torch.device("cuda"), torch.bfloat16))
