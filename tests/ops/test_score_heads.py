import pytest
import torch
from helpers import (
    DEVICE,
    DTYPES,
    FP16,
    FP32,
    GARBAGE,
    HEAD_DIMS,
    INTERPRETED,
    INTERPRETED_LAYOUTS,
    TOLERANCE,
    assert_close,
    cache,
    compiled,
    far_apart,
    gpu,
    ints,
    queries,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dustin_compile.ops.score_heads import score_heads, score_heads_reference, score_heads_triton

BOTH = pytest.mark.parametrize("function", [score_heads_reference, score_heads_triton])
Groups = tuple[tuple[int, int, int, int], ...]
# layer, kv_head, first, count
ONE: Groups = ((1, 0, 0, 1),)
SPREAD: Groups = ((0, 1, 0, 3), (0, 2, 3, 1), (2, 0, 4, 2))


def stack(layers: int, batch: int, capacity: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[layers, B, N, Hkv, D], every layer of another content."""
    rows = cache(layers * batch, capacity, heads, dim, dtype, layout)
    return rows.unflatten(0, (layers, batch))


def exact_scores(query: Tensor, key_cache: Tensor, groups: Groups, seq_lens: Tensor, scale: float) -> Tensor:
    """fp64, head by head."""
    batch, tokens, heads, _ = query.shape
    scores = torch.zeros(batch, key_cache.shape[2], dtype=torch.float64, device=DEVICE)
    for layer, kv_head, first, count in groups:
        for head in range(first, first + count):
            for row, length in enumerate(seq_lens.tolist()):
                key = key_cache[layer, row, :length, kv_head].double()
                logits = query[row, :, head].double() @ key.T * scale
                scores[row, :length] += logits.softmax(-1).sum(0) / (tokens * heads)
    return scores


def check(
    function, dtype: torch.dtype, groups: Groups, dim: int, tokens: int, seq_lens: Tensor, layout: str = "contiguous",
    sharpness: float = 1.0, room: int = 3,
) -> None:  # fmt: skip
    """Against fp64, with caches that are NaN behind each row's length."""
    heads = sum(count for *_, count in groups)
    batch, capacity = seq_lens.shape[0], int(seq_lens.max()) + room
    query = queries(batch, tokens, heads, dim, dtype)
    key = stack(3, batch, capacity, 3, dim, dtype, layout)
    for row, length in enumerate(seq_lens.tolist()):
        key[:, row, length:] = float("nan")
    table = torch.tensor(groups, dtype=torch.int32, device=DEVICE)
    scale = sharpness * dim**-0.5
    actual = function(query, key, table, max(count for *_, count in groups), seq_lens, scale)
    assert actual.dtype == FP32
    assert actual.is_contiguous()
    expected = exact_scores(query, key, groups, seq_lens, scale)
    for row, length in enumerate(seq_lens.tolist()):
        assert_close(actual[row], expected[row], TOLERANCE[dtype])
        assert actual[row, length:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("groups", [ONE, SPREAD])
@pytest.mark.parametrize("tokens", [1, 4])
def test_reference(dtype: torch.dtype, dim: int, groups: Groups, tokens: int) -> None:
    check(score_heads_reference, dtype, groups, dim, tokens, ints(1, 0, 33, 150))


@pytest.mark.parametrize(("dtype", "layout"), INTERPRETED_LAYOUTS)
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize(("groups", "tokens"), [(ONE, 1), (SPREAD, 4)])
def test_kernel(dtype: torch.dtype, dim: int, groups: Groups, tokens: int, layout: str) -> None:
    check(score_heads_triton, dtype, groups, dim, tokens, ints(0, 1, 300), layout)


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_kernel_of_several_query_tiles(dtype: torch.dtype) -> None:
    check(score_heads_triton, dtype, ((0, 1, 0, 9), (1, 1, 9, 1)), 16, 8, ints(130, 5))


@BOTH
@pytest.mark.parametrize("dtype", INTERPRETED)
def test_peaked_attention(function, dtype: torch.dtype) -> None:
    """Retrieval heads are peaked; with half-precision offsets the small scores must not drown."""
    check(function, dtype, SPREAD, 64, 4, ints(300, 40), sharpness=30.0)


@BOTH
@pytest.mark.parametrize("dtype", INTERPRETED)
def test_small_scores_keep_their_precision_beside_a_sink(function, dtype: torch.dtype) -> None:
    """One position takes nearly everything; each of the others must still be right, as it decides their ranking."""
    query = queries(1, 1, 1, 64, dtype)
    key = stack(1, 1, 200, 1, 64, dtype, "contiguous")
    key[0, 0, 0, 0] = query[0, 0, 0] * 1.5
    actual = function(query, key, ints(0, 0, 0, 1)[None], 1, ints(200), 0.125)
    expected = exact_scores(query, key, ((0, 0, 0, 1),), ints(200), 0.125)
    assert 0.5 < expected[0, 0] < 1
    assert expected[0, 1:].max() < 1e-2
    assert_close(actual[:, 1:] / expected[:, 1:], torch.ones(1, 199), 4 * TOLERANCE[dtype])


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("groups", "tokens"), [(ONE, 1), (SPREAD, 4)])
def test_kernel_on_cuda(dtype: torch.dtype, dim: int, groups: Groups, tokens: int) -> None:
    check(score_heads, dtype, groups, dim, tokens, ints(0, 1, 255, 257, 5000), "sliced")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_query_tiles_on_cuda(dtype: torch.dtype) -> None:
    check(score_heads, dtype, ((0, 0, 0, 16), (2, 1, 16, 3)), 128, 8, ints(3000, 0, 17))


@gpu
def test_long_rows_on_cuda() -> None:
    check(score_heads, torch.bfloat16, SPREAD, 128, 4, ints(131_072, 100_001, 7), room=1000)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=3), st.integers(1, 6), st.sampled_from([ONE, SPREAD]),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_reference_of_any_lengths(seq_lens: list[int], tokens: int, groups: Groups, dtype: torch.dtype) -> None:
    check(score_heads_reference, dtype, groups, 16, tokens, ints(*seq_lens))


@BOTH
def test_garbage_behind_the_length_changes_nothing(function) -> None:
    """Trap 4: bit for bit."""
    query, seq_lens = queries(3, 2, 6, 16), ints(2, 0, 70)
    key, table = stack(3, 3, 80, 3, 16, FP32, "contiguous"), torch.tensor(SPREAD, dtype=torch.int32, device=DEVICE)
    before = function(query, key, table, 3, seq_lens, 0.25)
    for garbage in GARBAGE:
        for row, length in enumerate(seq_lens.tolist()):
            key[:, row, length:] = garbage
        assert torch.equal(function(query, key, table, 3, seq_lens, 0.25), before)


@BOTH
def test_rows_are_independent(function) -> None:
    """Another row's queries, cache and length change nothing, bit for bit."""
    query, seq_lens = queries(3, 2, 6, 16), ints(2, 70, 9)
    key, table = stack(3, 3, 80, 3, 16, FP32, "contiguous"), torch.tensor(SPREAD, dtype=torch.int32, device=DEVICE)
    before = function(query, key, table, 3, seq_lens, 0.25)
    query[0], query[2], key[:, 0], key[:, 2] = 7.0, float("nan"), 7.0, float("nan")
    seq_lens[0], seq_lens[2] = 80, 0
    after = function(query, key, table, 3, seq_lens, 0.25)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@BOTH
@pytest.mark.parametrize("far", [0, 1, 2, 3])
def test_offsets_past_2_31(function, far: int) -> None:
    """Trap 25: 16 rows x 8 heads x 131,072 positions x 128 is exactly 2^31, and layers come on top."""
    key, query = far_apart((3, 3, 3, 3, 16), far), queries(3, 2, 3, 16, FP16)
    groups, seq_lens = ((2, 2, 0, 1), (1, 0, 1, 2)), ints(3, 1, 3)
    table = torch.tensor(groups, dtype=torch.int32, device=DEVICE)
    expected = exact_scores(query, key, groups, seq_lens, 0.25)
    assert_close(function(query, key, table, 2, seq_lens, 0.25), expected, TOLERANCE[FP16])


def example() -> tuple[Tensor, Tensor, Tensor, int, Tensor, float]:
    table = torch.tensor(SPREAD, dtype=torch.int32, device=DEVICE)
    return queries(2, 2, 6, 16), stack(3, 2, 20, 3, 16, FP32, "contiguous"), table, 3, ints(4, 20), 0.25


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.dustin_compile.score_heads.default, example())


