"""A draft made of the target's own layers, sharing its weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from dustin_compile.adapter import share_structure
from dustin_compile.compatibility import check_model


def layer_skip(target: PreTrainedModel, keep: Sequence[int]) -> PreTrainedModel:
    """A causal LM that runs only some of the target's layers; it adds no weights.

    Args:
        target: a transformers causal LM (Llama, Mistral, Qwen2, Qwen3).
        keep: indices of the layers to run, ascending.

    Returns:
        a model of the target's class whose parameters are the target's own.

    Raises:
        IncompatibleModelError: the target is not supported.
        TypeError: it is no transformers model.
        ValueError: keep is empty, not ascending, or names a layer that does not exist.
    """
    check_model(target, "target")
    layers = target.config.num_hidden_layers
    indices = list(keep) if isinstance(keep, Sequence) else []
    valid = all(type(index) is int and 0 <= index < layers for index in indices)
    if not indices or not valid or sorted(set(indices)) != indices:
        raise ValueError(f"keep={keep!r} must be ascending layer indices of the target, 0 to {layers - 1}")
    draft = share_structure(target)
    draft.config.num_hidden_layers = len(keep)  # a copy, which all its modules share
    if getattr(draft.config, "layer_types", None):
        draft.config.layer_types = [target.config.layer_types[index] for index in keep]
    draft.model.layers = nn.ModuleList(draft.model.layers[index] for index in keep)
    for index, layer in enumerate(draft.model.layers):
        layer.self_attn.layer_idx = index
    return draft
