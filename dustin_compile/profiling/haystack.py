"""Texts to profile with: the book, and needles hidden in it."""

from __future__ import annotations

import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dustin_compile import smol

Source = TypeVar("Source", str, list[int], Tensor)

BOOK_PART = (0.70, 0.85)  # behind what the small draft was trained on; the rest is for evaluation
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
DEPTH_ERROR = 0.1  # of the text, by which a needle may miss its depth to lie behind a sentence
SENTENCE_END = re.compile(r"[.!?][\"'”’]?\s+")
SLACK = 32  # tokens by which a prompt may miss its length
WORD_END = re.compile(r"\s+")
# What is hidden, what is asked, and the words of the first that answer the second.
NEEDLES = (
    (
        "The password of the harbour gate is violet lantern.",
        "What is the password of the harbour gate?",
        "violet lantern",
    ),
    (
        "The secret number of the lighthouse is 48213.",
        "What is the secret number of the lighthouse?",
        "48213",
    ),
    (
        "The best thing to do in Lisbon is to ride the yellow tram.",
        "What is the best thing to do in Lisbon?",
        "ride the yellow tram",
    ),
    (
        "The cat of the village baker is called Marmalade.",
        "What is the cat of the village baker called?",
        "Marmalade",
    ),
    (
        "Professor Hill keeps the spare key under the blue teapot.",
        "Where does Professor Hill keep the spare key?",
        "under the blue teapot",
    ),
)


@dataclass(frozen=True)
class Trial:
    """A question about a needle in a haystack.

    Attributes:
        prompt: token ids.
        answer: range of the prompt's positions that answer the question, first and one past the last.
        text: the answer.
    """

    prompt: list[int]
    answer: tuple[int, int]
    text: str


def read_book(part: tuple[float, float] = BOOK_PART) -> str:
    """A part of Moby Dick: by default that which profiles are made with.

    Raises:
        FileNotFoundError: this is not a checkout, which alone holds the book.
    """
    path = smol.DATA / "moby_dick.txt.xz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: away from a checkout, profile with texts of your own (texts=)")
    book = lzma.decompress(path.read_bytes()).decode()
    low, high = (int(share * len(book)) for share in part)
    return book[low:high]


def spread_parts(source: Source, count: int, length: int) -> list[Source]:
    """Evenly spread parts of a text or of its tokens, which overlap where it is short for them."""
    room = max(len(source) - length, 0)
    return [source[i * room // max(count - 1, 1) :][:length] for i in range(count)]


def hide_needles(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    length: int,
    needles: Sequence[tuple[str, str, str]] = NEEDLES,
    depths: Sequence[float] = DEPTHS,
) -> list[Trial]:
    """One trial for each needle, at the depth that goes with it, with a prompt of about `length` tokens.

    A needle lies behind a sentence's end, or a word's where no sentence ends nearby. Prompts are shorter where the
    text is.

    Raises:
        ValueError: the tokenizer does not say where in a text its tokens are.
    """
    frames = (_write_prompt(tokenizer, f"{needle} ", question) for needle, question, _ in needles)
    spans = _tokenize(tokenizer, text)[1]
    room = max(length - max(len(_tokenize(tokenizer, frame)[0]) for frame in frames), 1)
    haystack = text[: spans[min(room, len(spans)) - 1][1]]
    trials = []
    for depth, (needle, question, answer) in zip(depths, needles, strict=True):
        cut = _find_boundary(haystack, depth)
        prompt = _write_prompt(tokenizer, f"{haystack[:cut]}{needle} {haystack[cut:]}", question)
        tokens, spans = _tokenize(tokenizer, prompt)
        first = prompt.index(needle) + needle.index(answer)
        inside = [i for i, (low, high) in enumerate(spans) if low < first + len(answer) and high > first]
        trials.append(Trial(tokens, (inside[0], inside[-1] + 1), answer))
    return trials


def _find_boundary(text: str, depth: float) -> int:
    """The place of a text, nearest to a depth, where a sentence has ended; if none is near, a word; if none, any."""
    wanted = round(depth * len(text))
    for boundary in (SENTENCE_END, WORD_END):
        ends = (match.end() for match in boundary.finditer(text))
        nearest = min(ends, key=lambda place: abs(place - wanted), default=None)
        if nearest is not None and abs(nearest - wanted) <= DEPTH_ERROR * len(text):
            return nearest
    return wanted


def _write_prompt(tokenizer: PreTrainedTokenizerBase, context: str, question: str) -> str:
    if tokenizer.chat_template is None:
        return f"{context}\n\nQuestion: {question}\nAnswer:"
    message = {"role": "user", "content": f"{context}\n\n{question} Answer in a few words, from the text above."}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text, and the characters that each stands for."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where its tokens are in a text; use a fast tokenizer"
        )
    found = tokenizer(text, add_special_tokens=tokenizer.chat_template is None, return_offsets_mapping=True)
    return found.input_ids, found.offset_mapping
