"""The real pair: SmolLM2-135M-Instruct with its 4-layer draft, on a book."""

from __future__ import annotations

import pytest
import torch
from tiny_models import compile_tiny, greedy

from dustin_compile import layer_skip, smol

LENGTHS = [9, 31, 60, 45]
NEW = 16


@pytest.fixture(scope="module")
def pair(load_smol):
    return load_smol(device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(pair):
    """Four prompts of different lengths, padded on the left by the tokenizer."""
    text = smol.passage(pair.tokenizer, 400)[0]
    passages = [pair.tokenizer.decode(text[100 * row : 100 * row + length]) for row, length in enumerate(LENGTHS)]
    pair.tokenizer.padding_side, pair.tokenizer.pad_token = "left", pair.tokenizer.eos_token
    return pair.tokenizer(passages, return_tensors="pt", padding=True)


@pytest.fixture(scope="module")
def text(pair, prompts):
    """What the target itself goes on with."""
    sequences = greedy(pair.target, prompts.input_ids, prompts.attention_mask, NEW, eos_token_id=[])
    return sequences[:, prompts.input_ids.shape[1] :]


@pytest.mark.parametrize("draft_attention", ["sparse", "dense"])
def test_dense_equals_transformers(pair, prompts, text, draft_attention):
    assert len(set(prompts.attention_mask.sum(1).tolist())) == 4
    dense = compile_tiny(pair.target, pair.draft, verify="dense", draft_attention=draft_attention)
    output = dense.generate(**prompts, max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(output.sequences[:, prompts.input_ids.shape[1] :], text)
    assert output.stats.tokens_per_step > 1.3  # the draft was distilled from the target


def test_budget_of_the_whole_length_is_dense(pair, prompts, text):
    output = compile_tiny(pair.target, pair.draft, budget=128).generate(**prompts, max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(output.sequences[:, prompts.input_ids.shape[1] :], text)
    assert output.stats.cache_read_share == 1


@torch.no_grad()
def surprise(model, sequences, new):
    """Mean negative log-likelihood of the last tokens."""
    log_probs = model(sequences).logits[:, -new - 1 : -1].log_softmax(-1)
    return -log_probs.gather(-1, sequences[:, -new:, None]).mean().item()


def test_sparse_text_is_likely_to_the_whole_history_too(pair):
    prompt = smol.passage(pair.tokenizer, 600)
    settings = {"budget": 160, "sinks": 4, "window": 16}
    output = compile_tiny(pair.target, pair.draft, **settings).generate(prompt, max_new_tokens=NEW, eos_token_id=[])
    assert output.stats.cache_read_share < 0.3
    assert output.stats.tokens_per_step > 1.3
    expected = greedy(pair.target, prompt, None, NEW, eos_token_id=[])
    assert surprise(pair.target, output.sequences, NEW) < surprise(pair.target, expected, NEW) + 0.5


def test_layer_skip_draft(pair, prompts, text):
    draft = layer_skip(pair.target, [layer for layer in range(smol.LAYERS) if layer not in (10, 20)])
    dense = compile_tiny(pair.target, draft, verify="dense")
    output = dense.generate(prompts.input_ids[:2], prompts.attention_mask[:2], max_new_tokens=8, eos_token_id=[])
    assert torch.equal(output.sequences[:, prompts.input_ids.shape[1] :], text[:2, :8])
    assert output.stats.tokens_per_step > 1.3


def test_chat_ends_at_the_eos_of_the_target(pair):
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = pair.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = compile_tiny(pair.target, pair.draft, budget=128).generate(**prompt, max_new_tokens=40)
    assert torch.equal(output.sequences, greedy(pair.target, prompt.input_ids, prompt.attention_mask, 40))
    assert output.stats.finish_reasons == ["stop"]
    assert "Paris" in pair.tokenizer.decode(output.sequences[0, prompt.input_ids.shape[1] :])
