"""Runs what export.py wrote: the pair's own step, with exported programs where the model's code would run."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import re
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig

from dustin_compile.adapter import CachedModel, VerificationSet
from dustin_compile.config import DustinConfig
from dustin_compile.generation import Generation, Pair, Request
from dustin_compile.kv_cache import KVCache
from dustin_compile.ops.append_kv import append_kv
from dustin_compile.ops.dense_attention import dense_attention
from dustin_compile.ops.sparse_attention import sparse_attention
from dustin_compile.profile import Profile, checksum

FORMAT = "dustin_compile.export"
VERSION = 4
MANIFEST = "manifest.json"
WEIGHTS = "weights{suffix}.safetensors"  # of a shard
PROFILE = "profile.json"
TENSORRT_PACKAGES = ("tensorrt", "tensorrt_rtx")
INSTALL_TENSORRT = (
    "backend='tensorrt' needs an NVIDIA GPU and TensorRT: pip install 'dustin-compile[tensorrt]', or "
    "torch-tensorrt-rtx for TensorRT-RTX; backend='aot-inductor' needs neither"
)

Program = Callable[..., Sequence[Tensor]]
Loader = Callable[[Path, torch.device, Container[str]], Program]


class ExportError(ValueError):
    """An exported directory does not run here; the message names the file or the difference."""


@dataclass(frozen=True)
class Shape:
    """What caches and scoring need to know of a model; named as in transformers' configurations."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def find_tensorrt(made: Container[str] = ()) -> tuple[str, Any]:
    """The name of TensorRT's Python package, and the package.

    Args:
        made: names the flavour to prefer where both are here, as an export's platform does.

    Raises:
        ImportError: there is none; the message says what to install.
    """
    for name in sorted(TENSORRT_PACKAGES, key=lambda name: name not in made):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        # torch_tensorrt presents TensorRT-RTX under the other's name, too.
        if name == Path(module.__file__ or "").parent.name:
            return name, module
    raise ImportError(INSTALL_TENSORRT)


def describe_platform(backend: str, device: torch.device, made: Container[str] = ()) -> dict[str, str]:
    """What programs are tied to: processors, and versions, ours for the ops that they call.

    Args:
        backend: as `CompiledPair.export` takes it.
        device: where they run.
        made: the platform of programs that are to run here; see find_tensorrt.

    Raises:
        ImportError: they need TensorRT, and there is none.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}"
    else:
        architecture = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    found = {
        "device": device.type,
        "architecture": architecture,
        "torch": torch.__version__,
        "dustin_compile": version("dustin_compile"),
    }
    if backend == "tensorrt":
        name, module = find_tensorrt(made)
        found[name] = module.__version__
    else:
        found["cpu"] = _list_instructions()  # a package's host code is compiled for this very one, also on a GPU
    return found


INSTRUCTIONS = re.compile(
    r"sse|ssse3|pni|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|v?aes|v?pclmul|sha|sm[34]|gfni|adx|cx16"  # x86
    r"|asimd|sve|fp|atomics|crc32|pmull|f?cma|bf16|i8mm|lrcpc|jscvt|flagm"  # ARM
)


def _list_instructions() -> str:
    """The sets of instructions that a compiler may use here, of all that the kernel lists; nothing if not on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    words = (fields.get("flags") or fields.get("Features", "")).split()
    return " ".join(sorted(word for word in words if INSTRUCTIONS.match(word)))


