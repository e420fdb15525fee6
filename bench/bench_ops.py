"""The ops and what they replace, one layer at a time: `pytest bench --benchmark-only`.

On a GPU a case is one CUDA graph of many calls, which take turns among caches and index sets that L2 does not hold.
Each is compared with a reference in higher precision first, and not timed where it is wrong. Without a GPU, or with
--benchmark-disable, the same cases run once on tiny shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from shapes import CACHES, CALLS, ERROR, ROUNDS, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dustin_compile.benchmark.pairs import SHAPES
from dustin_compile.benchmark.results import RESULTS, append_rows, make_row
from dustin_compile.graphs.capture import capture
from dustin_compile.ops.append_kv import append_kv, append_kv_reference
from dustin_compile.ops.dense_attention import dense_attention, dense_attention_reference
from dustin_compile.ops.score_heads import score_heads, score_heads_reference
from dustin_compile.ops.select_tiered import select_tiered, select_tiered_reference
from dustin_compile.ops.skinny_linear import skinny_linear, skinny_linear_reference
from dustin_compile.ops.sparse_attention import sparse_attention, sparse_attention_reference

PAGE = 16  # positions, of FlashInfer's paged cache
SPARE = 64  # positions behind the context, for the block
COLD = 200e6  # bytes of inputs that take turns, far more than the 50 MB of L2
LINEAR_MODELS = {"qwen2.5-0.5b": SHAPES["qwen2.5-7b"].draft, "qwen2.5-7b": SHAPES["qwen2.5-7b"].target}


@lru_cache(maxsize=1)
def make_layer(shape: Shape, device: torch.device, dtype: torch.dtype):
    """Queries [B, T, Hq, D] and CACHES caches [B, N, Hkv, D] of one layer."""
    torch.manual_seed(0)
    size = (shape.batch, shape.context + SPARE, shape.kv_heads, shape.head_dim)
    caches = [tuple(torch.randn(size, device=device, dtype=dtype) for _ in range(2)) for _ in range(CACHES)]
    query = torch.randn(shape.batch, shape.tokens, shape.heads, shape.head_dim, device=device, dtype=dtype)
    return query, caches


@pytest.fixture
def layer(shape, device, dtype):
    return make_layer(shape, device, dtype)


@pytest.fixture
def start(shape, device) -> Tensor:
    return torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)


@pytest.fixture
def time_calls(benchmark, measured):
    """A function that times an op.

    Its arguments are the op's calls, each with inputs of its own, and the bytes that a call must move. It gives the
    microseconds of a call, and what a row says of them: fields, and the end of its conditions. Where nothing is timed,
    the first call runs once and the microseconds are None.
    """

    def time(calls: list[Callable[[], object]], nbytes: int) -> tuple[float | None, dict[str, float], str]:
        if measured.bandwidth is None:
            benchmark(calls[0])
            return None, {}, ""
        number = max(CALLS, len(calls))

        def run_all() -> None:
            for i in range(number):
                calls[i % len(calls)]()

        benchmark.pedantic(capture(run_all), rounds=ROUNDS, warmup_rounds=2)
        us = benchmark.stats["median"] * 1e6 / number
        floor = nbytes / measured.bandwidth * 1e6
        benchmark.extra_info.update(us_a_call=us, floor_us=floor)
        how = (
            f"one CUDA graph of {number} calls, median of {ROUNDS}; floor {floor:.1f} us at the "
            f"{measured.bandwidth / 1e12:.2f} TB/s of a copy in the same run"
        )
        return us, {"floor_us": round(floor, 2)}, how

    return time


@pytest.fixture
def time_op(time_calls, shape, measured, dtype):
    """A function that times an op of a shape and writes its row.

    Its arguments are the op's name, its calls, the bytes that a call must move, what the conditions say of the case,
    and how many inputs take turns.
    """

    def time(op: str, calls: list[Callable[[], object]], nbytes: int, note: str, inputs: int = CACHES) -> None:
        us, fields, how = time_calls(calls, nbytes)
        if us is None:
            return
        measured.us[op, shape.name] = us
        model = "qwen2.5-0.5b-draft" if op == "score_heads_draft" else shape.name
        metric = op.removesuffix("_draft") + "_us"
        name = f"{metric}/{model}/{shape.context}x{shape.batch}"
        if op == "score_heads_draft" and shape.name != "qwen2.5-7b":  # the same draft
            return
        if op.startswith("peer_"):
            name = f"peer_attention_us/{op.removeprefix('peer_')}/{shape.name}/{shape.context}x{shape.batch}"
        conditions = (
            f"{str(dtype).removeprefix('torch.')}, {shape.context:,} positions, {shape.batch} rows, {note}, "
            f"{inputs} inputs in turn, {how}"
        )
        append_rows(RESULTS / "kernels.jsonl", [make_row(name, us, "us", measured.device, conditions, **fields)])

    return time


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative error of a few rows; what fails here is not timed."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error <= ERROR[dtype], f"relative error {error:.3g}"


def rows_of(*tensors: Tensor) -> list[list[Tensor]]:
    """The first and the last row of each tensor, in fp32 where they are floats."""
    return [
        [t[r : r + 1].float() if t.is_floating_point() else t[r : r + 1] for t in tensors]
        for r in (0, len(tensors[0]) - 1)
    ]


def whole_cache_bytes(shape: Shape, query: Tensor) -> int:
    positions = shape.batch * (shape.context + shape.tokens)
    return 2 * positions * shape.kv_heads * shape.head_dim * query.element_size() + 2 * query.nbytes


def index_sets(shape: Shape, device: torch.device, count: int) -> list[Tensor]:
    def draw() -> Tensor:
        return torch.randperm(shape.context, device=device)[: shape.budget].sort().values

    return [torch.stack([draw() for _ in range(shape.batch)]).int() for _ in range(count)]


def test_sparse_attention(shape, device, dtype, layer, start, time_op):
    query, caches = layer
    scale = shape.head_dim**-0.5
    counts = torch.full_like(start, shape.budget)
    sets = index_sets(shape, device, CALLS if device.type == "cuda" else 1)
    out = sparse_attention(query, *caches[0], sets[0], counts, start, start, scale)
    for found, q, k, v, chosen, count, first in rows_of(out, query, *caches[0], sets[0], counts, start):
        check(found, sparse_attention_reference(q, k, v, chosen, count, first, first, scale), dtype)
    calls = [
        lambda cache=caches[i % CACHES], chosen=chosen: sparse_attention(
            query, *cache, chosen, counts, start, start, scale
        )
        for i, chosen in enumerate(sets)
    ]
    positions = shape.batch * (shape.budget + shape.tokens)
    nbytes = 2 * positions * shape.kv_heads * shape.head_dim * query.element_size() + 2 * query.nbytes
    time_op(
        "sparse_attention", calls, nbytes, f"{shape.tokens} query tokens, {shape.budget} positions, fresh sets, cold L2"
    )


def test_dense_attention(shape, dtype, layer, start, time_op):
    query, caches = layer
    scale = shape.head_dim**-0.5
    out = dense_attention(query, *caches[0], start, scale)
    for found, q, k, v, first in rows_of(out, query, *caches[0], start):
        check(found, dense_attention_reference(q, k, v, first, scale), dtype)
    calls = [lambda cache=cache: dense_attention(query, *cache, start, scale) for cache in caches]
    time_op("dense_attention", calls, whole_cache_bytes(shape, query), f"{shape.tokens} query tokens, cold L2")


def attend_or_skip(attend: Callable[[tuple[Tensor, Tensor]], Tensor], cache: tuple[Tensor, Tensor]) -> Tensor:
    """A peer's output, unless it does not take this shape here."""
    try:
        return attend(cache)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"refused: {str(error).splitlines()[0]}")


