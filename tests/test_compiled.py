"""The compiled step: equal to the eager one, compiled once, and without a copy of a cache. CPU; see test_gpu.py."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import FAMILIES, compile_tiny, random_prompts, tiny_model, tiny_pair
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

GAMMA = 1  # has the fewest regions to compile, which takes the time here


@pytest.fixture(scope="module")
def pairs():
    """A pair compiled by inductor and the same pair eager, after one generation of two rows."""
    models = tiny_pair(num_hidden_layers=2)
    compiled, eager = (compile_tiny(*models, gamma=GAMMA, compile=compile) for compile in (True, False))
    check_equal(compiled, eager, [40, 70], max_new_tokens=12)
    return compiled, eager


def check_equal(compiled, eager, lengths, prompts=1, **kwargs):
    input_ids, mask = random_prompts(lengths, seed=prompts)
    ours, theirs = (pair.generate(input_ids, mask, **kwargs) for pair in (compiled, eager))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.stats.acceptance_by_position == theirs.stats.acceptance_by_position
    return ours


def graphs():
    """Graphs that dynamo has compiled in this process."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("seed", range(4))
def test_compiled_equals_eager_at_other_lengths_than_compiled_for(pairs, seed):  # traps 17 and 24
    lengths = torch.randint(1, 200, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    check_equal(*pairs, lengths, prompts=seed, max_new_tokens=12)


def test_other_prompt_lengths_compile_nothing(pairs):  # trap 20
    before = graphs()
    for lengths in [1, 2], [64, 65], [150, 3]:  # prefills of 64, 128 and 192 positions
        pairs[0].generate(*random_prompts(lengths), max_new_tokens=5)
    assert graphs() == before
    assert not counters["graph_break"]


def test_more_new_tokens_and_a_larger_cache_compile_nothing(pairs):  # trap 21
    compiled, _ = pairs
    input_ids, mask = random_prompts([40, 70])
    first = compiled.generate(input_ids, mask, max_new_tokens=1).sequences[:, -1].tolist()
    before, capacity = graphs(), compiled._generation.state.capacity
    check_equal(*pairs, [40, 70], max_new_tokens=40)
    assert compiled._generation.state.capacity == capacity
    assert graphs() == before
    compiled.generate(input_ids, mask, max_new_tokens=3000, eos_token_id=first)  # ends at once, after making room
    assert compiled._generation.state.capacity > capacity
    check_equal(*pairs, [40, 70], max_new_tokens=12)
    check_equal(*pairs, [9, 1200], max_new_tokens=5)
    assert graphs() == before


def largest_allocation(function):
    """Bytes of the largest block that is allocated while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def test_step_copies_no_cache(pairs):  # trap 23
    compiled, _ = pairs
    input_ids, mask = random_prompts([40, 70])
    first = compiled.generate(input_ids, mask, max_new_tokens=1).sequences[:, -1].tolist()
    compiled.generate(input_ids, mask, max_new_tokens=3000, eos_token_id=first)  # a cache much larger than a prompt
    key = compiled._generation.state.target_cache.layers[0][0]
    assert largest_allocation(key.clone) >= key.nbytes  # such a copy would be seen
    assert largest_allocation(lambda: compiled.generate(input_ids, mask, max_new_tokens=12)) < key.nbytes / 2


def test_compiled_sampling_equals_eager(pairs):
    check_equal(*pairs, [40, 70], max_new_tokens=24, temperature=1.0, top_k=20, top_p=0.9, seed=3)


@pytest.fixture
def without_inductor(monkeypatch):
    """Tracing alone, which tells what is compiled and when; inductor takes most of the time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_share_one_graph(without_inductor, family):
    model = tiny_model(family, num_hidden_layers=8)
    tokens, start = torch.arange(6).view(2, 3), torch.zeros(2, dtype=torch.int32)
    results = []
    before = graphs()
    for compile in (True, False):
        adapted = compile_tiny(model, model, compile=compile)._generation.target
        with torch.no_grad():
            hidden, queries = adapted.forward(tokens, start, adapted.new_cache(2, 64), None)
            results.append((adapted.logits(hidden), queries))
    assert graphs() - before < 8
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_refresh_and_sampling_trace_once(without_inductor):
    models = tiny_pair(num_hidden_layers=1)
    settings = {"gamma": 2, "refresh_every": 2, "draft_attention": "dense"}
    compiled, eager = (compile_tiny(*models, compile=compile, **settings) for compile in (True, False))
    sampling = {"max_new_tokens": 20, "temperature": 0.8, "top_k": 20, "seed": 1}
    check_equal(compiled, eager, [40, 70], **sampling)
    before = graphs()
    check_equal(compiled, eager, [3, 130], **sampling)
    assert graphs() == before


def test_more_batch_sizes_than_dynamo_keeps_variants(monkeypatch):
    """Each has its own compilation: torch.compile refuses more variants of one than its limit."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile(*args, **kwargs, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    pair = compile_tiny(*tiny_pair(num_hidden_layers=1), gamma=GAMMA, compile=True)
    for batch in (1, 2, 4):
        assert pair.generate(*random_prompts([20] * batch), max_new_tokens=6).sequences.shape == (batch, 26)
    before = graphs()
    for batch in (1, 4, 2):  # in the first rows of the buffers of four
        pair.generate(*random_prompts([30] * batch), max_new_tokens=6)
    assert graphs() == before
