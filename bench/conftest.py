"""Which shapes are measured, and the rows of bench/results/kernels.jsonl that come of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from shapes import LARGE, TINY

from dustin_compile.benchmark.results import RESULTS, append_rows, make_row
from dustin_compile.benchmark.timing import copy_bandwidth


def make_event_timer() -> Callable[[], float]:
    """A clock for pytest-benchmark that counts the device's time, in seconds between CUDA events."""
    total, last = 0.0, None

    def cuda_events() -> float:
        nonlocal total, last
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        total += last.elapsed_time(event) / 1e3 if last else 0.0
        last = event
        return total

    return cuda_events


@dataclass
class Measured:
    """What this run has measured: microseconds by op and shape, and each shape's conditions."""

    device: torch.device
    bandwidth: float | None
    us: dict[tuple[str, str], float] = field(default_factory=dict)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        tiny = metafunc.config.getoption("benchmark_disable") or not torch.cuda.is_available()
        metafunc.parametrize("shape", TINY if tiny else LARGE, ids=lambda shape: shape.name, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    timer = make_event_timer() if torch.cuda.is_available() else time.perf_counter
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=timer))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture(scope="session")
def measured(device: torch.device, request: pytest.FixtureRequest):
    """Collects what the cases measure; at the end, on a GPU, the ratios are written."""
    timed = device.type == "cuda" and not request.config.getoption("benchmark_disable")
    measured = Measured(device, copy_bandwidth(device) if timed else None)
    yield measured
    if timed:
        append_rows(RESULTS / "kernels.jsonl", ratio_rows(measured))


def ratio_rows(measured: Measured) -> list[dict]:
    """How sparse attention compares with dense, and scoring and selection with what they save."""
    rows = []
    for shape in LARGE:
        us = {op: value for (op, name), value in measured.us.items() if name == shape.name}
        place = f"{shape.name}/{shape.context}x{shape.batch}"
        peers = {op: value for op, value in us.items() if op.startswith("peer_")}
        if "sparse_attention" in us and peers:
            best = min(peers, key=lambda op: peers[op])
            rows.append(make_row(
                f"attention_speedup/{place}", peers[best] / us["sparse_attention"], "x", measured.device,
                f"the best dense peer of this run, {best.removeprefix('peer_')} ({peers[best]:.1f} us), over "
                f"sparse_attention ({us['sparse_attention']:.2f} us); in the run: "
                + ", ".join(f"{op.removeprefix('peer_')} {value:.1f} us" for op, value in sorted(peers.items()))
                + ("" if any("flashinfer" in op for op in peers) else ", without FlashInfer"),
            ))  # fmt: skip
        if {"sparse_attention", "dense_attention"} <= us.keys():
            rows.append(make_row(
                f"attention_speedup_vs_own_dense/{place}", us["dense_attention"] / us["sparse_attention"], "x",
                measured.device, "dense_attention_us over sparse_attention_us of the same run",
            ))  # fmt: skip
        estimation = ("score_heads", "score_heads_draft", "select_tiered")
        if {*estimation, "dense_attention"} <= us.keys():
            share = sum(us[op] for op in estimation) / (shape.layers * us["dense_attention"])
            sums = " + ".join(f"{us[op]:.1f}" for op in estimation)
            rows.append(make_row(
                f"estimation_share/{place}", share, "share", measured.device,
                f"target's and draft's score_heads and select_tiered ({sums} us) over dense_attention of all "
                f"{shape.layers} layers ({us['dense_attention']:.1f} us each), all of the same run",
            ))  # fmt: skip
    return rows
