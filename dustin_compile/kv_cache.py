"""Static K/V buffers of one model, and the plan of a pair's memory."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dustin_compile.config import DustinConfig


class KVCache:
    """K and V of every layer, allocated once, written in place.

    A row's confirmed entries are its first L positions; whatever lies behind them is garbage that nothing reads.

    Args:
        key, value: [layers, batch, capacity, kv_heads, head_dim].

    Attributes:
        key, value: as above.
        layers: (K, V) of each layer, [batch, capacity, kv_heads, head_dim], views of the buffers.
    """

    def __init__(self, key: Tensor, value: Tensor):
        self.key, self.value = key, value
        # As tensors of their own: dynamo would hold a view to what it is a view of, and compile anew for each batch.
        self.layers: list[tuple[Tensor, Tensor]] = [
            (layer_key.data, layer_value.data)
            for layer_key, layer_value in zip(key.unbind(), value.unbind(), strict=True)
        ]
        for view in (view for pair in self.layers for view in pair):
            # A larger cache must not compile anything anew: only our own ops see this dimension.
            torch._dynamo.mark_dynamic(view, 1)

    @classmethod
    def allocate(
        cls, config: PretrainedConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Zeroed buffers for `batch` rows of `capacity` positions of a model."""
        shape = (config.num_hidden_layers, batch, capacity, config.num_key_value_heads, head_dim(config))
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def first_rows(self, count: int) -> KVCache:
        """The cache of the first rows, in the same memory."""
        return KVCache(self.key[:, :count], self.value[:, :count])


def head_dim(config: PretrainedConfig) -> int:
    """Dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a pair needs on its device, and what fits there.

    Attributes:
        available: what the device has for this process.
        weights: of both models; what they share counts once.
        target_position, draft_position: K and V of one position of one row.
        workspace_token: of a pass, for each token in it.
        workspace_row: of a step, for each row: logits and the like.
        workspace_position: of a step, for each position of each row: the scores.
        prefill_chunk: tokens of a row in the longest pass.
    """

    available: int
    weights: int
    target_position: int
    draft_position: int
    workspace_token: int
    workspace_row: int
    workspace_position: int
    prefill_chunk: int

    def caches(self, batch: int, length: int) -> int:
        """Bytes of both models' caches."""
        return batch * length * (self.target_position + self.draft_position)

    def step_workspace(self, batch: int, length: int) -> int:
        """Bytes that a step needs for a moment beyond weights and caches, an estimate."""
        return batch * (self.workspace_row + length * self.workspace_position)

    def workspace(self, batch: int, length: int) -> int:
        """The same of the larger of a prefill's and a step's passes."""
        prefill = batch * min(self.prefill_chunk, length) * self.workspace_token
        return max(prefill, self.step_workspace(batch, length))

    def total(self, batch: int, length: int) -> int:
        return self.weights + self.caches(batch, length) + self.workspace(batch, length)

    def largest_batch(self, length: int) -> int:
        """The most rows of this many positions that fit; 0 where none does."""
        return _largest(lambda batch: self.total(batch, length) <= self.available)

    def largest_length(self, batch: int) -> int:
        """The most positions that this many rows may have; 0 where none fits."""
        return _largest(lambda length: self.total(batch, length) <= self.available)

    def __str__(self) -> str:
        position = self.target_position + self.draft_position
        lines = [
            f"weights of target and draft   {_gib(self.weights)}",
            f"both caches, a position       {position / 2**10:.1f} KiB (target {self.target_position / 2**10:.1f}, "
            f"draft {self.draft_position / 2**10:.1f})",
            f"device                        {_gib(self.available)}",
            "",
            "  batch   largest length    length   largest batch",
        ]
        for batch, length in zip(PLANNED_BATCHES, PLANNED_LENGTHS, strict=True):
            lines.append(
                f"{batch:7,}   {self.largest_length(batch):14,}   {length:7,}   {self.largest_batch(length):13,}"
            )
        lines.append("  with the workspace of prefill and step; the models' own position limits apart")
        return "\n".join(lines)


PLANNED_BATCHES = (1, 4, 16, 64)
PLANNED_LENGTHS = (4096, 16384, 32768, 131072)
MOST = 2**40  # that anything could fit


def plan_memory(target: PreTrainedModel, draft: PreTrainedModel, config: DustinConfig) -> MemoryPlan:
    """Count what a pair needs: weights, both caches, and what its passes allocate."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for model in (target, draft)
        for tensor in chain(model.parameters(), model.buffers())
    }
    size = target.dtype.itemsize
    block = config.gamma + 1

    def position(model: PretrainedConfig) -> int:
        return 2 * size * model.num_hidden_layers * model.num_key_value_heads * head_dim(model)

    def token(model: PretrainedConfig) -> int:
        """The residual twice and a norm's output; and the merged gate and up with their product, or q, k and v."""
        heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
        return size * (3 * model.hidden_size + max(3 * model.intermediate_size, heads * head_dim(model)))

    # Logits in the model's dtype, of the padded vocabulary and of what counts of it.
    row = 2 * size * block * target.config.vocab_size + block * token(target.config)
    # Scores of both models in fp32, and half-precision logits of some ten heads that the kernel keeps for a moment.
    scores = 2 * 4 + 2 * 10 * config.gamma
    return MemoryPlan(
        available=device_memory(target.device),
        weights=sum(storages.values()),
        target_position=position(target.config),
        draft_position=position(draft.config),
        workspace_token=max(token(target.config), token(draft.config)),
        workspace_row=row,
        workspace_position=scores,
        prefill_chunk=config.prefill_chunk,
    )


def device_memory(device: torch.device) -> int:
    """Bytes that this process has or can get on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, by bisection."""
    return bisect.bisect_left(range(1, MOST), True, key=lambda count: not fits(count))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
