"""What the op benchmarks measure on: one layer of a target, and the heads of it and its draft that score."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CALLS = 24  # of an op in one CUDA graph
ROUNDS = 11
CACHES = 3  # in turn, so that none is in L2 when its turn comes
ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # relative, of a few rows against a reference in fp32


@dataclass(frozen=True)
class Shape:
    """One layer of a target, and the heads that score.

    Attributes:
        layers: of the whole target.
        heads, kv_heads, head_dim: of the target.
        draft_layers, draft_kv_heads, draft_head_dim: of the draft.
        context, batch: positions and rows of the caches.
        budget, sinks, window: of the verification set.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_layers: int = 24
    draft_heads: int = 14
    draft_kv_heads: int = 2
    draft_head_dim: int = 64
    context: int = 32768
    batch: int = 16
    budget: int = 512
    sinks: int = 4
    window: int = 64
    gamma: int = 4

    @property
    def tokens(self) -> int:
        return self.gamma + 1


LARGE = [Shape("qwen2.5-72b", 80, 64, 8, 128), Shape("qwen2.5-7b", 28, 28, 4, 128)]
TINY = [
    Shape(
        name="tiny",
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        draft_layers=3,
        draft_heads=4,
        draft_head_dim=16,
        context=96,
        batch=2,
        budget=24,
        sinks=2,
        window=8,
    )
]
