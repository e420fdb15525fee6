"""Errors for wrong arguments of the ops: they name the argument and its value, and never read the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """The tensor has this shape (None: any size), one of these dtypes, and lives on this device."""
    # Sizes are compared by == alone: dynamo cannot tell whether a symbolic size is `in` a tuple.
    sizes = zip(shape, tensor.shape, strict=False)
    if tensor.dim() != len(shape) or any(wanted is not None and wanted != size for wanted, size in sizes):
        wanted_sizes = ", ".join("any" if wanted is None else str(wanted) for wanted in shape)
        raise ValueError(f"{name} must have shape [{wanted_sizes}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {list(tensor.shape)}, strides {list(tensor.stride())}")


def check_rows(name: str, tensor: Tensor, batch: int, device: torch.device) -> None:
    """The tensor is one int32 for each row of the batch."""
    check_tensor(name, tensor, [batch], [torch.int32], device)
    check_contiguous(name, tensor)


def check_heads(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """The tensor ends in a contiguous head dimension of at most 256, as queries, keys, values and caches do."""
    check_tensor(name, tensor, shape, dtypes, device)
    if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must have a head_dim from 1 to {MAX_HEAD_DIM}, got {tensor.shape[-1]}")
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have a contiguous last dimension, got strides {list(tensor.stride())}")


def check_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Query [B, T, Hq, D] and two caches [B, N, Hkv, D] of one dtype, with Hq a multiple of Hkv."""
    check_heads("query", query, [None, None, None, None], FLOATS, query.device)
    batch, _, query_heads, head_dim = query.shape
    check_heads("key_cache", key_cache, [batch, None, None, head_dim], [query.dtype], query.device)
    check_heads("value_cache", value_cache, key_cache.shape, [query.dtype], query.device)
    if query_heads % key_cache.shape[2]:
        raise ValueError(f"query must have a multiple of the cache's {key_cache.shape[2]} heads, got {query_heads}")


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
