"""Sampled tokens: their distribution, and what seeds promise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import compile_tiny, greedy, random_prompts, tiny_model, tiny_pair
from torch.nn.functional import scaled_dot_product_attention
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dustin_compile import adapter, generation
from dustin_compile.graphs import step as step_module

VOCAB = 8
PROMPT = [1, 2, 3]
ROWS = 512


# The distribution


@pytest.fixture
def fast_ops(monkeypatch):
    """Batched stand-ins for the CPU references of the ops, which go row by row; their own tests are in tests/ops."""

    def append_kv(key_cache, value_cache, query, key, value, cos, sin, start):
        rows = torch.arange(len(start))[:, None]
        slots = start[:, None] + torch.arange(key.shape[1])
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        key_cache[rows, slots], value_cache[rows, slots] = key, value
        return query

    def dense_attention(query, key_cache, value_cache, start, scale):
        last = start[:, None] + torch.arange(query.shape[1])
        visible = torch.arange(key_cache.shape[1]) <= last[:, None, :, None]
        query, key, value = (x.transpose(1, 2) for x in (query, key_cache, value_cache))
        return scaled_dot_product_attention(query, key, value, visible, scale=scale, enable_gqa=True).transpose(1, 2)

    monkeypatch.setattr(adapter, "append_kv", append_kv)
    monkeypatch.setattr(adapter, "dense_attention", dense_attention)
    monkeypatch.setattr(generation, "CAPACITY_MULTIPLE", 1)


@pytest.fixture(scope="module")
def eight_tokens():
    """A target and a draft that has little to do with it, of 8 tokens."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    return tiny_model(seed=0, **shape), tiny_model(seed=1, **shape)


