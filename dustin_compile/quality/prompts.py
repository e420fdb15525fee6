"""Texts to measure on: book passages to continue, and questions about needles hidden in them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dustin_compile.profiling.haystack import DEPTHS, SLACK, Trial, hide_needles, spread_parts

TEST_PART = (0.85, 1.0)  # of the book: neither the small draft nor a profile was made with it
CHARACTERS = 8  # a token, at most, on average
# As in profiling.haystack, whose needles profiles are made with; a number of them that DEPTHS' does not divide.
NEEDLES = (
    (
        "The beekeeper of Ashford owns exactly 317 hives.",
        "How many hives does the beekeeper of Ashford own?",
        "317",
    ),
    (
        "The night train to Verona leaves from platform nineteen.",
        "From which platform does the night train to Verona leave?",
        "nineteen",
    ),
    (
        "Doctor Quill hides her diary inside the grandfather clock.",
        "Where does Doctor Quill hide her diary?",
        "grandfather clock",
    ),
    (
        "The youngest daughter of the gardener is named Rosalind.",
        "What is the youngest daughter of the gardener named?",
        "Rosalind",
    ),
    (
        "The winning ticket of the Easter raffle was number 5926.",
        "What was the number of the winning ticket of the Easter raffle?",
        "5926",
    ),
    (
        "The favourite dessert of Aunt Beatrice is plum tart.",
        "What is the favourite dessert of Aunt Beatrice?",
        "plum tart",
    ),
    (
        "The old theatre in Bristol has been painted turquoise.",
        "What colour has the old theatre in Bristol been painted?",
        "turquoise",
    ),
    (
        "The code word of the chess club is paper dragon.",
        "What is the code word of the chess club?",
        "paper dragon",
    ),
)


class TextTooShortError(ValueError):
    """A text that holds no prompt of the length asked for."""


def take_passages(tokenizer: PreTrainedTokenizerBase, text: str, count: int, tokens: int) -> Tensor:
    """Evenly spread passages of a text, which overlap where it is short, [count, tokens] int64.

    Raises:
        TextTooShortError: the text is shorter than a passage.
    """
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    if len(ids) < tokens:
        raise TextTooShortError(f"the text has {len(ids)} tokens, fewer than a passage of {tokens}")
    return torch.stack(spread_parts(ids, count, tokens))


def take_trials(tokenizer: PreTrainedTokenizerBase, text: str, count: int, tokens: int) -> list[Trial]:
    """Questions about needles, in prompts of about so many tokens, each in another of evenly spread parts of a text.

    Needles and depths take turns, so that a needle comes back at a depth after len(NEEDLES) * len(DEPTHS) trials.

    Raises:
        TextTooShortError: a part gives a prompt that is shorter by more than SLACK.
    """
    trials = []
    for i, part in enumerate(spread_parts(text, count, CHARACTERS * tokens)):
        needle, depth = NEEDLES[i % len(NEEDLES)], DEPTHS[i % len(DEPTHS)]
        trials += hide_needles(tokenizer, part, tokens, [needle], [depth])
        if len(trials[-1].prompt) < tokens - SLACK:
            raise TextTooShortError(
                f"the text gives a prompt of {len(trials[-1].prompt)} tokens about a needle, not of {tokens}"
            )
    return trials


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids as [B, longest] int64, padded on the right, and their lengths [B]."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return padded, torch.tensor([len(row) for row in rows])
