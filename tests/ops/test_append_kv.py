from collections.abc import Sequence

import pytest
import torch
from helpers import (
    DEVICE,
    DTYPES,
    FP32,
    HEAD_DIMS,
    INTERPRETED,
    LAYOUTS,
    TOLERANCE,
    assert_close,
    cache,
    compiled,
    far_apart,
    gpu,
    ints,
    queries,
    randn,
)
from torch import Tensor

from dustin_compile.ops.append_kv import append_kv, append_kv_reference, append_kv_triton


def angles(batch: int, tokens: int, dim: int, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, D]; unlike a model's, all of their numbers differ."""
    angle = randn(batch, tokens, dim, seed=5)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def new_tokens(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype = FP32) -> tuple[Tensor, ...]:
    """Query (of twice the heads), key, value, cos and sin."""
    query = queries(batch, tokens, 2 * heads, dim, dtype, seed=6)
    key, value = (queries(batch, tokens, heads, dim, dtype, seed) for seed in (3, 4))
    return query, key, value, *angles(batch, tokens, dim, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb in fp64, rounded once."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1).double()
    return (x.double() * cos.double().unsqueeze(2) + turned * sin.double().unsqueeze(2)).to(x.dtype)


def write(caches: Sequence[Tensor], new: Sequence[Tensor], start: Tensor) -> list[Tensor]:
    """The caches with each token written at start + t if that is inside."""
    written = [x.clone() for x in caches]
    for target, source in zip(written, new, strict=True):
        for row, first in enumerate(start.tolist()):
            for token in range(source.shape[1]):
                if 0 <= first + token < target.shape[1]:
                    target[row, first + token] = source[row, token]
    return written


def assert_appended(
    function, caches: tuple[Tensor, Tensor], new: tuple[Tensor, ...], start: Tensor, tolerance: float
) -> None:
    query, key, value, cos, sin = new
    key_before = caches[0].clone()
    key_expected, value_expected = write(caches, (rotate(key, cos, sin), value), start)
    rotated = function(*caches, query, key, value, cos, sin, start)
    assert rotated.is_contiguous()
    assert rotated.dtype == query.dtype
    assert_close(rotated, rotate(query, cos, sin), tolerance)
    assert torch.equal(caches[1], value_expected)
    assert_close(caches[0], key_expected, tolerance)
    untouched = key_expected == key_before
    assert torch.equal(caches[0][untouched], key_before[untouched])


def check(
    function, dtype: torch.dtype, heads: int, dim: int, tokens: int, layout: str, start: Tensor, capacity: int = 12
) -> None:
    batch = start.shape[0]
    caches = cache(batch, capacity, heads, dim, dtype, layout, 1), cache(batch, capacity, heads, dim, dtype, layout, 2)
    assert_appended(function, caches, new_tokens(batch, tokens, heads, dim, dtype), start, TOLERANCE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_reference_writes_each_row_at_its_start(dtype: torch.dtype, dim: int, layout: str) -> None:
    check(append_kv_reference, dtype, 3, dim, 4, layout, ints(0, 5, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernel(dtype: torch.dtype, dim: int, layout: str, tokens: int) -> None:
    check(append_kv_triton, dtype, 3, dim, tokens, layout, ints(0, 7))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [1, 4, 8, 32])
def test_kernel_on_cuda(dtype: torch.dtype, dim: int, heads: int) -> None:
    check(append_kv, dtype, heads, dim, 5, "sliced", ints(0, 7, 3000, 4091), capacity=4096)


def test_kernel_drops_what_does_not_fit() -> None:
    """The caches lie inside larger buffers, of which nothing else may change."""
    start = ints(-2, 4, 9)
    buffers = [cache(3, 8, 2, 16, seed=seed) for seed in (1, 2)]
    before = [x.clone() for x in buffers]
    assert_appended(append_kv_triton, (buffers[0][:, 1:6], buffers[1][:, 1:6]), new_tokens(3, 3, 2, 16), start, 1e-6)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer[:, :1], old[:, :1])
        assert torch.equal(buffer[:, 6:], old[:, 6:])


@pytest.mark.parametrize("first", [-1, 6])
def test_reference_refuses_what_does_not_fit(first: int) -> None:
    caches = cache(2, 8, 1, 16), cache(2, 8, 1, 16)
    before = caches[0].clone()
    with pytest.raises(ValueError, match=rf"start\[1\] = {first}: 3 tokens .* 8 positions"):
        append_kv_reference(*caches, *new_tokens(2, 3, 1, 16), ints(0, first))
    assert torch.equal(caches[0], before)


@pytest.mark.parametrize("far", [0, 1, 2])
@pytest.mark.parametrize("function", [append_kv_reference, append_kv_triton])
def test_offsets_past_2_31(function, far: int) -> None:
    """Trap 25."""
    caches = far_apart((3, 3, 3, 16), far), far_apart((3, 3, 3, 16), far)
    query, key, value, cos, sin = new_tokens(3, 1, 3, 16, torch.float16)
    start = ints(0, 1, 2)
    key_expected, value_expected = write(caches, (rotate(key, cos, sin), value), start)
    function(*caches, query, key, value, cos, sin, start)
    assert_close(caches[0], key_expected, TOLERANCE[torch.float16])
    assert torch.equal(caches[1], value_expected)


def test_opcheck() -> None:
    arguments = (cache(2, 8, 2, 16), cache(2, 8, 2, 16, seed=2), *new_tokens(2, 3, 2, 16), ints(0, 4))
    torch.library.opcheck(torch.ops.dustin_compile.append_kv.default, arguments)


def test_eager_and_compiled() -> None:
    def step(
        key_cache: Tensor, value_cache: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
        start: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rotated = append_kv(key_cache, value_cache, query * 2, key * 2, value + 1, cos, sin, start)
        return rotated + 1, key_cache.sum() + value_cache.sum()

    query, key, value, cos, sin = new_tokens(2, 3, 2, 16)
    for function in (step, compiled(step)):
        caches = cache(2, 8, 2, 16, seed=1), cache(2, 8, 2, 16, seed=2)
        expected = write(caches, (rotate(key * 2, cos, sin), value + 1), ints(1, 5))
        rotated, total = function(*caches, query, key, value, cos, sin, ints(1, 5))
        assert_close(rotated, rotate(query * 2, cos, sin) + 1, 1e-6)
        for actual, wanted in zip(caches, expected, strict=True):
            assert_close(actual, wanted, 1e-6)
        torch.testing.assert_close(total, expected[0].sum() + expected[1].sum())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.zeros(2, 3, 4, 8)}, ValueError, r"query must have shape .* got \[2, 3, 4, 8\]"),
        ({"key": torch.zeros(2, 3, 1, 16)}, ValueError, r"key must have shape \[2, 3, 2, 16\], got \[2, 3, 1, 16\]"),
        ({"cos": torch.zeros(1, 3, 16)}, ValueError, r"cos must have shape \[2, 3, 16\], got \[1, 3, 16\]"),
        ({"sin": torch.zeros(2, 3, 16).double()}, TypeError, "sin must be torch.float32, got torch.float64"),
        ({"value": torch.zeros(2, 4, 2, 16)}, ValueError, r"value must have shape .* got \[2, 4, 2, 16\]"),
        ({"key": torch.zeros(2, 3, 2, 16).half()}, TypeError, "key must be torch.float32, got torch.float16"),
        ({"key": torch.zeros(2, 3, 16, 2).transpose(2, 3)}, ValueError, "key must have a contiguous last dimension"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, TypeError, "start must be torch.int32, got torch.int64"),
        ({"start": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "start must be on .*, got meta"),
        ({"key_cache": torch.zeros(2, 8, 2, 257)}, ValueError, "key_cache must have a head_dim from 1 to 256, got 257"),
        ({"key_cache": torch.zeros(2, 8, 2, 16).long()}, TypeError, "key_cache must be .* got torch.int64"),
        ({"value_cache": torch.zeros(2, 9, 2, 16)}, ValueError, "value_cache must have shape"),
        (
            {"key_cache": torch.zeros(2, 8, 2, 17), "value_cache": torch.zeros(2, 8, 2, 17)},
            ValueError,
            "key_cache must have an even head_dim, got 17",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {name: torch.zeros(2, 8, 2, 16, dtype=FP32, device=DEVICE) for name in ("key_cache", "value_cache")}
    arguments |= dict(zip(("query", "key", "value", "cos", "sin"), new_tokens(2, 3, 2, 16), strict=True))
    arguments["start"] = ints(0, 1)
    moved = {name: x if x.is_meta else x.to(DEVICE) for name, x in changes.items()}
    with pytest.raises(error, match=message):
        append_kv(**(arguments | moved))
