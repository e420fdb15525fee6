"""Timers: graph replays between events on CUDA, calls between reads of the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dustin_compile.graphs.capture import capture


def ready(function: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """What is timed: on CUDA a replay of the function, captured; on a CPU the function, run once before."""
    if device.type == "cuda":
        return capture(function, warmups=2)
    function()
    return function


def median_us(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median microseconds of a call."""
    return statistics.median(_elapsed_us(function, device) for _ in range(repeats))


def _elapsed_us(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e6
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3


def now(device: torch.device) -> float:
    """Seconds, when all that was begun on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copy_bandwidth(device: torch.device, size: int = 2**31) -> float:
    """Bytes a second of a large copy on the device, read and written: what memory-bound kernels are held against."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)  # noqa: E731
    copy()
    return 2 * size / (median_us(copy, device, repeats=9) * 1e-6)
