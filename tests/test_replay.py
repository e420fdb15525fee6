"""Thousands of replayed steps against the same steps launched one by one. Skipped without a CUDA device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import compile_tiny, tiny_pair
from torch import Tensor

from dustin_compile.graphs.capture import capture
from dustin_compile.graphs.state import State, new_state
from dustin_compile.graphs.step import Decoding

STEPS = 100  # from fresh inputs
BATCH, CAPACITY, GAMMA = 16, 1536, 2


def tensors(state: State) -> dict[str, Tensor]:
    """All that a step reads or writes, by name."""
    found = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        parts = {"": value} if isinstance(value, Tensor) else vars(value)
        found |= {f"{field.name}.{name}": part for name, part in parts.items() if isinstance(part, Tensor)}
    return found


def draw_inputs(state: State, generator: torch.Generator, vocab_size: int) -> None:
    """Rows of ragged lengths over random K/V; some end on the way, and one in eight has ended."""

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (BATCH,), generator=generator, device=generator.device)

    for cache in (state.target_cache, state.draft_cache):
        cache.key.normal_(generator=generator)
        cache.value.normal_(generator=generator)
    state.tokens.random_(vocab_size, generator=generator)
    state.query.normal_(generator=generator)
    state.seq_lens.copy_(integers(1, CAPACITY - (GAMMA + 1) * (STEPS + 2)))
    state.limits.copy_(state.seq_lens + integers(2, 4 * STEPS))
    state.limits.clamp_(max=CAPACITY - GAMMA - 2)
    state.finished.copy_(integers(0, 8) == 0)
    # The positions that a first sparse draft reads: the row's first ones.
    chosen = state.verification_set
    chosen.length.copy_(state.seq_lens - 1)
    chosen.counts.copy_(chosen.length.clamp(max=chosen.indices.shape[1]))
    chosen.indices.copy_(torch.arange(chosen.indices.shape[1], device=generator.device).expand_as(chosen.indices))
    state.sampling.stream.copy_(torch.arange(BATCH, device=generator.device))
    state.step.fill_(1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rounds", "dtype", "layers", "decoding", "refresh_every"),
    [
        (100, torch.float32, 1, "greedy", 0),  # ten thousand steps
        (10, torch.bfloat16, 2, "greedy", 0),  # with the products of few rows, which half precision has
        (10, torch.bfloat16, 2, "greedy", 4),
        (10, torch.bfloat16, 2, "sampling", 0),
        (10, torch.bfloat16, 2, "truncated_sampling", 4),
    ],
)
def test_replays_equal_the_step_launched_by_hand(  # trap 17
    rounds: int, dtype: torch.dtype, layers: int, decoding: Decoding, refresh_every: int
):
    models = (model.to("cuda", dtype) for model in tiny_pair(num_hidden_layers=layers))
    pair = compile_tiny(*models, gamma=GAMMA, compile=True, refresh_every=refresh_every)
    generation = pair._generation
    states = [new_state(generation.target, generation.draft, pair.config, BATCH, CAPACITY) for _ in range(2)]
    replayed, launched = map(tensors, states)
    assert {"tokens.", "target_cache.key", "verification_set.indices", "sampling.seed"} <= replayed.keys()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        if decoding == "truncated_sampling":
            for state in states:
                state.sampling.top_k.fill_(20)
        replays = {
            refresh: capture(lambda refresh=refresh: generation.step(states[0], decoding, refresh))
            for refresh in ({False, True} if refresh_every else {False})
        }
        for number in range(rounds):
            draw_inputs(states[0], generator, generation.target.vocab_size)
            for name, tensor in replayed.items():
                launched[name].copy_(tensor)
            for count in range(1, STEPS + 1):
                refresh = refresh_every > 0 and count % refresh_every == 0
                replays[refresh]()
                generation.step(states[1], decoding, refresh)
                same = torch.stack([(replayed[name] == launched[name]).all() for name in ("tokens.", "seq_lens.")])
                assert same.all(), f"round {number} from lengths {states[1].seq_lens.tolist()}"
            for name, tensor in replayed.items():
                assert torch.equal(tensor, launched[name]), f"round {number}: {name}"
            assert not states[0].query.isnan().any()
        assert states[0].accepted_counts[:, 1:].sum() > 0  # else every row would have advanced alike
