"""From prompts to tokens: checked requests, the loop of steps, stop conditions and statistics."""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import Literal, NoReturn, TypeGuard

import torch
from torch import Tensor
from transformers import GenerationConfig

from dustin_compile.adapter import PREFILL_MULTIPLE, CachedModel
from dustin_compile.config import DustinConfig
from dustin_compile.graphs.capture import capture
from dustin_compile.graphs.prefill import prefill
from dustin_compile.graphs.state import MAX_EOS_TOKENS, State, new_state
from dustin_compile.graphs.step import Decoding, Step
from dustin_compile.profile import Profile

CAPACITY_MULTIPLE = 1024
TOKEN_LIMIT = 2**31  # ids fit in int32
MIN_TEMPERATURE = 1e-5  # below, logits over temperature leave fp32's range


@dataclass(frozen=True)
class Stats:
    """What a generation did.

    Attributes:
        steps: draft-verify steps until the last row ended.
        tokens_per_step: tokens emitted per step and row, the prefill's first token not counted.
        acceptance_rate: accepted share of the proposed draft tokens.
        acceptance_by_position: the same for each place in the block, [gamma].
        new_tokens: tokens added to each row.
        finish_reasons: "stop" (an EOS token) or "length" (max_new_tokens), for each row.
        cache_read_share: positions that the verify passes read, of those that exist; mean over steps.
        prefill_seconds: prompts through both models, to the first token.
        decode_seconds: all steps.
    """

    steps: int
    tokens_per_step: float
    acceptance_rate: float
    acceptance_by_position: list[float]
    new_tokens: list[int]
    finish_reasons: list[Literal["stop", "length"]]
    cache_read_share: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class GenerationOutput:
    """Result of `Pair.generate`.

    Attributes:
        sequences: [B, width + longest new] int64: prompts as given, new tokens, padding on the right.
        stats: see Stats.
    """

    sequences: Tensor
    stats: Stats


@dataclass(frozen=True)
class Request:
    """Checked arguments of one generation. Its prompts are left-aligned."""

    input_ids: Tensor  # [B, width], as given
    prompts: Tensor  # [B, longest]
    lengths: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    eos_token_ids: list[int]
    pad_token_id: int
    seeds: list[int]
    streams: list[int]

    @property
    def decoding(self) -> Decoding:
        if self.temperature == 0:
            return "greedy"
        return "sampling" if self.top_k is None and self.top_p is None else "truncated_sampling"

    @staticmethod
    def check(
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int | None,
        seed: int | Sequence[int] | None,
        vocab_size: int,
    ) -> Request:
        """Check the arguments of `Pair.generate`.

        Raises:
            ValueError, TypeError: naming the argument and its value.
        """
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"input_ids must be an integer tensor, not {getattr(input_ids, 'dtype', type(input_ids))}")
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids must be [batch, width] with neither empty, not {tuple(input_ids.shape)}")
        batch = input_ids.shape[0]
        prompts, lengths = _align_left(input_ids, attention_mask)
        low, high = int(prompts.min()), int(prompts.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"input_ids holds {low if low < 0 else high}, outside the vocabulary of {vocab_size}")
        check_decoding(max_new_tokens, temperature, top_k, top_p)
        eos: list = [] if eos_token_id is None else [eos_token_id]
        if _is_list(eos_token_id):
            eos = list(eos_token_id)
        if not all(map(_is_token, eos)):
            raise ValueError(f"eos_token_id={eos_token_id!r} must be a token id or a sequence of them")
        if pad_token_id is not None and not _is_token(pad_token_id):
            raise ValueError(f"pad_token_id={pad_token_id!r} must be a token id")
        if len(eos) > MAX_EOS_TOKENS:
            raise ValueError(
                f"eos_token_id, here or in the target's generation_config, has {len(eos)} tokens, more than "
                f"{MAX_EOS_TOKENS}"
            )
        if _is_list(seed):
            if len(seed) != batch:
                raise ValueError(f"seed has {len(seed)} values for {batch} rows")
            seeds, streams = list(seed), [0] * batch
        else:
            seeds, streams = [secrets.randbits(62) if seed is None else seed] * batch, list(range(batch))
        if not all(_is_int(value) and -(2**63) <= value < 2**63 for value in seeds):
            raise ValueError(f"seed={seed!r} must be 64-bit integers")
        return Request(
            input_ids=input_ids,
            prompts=prompts,
            lengths=lengths,
            max_new_tokens=max_new_tokens,
            temperature=float(temperature),
            top_k=top_k,
            top_p=top_p,
            eos_token_ids=eos,
            pad_token_id=pad_token_id if pad_token_id is not None else eos[0] if eos else 0,
            seeds=seeds,
            streams=streams,
        )


