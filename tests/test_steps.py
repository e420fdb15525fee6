"""What single steps read, write and choose, seen from inside."""

from __future__ import annotations

import pytest
import torch
from tiny_models import compile_tiny, greedy, random_prompts, tiny_pair
from transformers import DynamicCache

from dustin_compile import generation
from dustin_compile.graphs import step as step_module

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its new name is newer than 5.17

GAMMA = 4


@pytest.fixture(scope="module")
def llamas():
    return tiny_pair(num_hidden_layers=2)


def watch(monkeypatch, after):
    """Call after(state, refresh) after each step, and after each prefill with refresh None."""
    prefill, run_step = generation.prefill, step_module.Step.__call__

    def watched_prefill(target, draft, state, *args, **kwargs):
        prefill(target, draft, state, *args, **kwargs)
        after(state, None)

    def watched_step(self, state, decoding, refresh=False):
        run_step(self, state, decoding, refresh)
        after(state, refresh)

    monkeypatch.setattr(generation, "prefill", watched_prefill)
    monkeypatch.setattr(step_module.Step, "__call__", watched_step)


def dense_cache(model, tokens):
    """K and V of a text as transformers itself computes them, each [layers, positions, kv_heads, head_dim]."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[None], past_key_values=cache, use_cache=True)
    return (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers]) for name in ("keys", "values")
    )


def close(actual, expected):
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


# Rows


def script_acceptances(monkeypatch, pair, script):
    """Let the target accept script[b][step % len] of row b's draft tokens: its own choices so far, others behind."""
    target, config = pair._generation.target, pair.config
    propose = step_module.propose
    script = torch.tensor(script)

    def scripted(draft, state, gamma, *args, **kwargs):
        proposal = propose(draft, state, gamma, *args, **kwargs)
        step_module.score_and_choose(draft, state, step_module.score_history(target, state), proposal.queries, config)
        slots = state.seq_lens[:, None].long() + 1 + torch.arange(gamma)
        accepted = script[:, int(state.step) % script.shape[1]]
        for i in range(gamma):
            logits, _ = step_module.verify(target, state, gamma, config.verify == "sparse")
            choice = logits[:, i].argmax(-1)
            proposal.tokens[:, i] = torch.where(i < accepted, choice, (choice + 1) % logits.shape[-1])
            state.tokens.scatter_(1, slots, proposal.tokens)
        return proposal

    monkeypatch.setattr(step_module, "propose", scripted)


@pytest.mark.parametrize("verify", ["sparse", "dense"])
def test_rows_with_uneven_acceptance_equal_their_own_runs(monkeypatch, llamas, verify):  # trap 3
    target, draft = llamas
    lengths, new = [70, 1, 100, 45], 30
    input_ids, mask = random_prompts(lengths)
    pattern = [0, 1, 2, GAMMA, GAMMA, 0]
    script = [pattern[row:] + pattern[:row] for row in range(4)]

    def run(rows):
        pair = compile_tiny(target, draft, verify=verify, gamma=GAMMA)
        with monkeypatch.context() as patch:
            script_acceptances(patch, pair, [script[row] for row in rows])
            output = pair.generate(input_ids[rows], mask[rows], max_new_tokens=new)
        return output.sequences[:, 100:], pair._generation.state

    together, batch = run([0, 1, 2, 3])
    assert (batch.accepted_counts[:, [0, 1, 2, GAMMA]] > 0).all()  # each row went through all kinds of step
    if verify == "dense":
        assert torch.equal(together, greedy(target, input_ids, mask, new)[:, 100:])
    for row in range(4):
        text, single = run([row])
        assert torch.equal(text[0], together[row])
        assert torch.equal(single.accepted_counts[0], batch.accepted_counts[row])
        length = int(single.seq_lens[0])
        assert length == int(batch.seq_lens[row])
        for one, all_rows in ((single.target_cache, batch.target_cache), (single.draft_cache, batch.draft_cache)):
            for name in ("key", "value"):  # the draft lacks the last entry until its next pass
                ours, theirs = (getattr(cache, name) for cache in (one, all_rows))
                assert close(ours[:, 0, : length - 1], theirs[:, row, : length - 1])
        assert close(single.query[0], batch.query[row])


# What is read


