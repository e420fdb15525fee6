"""Semantic retrieval heads: those that look at the answer while they give it (CompressKV, arXiv 2508.02401)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dustin_compile.profile import Head
from dustin_compile.profiling.haystack import Trial
from dustin_compile.profiling.reader import Reader

ANSWER_TOKENS = 20  # that a model may spend on an answer
HEADS_PER_LAYER = 4


@dataclass
class HeadScores:
    """Attention mass on the answer while it is given, summed over tokens and trials.

    Attributes:
        answered: of the trials answered right, each token that the model emitted and the answer holds, [layers, heads].
        forced: of all trials, with the answer fed to the model, [layers, heads].
        counts: tokens in `answered`, tokens in `forced`, trials answered right, trials; int64 [4].
    """

    answered: Tensor
    forced: Tensor
    counts: Tensor

    @staticmethod
    def zero(layers: int, heads: int) -> HeadScores:
        return HeadScores(torch.zeros(layers, heads), torch.zeros(layers, heads), torch.zeros(4, dtype=torch.int64))

    def add(self, other: HeadScores) -> None:
        self.answered += other.answered
        self.forced += other.forced
        self.counts += other.counts

    @property
    def teacher_forced(self) -> bool:
        """Whether no trial was answered right, so that the answers that were fed have to serve."""
        return int(self.counts[0]) == 0

    def mean(self) -> Tensor:
        """Scores of the heads, [layers, heads]."""
        total, count = (self.forced, self.counts[1]) if self.teacher_forced else (self.answered, self.counts[0])
        return total / count


def score_heads_on(
    reader: Reader, trials: Sequence[Trial], tokenizer: PreTrainedTokenizerBase, proceed: Callable[[], bool]
) -> HeadScores:
    """Ask a model the questions of some trials.

    What two neighbouring prompts have in common at their beginning is read once.

    Args:
        proceed: called after each trial; no further one is made once it returns False.
    """
    device = reader.model.device
    scores = HeadScores.zero(reader.layers, reader.query_heads)
    before: list[int] = []
    for trial in trials:
        prompt = torch.tensor(trial.prompt, device=device)
        same = next((i for i, (a, b) in enumerate(zip(before, trial.prompt)) if a != b), 0)  # noqa: B905
        hidden, queries = reader.read(prompt[same:], same)
        before = trial.prompt
        answer = trial.prompt[slice(*trial.answer)]

        emitted: list[int] = []
        mass = torch.zeros(reader.layers, reader.query_heads)
        matches = 0
        now_hidden, now_queries = hidden, queries
        for length in range(len(prompt), len(prompt) + ANSWER_TOKENS):
            token = reader.choose(now_hidden)
            emitted.append(int(token))
            if emitted[-1] in answer:
                mass += attention_mass(reader, now_queries, length, trial.answer)[0]
                matches += 1
            if emitted[-1] == tokenizer.eos_token_id or trial.text in tokenizer.decode(emitted):
                break
            now_hidden, now_queries = reader.forward(token, length)
        if matches and trial.text in tokenizer.decode(emitted):
            scores.answered += mass
            scores.counts += torch.tensor([matches, 0, 1, 0])

        scores.forced += attention_mass(reader, queries, len(prompt), trial.answer)[0]
        for i, token_id in enumerate(answer[:-1]):
            _, now_queries = reader.forward(torch.tensor([token_id], device=device), len(prompt) + i)
            scores.forced += attention_mass(reader, now_queries, len(prompt) + i + 1, trial.answer)[0]
        scores.counts += torch.tensor([0, len(answer), 0, 1])
        if not proceed():
            break
    return scores


def attention_mass(reader: Reader, queries: Tensor, length: int, span: tuple[int, int]) -> Tensor:
    """Attention that queries [1, T, all heads, D] over `length` positions pay to a span, [T, layers, heads] fp32."""
    layers = [probs[:, :, slice(*span)].sum(-1) for probs in reader.attention(queries, length)]
    return torch.stack(layers, dim=1).cpu()


def top_heads(scores: Tensor, count: int = HEADS_PER_LAYER) -> list[list[Head]]:
    """The best heads of each layer by scores [layers, heads], the best first; of equal ones the lower."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return [[(layer, head) for head in heads] for layer, heads in enumerate(order.tolist())]
