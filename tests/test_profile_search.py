"""How a profile is found: haystacks, retrieval heads, recorded steps, the search, and the whole of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import pytest
import torch
from rich.progress import Progress
from tiny_models import greedy, tiny_pair
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dustin_compile import DustinConfig, Profile, compile_pair, profile_pair
from dustin_compile.cli import app
from dustin_compile.layer_skip import layer_skip
from dustin_compile.profiling import pipeline, retrieval_heads, search
from dustin_compile.profiling.fingerprint import fingerprint
from dustin_compile.profiling.haystack import DEPTHS, NEEDLES, Trial, hide_needles, read_book
from dustin_compile.profiling.reader import Reader
from dustin_compile.profiling.retrieval_heads import HeadScores, score_heads_on, top_heads
from dustin_compile.profiling.search import Search, oracle_rate, recovery_rate, streaming_rate
from dustin_compile.profiling.trajectories import Groups, Recording, choose_lengths, record

CONFIG = DustinConfig(budget=16, sinks=2, window=4, compile=False)
SETTINGS = {"config": CONFIG, "context": 96}
GAMMA = 3


def word_tokenizer(words) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer([f"w{i}" for i in range(96)])


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(num_hidden_layers=2, attn_implementation="eager")


@pytest.fixture(scope="module")
def texts():
    numbers = torch.randint(0, 96, (2, 100), generator=torch.Generator().manual_seed(0)).tolist()
    return [" ".join(f"w{number}" + "." * (number % 9 == 0) for number in row) for row in numbers]


@pytest.fixture
def small_work(monkeypatch, tmp_path):
    """Less of everything, in a cache of the test's own."""
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retrieval_heads, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(search, "STUDY_TRIALS", 10)
    monkeypatch.setattr(search, "MAX_UNITS", 4)


# Haystacks and retrieval heads


def test_needles_lie_at_their_depths_behind_a_sentence():
    book = read_book()[:12000]
    pieces = pre_tokenizers.Whitespace().pre_tokenize_str(" ".join((book, *sum(NEEDLES, ()))))
    tokenizer = word_tokenizer(["?", *sorted({word for word, _ in pieces} - {"?"})])
    trials = hide_needles(tokenizer, book, 1500)
    for trial, depth, (needle, _, answer) in zip(trials, DEPTHS, NEEDLES, strict=True):
        assert 1350 < len(trial.prompt) <= 1500
        assert tokenizer.decode(trial.prompt[slice(*trial.answer)]) == answer == trial.text
        assert abs(trial.answer[0] / len(trial.prompt) - depth) < 0.08
        before = tokenizer.decode(trial.prompt[: trial.answer[0]])
        before = before[: before.rindex(needle.split()[0])].split()
        assert before[-1] in {".", "!", "?", ".”", "!”", "?”", '."'}, before[-3:]


