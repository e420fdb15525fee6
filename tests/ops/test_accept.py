import math

import pytest
import torch
from helpers import DEVICE, DTYPES, compiled, gpu, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dustin_compile.ops.accept import accept_greedy, accept_sampling, greedy, philox, process_logits, sample, uniform

DRAWS = 50_000
LAST = 1 - 2.0**-24  # the largest number that uniform returns


def longs(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def settings_of(temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.tensor(value, device=DEVICE) for value in (temperature, top_k, top_p))


def frequencies_match(tokens: Tensor, probs: Tensor) -> bool:
    """Chi-square at one in ten thousand; a token of probability 0 must not occur at all."""
    counts, expected = tokens.bincount(minlength=probs.shape[0]).cpu().double(), probs.cpu().double() * tokens.numel()
    if counts[expected == 0].any():
        return False
    possible = expected > 0
    expected = expected[possible] / expected.sum() * counts.sum()
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-4


# Greedy acceptance


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.integers(1, 5), st.integers(0, 1000), st.sampled_from(DTYPES))
def test_greedy_is_the_first_of_the_highest(vocab: int, values: int, seed: int, dtype: torch.dtype) -> None:
    """With many ties, padded logits of -inf, and vocabularies that are no multiple of anything."""
    logits = (randn(4, vocab, seed=seed) * values).round().to(dtype)
    logits[1, vocab // 2 :] = logits[2] = float("-inf")
    expected = [row.index(max(row)) for row in logits.float().tolist()]
    assert greedy(logits.unflatten(0, (2, 2))).flatten().tolist() == expected


def logits_of(choices: list[list[int]], vocab: int = 8) -> Tensor:
    """Logits whose argmax is the choice."""
    chosen = torch.tensor(choices, device=DEVICE)
    return randn(*chosen.shape, vocab).scatter_add_(
        -1, chosen[..., None], torch.full((*chosen.shape, 1), 20.0, device=DEVICE)
    )


def test_greedy_accepts_the_longest_equal_prefix() -> None:
    """Trap 3's pattern: 0, 1, 2, all of 3; a match after the first mismatch does not count."""
    choices = [[1, 2, 3, 4]] * 4
    draft = torch.tensor([[0, 2, 3], [1, 0, 3], [1, 2, 0], [1, 2, 3]], device=DEVICE)
    accepted, tokens = accept_greedy(draft, logits_of(choices))
    assert accepted.dtype == torch.int32
    assert tokens.dtype == torch.int64
    assert accepted.tolist() == [0, 1, 2, 3]
    assert [row[: n + 1] for row, n in zip(tokens.tolist(), accepted.tolist(), strict=True)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]
    ]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_greedy_of_anything(data: st.DataObject) -> None:
    gamma = data.draw(st.integers(1, 5))
    choice = st.lists(st.integers(0, 2), min_size=gamma + 1, max_size=gamma + 1)
    target = data.draw(choice, "target")
    draft = data.draw(choice, "draft")[:gamma]
    accepted, tokens = accept_greedy(torch.tensor([draft], device=DEVICE), logits_of([target]))
    expected = next((i for i in range(gamma) if draft[i] != target[i]), gamma)
    assert accepted.tolist() == [expected]
    assert tokens[0, : expected + 1].tolist() == target[: expected + 1]


# Processed distributions