def test_eager_and_compiled() -> None:
    def block(query: Tensor, *others) -> Tensor:
        return score_heads(query * 2, *others) + 1

    query, key, _, _, seq_lens, scale = example()
    expected = exact_scores(query * 2, key, SPREAD, seq_lens, scale) + 1
    for function in (block, compiled(block)):
        assert_close(function(*example()), expected, TOLERANCE[FP32])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": queries(2, 2, 6, 32)}, ValueError, r"key_cache must have shape \[any, 2, any, any, 32\], got"),
        ({"query": queries(2, 2, 6, 16).half()}, TypeError, "key_cache must be torch.float16, got torch.float32"),
        ({"groups": ints(0, 0, 0, 1)}, ValueError, r"groups must have shape \[any, 4\], got \[4\]"),
        ({"groups": ints(0, 0, 0, 1)[None].long()}, TypeError, "groups must be torch.int32, got torch.int64"),
        ({"groups": ints(0, 0, 0, 1)[:, None].expand(4, 4).T}, ValueError, "groups must be contiguous"),
        ({"max_count": 0}, ValueError, "max_count must be at least 1, got 0"),
        ({"seq_lens": ints(1)}, ValueError, r"seq_lens must have shape \[2\], got \[1\]"),
    ],
)
def test_errors_name_the_argument(changes: dict, error: type[Exception], message: str) -> None:
    names = ("query", "key_cache", "groups", "max_count", "seq_lens", "scale")
    with pytest.raises(error, match=message):
        score_heads(**(dict(zip(names, example(), strict=True)) | changes))