@pytest.mark.parametrize("verify", ["sparse", "dense"])
@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_nothing_behind_the_length_is_ever_read(monkeypatch, llamas, verify, garbage):  # trap 4
    input_ids, mask = random_prompts([1, 33, 70, 100])

    def fill(state, refresh):
        position = torch.arange(state.capacity)
        # Of the draft, what its next pass repairs counts as behind.
        for cache, length in ((state.target_cache, state.seq_lens), (state.draft_cache, state.seq_lens - 1)):
            behind = position >= length[:, None]
            cache.key[:, behind] = cache.value[:, behind] = garbage

    def run():
        pair = compile_tiny(*llamas, verify=verify, refresh_every=3 if verify == "sparse" else 0)
        output = pair.generate(input_ids, mask, max_new_tokens=16)
        state = pair._generation.state
        return output.sequences, state.read_share, state.query, state.accepted_counts

    expected = run()
    watch(monkeypatch, fill)
    for clean, poisoned in zip(expected, run(), strict=True):
        assert torch.equal(clean, poisoned)


def test_dense_prefill_ignores_what_an_earlier_generation_left(llamas):  # trap 4
    pair = compile_tiny(*llamas)
    prompts = random_prompts([1, 33, 70])
    clean = pair.generate(*prompts, max_new_tokens=8).sequences
    for cache in (pair._generation.state.target_cache, pair._generation.state.draft_cache):
        cache.key.fill_(float("nan"))
        cache.value.fill_(float("nan"))
    assert torch.equal(pair.generate(*prompts, max_new_tokens=8).sequences, clean)


def masked_logits(model, history, block, indices):
    """transformers' logits of a block that reads the chosen positions of a densely prefilled history and itself."""
    length, tokens = len(history), len(block)
    visible = torch.zeros(tokens, length + tokens, dtype=torch.bool)
    visible[:, indices] = True
    visible[:, length:] = torch.ones(tokens, tokens).tril().bool()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(history[None], past_key_values=cache, use_cache=True)
        position = torch.arange(length, length + tokens)[None]
        return model(
            block[None], attention_mask=visible[None, None], position_ids=position, past_key_values=cache
        ).logits[0]


def test_sparse_verify_equals_dense_attention_masked_to_the_set(monkeypatch, llamas):
    target, draft = llamas
    pair = compile_tiny(target, draft)
    lengths = [1, 33, 70, 100]  # after the prefill these are the histories: all K/V are dense
    input_ids, mask = random_prompts(lengths)
    seen = []
    verify = step_module.verify

    def recording(model, state, gamma, sparse, lookback=0):
        logits, queries = verify(model, state, gamma, sparse, lookback)
        seen.append((state.seq_lens.clone(), state.tokens.clone(), state.verification_set, logits))
        return logits, queries

    monkeypatch.setattr(step_module, "verify", recording)
    pair.generate(input_ids, mask, max_new_tokens=2)
    ((seq_lens, tokens, chosen, logits),) = seen
    assert seq_lens.tolist() == lengths
    for row, length in enumerate(lengths):
        indices = chosen.indices[row, : chosen.counts[row]].long()
        assert len(indices) == min(length, 32)
        text = tokens[row, : length + GAMMA + 1]
        assert close(logits[row], masked_logits(target, text[:length], text[length:], indices))
        if length > 32:
            assert not close(logits[row], masked_logits(target, text[:length], text[length:], torch.arange(length)))


# What is chosen