def transformers_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """What generate samples from: logits in fp32, a warper for each setting that is on."""
    scores = logits.float()
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.1, 3), st.integers(0, 25), st.one_of(st.just(1.0), st.floats(0.01, 0.999)), st.sampled_from(DTYPES),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_processing_equals_transformers(
    temperature: float, top_k: int, top_p: float, dtype: torch.dtype, ties: bool, seed: int
) -> None:
    """Exactly transformers' tokens stay, with its probabilities up to rounding.

    Of equal tokens at the top-p cut exactly as many stay; which ones is up to torch.sort, there as here.
    """
    logits = randn(6, 20, seed=seed, dtype=dtype) * 2
    if ties:
        logits = logits.round()
    numbers = settings_of(temperature, top_k, top_p)
    # what the settings hold in fp32 is what transformers must be given
    expected = transformers_probs(logits, numbers[0].item(), top_k, top_p)
    actual = process_logits(logits.unflatten(0, (2, 3)), *numbers, truncate=True).flatten(0, 1)
    assert actual.dtype == torch.float32
    if ties and top_p < 1:
        actual, expected = actual.sort(-1).values, expected.sort(-1).values
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_each_row_has_its_own_settings() -> None:
    logits = randn(3, 2, 50) * 3
    rows = [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.5, 20, 0.6)]
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True)]
    actual = process_logits(logits, *columns, truncate=True)
    for row, numbers in enumerate(rows):
        torch.testing.assert_close(actual[row], transformers_probs(logits[row], *numbers), rtol=1e-5, atol=1e-7)


def test_at_least_one_token_stays() -> None:
    """Even where 1 - top_p rounds to 1."""
    actual = process_logits(randn(2, 1, 50), *settings_of(1.0, 0, 1e-9), truncate=True)
    assert (actual > 0).sum(-1).eq(1).all()
    assert actual.sum(-1).eq(1).all()


def test_a_token_that_exactly_completes_top_p_is_the_last() -> None:
    logits = torch.tensor([[0.0, 3.0, 0.0, 3.0]], device=DEVICE)
    numbers = settings_of(1.0, 2, 0.5)
    actual = process_logits(logits, *numbers, truncate=True)
    assert (actual > 0).sum() == 1 == (transformers_probs(logits, 1.0, 2, 0.5) > 0).sum()


def test_no_truncation_is_a_softmax() -> None:
    logits = randn(2, 3, 50)
    actual = process_logits(logits, *settings_of(0.5, 3, 0.1), truncate=False)
    torch.testing.assert_close(actual, (logits * 2).softmax(-1))
    settings_off = process_logits(logits, *settings_of(0.5, 0, 1.0), truncate=True)
    torch.testing.assert_close(settings_off, actual)


# Random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """kat_vectors of Random123."""
    words = philox(tuple(map(longs, key)), tuple(map(longs, counter)))
    assert tuple(word.item() for word in words) == expected


def test_uniform_does_not_depend_on_the_batch() -> None:
    """Trap 15: a row's numbers are its own, at any batch size, and more slots only add to them."""
    seed, stream, step = longs(7, 7, 8, 2**40 + 7), longs(0, 1, 0, 0), torch.tensor(3, device=DEVICE)
    together = uniform(seed, stream, step, 6)
    for row in range(4):
        assert torch.equal(uniform(seed[row : row + 1], stream[row : row + 1], step, 4), together[row : row + 1, :4])


def test_uniform_numbers_differ() -> None:
    """In the seed and the stream (both halves of each), the step and the slot."""
    seed, stream = longs(7, 8, 7 + 2**32, 7, 7, -1), longs(0, 0, 0, 1, 2**32, 0)
    numbers = torch.stack([uniform(seed, stream, torch.tensor(step, device=DEVICE), 5) for step in (0, 1)])
    assert numbers.unique().numel() == numbers.numel()


