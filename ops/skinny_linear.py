"""skinny_linear: the product of a few rows with a weight matrix, and SwiGLU (arXiv 2002.05202) on top where asked.

With 16 rows or fewer a product is a stream of weights through the device. Libraries give a small weight too few
programs, and split its sums over a second kernel; here a program takes 16 rows of it, and its warps share their length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_compile.ops.checks import FLOATS, check_contiguous, check_tensor
from dustin_compile.ops.dependent_launch import can_overlap, follow_previous

BLOCK_N = 16
BLOCK_K = 64  # of one slice: 128 bytes of a weight row


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """The op on any device, computed in fp32."""
    product = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * up
    return product.to(x.dtype)


@triton.jit
def _skinny_linear_kernel(
    x, weight, bias, out, rows, x_stride, weight_stride,
    N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the i-th BLOCK_N outputs of the j-th BLOCK_M rows; SLICES slices of K are summed side by side."""
    follow_previous(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    weight += tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * weight_stride
    second = weight + N * weight_stride.to(tl.int64)
    x += row.to(tl.int64)[None, :, None] * x_stride
    valid = (row < rows)[None, :, None]
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(0, K, SLICES * BLOCK_K, num_stages=STAGES):
        at = first + k
        if K % (SLICES * BLOCK_K) == 0:
            left = tl.load(x + at, mask=valid, other=0.0)
            right = tl.load(weight + at)
        else:
            left = tl.load(x + at, mask=valid & (at < K), other=0.0)
            right = tl.load(weight + at, mask=at < K, other=0.0)
        left = tl.permute(left, (0, 2, 1))
        acc = tl.dot(right, left, acc, input_precision="ieee")
        if GATED:
            if K % (SLICES * BLOCK_K) == 0:
                right = tl.load(second + at)
            else:
                right = tl.load(second + at, mask=at < K, other=0.0)
            up = tl.dot(right, left, up, input_precision="ieee")
    y = tl.sum(acc, 0)
    if BIASED:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        z = tl.sum(up, 0)
        if BIASED:
            z += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = y * tl.sigmoid(y) * z
    place = out + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, tl.trans(y).to(out.dtype.element_ty), mask=(row < rows)[:, None] & (n < N)[None, :])


def _launch(programs: int, depth: int, dtype: torch.dtype, gated: bool) -> tuple[int, int]:
    """Slices of K, each with a warp of its own, and pipeline stages: the best of a sweep on an H200."""
    if dtype == torch.float32:  # exact fp32 products run on FMA units, and take twice the shared memory
        return 2, 2
    few = programs < 132 and depth >= 2048
    return (4 if few else 2), (3 if gated else 6)


def skinny_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """The kernel, on CUDA or interpreted."""
    batch, tokens, depth = x.shape
    rows, outputs = batch * tokens, weight.shape[0] // (2 if gated else 1)
    out = torch.empty(batch, tokens, outputs, dtype=x.dtype, device=x.device)
    block_m = 16 if rows <= 16 else 32
    programs = triton.cdiv(outputs, BLOCK_N)
    slices, stages = _launch(programs, depth, x.dtype, gated)
    overlap = can_overlap(x.device)
    _skinny_linear_kernel[(programs, triton.cdiv(rows, block_m))](
        x, weight, bias, out, rows, depth, weight.stride(0), outputs, depth, bias is not None, gated,
        block_m, BLOCK_N, BLOCK_K, slices, stages, overlap, num_warps=slices, launch_pdl=overlap,
    )  # fmt: skip
    return out


@torch.library.custom_op("dustin_compile::skinny_linear", mutates_args=())
def _skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    if x.is_cuda:
        with torch.cuda.device_of(x):
            return skinny_linear_triton(x, weight, bias, gated)
    return skinny_linear_reference(x, weight, bias, gated)


@_skinny_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    outputs = weight.shape[0] // (2 if gated else 1)
    return torch.empty(*x.shape[:2], outputs, dtype=x.dtype, device=x.device)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """x @ weight.T + bias for few rows; gated, silu of its first half times its second. fp32 sums, rounded once.

    Any number of rows is right; beyond 16, or 32 with a small weight, a library is faster.

    Args:
        x: [B, T, K] fp32, fp16 or bf16, contiguous.
        weight: [N, K], or gated [2N, K] with the gate's rows before those of the up projection; dtype of x, last
            dimension contiguous.
        bias: [N] or [2N], dtype of x, or None.
        gated: apply SwiGLU.

    Returns:
        [B, T, N] contiguous, dtype of x.

    Raises:
        ValueError: a shape, device or layout is wrong.
        TypeError: a dtype is wrong.
    """
    check_tensor("x", x, [None, None, None], FLOATS, x.device)
    check_contiguous("x", x)
    check_tensor("weight", weight, [None, x.shape[2]], [x.dtype], x.device)
    if weight.stride(1) != 1:
        raise ValueError(f"weight must have a contiguous last dimension, got strides {list(weight.stride())}")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight must have an even number of rows to be gated, got {weight.shape[0]}")
    if bias is not None:
        check_tensor("bias", bias, [weight.shape[0]], [x.dtype], x.device)
        check_contiguous("bias", bias)
    return _skinny_linear(x, weight, bias, gated)
