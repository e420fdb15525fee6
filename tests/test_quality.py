"""The quality harness: its engine, its selectors and its statistics."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from tiny_models import greedy, random_prompts, tiny_model, tiny_pair
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dustin_compile import DustinConfig, compile_pair
from dustin_compile.adapter import RetrievalHeads
from dustin_compile.benchmark import results
from dustin_compile.cli import app
from dustin_compile.graphs.verify import NEIGHBOURS, smooth
from dustin_compile.ops.score_heads import score_heads
from dustin_compile.ops.select_tiered import select_tiered
from dustin_compile.profile import Profile, cached_path
from dustin_compile.profiling import haystack
from dustin_compile.profiling.fingerprint import fingerprint
from dustin_compile.quality import run
from dustin_compile.quality.bootstrap import interval
from dustin_compile.quality.engine import Engine, products
from dustin_compile.quality.evaluate import ask, compare_on_text, generate, look, propose, read_prompts, room_for
from dustin_compile.quality.prompts import NEEDLES, take_trials
from dustin_compile.quality.report import SETTINGS as SENSITIVITIES
from dustin_compile.quality.report import draw_plots, make_sensitivity_table, make_table
from dustin_compile.quality.selectors import PAGE, SELECTORS, Settings, Step, observe_prompt, page_bounds

PROMPT, LENGTH, GAMMA = 144, 160, 4
SETTINGS = Settings(
    budget=48, sinks=2, window=8, draft_share=16, target_heads=((0, 1), (1, 2), (1, 3)), draft_heads=((0, 0), (2, 3))
)


@pytest.fixture(scope="module")
def engines():
    return [Engine(model, 96) for model in tiny_pair()]


@pytest.fixture(scope="module")
def texts():
    return random_prompts([192, 192])[0]


@pytest.fixture(scope="module")
def step(engines, texts):
    """A step of two rows of different lengths."""
    target, draft = engines
    lengths, prompt = torch.tensor([LENGTH, LENGTH - 7]), torch.tensor([PROMPT, PROMPT - 7])
    with torch.no_grad():
        cache, draft_cache = (engine.new_cache(2, 192) for engine in engines)
        target.prefill(texts, cache)
        draft.prefill(texts, draft_cache)
        rows = torch.arange(2)
        last = ask(target, texts[rows, lengths - 1][:, None], lengths - 1, cache)
        block, queries = propose(draft, texts[rows, lengths][:, None], lengths, draft_cache, GAMMA)
        observed = observe_prompt(target, texts, prompt, cache)
        mass = look(target, block, lengths, cache)[2]
    return Step(target, draft, lengths, cache, draft_cache, last, queries, observed, prompt, mass)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_engine_equals_transformers(family, texts):
    model = tiny_pair(family)[0]
    engine = Engine(model, 96)
    cache = engine.new_cache(2, 192)
    engine.prefill(texts[:, :150], cache)
    start = torch.tensor([150, 141])
    block = torch.stack([texts[0, 150:156], texts[1, 141:147]])
    logits = engine.run(block, start, cache, write=True)
    again = engine.run(texts[:, 147:149], torch.tensor([147, 147]), cache)  # row 1 over what was just written
    expected = model(texts).logits
    for row, first in enumerate(start.tolist()):
        torch.testing.assert_close(logits[row], expected[row, first : first + 6], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(again[1], expected[1, 147:149], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_sets_have_the_budget(name, step):
    keep = SELECTORS[name](step, SETTINGS)
    query = torch.randn(2, 4, GAMMA + 1, 16)
    for layer in range(3):
        kept = keep(layer, query).expand(2, 4, GAMMA + 1, 192)
        for row, length in enumerate(step.lengths.tolist()):
            seen = kept[row, ..., :length]
            assert name == "full" or (seen.sum(-1) == SETTINGS.budget).all()
            assert seen[..., : SETTINGS.sinks].all() and seen[..., length - SETTINGS.window :].all()


def test_budget_of_the_whole_history_changes_nothing(engines, texts):
    whole = dataclasses.replace(SETTINGS, budget=LENGTH + 1)
    found = compare_on_text(*engines, texts, PROMPT, [4, LENGTH - PROMPT], GAMMA, SELECTORS, [whole, SETTINGS])
    for (name, setting), scores in found.items():
        if name == "full" or setting == whole:
            assert scores.kl.max() < 1e-6
            assert scores.agreement.min() == 1
            torch.testing.assert_close(scores.arr, torch.ones(2, 2))
            torch.testing.assert_close(scores.delta_loglik, torch.zeros(2, 2), atol=1e-5, rtol=0)
        else:
            assert scores.kl.min() > 0 and scores.arr.max() < 1
    rates = {name: scores.arr for (name, setting), scores in found.items() if setting == SETTINGS}
    for name in ("hybrid", "history", "draft", "streaming", "sum", "unsmoothed"):  # no one set beats the oracle
        assert (rates[name] <= rates["oracle"] + 1e-6).all()
    assert (rates["oracle"] <= rates["oracle_3"] + 1e-6).all()


@torch.no_grad()
def test_hybrid_is_what_the_ops_give(step):
    scores = []
    for engine, heads, queries, cache in (
        (step.target, SETTINGS.target_heads, step.last_queries, step.cache),
        (step.draft, SETTINGS.draft_heads, step.draft_queries, step.draft_cache),
    ):
        table = RetrievalHeads(heads, engine.config, engine.device)
        side_by_side = torch.stack([queries[layer][:, head] for layer, head in sorted(heads)], dim=2)
        keys = cache.key.transpose(2, 3).contiguous()
        scores.append(score_heads(side_by_side, keys, table.groups, table.max_count, step.lengths.int(), engine.scale))
    indices, counts = select_tiered(
        scores[1],
        smooth(scores[0]),
        step.lengths.int(),
        SETTINGS.budget,
        SETTINGS.sinks,
        SETTINGS.window,
        SETTINGS.draft_share,
    )
    kept = SELECTORS["hybrid"](step, SETTINGS)(0, step.last_queries[0])[:, 0, 0]
    assert counts.tolist() == [SETTINGS.budget] * 2
    for row in range(2):
        assert kept[row].nonzero()[:, 0].tolist() == indices[row].tolist()


def test_quest_bounds_hold(step):
    query = step.last_queries[1]
    bounds = page_bounds(query, step.cache.key[1], step.lengths).repeat_interleave(PAGE, dim=-1)
    logits = products(query, step.cache.key[1])
    for row, length in enumerate(step.lengths.tolist()):
        assert (bounds[row, ..., :length] >= logits[row, ..., :length] - 1e-5).all()
    page = step.cache.key[1, 0, :, PAGE : 2 * PAGE].repeat_interleave(2, dim=0)  # of each query head
    ends = torch.stack([query[0, :, 0] * page.amin(1), query[0, :, 0] * page.amax(1)])
    torch.testing.assert_close(bounds[0, :, 0, PAGE], ends.amax(0).sum(-1))
    assert bounds.isfinite().all()


@torch.no_grad()
def test_snapkv_does_not_age(step, texts):
    """Its set is that of the prompt's end, whatever the step's queries are; only its window moves."""
    later = dataclasses.replace(step, lengths=step.lengths + 8)
    now, then = (SELECTORS["snapkv"](s, SETTINGS)(0, step.last_queries[0]) for s in (step, later))
    old = slice(0, PROMPT - 7 - SETTINGS.window)
    assert torch.equal(now[..., old], then[..., old])


@torch.no_grad()
def test_a_planted_needle_is_found(step):
    """A key that the last query points at is in the sets of history, and in no window."""
    cache = dataclasses.replace(step.cache, key=step.cache.key.clone())
    query = step.last_queries[1][:, 2, 0]  # of a target head, which reads KV head 1
    cache.key[1, :, 1, 77] = 50 * query
    planted = dataclasses.replace(step, cache=cache, scores={})
    for name, found in (("history", True), ("hybrid", True), ("unsmoothed", True), ("sum", True), ("streaming", False)):
        kept = SELECTORS[name](planted, SETTINGS)(1, step.last_queries[1]).expand(2, 4, 1, 192)
        assert (kept[:, 2, 0, 77] == found).all(), name
    kept = SELECTORS["quest"](planted, SETTINGS)(1, step.last_queries[1])
    assert kept[:, 2, 0, 77].all()
    block = torch.randn(2, 4, GAMMA + 1, 16)
    block[:, 2] = query[:, None]
    keep = SELECTORS["reselect"](planted, SETTINGS)
    before = keep(0, block)
    assert keep(1, block)[..., 77].all() and torch.equal(keep(0, block), before)
    alone = dataclasses.replace(SETTINGS, target_heads=((1, 2),))
    kept = {name: SELECTORS[name](planted, alone)(1, step.last_queries[1]) for name in ("hybrid", "unsmoothed")}
    neighbours = slice(77 - NEIGHBOURS // 2, 77 + NEIGHBOURS // 2 + 1)
    assert kept["hybrid"][..., neighbours].all() and not kept["unsmoothed"][..., neighbours].all()


def test_generation(engines):
    target, draft = engines
    prompts, mask = random_prompts([150, 131], side="right")
    lengths = mask.sum(1)
    read = read_prompts(target, draft, prompts, lengths, room_for(24, GAMMA, 5))
    start = lambda name, **kwargs: generate(read, 24, GAMMA, name, SETTINGS, **kwargs)  # noqa: E731
    full = start("full", measure=True)
    for row, length in enumerate(lengths.tolist()):
        expected = greedy(tiny_pair()[0], prompts[row : row + 1, :length], None, 24)[0, length:]
        assert full.tokens[row].tolist() == expected.tolist()
    assert full.kl[full.active].max() < 1e-6
    assert ((full.tokens_per_step >= 1) & (full.tokens_per_step <= GAMMA + 1)).all()

    whole = dataclasses.replace(SETTINGS, budget=200)
    same = generate(read, 24, GAMMA, "hybrid", whole)
    assert torch.equal(same.tokens, full.tokens)
    drifted, refreshed = start("streaming", measure=True), start("streaming", measure=True, refresh_every=1)
    assert torch.equal(refreshed.tokens, full.tokens) and refreshed.kl[refreshed.active].max() < 1e-6
    assert drifted.kl[drifted.active].max() > 1e-4
    # Rows of different lengths have different amounts to refresh, and each is as if it were alone with its period.
    often, mixed = (start("streaming", refresh_every=periods).tokens for periods in (5, [5, 0]))
    assert torch.equal(mixed[0], often[0]) and torch.equal(mixed[1], drifted.tokens[1])
    with pytest.raises(ValueError, match="tokens; 400 new ones need 410"):
        generate(read, 400, GAMMA, "hybrid", SETTINGS)


def test_the_draft_is_that_of_a_compiled_pair():
    """Its sparse attention included, which decides how many tokens are accepted."""
    pair = tiny_pair()
    setting = dataclasses.replace(SETTINGS, budget=96)
    heads = {"target_heads": setting.target_heads, "draft_heads": setting.draft_heads, "draft_share": 16}
    config = DustinConfig(budget=96, sinks=2, window=8, verify="dense", compile=False)
    out = compile_pair(*pair, config=config, profile=Profile(**heads)).generate(
        random_prompts([120])[0], max_new_tokens=41, eos_token_id=[]
    )
    engines = [Engine(model, 96) for model in pair]
    read = read_prompts(*engines, out.sequences[:, :121], torch.tensor([121]), room_for(40, GAMMA))
    found = generate(read, 40, GAMMA, "full", setting, measure=True)
    assert torch.equal(found.tokens, out.sequences[:, 121:])
    assert len(found.places) == out.stats.steps
    accepted = found.places.flatten().diff() - 1
    rates = [(accepted > place).float().mean().item() for place in range(GAMMA)]
    assert rates == pytest.approx(out.stats.acceptance_by_position, abs=GAMMA / out.stats.steps)


@pytest.fixture
def words(monkeypatch, tmp_path):
    """A tokenizer, and prose for it; and a cache without profiles."""
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    monkeypatch.setattr(results, "version", lambda package: "any")  # it reads files, for every row
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    numbers = torch.randint(0, 96, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), " ".join(f"w{number}." for number in numbers)


def profile_of(pair, budget, share, **changes) -> Profile:
    """A profile of a pair for a budget, whose first target head says which."""
    heads = {"target_heads": ((budget % 3, 0),), "draft_heads": ((0, 1),), "draft_share": share}
    settings = {"budget": budget, "sinks": 4, "window": 64, "gamma": 4}
    models = {"target": fingerprint(pair[0]), "draft": fingerprint(pair[1])}
    return Profile(**{**heads, **settings, **models, **changes})


def test_each_budget_has_its_profile(words):
    pair, said = tiny_pair(), []
    tokenizer, text = words
    ours = {budget: profile_of(pair, budget, budget // 4) for budget in (96, 160)}
    make = partial(run.QualityRun, pair[0], {"one": pair[1]}, tokenizer, contexts=[560], prompts=2, text=text,
                   parts=["table"], budgets=[160, 128, 96, 80], tell=said.append)  # fmt: skip
    measure = make(profiles={"one": list(ours.values())})
    assert not said
    for budget, of in ((160, 160), (128, 96), (96, 96), (80, 96)):  # of equally near ones the first
        setting = measure.settings("one", budget)
        assert setting.target_heads == ours[of].target_heads and setting.budget == budget
        assert setting.draft_share == round(ours[of].draft_share * (budget - 68) / (of - 68))
        name = measure._describe_profile("one", budget)
        assert f"of budget {of}: target layers {of % 3}, draft layers 0, {setting.draft_share} of" in name
    assert measure.settings("one", 160, 300).draft_share == round(40 * (300 - 68) / (160 - 68))

    make()
    assert len(said) == 4 and "no profile" in said[0]
    for profile in ours.values():
        profile.save(cached_path(profile))
    said.clear()
    assert make().settings("one", 160).target_heads == ours[160].target_heads
    assert said[0] == f"one, budget 160: using the cached profile {cached_path(ours[160])}"

    for profiles, message in (
        ({"one": [ours[96], ours[96]]}, "more than one of budget 96"),
        ({"one": [profile_of((pair[0], pair[0]), 96, 5)]}, "is of another pair: its draft has other weights"),
        ({"one": [profile_of(pair, 96, 5, target_heads=((7, 0),))]}, r"\(7, 0\) does not exist"),
        ({"two": [ours[96]]}, "profiles: 'two' is none of the drafts one"),
    ):
        with pytest.raises(ValueError, match=message):
            make(profiles=profiles)
    short = tiny_model(max_position_embeddings=550)
    with pytest.raises(ValueError, match=r"contexts: 560 must be in 544\.\.550"):
        run.QualityRun(pair[0], {"one": pair[1], "short": short}, tokenizer, contexts=[560])


def test_contexts_are_pooled_and_short_texts_left_out(monkeypatch, words):
    monkeypatch.setattr(run, "OFFSETS", (9,))
    pair = tiny_pair()
    measure = run.QualityRun(
        pair[0], {"one": pair[1]}, words[0], contexts=[544, 560, 3000], budgets=[96, 80], prompts=3,
        text=" ".join(words[1].split()[:1600]), parts=["table", "needles", "ages"], tell=lambda message: None,
    )  # fmt: skip
    monkeypatch.setattr(measure, "ask_needles", lambda draft, context: take_trials(words[0], "w1. " * 90, 1, context))
    found = {row["name"]: row["value"] for row in measure}
    assert [name.split(" (")[0] for name in measure.left_out] == [
        "table, one, 3000", "needles, one, 3000", "needles, one, 544", "needles, one, 560", "ages, one",
    ]  # fmt: skip
    assert " tokens, fewer than a passage of 3000" in measure.left_out[0]
    for name in ("kl_minus_history", "arr_minus_oracle", "kl_minus_sum", "arr_minus_hybrid_3"):
        for budget in (96, 80, "all"):
            pooled, *each = (found[f"quality/{name}/hybrid/one/{context}/{budget}"] for context in ("all", 544, 560))
            assert pooled == pytest.approx(sum(each) / 2, rel=2e-3, abs=1e-6)
    metric = found["quality/kl/hybrid/one/544/96"] - found["quality/kl/sum/one/544/96"]
    assert found["quality/kl_minus_sum/hybrid/one/544/96"] == pytest.approx(metric, abs=1e-3)


def test_the_needles_are_not_those_of_profiles():
    pieces = Whitespace().pre_tokenize_str(" ".join(sum(NEEDLES, ())))
    words = ["w", *sorted({word for word, _ in pieces})]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    trials = take_trials(fast, "w " * 8000, 24, 500)
    assert len({tuple(trial.prompt) for trial in trials}) == 24  # in a text that is the same everywhere
    assert all(fast.decode(trial.prompt[slice(*trial.answer)]) == trial.text for trial in trials)
    assert {sentence for needle in NEEDLES for sentence in needle}.isdisjoint(sum(haystack.NEEDLES, ()))


def test_the_command_refuses_by_name(tmp_path):
    for name, words in (("target", "ab"), ("draft", "ba")):
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
        tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / name)
    models = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    for options, message in (
        ([*models, "--device", "cpu"], "the tokenizers differ at id 0"),
        (["--layer-skip-profile", "theirs.json"], "--layer-skip-profile theirs.json needs --layer-skip"),
    ):
        result = CliRunner().invoke(app, ["quality", *options])
        assert result.exit_code == 1 and message in result.stderr


def test_every_part_gives_its_rows(monkeypatch, words):
    small = {"DRIFT_TOKENS": 8, "DRIFT_BIN": 4, "CONTINUED_TOKENS": 3, "ANSWER_TOKENS": 3, "AGES": (64,)}
    for name, value in {**small, "OFFSETS": (9, 256), "FREE_SELECTORS": ("full", "hybrid", "oracle")}.items():
        monkeypatch.setattr(run, name, value)
    pair = tiny_pair()
    profile = Profile(target_heads=((1, 0),), draft_heads=((0, 1),), draft_share=5)
    measure = run.QualityRun(
        pair[0], {"one": pair[1], "two": pair[1]}, words[0], contexts=[560],
        profiles={"one": [profile]}, budgets=[96], prompts=2, text=words[1],
        tell=lambda message: None,
    )  # fmt: skip
    found = {row["name"]: row for row in measure}
    assert not measure.left_out and all(row["low"] <= row["value"] <= row["high"] for row in found.values())
    metrics = {row["metric"] for row in found.values()}
    assert {"kl", "arr", "positions_read", "arr_of_layer", "kl_minus_quest", "kl_at_age", "needle", "tokens_per_step",
            "first_divergence", "kl_at_bytes", "kl_at_bytes_minus_quest", "kl_drift"} <= metrics  # fmt: skip
    assert {f"{m}_by_{name}" for m in ("kl", "arr") for name in SENSITIVITIES} <= metrics
    read = {name: found[f"quality/positions_read/{name}/one/560/96"]["value"] for name in ("hybrid", "snapkv", "quest")}
    assert read["hybrid"] == read["snapkv"] == 96 < read["quest"]
    assert found["quality/kl_at_bytes/hybrid/one/560/96"]["positions"] > read["quest"]
    assert {row["refresh_every"] for row in found.values() if row["metric"] == "kl_drift"} == {0, 16, 64}
    others = {row["metric"] for row in found.values() if row["draft"] == "two"}
    assert {"kl", "arr_of_layer", "tokens_per_step", "first_divergence", "needle"} <= others
    for draft, name in (("one", " of budget any: target layers 1, draft layers 0, 5 of 28 free"), ("two", "default ")):
        assert name in found[f"quality/kl/hybrid/{draft}/560/96"]["conditions"]
    table = make_sensitivity_table(list(found.values()), "one")
    assert table.row_count == 3 + 2 + 3 + 2 + 4  # a window of 128 is more than the budget

    measure.parts = ["drift"]
    drift = list(measure)
    assert {row["metric"] for row in drift} == {f"kl_drift{end}" for end in ("", "_minus_refresh0", "_minus_refresh64")}
    paired = [row["name"] for row in drift if "minus" in row["metric"]]
    assert len(paired) == len(set(paired)) == 6
    with pytest.raises(ValueError, match="parts: 'speed' is none of table, ages"):
        dataclasses.replace(measure, parts=["speed"])
    with pytest.raises(ValueError, match="budgets: 96 is there more than once"):
        dataclasses.replace(measure, budgets=[96, 96])


def test_intervals_cover():
    rng = np.random.default_rng(1)
    found = [interval(rng.exponential(size=24)) for _ in range(300)]
    assert all(low < mean < high for mean, low, high in found)
    assert 0.87 < np.mean([low < 1 < high for _, low, high in found]) < 0.98
    assert interval([2.0] * 5) == (2, 2, 2)


def test_report(tmp_path):
    rows = [
        {"name": f"{selector}{budget}{value}", "metric": "kl", "selector": selector, "draft": "a/d", "context": 64,
         "budget": budget, "value": value, "low": value / 2, "high": 2 * value}
        for selector, value in (("hybrid", 0.1), ("quest", 0.2)) for budget in (32, 16)
    ]  # fmt: skip
    table = make_table([{**rows[0], "value": 9.0}, *rows], "kl", "a/d")
    assert [column.header for column in table.columns] == ["selector", "64, 32", "64, 16"]
    assert [next(column.cells) for column in table.columns] == ["hybrid", *["0.100 (0.050–0.200)"] * 2]
    pytest.importorskip("matplotlib")
    layers = [{**rows[0], "name": f"{context}{layer}", "metric": "arr_of_layer", "context": context, "layer": layer}
              for context in (64, 128) for layer in range(3)]  # fmt: skip
    names = ["quality-kl-a-d.png", "quality-layers-a-d-64-32.png", "quality-layers-a-d-128-32.png"]
    assert [path.name for path in draw_plots([*rows, *layers], tmp_path)] == names