def test_uniform_is_uniform() -> None:
    numbers = uniform(torch.arange(100, device=DEVICE), longs(0).expand(100), torch.tensor(0, device=DEVICE), 500)
    assert numbers.dtype == torch.float32
    assert 0 <= numbers.min() < 1e-3
    assert 0.999 < numbers.max() < 1
    assert stats.kstest(numbers.flatten().cpu().numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(numbers * 2**24, (numbers * 2**24).round())


def test_uniform_compiled_is_equal() -> None:
    arguments = longs(7, -1, 2**62), longs(0, 5, 2**40), torch.tensor(9, device=DEVICE), 5
    assert torch.equal(compiled(uniform)(*arguments), uniform(*arguments))


@gpu
def test_uniform_is_the_same_on_every_device() -> None:
    arguments = longs(7, -1, 2**62), longs(0, 5, 2**40), torch.tensor(9, device=DEVICE)
    on_cpu = uniform(*(x.cpu() for x in arguments), 5)
    assert torch.equal(uniform(*arguments, 5).cpu(), on_cpu)


# Sampling


def test_sample_inverts_the_cumulative_sum() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], device=DEVICE)
    u = torch.tensor([0.0, 0.2, 0.25, 0.7, 0.75, LAST], device=DEVICE)
    assert sample(probs.expand(6, 6), u).tolist() == [1, 1, 3, 3, 4, 4]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3000), st.floats(0.05, 1), st.floats(0, LAST))
def test_sample_never_returns_an_impossible_token(seed: int, vocab: int, share: float, between: float) -> None:
    """Nor at the ends of [0, 1): 1 stands for whatever rounding makes of the last numbers."""
    probs = randn(4, vocab, seed=seed).exp()
    probs = torch.where(randn(4, vocab, seed=seed + 1).abs() < share, probs, 0)
    probs[:, seed % vocab] = 1e-30
    for u in (0.0, between, LAST, 1.0):
        token = sample(probs, torch.full((4,), u, device=DEVICE))
        assert probs.gather(1, token[:, None]).gt(0).all()


def test_sample_distrusts_the_cumulative_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel scan adds in another order at each place, so that its sum can rise at a token of probability 0."""
    exact = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: exact(x, dim) + 0.1 * (x == 0))
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], device=DEVICE)
    u = torch.tensor([0.0, 0.05, 0.48, 0.52, 0.99], device=DEVICE)
    assert sample(probs.expand(5, 5), u).tolist() == [1, 1, 3, 3, 3]


def test_sample_has_the_right_frequencies() -> None:
    probs = randn(8).softmax(0)
    u = uniform(torch.arange(DRAWS, device=DEVICE), longs(0).expand(DRAWS), torch.tensor(0, device=DEVICE), 1)[:, 0]
    assert frequencies_match(sample(probs.expand(DRAWS, 8), u), probs)
    assert not frequencies_match(sample(probs.expand(DRAWS, 8), u * 0.98), probs)


# Speculative sampling


def speculate(target: Tensor, draft: Tensor, drawn_from: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """DRAWS blocks; the draft tokens come from `drawn_from`, while acceptance is told `draft`."""
    gamma = draft.shape[0]
    rows = torch.arange(DRAWS, device=DEVICE)
    u = uniform(rows, longs(seed).expand(DRAWS), torch.tensor(0, device=DEVICE), 2 * gamma + 1)
    tokens = sample(drawn_from.expand(DRAWS, -1, -1), u[:, :gamma])
    return accept_sampling(tokens, draft.expand(DRAWS, -1, -1), target.expand(DRAWS, -1, -1), u[:, gamma:-1], u[:, -1])


def slots_match(accepted: Tensor, tokens: Tensor, target: Tensor) -> bool:
    """Every slot that was reached holds the target's distribution of that slot."""
    return all(frequencies_match(tokens[accepted >= slot, slot], target[slot]) for slot in range(target.shape[0]))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("numbers", [(1.0, 0, 1.0), (0.7, 5, 0.9)])
def test_sampling_has_the_targets_distribution(numbers: tuple[float, int, float], seed: int) -> None:
    """Trap 14: chi-square of each of the gamma + 1 slots, vocabulary of 8."""
    target = process_logits(randn(1, 4, 8, seed=seed), *settings_of(*numbers), truncate=True)[0]
    draft = process_logits(randn(1, 3, 8, seed=seed + 10), *settings_of(*numbers), truncate=True)[0]
    accepted, tokens = speculate(target, draft, draft, seed)
    assert accepted.dtype == torch.int32
    assert tokens.dtype == torch.int64
    assert slots_match(accepted, tokens, target)
    overlap = torch.minimum(target[:3], draft).sum(-1)
    expected_accepted = overlap.cumprod(0).sum().item()
    assert math.isclose(accepted.float().mean().item(), expected_accepted, abs_tol=0.02)


