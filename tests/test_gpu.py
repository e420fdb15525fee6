"""Whole generations on a GPU: the kernels in a step, captured and replayed. Skipped without a CUDA device."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, check_first_divergences, compile_tiny, greedy, random_prompts, tiny_pair

from dustin_compile import smol

pytestmark = pytest.mark.gpu


def cuda_pair(family="llama", dtype=torch.float32, **changes):
    return tuple(model.to("cuda", dtype) for model in tiny_pair(family, num_hidden_layers=2, **changes))


def cuda_prompts(lengths, seed=1):
    return tuple(tensor.cuda() for tensor in random_prompts(lengths, seed=seed))


def check_equal(captured, eager, lengths, prompts=1, **kwargs):
    input_ids, mask = cuda_prompts(lengths, seed=prompts)
    ours, theirs = (pair.generate(input_ids, mask, **kwargs) for pair in (captured, eager))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.stats.acceptance_by_position == theirs.stats.acceptance_by_position


@pytest.fixture(scope="module")
def pairs():
    """A sparse pair whose step is captured, at these lengths, and the same pair eager."""
    models = cuda_pair()
    captured, eager = (compile_tiny(*models, compile=compile) for compile in (True, False))
    check_equal(captured, eager, [40, 70, 3, 9], max_new_tokens=16)
    return captured, eager


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_dense_equals_transformers(family):
    target, draft = cuda_pair(family)
    pair = compile_tiny(target, draft, verify="dense", compile=True)
    for lengths in [5, 33, 70, 100], [90, 2, 41, 300]:  # captured at the first, replayed at the second
        input_ids, mask = cuda_prompts(lengths)
        expected = greedy(target, input_ids, mask, 24)
        assert torch.equal(pair.generate(input_ids, mask, max_new_tokens=24).sequences, expected)


@pytest.mark.parametrize("seed", range(6))
def test_replay_equals_eager_at_other_lengths_than_captured(pairs, seed):  # trap 17
    lengths = torch.randint(1, 300, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    check_equal(*pairs, lengths, prompts=seed, max_new_tokens=24)


@pytest.mark.parametrize("temperature", [0.5, 1.2])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_replayed_sampling_equals_eager(pairs, temperature, truncation):
    check_equal(*pairs, [40, 170, 3, 9], max_new_tokens=24, temperature=temperature, seed=3, **truncation)


def test_rows_that_end_in_waves(pairs):  # trap 18
    input_ids, mask = cuda_prompts([40, 3, 60])  # three rows of a bucket of four
    text = pairs[1].generate(input_ids, mask, max_new_tokens=20).sequences[:, 60:]
    check_equal(*pairs, [40, 3, 60], max_new_tokens=20, eos_token_id=[int(text[0, 2]), int(text[1, 9])])


def test_larger_caches_are_captured_anew_and_other_batches_once(pairs):
    for lengths in [1100, 7, 20, 3], [40, 70, 3, 9], [30], [5, 2]:
        check_equal(*pairs, lengths, max_new_tokens=12)
    before = dict(pairs[0]._generation.replays)
    for lengths in [50], [7, 1, 2, 3], [900, 2]:
        check_equal(*pairs, lengths, max_new_tokens=12)
    assert pairs[0]._generation.replays == before and {rows for rows, *_ in before} == {1, 2, 4}


def test_captured_refresh_equals_eager():
    models = cuda_pair()
    captured, eager = (compile_tiny(*models, refresh_every=2, compile=compile) for compile in (True, False))
    for lengths in [40, 70, 1, 9], [3, 150, 33, 64]:
        check_equal(captured, eager, lengths, max_new_tokens=24)


def test_step_needs_less_memory_than_the_cache_of_a_layer():  # trap 23
    pair = compile_tiny(*cuda_pair(max_position_embeddings=65536), compile=True)
    input_ids, mask = cuda_prompts([40, 70, 3, 9])
    first = pair.generate(input_ids, mask, max_new_tokens=1).sequences[:, -1].tolist()
    pair.generate(input_ids, mask, max_new_tokens=60000, eos_token_id=first)  # ends at once, after making room
    state = pair._generation.state
    key = state.target_cache.layers[0][0]

    def peak(function):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        assert peak(key.clone) >= key.nbytes  # a copy would be seen
        assert peak(lambda: pair._generation.step(state, "greedy")) < key.nbytes


def test_48_rows_of_one_repeated_word_in_bf16():  # trap 1
    target, draft = cuda_pair(dtype=torch.bfloat16)
    input_ids, mask = cuda_prompts(list(range(1, 49)))
    input_ids[mask.bool()] = 7
    new = compile_tiny(target, draft, verify="dense").generate(input_ids, mask, max_new_tokens=16).sequences[:, 48:]
    check_first_divergences(target, input_ids, mask, new, greedy(target, input_ids, mask, 16)[:, 48:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smol_dense_equals_transformers(load_smol, dtype):
    pair = load_smol(device="cuda", dtype=dtype)
    lengths, new = [31, 120, 77, 200], 32
    text = smol.passage(pair.tokenizer, 1000)[0]
    passages = [pair.tokenizer.decode(text[200 * row : 200 * row + length]) for row, length in enumerate(lengths)]
    pair.tokenizer.padding_side, pair.tokenizer.pad_token = "left", pair.tokenizer.eos_token
    prompts = pair.tokenizer(passages, return_tensors="pt", padding=True).to("cuda")
    width = prompts.input_ids.shape[1]
    dense = compile_tiny(pair.target, pair.draft, verify="dense", compile=True)
    ours = dense.generate(**prompts, max_new_tokens=new, eos_token_id=[]).sequences[:, width:]
    theirs = greedy(pair.target, prompts.input_ids, prompts.attention_mask, new, eos_token_id=[])[:, width:]
    if dtype == torch.float32:
        assert torch.equal(ours, theirs)
    else:
        check_first_divergences(pair.target, prompts.input_ids, prompts.attention_mask, ours, theirs)
