"""Compilation of the step's regions, and its recording as one CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dustin_compile.graphs.state import State


def compile_region(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    """Compile a function without graph breaks, for one shape of its arguments or, dynamic, for any.

    Each call gives a compilation of its own, also for the same function: torch.compile keeps its variants on the
    code object and drops out when there are too many, so every region has a copy of the code.
    """
    original = cast(FunctionType, function)
    code = original.__code__.replace()
    copy = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, original.__closure__)
    return torch.compile(copy, fullgraph=True, dynamic=dynamic)


def compile_by_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a State apart for each batch size, so that none evicts another."""
    compiled: dict[int, Callable[..., Any]] = {}

    @functools.wraps(function)
    def call(state: State, *args: Any) -> Any:
        if state.batch not in compiled:
            compiled[state.batch] = compile_region(function)
        return compiled[state.batch](state, *args)

    return call


@functools.cache
def _stream(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """One for each purpose: cuBLAS keeps 32 MiB for every stream that it has run on."""
    return torch.cuda.Stream(device)


def launch_beside(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Run a function on a second stream while the current one goes on; what is returned waits for its result.

    On CPU it runs at once.
    """
    if device.type != "cuda":
        result = function()
        return lambda: result
    current, side = torch.cuda.current_stream(device), _stream("beside", device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = function()
    result.record_stream(current)

    def join() -> Tensor:
        current.wait_stream(side)
        return result

    return join


def capture(function: Callable[[], None], warmups: int = 2) -> Callable[[], None]:
    """Record what a function launches as one CUDA graph; the result replays it.

    The function runs `warmups` times first, eagerly, which compiles whatever is not compiled yet.
    """
    stream = _stream("warm up", torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
