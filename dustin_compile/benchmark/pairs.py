"""Pairs to measure with: named shapes with random weights, and the one real pair that needs no hub."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config

from dustin_compile import smol
from dustin_compile.config import DustinConfig
from dustin_compile.loading import load_pair
from dustin_compile.pair import CompiledPair, compile_pair
from dustin_compile.profile import default_profile

MAX_POSITIONS = 2**18  # of random models


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and a draft.

    Attributes:
        target, draft: arguments of Qwen2Config.
        layers: of the whole target, of which `target` may be a slice.
    """

    target: dict[str, Any]
    draft: dict[str, Any]
    layers: int


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool = False):
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


QWEN_HALF = _sizes(151936, 896, 4864, 24, 14, 2, tied=True)
SHAPES = {
    "qwen2.5-7b": Shape(_sizes(152064, 3584, 18944, 28, 28, 4), QWEN_HALF, layers=28),
    "qwen2.5-14b": Shape(_sizes(152064, 5120, 13824, 48, 40, 8), QWEN_HALF, layers=48),
    "qwen2.5-72b": Shape(_sizes(152064, 8192, 29568, 8, 64, 8), QWEN_HALF, layers=80),
    "tiny": Shape(_sizes(96, 64, 96, 3, 4, 2), _sizes(96, 32, 64, 2, 4, 2), layers=3),
}
SMOLLM2 = "smollm2"
PAIRS = (*SHAPES, SMOLLM2)


@dataclass(frozen=True)
class Models:
    """Both models of a pair.

    Attributes:
        slice_factor: layers of the whole target for each one that is there.
        tokenizer: of real weights; None: they are random.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    slice_factor: float
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True)
class BenchPair:
    """A pair to measure; `models.target` is what transformers runs.

    Attributes:
        profile: which, in words.
    """

    name: str
    pair: CompiledPair
    models: Models
    profile: str


def make_models(name: str, device: torch.device, dtype: torch.dtype) -> Models:
    """The models of one of PAIRS; SMOLLM2 has its real weights.

    Raises:
        ValueError: there is no such pair.
        FileNotFoundError: the real pair's weights are not here.
    """
    if name not in PAIRS:
        raise ValueError(f"pair={name!r} must be one of {', '.join(PAIRS)}")
    if name == SMOLLM2:
        loaded = load_pair(smol.target_directory(), smol.draft_directory(), device=device, dtype=dtype)
        return Models(loaded.target, loaded.draft, 1.0, loaded.tokenizer)
    shape = SHAPES[name]
    target, draft = (random_model(sizes, device, dtype) for sizes in (shape.target, shape.draft))
    return Models(target, draft, shape.layers / shape.target["num_hidden_layers"], None)


def make_pair(
    name: str, device: torch.device, dtype: torch.dtype, profile: Path | None = None, **settings: Any
) -> BenchPair:
    """Compile one of PAIRS; see make_models.

    Args:
        profile: file of the pair's profile; None: the default one.
        settings: of DustinConfig.
    """
    models = make_models(name, device, dtype)
    pair = compile_models(models.target, models.draft, profile, **settings)
    return BenchPair(name, pair, models, f"profile {profile}" if profile else "default profile")


def compile_models(
    target: PreTrainedModel, draft: PreTrainedModel, profile: Path | None = None, **settings: Any
) -> CompiledPair:
    """Compile a pair to measure.

    Args:
        profile: file of the pair's profile; None: the default one.
        settings: of DustinConfig.
    """
    config = DustinConfig(**settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="vocab_size is")  # the padding differs in the real Qwen pair too
        return compile_pair(
            target, draft, config=config, profile=profile or default_profile(target.config, draft.config, config)
        )


def random_model(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Qwen2 model with random weights."""
    config = Qwen2Config(
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        **sizes,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
