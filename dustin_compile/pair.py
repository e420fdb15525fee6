"""A target and a draft, compiled to generate together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dustin_compile.adapter import CausalModel
from dustin_compile.compatibility import (
    check_model,
    check_pair,
    check_tokenizers,
    max_length,
    shared_vocab_size,
    warn_of_hooks,
    warn_of_settings,
)
from dustin_compile.config import DustinConfig
from dustin_compile.export import Backend, export_pair
from dustin_compile.generation import Generation, Pair, Request
from dustin_compile.kv_cache import plan_memory
from dustin_compile.loading import find_tokenizer, load_draft, load_target
from dustin_compile.profile import Profile, default_profile, find_profile


class CompiledPair(Pair):
    """Generates with a draft that proposes and a target that verifies. Made by `compile_pair`.

    Attributes:
        config: the settings, with draft_share and compile resolved.
        profile: the retrieval heads and the split in use.
        vocab_size: ids below it are tokens of both models.
        max_length: tokens that a row may have, prompt included.
    """

    @torch.inference_mode(False)  # merged weights outlive the caller's mode
    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, config: DustinConfig, profile: Profile, vocab_size: int
    ):
        share = profile.draft_share if config.draft_share is None else config.draft_share
        compile = target.device.type == "cuda" if config.compile is None else config.compile
        generation = Generation(
            CausalModel(target, profile.target_heads, vocab_size, compile),
            CausalModel(draft, profile.draft_heads, vocab_size, compile),
            dataclasses.replace(config, draft_share=share, compile=compile),
        )
        defaults = target.generation_config or GenerationConfig()
        super().__init__(generation, profile, vocab_size, max_length(target, draft), defaults)

    def _choose_batch(self, request: Request) -> int:
        """As many as it has, or where a step compiles the next power of two, so that few batch sizes do."""
        rows = len(request.lengths)
        self.check_length(max(request.lengths), request.max_new_tokens)
        return 1 << (rows - 1).bit_length() if self.config.compile else rows

    def check_length(self, prompt: int, max_new_tokens: int) -> None:
        """Refuse a prompt of so many tokens with what is to be added, where the models have too few positions.

        Raises:
            ValueError: they have.
        """
        if prompt + max_new_tokens > self.max_length:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} with a prompt of {prompt} tokens exceeds the "
                f"{self.max_length} positions that target and draft both have"
            )

    def export(
        self,
        directory: str | Path,
        *,
        backend: Backend,
        batch: int | Sequence[int],
        max_length: int,
        verbose: bool = False,
    ) -> Path:
        """Write the pair for deployment: a directory that `load_exported` runs on hardware like this one.

        Args:
            directory: new or empty.
            backend: "tensorrt" builds TensorRT engines; "aot-inductor" AOTInductor packages, for which it needs a C++
                compiler, and on a GPU the CUDA toolkit. To run they need torch alone.
            batch: buckets: rows of a request, or several such numbers. A request takes the smallest that holds it.
            max_length: tokens that a row may have, prompt included.
            verbose: print what is being traced and built: an export takes minutes.

        Returns:
            the directory's absolute path.

        Raises:
            FileExistsError: the directory is not empty.
            ImportError: torch_tensorrt or TensorRT is not here; the message says what to install.
            RuntimeError: a program could not be compiled, and the message has what the compiler said; or the models'
                weights were moved, cast or replaced since the pair was made.
            ValueError: an argument is out of range, or TensorRT is asked for without a GPU.
        """
        progress = print if verbose else lambda message: None
        return export_pair(self, directory, backend=backend, batch=batch, max_length=max_length, progress=progress)

    def export_tensorrt(
        self, directory: str | Path, *, batch: int | Sequence[int], max_length: int, verbose: bool = False
    ) -> Path:
        """`export` with backend="tensorrt"."""
        return self.export(directory, backend="tensorrt", batch=batch, max_length=max_length, verbose=verbose)


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

    The models run and save as before: their weights are shared, not copied. They may change in place; a model that
    was moved, cast or given other weights needs a new pair, and `generate` says so. Forward hooks do not run in a pair.

    Where the settings compile, the rows of a request are rounded up to a power of two, and the first request of such a
    size compiles. Requests share buffers and, on a GPU, captured steps; one that is larger than the buffers, in rows or
    length, gets new ones, and its step is captured anew.

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
        TypeError: an argument is of another type; the message names it.
        ValueError: the profile is another pair's, does not fit this one, or is damaged or too new.
    """
    config = DustinConfig() if config is None else config
    if not isinstance(config, DustinConfig):
        raise TypeError(f"config must be a DustinConfig, not {type(config).__name__}")
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    if not (profile is None or isinstance(profile, Profile)):
        raise TypeError(f"profile must be a Profile or the path of its file, not {type(profile).__name__}")
    target, draft, tokenizer = resolve_pair(target, draft, tokenizer, assistant_tokenizer)
    warn_of_hooks(target, "target")
    warn_of_hooks(draft, "draft")
    warn_of_settings(target.generation_config)
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
    for name, value in (("tokenizer", tokenizer), ("assistant_tokenizer", assistant_tokenizer)):
        if not (value is None or isinstance(value, PreTrainedTokenizerBase)):
            raise TypeError(f"{name} must be a transformers tokenizer, not {type(value).__name__}")
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
