"""A causal LM whose attention to the history is masked freely, for each layer, head and query. Exact, not fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dustin_compile.adapter import share_structure
from dustin_compile.kv_cache import head_dim

ATTENTION_NAME = "dustin_compile_quality"
PREFILL_TOKENS = 2**16  # that go through the model at once, of all rows

Keep = Callable[[int, Tensor], Tensor]
Observe = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Cache:
    """K and V of every layer, [layers, B, Hkv, N, D]; behind a row's length lies garbage."""

    key: Tensor
    value: Tensor

    def copy(self) -> Cache:
        return Cache(self.key.clone(), self.value.clone())

    def rows(self, rows: slice) -> Cache:
        return Cache(self.key[:, rows], self.value[:, rows])


@dataclass(frozen=True)
class Pass:
    """What one pass does in every layer; see `Engine.run`."""

    cache: Cache
    start: Tensor | None = None  # None: a prefill
    keep: Keep | None = None
    observe: Observe | None = None
    write: bool = False


class Engine:
    """Runs a transformers model over caches of ours.

    Args:
        model: Llama, Mistral, Qwen2 or Qwen3; its weights are shared.
        vocab_size: logits that count.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int):
        self.model = share_structure(model)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.config = self.model.config
        self.layers = self.config.num_hidden_layers
        self.device, self.dtype = model.device, model.dtype
        self.scale = self.model.model.layers[0].self_attn.scaling
        self.vocab_size = vocab_size

    def new_cache(self, batch: int, capacity: int) -> Cache:
        shape = (self.layers, batch, self.config.num_key_value_heads, capacity, head_dim(self.config))
        return Cache(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    def prefill(self, tokens: Tensor, cache: Cache) -> None:
        """Dense pass over [B, n] tokens from position 0. Rows may be padded on the right."""
        size = max(1, PREFILL_TOKENS // tokens.shape[1])
        for first in range(0, len(tokens), size):
            rows = slice(first, first + size)
            self._forward(tokens[rows], torch.zeros(1, dtype=torch.int64), Pass(cache.rows(rows)))

    def run(
        self,
        tokens: Tensor,
        start: Tensor,
        cache: Cache,
        keep: Keep | None = None,
        observe: Observe | None = None,
        write: bool = False,
    ) -> Tensor:
        """A pass of a block of tokens [B, T] at positions start[b].. over the history before them.

        Args:
            start: [B] int64, length of the history.
            keep: called with a layer and its queries [B, Hq, T, D]; what of the history may be read, as booleans that
                broadcast to [B, Hq, T, N]. None: all. The block itself is always read, causally.
            observe: called with a layer, its queries and the attention to the history, [B, Hq, T, N].
            write: whether the block's K and V go into the cache.

        Returns:
            logits [B, T, vocab_size] fp32.
        """
        hidden = self._forward(tokens, start, Pass(cache, start, keep, observe, write))
        return self.model.lm_head(self.model.model.norm(hidden))[..., : self.vocab_size].float()

    def _forward(self, tokens: Tensor, start: Tensor, attend: Pass) -> Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(tokens)
        positions = start.to(self.device)[:, None] + torch.arange(tokens.shape[1], device=self.device)
        embeddings = inner.rotary_emb(hidden, position_ids=positions)
        for layer in inner.layers:
            attended, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(hidden),
                position_embeddings=embeddings,
                attention_mask=None,
                attend=attend,
            )
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden


def attend_block(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    attend: Pass,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of a block [B, H, T, D] to a masked history and itself; the form that AttentionInterface asks for."""
    layer, tokens = cast(int, module.layer_idx), query.shape[2]
    past_key, past_value = attend.cache.key[layer], attend.cache.value[layer]
    if attend.start is None:
        past_key[:, :, :tokens], past_value[:, :, :tokens] = key, value
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
        output = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
        return output.transpose(1, 2), None

    seen = history(past_key, attend.start)
    if attend.keep is not None:
        seen = seen & attend.keep(layer, query)
    past = (products(query, past_key) * scaling).masked_fill_(~seen, float("-inf"))
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    block = (products(query, key) * scaling).masked_fill_(future, float("-inf"))
    probs = torch.cat((past, block), dim=-1).softmax(-1)
    to_past, to_block = probs[..., : past.shape[-1]], probs[..., past.shape[-1] :]
    if attend.observe is not None:
        attend.observe(layer, query, to_past)
    output = products(to_past.to(value.dtype), past_value.mT) + products(to_block.to(value.dtype), value.mT)
    if attend.write:
        rows = torch.arange(len(query), device=query.device)[:, None]
        positions = attend.start[:, None] + torch.arange(tokens, device=query.device)
        past_key[rows, :, positions] = key.transpose(1, 2)
        past_value[rows, :, positions] = value.transpose(1, 2)
    return output.to(query.dtype).transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, attend_block)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Each query head's rows [B, Hq, T, D] times those of its KV head [B, Hkv, N, D]: [B, Hq, T, N] fp32."""
    groups = left.unflatten(1, (right.shape[1], -1)).flatten(2, 3)
    return (groups @ right.mT).view(*left.shape[:3], right.shape[2]).float()


def history(key: Tensor, lengths: Tensor) -> Tensor:
    """Which positions of a cache [.., N, D] are below lengths[b], [B, 1, 1, N]."""
    return (torch.arange(key.shape[-2], device=key.device) < lengths[:, None])[:, None, None]


def attention(query: Tensor, key: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Softmax over the history alone of queries [B, Hq, T, D] on keys [B, Hkv, N, D]: [B, Hq, T, N] fp32."""
    logits = (products(query, key) * scale).masked_fill_(~history(key, lengths), float("-inf"))
    return logits.softmax(-1)