def test_the_distribution_test_can_fail() -> None:
    """Trap 14's mistake: the draft draws at another temperature than acceptance is told."""
    target, logits = randn(4, 8, seed=1).softmax(-1), randn(3, 8, seed=11)
    assert not slots_match(*speculate(target, logits.softmax(-1), (logits / 0.7).softmax(-1), 1), target)


def test_draft_equal_to_target_is_accepted_whole() -> None:
    target = randn(4, 8).softmax(-1)
    accepted, tokens = speculate(target, target[:3], target[:3], 1)
    assert accepted.eq(3).all()
    assert slots_match(accepted, tokens, target)


def test_disjoint_draft_is_rejected() -> None:
    """The first token is then the target's own draw; a token that the target excludes never passes."""
    target = torch.tensor([[0.5, 0.5, 0, 0]] * 3, device=DEVICE)
    draft = torch.tensor([[0, 0, 0.5, 0.5]] * 2, device=DEVICE)
    accepted, tokens = speculate(target, draft, draft, 1)
    assert accepted.eq(0).all()
    assert frequencies_match(tokens[:, 0], target[0])


def test_accepted_tokens_are_the_drafts() -> None:
    draft_tokens = torch.tensor([[3, 5, 6], [3, 5, 6]], device=DEVICE)
    probs = torch.full((2, 4, 8), 1 / 8, device=DEVICE)
    probs[1, 1] = torch.nn.functional.one_hot(longs(2)[0], 8).float()  # row 1 rejects its second token
    u = torch.full((2, 3), 0.5, device=DEVICE)
    accepted, tokens = accept_sampling(draft_tokens, torch.full((2, 3, 8), 1 / 8, device=DEVICE), probs, u, u[:, 0])
    assert accepted.tolist() == [3, 1]
    assert tokens[0].tolist() == [3, 5, 6, 4]
    assert tokens[1, :2].tolist() == [3, 2]


def test_rejection_without_a_residual_draws_from_the_target() -> None:
    """Rounding can reject where p = q nearly everywhere: p < q by one step, and nothing is left of max(p - q, 0)."""
    target = torch.tensor([[[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]], device=DEVICE)
    draft = target[:, :1] * (1 + 2.0**-23)
    accepted, tokens = accept_sampling(
        longs(0)[None], draft, target, torch.tensor([[LAST]], device=DEVICE), torch.tensor([0.9], device=DEVICE)
    )
    assert accepted.tolist() == [0]
    assert tokens[0, 0] == 2


def test_eager_and_compiled() -> None:
    def step(draft_logits: Tensor, target_logits: Tensor, u: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
        gamma = draft_logits.shape[1]
        q = process_logits(draft_logits, *numbers, truncate=True)
        p = process_logits(target_logits, *numbers, truncate=True)
        draft_tokens = sample(q, u[:, :gamma])
        sampled = accept_sampling(draft_tokens, q, p, u[:, gamma:-1], u[:, -1])
        return *sampled, *accept_greedy(draft_tokens, target_logits)

    u = uniform(longs(*range(16)), longs(0).expand(16), torch.tensor(2, device=DEVICE), 7)
    arguments = randn(16, 3, 40), randn(16, 4, 40), u, *settings_of(0.8, 10, 0.9)
    eager, fused = step(*arguments), compiled(step)(*arguments)
    assert 0 < eager[0].sum() < 48
    for actual, expected in zip(fused, eager, strict=True):
        assert torch.equal(actual, expected)
