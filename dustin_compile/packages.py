"""AOTInductor packages of exported programs, compiled side by side in processes of their own.

The processes run `packages.py PROGRAM PACKAGE ...`: as a file alone, which imports torch alone and is quicker, or
as a module of the package where programs call our ops.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram

OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # it only launches kernels, and takes long to compile


def build_packages(programs: Mapping[Path, ExportedProgram], progress: Callable[[str], None]) -> None:
    """Compile programs to packages at the given paths, on all cores that this process may use.

    Raises:
        RuntimeError: a compilation failed; the end of what it printed is in the message.
    """
    count = min(len(programs), len(os.sched_getaffinity(0)))
    progress(f"compiling {len(programs)} programs in {count} processes")
    # Or each process would start a pool of its own.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

    targets = (node.target for program in programs.values() for node in program.graph.nodes)
    ours = any(getattr(target, "namespace", "") == "dustin_compile" for target in targets)
    module = ["-m", "dustin_compile.packages"] if ours else ["-P", __file__]
    shares: list[list[str]] = [[] for _ in range(count)]
    running = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (package, program) in enumerate(programs.items()):
            program.example_inputs = None  # weights, which the file would hold
            torch.export.save(program, folder / f"{number}.pt2")
            shares[number % count] += [str(folder / f"{number}.pt2"), str(package)]
        try:
            for number, share in enumerate(shares):
                with (folder / f"{number}.log").open("w") as log:
                    command = [sys.executable, *module, *share]
                    running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            for number, process in enumerate(running):
                if process.wait():
                    raise RuntimeError(f"AOTInductor failed: {(folder / f'{number}.log').read_text()[-4000:]}")
        finally:
            for process in running:
                process.kill()
                process.wait()


def _compile(path: str, package: str) -> None:
    program = torch.export.load(path)
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    program.example_inputs = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs), {}
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=OPTIONS)


if __name__ == "__main__":
    for path, package in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        _compile(path, package)
