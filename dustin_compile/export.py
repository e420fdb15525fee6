"""Writes a pair as a directory of exported programs and weights, which `load_exported` runs.

Programs are the parts of a model between the attentions of its layers: `front` before the first, `join` from one to
the next, `back` behind the last, and `head` makes logits. Weights are their inputs, and caches never enter them: our
ops, which write and read those, run in between. What is in them treats each token by itself, so a program is of so many
rows, whosever tokens they are. So all layers share programs, dense and sparse passes do, batches do, and both models
where they have the same shapes; and weights are stored once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import operator
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from transformers import AttentionInterface

from dustin_compile.adapter import PREFILL_MULTIPLE, CausalModel, PassingCache, plain_products
from dustin_compile.config import DustinConfig
from dustin_compile.packages import BuildError, build_packages, check_compiler
from dustin_compile.profile import checksum
from dustin_compile.runtime import (
    FORMAT,
    INSTALL_TENSORRT,
    MANIFEST,
    PROFILE,
    VERSION,
    WEIGHTS,
    describe_platform,
    find_tensorrt,
    hash_files,
)

if TYPE_CHECKING:
    from dustin_compile.pair import CompiledPair

Backend = Literal["aot-inductor", "tensorrt"]
SUFFIXES: dict[Backend, str] = {"aot-inductor": ".pt2", "tensorrt": ".engine"}
ATTENTION_NAME = "dustin_compile_export"
SHARD_SIZE = "2GB"  # of weights; shards are hashed side by side


@dataclasses.dataclass
class Cut:
    """Stands for attention while a layer is traced: takes its inputs, and gives what was computed elsewhere."""

    attended: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


def attend_cut(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, cut: Cut, **kwargs):
    """The form that AttentionInterface asks for; query, key and value are not rotated yet."""
    cut.query, cut.key, cut.value = (states.transpose(1, 2) for states in (query, key, value))
    return cut.attended, None


AttentionInterface.register(ATTENTION_NAME, attend_cut)


class Part(nn.Module):
    """A function of a module, with the module's tensors as leading inputs.

    Args:
        module: whose tensors are replaced by inputs.
        names: of those tensors, in order.
        function: takes the module and the other inputs.
    """

    def __init__(self, module: nn.Module, names: list[str], function: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.names = names
        self.calls = [Call(module, function)]  # in a list, so that the program does not hold the module's tensors

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        count = len(self.names)
        weights = {f"module.{name}": tensor for name, tensor in zip(self.names, args[:count], strict=True)}
        return torch.func.functional_call(self.calls[0], weights, args[count:], tie_weights=False)


class Call(nn.Module):
    """A function of a module as the module's forward."""

    def __init__(self, module: nn.Module, function: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.module, *args)


