"""Tiny random models of the supported families, pairs of them, and prompts for them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from dustin_compile import CompiledPair, DustinConfig, compile_pair
from dustin_compile.profile import default_profile

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


def compile_tiny(target: PreTrainedModel, draft: PreTrainedModel, **changes) -> CompiledPair:
    """An eager pair whose budget is small enough that something is left out; changes override its settings."""
    settings = {"budget": 32, "sinks": 2, "window": 8, "compile": False, **changes}
    config = DustinConfig(**settings)
    return compile_pair(target, draft, config=config, profile=default_profile(target.config, draft.config, config))


def greedy(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, max_new_tokens: int, **kwargs) -> Tensor:
    """What transformers itself generates greedily."""
    if mask is None:
        mask = torch.ones_like(input_ids)
    kwargs = {"pad_token_id": 0, **kwargs}
    return model.generate(input_ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)


@torch.no_grad()
def check_first_divergences(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor, first: Tensor, second: Tensor
) -> None:
    """Two greedy continuations [B, new] may part only where rounding can decide between the model's top tokens.

    The logits' error in the model's dtype is measured against fp32; two of them that are closer than twice that may
    change places.
    """
    exact = copy.deepcopy(model).float()
    for row in (first != second).any(1).nonzero().flatten().tolist():
        place = int((first[row] != second[row]).nonzero()[0])
        text = torch.cat((input_ids[row][mask[row].bool()], first[row, :place]))[None]
        rounded, logits = (m(text).logits[0, -1].float() for m in (model, exact))
        chosen = logits[torch.stack((first[row, place], second[row, place]))]
        rounding = (rounded - logits).abs().max()
        assert logits.max() - chosen.min() <= 2 * rounding, (
            f"row {row} diverges at new token {place}: logits {chosen.tolist()}, rounding {rounding:.3g}"
        )
