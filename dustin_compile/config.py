"""The settings of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AttentionMode = Literal["sparse", "dense"]


@dataclass(frozen=True, kw_only=True)
class DustinConfig:
    """Settings of a compiled pair; immutable, and checked when made.

    Args:
        gamma: tokens that the draft proposes in a step (vLLM: num_speculative_tokens).
        budget: positions in the verification set, sinks and window included.
        sinks: first positions of the history, always in the set.
        window: last positions of the history, always in the set.
        draft_share: positions taken from the draft's ranking before the target's fills the rest.
            None: what the profile says.
        verify: "sparse" reads the verification set only (approximate); "dense" reads the whole cache
            (classic speculative decoding, lossless).
        draft_attention: "sparse" lets the draft read the previous step's set and what came after it;
            "dense" its whole cache, as in the paper. It changes how many tokens are accepted, never which.
        refresh_every: with sparse verification, verify densely every so many steps and rewrite the K/V of
            the tokens accepted since; 0: never.
        prefill_chunk: prompt tokens that go through a model at once.
        compile: compile with torch.compile and, on CUDA, replay the step as one CUDA graph; False runs the same
            step eagerly. None: True on CUDA, False on a CPU, where compiling takes minutes.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    gamma: int = 4
    budget: int = 512
    sinks: int = 4
    window: int = 64
    draft_share: int | None = None
    verify: AttentionMode = "sparse"
    draft_attention: AttentionMode = "sparse"
    refresh_every: int = 0
    prefill_chunk: int = 2048
    compile: bool | None = None

    def __post_init__(self) -> None:
        for name, low in (("gamma", 1), ("budget", 1), ("sinks", 0), ("window", 1), ("refresh_every", 0)):
            _check_int(name, getattr(self, name), low)
        _check_int("prefill_chunk", self.prefill_chunk, 64)
        if self.draft_share is not None:
            _check_int("draft_share", self.draft_share, 0)
        if self.sinks + self.window + (self.draft_share or 0) > self.budget:
            raise ValueError(
                f"budget={self.budget} is too small for sinks={self.sinks}, window={self.window} and "
                f"draft_share={self.draft_share}, which it includes"
            )
        for name in ("verify", "draft_attention"):
            if getattr(self, name) not in get_args(AttentionMode):
                raise ValueError(f"{name}={getattr(self, name)!r} must be 'sparse' or 'dense'")
        if self.refresh_every and self.verify == "dense":
            raise ValueError(f"refresh_every={self.refresh_every} needs verify='sparse': dense K/V are always fresh")
        if not (self.compile is None or isinstance(self.compile, bool)):
            raise ValueError(f"compile={self.compile!r} must be True, False or None")


def _check_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}={value!r} must be an integer of at least {low}")
