"""A target and a draft, compiled to generate together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dustin_compile.adapter import CausalModel
from dustin_compile.compatibility import check_model, check_pair, check_tokenizers, max_length, shared_vocab_size
from dustin_compile.config import DustinConfig
from dustin_compile.export import Backend, export_pair
from dustin_compile.generation import Generation, GenerationOutput, Request
from dustin_compile.kv_cache import plan_memory
from dustin_compile.loading import find_tokenizer, load_draft, load_target
from dustin_compile.profile import Profile, default_profile, find_profile


class CompiledPair:
    """Generates with a draft that proposes and a target that verifies. Made by `compile_pair`.

    Attributes:
        config: the settings, with draft_share and compile resolved.
        profile: the retrieval heads and the split in use.
        max_length: tokens that a row may have, prompt included.
    """

    @torch.inference_mode(False)  # merged weights outlive the caller's mode
    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, config: DustinConfig, profile: Profile, vocab_size: int
    ):
        share = profile.draft_share if config.draft_share is None else config.draft_share
        compile = target.device.type == "cuda" if config.compile is None else config.compile
        self.config = dataclasses.replace(config, draft_share=share, compile=compile)
        self.profile = profile
        self.max_length = max_length(target, draft)
        self.vocab_size = vocab_size
        self._defaults = target.generation_config
        self._generation = Generation(
            CausalModel(target, profile.target_heads, vocab_size, compile),
            CausalModel(draft, profile.draft_heads, vocab_size, compile),
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

    def export(self, directory: str | Path, *, backend: Backend, batch: int, max_length: int) -> Path:
        """Write the pair for deployment: a directory that `load_exported` runs on hardware like this one.

        Args:
            directory: new or empty.
            backend: "tensorrt" builds TensorRT engines, "aot-inductor" AOTInductor packages, which need torch alone.
            batch: rows of a request, a power of two. Down to half as many are filled up.
            max_length: tokens that a row may have, prompt included.

        Returns:
            the directory.

        Raises:
            FileExistsError: the directory is not empty.
            ImportError: TensorRT is not here; the message says what to install.
            ValueError: an argument is out of range, or TensorRT is asked for without a GPU.
        """
        return export_pair(self, directory, backend=backend, batch=batch, max_length=max_length)

    def export_tensorrt(self, directory: str | Path, *, batch: int, max_length: int) -> Path:
        """`export` with backend="tensorrt"."""
        return self.export(directory, backend="tensorrt", batch=batch, max_length=max_length)


def compile_pair(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    *,
    config: DustinConfig | None = None,
    profile: Profile | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    verbose: bool = False,
) -> CompiledPair:
    """Make a pair that generates by draft-augmented sparse verification (Dustin, arXiv 2606.24957).

    The models run and save as before: their weights are shared, not copied. Compilation happens at the first call of
    `generate` for a batch size.

    Args:
        target: a transformers causal LM, or the name or directory of one, which is loaded in bfloat16 to the GPU
            or, without one, in float32.
        draft: likewise, in the target's dtype and place; or what `layer_skip(target, ...)` returns.
        config: settings; None: `DustinConfig()`.
        profile: retrieval heads and split of this pair, or the file that holds them. None: the one that
            `profile_pair` has cached for this pair, or, where it has not, evenly spread layers and half the free
            budget to the draft; a warning says which. With other settings than a profile was searched for, its heads
            stay and its split is scaled, with a warning (`Profile.fit`).
        tokenizer, assistant_tokenizer: of target and draft. Where they are not given, they are loaded for models
            given by name or directory, and the two are compared.
        verbose: print the memory plan: weights, both caches, and the largest batch and length that fit the device.

    Raises:
        IncompatibleModelError: a model is not supported, or the two do not go together; the message says why.
        ValueError: the profile is another pair's, does not fit this one, or is damaged or too new.
    """
    config = DustinConfig() if config is None else config
    if not isinstance(config, DustinConfig):
        raise TypeError(f"config must be a DustinConfig, not {type(config).__name__}")
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    target, draft, tokenizer = resolve_pair(target, draft, tokenizer, assistant_tokenizer)
    vocab_size = shared_vocab_size(target, draft, tokenizer)
    if profile is None:
        profile = find_profile(target, draft, config)
        if profile is None:
            warnings.warn(
                "no profile for this pair: scoring with evenly spread layers and half the free budget to the draft; "
                "`dustin-compile profile` finds the heads that serve it best",
                stacklevel=2,
            )
            profile = default_profile(target.config, draft.config, config)
        else:
            warnings.warn(f"using the cached {profile}", stacklevel=2)
    profile.check_models(target, draft)
    profile = profile.fit(config)
    profile.check(target.config, draft.config, config)
    pair = CompiledPair(target, draft, config, profile, vocab_size)
    if verbose:
        print(plan_memory(target, draft, config))
    return pair


def resolve_pair(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load what is given by name, and refuse what does not go together; see `compile_pair`.

    Returns:
        target, draft and the target's tokenizer, if there is one.
    """
    if isinstance(target, str | Path):
        tokenizer = tokenizer or find_tokenizer(target)
        target = load_target(target)
    check_model(target, "target")
    if isinstance(draft, str | Path):
        assistant_tokenizer = assistant_tokenizer or find_tokenizer(draft)
        draft = load_draft(draft, target)
    check_model(draft, "draft")
    check_pair(target, draft)
    if tokenizer is not None and assistant_tokenizer is not None:
        check_tokenizers(tokenizer, assistant_tokenizer)
    return target, draft, tokenizer
