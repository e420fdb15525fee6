"""AOTInductor packages of exported programs, compiled side by side in processes of their own.

The processes run `packages.py PROGRAM PACKAGE ...`: as a file alone, which imports torch alone and is quicker, or
as a module of the package where programs call our ops.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram

OPTIONS: dict[str, object] = {
    "aot_inductor.compile_wrapper_opt_level": "O0",  # it only launches kernels, and takes long to compile
    "cpp.dynamic_threads": True,  # as many as where the package runs, not as where it is compiled
}
if sys.platform == "linux":
    # By name: some toolchains link the static one otherwise (seen with GCC 13 and CUDA 13), and torch, which has the
    # shared one, crashes when it loads the package.
    OPTIONS["aot_inductor.custom_op_libs"] = [":libstdc++.so.6"]


class BuildError(RuntimeError):
    """A backend did not compile a program; the message has what it said."""


def check_compiler() -> None:
    """Refuse to build without a C++ compiler.

    Raises:
        ValueError: inductor finds none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(f"backend='aot-inductor' needs a C++ compiler to export: {error}") from None


def build_packages(programs: Mapping[Path, ExportedProgram], progress: Callable[[str], None]) -> None:
    """Compile programs to packages at the given paths, on all cores that this process may use.

    Raises:
        BuildError: a compilation failed; the end of what it printed is in the message.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    count = min(len(programs), cores)
    progress(f"compiling {len(programs)} programs in {count} processes")
    # Or each process would start a pool of its own.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    nodes = [node for program in programs.values() for node in program.graph.nodes]
    if all(node.meta["val"].is_cuda for node in nodes if node.op == "placeholder"):
        # Each process would try out the CPU's vector instructions, one process after another: a minute and more.
        environment["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    ours = any(getattr(node.target, "namespace", "") == "dustin_compile" for node in nodes)
    module = ["-m", "dustin_compile.packages"] if ours else ["-P", __file__]
    shares: list[list[str]] = [[] for _ in range(count)]
    running: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Inductor names what a package is made of by its content, and writes part of it in place: of two exports of one
        # program at a time, one could pack an empty file (seen on an H200).
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
        for number, (package, program) in enumerate(programs.items()):
            program.example_inputs = None  # weights, which the file would hold
            torch.export.save(program, folder / f"{number}.pt2")
            shares[number % count] += [str(folder / f"{number}.pt2"), str(package)]
        try:
            for number, share in enumerate(shares):
                with (folder / f"{number}.log").open("w") as log:
                    command = [sys.executable, *module, *share]
                    running.append(
                        subprocess.Popen(
                            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                        )
                    )
            _wait(running, folder, list(programs), progress)
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
                process.wait()


def _wait(running: list[subprocess.Popen], folder: Path, packages: list[Path], progress: Callable[[str], None]) -> None:
    """Wait for all processes, or for the first that fails."""
    begin, built, ended = time.monotonic(), 0, False
    while not ended:
        time.sleep(0.1)
        ended = None not in [process.poll() for process in running]
        for number, process in enumerate(running):
            if process.returncode:
                log = (folder / f"{number}.log").read_text()
                raise BuildError(f"AOTInductor failed with exit status {process.returncode}: {log[-4000:]}")
        if (found := sum(package.exists() for package in packages)) > built:
            built = found
            progress(f"compiled {built} of {len(packages)} programs in {time.monotonic() - begin:.0f} s")


def _compile(path: str, package: str) -> None:
    program = torch.export.load(path)
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    program.example_inputs = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs), {}
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=OPTIONS)


if __name__ == "__main__":
    for path, package in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        _compile(path, package)