@torch.no_grad()
def exact_distribution(target, *, temperature, top_k=None, top_p=None):
    """P of each three tokens after the prompt, [V, V, V], by transformers and its own logits processors."""
    first, second = (grid.flatten() for grid in torch.meshgrid(torch.arange(VOCAB), torch.arange(VOCAB), indexing="ij"))
    text = torch.cat((torch.tensor(PROMPT).expand(VOCAB**2, -1), first[:, None], second[:, None]), 1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p:
        processors.append(TopPLogitsWarper(top_p))
    logits = target(text).logits[:, -3:]
    probs = torch.stack([processors(text, logits[:, i]).softmax(-1) for i in range(3)], 1).double()
    p1 = probs[:, 0].view(VOCAB, VOCAB, VOCAB)[0, 0]
    p2 = probs[:, 1].view(VOCAB, VOCAB, VOCAB)[:, 0]
    p3 = probs[:, 2].view(VOCAB, VOCAB, VOCAB)
    return p1[:, None, None] * p2[:, :, None] * p3


def draw(pair, calls, **sampling):
    """Three tokens after the prompt for ROWS rows in each of so many calls, counted: [V, V, V]."""
    counts = torch.zeros(VOCAB**3, dtype=torch.int64)
    prompts = torch.tensor([PROMPT]).expand(ROWS, -1)
    for seed in range(calls):
        tokens = pair.generate(prompts, max_new_tokens=3, seed=seed, **sampling).sequences[:, -3:]
        counts += torch.bincount(tokens @ torch.tensor([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
    return counts.view(VOCAB, VOCAB, VOCAB)


def p_value(counts, probs):
    """Of the chi-square test, cells that expect fewer than 5 counted as one. Impossible ones must be empty."""
    assert (counts[probs == 0] == 0).all()
    expected = probs / probs.sum() * counts.sum()
    rare = expected < 5
    observed, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts.double(), expected))
    return chisquare(observed[expected > 0], expected[expected > 0]).pvalue


def p_values(counts, probs):
    """Of the second token, the third, and all three together."""
    return [p_value(counts.sum(dims), probs.sum(dims)) for dims in ((0, 2), (0, 1))] + [p_value(counts, probs)]


SAMPLING = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "top_k and top_p": {"temperature": 1.5, "top_k": 6, "top_p": 0.9},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_tokens_follow_the_distribution_of_the_target(fast_ops, eight_tokens, name):  # trap 14
    target, draft = eight_tokens
    pair = compile_tiny(target, draft, gamma=2, verify="dense", draft_attention="dense")
    calls = 50 if name == "temperature" else 20  # second and third tokens: 51,200 draws
    counts = draw(pair, calls, **SAMPLING[name])
    probs = exact_distribution(target, **SAMPLING[name])
    assert counts.sum() == calls * ROWS
    assert min(p_values(counts, probs)) > 1e-3


@pytest.mark.parametrize("claimed", ["uniform", "the target's"])
def test_wrong_draft_distribution_would_be_noticed(monkeypatch, fast_ops, eight_tokens, claimed):  # trap 14
    """The test above can fail: with another q than the tokens were drawn from, far fewer draws tell."""
    target, draft = eight_tokens
    propose, verify = step_module.propose, step_module.verify
    pair = compile_tiny(target, draft, gamma=2, verify="dense", draft_attention="dense")

    def lying(model, state, gamma, *args, **kwargs):
        proposal = propose(model, state, gamma, *args, **kwargs)
        if claimed == "uniform":
            probs = torch.full_like(proposal.probs, 1 / VOCAB)
        else:  # whatever the draft says is then accepted
            logits, _ = verify(pair._generation.target, state, gamma, False)
            probs = (logits[:, :-1] / 0.7).softmax(-1)
        return dataclasses.replace(proposal, probs=probs)

    monkeypatch.setattr(step_module, "propose", lying)
    second, third, together = p_values(draw(pair, 5, temperature=0.7), exact_distribution(target, temperature=0.7))
    assert max(second, third, together) < 1e-6


def test_draft_equal_to_target_is_always_accepted():  # trap 2
    target = tiny_model(num_hidden_layers=2)
    pair = compile_tiny(target, target, verify="dense", draft_attention="dense")
    stats = pair.generate(*random_prompts([5, 33, 70]), max_new_tokens=21, temperature=1.0, seed=5).stats
    assert stats.acceptance_by_position == [1.0] * 4


@pytest.mark.parametrize(
    "sampling", [{"temperature": 5.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-6}, {"temperature": 1e-4}], ids=str
)
def test_sampling_that_leaves_one_token_is_greedy(sampling):
    target, draft = tiny_pair(num_hidden_layers=2)
    input_ids, mask = random_prompts([5, 33])
    output = compile_tiny(target, draft, verify="dense").generate(input_ids, mask, max_new_tokens=12, **sampling)
    assert torch.equal(output.sequences, greedy(target, input_ids, mask, 12))


# Seeds


@pytest.fixture(scope="module")
def pair():
    return compile_tiny(*tiny_pair(num_hidden_layers=2))


def sampled(pair, input_ids, mask=None, **kwargs):
    output = pair.generate(input_ids, mask, **{"max_new_tokens": 12, "temperature": 1.0, **kwargs})
    return output.sequences[:, input_ids.shape[1] :]


def test_row_with_its_own_seed_does_not_depend_on_its_batch(pair):  # trap 15
    input_ids, mask = random_prompts([50, 1, 70, 70])
    input_ids[3] = input_ids[2]
    seeds = [11, 22, 33, 44]
    together = sampled(pair, input_ids, mask, seed=seeds)
    for row in range(4):
        prompt = input_ids[row : row + 1, mask[row].bool()]
        assert torch.equal(sampled(pair, prompt, seed=[seeds[row]])[0], together[row])
    assert not torch.equal(together[2], together[3])  # one prompt, two seeds
    order = [2, 0, 3, 1]
    assert torch.equal(
        sampled(pair, input_ids[order], mask[order], seed=[seeds[row] for row in order]), together[order]
    )


def test_one_seed_gives_each_row_its_own_text(pair):  # trap 15
    prompts = random_prompts([40])[0].expand(4, -1)
    texts = sampled(pair, prompts, seed=7)
    assert len({tuple(row) for row in texts.tolist()}) == 4
    assert torch.equal(sampled(pair, prompts[:1], seed=7)[0], texts[0])


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, [1, 2]])
def test_same_seed_gives_the_same_text(pair, seed):  # trap 15
    prompts, mask = random_prompts([40, 7])
    assert torch.equal(sampled(pair, prompts, mask, seed=seed), sampled(pair, prompts, mask, seed=seed))


def test_different_seeds_give_different_texts(pair):  # trap 15
    prompt = random_prompts([40])[0]
    seeds = [0, 1, 2**32, 2**33 + 1, -1, None, None]  # all 64 bits count; None is a new one each time
    assert len({tuple(sampled(pair, prompt, seed=seed)[0].tolist()) for seed in seeds}) == len(seeds)


def test_eos_only_cuts_a_sampled_text(pair):
    input_ids, mask = random_prompts([50, 1, 70, 70, 30])
    free = sampled(pair, input_ids, mask, seed=3)
    eos = [int(free[0, 1]), int(free[1, 5]), int(free[2, 9])]
    cut = sampled(pair, input_ids, mask, seed=3, eos_token_id=eos, pad_token_id=0)
    for row in range(5):
        ends = [i for i, token in enumerate(free[row].tolist()) if token in eos]
        length = ends[0] + 1 if ends else 12
        assert torch.equal(cut[row, :length], free[row, :length])
        assert not cut[row, length:].any()
