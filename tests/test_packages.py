import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dustin_compile.packages import BuildError, build_packages


@pytest.fixture
def programs(tmp_path):
    program = torch.export.export(nn.SiLU(), (torch.ones(2),))
    return {tmp_path / f"{number}.pt2": program for number in range(2)}


def write_compiler(tmp_path, monkeypatch, script):
    """What stands for Python in the processes that compile."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_failed_compilation_ends_the_others_and_says_why(programs, tmp_path, monkeypatch):
    monkeypatch.setattr("dustin_compile.packages.os.sched_getaffinity", lambda process: {0, 1})
    survived = tmp_path / "survived"
    slow, failing = f"sleep 5; touch {survived}", 'echo "no such register"; exit 3'
    write_compiler(tmp_path, monkeypatch, f'case "$3" in */0.pt2) {slow};; *) {failing};; esac')
    with pytest.raises(BuildError, match="exit status 3: no such register"):
        build_packages(programs, lambda message: None)  # which waits for them to end
    assert not survived.exists()


def test_builds_share_no_files(programs, tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    write_compiler(tmp_path, monkeypatch, f'echo "$TORCHINDUCTOR_CACHE_DIR" >> {seen}; shift 2; touch "$2" "$4"')
    monkeypatch.setattr("dustin_compile.packages.os.sched_getaffinity", lambda process: {0})
    for _ in range(2):
        build_packages(programs, lambda message: None)
    first, second = seen.read_text().split()
    assert first != second and not Path(first).parent.exists()


def test_progress_is_told(programs, tmp_path, monkeypatch):
    write_compiler(tmp_path, monkeypatch, 'shift 2; while [ $# -gt 0 ]; do touch "$2"; shift 2; done')
    messages = []
    build_packages(programs, messages.append)
    assert messages[0].startswith("compiling 2 programs in") and messages[-1].startswith("compiled 2 of 2 programs")
    assert all(package.exists() for package in programs)
