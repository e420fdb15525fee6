"""Tiny random models of the supported families, and prompts for them."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,  # peaked enough that argmax is not decided by rounding
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
FAMILIES = {
    "llama": lambda **kwargs: LlamaConfig(rope_parameters=LLAMA3_ROPE, **kwargs),
    "qwen2": lambda **kwargs: Qwen2Config(rope_parameters=YARN_ROPE, **kwargs),
    "qwen3": lambda **kwargs: Qwen3Config(head_dim=32, **kwargs),
    "mistral": lambda **kwargs: MistralConfig(sliding_window=None, **kwargs),
}


def tiny_model(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """A random fp32 model of a family; changes override SHAPE."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**{**SHAPE, **changes}), dtype=torch.float32)
    return model.eval()


def tiny_pair(family: str = "llama", noise: float = 0.004, **changes) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that agrees with it often but not always: the target with noise on its weights."""
    target, draft = tiny_model(family, **changes), tiny_model(family, **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return target, draft


def random_prompts(lengths: list[int], vocab_size: int = 96, seed: int = 1, side: str = "left"):
    """input_ids and attention_mask [B, longest] of random prompts, padded with 0 on a side."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        columns = slice(width - length, width) if side == "left" else slice(0, length)
        input_ids[row, columns] = torch.randint(0, vocab_size, (length,), generator=generator)
        mask[row, columns] = 1
    return input_ids, mask
