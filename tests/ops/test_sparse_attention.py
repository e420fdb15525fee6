import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
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

from dustin_compile.ops import sparse_attention as module
from dustin_compile.ops.dense_attention import dense_attention_reference
from dustin_compile.ops.sparse_attention import sparse_attention, sparse_attention_reference, sparse_attention_triton

BOTH = pytest.mark.parametrize("function", [sparse_attention_reference, sparse_attention_triton])
# (count, tail_start, start) of each row: verification; a draft some tokens on; nothing chosen; a tail past one block
ROWS = ((30, 90, 90), (17, 60, 67), (0, 3, 4), (0, 0, 0), (40, 50, 95), (1, 1, 1))


def choose(rows: tuple[tuple[int, int, int], ...], budget: int, seed: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """indices, counts, tail_start, start: random ascending positions below the tail, then entries to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((len(rows), budget), 2**31 - 1, dtype=torch.int32)
    for row, (count, tail, _) in enumerate(rows):
        indices[row, :count] = torch.randperm(tail, generator=generator)[:count].sort().values
    counts, tail_start, start = (ints(*column) for column in zip(*rows, strict=True))
    return indices.to(DEVICE), counts, tail_start, start


def visible_positions(
    indices: Tensor, counts: Tensor, tail_start: Tensor, start: Tensor, tokens: int, capacity: int
) -> Tensor:
    visible = causal(start, tokens, capacity) & (torch.arange(capacity, device=DEVICE) >= tail_start[:, None, None])
    for row, count in enumerate(counts.tolist()):
        visible[row, :, indices[row, :count].long()] = True
    return visible


def check(
    function, dtype: torch.dtype, heads: tuple[int, int], dim: int, tokens: int, rows: tuple[tuple[int, int, int], ...],
    layout: str = "contiguous", budget: int = 48,
) -> None:  # fmt: skip
    """Against fp64, with caches that are NaN wherever no query of the row looks."""
    query_heads, kv_heads = heads
    chosen = choose(rows, budget)
    batch, capacity = len(rows), max(start for _, _, start in rows) + tokens + 3
    query = queries(batch, tokens, query_heads, dim, dtype)
    key, value = (cache(batch, capacity, kv_heads, dim, dtype, layout, seed) for seed in (1, 2))
    visible = visible_positions(*chosen, tokens, capacity)
    for x in (key, value):
        x.masked_fill_(~visible.any(1)[:, :, None, None], float("nan"))
    actual = function(query, key, value, *chosen, dim**-0.5)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    expected = exact_attention(query, key, value, visible, dim**-0.5)
    for row in range(batch):
        assert_close(actual[row], expected[row], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_reference(dtype: torch.dtype, dim: int, heads: tuple[int, int], tokens: int) -> None:
    check(sparse_attention_reference, dtype, heads, dim, tokens, ROWS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_of_strided_caches(layout: str) -> None:
    check(sparse_attention_reference, FP32, (9, 3), 64, 5, ROWS, layout)


@pytest.mark.parametrize(("dtype", "layout"), INTERPRETED_LAYOUTS)
@pytest.mark.parametrize(("heads", "dim"), [((3, 1), 64), ((8, 1), 96), ((2, 2), 16)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernel(dtype: torch.dtype, heads: tuple[int, int], dim: int, tokens: int, layout: str) -> None:
    check(sparse_attention_triton, dtype, heads, dim, tokens, ROWS, layout)


@pytest.mark.parametrize("tokens", [20, 33])
def test_kernel_of_more_tokens_than_the_tail_block(tokens: int) -> None:
    check(sparse_attention_triton, FP32, (4, 1), 16, tokens, ROWS)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_kernel_of_any_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose_splits", lambda *_: splits)
    check(sparse_attention_triton, FP32, (3, 1), 16, 2, (*ROWS, (150, 200, 200), (3, 10, 130)), budget=150)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), HEADS_AND_DIMS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernel_on_cuda(dtype: torch.dtype, heads: tuple[int, int], dim: int, tokens: int) -> None:
    check(
        sparse_attention, dtype, heads, dim, tokens, (*ROWS, (512, 6000, 6000), (511, 800, 812)), "sliced", budget=512
    )


@gpu
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("budget", [16, 128, 1000, 4096])
def test_budgets_on_cuda(batch: int, budget: int) -> None:
    rows = tuple((budget - 3 * row, 5000 + row, 5000 + row) for row in range(min(batch, budget // 3)))
    check(sparse_attention, BF16, (28, 4), 128, 5, rows, budget=budget)


@BOTH
def test_nothing_to_see_gives_zero(function) -> None:
    """No position chosen, and a tail that begins after the first two of the tokens."""
    query, start = queries(1, 4, 3, 16), ints(5)
    key, value = cache(1, 12, 1, 16, seed=1), cache(1, 12, 1, 16, seed=2)
    arguments = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE), ints(0), ints(7), start
    actual = function(query, key, value, *arguments, 0.25)
    assert torch.equal(actual[:, :2], torch.zeros_like(actual[:, :2]))
    visible = visible_positions(*arguments, 4, 12)
    assert_close(actual, exact_attention(query, key, value, visible, 0.25), TOLERANCE[FP32])
    assert function(query[:, :1], key, value, *arguments, 0.25).eq(0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 200), st.integers(1, 12), st.sampled_from(HEADS), st.sampled_from([16, 80]), st.integers(0, 20))
def test_budget_of_the_whole_length_is_dense(
    length: int, tokens: int, heads: tuple[int, int], dim: int, spare: int
) -> None:
    """Up to rounding: the sums are the same, in another order."""
    query = queries(1, tokens, heads[0], dim)
    key, value = (cache(1, length + tokens, heads[1], dim, seed=seed) for seed in (1, 2))
    everything = torch.arange(length + spare, dtype=torch.int32, device=DEVICE)[None]
    start = ints(length)
    actual = sparse_attention_reference(query, key, value, everything, start, start, start, dim**-0.5)
    assert_close(actual, dense_attention_reference(query, key, value, start, dim**-0.5), TOLERANCE[FP32])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_reference_of_any_set(data: st.DataObject) -> None:
    """Sparse over I = dense masked to I, in fp64."""
    rows = []
    for _ in range(data.draw(st.integers(1, 3), "rows")):
        tail = data.draw(st.integers(0, 120), "tail_start")
        rows.append(
            (data.draw(st.integers(0, min(tail, 64)), "count"), tail, tail + data.draw(st.integers(0, 30), "grown"))
        )
    dtype, heads = data.draw(st.sampled_from(DTYPES), "dtype"), data.draw(st.sampled_from(HEADS), "heads")
    check(sparse_attention_reference, dtype, heads, 16, data.draw(st.integers(1, 12), "tokens"), tuple(rows), budget=64)


@BOTH
@pytest.mark.parametrize("tokens", [1, 3])
def test_positions_outside_the_set_change_nothing(function, tokens: int) -> None:
    """Trap 4: bit for bit, behind the length and between the chosen positions; entries past the count as well."""
    chosen = choose(ROWS, 48)
    query = queries(len(ROWS), tokens, 3, 16)
    key, value = (cache(len(ROWS), 110, 1, 16, seed=seed) for seed in (1, 2))
    before = function(query, key, value, *chosen, 0.25)
    unseen = ~visible_positions(*chosen, tokens, 110).any(1)[:, :, None, None]
    for garbage in GARBAGE:
        for x in (key, value):
            x.masked_fill_(unseen, garbage)
        assert torch.equal(function(query, key, value, *chosen, 0.25), before)
    for row, count in enumerate(chosen[1].tolist()):
        chosen[0][row, count:] = -1
    assert torch.equal(function(query, key, value, *chosen, 0.25), before)


@BOTH
def test_rows_are_independent(function) -> None:
    """Another row's tokens, cache, set and length change nothing, bit for bit."""
    indices, counts, tail_start, start = choose(ROWS[:3], 48)
    query = queries(3, 2, 3, 16)
    key, value = (cache(3, 110, 1, 16, seed=seed) for seed in (1, 2))
    before = function(query, key, value, indices, counts, tail_start, start, 0.25)
    for other in (query, key, value):
        other[0], other[2] = 7.0, float("nan")
    counts[0], start[0], tail_start[2], indices[0] = 2, 100, 0, torch.arange(48)
    after = function(query, key, value, indices, counts, tail_start, start, 0.25)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@BOTH
@pytest.mark.parametrize("far", [0, 1, 2])
def test_offsets_past_2_31(function, far: int) -> None:
    """Trap 25: position 2 once as a chosen one, once in the tail."""
    key, value = far_apart((3, 4, 3, 16), far), far_apart((3, 4, 3, 16), far)
    query = queries(3, 1, 3, 16, FP16)
    arguments = (
        torch.tensor([[0, 2]] * 3, dtype=torch.int32, device=DEVICE),
        ints(2, 1, 2),
        ints(3, 1, 3),
        ints(3, 2, 3),
    )
    expected = exact_attention(query, key, value, visible_positions(*arguments, 1, 4), 0.25)
    assert_close(function(query, key, value, *arguments, 0.25), expected, TOLERANCE[FP16])


@pytest.mark.parametrize("tokens", [1, 3])
def test_opcheck(tokens: int) -> None:
    chosen = choose(((3, 4, 4), (2, 2, 6)), 5)
    for row, count in enumerate(chosen[1].tolist()):
        chosen[0][row, count:] = 0
    arguments = (queries(2, tokens, 4, 16), cache(2, 12, 2, 16), cache(2, 12, 2, 16, seed=2), *chosen, 0.25)
    torch.library.opcheck(torch.ops.dustin_compile.sparse_attention.default, arguments)


def test_eager_and_compiled() -> None:
    def block(query: Tensor, *others: Tensor) -> Tensor:
        return sparse_attention(query * 2, *others, 0.25).flatten(2) + 1

    chosen = choose(((3, 4, 4), (2, 2, 6)), 5)
    query, key, value = queries(2, 3, 4, 16), cache(2, 12, 2, 16), cache(2, 12, 2, 16, seed=2)
    expected = exact_attention(query * 2, key, value, visible_positions(*chosen, 3, 12), 0.25).flatten(2) + 1
    for function in (block, compiled(block)):
        assert_close(function(query, key, value, *chosen), expected, TOLERANCE[FP32])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": queries(2, 3, 5, 16)}, ValueError, "query must have a multiple of the cache's 2 heads, got 5"),
        ({"indices": ints(1, 2)}, ValueError, r"indices must have shape \[2, any\], got \[2\]"),
        ({"indices": ints(1, 2)[:, None].long()}, TypeError, "indices must be torch.int32, got torch.int64"),
        ({"counts": ints(1, 2, 3)}, ValueError, r"counts must have shape \[2\], got \[3\]"),
        ({"tail_start": ints(1, 2).long()}, TypeError, "tail_start must be torch.int32, got torch.int64"),
        ({"start": ints(1)}, ValueError, r"start must have shape \[2\], got \[1\]"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {name: cache(2, 8, 2, 16) for name in ("key_cache", "value_cache")}
    arguments |= {name: ints(0, 1) for name in ("counts", "tail_start", "start")}
    arguments |= {"query": queries(2, 3, 4, 16), "indices": ints(1, 2)[:, None], "scale": 0.25}
    with pytest.raises(error, match=message):
        sparse_attention(**(arguments | changes))
