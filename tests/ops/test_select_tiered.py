import pytest
import torch
from helpers import DEVICE, FP32, compiled, far_apart, gpu, ints
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dustin_compile.ops import select_tiered as select_module
from dustin_compile.ops.select_tiered import select_tiered, select_tiered_reference, select_tiered_triton

BOTH = pytest.mark.parametrize("function", [select_tiered_reference, select_tiered_triton])


def oracle(
    draft: list[float], target: list[float], length: int, budget: int, sinks: int, window: int, draft_share: int
) -> list[int]:
    """The rule as DESIGN states it."""
    if length <= budget:
        return list(range(length))
    chosen = set(range(sinks)) | set(range(length - window, length))

    def rest_by(scores: list[float]) -> list[int]:
        return sorted(set(range(length)) - chosen, key=lambda position: (-scores[position], position))

    chosen |= set(rest_by(draft)[:draft_share])
    chosen |= set(rest_by(target)[: budget - sinks - window - draft_share])
    return sorted(chosen)


def check(function, draft: Tensor, target: Tensor, seq_lens: Tensor, *numbers: int) -> None:
    budget = numbers[0]
    indices, counts = function(draft, target, seq_lens, *numbers)
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape == (draft.shape[0], budget)
    for row, length in enumerate(seq_lens.tolist()):
        expected = oracle(draft[row].tolist(), target[row].tolist(), length, *numbers)
        assert counts[row] == len(expected) == min(length, budget)
        assert indices[row].tolist() == expected + [0] * (budget - len(expected))


def scores(batch: int, capacity: int, values: int | None, seed: int) -> Tensor:
    """Random scores, with many ties when there are few values; zero among them."""
    random = torch.rand(batch, capacity, generator=torch.Generator().manual_seed(seed))
    return (random if values is None else (random * values).floor() / values).to(DEVICE)


NUMBERS = ((12, 2, 4, 3), (12, 0, 0, 0), (12, 0, 0, 12), (12, 4, 8, 0), (12, 0, 4, 8), (1, 1, 0, 0), (1, 0, 0, 1))


@BOTH
@pytest.mark.parametrize("values", [None, 5, 1])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_against_the_oracle(function, numbers: tuple[int, ...], values: int | None) -> None:
    draft, target = scores(6, 60, values, 1), scores(6, 60, values, 2)
    check(function, draft, target, ints(0, 1, 12, 13, 40, 60), *numbers)


@BOTH
@pytest.mark.parametrize("values", [None, 5, 1])
def test_rows_of_several_tiles(function, values: int | None) -> None:
    """Two rounds of the tournament, with tiles that are full, partly filled and empty."""
    draft, target = scores(3, 17_000, values, 1), scores(3, 17_000, values, 2)
    check(function, draft, target, ints(17_000, 8200, 64), 64, 4, 16, 20)


@pytest.mark.parametrize("values", [None, 30, 2])
@pytest.mark.parametrize("numbers", [(200, 4, 16, 90), (200, 0, 0, 0), (200, 0, 0, 200), (60, 0, 0, 20)])
def test_rounds_that_let_more_through(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], values: int | None
) -> None:
    """Four rounds, which may end inexactly but for the last."""
    monkeypatch.setattr(select_module, "ROUND_TILE", 512)
    monkeypatch.setattr(select_module, "LAST_TILE", 512)
    draft, target = scores(2, 3000, values, 1), scores(2, 3000, values, 2)
    check(select_tiered_triton, draft, target, ints(3000, 1700), *numbers)


def test_three_rounds_of_a_large_budget() -> None:
    draft, target = scores(1, 40_000, 900, 1), scores(1, 40_000, 900, 2)
    check(select_tiered_triton, draft, target, ints(39_999), 4096, 4, 64, 1500)