def attention_to_history(model, text, queries, length, heads):
    """Mean over heads of the attention that the tokens at `queries` give to the first `length` positions alone."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(text[None], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    scores = torch.stack([attentions[layer][0, head, queries, :length] for layer, head in heads])
    return (scores / scores.sum(-1, keepdim=True)).mean((0, 1))


def test_set_is_chosen_by_both_signals_in_tiers(monkeypatch, llamas):
    target, draft = llamas
    budget, sinks, window, share = 32, 2, 8, 9
    # The draft's own attention is dense here, so that transformers computes the same queries.
    pair = compile_tiny(target, draft, draft_share=share, draft_attention="dense")
    lengths = [50, 70, 100]
    states = []
    watch(monkeypatch, lambda state, refresh: states.append(state))
    pair.generate(*random_prompts(lengths), max_new_tokens=2)
    state = states[0]
    chosen = state.verification_set
    assert chosen.length[:3].tolist() == lengths
    for row, length in enumerate(lengths):
        text = state.tokens[row]  # with the first token of the step where the draft's first proposal stood
        history = text[:length]
        # The target's signal is its last verified token's; the draft's, that of the pending token and its proposals.
        by_target = attention_to_history(target, history, [length - 1], length, pair.profile.target_heads)
        near = [by_target[max(0, i - 8) : i + 9].sum() / 17 for i in range(length)]
        by_target = by_target + 0.1 * torch.stack(near)
        lookahead = greedy(draft, text[None, : length + 1], None, GAMMA)[0, : length + GAMMA]
        queries = list(range(length, length + GAMMA))
        by_draft = attention_to_history(draft, lookahead, queries, length, pair.profile.draft_heads)
        expected = set(range(sinks)) | set(range(length - window, length))
        for scores, count in ((by_draft, share), (by_target, budget - sinks - window - share)):
            ranking = [i for i in scores.argsort(descending=True).tolist() if i not in expected]
            expected |= set(ranking[:count])
        assert chosen.indices[row].tolist() == sorted(expected)


def test_target_signal_is_of_the_last_token_kept(monkeypatch, llamas):
    target, draft = llamas
    pair = compile_tiny(target, draft, verify="dense", draft_attention="dense")
    model = pair._generation.target
    seen = []

    def check(state, refresh):
        for row in range(4):
            length = int(state.seq_lens[row])
            cache = model.new_cache(1, 128)
            _, queries = model.forward(state.tokens[row : row + 1, :length], torch.zeros(1).int(), cache, None)
            assert close(state.query[row], queries[0, -1:])
            seen.append(length)

    watch(monkeypatch, check)
    with torch.no_grad():
        pair.generate(*random_prompts([3, 20, 41, 64]), max_new_tokens=12)
    assert len(set(seen)) > 12


# The draft


def test_draft_proposes_what_transformers_would(llamas):
    target, draft = llamas
    lengths, new = [1, 33, 70, 100], 17
    input_ids, mask = random_prompts(lengths)
    texts = greedy(target, input_ids, mask, new)[:, 100:]
    accepted = torch.zeros(4, GAMMA + 1, dtype=torch.int64)
    for row in range(4):  # speculative decoding of the known text, by transformers alone
        text = torch.cat((input_ids[row, mask[row].bool()], texts[row]))
        end = lengths[row] + 1
        while end < len(text):
            proposed = greedy(draft, text[None, :end], None, GAMMA)[0, end:]
            target_text = text[end : end + GAMMA]
            right = (proposed[: len(target_text)] == target_text).int().cumprod(0).sum()
            accepted[row, right] += 1
            end += int(right) + 1
    pair = compile_tiny(target, draft, verify="dense", draft_attention="dense", gamma=GAMMA)
    pair.generate(input_ids, mask, max_new_tokens=new)
    assert torch.equal(pair._generation.state.accepted_counts, accepted)
    assert (accepted.sum(0)[[0, GAMMA]] > 0).all()  # also full acceptance, after which the draft's cache lacks an entry


# Refresh


def test_refresh_at_every_step_is_dense(llamas):
    target, draft = llamas
    input_ids, mask = random_prompts([1, 33, 70, 100])
    output = compile_tiny(target, draft, refresh_every=1).generate(input_ids, mask, max_new_tokens=16)
    assert torch.equal(output.sequences, greedy(target, input_ids, mask, 16))
    assert output.stats.cache_read_share == 1


@pytest.mark.parametrize("refresh_every", [2, 3])
def test_refresh_leaves_the_keys_and_values_of_a_dense_prefill(monkeypatch, llamas, refresh_every):
    target, draft = llamas
    pair = compile_tiny(target, draft, refresh_every=refresh_every)
    fresh = []

    def compare(state, refresh):
        for row in range(4):
            length = int(state.seq_lens[row])
            key, value = dense_cache(target, state.tokens[row, :length])
            same = close(state.target_cache.key[:, row, :length], key)
            same &= close(state.target_cache.value[:, row, :length], value)
            fresh.append((refresh, length > 64, same))

    watch(monkeypatch, compare)
    # The first row is shorter than what a refresh looks back on.
    pair.generate(*random_prompts([1, 33, 70, 100]), max_new_tokens=16)
    assert all(same for refresh, _, same in fresh if refresh or refresh is None)
    assert sum(refresh is True for refresh, _, _ in fresh) >= 4 * 3
    assert not any(same for refresh, long, same in fresh if refresh is False and long)  # there was something to mend