def check_decoding(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Check those arguments of `Pair.generate` that need neither prompt nor model.

    Raises:
        ValueError: naming the argument and its value.
    """
    if not _is_int(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 1")
    if not isinstance(temperature, int | float) or not (temperature == 0 or MIN_TEMPERATURE <= temperature < inf):
        raise ValueError(f"temperature={temperature!r} must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    if top_k is not None and (not _is_int(top_k) or top_k < 1):
        raise ValueError(f"top_k={top_k!r} must be an integer of at least 1, or None")
    if top_p is not None and (not isinstance(top_p, int | float) or not 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r} must be in (0, 1], or None")
    if temperature == 0 and not (top_k is None and top_p is None):
        raise ValueError(f"top_k={top_k} and top_p={top_p} need temperature > 0")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: object) -> TypeGuard[int]:
    return _is_int(value) and -TOKEN_LIMIT <= value < TOKEN_LIMIT


def _is_list(value: object) -> TypeGuard[Sequence]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _align_left(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """Prompts moved to the left edge, [B, longest], and their lengths; places behind a prompt hold its last token."""
    if attention_mask is None:
        return input_ids, [input_ids.shape[1]] * input_ids.shape[0]
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, not {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; they must be alike"
        )
    given = attention_mask.to(input_ids.device)
    mask = (given == 1).long()
    lengths = mask.sum(1)
    first = mask.argmax(1)
    columns = torch.arange(input_ids.shape[1], device=mask.device)
    expected = (columns >= first[:, None]) & (columns < (first + lengths)[:, None])
    bad = ((given != expected) | (lengths == 0)[:, None]).any(1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"attention_mask row {bad[0]} must be ones for one unbroken prompt of at least one token, with zeros to "
            f"its left or right"
        )
    width = int(lengths.max())
    columns = first[:, None] + torch.minimum(columns[:width], lengths[:, None] - 1)
    return input_ids.gather(1, columns), lengths.tolist()


class Pair(ABC):
    """What generates: a target and a draft behind checked requests.

    Args:
        generation: runs them.
        profile: the retrieval heads and the split in use.
        vocab_size: ids below it are tokens.
        max_length: tokens that a row may have, prompt included.
        defaults: of `generate`, the tokens that end and fill a row.

    Attributes:
        config, profile, vocab_size, max_length: as above; the settings have draft_share and compile resolved.
    """

    def __init__(
        self, generation: Generation, profile: Profile, vocab_size: int, max_length: int, defaults: GenerationConfig
    ):
        self.config, self.profile = generation.config, profile
        self.vocab_size, self.max_length = vocab_size, max_length
        self._generation, self._defaults = generation, defaults

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
        """Continue prompts. Requests of several threads run one after another.

        Args:
            input_ids: [B, width] int64, prompts padded on the left or on the right.
            attention_mask: [B, width], 1 where a prompt has a token; None: everywhere.
            max_new_tokens: tokens to add to each row at most.
            temperature: 0 takes the likeliest token; otherwise tokens are sampled. Of the sampling, the target's
                generation_config has no say.
            top_k: sample among the k likeliest tokens only; None: among all.
            top_p: sample among the likeliest tokens that make up this probability; None: among all.
            eos_token_id: tokens that end a row; None: the target's generation_config says; []: none.
            pad_token_id: fills rows that ended early; None: the target's generation_config says, or its EOS.
            seed: of the sampling. An int serves all rows, which still differ from each other; a sequence gives
                each row its own, and a row's text then depends on nothing else in the batch. None: a random one.

        Returns:
            GenerationOutput with `sequences` [B, width + new tokens] and `stats`.

        Raises:
            RuntimeError: the models' weights were moved, cast or replaced since the pair was made.
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
        )
        return self._generation.run(request, self._choose_batch(request))

    @abstractmethod
    def _choose_batch(self, request: Request) -> int:
        """Rows to run a request with.

        Raises:
            ValueError: it has too many rows, or too long ones.
        """


