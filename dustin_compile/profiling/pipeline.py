"""profile_pair: from two models to the profile of their pair."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dustin_compile.compatibility import max_length, shared_vocab_size
from dustin_compile.config import DustinConfig
from dustin_compile.pair import resolve_pair
from dustin_compile.paths import cache_directory
from dustin_compile.profile import Head, Profile, cached_path
from dustin_compile.profiling.fingerprint import Fingerprint, fingerprint
from dustin_compile.profiling.haystack import SLACK, Trial, hide_needles, read_book, spread_parts
from dustin_compile.profiling.plots import plot_search
from dustin_compile.profiling.reader import Reader
from dustin_compile.profiling.retrieval_heads import ANSWER_TOKENS, HeadScores, score_heads_on, top_heads
from dustin_compile.profiling.search import HeadSet, Search, SearchResult
from dustin_compile.profiling.trajectories import Groups, Recording, choose_lengths, record

PASSAGES = 6  # of a text, to record
CHARACTERS = 16  # that a token has at most, on average
WORK_VERSION = 2  # of what the phases keep on disk
# Shares of budget_seconds after which each phase begins nothing new.
DEADLINES = {"target heads": 0.4, "draft heads": 0.5, "verification steps": 0.9, "search": 1.0}


def profile_pair(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    *,
    config: DustinConfig | None = None,
    texts: Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    context: int = 4096,
    budget_seconds: float | None = None,
    seed: int = 0,
    plot: str | Path | None = None,
) -> Profile:
    """Find the heads and the split with which a pair's verification sets recover most attention.

    The profile is cached, and `compile_pair` finds it there. The same models, texts and seed give the same profile,
    unless budget_seconds cuts the work short. What is scored and recorded stays under `$DUSTIN_CACHE/profiling`: a call
    with the same arguments goes on from there when it was interrupted, and one with another budget takes seconds.

    Four phases (Dustin, arXiv 2606.24957, and CompressKV, arXiv 2508.02401): which heads of either model look at
    the answer while they find needles in haystacks; verification steps on prose, recorded with the attention of the
    target and of every candidate head; the search on these. Attention maps exist one layer at a time and for single
    queries only. Memory beside models and caches: some 0.3 GB for the longest 32k steps of a 7B pair, and for the
    search all recorded steps at once (1.3 GB there).

    Args:
        target, draft: as for `compile_pair`.
        config: budget, sinks, window and gamma to search for; None: `DustinConfig()`.
        texts: prose like what the pair will work on, each longer than twice the budget in tokens; of one that is longer
            than `context`, up to six evenly spread passages of so many tokens are read. None: Moby Dick and needles in
            it, which only a checkout has.
        tokenizer, assistant_tokenizer: as for `compile_pair`; the first is needed where the target is a loaded model.
        context: tokens of the longest texts; a warning says where those given are all shorter.
        budget_seconds: begin nothing new after so many seconds, with fewer haystacks, steps and heads; the profile's
            record says how many. None: do all.
        seed: of Optuna's sampler.
        plot: directory for figures.

    Raises:
        IncompatibleModelError: as for `compile_pair`.
        ValueError: an argument is out of range; the message names it.
        FileNotFoundError: no texts were given, and this is not a checkout.
        ImportError: Optuna, or for figures matplotlib, is not installed.
    """
    for package in ("optuna", *(("matplotlib",) if plot is not None else ())):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"profiling needs {package}: pip install 'dustin-compile[profile]'")
    config = DustinConfig() if config is None else config
    if not isinstance(config, DustinConfig):
        raise TypeError(f"config must be a DustinConfig, not {type(config).__name__}")
    if config.draft_share is not None:
        raise ValueError(f"draft_share={config.draft_share} must be None: it is what profiling finds")
    if budget_seconds is not None and not budget_seconds > 0:
        raise ValueError(f"budget_seconds={budget_seconds!r} must be positive, or None")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be in 0..{2**32 - 1}")
    if plot is not None and Path(plot).exists() and not Path(plot).is_dir():
        raise ValueError(f"plot={str(plot)!r} is not a directory")
    if context <= 2 * config.budget:
        raise ValueError(f"context={context} must be more than twice the budget={config.budget}")
    target, draft, tokenizer = resolve_pair(target, draft, tokenizer, assistant_tokenizer)
    vocab_size = shared_vocab_size(target, draft, tokenizer)
    if tokenizer is None:
        raise ValueError("tokenizer is needed to read texts with, and none comes with the target")
    capacity = context + ANSWER_TOKENS + config.gamma + SLACK
    if capacity > max_length(target, draft):
        raise ValueError(
            f"context={context}, with room for answers and proposals, needs {capacity} positions; target and draft "
            f"both have {max_length(target, draft)}"
        )
    models = fingerprint(target), fingerprint(draft)
    data = gather_data(tokenizer, texts, context, config.budget)

    on_device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), on_device, _show_progress() as progress:
        work = Work(data, models, config, target, budget_seconds, progress)
        readers = Reader(target, vocab_size, capacity), Reader(draft, vocab_size, capacity)
        scores = (
            work.score_heads("target heads", readers[0], tokenizer),
            work.score_heads("draft heads", readers[1], tokenizer),
        )
        groups = choose_groups(scores[0].mean(), models[0]), choose_groups(scores[1].mean(), models[1])
        recording = work.record_steps(readers, groups).to(target.device)
        result = work.search(recording, groups, scores[0].mean(), seed)
    profile = Profile(
        target_heads=heads_of(groups[0], result.chosen.target),
        draft_heads=heads_of(groups[1], result.chosen.draft),
        draft_share=result.chosen.draft_share,
        budget=config.budget,
        sinks=config.sinks,
        window=config.window,
        gamma=config.gamma,
        arr=result.chosen.arr,
        target=models[0],
        draft=models[1],
        versions=_versions(),
        record={
            "context": context,
            "seed": seed,
            **work.describe(scores, recording),
            **describe_search(result, groups),
        },
    )
    path = cached_path(profile)
    if is_cut(profile) and _is_whole(path):
        warnings.warn(f"the cached {path} stays: it was not cut short by budget_seconds, as this one was", stacklevel=2)
    else:
        profile.save(path)
        profile = dataclasses.replace(profile, path=path)
    if plot is not None:
        plot_search(Path(plot), {"target": scores[0].mean(), "draft": scores[1].mean()}, result)
    return profile


def is_cut(profile: Profile) -> bool:
    """Whether budget_seconds left some of the planned work undone."""
    record = profile.record
    return record["texts"] < record["texts_planned"] or min(record["haystacks"].values()) < record["haystacks_planned"]


def _is_whole(path: Path) -> bool:
    """Whether there is a profile that can be read and is not cut."""
    try:
        return not is_cut(Profile.load(path))
    except (OSError, ValueError, KeyError):  # no such file, a damaged one, one whose record says nothing
        return False


@dataclass(frozen=True)
class Data:
    """What the models read: haystacks by their length, and token ids of the texts to record."""

    haystacks: dict[int, list[Trial]]
    texts: list[list[int]]


def gather_data(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | None, context: int, budget: int) -> Data:
    """Haystacks of a quarter, a half and all of the context, and passages of at most context + 1 tokens.

    Two of the passages are haystacks, where these are long enough for the budget.

    Raises:
        ValueError, TypeError: texts is empty, not a sequence of strings, or holds one that is too short; or there are
            none, and the book is too short for the context.
    """
    if texts is not None and (isinstance(texts, str) or not all(isinstance(text, str) for text in texts)):
        raise TypeError("texts must be a sequence of strings")
    if texts is not None and not texts:
        raise ValueError("texts is empty")
    first = tokenizer("").input_ids  # a BOS token, where the model has one
    length = context + 1 - len(first)
    source = read_book() if texts is None else "\n\n".join(texts)
    tokens = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts or [source]]
    longest = max(map(len, tokens))
    if texts is None and longest < length:
        raise ValueError(
            f"context={context} is too long for the book's part, which has {longest} tokens: profile with texts of "
            "your own (texts=)"
        )
    for i, text in enumerate(tokens):
        if len(first) + len(text) < 2 * budget + 2:
            raise ValueError(
                f"texts[{i}] has {len(first) + len(text)} tokens; it needs {2 * budget + 2}, for budget={budget}"
            )
    if longest < length:
        warnings.warn(f"the longest of the texts has {longest} tokens, fewer than context={context}", stacklevel=3)
    recorded = [first + passage for text in tokens for passage in take_passages(text, length)]
    haystacks: dict[int, list[Trial]] = {}
    for prompt in (context // 4, context // 2, context):
        trials = hide_needles(tokenizer, source[: CHARACTERS * prompt], prompt)
        if not haystacks or len(trials[0].prompt) > prompt // 2:  # short texts fill only the shorter ones
            haystacks[prompt] = trials
    needles = [trial.prompt + trial.prompt[slice(*trial.answer)] for trial in haystacks[max(haystacks)]]
    if min(map(len, needles)) >= 2 * budget + 2:
        # One in between, so that a small budget_seconds leaves some of both.
        recorded.insert(len(recorded) // 2, needles[1])
        recorded.append(needles[3])
    return Data(haystacks, recorded)


def take_passages(text: list[int], length: int) -> list[list[int]]:
    """As many passages of a text as it holds, but at most PASSAGES, evenly spread; all of a shorter one."""
    return spread_parts(text, min(PASSAGES, max(1, round(len(text) / length))), length)


class Work:
    """The phases of one profile.

    What is finished is kept on disk, under a name made from all that it depends on: an interrupted run goes on from
    there, and another budget needs only another search.

    Args:
        data: what to read.
        models: fingerprints of target and draft.
        config: settings.
        target: whose device and dtype the work runs in.
        budget_seconds: see profile_pair.
        progress: shows a bar a phase.
    """

    def __init__(
        self,
        data: Data,
        models: tuple[Fingerprint, Fingerprint],
        config: DustinConfig,
        target: PreTrainedModel,
        budget_seconds: float | None,
        progress: Progress,
    ):
        self.data, self.models, self.config = data, models, config
        self.budget_seconds, self.progress = budget_seconds, progress
        self.where = f"{target.dtype} on {target.device.type}".removeprefix("torch.")
        self.started = time.perf_counter()
        self.seconds = dict.fromkeys(DEADLINES, 0.0)
        self.recorded_texts = 0
        self.lengths = [choose_lengths(len(text), config.budget) for text in data.texts]
        key = (WORK_VERSION, models, data, self.lengths, config.gamma, budget_seconds, self.where, _versions())
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        self.directory = cache_directory() / "profiling" / digest
        self.directory.mkdir(parents=True, exist_ok=True)

    def may_begin(self, phase: str) -> bool:
        """Whether the time is not up for a phase."""
        elapsed = time.perf_counter() - self.started
        return self.budget_seconds is None or elapsed < DEADLINES[phase] * self.budget_seconds

    def score_heads(self, phase: str, reader: Reader, tokenizer: PreTrainedTokenizerBase) -> HeadScores:
        """Retrieval head scores of one model, over all haystacks."""
        task = self.progress.add_task(phase, total=sum(map(len, self.data.haystacks.values())))
        total, asked = HeadScores.zero(reader.layers, reader.query_heads), 0

        def proceed() -> bool:
            self.progress.advance(task)
            return self.may_begin(phase)

        for length, trials in self.data.haystacks.items():
            if asked and not self.may_begin(phase):
                break

            def ask(trials: list[Trial] = trials) -> dict[str, Tensor]:
                return vars(score_heads_on(reader, trials, tokenizer, proceed))

            def is_finished(tensors: dict[str, Tensor], trials: list[Trial] = trials) -> bool:
                return int(tensors["counts"][3]) == len(trials)  # the time was not up before

            total.add(HeadScores(**self._keep(phase, f"{phase.replace(' ', '-')}-{length}", ask, is_finished)))
            asked += len(trials)
            self.progress.update(task, completed=asked)
        return total

    def record_steps(self, readers: tuple[Reader, Reader], groups: tuple[Groups, Groups]) -> Recording:
        """Verification steps on all texts."""
        phase = "verification steps"
        digest = hashlib.sha256(repr(groups).encode()).hexdigest()[:8]  # where time was short, these may be others
        task = self.progress.add_task(phase, total=len(self.data.texts))
        parts: list[Recording] = []
        for i, (text, lengths) in enumerate(zip(self.data.texts, self.lengths, strict=True)):
            if parts and not self.may_begin(phase):
                break

            def run(text: list[int] = text, lengths: list[int] = lengths) -> dict[str, Tensor]:
                tokens = torch.tensor(text, device=readers[0].model.device)
                return vars(record(*readers, groups, tokens, lengths, self.config.gamma))

            parts.append(Recording(**self._keep(phase, f"steps-{digest}-{i}", run)))
            self.progress.advance(task)
        self.recorded_texts = len(parts)
        return Recording.join(parts)

    def search(
        self, recording: Recording, groups: tuple[Groups, Groups], retrieval_scores: Tensor, seed: int
    ) -> SearchResult:
        """Heads and split."""
        phase = "search"
        started = time.perf_counter()
        search = Search(recording, groups, self.models, self.config, retrieval_scores, seed)
        task = self.progress.add_task(phase, total=search.evaluations())
        search.tick = lambda: self.progress.advance(task)
        result = search.run(lambda: self.may_begin(phase))
        self.seconds[phase] = time.perf_counter() - started
        return result

    def describe(self, scores: tuple[HeadScores, HeadScores], recording: Recording) -> dict[str, Any]:
        """What was done, for the profile's record."""
        roles = dict(zip(("target", "draft"), scores, strict=True))
        return {
            "where": self.where,
            "haystacks_planned": sum(map(len, self.data.haystacks.values())),
            "haystacks": {role: int(found.counts[3]) for role, found in roles.items()},
            "answered": {role: int(found.counts[2]) for role, found in roles.items()},
            "teacher_forced": {role: found.teacher_forced for role, found in roles.items()},
            "texts_planned": len(self.data.texts),
            "texts": self.recorded_texts,
            "steps": len(recording.lengths),
            "mean_history": float(recording.lengths.float().mean()),
            "budget_seconds": self.budget_seconds,
            "seconds": {phase: round(seconds, 2) for phase, seconds in self.seconds.items()},
        }

    def _keep(
        self,
        phase: str,
        name: str,
        make: Callable[[], dict[str, Tensor]],
        is_finished: Callable[[dict[str, Tensor]], bool] = lambda tensors: True,
    ) -> dict[str, Tensor]:
        """Tensors from disk, or made and, if they are finished, written there."""
        path = self.directory / f"{name}.safetensors"
        if path.exists():
            try:
                with safe_open(path, "pt") as file:
                    self.seconds[phase] += float(file.metadata()["seconds"])
                    return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except SafetensorError as error:
                warnings.warn(f"{path} is damaged and made anew: {error}", stacklevel=2)
        started = time.perf_counter()
        tensors = make()
        seconds = time.perf_counter() - started
        self.seconds[phase] += seconds
        if is_finished(tensors):
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # of this process alone
            save_file(tensors, unfinished, {"seconds": str(seconds)})
            os.replace(unfinished, path)
        return tensors