@pytest.mark.parametrize("between", [" ", ". ", "-"])
def test_needles_keep_their_depths_in_any_text(between):
    """Words without sentences, sentences at the beginning only, and no words."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("x", "isolated")
    text = between.join(["x"] * 40) + " ".join(["", *["x"] * 2000]) if between == ". " else between.join(["x"] * 2000)
    trials = hide_needles(PreTrainedTokenizerFast(tokenizer_object=tokenizer), text, 1500)
    for trial, depth in zip(trials, DEPTHS, strict=True):
        assert abs(trial.answer[0] / len(trial.prompt) - depth) < 0.05


class ScriptedReader:
    """Two layers of three heads, of which (1, 2) looks at the answer; it says what the script says."""

    layers, query_heads = 2, 3
    model = types.SimpleNamespace(device="cpu")

    def __init__(self, script, answer):
        self.script, self.answer, self.read_tokens = iter(script), answer, 0

    def read(self, tokens, start):
        self.read_tokens += len(tokens)
        return torch.zeros(1, 1, 4), torch.zeros(1, 1, 6, 4)

    def forward(self, tokens, start):
        return torch.zeros(1, 1, 4), torch.zeros(1, 1, 6, 4)

    def choose(self, hidden):
        return torch.tensor([next(self.script)])

    def attention(self, queries, length):
        for layer in range(2):
            probs = torch.full((1, 3, length), 0.2 / length)
            if layer == 1:
                probs[:, 2, slice(*self.answer)] = 0.3
            yield probs


@pytest.mark.parametrize(
    ("script", "tokens", "answered"),
    [
        ([5, 6, 7], 2, 1),  # w5 w6 is the answer; it ends there
        ([9, 5, 6], 2, 1),  # what the answer does not hold is not counted
        ([5, 9] * 20, 0, 0),  # never answered: what it looked at does not count
    ],
)
def test_a_planted_head_is_found(tokenizer, script, tokens, answered):
    answer = (3, 5)
    trial = Trial([0, 1, 2, 5, 6, 3, 4, 1], answer, "w5 w6")
    reader = ScriptedReader(script, answer)
    scores = score_heads_on(reader, [trial], tokenizer, lambda: True)
    assert scores.counts.tolist() == [tokens, 2, answered, 1]
    assert scores.teacher_forced is not bool(answered)
    assert top_heads(scores.mean())[1][0] == (1, 2)
    assert scores.mean()[1, 2] == pytest.approx(0.6)
    # 0.2 over some 8 positions, of which 2 are the answer
    assert scores.mean()[0].tolist() == pytest.approx([0.05] * 3, abs=0.01)


def test_what_prompts_share_is_read_once(tokenizer):
    trials = [Trial([0, 1, 2, 5, 6, 3], (3, 5), "w5 w6"), Trial([0, 1, 2, 7, 6, 3, 3], (3, 4), "w7")]
    reader = ScriptedReader([5, 6, 7], (3, 5))
    assert score_heads_on(reader, trials, tokenizer, lambda: True).counts[2:].tolist() == [2, 2]
    assert reader.read_tokens == 6 + 4


def test_equal_heads_are_ordered():
    assert top_heads(torch.tensor([[0.1, 0.3, 0.3, 0.0]]), 3) == [[(0, 1), (0, 2), (0, 0)]]
    groups = Groups.of([[(0, 3), (0, 2)], [(1, 1), (1, 0), (1, 2)]], query_heads=4, kv_heads=2)
    assert groups.layers == (((0, 2), (0, 3)), ((1, 0), (1, 1), (1, 2)))
    assert groups.units == (((0, 2), (0, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 3)))


# Recorded steps


@torch.no_grad()
def test_a_recorded_step_is_what_transformers_computes(pair):
    target, draft = pair
    tokens = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(3))
    groups = Groups((((0, 1), (0, 2)), ((1, 3),)), (((1, 0), (1, 1)),))
    readers = [Reader(model, 96, 80) for model in pair]
    lengths = [30, 57]
    found = record(*readers, (groups, groups), tokens, lengths, GAMMA)
    assert found.lengths.tolist() == lengths

    def attentions(model, tokens, first, length):
        """Attention of the queries from `first` on to the history, renormalised, [layers, heads, T, length]."""
        maps = torch.cat(model(tokens[None], output_attentions=True).attentions)[:, :, first:, :length]
        return maps / maps.sum(-1, keepdim=True)

    for step, length in enumerate(lengths):
        block = greedy(draft, tokens[None, : length + 1], None, GAMMA)[0]
        expected = attentions(target, block, length, length).mean((0, 1, 2))
        assert torch.allclose(found.mass[step, :length], expected, atol=1e-6)
        signal = attentions(target, tokens[:length], length - 1, length).mean(2)
        look_ahead = attentions(draft, block[:-1], length, length).mean(2)
        for scores, by_head in ((found.target[step], signal), (found.draft[step], look_ahead)):
            for row, group in enumerate(groups.all):
                mean = torch.stack([by_head[head] for head in group]).mean(0)
                assert torch.allclose(scores[row, :length], mean, atol=1e-6)
            assert (scores[:, length:] == 0).all()


def test_lengths_to_record():
    assert choose_lengths(101, 16) == [50, 60, 70, 80, 90, 100]
    assert choose_lengths(38, 16) == [19, 22, 26, 29, 33, 37]
    assert choose_lengths(34, 16) == [17, 20, 23, 26, 29, 33]


# The search


@pytest.fixture
def one_seed(monkeypatch):
    monkeypatch.setattr(search, "SEEDS", 1)


def recording_of(mass, target, draft, length) -> Recording:
    """One step from lists of scores."""
    tensors = (torch.tensor(part, dtype=torch.float32)[None] for part in (mass, target, draft))
    return Recording(torch.tensor([length], dtype=torch.int32), *tensors)


def test_recovery_by_hand():
    mass = [0.2, 0.0, 0.1, 0.3, 0.05, 0.05, 0.2, 0.1, 9.0]  # 8 positions count
    step = recording_of(mass, [], [], 8)
    draft = torch.tensor([[0, 5, 1, 2, 3, 4, 0, 0, 9]]).float()
    target = torch.tensor([[0, 5, 4, 3, 2, 1, 0, 0, 9]]).float()
    # Position 0 is the sink, 7 the window.
    assert recovery_rate(step, draft, target, 4, 1, 1, 1).item() == pytest.approx(0.2 + 0.1 + 0.0 + 0.1)  # 1, then 2
    assert recovery_rate(step, draft, target, 5, 1, 1, 2).item() == pytest.approx(0.3 + 0.0 + 0.05 + 0.1)  # 1, 5; 2
    assert oracle_rate(step, 4, 1, 1).item() == pytest.approx(0.3 + 0.3 + 0.2)
    assert streaming_rate(step, 4, 1).item() == pytest.approx(0.2 + 0.05 + 0.2 + 0.1)
    assert recovery_rate(step, draft, target, 8, 1, 1, 2).item() == pytest.approx(1)


def planted_search(draft_signal, target_signal, seed=(2, 0), steps=6, length=100) -> Search:
    """A target of 3 layers and a draft of 2, each with 4 heads on 2 KV heads; mass on 24 random positions.

    The strongest retrieval head is `seed`. Target unit (2, 0) sees the first `target_signal` of these, draft unit
    (1, 1) the last `draft_signal`.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return 1e-4 * torch.rand(*shape, generator=generator)

    places = [torch.randperm(length - 8, generator=generator)[:24] + 2 for _ in range(steps)]
    groups = tuple(
        Groups.of([[(layer, head) for head in range(4)] for layer in range(layers)], 4, 2) for layers in (3, 2)
    )
    mass, target, draft = noise(steps, length), noise(steps, 9, length), noise(steps, 6, length)
    for step, chosen in enumerate(places):
        mass[step, chosen] = 0.04
        target[step, [2, 7], chosen[:target_signal, None]] = 0.1  # of the layer's group, and the unit's
        draft[step, [1, 5], chosen[24 - draft_signal :, None]] = 0.1
    recording = Recording(torch.full((steps,), length, dtype=torch.int32), mass, target, draft)
    models = tuple(fingerprint(tiny_pair(num_hidden_layers=layers)[0]) for layers in (3, 2))
    config = DustinConfig(budget=30, sinks=2, window=4)
    retrieval_scores = torch.zeros(3, 4)
    retrieval_scores[seed] = 1
    return Search(recording, groups, models, config, retrieval_scores, seed=0)


