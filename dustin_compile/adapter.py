"""What knows transformers' internals: how a causal LM runs on our caches and our attention."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers import __version__ as version

from dustin_compile.graphs.capture import compile_region
from dustin_compile.kv_cache import KVCache
from dustin_compile.ops.append_kv import append_kv
from dustin_compile.ops.dense_attention import dense_attention
from dustin_compile.ops.score_heads import score_heads
from dustin_compile.ops.skinny_linear import skinny_linear
from dustin_compile.ops.sparse_attention import sparse_attention

ATTENTION_NAME = "dustin_compile"
ROTATE = "apply_rotary_pos_emb"
PREFILL_MULTIPLE = 64  # prompt chunks are padded to it; a pass of fewer tokens is part of a step


@dataclass
class VerificationSet:
    """The cached positions that a sparse pass may read besides its own block.

    Attributes:
        indices: ascending positions, int32 [B, budget]; entries past `counts` are never read.
        counts: int32 [B].
        length: the history's length when the set was chosen, int32 [B]. Positions from here on are the
            block, read causally.
    """

    indices: Tensor
    counts: Tensor
    length: Tensor


class PassingCache(Cache):
    """What a transformers layer takes for its cache. New K/V pass through it: `attend_cached` keeps them."""

    is_compileable = True

    def __init__(self):
        # Cache.__init__ would build per-layer objects of its own, so it is left out.
        self.layers: list = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        return key_states, value_states


@dataclass
class Attend:
    """Carries one layer's attention call through transformers: caches, what may be read, the query used."""

    key_cache: Tensor
    value_cache: Tensor
    cos: Tensor
    sin: Tensor
    start: Tensor
    verification_set: VerificationSet | None
    query: Tensor | None = None


def attend_cached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    attend: Attend,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of new tokens over our caches, which take their keys and values; the form of AttentionInterface.

    Args:
        query, key, value: [B, heads, T, D], not rotated yet.
    """
    key_cache, value_cache, start = attend.key_cache, attend.value_cache, attend.start
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    query = append_kv(key_cache, value_cache, query, key, value, attend.cos, attend.sin, start)
    attend.query = query
    chosen = attend.verification_set
    if chosen is None:
        return dense_attention(query, key_cache, value_cache, start, scaling), None
    output = sparse_attention(
        query, key_cache, value_cache, chosen.indices, chosen.counts, chosen.length, start, scaling
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, attend_cached)


@functools.cache
def defer_rotation(attention: type[nn.Module]) -> type[nn.Module]:
    """A transformers attention class that leaves queries and keys unrotated, for `append_kv` to rotate.

    Its forward is theirs, but for what it finds under the name of the function that rotates.

    Raises:
        RuntimeError: it knows no such name, so that queries and keys would be rotated twice.
    """
    forward = cast(FunctionType, inspect.unwrap(attention.forward))
    if ROTATE not in forward.__code__.co_names:
        raise RuntimeError(f"{attention.__name__}.forward of transformers {version} has no {ROTATE}")
    names = {**forward.__globals__, ROTATE: lambda query, key, cos, sin: (query, key)}
    del names["__name__"]  # or dynamo would look names up in the module instead
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return type(attention.__name__, (attention,), {"forward": copy})


SMALL_PRODUCT = 16  # rows up to which a CPU multiplies faster with the weight first

_plain_products = False  # a context variable could not be compiled


@contextmanager
def plain_products() -> Iterator[None]:
    """Within, models multiply by torch's own ops alone, for backends that know no others."""
    global _plain_products
    _plain_products = True
    try:
        yield
    finally:
        _plain_products = False


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether `skinny_linear` is the fastest way to multiply x[B, T, in] with weight[out, in], as seen on an H200.

    It is up to 16 rows, and with small weights up to 32, but not with a vocabulary of outputs.
    """
    if _plain_products or not x.is_cuda or x.dtype == torch.float32 or weight.shape[0] > 16 * weight.shape[1]:
        return False
    rows = x.shape[0] * x.shape[1]
    return rows <= 16 or (rows <= 32 and weight.numel() <= 10_000_000)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [B, T, in] to [B, T, out].

    Between a matrix-vector product and a large one, MKL is about twice as fast with its operands exchanged (seen on
    two cores of an AMD EPYC).
    """
    if is_skinny(x, weight):
        return skinny_linear(x.contiguous(), weight, bias)
    rows = x.shape[0] * x.shape[1]
    if x.device.type != "cpu" or not 1 < rows <= SMALL_PRODUCT:
        return nn.functional.linear(x, weight, bias)
    product = (weight @ x.flatten(0, 1).t()).t().contiguous().view(*x.shape[:2], -1)
    return product if bias is None else product + bias


