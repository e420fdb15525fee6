"""The benchmarks and the memory plan, on tiny pairs: names, arithmetic, and what is left out."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from tiny_models import compile_tiny, greedy, random_prompts, tiny_pair
from typer.testing import CliRunner

from dustin_compile import DustinConfig, compile_pair, kv_cache
from dustin_compile.benchmark import grid, report
from dustin_compile.benchmark.engines import ENGINES, MODES, Engines, TransformersDecoder, expected_tokens
from dustin_compile.benchmark.grid import Grid, best_gamma
from dustin_compile.benchmark.pairs import BenchPair, Models, make_pair
from dustin_compile.benchmark.report import draw_plots
from dustin_compile.benchmark.results import read_rows
from dustin_compile.benchmark.text import TextRun
from dustin_compile.cli import app
from dustin_compile.graphs.state import new_state
from dustin_compile.kv_cache import plan_memory

FIELDS = {"name", "value", "unit", "gpu", "commit", "versions", "date", "conditions", "pair", "engine", "context",
          "batch", "synthetic"}  # fmt: skip


def run_bench(output, *options):
    sizes = ["--pair", "tiny", "--contexts", "100", "--batches", "2", "--budget", "80", "--gamma", "2"]
    place = ["--device", "cpu", "--no-compile", "--output", str(output)]
    return CliRunner().invoke(app, ["bench", *sizes, "--gammas", "1,2", *place, *options])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What the tiny grid writes, by name."""
    output = tmp_path_factory.mktemp("bench") / "step.jsonl"
    result = run_bench(output)
    assert result.exit_code == 0, result.output
    assert all(engine in result.stdout for engine in ENGINES)
    return {row["name"]: row for row in read_rows(output)}


def test_every_engine_has_its_rows(rows):
    assert all(row.keys() >= FIELDS for row in rows.values())
    for engine in ENGINES:
        assert rows[f"tokens_per_second/{engine}/tiny/100x2"]["synthetic"] is (engine in MODES)
        if engine != "dustin+":
            assert f"step_us/{engine}/tiny/100x2" in rows
        if engine in MODES:
            assert rows[f"tokens_per_second_best_gamma/{engine}/tiny/100x2"]["gamma"] in (1, 2)
    for part in ("draft", "score", "select", "verify", "accept"):
        assert rows[f"step_part_us/{part}/tiny/100x2"]["value"] > 0


def test_the_key_rows_follow_from_the_step(rows):
    step, vanilla = rows["step_us/tiny/100x2"], rows["step_us/vanilla/tiny/100x2"]
    assert step["engine"] == "dustin+" and step["gamma"] == 2 and step["acceptance"] == 0.75
    assert step["tokens_per_step"] == 1 + 0.75 + 0.75**2
    assert "synthetic" in step["conditions"] and "synthetic" not in vanilla["conditions"]
    rate = 2 * step["tokens_per_step"] / step["value"] * 1e6
    assert rows["tokens_per_second/dustin+/tiny/100x2"]["value"] == pytest.approx(rate, rel=1e-3)
    for baseline in ("vanilla", "transformers", "classic"):
        ratio = rate / rows[f"tokens_per_second/{baseline}/tiny/100x2"]["value"]
        speedup = rows[f"decode_speedup_vs_{baseline}/tiny/100x2"]
        assert speedup["value"] == pytest.approx(ratio, rel=1e-3)
        assert speedup["baseline_us"] == rows[f"step_us/{baseline}/tiny/100x2"]["value"]
        assert f"baseline {baseline}" in speedup["conditions"] and "gamma 2" in speedup["conditions"]
    assert "StaticCache, eager" in rows["decode_speedup_vs_transformers/tiny/100x2"]["conditions"]
    assert "scores of 6 heads in 3 layers of the target and 4 heads in 2 layers of the draft" in step["conditions"]