def hash_files(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files, by name; side by side, since one core reads 1.5 GB a second."""

    def hash_file(name: str) -> str:
        with (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


def load_package(path: Path, device: torch.device, made: Container[str]) -> Program:
    """An AOTInductor package.

    `torch._inductor.aoti_load_package` would first try out this CPU's vector instructions, for a minute, to compare
    them with those of the CPU that compiled; the manifest has told already.
    """
    index = (device.index or 0) if device.type == "cuda" else -1
    # Its own bookkeeping of runs in flight queries events, which a graph under capture does not allow.
    run_single_threaded, runners = True, 1
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", run_single_threaded, runners, index)
    except RuntimeError as error:  # it unpacks the package into TMPDIR, from where it must be allowed to run
        raise ExportError(f"{path}: torch cannot load this package: {error}") from error
    return lambda *inputs: loader.run(list(inputs))


class Engine:
    """A TensorRT engine of fixed shapes, run on the current stream.

    Args:
        path: of the engine.
        device: where it runs.
        made: the platform that it was built for; see find_tensorrt.
    """

    def __init__(self, path: Path, device: torch.device, made: Container[str]):
        _, trt = find_tensorrt(made)
        self.device = device
        self.logger = trt.Logger(trt.Logger.WARNING)
        self.runtime = trt.Runtime(self.logger)
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise ExportError(f"{path}: TensorRT {trt.__version__} cannot read this engine")
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise ExportError(f"{path}: TensorRT {trt.__version__} cannot run this engine; its log above says why")
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        is_input = {name: self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = sorted((name for name in names if is_input[name]), key=_number)
        dtypes = {
            trt.float32: torch.float32,
            trt.float16: torch.float16,
            trt.bfloat16: torch.bfloat16,
        }
        self.outputs = [
            (name, tuple(self.engine.get_tensor_shape(name)), dtypes[self.engine.get_tensor_dtype(name)])
            for name in sorted((name for name in names if not is_input[name]), key=_number)
        ]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        inputs = tuple(map(_align, inputs))  # lives until the engine has been launched
        for name, tensor in zip(self.inputs, inputs, strict=True):
            self.context.set_tensor_address(name, tensor.data_ptr())
        outputs = []
        for name, shape, dtype in self.outputs:
            output = torch.empty(shape, dtype=dtype, device=self.device)
            self.context.set_tensor_address(name, output.data_ptr())
            outputs.append(output)
        if not self.context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
            raise RuntimeError("TensorRT did not run the engine; its log above says why")
        return outputs


def _align(tensor: Tensor) -> Tensor:
    """TensorRT asks for addresses that are multiples of 256; a slice may begin anywhere."""
    return tensor if tensor.data_ptr() % 256 == 0 else tensor.clone()


def _number(name: str) -> int:
    """Programs number their inputs and outputs: args_0, output0."""
    return int("".join(filter(str.isdigit, name)))


LOADERS: dict[str, Loader] = {"aot-inductor": load_package, "tensorrt": Engine}


class ExportedModel(CachedModel):
    """A model whose layers are exported programs around our ops.

    Programs take their weights, and rows: the tokens of all prompts, [1, B * T, ..]. `front` makes the first layer's
    query, key and value of the embeddings, side by side; `join` takes the residual sum and what attention gave from
    one layer to the next, `back` behind the last; `head` makes logits.

    Args:
        entry: the model's part of the manifest.
        tensors: what the manifest calls weights, by name.
        programs: by file name.
        heads, vocab_size: see CachedModel.
        compile: whether to compile what a pass runs besides.
    """

    def __init__(
        self,
        entry: dict[str, Any],
        tensors: dict[str, Tensor],
        programs: dict[str, Program],
        heads: Sequence[tuple[int, int]],
        vocab_size: int,
        compile: bool,
    ):
        shape, self.embedding = Shape(**entry["shape"]), tensors[entry["embedding"]]
        device, dtype = self.embedding.device, self.embedding.dtype
        super().__init__(shape, heads, vocab_size, entry["scale"], shape.head_dim, device, dtype, compile)
        self.rotary = tensors[entry["cos"]], tensors[entry["sin"]]
        self.steps, self.chunks = entry["steps"], entry["chunks"]
        self.weights = {
            part: [[tensors[name] for name in names] for names in each] for part, each in entry["weights"].items()
        }
        self.programs = {
            part: {int(rows): programs[file] for rows, file in files.items()}
            for part, files in entry["programs"].items()
        }

    def forward(
        self, tokens: Tensor, start: Tensor, cache: KVCache, verification_set: VerificationSet | None
    ) -> tuple[Tensor, Tensor]:
        """See CachedModel.forward. A chunk without programs of its size runs as several shorter ones."""
        count = tokens.shape[1]
        if count in self.steps or count in self.chunks:
            return self._run(tokens, start, cache, verification_set)
        hidden, queries, begin = [], [], 0
        while begin < count:
            size = max(size for size in self.chunks if size <= count - begin)
            piece = self._run(tokens[:, begin : begin + size], start + begin, cache, verification_set)
            hidden.append(piece[0])
            queries.append(piece[1])
            begin += size
        return torch.cat(hidden, dim=1), torch.cat(queries, dim=1)

    def _run(
        self, tokens: Tensor, start: Tensor, cache: KVCache, chosen: VerificationSet | None
    ) -> tuple[Tensor, Tensor]:
        batch, count = tokens.shape
        config = self.config
        heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        embedded, cos, sin = self._region(_embed, tokens.shape)(self.embedding, *self.rotary, tokens, start)
        hidden = embedded.view(1, batch * count, -1)
        (states,) = self._call("front", 0, hidden)
        queries = []
        for index, (key_cache, value_cache) in enumerate(cache.layers):
            query, key, value = states.view(batch, count, -1, self.head_dim).split(heads, dim=2)
            query = append_kv(key_cache, value_cache, query, key, value, cos, sin, start)
            if chosen is None:
                attended = dense_attention(query, key_cache, value_cache, start, self.scale)
            else:
                attended = sparse_attention(
                    query, key_cache, value_cache, chosen.indices, chosen.counts, chosen.length, start, self.scale
                )
            if index in self.heads.layers:
                queries.append(query)
            attended = attended.view(1, batch * count, -1, self.head_dim)
            if index < len(self.weights["join"]):
                hidden, states = self._call("join", index, hidden, attended)
        (hidden,) = self._call("back", 0, hidden, attended)
        return hidden.view(batch, count, -1), self._region(_gather, tokens.shape)(queries, self.heads.columns)

    def logits(self, hidden: Tensor) -> Tensor:
        batch, count, size = hidden.shape
        rows = hidden.contiguous().view(1, -1, size)  # programs do not look at strides
        (logits,) = self._call("head", 0, rows)
        return logits.view(batch, count, -1)[..., : self.vocab_size]

    def _call(self, part: str, index: int, *inputs: Tensor) -> Sequence[Tensor]:
        """Run the program of a part for the rows of its inputs, with the weights of one layer."""
        return self.programs[part][inputs[0].shape[1]](*self.weights[part][index], *inputs)


def _embed(embedding: Tensor, cos: Tensor, sin: Tensor, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions = start[:, None] + torch.arange(tokens.shape[1], dtype=start.dtype, device=start.device)
    # A finished row may run past the end of the table; nothing reads what it computes there.
    positions = positions.clamp(max=cos.shape[0] - 1)
    lookup = nn.functional.embedding
    return lookup(tokens, embedding), lookup(positions, cos), lookup(positions, sin)


def _gather(queries: list[Tensor], columns: Tensor) -> Tensor:
    return torch.cat(queries, dim=2).index_select(2, columns)


class ExportedPair(Pair):
    """Generates as the CompiledPair that was exported does. Made by `load_exported`.

    Attributes:
        directory: what was loaded.
        config: the settings in use.
        profile: the retrieval heads and the split in use.
        vocab_size: ids below it are tokens.
        batches: the buckets: rows of a request, which takes the smallest that holds it.
        max_length: tokens that a row may have, prompt included.
        tokenizer: name or directory of the tokenizer, as the target's configuration had it; None: unknown.
    """

    def __init__(
        self, directory: Path, manifest: dict[str, Any], config: DustinConfig, profile: Profile, device: torch.device
    ):
        self.directory, self.batches, self.tokenizer = directory, manifest["batches"], manifest["tokenizer"]
        stored: dict[str, Tensor] = {}
        for name in manifest["weights"]:
            stored |= load_file(directory / name, device=str(device))
        if device.type == "cpu":  # until here a map of the file, which may be deleted or written again
            stored = {name: tensor.clone() for name, tensor in stored.items()}
        load = LOADERS[manifest["backend"]]
        entries, vocab_size = manifest["models"], manifest["vocab_size"]
        names = sorted(_program_files(entries))
        programs = {name: load(directory / name, device, manifest["platform"]) for name in names}
        target, draft = (
            ExportedModel(entries[role], stored, programs, heads, vocab_size, bool(config.compile))
            for role, heads in (("target", profile.target_heads), ("draft", profile.draft_heads))
        )
        defaults = GenerationConfig(eos_token_id=manifest["eos_token_id"], pad_token_id=manifest["pad_token_id"])
        generation = Generation(target, draft, config, self.batches[-1], manifest["max_length"])
        super().__init__(generation, profile, vocab_size, manifest["max_length"], defaults)

    def _choose_batch(self, request: Request) -> int:
        rows, length = len(request.lengths), max(request.lengths) + request.max_new_tokens
        if rows > self.batches[-1] or length > self.max_length:
            buckets = ", ".join(map(str, self.batches))
            raise ValueError(
                f"input_ids has {rows} rows of up to {length} tokens, max_new_tokens={request.max_new_tokens} "
                f"included; {self.directory} was exported for batches of {buckets} with up to {self.max_length} tokens"
            )
        return next(batch for batch in self.batches if batch >= rows)


def load_exported(directory: str | Path) -> ExportedPair:
    """Load what `CompiledPair.export` wrote. It runs neither transformers' models nor needs their checkpoints.

    Programs are machine code: load only what you trust. The hashes find damage, not malice.

    Args:
        directory: the exported directory.

    Raises:
        FileNotFoundError: a file is missing.
        ExportError: a file was altered, or the directory was made for other hardware or versions; each is named.
        ImportError: TensorRT is needed and not here; the message says what to install.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    backend, made = manifest["backend"], manifest["platform"]
    if made["device"] == "cuda" and not torch.cuda.is_available():
        hint = f"; {INSTALL_TENSORRT}" if backend == "tensorrt" else ""
        raise ExportError(f"{directory} was exported for a GPU, {made['architecture']}, and there is none here{hint}")
    device = torch.device(made["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    check_platform(directory, made, describe_platform(backend, device, made))
    for name in manifest["files"]:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing")
    for name, found in hash_files(directory, list(manifest["files"])).items():
        if found != manifest["files"][name]:
            raise ExportError(f"{directory / name} was altered: its SHA-256 is not the one in {MANIFEST}")
    config = DustinConfig(**manifest["config"])
    return ExportedPair(directory, manifest, config, Profile.load(directory / PROFILE), device)


def check_platform(directory: Path, made: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuse programs that were made for other hardware or versions.

    Raises:
        ExportError: naming each difference.
    """
    missing = sorted(set(made.get("cpu", "").split()) - set(here.get("cpu", "").split()))
    different = [f"a CPU that knows {', '.join(missing)}"] if missing else []
    for key, value in made.items():
        if key != "cpu" and value != here.get(key):
            different.append(f"{key} {value}, " + (f"not {here[key]}" if key in here else "which is not here"))
    if different:
        raise ExportError(f"{directory} was exported for {'; '.join(different)}: export it again here")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an exported directory.

    Raises:
        FileNotFoundError: there is none.
        ExportError: it is damaged, or of another format version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {directory} is not an exported pair")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ExportError(f"{path}: format must be {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise ExportError(f"{path}: version={manifest.get('version')!r}, and this dustin_compile reads {VERSION}")
    stored = manifest.pop("checksum", None)
    if stored != checksum(manifest):
        raise ExportError(f"{path} was altered: its checksum does not match")
    try:
        files = {PROFILE, *manifest["weights"], *_program_files(manifest["models"])}
        complete = files == manifest["files"].keys()
    except (KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is damaged: {error!r}") from None
    if not complete or any(Path(name).name != name for name in files):
        raise ExportError(f"{path}: its models need other files than it lists")
    return manifest


def _program_files(models: dict[str, Any]) -> set[str]:
    return {name for model in models.values() for files in model["programs"].values() for name in files.values()}
