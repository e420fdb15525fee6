"""Programmatic dependent launch: a kernel starts while the one before it ends (CUDA programming guide, 3.2.7).

In a step of a thousand small kernels the time between two of them counts. A kernel that takes part calls
`follow_previous` before it touches memory: it waits there for the kernel before it, and only then lets the next one
start. So whoever runs knows that all kernels but the last have ended. Inductor's kernels do not take part
(`triton.enable_pdl`): those that load nothing would not wait, and order would be lost behind them.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device can start early; pass it to a launch as OVERLAP and as `launch_pdl`."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def follow_previous(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, then let the next one start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
