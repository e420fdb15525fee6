import pytest
import torch
from helpers import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    GARBAGE,
    HEAD_DIMS,
    HEADS,
    HEADS_AND_DIMS,
    INTERPRETED_LAYOUTS,
    LAYOUTS,
    TOLERANCE,
    assert_close,
    cache,
    causal,
    compiled,
    exact_attention,
    far_apart,
    gpu,
    ints,
    queries,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dustin_compile.ops import dense_attention as module
from dustin_compile.ops.dense_attention import dense_attention, dense_attention_reference, dense_attention_triton

BOTH = pytest.mark.parametrize("function", [dense_attention_reference, dense_attention_triton])


def check(
    function, dtype: torch.dtype, heads: tuple[int, int], dim: int, tokens: int, start: Tensor,
    layout: str = "contiguous", room: int = 3,
) -> None:  # fmt: skip
    """Against fp64, with a cache that is NaN behind each row's tokens."""
    query_heads, kv_heads = heads
    batch, capacity = start.shape[0], int(start.max()) + tokens + room
    query = queries(batch, tokens, query_heads, dim, dtype)
    key, value = (cache(batch, capacity, kv_heads, dim, dtype, layout, seed) for seed in (1, 2))
    for row, first in enumerate(start.tolist()):
        key[row, first + tokens :] = value[row, first + tokens :] = float("nan")
    actual = function(query, key, value, start, dim**-0.5)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    expected = exact_attention(query, key, value, causal(start, tokens, capacity), dim**-0.5)
    for row in range(batch):
        assert_close(actual[row], expected[row], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_reference(dtype: torch.dtype, dim: int, heads: tuple[int, int], tokens: int) -> None:
    check(dense_attention_reference, dtype, heads, dim, tokens, ints(0, 1, 90))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_reference_of_strided_caches_and_long_blocks(layout: str, tokens: int) -> None:
    check(dense_attention_reference, FP32, (9, 3), 64, tokens, ints(0, 1, 33), layout)


@pytest.mark.parametrize(("dtype", "layout"), INTERPRETED_LAYOUTS)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((8, 1), 96), ((4, 4), 16)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernel(dtype: torch.dtype, heads: tuple[int, int], dim: int, tokens: int, layout: str) -> None:
    check(dense_attention_triton, dtype, heads, dim, tokens, ints(0, 31, 140), layout)


@pytest.mark.parametrize(("dtype", "start"), [(FP32, (0, 90)), (FP16, (300, 0))])
def test_kernel_of_several_query_tiles(dtype: torch.dtype, start: tuple[int, ...]) -> None:
    check(dense_attention_triton, dtype, (4, 1), 64, 40, ints(*start))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_kernel_of_any_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose_splits", lambda *_: splits)
    check(dense_attention_triton, FP32, (3, 1), 64, 2, ints(0, 63, 200))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), HEADS_AND_DIMS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernel_on_cuda(dtype: torch.dtype, heads: tuple[int, int], dim: int, tokens: int) -> None:
    check(dense_attention, dtype, heads, dim, tokens, ints(0, 1, 127, 5000), "sliced")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), HEADS_AND_DIMS)
