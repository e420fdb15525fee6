"""What tells one model's weights from another's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dustin_compile.kv_cache import head_dim

SAMPLES = 16  # values a weight


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A model's architecture, shapes and sampled weights.

    Attributes:
        architecture: class name of the model.
        layers, query_heads, kv_heads, head_dim, hidden_size, vocab_size: of its configuration.
        weights: sha256 over evenly strided values of every weight, rounded to bfloat16, so that a float32 and a
            bfloat16 copy have one fingerprint. A float16 copy may have another: it was rounded once more.
    """

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    weights: str

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, in words."""
        return [
            "other weights" if name == "weights" else f"{name} {value}, not {getattr(other, name)}"
            for name, value in vars(self).items()
            if value != getattr(other, name)
        ]


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """The fingerprint of a causal LM. The output head does not count: it may be the embedding."""
    digest = hashlib.sha256()
    samples = []
    for name, parameter in sorted(model.base_model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].bfloat16())
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    config = model.config
    return Fingerprint(
        architecture=type(model).__name__,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        weights=digest.hexdigest(),
    )
