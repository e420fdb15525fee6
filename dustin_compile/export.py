"""Writes a pair as a directory of exported programs and weights, which `load_exported` runs.

A decoder layer is exported as two programs with its weights as inputs, the parts before and after its attention; one
more makes logits. Caches never enter a program: our ops, which write and read them, run in between. So all layers share
the programs, dense and sparse passes do, and both models where they have the same shapes; weights are stored once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import AttentionInterface

from dustin_compile.adapter import PREFILL_MULTIPLE, CausalModel, PassingCache
from dustin_compile.config import DustinConfig
from dustin_compile.profile import checksum
from dustin_compile.runtime import (
    FORMAT,
    INSTALL_TENSORRT,
    MANIFEST,
    PROFILE,
    VERSION,
    WEIGHTS,
    describe_platform,
    hash_file,
)

if TYPE_CHECKING:
    from dustin_compile.pair import CompiledPair

Backend = Literal["aot-inductor", "tensorrt"]
SUFFIXES: dict[Backend, str] = {"aot-inductor": ".pt2", "tensorrt": ".engine"}
ATTENTION_NAME = "dustin_compile_export"


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
    """A function of one module, with the module's tensors as leading inputs.

    Args:
        module: whose tensors are replaced by inputs.
        names: of those tensors, in order.
        function: takes the module and the other inputs.
    """

    def __init__(self, module: nn.Module, names: list[str], function: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.call = Call(module, function)
        self.names = names

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        count = len(self.names)
        weights = {f"module.{name}": tensor for name, tensor in zip(self.names, args[:count], strict=True)}
        return torch.func.functional_call(self.call, weights, args[count:])


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
    batch: int,
    max_length: int,
    progress: Callable[[str], None] = lambda message: None,
) -> Path:
    """Write a pair for deployment; see `CompiledPair.export`."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} must be one of {', '.join(get_args(Backend))}")
    _check_bucket(pair, batch, max_length)
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory")
    target, draft = pair._generation.target, pair._generation.draft
    if backend == "tensorrt" and target.device.type != "cuda":
        raise ValueError(f"the pair is on {target.device}; {INSTALL_TENSORRT}")
    made_on = describe_platform(backend, target.device)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        writer = Writer(unfinished, backend, batch, progress)
        gamma, chunks = pair.config.gamma, _chunk_sizes(pair.config, max_length)
        lookback = (pair.config.refresh_every - 1) * (gamma + 1) if pair.config.refresh_every else 0
        with torch.no_grad():
            models = {
                "target": writer.write_model(
                    "target", target, {gamma + 1, lookback + gamma + 1, *chunks}, {1, gamma + 1}, max_length
                ),
                # Its first pass of a step feeds two tokens, the others one.
                "draft": writer.write_model("draft", draft, {2, *range(1, min(gamma, 2)), *chunks}, {1}, max_length),
            }
        save_file(writer.tensors, unfinished / WEIGHTS)
        dataclasses.replace(pair.profile, path=None).save(unfinished / PROFILE)
        names = sorted(path.name for path in unfinished.iterdir())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "backend": backend,
            "platform": made_on,
            "dtype": str(target.dtype).removeprefix("torch."),
            "batch": batch,
            "max_length": max_length,
            "vocab_size": pair.vocab_size,
            "eos_token_id": pair._defaults.eos_token_id,
            "pad_token_id": pair._defaults.pad_token_id,
            "tokenizer": target.config._name_or_path or None,
            "config": dataclasses.asdict(pair.config),
            "models": models,
            "files": {
                name: {"sha256": hash_file(unfinished / name), "bytes": (unfinished / name).stat().st_size}
                for name in names
            },
        }
        manifest = json.loads(json.dumps(manifest))
        manifest["checksum"] = checksum(manifest)
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if directory.exists():
            directory.rmdir()
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory


