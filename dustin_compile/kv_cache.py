"""Static K/V buffers of one model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig


class KVCache:
    """K and V of every layer, allocated once, written in place.

    A row's confirmed entries are its first L positions; whatever lies behind them is garbage that nothing reads.

    Args:
        config: the model's configuration.
        batch: rows.
        capacity: positions a row.
        dtype, device: of the buffers.

    Attributes:
        key, value: [layers, batch, capacity, kv_heads, head_dim].
        layers: (K, V) of each layer, [batch, capacity, kv_heads, head_dim], views of the buffers.
    """

    def __init__(self, config: PretrainedConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device):
        shape = (config.num_hidden_layers, batch, capacity, config.num_key_value_heads, head_dim(config))
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = list(zip(self.key.unbind(), self.value.unbind(), strict=True))
        for view in (view for pair in self.layers for view in pair):
            # A larger cache must not compile anything anew: only our own ops see this dimension.
            torch._dynamo.mark_dynamic(view, 1)


def head_dim(config: PretrainedConfig) -> int:
    """Dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
