"""The whole measurement, in order of importance, as rows of bench/results/quality.jsonl."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dustin_compile.benchmark.results import Row, make_row
from dustin_compile.compatibility import max_length, shared_vocab_size
from dustin_compile.config import DustinConfig
from dustin_compile.profile import SETTINGS, Head, Profile, checksum, default_profile, find_profile, find_repeated
from dustin_compile.profiling.fingerprint import fingerprint
from dustin_compile.profiling.haystack import DEPTHS, read_book
from dustin_compile.profiling.search import scoring_cost
from dustin_compile.quality.bootstrap import interval
from dustin_compile.quality.engine import Engine
from dustin_compile.quality.evaluate import (
    Generated,
    Key,
    Scores,
    compare_on_text,
    generate,
    read_prompts,
    room_for,
)
from dustin_compile.quality.prompts import NEEDLES, TEST_PART, TextTooShortError, pad, take_passages, take_trials
from dustin_compile.quality.selectors import PAGE, SELECTORS, Settings

TAIL = 272  # tokens at a text's end, in which the steps lie
OFFSETS = tuple(range(32, 257, 32))
AGES = (64, 256, 1024)
ANSWER_TOKENS = 24
CONTINUED_TOKENS = 64
DRIFT_TOKENS = 1024
DRIFT_BIN = 64
REFRESHES = (0, 64, 16)
FREE_SELECTORS = ("full", "hybrid", "unsmoothed", "oracle", "quest", "snapkv", "history", "streaming", "draft")
PAIRED = ("history", "draft", "streaming", "snapkv", "quest", "unsmoothed", "sum", "hybrid_3", "reselect", "oracle")
TEACHER_FORCED = "teacher forcing, the draft attending densely"
FREE_RUNNING = "free running, the draft attending sparsely, as by default"
UNITS = {
    "kl": "nats",
    "delta_loglik": "nats",
    "positions_read": "positions",
    "tokens_per_step": "tokens",
    "first_divergence": "tokens",
}
PARTS = ("table", "ages", "needles", "continuation", "bytes", "sensitivity", "drift", "others")
SKIPPING = "layer-skip-24"  # of SmolLM2-135M-Instruct
# Dropped one by one, each that which changes KL least, on 192 tokens of the book's calibration part.
KEPT_LAYERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29)
HEAD_COUNTS = (1, 2, 4, 8)
HEAD_PASSAGES = 4  # of the book's calibration part, to rank heads with


@dataclass
class QualityRun:
    """Measures a target with one or more drafts; iterate over it for the rows, which come as they are measured.

    Args:
        target: the target.
        model: its name, for the rows.
        drafts: by name; the first is measured in everything, the others in the main table and in free running.
        tokenizer: of them all.
        profiles: of a draft's name, one or more, each for its own budget and for those that it is the nearest to. A
            draft that has none takes the cached profiles that `compile_pair` would take, and without one of these
            `default_profile`.
        contexts: tokens of the texts, the steps in their last 272 included.
        budgets: positions of the sets.
        prompts: of each kind and context.
        parts: names of PARTS, in the order in which to measure; "others" are the further drafts.
        text: prose, its second half to measure with and its first to rank heads; None: the end of the book.
        minutes: no part begins later than this.
        tell: called with messages.

    Attributes:
        left_out: parts that time did not allow, or that the models have too few positions or the text too few tokens
            for.

    Raises:
        ValueError: a context or budget is out of range, there is no such part, or a profile is another pair's, does
            not fit, or is one of two for the same budget.
    """

    target: PreTrainedModel
    drafts: dict[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    model: str = "target"
    profiles: Mapping[str, Sequence[Profile]] = field(default_factory=dict)
    contexts: Sequence[int] = (4096, 2048, 8192)
    budgets: Sequence[int] = (512, 256, 128)
    prompts: int = 24
    parts: Sequence[str] = PARTS
    gamma: int = 4
    text: str | None = None
    minutes: float = 5.0
    tell: Callable[[str], None] = print
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if strangers := [name for name, found in self.profiles.items() if found and name not in self.drafts]:
            raise ValueError(f"profiles: {strangers[0]!r} is none of the drafts {', '.join(self.drafts)}")
        for name in ("contexts", "budgets", "parts"):
            if twice := find_repeated(getattr(self, name)):
                raise ValueError(f"{name}: {twice[0]} is there more than once")
        self.positions = min(max_length(self.target, draft) for draft in self.drafts.values())
        for context in self.contexts:
            if not 2 * TAIL <= context <= self.positions:
                raise ValueError(
                    f"contexts: {context} must be in {2 * TAIL}..{self.positions}, the positions that target and "
                    "drafts all have"
                )
        for budget in self.budgets:
            DustinConfig(budget=budget, gamma=self.gamma)
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts: {part!r} is none of {', '.join(PARTS)}")
        if self.prompts < 2:
            raise ValueError(f"prompts={self.prompts} must be at least 2")
        if self.gamma + 2 > TAIL - OFFSETS[-1]:
            raise ValueError(f"gamma={self.gamma} must be at most {TAIL - OFFSETS[-1] - 2}")
        self.middle = 4096 if 4096 in self.contexts else max(self.contexts)
        self.middle_budget = 256 if 256 in self.budgets else min(self.budgets)
        self.chosen = {(name, budget): self._choose_profile(name, budget)
                       for name in self.drafts for budget in self.budgets}  # fmt: skip
        self.differences: dict[tuple[str, str], dict[int, Tensor]] = {}  # see `pool`

    def _choose_profile(self, draft: str, budget: int) -> tuple[Profile, str]:
        """The profile that a draft has for a budget, or the nearest, and what to call it."""
        config = DustinConfig(budget=budget, gamma=self.gamma)
        models = self.target, self.drafts[draft]
        if profiles := self.profiles.get(draft):
            if twice := find_repeated([profile.budget for profile in profiles]):
                raise ValueError(f"profiles: {draft} has more than one of budget {twice[0]}")
            profile = min(profiles, key=lambda found: (found.budget is None, abs((found.budget or 0) - budget)))
        elif found := find_profile(*models, config):
            profile = found
            self.tell(f"{draft}, budget {budget}: using the cached {profile}")
        else:
            self.tell(f"{draft}, budget {budget}: no profile: evenly spread layers, half the free budget to the draft")
            profile = default_profile(models[0].config, models[1].config, config)
            return dataclasses.replace(profile, **_frame(config)), "default profile"
        profile.check_models(*models)
        content = {name: getattr(profile, name) for name in ("target_heads", "draft_heads", "draft_share", *SETTINGS)}
        name = f"profile {checksum(content)[:8]} of budget {profile.budget or 'any'}"
        if profile.budget is None:  # made by hand, with the split for each budget
            profile = dataclasses.replace(profile, **_frame(config))
        self._fit(profile, config).check(models[0].config, models[1].config, config)
        return profile, name

    @staticmethod
    def _fit(profile: Profile, config: DustinConfig) -> Profile:
        with warnings.catch_warnings():  # every row says for which budget its profile was made
            warnings.simplefilter("ignore")
            return profile.fit(config)

    def __iter__(self) -> Iterator[Row]:
        self.prose = read_book(TEST_PART) if self.text is None else self.text[len(self.text) // 2 :]
        self.engines = {
            name: Engine(draft, shared_vocab_size(self.target, draft, self.tokenizer))
            for name, draft in self.drafts.items()
        }
        self.engine = Engine(self.target, min(engine.vocab_size for engine in self.engines.values()))
        for engine in self.engines.values():
            engine.vocab_size = self.engine.vocab_size
        started = time.monotonic()
        self.differences.clear()
        for name, part in self._parts():
            elapsed = time.monotonic() - started
            if elapsed > 60 * self.minutes:
                self.left_out.append(name)
                continue
            try:
                yield from part()
            except TextTooShortError as error:
                self.left_out.append(f"{name} ({error})")
                continue
            self.tell(f"{name}: {time.monotonic() - started - elapsed:.1f} s")
        yield from self.pool()
        if self.left_out:
            self.tell(f"left out: {', '.join(self.left_out)}")

    def _parts(self) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
        main, *others = self.drafts
        contexts = [self.middle, *(context for context in self.contexts if context != self.middle)]
        for part in self.parts:
            match part:
                case "table" | "needles" | "continuation" | "bytes":
                    for context in contexts:
                        yield f"{part}, {main}, {context}", partial(self.measures[part], main, context)
                case "ages":
                    ages = [age for age in AGES if self._fits(f"ages {age}", self.middle + age + self.gamma + 2)]
                    yield f"ages, {main}", partial(self.compare_ages, main, ages)
                case "sensitivity":
                    yield f"sensitivity, {main}", partial(self.vary_settings, main)
                case "drift":
                    if self._fits("drift", self.middle + room_for(DRIFT_TOKENS, self.gamma, REFRESHES)):
                        yield f"drift, {main}", partial(self.follow_drift, main)
                case "others":
                    for draft in others:
                        for each in ("table", "continuation", "needles"):
                            for context in contexts:
                                yield f"{each}, {draft}, {context}", partial(self.measures[each], draft, context)

    @property
    def measures(self) -> dict[str, Callable[[str, int], Iterator[Row]]]:
        """What is measured with a draft at a context, by part."""
        return {
            "table": self.compare,
            "needles": self.ask_needles,
            "continuation": self.continue_text,
            "bytes": self.compare_bytes,
        }

    def _fits(self, part: str, positions: int) -> bool:
        if positions <= self.positions:
            return True
        self.left_out.append(f"{part} (it needs {positions} positions)")
        return False

    def settings(self, draft: str, budget: int, positions: int | None = None, **changes) -> Settings:
        """What the profile for a budget says, with so many positions (None: the budget) and other settings changed.

        The draft's share keeps its proportion of what is free.
        """
        config = DustinConfig(budget=positions or budget, gamma=self.gamma, **changes)
        profile = self._fit(self.chosen[draft, budget][0], config)
        profile.check(self.target.config, self.drafts[draft].config, config)
        return Settings(
            budget=config.budget,
            sinks=config.sinks,
            window=config.window,
            draft_share=profile.draft_share,
            target_heads=profile.target_heads,
            draft_heads=profile.draft_heads,
        )

    def passages(self, tokens: int) -> Tensor:
        return take_passages(self.tokenizer, self.prose, self.prompts, tokens)

    def compare(self, draft: str, context: int) -> Iterator[Row]:
        """Every selector at every budget, under teacher forcing; and the hybrid against its two halves, paired."""
        settings = [self.settings(draft, budget) for budget in self.budgets]
        texts = self.passages(context)
        prompt = context - TAIL
        found = compare_on_text(
            self.engine, self.engines[draft], texts, prompt, OFFSETS, self.gamma, SELECTORS, settings
        )
        how = f"{TEACHER_FORCED}, {len(OFFSETS)} steps in the last {TAIL} tokens"
        for (selector, setting), scores in found.items():
            row = partial(self.row, draft=draft, context=context, budget=setting.budget, selector=selector, how=how)
            for metric in ("kl", "arr", "agreement", "delta_loglik", "positions_read"):
                yield row(metric, getattr(scores, metric).mean(1))
            if (context, setting.budget) == (self.middle, self.middle_budget) and selector in (
                "history", "draft", "hybrid", "oracle", "streaming",
            ):  # fmt: skip
                for layer, by_prompt in enumerate(scores.arr_by_layer.mean(2)):
                    yield row("arr_of_layer", by_prompt, suffix=f"/layer{layer}", layer=layer)
        yield from self.compare_pairs(found, draft, context, how)

    def compare_pairs(self, found: dict[Key, Scores], draft: str, context: int, how: str) -> Iterator[Row]:
        """Paired differences of the hybrid's KL and ARR: it is the better below 0 of the one and above 0 of the other.

        A row for each budget, and one for their mean.
        """
        for metric in ("kl", "arr"):
            marks = {(name, setting.budget): getattr(scores, metric).mean(1)
                     for (name, setting), scores in found.items()}  # fmt: skip
            for other in PAIRED:
                name = f"{metric}_minus_{other}"
                differences = torch.stack([marks["hybrid", budget] - marks[other, budget] for budget in self.budgets])
                self.differences.setdefault((draft, name), {})[context] = differences
                yield from self._rows_by_budget(name, differences, draft=draft, context=context, how=how)

    def pool(self) -> Iterator[Row]:
        """The same over all contexts measured, where these are more than one."""
        for (draft, name), by_context in self.differences.items():
            if len(by_context) > 1:
                contexts = ", ".join(map(str, by_context))
                how = f"{TEACHER_FORCED}, mean over contexts {contexts}, whose passages begin at about the same places"
                mean = torch.stack(list(by_context.values())).mean(0)
                yield from self._rows_by_budget(name, mean, draft=draft, context=None, how=how)

    def _rows_by_budget(
        self, metric: str, differences: Tensor, *, draft: str, context: int | None, how: str
    ) -> Iterator[Row]:
        """Rows of differences [budgets, prompts] for each budget, and for the mean of them all."""
        for budget, difference in zip((*self.budgets, None), (*differences, differences.mean(0)), strict=True):
            yield self.row(metric, difference, draft=draft, context=context, budget=budget, selector="hybrid", how=how)

    def compare_bytes(self, draft: str, context: int) -> Iterator[Row]:
        """The hybrid with so many positions that it reads the bytes that Quest reads, its page bounds included."""
        texts, prompt, history = self.passages(context), context - TAIL, context - TAIL + sum(OFFSETS) / len(OFFSETS)
        how = f"{TEACHER_FORCED}, {len(OFFSETS)} steps in the last {TAIL} tokens"

        def measure(selector: str, settings: list[Settings]) -> list[Scores]:
            found = compare_on_text(
                self.engine, self.engines[draft], texts, prompt, OFFSETS, self.gamma,
                {selector: SELECTORS[selector]}, settings,
            )  # fmt: skip
            return [found[selector, setting] for setting in settings]

        models = fingerprint(self.target), fingerprint(self.drafts[draft])
        bounds = history / PAGE  # two keys a page, and as many bytes as K and V of one position
        bases = [self.settings(draft, budget) for budget in self.budgets]
        compared = []
        for base, scores in zip(bases, measure("quest", bases), strict=True):
            total = float(scores.positions_read.mean()) + bounds
            scoring = history * scoring_cost(base.target_heads, base.draft_heads, *models)
            # Where scores cost more than all that Quest reads, there is nothing left to compare with.
            if total - scoring >= base.sinks + base.window:
                compared.append((base.budget, total, scoring, scores))
        positions = [self.settings(draft, budget, round(total - scoring)) for budget, total, scoring, _ in compared]
        hybrid = measure("hybrid", positions)
        for (budget, total, scoring, theirs), ours in zip(compared, hybrid, strict=True):
            row = partial(
                self.row, draft=draft, context=context, budget=budget, positions=round(total),
                how=f"{how}; both read the bytes of K and V of {total:.0f} positions, of which page bounds "
                f"{bounds:.0f} and scores {scoring:.0f}",
            )  # fmt: skip
            for selector, scores in (("hybrid", ours), ("quest", theirs)):
                yield row("kl_at_bytes", scores.kl.mean(1), selector=selector)
            yield row("kl_at_bytes_minus_quest", (ours.kl - theirs.kl).mean(1), selector="hybrid")

    def compare_ages(self, draft: str, ages: Sequence[int]) -> Iterator[Row]:
        """The hybrid against SnapKV's set, so many tokens after it was chosen."""
        if not ages:
            return
        texts = self.passages(self.middle + max(ages) + self.gamma + 2)
        settings = [self.settings(draft, budget) for budget in self.budgets]
        selectors = {name: SELECTORS[name] for name in ("hybrid", "snapkv")}
        steps = [age - back for age in ages for back in (24, 16, 8, 0)]
        found = compare_on_text(
            self.engine, self.engines[draft], texts, self.middle, steps, self.gamma, selectors, settings
        )
        how = f"{TEACHER_FORCED}, 4 steps in the last 24 tokens of an age; prompt of the whole context"
        for index, age in enumerate(ages):
            at = slice(4 * index, 4 * index + 4)
            for setting in settings:
                row = partial(self.row, draft=draft, context=self.middle, budget=setting.budget, how=how,
                              suffix=f"/age{age}", age=age)  # fmt: skip
                kl = {name: found[name, setting].kl[:, at].mean(1) for name in selectors}
                for name in selectors:
                    yield row("kl_at_age", kl[name], selector=name)
                yield row("kl_at_age_minus_snapkv", kl["hybrid"] - kl["snapkv"], selector="hybrid")

    def ask_needles(self, draft: str, context: int) -> Iterator[Row]:
        """Share of questions about needles that are answered right."""
        trials = take_trials(self.tokenizer, self.prose, self.prompts, context - 64)
        prompts, lengths = pad([trial.prompt for trial in trials])
        for selector, setting, out in self._generate(draft, prompts, lengths, ANSWER_TOKENS):
            answers = self.tokenizer.batch_decode([self._cut(row) for row in out.tokens.tolist()])
            right = [float(trial.text.lower() in answer.lower()) for trial, answer in zip(trials, answers, strict=True)]
            yield self.row(
                "needle", torch.tensor(right), draft=draft, context=context, budget=setting.budget, selector=selector,
                how=f"{FREE_RUNNING}, {ANSWER_TOKENS} tokens; {len(NEEDLES)} needles that no profile was made with, at "
                f"{len(DEPTHS)} depths",
            )  # fmt: skip

    def continue_text(self, draft: str, context: int) -> Iterator[Row]:
        """Tokens a step, and tokens until the first that the full cache would not have given."""
        texts = self.passages(context - TAIL)
        lengths = torch.full((len(texts),), texts.shape[1])
        reference = None
        for selector, setting, out in self._generate(draft, texts, lengths, CONTINUED_TOKENS):
            reference = out.tokens if reference is None else reference  # the full cache comes first
            row = partial(
                self.row, draft=draft, context=context, budget=setting.budget, selector=selector,
                how=f"{FREE_RUNNING}, {CONTINUED_TOKENS} tokens",
            )  # fmt: skip
            yield row("tokens_per_step", out.tokens_per_step)
            same = (out.tokens == reference).long().cumprod(1)
            yield row("first_divergence", same.sum(1).float())

    def _generate(
        self, draft: str, prompts: Tensor, lengths: Tensor, new_tokens: int
    ) -> Iterator[tuple[str, Settings, Generated]]:
        room = room_for(new_tokens, self.gamma)
        read = read_prompts(self.engine, self.engines[draft], prompts, lengths, room)
        for selector in FREE_SELECTORS:
            for budget in self.budgets:
                setting = self.settings(draft, budget)
                yield selector, setting, generate(read, new_tokens, self.gamma, selector, setting)

    def _cut(self, tokens: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return tokens[: tokens.index(end)] if end in tokens else tokens

    def vary_settings(self, draft: str) -> Iterator[Row]:
        """The hybrid with one setting changed at a time; and history by the best 1, 2, 4 and 8 heads."""
        base = self.settings(draft, self.middle_budget)
        cases: dict[tuple[int, str], list[tuple[str, object, Settings]]] = {(self.gamma, "hybrid"): []}
        same = cases[self.gamma, "hybrid"]
        for name, values in (("sinks", (0, 4, 16)), ("window", (16, 64, 128))):
            other = base.window if name == "sinks" else base.sinks
            usable = [v for v in values if v + other <= base.budget]
            same += [(name, v, self.settings(draft, base.budget, **{name: v})) for v in usable]
        same += [("reduce", how, dataclasses.replace(base, reduce=how)) for how in ("mean", "max")]
        for gamma in (2, 4, 8):
            cases.setdefault((gamma, "hybrid"), []).append(("gamma", gamma, base))
        ranked = self.rank_heads(draft, base)
        cases[self.gamma, "history"] = [
            ("heads", count, dataclasses.replace(base, target_heads=ranked[:count])) for count in HEAD_COUNTS
        ]
        texts = self.passages(self.middle)
        for (gamma, selector), varied in cases.items():
            settings = list(dict.fromkeys(setting for _, _, setting in varied))
            found = compare_on_text(
                self.engine, self.engines[draft], texts, self.middle - TAIL, OFFSETS[1::2], gamma,
                {selector: SELECTORS[selector]}, settings,
            )  # fmt: skip
            for name, value, setting in varied:
                how = f"{TEACHER_FORCED}, {len(OFFSETS) // 2} steps, {name} {value}"
                if name == "heads":
                    how += f", the best by ARR of their own on {HEAD_PASSAGES} other passages: {setting.target_heads}"
                for metric in ("kl", "arr"):
                    yield self.row(
                        f"{metric}_by_{name}", getattr(found[selector, setting], metric).mean(1), draft=draft,
                        context=self.middle, budget=base.budget, selector=selector, how=how,
                        suffix=f"/{name}{value}", **{name: value},
                    )  # fmt: skip

    def rank_heads(self, draft: str, base: Settings) -> tuple[Head, ...]:
        """All heads of the target, that with the best ARR of its own first."""
        prose = read_book() if self.text is None else self.text[: len(self.text) // 2]
        texts = take_passages(self.tokenizer, prose, HEAD_PASSAGES, self.middle)
        config = self.target.config
        heads = [(i, j) for i in range(config.num_hidden_layers) for j in range(config.num_attention_heads)]
        settings = [dataclasses.replace(base, target_heads=(head,)) for head in heads]
        found = compare_on_text(
            self.engine, self.engines[draft], texts, self.middle - TAIL, OFFSETS[-1:], self.gamma,
            {"history": SELECTORS["history"]}, settings,
        )  # fmt: skip
        rate = {setting.target_heads[0]: float(scores.arr.mean()) for (_, setting), scores in found.items()}
        return tuple(sorted(heads, key=lambda head: -rate[head]))

    def follow_drift(self, draft: str) -> Iterator[Row]:
        """KL to the dense model along a long sparse generation, for each of REFRESHES."""
        texts = self.passages(self.middle).repeat(len(REFRESHES), 1)  # side by side, which takes the time of one
        setting = self.settings(draft, self.middle_budget)
        lengths = torch.full((len(texts),), texts.shape[1])
        room = room_for(DRIFT_TOKENS, self.gamma, REFRESHES)
        read = read_prompts(self.engine, self.engines[draft], texts, lengths, room)
        periods = [refresh for refresh in REFRESHES for _ in range(self.prompts)]
        out = generate(read, DRIFT_TOKENS, self.gamma, "hybrid", setting, periods, measure=True)
        assert out.places is not None and out.kl is not None and out.active is not None  # measure=True gives them
        places, kl, active = out.places, out.kl, out.active

        def means(first: int, last: int) -> dict[int, Tensor]:
            """Mean KL of the steps that begin at new tokens first..last - 1, a prompt, by refresh_every."""
            inside = (places >= first) & (places < last) & active
            by_row = (kl * inside).sum(0) / inside.sum(0).clamp(min=1)
            return dict(zip(REFRESHES, by_row.split(self.prompts), strict=True))

        for first in range(0, DRIFT_TOKENS, DRIFT_BIN):
            for refresh_every, by_prompt in means(first, first + DRIFT_BIN).items():
                yield self.row(
                    "kl_drift", by_prompt, draft=draft, context=self.middle, budget=setting.budget, selector="hybrid",
                    suffix=f"/refresh{refresh_every}/{first + DRIFT_BIN}",
                    how=f"{FREE_RUNNING}, steps that begin at new tokens {first}..{first + DRIFT_BIN - 1}, "
                    f"refresh_every {refresh_every}; the dense model reads the same text",
                    refresh_every=refresh_every, new_tokens=first + DRIFT_BIN,
                )  # fmt: skip
        for first in (0, DRIFT_TOKENS // 2):
            found = means(first, DRIFT_TOKENS)
            for base, other in itertools.combinations(REFRESHES, 2):
                yield self.row(
                    f"kl_drift_minus_refresh{base}", found[other] - found[base], draft=draft, context=self.middle,
                    budget=setting.budget, selector="hybrid", suffix=f"/refresh{other}/{first}-{DRIFT_TOKENS}",
                    how=f"{FREE_RUNNING}, steps that begin at new tokens {first}..{DRIFT_TOKENS - 1}; refresh_every "
                    f"{other} minus {base}, by prompt: below 0 the former is the better; each reads its own text",
                    refresh_every=other, new_tokens=DRIFT_TOKENS,
                )  # fmt: skip

    def row(
        self,
        metric: str,
        by_prompt: Tensor,
        *,
        draft: str,
        context: int | None,
        budget: int | None,
        selector: str,
        how: str,
        suffix: str = "",
        **fields,
    ) -> Row:
        """A mean over prompts with its interval."""
        value, low, high = interval(by_prompt.numpy())
        profiles = "; ".join(self._describe_profile(draft, each) for each in ([budget] if budget else self.budgets))
        unit = next((unit for name, unit in UNITS.items() if metric.startswith(name)), "share")
        prose = "of the end of Moby Dick, which overlap" if self.text is None else "of a text given"
        return make_row(
            f"quality/{metric}/{selector}/{draft}/{context or 'all'}/{budget or 'all'}{suffix}",
            value,
            unit,
            self.engine.device,
            f"{how}; {len(by_prompt)} prompts {prose}; {str(self.engine.dtype).removeprefix('torch.')}, "
            f"γ {fields.get('gamma', self.gamma)}, {profiles}; 95% bootstrap interval over prompts",
            model=self.model,
            draft=draft,
            selector=selector,
            metric=metric,
            budget=budget,
            context=context,
            low=float(f"{low:.4g}"),
            high=float(f"{high:.4g}"),
            prompts=len(by_prompt),
            **fields,
        )

    def _describe_profile(self, draft: str, budget: int) -> str:
        """The profile of a draft at a budget: its name, its layers, and the split that it gives."""
        setting = self.settings(draft, budget)
        target, ahead = (", ".join(map(str, sorted({layer for layer, _ in heads})))
                         for heads in (setting.target_heads, setting.draft_heads))  # fmt: skip
        return (
            f"{self.chosen[draft, budget][1]}: target layers {target}, draft layers {ahead}, {setting.draft_share} of "
            f"{setting.free} free positions to the draft at budget {budget}"
        )


def _frame(config: DustinConfig) -> dict[str, Any]:
    """The settings that a split is a proportion of."""
    return {name: getattr(config, name) for name in ("budget", "sinks", "window")}