def _check_bucket(pair: CompiledPair, batch: int, max_length: int) -> None:
    for name, value in (("batch", batch), ("max_length", max_length)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    if batch & (batch - 1):
        raise ValueError(f"batch={batch} must be a power of two; a request of fewer rows is filled up to it")
    if not 2 <= max_length <= pair.max_length:
        raise ValueError(
            f"max_length={max_length} must be in 2..{pair.max_length}, the positions that both models have"
        )


def _chunk_sizes(config: DustinConfig, max_length: int) -> set[int]:
    """Sizes of which every prompt chunk is a sum: the whole chunk, and 64, 512, 4096, .. below it."""
    whole = config.prefill_chunk - config.prefill_chunk % PREFILL_MULTIPLE
    whole = min(whole, -(-max_length // PREFILL_MULTIPLE) * PREFILL_MULTIPLE)
    sizes, size = {whole}, PREFILL_MULTIPLE
    while size < whole:
        sizes.add(size)
        size *= 8
    return sizes


class Writer:
    """Exports models into one directory, each program and each tensor once."""

    def __init__(self, directory: Path, backend: Backend, batch: int, progress: Callable[[str], None]):
        self.directory, self.backend, self.batch, self.progress = directory, backend, batch, progress
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[tuple, str] = {}  # of tensors, by storage

    def write_model(
        self, role: str, model: CausalModel, passes: set[int], heads: set[int], max_length: int
    ) -> dict[str, Any]:
        """Write a model's programs and tensors.

        Args:
            role: prefix of its tensors' names.
            passes: tokens a row, for each of which a pass is exported.
            heads: tokens a row for which logits are.

        Returns:
            its entry of the manifest.
        """
        device, dtype, config = model.device, model.dtype, model.config
        layer = model.layers[0]
        size = model.head_dim
        head = nn.ModuleDict({"norm": model.norm, "lm_head": model.lm_head})
        cache_keyword = model.cache_keyword
        programs: dict[str, dict[int, str]] = {"front": {}, "back": {}, "head": {}}
        names: dict[str, list[str]] = {}

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(self.batch, *shape, dtype=dtype, device=device)

        def run_layer(layer: nn.Module, hidden: Tensor, cut: Cut) -> Tensor:
            attended, _ = cast(Any, layer).self_attn(
                hidden_states=hidden,
                position_embeddings=(None, None),  # append_kv rotates
                attention_mask=None,
                cut=cut,
                **{cache_keyword: PassingCache()},
            )
            return attended

        def front(layer: Any, hidden: Tensor, update: Tensor) -> tuple[Tensor, ...]:
            hidden = hidden + update
            cut = Cut(hidden.new_zeros(*hidden.shape[:2], config.num_attention_heads, size))
            run_layer(layer, layer.input_layernorm(hidden), cut)
            return hidden, cast(Tensor, cut.query), cast(Tensor, cut.key), cast(Tensor, cut.value)

        def back(layer: Any, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
            hidden = hidden + run_layer(layer, torch.zeros_like(hidden), Cut(attended))
            return hidden, layer.mlp(layer.post_attention_layernorm(hidden))

        def project(head: Any, hidden: Tensor) -> tuple[Tensor, ...]:
            return (head["lm_head"](head["norm"](hidden)),)

        with _cut_attention(config):
            for tokens in sorted(passes):
                hidden = zeros(tokens, config.hidden_size)
                attended = zeros(tokens, config.num_attention_heads, size)
                for part, function, inputs in (
                    ("front", front, (hidden, torch.zeros_like(hidden))),
                    ("back", back, (hidden, attended)),
                ):
                    self.progress(f"{role} {part}, {tokens} tokens")
                    names[part], programs[part][tokens] = self._write_program(layer, function, inputs)
            for tokens in sorted(heads):
                self.progress(f"{role} head, {tokens} tokens")
                hidden = zeros(tokens, config.hidden_size)
                names["head"], programs["head"][tokens] = self._write_program(head, project, (hidden,))
        positions = torch.arange(max_length, device=device)[None]
        cos, sin = model.rotary_emb(zeros(1, config.hidden_size)[:1], position_ids=positions)
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
            "layers": [
                {part: self._store_all(f"{role}.{index}", each, names[part]) for part in ("front", "back")}
                for index, each in enumerate(model.layers)
            ],
            "head": self._store_all(role, head, names["head"]),
            "programs": programs,
        }

    def _write_program(
        self, module: nn.Module, function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
    ) -> tuple[list[str], str]:
        """Export one function of a module; returns the names of the tensors that it takes, and its file."""
        tensors = _tensors(module)
        everything = _export(Part(module, list(tensors), function), (*tensors.values(), *inputs))
        placeholders = [node for node in everything.graph.nodes if node.op == "placeholder"]
        first = len(placeholders) - len(tensors) - len(inputs)  # behind the module's own, which nothing uses
        names = [
            name for name, node in zip(tensors, placeholders[first : first + len(tensors)], strict=True) if node.users
        ]
        arguments = (*(tensors[name] for name in names), *inputs)
        program = _export(Part(module, names, function), arguments)
        described = [(tuple(t.shape), t.stride(), str(t.dtype)) for t in arguments]
        key = hashlib.sha256(f"{program.graph_module.code}{described}".encode()).hexdigest()[:16]
        path = self.directory / f"{key}{SUFFIXES[self.backend]}"
        if not path.exists():
            BUILDERS[self.backend](program, arguments, path)
        return names, path.name

    def _store_all(self, prefix: str, module: nn.Module, names: Sequence[str]) -> list[str]:
        tensors = _tensors(module)
        return [self._store(f"{prefix}.{name}", tensors[name]) for name in names]

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
    for node in [n for n in program.graph.nodes if n.target is torch.ops.aten._assert_tensor_metadata.default]:
        program.graph.erase_node(node)  # a check of what is known by now, which would keep its argument alive
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _build_package(program: ExportedProgram, inputs: tuple[Tensor, ...], path: Path) -> None:
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def _build_engine(program: ExportedProgram, inputs: tuple[Tensor, ...], path: Path) -> None:
    try:
        import torch_tensorrt
    except ImportError:
        raise ImportError(INSTALL_TENSORRT) from None
    engine = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
        program,
        arg_inputs=inputs,
        device=inputs[0].device,
        use_explicit_typing=True,  # the program's own dtypes
        disable_tf32=True,
        immutable_weights=True,
    )
    path.write_bytes(bytes(engine))


BUILDERS: dict[Backend, Callable[[ExportedProgram, tuple[Tensor, ...], Path], None]] = {
    "aot-inductor": _build_package,
    "tensorrt": _build_engine,
}