class Generation:
    """Runs requests on one pair, and keeps its buffers and captured graphs between them.

    Args:
        target, draft: the pair.
        config: its settings, draft_share resolved.
        rows, length: of the largest request to come, where that is known: buffers are made for it at once. Otherwise
            they are made for the first request, and anew for one that is larger in either.

    Attributes:
        state: of the last request, the first rows of the buffers.
        replays: captured steps, by rows, decoding and whether they refresh; new buffers make them void.
    """

    def __init__(self, target: CachedModel, draft: CachedModel, config: DustinConfig, rows: int = 1, length: int = 1):
        self.target, self.draft, self.config = target, draft, config
        self.rows, self.length = rows, length
        self.step = Step(target, draft, config)
        self.buffers: State | None = None
        self.state: State | None = None
        self.replays: dict[tuple[int, Decoding, bool], Callable[[], None]] = {}
        self.lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pair can be neither copied nor pickled: make another of the models, or export it")

    @torch.inference_mode(False)  # the buffers outlive the call, and may next be needed outside the mode
    @torch.no_grad()
    def run(self, request: Request, batch: int) -> GenerationOutput:
        """Generate until every row has ended, with `batch` rows, of which the request fills the first."""
        device = self.target.device
        # Streams and graphs belong to the current device.
        with self.lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.target.check_weights()
            self.draft.check_weights()
            return self._run(request, batch)

    def _run(self, request: Request, batch: int) -> GenerationOutput:
        state = self._prepare(request, batch)
        refresh_every = self.config.refresh_every
        step = self._ready_step(state, request.decoding, refresh=False)
        refresh = self._ready_step(state, request.decoding, refresh=True) if refresh_every else step
        self._load(state, request)

        started = self._now()
        self._prefill(state, state.limits - request.max_new_tokens, max(request.lengths), request.decoding)
        prefilled = self._now()
        all_finished = _Flag(state.finished)
        for count in range(1, request.max_new_tokens):
            if all_finished.poll():
                break
            (refresh if refresh_every and count % refresh_every == 0 else step)()
        ended = self._now()
        return self._collect(state, request, prefilled - started, ended - prefilled)

    def _prepare(self, request: Request, batch: int) -> State:
        """The first `batch` rows of buffers that hold the request: the present ones where they do."""
        config = self.config
        longest = max(request.lengths)
        prompt_end = -(-longest // PREFILL_MULTIPLE) * PREFILL_MULTIPLE
        length, block = max(longest + request.max_new_tokens, self.length), config.gamma + 1
        # A finished row proposes behind its end, and a refresh may start at 0 in a row shorter than its lookback.
        needed = max(prompt_end, length + block, config.refresh_every * block)
        if self.buffers is None or self.buffers.batch < batch or self.buffers.capacity < needed:
            self.buffers = self.state = None  # let go of the old ones first
            self.replays.clear()
            capacity = -(-needed // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
            self.buffers = new_state(self.target, self.draft, config, max(batch, self.rows), capacity)
        if self.state is None or self.state.batch != batch:
            self.state = self.buffers.first_rows(batch)
        return self.state

    def _ready_step(self, state: State, decoding: Decoding, refresh: bool) -> Callable[[], None]:
        """The step as a callable: compiled, and on CUDA a graph replay. Compilation happens here, the prefill's too."""

        def step() -> None:
            self.step(state, decoding, refresh)

        if not self.config.compile:
            return step
        key = (state.batch, decoding, refresh)
        if key not in self.replays:
            # Finished rows change nothing that a request could see, so they warm up.
            state.finished.fill_(True)
            self._prefill(state, torch.ones_like(state.seq_lens), 1, decoding)
            if self.target.device.type == "cuda":
                self.replays[key] = capture(step)
            else:
                step()
                self.replays[key] = step
        return self.replays[key]

    def _prefill(self, state: State, lengths: Tensor, width: int, decoding: Decoding) -> None:
        prefill(self.target, self.draft, state, lengths, width, self.config, self.step.choose[decoding])

    def _load(self, state: State, request: Request) -> None:
        """Write a request into the state. Rows that it does not fill hold one token and are finished."""
        rows, width = request.prompts.shape
        extra = state.batch - rows
        device = state.tokens.device
        state.tokens.zero_()
        state.tokens[:rows, :width] = request.prompts

        def fill(buffer: Tensor, values: list) -> None:
            buffer.copy_(torch.tensor(values, dtype=buffer.dtype).to(device))

        fill(state.limits, [length + request.max_new_tokens for length in request.lengths + [1] * extra])
        fill(state.finished, [False] * rows + [True] * extra)
        eos = request.eos_token_ids
        fill(state.eos_token_ids, eos + [-1] * (MAX_EOS_TOKENS - len(eos)))
        fill(state.sampling.seed, request.seeds + [0] * extra)
        fill(state.sampling.stream, request.streams + [0] * extra)
        state.sampling.temperature.fill_(request.temperature or 1.0)
        state.sampling.top_k.fill_(min(request.top_k or self.target.vocab_size, self.target.vocab_size))
        state.sampling.top_p.fill_(request.top_p or 1.0)
        state.step.zero_()
        state.accepted_counts.zero_()
        state.read_share.zero_()

    def _collect(
        self, state: State, request: Request, prefill_seconds: float, decode_seconds: float
    ) -> GenerationOutput:
        rows, width = request.input_ids.shape
        ends = (state.seq_lens[:rows] + 1).tolist()
        new = [end - length for end, length in zip(ends, request.lengths, strict=True)]
        tokens = state.tokens[:rows].to(request.input_ids.device)
        sequences = request.input_ids.new_full((rows, width + max(new)), request.pad_token_id)
        sequences[:, :width] = request.input_ids
        reasons: list[Literal["stop", "length"]] = []
        for row, (end, length) in enumerate(zip(ends, request.lengths, strict=True)):
            sequences[row, width : width + new[row]] = tokens[row, length:end].to(sequences.dtype)
            reasons.append("stop" if int(tokens[row, end - 1]) in request.eos_token_ids else "length")

        gamma = self.config.gamma
        counts = state.accepted_counts[:rows].cpu()
        row_steps = counts.sum(1)
        total = max(int(row_steps.sum()), 1)
        by_position = [float(counts[:, i:].sum()) / total for i in range(1, gamma + 1)]
        stats = Stats(
            steps=int(row_steps.max()),
            tokens_per_step=(sum(new) - rows) / total,
            acceptance_rate=sum(by_position) / gamma,
            acceptance_by_position=by_position,
            new_tokens=new,
            finish_reasons=reasons,
            cache_read_share=float(state.read_share[:rows].sum()) / total,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
        )
        return GenerationOutput(sequences, stats)

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


class _Flag:
    """Whether all rows have finished. On CUDA it is read one step late, so that the host never waits for the device."""

    def __init__(self, finished: Tensor):
        self.finished = finished
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None

    def poll(self) -> bool:
        if self.finished.device.type != "cuda":
            return bool(self.finished.all())
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(self.finished.all(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        earlier, self.pending = self.pending, (flag, event)
        if earlier is None:
            return False
        earlier[1].synchronize()
        return bool(earlier[0])
