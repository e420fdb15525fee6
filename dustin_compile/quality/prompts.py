"""Texts to measure on: book passages to continue, and questions about needles hidden in them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dustin_compile.profiling.haystack import DEPTHS, Trial, hide_needles

TEST_PART = (0.85, 1.0)  # of the book: neither the small draft nor a profile was made with it
CHARACTERS = 8  # a token, at most, on average


def take_passages(tokenizer: PreTrainedTokenizerBase, text: str, count: int, tokens: int) -> Tensor:
    """Evenly spread passages of a text, which overlap where it is short, [count, tokens] int64.

    Raises:
        ValueError: the text is shorter than a passage.
    """
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    room = len(ids) - tokens
    if room < 0:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a passage of {tokens}")
    return torch.stack([ids[i * room // max(count - 1, 1) :][:tokens] for i in range(count)])


def take_trials(tokenizer: PreTrainedTokenizerBase, text: str, count: int, tokens: int) -> list[Trial]:
    """Questions about needles, in prompts of about so many tokens, at each depth in evenly spread parts of a text."""
    groups = -(-count // len(DEPTHS))
    step = max(len(text) - CHARACTERS * tokens, 0) // max(groups - 1, 1)
    parts = (text[i * step : i * step + CHARACTERS * tokens] for i in range(groups))
    return [trial for part in parts for trial in hide_needles(tokenizer, part, tokens)][:count]


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids as [B, longest] int64, padded on the right, and their lengths [B]."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return padded, torch.tensor([len(row) for row in rows])
