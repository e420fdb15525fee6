"""Compile time: from loaded models to a captured step, with an empty and then with a filled inductor cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dustin_compile.benchmark.compile_time import seconds_until_ready
from dustin_compile.benchmark.results import RESULTS, append_rows, make_row

PAIR, BATCH = "qwen2.5-7b", 16


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Directories for what inductor and Triton compile, empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


@pytest.mark.parametrize("state", ["cold", "warm"])  # in this order: the first fills the cache
def test_compile(state, benchmark, cache, measured):
    if measured.bandwidth is None:
        benchmark(seconds_until_ready, "tiny", 2, 128, torch.device("cpu"), torch.float32)
        return
    command = [sys.executable, "-m", "dustin_compile.benchmark.compile_time", PAIR, str(BATCH)]

    def run() -> float:
        done = subprocess.run(command, env={**os.environ, **cache}, check=True, capture_output=True, text=True)
        return float(done.stdout.splitlines()[-1])

    seconds = benchmark.pedantic(run, rounds=1)
    conditions = (
        f"compile_pair, compilation of the greedy step's regions and its capture, batch {BATCH}, in a process of its "
        f"own, {'empty' if state == 'cold' else 'filled'} TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR, "
        f"{os.cpu_count()} CPU cores; imports, weights and the prefill's regions not included"
    )
    name = f"compile_s/{PAIR}/{BATCH}/{state}"
    append_rows(RESULTS / "step.jsonl", [make_row(name, seconds, "s", measured.device, conditions)])
