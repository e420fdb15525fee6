import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
    DTYPES,
    FP16,
    FP32,
    INTERPRETED,
    TOLERANCE,
    assert_close,
    compiled,
    far_apart,
    gpu,
    randn,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dustin_compile.ops.skinny_linear import skinny_linear, skinny_linear_reference, skinny_linear_triton

SHAPES = ((1, 1, 64, 16), (2, 3, 200, 24), (5, 4, 576, 40))  # B, T, K, N


def inputs(shape: tuple[int, int, int, int], gated: bool, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    batch, tokens, depth, outputs = shape
    outputs *= 2 if gated else 1
    x, weight = randn(batch, tokens, depth, dtype=dtype), randn(outputs, depth, seed=1) * depth**-0.5
    return x, weight.to(dtype), randn(outputs, dtype=dtype, seed=2)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    product = x.double() @ weight.double().t()
    if bias is not None:
        product += bias.double()
    if not gated:
        return product
    gate, up = product[..., : len(weight) // 2], product[..., len(weight) // 2 :]
    return gate / (1 + (-gate).exp()) * up


def check(function, shape: tuple[int, int, int, int], dtype: torch.dtype, biased: bool, gated: bool) -> None:
    x, weight, bias = inputs(shape, gated, dtype)
    out = function(x, weight, bias if biased else None, gated)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_close(out, exact(x, weight, bias if biased else None, gated), TOLERANCE[dtype])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape, dtype: torch.dtype, biased: bool, gated: bool) -> None:
    check(skinny_linear_reference, shape, dtype, biased, gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, dtype: torch.dtype, gated: bool) -> None:
    check(skinny_linear_triton, shape, dtype, gated, gated)


@gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 576, 960), (16, 1, 896, 1152), (16, 2, 896, 4864), (16, 1, 4864, 896), (4, 5, 3584, 4608), (9, 5, 200, 24)],
)
def test_kernel_on_cuda(shape, dtype: torch.dtype, gated: bool) -> None:
    check(lambda *arguments: skinny_linear(*arguments[:3], gated=arguments[3]), shape, dtype, True, gated)


@given(rows=st.integers(1, 35), depth=st.integers(1, 140), outputs=st.integers(1, 40), gated=st.booleans())
def test_any_size(rows: int, depth: int, outputs: int, gated: bool) -> None:
    """Rows are independent: one that holds NaN leaves the others as they are."""
    x, weight, bias = inputs((rows, 1, depth, outputs), gated)
    expected = exact(x, weight, bias, gated)
    x[rows // 2] = float("nan")
    out = skinny_linear_triton(x, weight, bias, gated)
    others = [row for row in range(rows) if row != rows // 2]
    assert out[rows // 2].isnan().all()
    assert_close(out[others], expected[others], TOLERANCE[FP32])


def test_weight_as_a_view_of_rows() -> None:
    """As a part of merged weights is."""
    x, weight, _ = inputs((2, 1, 64, 48), False)
    wide = torch.full((48, 80), float("nan"), device=DEVICE)
    wide[:, :64] = weight
    for function in (skinny_linear_reference, skinny_linear_triton):
        assert_close(function(x, wide[16:, :64], None, False), exact(x, weight[16:], None, False), TOLERANCE[FP32])


@pytest.mark.parametrize("function", [skinny_linear_reference, skinny_linear_triton])
def test_offsets_past_2_31(function) -> None:
    """Trap 25."""
    weight = far_apart((3, 64), 0)
    x = randn(2, 1, 64, dtype=FP16)
    assert_close(function(x, weight, None, False), exact(x, weight, None, False), TOLERANCE[FP16])


def test_opcheck() -> None:
    x, weight, bias = inputs((2, 1, 64, 16), True)
    torch.library.opcheck(torch.ops.dustin_compile.skinny_linear.default, (x, weight, bias, True))
    torch.library.opcheck(torch.ops.dustin_compile.skinny_linear.default, (x, weight, None, False))


def test_eager_and_compiled() -> None:
    x, weight, bias = inputs((2, 3, 64, 16), True)

    def step(x: Tensor) -> Tensor:
        return skinny_linear(x * 2, weight, bias, gated=True) + 1

    for function in (step, compiled(step)):
        assert_close(function(x), exact(x * 2, weight, bias, True) + 1, TOLERANCE[FP32])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 64)}, ValueError, r"x must have shape \[any, any, any\], got \[2, 64\]"),
        ({"x": torch.zeros(2, 64, 3).mT}, ValueError, "x must be contiguous"),
        ({"x": torch.zeros(2, 3, 64).long()}, TypeError, "x must be .*, got torch.int64"),
        ({"weight": torch.zeros(16, 63)}, ValueError, r"weight must have shape \[any, 64\], got \[16, 63\]"),
        ({"weight": torch.zeros(64, 16).t()}, ValueError, "weight must have a contiguous last dimension"),
        ({"weight": torch.zeros(16, 64, dtype=BF16)}, TypeError, "weight must be torch.float32, got torch.bfloat16"),
        ({"weight": torch.zeros(15, 64), "bias": None}, ValueError, "weight must have an even number of rows .* 15"),
        ({"bias": torch.zeros(8)}, ValueError, r"bias must have shape \[16\], got \[8\]"),
        ({"bias": torch.zeros(16, device="meta")}, ValueError, "bias must be on .*, got meta"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor | None], error: type[Exception], message: str) -> None:
    arguments: dict[str, Tensor | None] = {
        "x": torch.zeros(2, 3, 64, device=DEVICE),
        "weight": torch.zeros(16, 64, device=DEVICE),
        "bias": torch.zeros(16, device=DEVICE),
    }
    moved = {name: x if x is None or x.is_meta else x.to(DEVICE) for name, x in changes.items()}
    with pytest.raises(error, match=message):
        skinny_linear(**(arguments | moved), gated=True)