def test_the_search_finds_planted_heads_and_their_split(one_seed):
    found = planted_search(draft_signal=12, target_signal=12).run()
    assert found.layer_arr.index(max(found.layer_arr)) == 2
    assert (found.paper.target, found.paper.draft, found.paper.draft_share) == ((2,), (1,), 12)
    assert len(found.draft_arr) == 2  # a second draft layer adds nothing
    assert (found.chosen.target, found.chosen.draft, found.chosen.draft_share) == ((7,), (5,), 12)
    assert found.chosen.arr == pytest.approx(found.oracle, abs=1e-6)
    assert found.oracle > 0.95 > 0.3 > found.streaming
    assert found.chosen.cost == pytest.approx(2 / (2 * 3 * 2))  # keys of two KV heads; the target has 6, with values
    assert found.paper.cost == pytest.approx(4 / 12)
    assert dict(found.share_arr)[found.chosen.draft_share] == max(rate for _, rate in found.share_arr)


def test_the_strongest_retrieval_heads_stay(one_seed):
    """They are kept where others recover more, and recovery decides what joins them."""
    found = planted_search(draft_signal=12, target_signal=12, seed=(0, 3)).run()
    assert found.seeds == (4,) and all(unit_set.target[0] == 4 for unit_set in found.frontier)
    assert 7 in found.chosen.target and found.chosen.arr > 0.9 * found.oracle
    assert found.paper.target == (2,)  # Algorithm 1 knows no seeds


def test_a_draft_that_knows_nothing_gets_no_share(one_seed):
    found = planted_search(draft_signal=0, target_signal=24).run()
    assert found.chosen.target == (7,) and found.chosen.draft_share == 0


# The whole


