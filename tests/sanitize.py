"""Every Triton kernel once, on small shapes, and whole steps of a tiny pair, for compute-sanitizer: `make sanitize`."""

from __future__ import annotations

import torch
from tiny_models import compile_tiny, random_prompts, tiny_pair
from torch import Tensor

from dustin_compile.ops.append_kv import append_kv
from dustin_compile.ops.dense_attention import dense_attention
from dustin_compile.ops.score_heads import score_heads
from dustin_compile.ops.select_tiered import select_tiered
from dustin_compile.ops.skinny_linear import skinny_linear
from dustin_compile.ops.sparse_attention import sparse_attention

BATCH, CAPACITY, TOKENS, BUDGET = 3, 700, 5, 128


def run_attention(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    """The ops of a layer's attention in turn, on rows that are empty, half full and full."""
    scale = head_dim**-0.5

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    keys, values = randn(2, BATCH, CAPACITY, kv_heads, head_dim), randn(BATCH, CAPACITY, kv_heads, head_dim)
    start = torch.tensor([1, 333, CAPACITY - TOKENS], dtype=torch.int32, device="cuda")
    new = randn(BATCH, TOKENS, kv_heads, head_dim)
    rotation = randn(BATCH, TOKENS, head_dim)
    query = append_kv(keys[0], values, randn(BATCH, TOKENS, heads, head_dim), new, new, rotation, rotation, start)
    for tokens in (1, TOKENS):
        dense_attention(query[:, :tokens].contiguous(), keys[0], values, start, scale)
    dense_attention(randn(BATCH, 300, heads, head_dim), keys[0], values, (start - 300).clamp(min=0), scale)
    groups = torch.tensor([[0, 0, 0, 2], [1, kv_heads - 1, 2, 2]], dtype=torch.int32, device="cuda")
    target_scores, draft_scores = (
        score_heads(randn(BATCH, tokens, 4, head_dim), keys, groups, 2, start, scale) for tokens in (1, TOKENS - 1)
    )
    indices, counts = select_tiered(draft_scores, target_scores, start, BUDGET, 4, 16, 40)
    sparse_attention(query, keys[0], values, indices, counts, start, start, scale)


def run_selection() -> None:
    """A history so long that selection takes several rounds."""
    scores = torch.rand(2, 2, 20000, device="cuda")
    lengths = torch.tensor([20000, 9000], dtype=torch.int32, device="cuda")
    select_tiered(scores[0], scores[1], lengths, 512, 4, 64, 200)


def run_products() -> None:
    """Products whose rows, outputs and depths fill their blocks, and such that do not."""
    for rows, outputs, depth in ((16, 128, 256), (5, 90, 200), (32, 64, 64)):
        x = torch.randn(rows, 1, depth, device="cuda").bfloat16()
        weight = torch.randn(outputs, depth, device="cuda").bfloat16()
        for gated in (False, True):
            skinny_linear(x, weight, weight[:, 0].contiguous(), gated=gated)


def run_steps() -> None:
    """Prefill, steps and refreshes of a tiny pair, greedy and sampled."""
    models = (model.to("cuda", torch.bfloat16) for model in tiny_pair(num_hidden_layers=2))
    pair = compile_tiny(*models, gamma=2, refresh_every=3)
    input_ids, mask = (tensor.cuda() for tensor in random_prompts([90, 1, 40]))
    for temperature in (0.0, 1.0):
        pair.generate(input_ids, mask, max_new_tokens=8, temperature=temperature, top_k=20 if temperature else None)


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        run_attention(torch.bfloat16, 128, 8, 2)
        run_attention(torch.float32, 80, 9, 3)
        run_attention(torch.float16, 256, 4, 4)
        run_selection()
        run_products()
        run_steps()
    torch.cuda.synchronize()
    print("every kernel has run")