def test_prefill_kernel_on_cuda(dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    for tokens in (63, 512):
        check(dense_attention, dtype, heads, dim, tokens, ints(0, 1, 1500))


@gpu
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("room", [0, 20_000])
def test_splits_on_cuda(batch: int, room: int) -> None:
    check(dense_attention, BF16, (7, 1), 128, 5, ints(*range(0, 500 * batch, 500)), room=room)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=3), st.integers(1, 40), st.sampled_from(HEADS),
    st.sampled_from([16, 64, 80]), st.sampled_from(DTYPES),
)  # fmt: skip
def test_reference_of_any_lengths(
    start: list[int], tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    check(dense_attention_reference, dtype, heads, dim, tokens, ints(*start))


@BOTH
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_garbage_behind_the_length_changes_nothing(function, tokens: int) -> None:
    """Trap 4: bit for bit."""
    query, start = queries(2, tokens, 3, 16), ints(2, 40)
    key, value = cache(2, 80, 1, 16, seed=1), cache(2, 80, 1, 16, seed=2)
    before = function(query, key, value, start, 0.25)
    for garbage in GARBAGE:
        for row, first in enumerate(start.tolist()):
            key[row, first + tokens :] = value[row, first + tokens :] = garbage
        assert torch.equal(function(query, key, value, start, 0.25), before)


@BOTH
def test_rows_are_independent(function) -> None:
    """Another row's tokens, cache and length change nothing, bit for bit."""
    query, start = queries(3, 2, 3, 16), ints(2, 40, 7)
    key, value = cache(3, 50, 1, 16, seed=1), cache(3, 50, 1, 16, seed=2)
    before = function(query, key, value, start, 0.25)
    for other in (query, key, value):
        other[0], other[2] = 7.0, float("nan")
    start[0], start[2] = 48, 0
    after = function(query, key, value, start, 0.25)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@BOTH
def test_one_pass_equals_token_by_token(function) -> None:
    """Trap 2: T = 1 and T = gamma + 1 have the same numerics."""
    query, start = queries(2, 5, 4, 64), ints(0, 60)
    key, value = cache(2, 70, 2, 64, seed=1), cache(2, 70, 2, 64, seed=2)
    together = function(query, key, value, start, 0.125)
    for token in range(5):
        alone = function(query[:, token : token + 1], key, value, start + token, 0.125)
        assert_close(together[:, token : token + 1], alone, 2e-6)


@BOTH
@pytest.mark.parametrize("far", [0, 1, 2])
def test_offsets_past_2_31(function, far: int) -> None:
    """Trap 25."""
    key, value = far_apart((3, 3, 3, 16), far), far_apart((3, 3, 3, 16), far)
    query, start = queries(3, 1, 3, 16, FP16), ints(2, 2, 2)
    assert_close(
        function(query, key, value, start, 0.25),
        exact_attention(query, key, value, causal(start, 1, 3), 0.25),
        TOLERANCE[FP16],
    )


@pytest.mark.parametrize("tokens", [1, 3])
def test_opcheck(tokens: int) -> None:
    arguments = (queries(2, tokens, 4, 16), cache(2, 12, 2, 16), cache(2, 12, 2, 16, seed=2), ints(0, 6), 0.25)
    torch.library.opcheck(torch.ops.dustin_compile.dense_attention.default, arguments)


def test_eager_and_compiled() -> None:
    def block(query: Tensor, key: Tensor, value: Tensor, start: Tensor) -> Tensor:
        return dense_attention(query * 2, key, value, start, 0.25).flatten(2) + 1

    query, start = queries(2, 3, 4, 16), ints(0, 6)
    key, value = cache(2, 12, 2, 16), cache(2, 12, 2, 16, seed=2)
    expected = exact_attention(query * 2, key, value, causal(start, 3, 12), 0.25).flatten(2) + 1
    for function in (block, compiled(block)):
        assert_close(function(query, key, value, start), expected, TOLERANCE[FP32])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": queries(2, 3, 5, 16)}, ValueError, "query must have a multiple of the cache's 2 heads, got 5"),
        ({"query": queries(2, 3, 4, 32)}, ValueError, r"key_cache must have shape \[2, any, any, 32\], got"),
        (
            {"query": queries(2, 3, 4, 16)[0]},
            ValueError,
            r"query must have shape \[any, any, any, any\], got \[3, 4, 16\]",
        ),
        ({"query": queries(2, 3, 4, 16).half()}, TypeError, "key_cache must be torch.float16, got torch.float32"),
        ({"query": queries(2, 3, 4, 16).double()}, TypeError, "query must be .* got torch.float64"),
        ({"value_cache": cache(2, 9, 2, 16)}, ValueError, "value_cache must have shape"),
        ({"start": ints(1, 2, 3)}, ValueError, r"start must have shape \[2\], got \[3\]"),
        ({"start": ints(1, 2).long()}, TypeError, "start must be torch.int32, got torch.int64"),
        ({"start": ints(1, 2, 3, 4)[::2]}, ValueError, "start must be contiguous"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor], error: type[Exception], message: str) -> None:
    caches = {name: cache(2, 8, 2, 16) for name in ("key_cache", "value_cache")}
    arguments = {"query": queries(2, 3, 4, 16), "start": ints(0, 1), "scale": 0.25} | caches
    with pytest.raises(error, match=message):
        dense_attention(**(arguments | changes))