def choose_groups(scores: Tensor, model: Fingerprint) -> Groups:
    """Candidate groups of a model by its retrieval head scores [layers, heads]."""
    return Groups.of(top_heads(scores), model.query_heads, model.kv_heads)


def heads_of(groups: Groups, chosen: Sequence[int]) -> tuple[Head, ...]:
    """The heads of chosen groups, sorted."""
    return tuple(sorted(head for group in chosen for head in groups.all[group]))


def describe_search(result: SearchResult, groups: tuple[Groups, Groups]) -> dict[str, Any]:
    """What the search found besides the profile itself, for its record."""

    def describe(found: HeadSet, equal_cost_arr: float) -> dict[str, Any]:
        return {
            "target_heads": heads_of(groups[0], found.target),
            "draft_heads": heads_of(groups[1], found.draft),
            "draft_share": found.draft_share,
            "arr": found.arr,
            "cost": found.cost,
            "equal_cost_arr": equal_cost_arr,
        }

    paper, *frontier = map(describe, [result.paper, *result.frontier], result.equal_cost_arr)
    return {
        "cost": result.chosen.cost,
        "oracle_arr": result.oracle,
        "streaming_arr": result.streaming,
        "retrieval_heads": heads_of(groups[0], result.seeds),
        "paper": paper,
        "frontier": frontier,
    }


@contextmanager
def _show_progress() -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        yield progress


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("dustin-compile", "torch", "transformers", "optuna"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "unknown"
    return found