@BOTH
def test_scores_of_every_size(function) -> None:
    """From subnormal to the largest number, and a negative zero, which is a zero."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)[
        torch.randperm(277, generator=torch.Generator().manual_seed(1))
    ]
    draft = (2.0**exponents).float()[None].to(DEVICE)
    draft[0, ::7] = -0.0
    check(function, draft, draft.flip(1), ints(277), 100, 2, 5, 50)
    check(function, draft, draft.flip(1), ints(277), 276, 2, 5, 150)


@gpu
@pytest.mark.parametrize(
    "numbers", [(512, 4, 64, 100), (512, 4, 64, 0), (512, 4, 64, 444), (4096, 4, 64, 1000), (16, 0, 0, 7)]
)
@pytest.mark.parametrize("values", [None, 50])
@pytest.mark.parametrize("capacity", [700, 32_768, 131_072, 300_001])
def test_kernel_on_cuda(numbers: tuple[int, ...], values: int | None, capacity: int) -> None:
    draft, target = scores(4, capacity, values, 1), scores(4, capacity, values, 2)
    seq_lens = ints(capacity, capacity // 2, 0, min(capacity, 513))
    for actual, expected in zip(
        select_tiered(draft, target, seq_lens, *numbers),
        select_tiered_reference(draft.cpu(), target.cpu(), seq_lens.cpu(), *numbers),
        strict=True,
    ):
        assert torch.equal(actual.cpu(), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reference_of_anything(data: st.DataObject) -> None:
    numbers = [data.draw(st.integers(0, 12), name) for name in ("sinks", "window", "draft_share")]
    budget = max(1, sum(numbers) + data.draw(st.integers(0, 12), "rest"))
    capacity = data.draw(st.integers(1, 120), "capacity")
    seq_lens = data.draw(st.lists(st.integers(0, capacity), min_size=1, max_size=3), "seq_lens")
    values = data.draw(st.sampled_from([None, 1, 2, 7]), "values")
    draft, target = scores(len(seq_lens), capacity, values, 1), scores(len(seq_lens), capacity, values, 2)
    check(select_tiered_reference, draft, target, ints(*seq_lens), budget, *numbers)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5), st.integers(1, 5), st.integers(20, 70))
def test_kernel_of_anything(sinks: int, window: int, draft_share: int, rest: int, length: int) -> None:
    draft, target = scores(1, 70, 4, 1), scores(1, 70, 4, 2)
    budget = sinks + window + draft_share + rest
    check(select_tiered_triton, draft, target, ints(length), budget, sinks, window, draft_share)


@BOTH
def test_garbage_behind_the_length_changes_nothing(function) -> None:
    draft, target, seq_lens = scores(3, 60, 5, 1), scores(3, 60, 5, 2), ints(10, 13, 41)
    before = function(draft, target, seq_lens, 12, 2, 3, 3)
    for garbage in (1e4, float("nan"), float("inf")):
        for row, length in enumerate(seq_lens.tolist()):
            draft[row, length:] = target[row, length:] = garbage
        for actual, expected in zip(function(draft, target, seq_lens, 12, 2, 3, 3), before, strict=True):
            assert torch.equal(actual, expected)


@BOTH
def test_offsets_past_2_31(function) -> None:
    """Trap 25: the rows of the scores lie 2^30 elements apart."""
    draft = far_apart((3, 40), 0, FP32).abs_()
    check(function, draft, draft, ints(40, 20, 40), 12, 2, 3, 3)


@BOTH
def test_strided_scores(function) -> None:
    wide = scores(3, 120, 5, 1)
    check(function, wide[:, ::2], wide[:, 1::2], ints(60, 20, 5), 12, 2, 3, 3)


def test_opcheck() -> None:
    arguments = (scores(2, 40, 5, 1), scores(2, 40, 5, 2), ints(7, 40), 12, 2, 3, 3)
    torch.library.opcheck(torch.ops.dustin_compile.select_tiered.default, arguments)


def test_eager_and_compiled() -> None:
    def block(draft: Tensor, target: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        indices, counts = select_tiered(draft * 2, target, seq_lens, 12, 2, 3, 3)
        return indices + 1, counts

    draft, target, seq_lens = scores(2, 40, 5, 1), scores(2, 40, 5, 2), ints(7, 40)
    for function in (block, compiled(block)):
        indices, counts = function(draft, target, seq_lens)
        for row, length in enumerate(seq_lens.tolist()):
            expected = oracle(draft[row].tolist(), target[row].tolist(), length, 12, 2, 3, 3)
            assert (indices[row, : counts[row]] - 1).tolist() == expected


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
        ({"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
        ({"window": -2}, ValueError, "window must be at least 0, got -2"),
        ({"draft_share": -3}, ValueError, "draft_share must be at least 0, got -3"),
        ({"draft_share": 8}, ValueError, r"sinks \+ window \+ draft_share .* budget = 12, got 2 \+ 3 \+ 8"),
        (
            {"draft_scores": scores(2, 40, 5, 1).half()},
            TypeError,
            "draft_scores must be torch.float32, got torch.float16",
        ),
        ({"target_scores": scores(2, 41, 5, 1)}, ValueError, r"target_scores must have shape \[2, 40\], got \[2, 41\]"),
        ({"seq_lens": ints(1)}, ValueError, r"seq_lens must have shape \[2\], got \[1\]"),
    ],
)
def test_errors_name_the_argument(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"draft_scores": scores(2, 40, 5, 1), "target_scores": scores(2, 40, 5, 2), "seq_lens": ints(7, 40)}
    arguments |= {"budget": 12, "sinks": 2, "window": 3, "draft_share": 3}
    with pytest.raises(error, match=message):
        select_tiered(**(arguments | changes))
