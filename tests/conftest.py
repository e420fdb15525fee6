"""Settings of the whole test run, and the real pair."""

import logging
import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # tests/ops needs it from the first import of the ops on

# Every run draws the same examples, and none fails for being slow on a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# pytest listens to loggers that do not propagate. Torch writes out all it compiles as soon as this one has a listener,
# which is slow and buries the report of a failure.
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def load_smol():
    """A function of device and dtype that loads SmolLM2-135M-Instruct and its draft, or skips where they are not."""
    from dustin_compile import smol
    from dustin_compile.loading import load_pair

    def load(**where):
        try:
            directories = smol.target_directory(), smol.draft_directory()
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
        return load_pair(*directories, **where)

    return load
