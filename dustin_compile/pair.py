"""A target and a draft, compiled to generate together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dustin_compile.adapter import CausalModel
from dustin_compile.compatibility import check_model, check_pair, check_tokenizers, max_length, shared_vocab_size
from dustin_compile.config import DustinConfig
from dustin_compile.generation import Generation, GenerationOutput, Request
from dustin_compile.graphs.capture import compile_region
from dustin_compile.profile import Profile, default_profile


class CompiledPair:
    """Generates with a draft that proposes and a target that verifies. Made by `compile_pair`.

    Attributes:
        config: the settings, with draft_share resolved.
        profile: the retrieval heads and the split in use.
        max_length: tokens that a row may have, prompt included.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, config: DustinConfig, profile: Profile, vocab_size: int
    ):
        share = profile.draft_share if config.draft_share is None else config.draft_share
        self.config = dataclasses.replace(config, draft_share=share)
        self.profile = profile
        self.max_length = max_length(target, draft)
        self.vocab_size = vocab_size
        self._defaults = target.generation_config
        region = compile_region if config.compile else (lambda function, dynamic: function)
        self._generation = Generation(
            CausalModel(target, profile.target_heads, vocab_size, region),
            CausalModel(draft, profile.draft_heads, vocab_size, region),
            self.config,
        )

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> GenerationOutput:
        """Continue prompts.

        Args:
            input_ids: [B, width] int64, prompts padded on the left or on the right.
            attention_mask: [B, width], 1 where a prompt has a token; None: everywhere.
            max_new_tokens: tokens to add to each row at most.
            temperature: 0 takes the likeliest token; otherwise tokens are sampled.
            top_k: sample among the k likeliest tokens only; None: among all.
            top_p: sample among the likeliest tokens that make up this probability; None: among all.
            eos_token_id: tokens that end a row; None: the target's generation_config says; []: none.
            pad_token_id: fills rows that ended early; None: the target's generation_config says, or its EOS.
            seed: of the sampling. An int serves all rows, which still differ from each other; a sequence gives
                each row its own, and a row's text then depends on nothing else in the batch. None: a random one.

        Returns:
            GenerationOutput with `sequences` [B, width + new tokens] and `stats`.

        Raises:
            ValueError, TypeError: an argument is out of range; the message names it. The pair stays usable.
        """
        request = Request.check(
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_id=self._defaults.eos_token_id if eos_token_id is None else eos_token_id,
            pad_token_id=self._defaults.pad_token_id if pad_token_id is None else pad_token_id,
            seed=seed,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
        )
        return self._generation.run(request)


def compile_pair(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    *,
    config: DustinConfig | None = None,
    profile: Profile | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> CompiledPair:
    """Make a pair that generates by draft-augmented sparse verification (Dustin, arXiv 2606.24957).

    The models are left as they are: their weights are shared, not copied. Compilation happens at the first call of
    `generate` for a batch size.

    Args:
        target: a transformers causal LM, or the name or directory of one, loaded in its own dtype, on the GPU if
            there is one.
        draft: likewise; or what `layer_skip(target, ...)` returns.
        config: settings; None: `DustinConfig()`.
        profile: retrieval heads and split of this pair; None: last-token scores of evenly spread layers and half
            the free budget to the draft, with a warning.
        tokenizer, assistant_tokenizer: of target and draft. Where they are not given, they are loaded for models
            given by name or directory, and the two are compared.

    Raises:
        IncompatibleModelError: a model is not supported, or the two do not go together; the message says why.
        ValueError: the profile does not fit the pair.
    """
    config = config or DustinConfig()
    tokenizer = tokenizer or _find_tokenizer(target)
    assistant_tokenizer = assistant_tokenizer or _find_tokenizer(draft)
    target_model, draft_model = _load(target), _load(draft)
    check_model(target_model, "target")
    check_model(draft_model, "draft")
    check_pair(target_model, draft_model)
    if tokenizer is not None and assistant_tokenizer is not None:
        check_tokenizers(tokenizer, assistant_tokenizer)
    vocab_size = shared_vocab_size(target_model, draft_model, tokenizer)
    if profile is None:
        warnings.warn(
            "no profile for this pair: scoring with evenly spread layers and half the free budget to the draft; "
            "`dustin-compile profile` finds the heads that serve it best",
            stacklevel=2,
        )
        profile = default_profile(target_model.config, draft_model.config, config)
    profile.check(target_model.config, draft_model.config, config)
    return CompiledPair(target_model, draft_model, config, profile, vocab_size)


def _load(model: str | Path | PreTrainedModel) -> PreTrainedModel:
    if not isinstance(model, str | Path):
        return model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)


def _find_tokenizer(model: str | Path | PreTrainedModel) -> PreTrainedTokenizerBase | None:
    if not isinstance(model, str | Path):
        return None
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # a directory without a tokenizer
        return None