def expected_unmasked(query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
    """Attention [1, T, Hq, D] of every token to positions 0 .. length-1, in fp32."""
    group = query.shape[2] // key.shape[2]
    key, value = (t[:, :length].repeat_interleave(group, 2).transpose(1, 2) for t in (key, value))
    weights = (query.transpose(1, 2) @ key.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_sdpa(backend, shape, device, dtype, layer, time_op):
    """Without the causal mask inside the block, which its flash kernel does not take here."""
    if device.type != "cuda" and backend == "cudnn":
        pytest.skip("needs a CUDA device")
    query, caches = layer
    length = shape.context + shape.tokens
    kernel = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
    kernels = [kernel] if device.type == "cuda" else [kernel, SDPBackend.MATH]

    def attend(cache) -> Tensor:
        key, value = (t[:, :length].transpose(1, 2) for t in cache)
        with sdpa_kernel(kernels):
            return torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), key, value, enable_gqa=True)

    for found, q, k, v in rows_of(attend_or_skip(attend, caches[0]).transpose(1, 2), query, *caches[0]):
        check(found, expected_unmasked(q, k, v, length), dtype)
    calls = [lambda cache=cache: attend(cache) for cache in caches]
    time_op(
        f"peer_sdpa-{backend}", calls, whole_cache_bytes(shape, query), f"{shape.tokens} query tokens, no mask, cold L2"
    )


