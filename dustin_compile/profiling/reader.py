"""A model that reads one text at a time, densely, and shows what any of its heads attends to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dustin_compile.adapter import CausalModel

CHUNK = 512  # tokens of a text that go through the model at once; the queries of all heads are kept of so many


class Reader:
    """Runs a model over texts of at most `capacity` tokens.

    Attention maps exist for one layer at a time, and only for the queries that are asked for.

    Args:
        model: a causal LM that compile_pair takes.
        vocab_size: logits that count.
        capacity: positions of its cache.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, capacity: int):
        config = model.config
        self.layers, self.query_heads = config.num_hidden_layers, config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        heads = [(layer, head) for layer in range(self.layers) for head in range(self.query_heads)]
        self.model = CausalModel(model, heads, vocab_size, compile=False)
        self.cache = self.model.new_cache(1, capacity)

    def forward(self, tokens: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """One pass of tokens [T] at positions start..: hidden states [1, T, hidden], queries [1, T, all heads, D]."""
        return self.model.forward(tokens[None], self._lengths(start), self.cache, None)

    def read(self, tokens: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Read tokens [n], n > 0, behind the `start` that were read before; what `forward` says of the last of them."""
        for low in range(0, len(tokens), CHUNK):
            hidden, queries = self.forward(tokens[low : low + CHUNK], start + low)
        return hidden[:, -1:], queries[:, -1:]

    def choose(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens behind hidden states [1, T, hidden], [T]."""
        return self.model.logits(hidden)[0].argmax(-1)

    def mean_attention(self, queries: Tensor, length: int) -> Tensor:
        """Attention to the first `length` positions, mean over queries [1, T, all heads, D], [capacity] fp32."""
        return self.model.score(queries, self.cache, self._lengths(length))[0]

    def attention(self, queries: Tensor, length: int) -> Iterator[Tensor]:
        """The same for each layer in turn and not averaged, [T, query heads, length] fp32."""
        by_layer = queries[0].float().unflatten(1, (self.layers, self.kv_heads, -1))  # [T, layers, Hkv, group, D]
        for layer in range(self.layers):
            keys = self.cache.key[layer, 0, :length].float()
            logits = torch.einsum("thgd,nhd->thgn", by_layer[:, layer], keys)
            yield (logits * self.model.scale).softmax(-1).flatten(1, 2)

    def _lengths(self, length: int) -> Tensor:
        return torch.tensor([length], dtype=torch.int32, device=self.model.device)
