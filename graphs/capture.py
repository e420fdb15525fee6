"""Compilation of the step's regions, and its recording as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch


def compile_region(function: FunctionType, dynamic: bool = False) -> Callable:
    """Compile a function without graph breaks, for one shape of its arguments or, dynamic, for any.

    Each call gives a compilation of its own, also for the same function: torch.compile keeps its variants on the
    code object and drops out when there are too many, so every region has a copy of the code.
    """
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, fullgraph=True, dynamic=dynamic)


def capture(function: Callable[[], None], warmups: int = 2) -> Callable[[], None]:
    """Record what a function launches as one CUDA graph; the result replays it.

    The function runs `warmups` times first, eagerly, which compiles whatever is not compiled yet.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
