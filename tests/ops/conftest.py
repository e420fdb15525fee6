"""Without a CUDA device the kernels run in Triton's interpreter, which must be asked for before they are imported."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    if "dustin_compile.ops.append_kv" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("dustin_compile.ops was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty holds NaN (or the largest integer): what an op does not write, it must not return or read."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