def export_pair(
    pair: CompiledPair,
    directory: str | Path,
    *,
    backend: Backend,
    batch: int | Sequence[int],
    max_length: int,
    progress: Callable[[str], None] = lambda message: None,
) -> Path:
    """Write a pair for deployment; see `CompiledPair.export`."""
    target, draft = (cast(CausalModel, model) for model in (pair._generation.target, pair._generation.draft))
    positions = pair.max_length
    check_export(
        directory, backend=backend, batch=batch, max_length=max_length, device=target.device, positions=positions
    )
    target.check_weights()
    draft.check_weights()
    directory, batches = Path(directory).resolve(), sorted(set(_as_list(batch)))
    made_on = describe_platform(backend, target.device)
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = directory if directory.exists() else directory.parent
    unfinished = folder / f".{directory.name}.{secrets.token_hex(4)}"
    unfinished.mkdir()
    try:
        writer = Writer(unfinished, SUFFIXES[backend], batches, progress)
        steps, chunks = _step_sizes(pair.config), _chunk_sizes(pair.config, max_length)
        with torch.no_grad(), plain_products() if backend == "tensorrt" else nullcontext():
            models = {
                "target": writer.write_model(
                    "target", target, steps["target"], chunks, {1, pair.config.gamma + 1}, max_length
                ),
                "draft": writer.write_model("draft", draft, steps["draft"], chunks, {1}, max_length),
            }
        BUILDERS[backend](writer.programs, progress)
        progress("writing weights")
        shards = split_torch_state_dict_into_shards(
            writer.tensors, filename_pattern=WEIGHTS, max_shard_size=SHARD_SIZE
        ).filename_to_tensors
        for shard, tensors in shards.items():
            save_file({name: writer.tensors[name] for name in tensors}, unfinished / shard)
        dataclasses.replace(pair.profile, path=None).save(unfinished / PROFILE)
        names = sorted(path.name for path in unfinished.iterdir())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "backend": backend,
            "platform": made_on,
            "dtype": str(target.dtype).removeprefix("torch."),
            "batches": batches,
            "max_length": max_length,
            "vocab_size": pair.vocab_size,
            "eos_token_id": pair._defaults.eos_token_id,
            "pad_token_id": pair._defaults.pad_token_id,
            "tokenizer": _name_tokenizer(target.config._name_or_path),
            "config": dataclasses.asdict(pair.config),
            "models": models,
            "weights": sorted(shards),
            "files": hash_files(unfinished, names),
        }
        manifest = json.loads(json.dumps(manifest))
        manifest["checksum"] = checksum(manifest)
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for shard in shards:  # which safetensors makes the owner's alone
            (unfinished / shard).chmod((unfinished / MANIFEST).stat().st_mode)
        _move(unfinished, directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory


def check_export(
    directory: str | Path,
    *,
    backend: Backend,
    batch: int | Sequence[int],
    max_length: int,
    device: torch.device,
    positions: int,
) -> None:
    """Refuse an export as `CompiledPair.export` does, without its models.

    Args:
        directory, backend, batch, max_length: as there.
        device: where the models are, or will be.
        positions: that both models have.

    Raises: as there.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} must be one of {', '.join(get_args(Backend))}")
    for name, given, values in (("batch", batch, _as_list(batch)), ("max_length", max_length, [max_length])):
        if not values or any(not isinstance(value, int) or isinstance(value, bool) or value < 1 for value in values):
            several = ", or several" if name == "batch" else ""
            raise ValueError(f"{name}={given!r} must be an integer of at least 1{several}")
    if not 2 <= max_length <= positions:
        raise ValueError(f"max_length={max_length} must be in 2..{positions}, the positions that both models have")
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory")
    if backend == "aot-inductor":
        check_compiler()
    else:
        if device.type != "cuda":
            raise ValueError(f"the pair is on {device}; {INSTALL_TENSORRT}")
        _import_torch_tensorrt()


def _as_list(batch: int | Sequence[int]) -> list[int]:
    return list(batch) if isinstance(batch, Sequence) else [batch]


def _name_tokenizer(name: str) -> str | None:
    """A model's name, or its directory whole, which is as good from elsewhere; None: it has none."""
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name or None


def _move(unfinished: Path, directory: Path) -> None:
    """Rename a folder to the directory or, where that exists, move its files into that, the manifest last."""
    if not directory.exists():
        unfinished.rename(directory)
        return
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == MANIFEST):
        path.rename(directory / path.name)
    unfinished.rmdir()


def _step_sizes(config: DustinConfig) -> dict[str, set[int]]:
    """Tokens of a row in each model's passes of a step."""
    block = config.gamma + 1
    return {
        "target": {block, max(config.refresh_every, 1) * block},  # a refresh takes those since the last one along
        "draft": {2} if config.gamma == 1 else {1, 2},  # the first pass feeds two tokens, the others one
    }