def test_vanilla_is_held_against_its_roofline(rows):
    vanilla = rows["step_us/vanilla/tiny/100x2"]
    bandwidth = float(re.search(r"at the (\S+) TB/s of a copy", vanilla["conditions"])[1]) * 1e12
    # 3 layers: q and o, k and v, gate, up and down, their biases, two norms; then the norm, the head, and K and V.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 64 + 32 + 32 + 2 * 64
    numbers = 3 * layer + 64 + 96 * 64 + 2 * 101 * (3 * 2 * 2 * 16)
    assert vanilla["roofline_us"] == pytest.approx(4 * numbers / bandwidth * 1e6, rel=0.01, abs=0.1)
    assert vanilla["roofline_ratio"] == pytest.approx(vanilla["value"] / vanilla["roofline_us"], rel=0.02)


def test_only_the_engines_asked_for_are_measured_in_their_order(tmp_path):
    result = run_bench(tmp_path / "step.jsonl", "--engines", "transformers,classic,dustin")
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("100x2: ")]
    assert told == ["100x2: transformers", "100x2: classic", "100x2: dustin"]
    names = {row["name"] for row in read_rows(tmp_path / "step.jsonl")}
    assert names == {f"{metric}/{engine}/tiny/100x2" for metric in ("step_us", "tokens_per_second")
                     for engine in ("transformers", "classic", "dustin")} | {
        f"decode_speedup_vs_{baseline}/dustin/tiny/100x2" for baseline in ("transformers", "classic")
    }  # fmt: skip


def test_an_engine_left_out_takes_no_other_along(tmp_path, monkeypatch):
    monkeypatch.setattr(grid.Run, "is_late", lambda self, context, batch, what: what == "magicdec")
    assert run_bench(tmp_path / "step.jsonl", "--engines", "classic,magicdec,dustin").exit_code == 0
    names = {row["name"] for row in read_rows(tmp_path / "step.jsonl")}
    assert "decode_speedup_vs_classic/dustin/tiny/100x2" in names
    assert not any("magicdec" in name for name in names)


def test_a_point_needs_no_room_for_a_prefill(monkeypatch):
    monkeypatch.setattr(kv_cache, "device_memory", lambda device: 2**30)
    bench = make_pair("tiny", torch.device("cpu"), torch.float32, compile=False, prefill_chunk=2048)
    run = grid.GridRun(bench, Grid(contexts=[100], batches=[2]), lambda message: None)
    assert run.plan.weights < run.needed(2048, 2) < run.plan.total(2, 2048 + grid.HEADROOM)


def test_a_red_check_stops_the_timing(tmp_path, monkeypatch):
    def ready(function, device):  # a graph that launches nothing
        function()
        return lambda: None

    monkeypatch.setattr(grid, "ready", ready)
    result = run_bench(tmp_path / "step.jsonl", "--engines", "dustin+")
    assert result.exit_code == 1
    assert "100x2: the replay's lengths are [100, 100]" in result.stderr
    assert not (tmp_path / "step.jsonl").exists()


@pytest.mark.parametrize("name", ["tokens", "query", "keys", "values"])
def test_a_replay_must_leave_what_the_step_leaves(name):
    expected = {"tokens": torch.arange(4), **{key: torch.ones(4) for key in ("query", "keys", "values")}}
    grid.check_same(expected, expected)
    with pytest.raises(grid.WrongResult, match=name):
        grid.check_same({**expected, name: 2 * expected[name]}, expected)


