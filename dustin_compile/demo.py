"""One prompt continued three ways in one process: target-only, dense speculative decoding, and Dustin."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dustin_compile.config import DustinConfig
from dustin_compile.generation import GenerationOutput, Pair
from dustin_compile.loading import LoadedPair
from dustin_compile.pair import compile_pair
from dustin_compile.profile import Profile


@dataclass(frozen=True)
class Run:
    """A greedy continuation.

    Attributes:
        tokens: the new tokens.
        tokens_per_second: of the decode alone: tokens after the first, over the seconds after the prefill, with
            everything compiled before.
        tokens_per_step, acceptance_rate, cache_read_share: as in Stats; the target alone has no acceptance rate.
    """

    tokens: list[int]
    tokens_per_second: float
    tokens_per_step: float
    acceptance_rate: float | None
    cache_read_share: float


@dataclass(frozen=True)
class Comparison:
    """Continuations by the target alone, by dense speculative decoding, and with the verification set."""

    target_only: Run
    dense: Run
    sparse: Run

    @property
    def dense_equals_target_only(self) -> bool:
        return self.dense.tokens == self.target_only.tokens

    @property
    def sparse_agreement(self) -> float:
        """Share of positions at which the sparse run has the dense run's token."""
        same = [a == b for a, b in zip(self.sparse.tokens, self.dense.tokens, strict=True)]
        return sum(same) / len(same)


COMPARE_STAGES = 3  # that compare() announces


def compare(
    pair: LoadedPair,
    input_ids: Tensor,
    max_new_tokens: int,
    config: DustinConfig,
    profile: Profile | None,
    stage: Callable[[str], None],
) -> Comparison:
    """Continue a prompt greedily in three ways. No token ends a run early, so that all are equally long.

    Args:
        pair: target and draft.
        input_ids: [1, L] int64.
        max_new_tokens: at least 2, since the first comes with the prefill.
        config: of the sparse run; the dense one differs from it in `verify` and `draft_attention` only.
        profile: as for `compile_pair`.
        stage: called with the name of each of the COMPARE_STAGES when it begins.

    Raises:
        IncompatibleModelError, ValueError: as `compile_pair`, or the models have too few positions.
    """
    models, tokenizer = (pair.target, pair.draft), pair.tokenizer
    compiled = compile_pair(
        *models, config=config, profile=profile, tokenizer=tokenizer, assistant_tokenizer=pair.assistant_tokenizer
    )
    compiled.check_length(input_ids.shape[1], max_new_tokens)
    with warnings.catch_warnings(action="ignore"):  # which the first has said
        dense_config = dataclasses.replace(config, verify="dense", draft_attention="dense")
        compiled_dense = compile_pair(*models, config=dense_config, profile=compiled.profile, tokenizer=tokenizer)
    input_ids = input_ids.to(pair.target.device)
    stage("target only")
    target_only = _run_target_only(pair.target, input_ids, max_new_tokens)
    stage("dense speculation")
    dense = _run_speculative(compiled_dense, input_ids, max_new_tokens)
    stage("Dustin")
    sparse = _run_speculative(compiled, input_ids, max_new_tokens)
    return Comparison(target_only, dense, sparse)


def decode_rate(output: GenerationOutput) -> float:
    """Tokens per second of the decode; the first token of each row comes with the prefill."""
    tokens = sum(output.stats.new_tokens) - len(output.stats.new_tokens)
    return tokens / output.stats.decode_seconds if tokens else 0.0


def _run_speculative(pair: Pair, input_ids: Tensor, max_new_tokens: int) -> Run:
    output = pair.generate(input_ids, max_new_tokens=max_new_tokens, eos_token_id=[])
    return Run(
        tokens=output.sequences[0, input_ids.shape[1] :].tolist(),
        tokens_per_second=decode_rate(output),
        tokens_per_step=output.stats.tokens_per_step,
        acceptance_rate=output.stats.acceptance_rate,
        cache_read_share=output.stats.cache_read_share,
    )


class _PrefillEnd(LogitsProcessor):
    """Notes when the logits of the first new token are there."""

    time = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.time:
            self.time = _now(scores.device)
        return scores


def _run_target_only(target: PreTrainedModel, input_ids: Tensor, max_new_tokens: int) -> Run:
    """transformers' own generate with its faster cache: static, and then compiled, on a GPU; dynamic on a CPU."""
    on_gpu = input_ids.device.type == "cuda"
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,  # of one row that never ends early; without EOS, generate cannot make one up
        cache_implementation="static" if on_gpu else "dynamic",
    )
    # What is None in it, such as penalties, generate would fill in from the model's own.
    own, target.generation_config = target.generation_config, greedy
    try:
        for _ in range(2 if on_gpu else 1):  # the first compiles
            prefill_end = _PrefillEnd()
            sequences = target.generate(
                input_ids,
                generation_config=greedy,
                attention_mask=torch.ones_like(input_ids),
                logits_processor=LogitsProcessorList([prefill_end]),
            )
            ended = _now(input_ids.device)
    finally:
        target.generation_config = own
    tokens = sequences[0, input_ids.shape[1] :].tolist()
    return Run(
        tokens=tokens,
        tokens_per_second=(len(tokens) - 1) / (ended - prefill_end.time),
        tokens_per_step=1.0,
        acceptance_rate=None,
        cache_read_share=1.0,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