def test_flex_attention(shape, device, dtype, layer, start, time_op):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, caches = layer
    length = shape.context + shape.tokens
    mask = create_block_mask(
        lambda b, h, q, kv: kv <= q + shape.context, None, None, shape.tokens, length, device=device
    )
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def attend(cache) -> Tensor:
        key, value = (t[:, :length].transpose(1, 2) for t in cache)
        return compiled(query.transpose(1, 2), key, value, block_mask=mask, enable_gqa=True)

    for found, q, k, v, first in rows_of(attend_or_skip(attend, caches[0]).transpose(1, 2), query, *caches[0], start):
        check(found, dense_attention_reference(q, k, v, first, shape.head_dim**-0.5), dtype)
    calls = [lambda cache=cache: attend(cache) for cache in caches]
    time_op("peer_flex", calls, whole_cache_bytes(shape, query), f"{shape.tokens} query tokens, cold L2")


def test_flashinfer(shape, device, dtype, layer, start, time_op):
    """Its first call compiles with nvcc for about a minute."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    flashinfer = pytest.importorskip("flashinfer")
    query, caches = layer
    length, pages = shape.context + shape.tokens, (shape.context + SPARE) // PAGE
    used = -(-length // PAGE)
    integers = {"dtype": torch.int32, "device": device}
    rows = torch.arange(shape.batch, **integers)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(2**29, dtype=torch.uint8, device=device), "NHD", backend="fa2"
    )
    wrapper.plan(
        torch.arange(shape.batch + 1, **integers) * shape.tokens,
        torch.arange(shape.batch + 1, **integers) * used,
        (rows[:, None] * pages + torch.arange(used, **integers)).flatten(),
        torch.full((shape.batch,), length - (used - 1) * PAGE, **integers),
        shape.heads, shape.kv_heads, shape.head_dim, PAGE,
        causal=True, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    flat = query.flatten(0, 1)
    paged = [tuple(t.view(-1, PAGE, shape.kv_heads, shape.head_dim) for t in cache) for cache in caches]
    out = wrapper.run(flat, paged[0]).view_as(query)
    for found, q, k, v, first in rows_of(out, query, *caches[0], start):
        check(found, dense_attention_reference(q, k, v, first, shape.head_dim**-0.5), dtype)
    calls = [lambda cache=cache: wrapper.run(flat, cache) for cache in paged]
    note = (
        f"{shape.tokens} query tokens, FlashInfer {flashinfer.__version__} paged prefill, fa2, pages of {PAGE}, cold L2"
    )
    time_op("peer_flashinfer-fa2", calls, whole_cache_bytes(shape, query), note)


def test_append_kv(shape, dtype, layer, start, time_op):
    query, caches = layer
    key, value = (torch.randn_like(query[:, :, : shape.kv_heads]) for _ in range(2))
    cos, sin = (torch.randn_like(query[:, :, 0]) for _ in range(2))
    new = query, key, value, cos, sin
    before = caches[0][0].clone(), caches[0][1].clone()
    rotated = append_kv(*caches[0], *new, start)
    expected = append_kv_reference(*before, *new, start)
    check(rotated, expected, dtype)
    for cache, wanted in zip(caches[0], before, strict=True):
        check(cache[:, shape.context :][:, : shape.tokens], wanted[:, shape.context :][:, : shape.tokens], dtype)
    calls = [lambda cache=cache: append_kv(*cache, *new, start) for cache in caches]
    nbytes = sum(t.nbytes for t in new) + query.nbytes + key.nbytes + value.nbytes
    time_op("append_kv", calls, nbytes, f"{shape.tokens} new tokens, with RoPE")


def score_case(shape, query, keys: list[Tensor], groups, max_count, start, dtype, time_op, op, note) -> None:
    scale = query.shape[-1] ** -0.5
    out = score_heads(query, keys[0], groups, max_count, start, scale)
    for row in (0, shape.batch - 1):
        one = slice(row, row + 1)
        expected = score_heads_reference(
            query[one].float(), keys[0][:, one].float(), groups, max_count, start[one], scale
        )
        check(out[one], expected, dtype)
    calls = [lambda key=key: score_heads(query, key, groups, max_count, start, scale) for key in keys]
    nbytes = groups.shape[0] * shape.batch * shape.context * query.shape[-1] * query.element_size() + out.nbytes
    time_op(op, calls, nbytes, note)


def test_score_heads_of_target(shape, device, dtype, layer, start, time_op):
    _, caches = layer
    count = min(4, shape.heads // shape.kv_heads)
    query = torch.randn(shape.batch, 1, count, shape.head_dim, device=device, dtype=dtype)
    groups = torch.tensor([[0, 1, 0, count]], dtype=torch.int32, device=device)
    keys = [key[None] for key, _ in caches]
    note = f"{count} heads of one KV head, 1 query token, cold L2"
    score_case(shape, query, keys, groups, count, start, dtype, time_op, "score_heads", note)


def test_score_heads_of_draft(shape, device, dtype, start, time_op):
    layers, kv_heads, head_dim = 3, shape.draft_kv_heads, shape.draft_head_dim
    count = min(4, shape.draft_heads // kv_heads)
    size = (layers, shape.batch, shape.context + SPARE, kv_heads, head_dim)
    keys = [torch.randn(size, device=device, dtype=dtype) for _ in range(CACHES)]
    query = torch.randn(shape.batch, shape.gamma, layers * count, head_dim, device=device, dtype=dtype)
    table = [[layer, layer % kv_heads, layer * count, count] for layer in range(layers)]
    groups = torch.tensor(table, dtype=torch.int32, device=device)
    note = f"{count} heads in each of {layers} layers, {shape.gamma} query tokens, cold L2"
    score_case(shape, query, keys, groups, count, start, dtype, time_op, "score_heads_draft", note)


def test_select_tiered(shape, device, start, time_op):
    share = (shape.budget - shape.sinks - shape.window) // 2
    size = (shape.batch, shape.context + SPARE)
    turns = math.ceil(COLD / (2 * 4 * size[0] * size[1])) if device.type == "cuda" else 1
    pairs = [tuple(torch.rand(size, device=device) ** 8 for _ in range(2)) for _ in range(turns)]

    def select(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return select_tiered(draft, target, start, shape.budget, shape.sinks, shape.window, share)

    indices, counts = select(*pairs[0])
    expected = select_tiered_reference(*pairs[0], start, shape.budget, shape.sinks, shape.window, share)
    assert torch.equal(indices, expected[0]) and torch.equal(counts, expected[1])
    calls = [lambda pair=pair: select(*pair) for pair in pairs]
    nbytes = 2 * 4 * shape.batch * shape.context + indices.nbytes
    note = f"budget {shape.budget}, {shape.sinks} sinks, window {shape.window}, draft share {share}, cold L2"
    time_op("select_tiered", calls, nbytes, note, turns)


@pytest.mark.parametrize("op", ["skinny_linear", "cublas"])
@pytest.mark.parametrize("product", ["qkv", "o", "gate_up", "down", "lm_head"])
@pytest.mark.parametrize(("model", "rows"), [("qwen2.5-0.5b", 16), ("qwen2.5-0.5b", 32), ("qwen2.5-7b", 16)])
def test_linear(model, rows, product, op, device, dtype, measured, time_calls):
    """The products of few rows with a layer's weights, and torch's, which are cuBLAS's, followed by SwiGLU."""
    timed = measured.bandwidth is not None
    outputs, depth = product_sizes(LINEAR_MODELS[model])[product] if timed else (64, 48)
    turns = max(2, math.ceil(COLD / (outputs * depth * dtype.itemsize))) if timed else 1
    gated = product == "gate_up"
    torch.manual_seed(0)
    x = torch.randn(rows, 1, depth, device=device, dtype=dtype)
    weights = [torch.randn(outputs, depth, device=device, dtype=dtype) * depth**-0.5 for _ in range(turns)]
    activate = torch.compile(swiglu, fullgraph=True, dynamic=False) if timed else swiglu

    def multiply(weight: Tensor) -> Tensor:
        if op == "skinny_linear":
            return skinny_linear(x, weight, gated=gated)
        product = torch.nn.functional.linear(x, weight)
        return activate(product) if gated else product

    out = multiply(weights[0])
    check(out, skinny_linear_reference(x.float(), weights[0].float(), None, gated), dtype)
    calls = [lambda weight=weight: multiply(weight) for weight in weights]
    us, fields, how = time_calls(calls, weights[0].nbytes + x.nbytes + out.nbytes)
    if us is None:
        return
    kernel = "skinny_linear" if op == "skinny_linear" else "torch.nn.functional.linear (cuBLAS)"
    if gated:
        kernel += " with SwiGLU" if op == "skinny_linear" else " and an inductor kernel for SwiGLU"
    conditions = (
        f"{str(dtype).removeprefix('torch.')}, {rows} rows, [{outputs}, {depth}], {kernel}, no bias, {turns} weights "
        f"in turn, {turns * weights[0].nbytes / 1e6:.0f} MB, cold L2, {how}"
    )
    metric = "skinny_linear_us" if op == "skinny_linear" else "peer_linear_us/cublas"
    name = f"{metric}/{model}/{product}/{rows}"
    append_rows(RESULTS / "kernels.jsonl", [make_row(name, us, "us", device, conditions, **fields)])


def swiglu(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def product_sizes(sizes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and depth of a layer's products, and of the logits'."""
    hidden, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    head_dim = hidden // heads
    return {
        "qkv": ((heads + 2 * sizes["num_key_value_heads"]) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": (sizes["vocab_size"], hidden),
    }