def test_plots_show_each_pair_and_batch(rows, tmp_path):
    paths = draw_plots(rows.values(), tmp_path)
    assert [path.name for path in paths] == ["tokens_per_second-tiny-2.png", "step_by_part-tiny-2.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_plots_of_other_gpus_and_acceptances_are_apart(tmp_path):
    def row(engine, gpu, value, **fields):
        return {"name": f"tokens_per_second/{engine}/p/8x1", "pair": "p", "engine": engine, "context": 8, "batch": 1,
                "gpu": gpu, "value": value, **fields}  # fmt: skip

    rows = [row("vanilla", "NVIDIA H200", 1, synthetic=False)]
    rows += [row("dustin+", "NVIDIA H200", 2, synthetic=True, acceptance=rate) for rate in (0.5, 0.75)]
    rows += [row("dustin+", "none (x86_64)", 3, synthetic=True, acceptance=0.75)]
    groups = {key[-1]: [row["value"] for row in group] for key, group in report._groups(rows)}
    assert groups == {"-acceptance-0.5": [1, 2], "": [1, 2], "-none-x86_64": [3]}


def test_no_measurement_begins_after_the_minutes(tmp_path):
    result = run_bench(tmp_path / "step.jsonl", "--minutes", "0")
    assert result.exit_code == 0
    for left_out in ("vanilla, classic, magicdec, dustin, dustin+", "transformers"):
        assert f"100x2: {left_out}: left out, 0 minutes are over" in result.stderr
    assert not (tmp_path / "step.jsonl").exists()


def test_points_that_do_not_fit_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_cache, "device_memory", lambda device: 2**18)
    result = run_bench(tmp_path / "step.jsonl")
    assert result.exit_code == 0
    assert "100x2: transformers: left out, it needs" in result.stderr
    assert not (tmp_path / "step.jsonl").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--engines", "eagle"),
        ("--contexts", "many"),
        ("--contexts", "1"),
        ("--contexts", "262144"),
        ("--acceptance", "2"),
        ("--pair", "gpt"),
        ("--gamma", "40"),
        ("--gammas", "30"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, option, value):
    result = run_bench(tmp_path / "step.jsonl", option, value)
    assert result.exit_code == 1
    assert f"{option[2:]}=" in result.stderr and value in result.stderr
    assert "Traceback" not in result.output


def test_vanilla_and_transformers_are_greedy_decoding():
    target, draft = tiny_pair()
    input_ids, mask = random_prompts([40, 40])
    expected = greedy(target, input_ids, mask, 20)
    vanilla = Engines(compile_tiny(target, draft), None).engine_pair("vanilla", 4)
    output = vanilla.generate(input_ids, max_new_tokens=20)
    assert torch.equal(output.sequences, expected)
    assert output.stats.steps == 19 and output.stats.tokens_per_step == 1

    with torch.no_grad():
        decoder = TransformersDecoder(target, 2, 64, compile=False)
        tokens = [decoder.prefill(input_ids, chunk=16)]
        for position in range(40, 59):
            tokens.append(decoder.decode(tokens[-1], torch.tensor([[position]])))
    assert torch.equal(torch.cat(tokens, 1), expected[:, 40:])


def text_run(batch):
    target, draft = tiny_pair(num_hidden_layers=1)

    def tokenizer(text, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([list(text[-2000:].encode("ascii", "replace"))]) % 96)

    bench = BenchPair("smollm2", compile_tiny(target, draft), Models(target, draft, 1.0, tokenizer), "default profile")
    return TextRun(bench, Grid(contexts=[60], batches=[batch]), 20, lambda message: None)


def test_real_text_is_decoded_by_every_engine():
    rows = {row["name"]: row for row in text_run(4)}
    for engine in ENGINES:
        rate = rows[f"tokens_per_second/{engine}/smollm2/60x4"]
        assert rate["synthetic"] is False and rate["steps"] <= 19
    assert rows["tokens_per_second/vanilla/smollm2/60x4"]["roofline_us"] > 0
    assert rows["tokens_per_second/classic/smollm2/60x4"]["agreement_with_vanilla"] == 1  # fp32, and lossless
    assert rows["tokens_per_second/transformers/smollm2/60x4"]["agreement_with_vanilla"] == 1
    assert rows["decode_speedup_vs_classic/smollm2/60x4"]["baseline_us"] > 0


