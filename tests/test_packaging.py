"""The wheel: what it holds, and that it works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".benchmarks")

IMPORT_AND_RUN = """
import sys
import torch

def refuse():
    raise AssertionError("importing initialised CUDA")

initialise, torch.cuda._lazy_init = torch.cuda._lazy_init, refuse
import dustin_compile
import dustin_compile.cli
import dustin_compile.graphs.step
import dustin_compile.ops.sparse_attention
torch.cuda._lazy_init = initialise

assert dustin_compile.__file__.startswith(sys.argv[1]), dustin_compile.__file__
assert dustin_compile.ops.sparse_attention.__file__.startswith(sys.argv[1])
assert "ops" not in sys.modules and "graphs" not in sys.modules

from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16
)
torch.manual_seed(0)
target = LlamaForCausalLM(config).eval()
pair = dustin_compile.compile_pair(
    target, dustin_compile.layer_skip(target, keep=[0]), config=dustin_compile.DustinConfig(compile=False)
)
prompt = torch.arange(1, 11)[None]
options = {"max_new_tokens": 6, "eos_token_id": [], "pad_token_id": 0}
found, expected = pair.generate(prompt, **options).sequences, target.generate(prompt, do_sample=False, **options)
assert found.tolist() == expected.tolist()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tree, so that nothing is left in it; without isolation, so that no index is asked."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "tree"]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if not name.startswith("dustin_compile-0.1.0.dist-info/")}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "dustin_compile").rglob("*.py")}
    for package in ("ops", "graphs"):
        expected |= {f"dustin_compile/{package}/{path.name}" for path in (ROOT / package).glob("*.py")}
    assert packaged == expected | {"dustin_compile/py.typed"}
    assert wheel.stat().st_size < 1_000_000


def test_the_wheel_has_licence_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    assert "dustin_compile-0.1.0.dist-info/licenses/LICENSE" in archive.namelist()
    entry_points = archive.read("dustin_compile-0.1.0.dist-info/entry_points.txt").decode()
    assert "dustin-compile = dustin_compile.cli:app" in entry_points


def test_the_wheel_imports_without_cuda_and_runs(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    subprocess.run(
        [sys.executable, "-c", IMPORT_AND_RUN, str(site)],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