def _chunk_sizes(config: DustinConfig, max_length: int) -> set[int]:
    """Sizes of which every prompt chunk is a sum: the whole chunk, and 64 and 512 tokens where it is longer."""
    whole = config.prefill_chunk - config.prefill_chunk % PREFILL_MULTIPLE
    whole = min(whole, -(-max_length // PREFILL_MULTIPLE) * PREFILL_MULTIPLE)
    return {size for size in (PREFILL_MULTIPLE, 8 * PREFILL_MULTIPLE) if size < whole} | {whole}


class Writer:
    """Exports models for one directory, each program and each tensor once.

    Attributes:
        programs: with their example inputs, by the path where they are to be built.
        tensors: for the weights file, by name.
    """

    def __init__(self, directory: Path, suffix: str, batches: Sequence[int], progress: Callable[[str], None]):
        self.directory, self.suffix, self.batches, self.progress = directory, suffix, batches, progress
        self.programs: dict[Path, tuple[ExportedProgram, tuple[Tensor, ...]]] = {}
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[tuple, str] = {}  # of tensors, by storage

    def write_model(
        self, role: str, model: CausalModel, steps: set[int], chunks: set[int], heads: set[int], max_length: int
    ) -> dict[str, Any]:
        """Write a model's programs and tensors.

        Args:
            role: prefix of its tensors' names.
            steps: tokens of a row in the passes of a step.
            chunks: tokens of a row in the passes of a prompt.
            heads: tokens of a row for which there are logits.

        Returns:
            its entry of the manifest.
        """
        device, dtype, config, layers = model.device, model.dtype, model.config, model.layers
        size = model.head_dim
        cache_keyword = model.cache_keyword

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(1, *shape, dtype=dtype, device=device)

        def run_attention(layer: nn.Module, hidden: Tensor, cut: Cut) -> Tensor:
            attended, _ = cast(Any, layer).self_attn(
                hidden_states=hidden,
                position_embeddings=(None, None),  # append_kv rotates
                attention_mask=None,
                cut=cut,
                **{cache_keyword: PassingCache()},
            )
            return attended

        def front(layer: Any, hidden: Tensor) -> tuple[Tensor, ...]:
            cut = Cut(hidden.new_zeros(*hidden.shape[:2], config.num_attention_heads, size))
            run_attention(layer, layer.input_layernorm(hidden), cut)
            return (torch.cat([cast(Tensor, states).flatten(2) for states in (cut.query, cut.key, cut.value)], dim=-1),)

        def back(layer: Any, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
            hidden = hidden + run_attention(layer, torch.zeros_like(hidden), Cut(attended))
            return (hidden + layer.mlp(layer.post_attention_layernorm(hidden)),)

        def join(pair: Any, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
            (hidden,) = back(pair[0], hidden, attended)
            return hidden, *front(pair[1], hidden)

        def project(head: Any, hidden: Tensor) -> tuple[Tensor, ...]:
            return (head["lm_head"](head["norm"](hidden)),)

        def rows_of(tokens: set[int]) -> list[int]:
            return sorted({batch * count for batch in self.batches for count in tokens})

        joints = [nn.ModuleList(pair) for pair in pairwise(layers)]
        modules: dict[str, tuple[Sequence[nn.Module], Callable[..., tuple[Tensor, ...]], list[int]]] = {
            "front": ([layers[0]], front, rows_of(steps | chunks)),
            "join": (joints, join, rows_of(steps | chunks)),
            "back": ([layers[-1]], back, rows_of(steps | chunks)),
            "head": ([nn.ModuleDict({"norm": model.norm, "lm_head": model.lm_head})], project, rows_of(heads)),
        }
        prefixes = {"front": f"{role}.0.", "back": f"{role}.{len(layers) - 1}.", "head": f"{role}."}
        programs: dict[str, dict[int, str]] = {}
        weights: dict[str, list[list[str]]] = {}
        with _cut_attention(config):
            for part, (parts, function, sizes) in modules.items():
                programs[part] = {}
                names: list[str] = []
                for rows in sizes if parts else ():
                    self.progress(f"tracing {role} {part}, {rows} rows")
                    inputs = [zeros(rows, config.hidden_size)]
                    if part in ("join", "back"):
                        inputs.append(zeros(rows, config.num_attention_heads, size))
                    names = names or _used_tensors(parts[0], function, inputs)  # whatever the rows
                    programs[part][rows] = self._trace(parts[0], names, function, inputs)
                weights[part] = [
                    self._store_all(prefixes.get(part, f"{role}.{index}."), module, names)
                    for index, module in enumerate(parts)
                ]
        positions = torch.arange(max_length, device=device)[None]
        cos, sin = model.rotary_emb(zeros(1, config.hidden_size), position_ids=positions)
        return {
            "shape": {
                "num_hidden_layers": config.num_hidden_layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "head_dim": size,
            },
            "scale": model.scale,
            "embedding": self._store(f"{role}.embedding", model.embed_tokens.weight),
            "cos": self._store(f"{role}.cos", cos[0]),
            "sin": self._store(f"{role}.sin", sin[0]),
            "weights": weights,
            "steps": sorted(steps),
            "chunks": sorted(chunks),
            "programs": programs,
        }

    def _trace(
        self,
        module: nn.Module,
        names: list[str],
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
    ) -> str:
        """Export one function of a module, which takes those of its tensors; returns the program's file."""
        tensors = _tensors(module)
        arguments = (*(tensors[name] for name in names), *inputs)
        program = _export(Part(module, names, function), arguments)
        described = [(tuple(t.shape), t.stride(), str(t.dtype)) for t in arguments]
        key = hashlib.sha256(f"{program.graph_module.code}{described}".encode()).hexdigest()[:16]
        path = self.directory / f"{key}{self.suffix}"
        self.programs[path] = program, arguments
        return path.name

    def _store_all(self, prefix: str, module: nn.Module, names: Sequence[str]) -> list[str]:
        tensors = _tensors(module)
        return [self._store(f"{prefix}{name}", tensors[name]) for name in names]

    def _store(self, name: str, tensor: Tensor) -> str:
        """Keep a tensor for the weights file, unless it is there; returns its name there."""
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self.names:
            self.names[key] = name
            # A view of a merged weight would take the whole of it along.
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            self.tensors[name] = tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
        return self.names[key]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in chain(module.named_parameters(), module.named_buffers())}


def _used_tensors(
    module: nn.Module, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> list[str]:
    """Names of a module's tensors that a function of it takes."""
    tensors = _tensors(module)
    everything = _export(Part(module, list(tensors), function), (*tensors.values(), *inputs))
    placeholders = [node for node in everything.graph.nodes if node.op == "placeholder"]
    return [name for name, node in zip(tensors, placeholders, strict=False) if node.users]


@contextmanager
def _cut_attention(config: Any) -> Iterator[None]:
    previous = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = previous


def _export(part: Part, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """Trace a part, and drop what lies beyond the cut."""
    program = torch.export.export(part, inputs, strict=False)
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        program.graph.erase_node(node)  # a check of what is known by now, which would keep its argument alive
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        _drop_cat(program, node)
    program.graph.eliminate_dead_code()
    _drop_constants(program)
    program.graph_module.recompile()
    return program


def _drop_constants(program: ExportedProgram) -> None:
    """Let go of the weights that only what lies beyond the cut would take."""
    signature = program.graph_signature
    for node in program.graph.find_nodes(op="placeholder"):
        target = signature.inputs_to_lifted_tensor_constants.get(node.name)
        if target is not None and not node.users:
            program.graph.erase_node(node)
            signature.input_specs[:] = [spec for spec in signature.input_specs if spec.target != target]
            del program.constants[target]


def _drop_cat(program: ExportedProgram, cat: Node) -> None:
    """Take the tensor that was split instead of its pieces put together again."""
    pieces = [_find_piece(node) for node in cast(Sequence[Node], cat.args[0])]
    splits = {piece.args[0] for piece in pieces if piece.target is operator.getitem}
    if len(splits) != 1 or [piece.args[1:] for piece in pieces] != [(index,) for index in range(len(pieces))]:
        return
    whole = cast(Node, cast(Node, splits.pop()).args[0])
    if whole.meta["val"].shape == cat.meta["val"].shape:
        cat.replace_all_uses_with(whole)
        program.graph_signature.replace_all_uses(cat.name, whole.name)


RESHAPES = {torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.flatten.using_ints}


def _find_piece(node: Node) -> Node:
    """Where a tensor was before it was only reshaped, or transposed there and back."""
    while True:
        source = node.args[0] if node.args else None
        if node.target in RESHAPES:
            node = cast(Node, source)
        elif node.target is torch.ops.aten.transpose.int and cast(Node, source).target is node.target:
            if cast(Node, source).args[1:] != node.args[1:]:
                return node
            node = cast(Node, cast(Node, source).args[0])
        else:
            return node


Programs = Mapping[Path, tuple[ExportedProgram, tuple[Tensor, ...]]]


def _build_packages(programs: Programs, progress: Callable[[str], None]) -> None:
    build_packages({path: program for path, (program, _) in programs.items()}, progress)


def _import_torch_tensorrt() -> tuple[str, Any]:
    """The flavour of TensorRT that torch_tensorrt uses, and torch_tensorrt.

    Raises:
        ImportError: there is none; the message says what to install.
    """
    try:
        torch_tensorrt = importlib.import_module("torch_tensorrt")
    except ModuleNotFoundError:
        raise ImportError(INSTALL_TENSORRT) from None
    except Exception as error:  # a broken one raises all sorts of things
        raise ImportError(
            f"torch_tensorrt is installed, but cannot be imported: {error}; {INSTALL_TENSORRT}"
        ) from error
    flavour, _ = find_tensorrt()  # which it presents as `tensorrt` from now on
    return flavour, torch_tensorrt


def _build_engines(programs: Programs, progress: Callable[[str], None]) -> None:
    flavour, torch_tensorrt = _import_torch_tensorrt()
    for count, (path, (program, inputs)) in enumerate(programs.items(), 1):
        progress(f"building engine {count} of {len(programs)}")
        if flavour == "tensorrt_rtx" and inputs[0].dtype == torch.float32:
            program = program.run_decompositions({torch.ops.aten.linear.default: _sum_products})
        try:
            engine = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
                program,
                arg_inputs=inputs,
                device=inputs[0].device,
                use_explicit_typing=True,  # the program's own dtypes
                disable_tf32=True,
                immutable_weights=True,
            )
        except (RuntimeError, AssertionError) as error:  # it asserts that TensorRT gave an engine
            raise BuildError(f"TensorRT built no engine, its log says why: {error}") from error
        path.write_bytes(bytes(engine))


def _sum_products(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in fp32, where TensorRT-RTX's own products of matrices are in TF32 whatever it is told."""
    output = (input[..., None, :] * weight).sum(-1)
    return output if bias is None else output + bias


BUILDERS: dict[Backend, Callable[[Programs, Callable[[str], None]], None]] = {
    "aot-inductor": _build_packages,
    "tensorrt": _build_engines,
}