def test_real_text_refuses_a_batch_that_would_be_filled_up():
    with pytest.raises(ValueError, match=r"batches=\[6\] must be powers of two"):
        text_run(6)


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.75, 4), (0.0, 2), (1.0, 3)])
def test_drawn_acceptance_gives_the_expected_tokens_a_step(acceptance, gamma):
    pair = compile_tiny(*tiny_pair(num_hidden_layers=1))
    generated = Engines(pair, acceptance).engine_pair("dustin+", gamma)
    input_ids, mask = random_prompts([20] * 16)
    stats = generated.generate(input_ids, mask, max_new_tokens=80, seed=0).stats
    expected = expected_tokens(acceptance, gamma)
    if acceptance in (0.0, 1.0):  # nothing is left to chance but the cut at the end
        assert stats.tokens_per_step == pytest.approx(expected, rel=0.04)
    else:  # some 400 steps, whose standard deviation is 1.6
        assert stats.tokens_per_step == pytest.approx(expected, abs=0.25)


def test_the_best_gamma_weighs_draft_against_verify():
    asked = Grid(contexts=[2], batches=[1], gammas=range(1, 9))
    parts = {"draft": 4.0, "draft_dense": 40.0, "score": 0.2, "select": 0.1, "verify": 5.0, "verify_dense": 15.0,
             "accept": 0.1}  # fmt: skip
    best = {engine: best_gamma(engine, parts, asked) for engine in MODES}
    # Tokens over time by hand: dustin+ 2.734 / 8.4 at 3, 2.3125 / 7.4 at 2, 3.051 / 9.4 at 4.
    assert best["dustin+"] == 3
    assert best["dustin"] == 1
    assert best["magicdec"] > best["dustin+"]


def test_the_memory_plan_equals_what_is_allocated():
    target, draft = tiny_pair()
    plan = plan_memory(target, draft, DustinConfig())
    weights = sum(p.nbytes for model in (target, draft) for p in model.parameters())
    buffers = sum(b.nbytes for model in (target, draft) for b in model.buffers())
    assert plan.weights == weights + buffers
    pair = compile_tiny(target, draft)
    state = new_state(pair._generation.target, pair._generation.draft, pair.config, 3, 200)
    caches = (state.target_cache, state.draft_cache)
    assert plan.caches(3, 200) == sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    # Merged weights are views: nothing is added.
    assert plan_memory(target, draft, pair.config).weights == plan.weights
    shared = plan_memory(target, target, DustinConfig())
    assert shared.weights < plan.weights and shared.caches(1, 1) == plan.caches(1, 1)


def test_the_plan_counts_the_draft_on_a_fake_1_gb_device(monkeypatch, capsys):  # trap 32
    monkeypatch.setattr(kv_cache, "device_memory", lambda device: 2**30)
    target, draft = tiny_pair()
    with pytest.warns(UserWarning, match="no profile"):
        compile_pair(target, draft, verbose=True)
    plan = plan_memory(target, draft, DustinConfig())
    printed = capsys.readouterr().out
    for batch in (1, 4, 16):
        length = plan.largest_length(batch)
        assert f"{length:,}" in printed
        assert plan.total(batch, length) <= 2**30 < plan.total(batch, length + 1)
        target_alone = plan.weights + batch * length * plan.target_position
        assert plan.total(batch, length) > target_alone + batch * length * plan.draft_position
    rows = plan.largest_batch(4096)
    assert plan.total(rows, 4096) <= 2**30 < plan.total(rows + 1, 4096)
    assert plan.largest_length(10**6) == 0


def test_results_are_json_lines(tmp_path):
    from dustin_compile.benchmark.results import append_rows, make_row

    for value in (1.23456, 20000.4):
        append_rows(tmp_path / "new" / "rows.jsonl", [make_row("x", value, "us", torch.device("cpu"), "none")])
    lines = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["value"] for line in lines] == [1.235, 20000.0]