class MergedLinear(nn.Module):
    """Linear layers of one input as one product. It stands where the first was, and a NextOutput for each other."""

    def __init__(self, linears: list[nn.Linear]):
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.weight = nn.Buffer(_join([linear.weight for linear in linears]), persistent=False)
        biased = linears[0].bias is not None
        self.bias = nn.Buffer(_join([linear.bias for linear in linears]), persistent=False) if biased else None
        self.parts: list[Tensor] = []

    def multiply(self, x: Tensor) -> list[Tensor]:
        """What each of the layers gives."""
        return list(multiply(x, self.weight, self.bias).split(self.sizes, dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        self.parts = self.multiply(x)
        return self.parts.pop(0)


class NextOutput(nn.Module):
    """The next output of a MergedLinear that has just run."""

    def __init__(self, merged: MergedLinear):
        super().__init__()
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        return self.merged.parts.pop(0)


def _join(parameters: list[Tensor]) -> Tensor:
    """Parameters as one tensor along their first dimension, of which they become views, unless they already are."""
    first = parameters[0].data
    ends = [p.storage_offset() + p.numel() for p in parameters]
    follow = [p.storage_offset() for p in parameters[1:]] == ends[:-1] and all(p.is_contiguous() for p in parameters)
    if not (follow and len({p.untyped_storage().data_ptr() for p in parameters}) == 1):
        first = torch.cat([p.data for p in parameters])
        for parameter, view in zip(parameters, first.split([p.shape[0] for p in parameters]), strict=True):
            parameter.data = view
    rows = sum(p.shape[0] for p in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class MergedMLP(nn.Module):
    """A gated MLP whose gate and up projection are one product, with the activation in the same kernel for few rows."""

    def __init__(self, mlp: Any, activation: str):
        super().__init__()
        self.gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = MergedLinear([mlp.down_proj])
        self.activation = mlp.act_fn
        self.is_swiglu = activation in ("silu", "swish")

    def forward(self, x: Tensor) -> Tensor:
        merged = self.gate_up
        if self.is_swiglu and is_skinny(x, merged.weight):
            return self.down(skinny_linear(x.contiguous(), merged.weight, merged.bias, gated=True))
        gate, up = merged.multiply(x)
        return self.down(self.activation(gate) * up)


def _merge(parent: nn.Module, *names: str) -> None:
    merged = MergedLinear([getattr(parent, name) for name in names])
    for name in names:
        setattr(parent, name, NextOutput(merged))
    setattr(parent, names[0], merged)


def share_structure(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same parameters and buffers, so that ours can be set up without touching theirs."""
    tensors = chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
    return twin.eval()


class RetrievalHeads:
    """Semantic retrieval heads of one model, in the forms that capturing queries and scoring need.

    Args:
        heads: (layer, query head) pairs.
        config: the model's configuration.
        device: where the tables live.
    """

    def __init__(self, heads: Iterable[tuple[int, int]], config, device: torch.device):
        self.heads = sorted(heads)
        self.layers = sorted({layer for layer, _ in self.heads})
        query_heads = config.num_attention_heads
        columns = [self.layers.index(layer) * query_heads + head for layer, head in self.heads]
        self.columns = torch.tensor(columns, device=device)  # of the heads in these layers' queries, side by side

        group_size = query_heads // config.num_key_value_heads
        by_key_head: dict[tuple[int, int], list[int]] = {}
        for row, (layer, head) in enumerate(self.heads):
            by_key_head.setdefault((layer, head // group_size), []).append(row)
        self.max_count = max(map(len, by_key_head.values()))
        table = [(layer, key_head, rows[0], len(rows)) for (layer, key_head), rows in by_key_head.items()]
        self.groups = torch.tensor(table, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.heads)


class CachedModel(ABC):
    """A causal LM that runs one pass over its static cache.

    Args:
        config: what caches and scoring need to know of the model, as in transformers' configurations.
        heads: its semantic retrieval heads, whose queries a pass returns.
        vocab_size: logits that count; what lies behind is padding.
        scale: of the attention's logits.
        head_dim: dimensions of an attention head.
        device, dtype: of weights and caches.
        compile: whether to compile what a pass runs.
    """

    def __init__(
        self,
        config: Any,
        heads: Iterable[tuple[int, int]],
        vocab_size: int,
        scale: float,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool,
    ):
        self.config = config
        self.heads = RetrievalHeads(heads, config, device)
        self.vocab_size = vocab_size
        self.scale = scale
        self.head_dim = head_dim
        self.device = device
        self.dtype = dtype
        self.compile = compile
        self.regions: dict[tuple, Callable] = {}

    @abstractmethod
    def forward(
        self, tokens: Tensor, start: Tensor, cache: KVCache, verification_set: VerificationSet | None
    ) -> tuple[Tensor, Tensor]:
        """One pass of tokens[B, T] at positions start[b].. over the cache, whose entries there it writes.

        Returns the hidden states that `logits` takes, [B, T, hidden], and the queries of the retrieval heads
        [B, T, heads, D]. Token t of a row reads everything up to itself, or, with a set, that set and the block.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, T, vocab_size] of what `forward` returned."""

    def check_weights(self) -> None:  # noqa: B027 - most have none that somebody else could move
        """Refuse to run where the model that this was made of has other modules or weights now. Values may change.

        Raises:
            RuntimeError: naming the first module or parameter that was replaced or moved.
        """

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.allocate(self.config, batch, capacity, self.dtype, self.device)

    def score(self, query: Tensor, cache: KVCache, seq_lens: Tensor) -> Tensor:
        """Mean attention of the retrieval heads' queries [B, T, heads, D] to each cached position, [B, capacity]."""
        return score_heads(query, cache.key, self.heads.groups, self.heads.max_count, seq_lens, self.scale)

    def _region(self, function: Callable, shape: torch.Size, sparse: bool = False) -> Callable:
        """The compiled form of a function for tokens of a shape [B, T].

        One compilation for each shape of a step, so that none evicts another, and one for all chunks of a prompt.
        """
        if not self.compile:
            return function
        dynamic = shape[1] >= PREFILL_MULTIPLE
        key = (function, "prefill" if dynamic else shape, sparse)
        if key not in self.regions:
            self.regions[key] = compile_region(function, dynamic)
        return self.regions[key]


class CausalModel(CachedModel):
    """A transformers causal LM that runs one pass over its static cache.

    Products of one input (q, k and v; gate and up) are merged. The merged weight takes no memory: the model's own
    parameters become views of it, and the model runs and saves as before.

    Args:
        model: the transformers model.
        heads, vocab_size, compile: see CachedModel.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        heads: Iterable[tuple[int, int]],
        vocab_size: int,
        compile: bool,
    ):
        twin = share_structure(model)
        twin.set_attn_implementation(ATTENTION_NAME)
        for module in twin.modules():  # of some only could they run, and transformers' own do not compile
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        self.layers = twin.model.layers
        for layer in self.layers:
            layer.self_attn.__class__ = defer_rotation(type(layer.self_attn))  # type: ignore[arg-type]
            _merge(layer.self_attn, "q_proj", "k_proj", "v_proj")
            _merge(layer.self_attn, "o_proj")
            layer.mlp = MergedMLP(layer.mlp, twin.config.hidden_act)
        self.embed_tokens = twin.model.embed_tokens
        self.rotary_emb = twin.model.rotary_emb
        self.norm = twin.model.norm
        _merge(twin, "lm_head")
        self.lm_head = twin.lm_head
        attention, embedding = self.layers[0].self_attn, self.embed_tokens.weight
        super().__init__(
            twin.config,
            heads,
            vocab_size,
            attention.scaling,
            attention.head_dim,
            embedding.device,
            embedding.dtype,
            compile,
        )
        parameters = inspect.signature(type(attention).forward).parameters
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        # Where all that the model is made of is: its path, the dict that holds it, the name there, and itself.
        named = list(model.named_modules())
        self.modules = [
            (f"{path}.{name}".lstrip("."), owner._modules, name, module)
            for path, owner in named
            for name, module in owner._modules.items()
        ]
        self.tensors = [
            (f"{path}.{name}".lstrip("."), tensors, name, _address(tensor))
            for path, owner in named
            for tensors in (owner._parameters, owner._buffers)
            for name, tensor in tensors.items()
        ]

    def check_weights(self) -> None:
        """See CachedModel. It takes less than a millisecond."""
        for path, modules, name, module in self.modules:
            if modules.get(name) is not module:
                _refuse_moved(path)
        for path, tensors, name, address in self.tensors:
            if _address(tensors.get(name)) != address:
                _refuse_moved(path)

    def forward(
        self, tokens: Tensor, start: Tensor, cache: KVCache, verification_set: VerificationSet | None
    ) -> tuple[Tensor, Tensor]:
        sparse = verification_set is not None
        embed = self._region(_embed, tokens.shape)
        run_layer = self._region(_run_layer, tokens.shape, sparse)
        hidden, update, cos, sin = embed(self.embed_tokens, self.rotary_emb, tokens, start)
        queries = []
        for index, layer in enumerate(self.layers):
            key, value = cache.layers[index]
            hidden, update, query = run_layer(
                layer, self.cache_keyword, hidden, update, cos, sin, key, value, start, verification_set
            )
            if index in self.heads.layers:
                queries.append(query)
        return self._region(_finish, tokens.shape)(hidden, update, queries, self.heads.columns)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._region(_project, hidden.shape[:2])(self.norm, self.lm_head, hidden)[..., : self.vocab_size]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _refuse_moved(path: str) -> None:
    raise RuntimeError(f"{path} was moved, cast or assigned anew since compile_pair: call compile_pair again")


def _embed(embed_tokens, rotary_emb, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = embed_tokens(tokens)
    position_ids = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    cos, sin = rotary_emb(hidden, position_ids=position_ids)
    return hidden, torch.zeros_like(hidden), cos, sin


def _run_layer(
    layer: Any,
    cache_keyword: str,
    hidden: Tensor,
    update: Tensor,
    cos: Tensor,
    sin: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    verification_set: VerificationSet | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A pre-norm decoder layer, from one residual sum to before the next, which fuses with the norm behind it."""
    attend = Attend(key, value, cos, sin, start, verification_set)
    cache = {cache_keyword: PassingCache()}
    hidden = hidden + update
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden),
        position_embeddings=(cos, sin),
        attention_mask=None,
        attend=attend,
        **cache,
    )
    hidden = hidden + attended
    return hidden, layer.mlp(layer.post_attention_layernorm(hidden)), cast(Tensor, attend.query)


def _finish(hidden: Tensor, update: Tensor, queries: list[Tensor], columns: Tensor) -> tuple[Tensor, Tensor]:
    return hidden + update, torch.cat(queries, dim=2).index_select(2, columns)


def _project(norm: nn.Module, lm_head: nn.Module, hidden: Tensor) -> Tensor:
    return lm_head(norm(hidden))