def test_the_same_profile_every_time_also_after_an_interruption(
    monkeypatch, small_work, tmp_path, pair, tokenizer, texts
):
    def run():
        return profile_pair(*pair, texts=texts, tokenizer=tokenizer, **SETTINGS)

    whole = run()
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "other"))
    calls = []

    def record_and_interrupt(*arguments):
        calls.append("record")
        if len(calls) == 2:
            raise KeyboardInterrupt
        return record(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "record", record_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run()
        patch.setattr(pipeline, "score_heads_on", lambda *arguments: pytest.fail("scored again"))
        resumed = run()
    assert len(calls) == len(texts) + 2 + 1  # two of needles; the second text twice
    assert resumed == whole and str(resumed.path).startswith(str(tmp_path / "other"))
    assert resumed.record["frontier"] == whole.record["frontier"]
    assert all(seconds > 0 for seconds in resumed.record["seconds"].values())

    assert Profile.load(whole.path) == whole
    with pytest.warns(UserWarning, match="cached profile"):
        compiled = compile_pair(*pair, config=CONFIG)
    assert compiled.profile == whole and 0 < whole.arr <= whole.record["oracle_arr"] <= 1

    with monkeypatch.context() as patch:  # another budget needs another search only
        patch.setattr(pipeline, "record", lambda *arguments: pytest.fail("recorded again"))
        other = profile_pair(
            *pair, texts=texts, tokenizer=tokenizer, context=96, config=dataclasses.replace(CONFIG, budget=20),
            plot=tmp_path / "plots",
        )  # fmt: skip
    assert other.budget == 20 and other.arr > whole.arr
    names = {"target_heads", "draft_heads", "target_layer", "draft_layers", "draft_share", "frontier"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"{name}.png" for name in names}


def test_a_short_budget_does_less_and_says_so(small_work, pair, tokenizer, texts):
    profile = profile_pair(*pair, texts=texts, tokenizer=tokenizer, budget_seconds=1e-6, **SETTINGS)
    record = profile.record
    assert record["haystacks"] == {"target": 1, "draft": 1} and record["haystacks_planned"] > 5
    assert record["texts"] == 1 and record["steps"] == 6 and record["budget_seconds"] == 1e-6
    assert len(record["frontier"]) == 2  # the seeds, and with one head more

    whole = profile_pair(*pair, texts=texts, tokenizer=tokenizer, **SETTINGS)  # replaces it in the cache
    with pytest.warns(UserWarning, match="stays: it was not cut short"):
        cut = profile_pair(*pair, texts=texts, tokenizer=tokenizer, budget_seconds=1e-6, **SETTINGS)
    assert cut.path is None and Profile.load(whole.path) == whole


def test_long_texts_are_read_in_passages(tokenizer):
    text = " ".join(f"w{i % 96}" for i in range(500))
    data = pipeline.gather_data(tokenizer, [text, " ".join(text.split()[:60])], context=96, budget=20)
    whole = tokenizer(text).input_ids
    passages = [whole[:97], whole[100:197], whole[201:298], whole[302:399], whole[403:500]]
    needles = [tokens for tokens in data.texts if tokens not in (*passages, whole[:60])]
    assert [tokens for tokens in data.texts if tokens not in needles] == [*passages, whole[:60]] and len(needles) == 2
    with pytest.warns(UserWarning, match="longest of the texts has 60 tokens, fewer than context=96"):
        pipeline.gather_data(tokenizer, [" ".join(text.split()[:60])], context=96, budget=20)


def test_damaged_work_is_made_anew(small_work, pair, tokenizer, texts, tmp_path):
    whole = profile_pair(*pair, texts=texts, tokenizer=tokenizer, **SETTINGS)
    for path in (tmp_path / "cache" / "profiling").rglob("target-heads-*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="is damaged and made anew"):
        assert profile_pair(*pair, texts=texts, tokenizer=tokenizer, **SETTINGS) == whole


def test_what_time_cut_short_is_not_kept(monkeypatch, small_work, pair, tokenizer):
    """Nor are steps that were recorded for other groups taken for those of the present ones."""
    trials = [Trial([0, 1, 2, 5, 6, 3, 4, 1], (3, 5), "w5 w6")] * 3
    data = pipeline.Data({8: trials, 16: trials}, [list(range(40))])
    reader = ScriptedReader(itertools.repeat(9), (3, 5))

    def work(up_after: int) -> pipeline.Work:
        """Whose time is up after so many trials."""
        made = pipeline.Work(data, tuple(map(fingerprint, pair)), CONFIG, pair[0], 1.0, Progress())
        asked = itertools.count()
        made.may_begin = lambda phase: next(asked) < up_after
        return made

    cut = work(1)
    assert cut.score_heads("target heads", reader, tokenizer).counts[3] == 2
    assert not any(cut.directory.iterdir()) and cut.seconds["target heads"] > 0
    assert work(100).score_heads("target heads", reader, tokenizer).counts[3] == 6
    assert {path.name for path in cut.directory.iterdir()} == {f"target-heads-{n}.safetensors" for n in (8, 16)}

    def record_ones(target, draft, groups, tokens, lengths, gamma):
        steps = len(lengths)
        scores = (torch.ones(steps, len(side.all), 40) for side in groups)
        return Recording(torch.tensor(lengths, dtype=torch.int32), torch.ones(steps, 40), *scores)

    monkeypatch.setattr(pipeline, "record", record_ones)
    for heads in ([[(0, 1)]], [[(0, 1)], [(1, 2)]]):
        groups = Groups.of(heads, query_heads=4, kv_heads=2)
        assert work(100).record_steps((reader, reader), (groups, groups)).target.shape[1] == len(groups.all)


def test_a_layer_skip_draft_is_profiled(monkeypatch, small_work, pair, tokenizer, texts):
    skipping = layer_skip(pair[0], [1])
    monkeypatch.setattr(search, "MAX_UNITS", 2)
    profile = profile_pair(pair[0], skipping, texts=texts, tokenizer=tokenizer, budget_seconds=1e-6, **SETTINGS)
    assert profile.draft.layers == 1 and {layer for layer, _ in profile.draft_heads} == {0}
    with pytest.warns(UserWarning, match="using the cached"):
        assert compile_pair(pair[0], layer_skip(pair[0], [1]), config=CONFIG).profile == profile


def test_a_book_that_is_too_short_is_refused(monkeypatch, small_work, pair, tokenizer):
    monkeypatch.setattr(pipeline, "read_book", lambda: "w1 " * 96)
    with pytest.raises(ValueError, match="context=96 is too long for the book's part, which has 96 tokens"):
        profile_pair(*pair, tokenizer=tokenizer, **SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": dataclasses.replace(CONFIG, draft_share=3)}, "draft_share=3 must be None"),
        ({"context": 32}, "context=32 must be more than twice the budget=16"),
        ({"context": 4096}, r"context=4096.* both have 4096"),
        ({"budget_seconds": 0}, "budget_seconds=0 must be positive"),
        ({"seed": -1}, "seed=-1 must be in 0..4294967295"),
        ({"plot": __file__}, "test_profile_search.py' is not a directory"),
        ({"tokenizer": None}, "tokenizer is needed"),
        ({"texts": []}, "texts is empty"),
        ({"texts": ["w1 " * 90, "w1 w2"]}, r"texts\[1\] has 2 tokens"),
        ({"texts": [""]}, r"texts\[0\] has 0 tokens"),
        ({"texts": "w1 w2"}, "texts must be a sequence of strings"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(monkeypatch, small_work, pair, tokenizer, texts, arguments, message):
    monkeypatch.setattr(pipeline, "Reader", lambda *_: pytest.fail("heavy work"))
    with pytest.raises((ValueError, TypeError), match=message):
        profile_pair(*pair, **{"texts": texts, "tokenizer": tokenizer, **SETTINGS, **arguments})


def test_a_missing_package_is_named(monkeypatch, pair, tokenizer):
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs optuna: pip install 'dustin-compile\[profile\]'"):
        profile_pair(*pair, tokenizer=tokenizer)


def test_the_command(small_work, tmp_path, pair, tokenizer, texts):
    for name, model in zip(("target", "draft"), pair, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "long.txt").write_text(" ".join(texts * 2))
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    options = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--budget", "80"]
    options += [
        "--context",
        "200",
        "--text-file",
        str(tmp_path / "long.txt"),
        "--device",
        "cpu",
        "--budget-seconds",
        "1",
    ]
    result = CliRunner().invoke(app, ["profile", *options, "--out", str(tmp_path / "profile.json"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    profile = Profile.load(tmp_path / "profile.json")
    assert found["draft_share"] == profile.draft_share and profile.budget == 80
    assert profile == Profile.load(found["path"])
    for wrong, message in (
        (["--target", "somewhere"], "--target and --draft go together"),
        ([*options, "--layer-skip"], "--layer-skip is of SmolLM2"),
        ([*options, "--out", str(tmp_path)], f"--out {tmp_path} is a directory"),
        ([*options, "--text-file", str(tmp_path / "bytes.txt")], "'utf-8' codec can't decode byte 0xff"),
    ):
        result = CliRunner().invoke(app, ["profile", *wrong])
        assert result.exit_code == 1 and message in result.stderr


def test_scores_of_no_answer_are_those_of_the_answers_fed():
    scores = HeadScores(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), torch.tensor([0, 4, 0, 2]))
    assert scores.teacher_forced and scores.mean().tolist() == [[0.25, 0.75]]
