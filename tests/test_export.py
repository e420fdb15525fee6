"""Exported pairs: the same tokens without the models, refusals, and memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, compile_tiny, random_prompts, tiny_pair
from transformers import AutoTokenizer
from typer.testing import CliRunner

from dustin_compile import DustinConfig, ExportError, export, load_exported, runtime, smol
from dustin_compile.cli import app
from dustin_compile.packages import BuildError

MAX_LENGTH = 256
CALLS = 1000  # on a GPU; traps table, 31

RUN = """
import sys
from dustin_compile.cli import app
app(standalone_mode=False)
models = [name for name in sys.modules if name.startswith("transformers.models.") and "modeling" in name]
print([name for name in models if not name.startswith("transformers.models.auto.")])
"""


@pytest.fixture(scope="module")
def export_once(tmp_path_factory):
    """A function like `CompiledPair.export` that compiles each distinct package once."""
    built = tmp_path_factory.mktemp("programs")
    build = export.BUILDERS["aot-inductor"]

    def build_once(programs, progress):
        missing = {built / path.name: program for path, program in programs.items()}
        missing = {path: program for path, program in missing.items() if not path.exists()}
        if missing:
            build(missing, progress)
        for path in programs:
            shutil.copy(built / path.name, path)

    def export_pair(pair, directory, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(export.BUILDERS, "aot-inductor", build_once)
            pair.export(directory, **options)

    return export_pair


@pytest.fixture(scope="module")
def export_tiny(export_once, tmp_path_factory):
    """A function that exports a tiny pair, and returns pair and directory."""

    def export_pair(family="llama", device="cpu", backend="aot-inductor", batch=2, dtype=torch.float32, **changes):
        target, draft = (model.to(device, dtype) for model in tiny_pair(family, num_hidden_layers=2))
        pair = compile_tiny(target, draft, **{"gamma": 1, "prefill_chunk": 64, **changes})
        directory = tmp_path_factory.mktemp("exported") / "pair"
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":  # a compiler takes 15 s a program; other tests run real chunks
                patch.setattr(export, "_chunk_sizes", lambda config, max_length: {2})
            export_once(pair, directory, backend=backend, batch=batch, max_length=MAX_LENGTH)
        return pair, directory

    return export_pair


@pytest.fixture(scope="module")
def exported(export_tiny):
    return export_tiny()


@pytest.fixture
def copy(exported, tmp_path):
    shutil.copytree(exported[1], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def as_traced(monkeypatch):
    """Programs are written as they were traced, and run so: the whole path without a compiler."""

    def save(programs, progress):
        for path, (program, _) in programs.items():
            torch.export.save(program, path)

    load = lambda path, device, made: torch.export.load(path).module(check_guards=False)  # noqa: E731
    monkeypatch.setitem(export.BUILDERS, "aot-inductor", save)
    monkeypatch.setitem(runtime.LOADERS, "aot-inductor", load)


def check_same(pair, directory, device="cpu"):
    input_ids, mask = (x.to(device) for x in random_prompts([120, 101]))
    loaded = load_exported(directory)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        expected = pair.generate(input_ids, mask, max_new_tokens=40, **options)
        found = loaded.generate(input_ids, mask, max_new_tokens=40, **options)
        assert torch.equal(found.sequences, expected.sequences)
        for name in ("steps", "acceptance_rate", "new_tokens", "finish_reasons", "cache_read_share"):
            assert getattr(found.stats, name) == getattr(expected.stats, name)


@pytest.mark.parametrize("changes", [{}, {"verify": "dense", "draft_attention": "dense"}], ids=["sparse", "dense"])
def test_exported_tokens_are_the_pairs(export_tiny, changes):
    check_same(*export_tiny(**changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"refresh_every": 2}),
        ("qwen2", {"verify": "dense"}),
        ("qwen3", {}),
        ("mistral", {"draft_attention": "dense"}),
    ],
)
def test_every_family_as_it_was_traced(as_traced, tmp_path, capsys, monkeypatch, family, changes):
    monkeypatch.setattr(export, "SHARD_SIZE", 100_000)
    pair = compile_tiny(*tiny_pair(family, num_hidden_layers=1), gamma=1, prefill_chunk=64, **changes)
    pair.export(tmp_path / "pair", backend="aot-inductor", batch=2, max_length=MAX_LENGTH, verbose=True)
    assert "tracing target front, 128 rows\n" in capsys.readouterr().out
    assert len(list(tmp_path.glob("pair/weights-*-of-*.safetensors"))) > 1
    check_same(pair, tmp_path / "pair")


@pytest.mark.parametrize("batches", [(1,), (2, 3), (1, 4, 16), (3, 64)])
@pytest.mark.parametrize(
    "settings", [{}, {"gamma": 1}, {"refresh_every": 20}, {"gamma": 7, "prefill_chunk": 800}], ids=str
)
def test_passes_are_of_sizes_that_have_programs(batches, settings):
    config = DustinConfig(**settings)
    chunks, end = export._chunk_sizes(config, 8192), config.prefill_chunk - config.prefill_chunk % 64
    for role, steps in export._step_sizes(config).items():
        rows = {batch * count for batch in batches for count in steps | chunks}
        ran = []

        def run(tokens, start, cache, chosen, ran=ran, rows=rows):
            assert tokens.numel() in rows
            assert torch.equal(tokens[:, 0], start)
            ran.append(tokens.shape[1])
            return tokens[..., None], tokens[..., None]

        model = object.__new__(runtime.ExportedModel)
        model.steps, model.chunks, model._run = sorted(steps), sorted(chunks), run
        for batch in batches:
            for count in [*sorted(steps), *range(64, end + 1, 64)]:
                tokens = torch.arange(count).expand(batch, -1)
                for states in model.forward(tokens, torch.zeros(batch, dtype=torch.int32), None, None):
                    assert torch.equal(states[..., 0], tokens)
                assert sum(ran) == count and len(ran) <= 11, (role, batch, count, ran)
                assert ran == [count] or set(ran) <= chunks
                ran.clear()


def test_weights_are_stored_once_and_programs_are_shared(exported):
    pair, directory = exported
    parameters = sum(t.numel() for m in (pair._generation.target, pair._generation.draft) for t in _weights(m))
    tables = 4 * MAX_LENGTH * 16  # cos and sin of both models
    assert (directory / "weights.safetensors").stat().st_size <= 4 * (parameters + tables) + 10_000
    assert len(list(directory.glob("*.pt2"))) == 5  # front, join and back of 2 × 2 rows, logits of 2 × 1 and 2 × 2


def _weights(model):
    tensors = [t for layer in model.layers for t in export._tensors(layer).values()]
    return [*tensors, *model.norm.parameters(), *model.lm_head.buffers(), model.embed_tokens.weight]


def test_packages_take_the_threads_of_where_they_run(exported):
    for path in exported[1].glob("*.pt2"):
        with zipfile.ZipFile(path) as package:
            code = "".join(package.read(name).decode() for name in package.namelist() if name.endswith(".cpp"))
        assert "#pragma omp parallel" in code and "num_threads(" not in code


def test_programs_hold_no_cache(exported):
    """Traps 29 and 30: an in-place op or a cache inside a program breaks its export or its conversion."""
    model = exported[0]._generation.target
    writer = export.Writer(runtime.Path("/nonexistent"), ".pt2", [1, 3], lambda message: None)
    with torch.no_grad():
        entry = writer.write_model("target", model, {2}, set(), {1, 2}, MAX_LENGTH)
    assert {part: sorted(rows) for part, rows in entry["programs"].items()} == {
        "front": [2, 6], "join": [2, 6], "back": [2, 6], "head": [1, 2, 3, 6],
    }  # fmt: skip
    assert [len(entry["weights"][part]) for part in ("front", "join", "back", "head")] == [1, 1, 1, 1]
    for program, inputs in writer.programs.values():
        assert not program.graph_signature.buffers_to_mutate
        assert not program.graph_signature.user_inputs_to_mutate
        assert not program.state_dict and not program.constants
        operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert not [name for name in operators if "index_put" in name or "dustin_compile" in name or "cat" in name]
        assert any("matmul" in name or "linear" in name for name in operators)
        assert len(program.graph.find_nodes(op="placeholder")) == len(inputs)


def test_a_norm_of_queries_is_exported():
    """Qwen3's queries and keys are no mere pieces of one product."""
    model = compile_tiny(*tiny_pair("qwen3", num_hidden_layers=1))._generation.target
    writer = export.Writer(runtime.Path("/nonexistent"), ".pt2", [1], lambda message: None)
    with torch.no_grad():
        entry = writer.write_model("target", model, {2}, set(), set(), MAX_LENGTH)
        hidden = torch.randn(1, 2, model.config.hidden_size)
        path = runtime.Path("/nonexistent") / entry["programs"]["front"][2]
        program, inputs = writer.programs[path]
        (found,) = program.module(check_guards=False)(*inputs[:-1], hidden)
        layer = model.layers[0]
        states = layer.self_attn.q_proj(layer.input_layernorm(hidden))
        query = layer.self_attn.q_norm(states.view(1, 2, -1, model.head_dim))
    assert entry["programs"]["join"] == {}
    torch.testing.assert_close(found[..., : query[0, 0].numel()], query.flatten(2))


def test_a_request_takes_the_smallest_bucket_that_holds_it(exported):
    pair, directory = exported
    loaded = load_exported(directory)
    input_ids, mask = random_prompts([40])
    expected = pair.generate(input_ids, mask, max_new_tokens=5).sequences
    assert torch.equal(loaded.generate(input_ids, mask, max_new_tokens=5).sequences, expected)  # in a batch of two
    loaded.batches, ran = [1, 3, 4], []
    loaded._generation.run = lambda request, batch: ran.append(batch)
    for rows in (1, 2, 3, 4):
        loaded.generate(torch.ones(rows, 8, dtype=torch.int64), max_new_tokens=4)
    assert ran == [1, 3, 3, 4]


def test_defaults_and_the_tokenizer_come_along(as_traced, tokenizer, tmp_path, monkeypatch):
    target, draft = tiny_pair(num_hidden_layers=1)
    monkeypatch.chdir(tmp_path)
    target.config._name_or_path = tokenizer.name  # relative, which is of no use elsewhere
    pair = compile_tiny(target, draft, gamma=1, prefill_chunk=64)
    input_ids, mask = random_prompts([24, 24])
    first, second = pair.generate(input_ids, max_new_tokens=16).sequences[:, 24:].tolist()
    ends = [min({*range(96)} - {*first, *second}), next(token for token in first if token not in second)]
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = ends, 5
    pair.export(tmp_path / "pair", backend="aot-inductor", batch=2, max_length=64)
    monkeypatch.chdir("/")
    found = load_exported(tmp_path / "pair").generate(input_ids, mask, max_new_tokens=16)
    assert found.stats.finish_reasons == ["stop", "length"]
    assert torch.equal(found.sequences, pair.generate(input_ids, mask, max_new_tokens=16).sequences)
    new = found.stats.new_tokens[0]
    assert new < 16 and found.sequences[0, 23 + new] == ends[1] and (found.sequences[0, 24 + new :] == 5).all()
    (tmp_path / "prompt.txt").write_text("Call me Ishmael.")
    options = ["--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8"]
    result = command("generate", "--exported", str(tmp_path / "pair"), *options)
    ids = torch.tensor([[ord(letter) - 32 for letter in "Call me Ishmael."]])
    expected = pair.generate(ids, max_new_tokens=8).sequences[0, ids.shape[1] :]
    text = AutoTokenizer.from_pretrained(tokenizer).decode(expected, skip_special_tokens=True)
    assert result.stdout == f"{text}\n"


@pytest.mark.parametrize(
    ("shape", "limit"), [((1, 8), 250), ((3, 8), 4), ((2, 250), 7)], ids=["long", "many rows", "just too long"]
)
def test_a_request_outside_the_buckets_names_them(exported, shape, limit):
    loaded = load_exported(exported[1])
    loaded.batches = [1, 2]
    with pytest.raises(ValueError, match="was exported for batches of 1, 2 with up to 256 tokens"):
        loaded.generate(torch.ones(shape, dtype=torch.int64), max_new_tokens=limit)


def test_missing_and_altered_files_are_refused_by_name(copy):
    program = next(copy.glob("*.pt2"))
    content = program.read_bytes()
    program.write_bytes(content[:-1] + b"x")
    with pytest.raises(ExportError, match=f"{program.name} was altered"):
        load_exported(copy)
    program.unlink()
    with pytest.raises(FileNotFoundError, match=f"{program.name} is missing"):
        load_exported(copy)
    manifest = copy / runtime.MANIFEST
    manifest.write_text(manifest.read_text().replace('"max_length": 256', '"max_length": 999'))
    with pytest.raises(ExportError, match=r"manifest\.json was altered"):
        load_exported(copy)
    manifest.unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json is missing: .* is not an exported pair"):
        load_exported(copy)


def edit_manifest(directory, platform=None, **changes):
    path = directory / runtime.MANIFEST
    manifest = {**json.loads(path.read_text()), **changes}
    del manifest["checksum"]
    manifest["platform"].update(platform or {})
    path.write_text(json.dumps({**manifest, "checksum": runtime.checksum(manifest)}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architecture", "sm_90", "architecture sm_90, not"),
        ("torch", "2.0.0", r"torch 2\.0\.0, not"),
        ("dustin_compile", "0.0.1", r"dustin_compile 0\.0\.1, not"),
        ("cpu", "avx2048", "a CPU that knows avx2048: export it again here"),
        ("tensorrt", "10.14", r"tensorrt 10\.14, which is not here"),
    ],
)
def test_other_hardware_and_versions_are_refused(copy, key, value, message):
    edit_manifest(copy, platform={key: value})
    with pytest.raises(ExportError, match=message):
        load_exported(copy)


@pytest.mark.parametrize("line", ["model name\t: AMD EPYC\nflags\t\t: {}\n", "Features\t: {}\n"])
def test_a_cpu_with_more_instructions_will_do(monkeypatch, tmp_path, line):
    def platform(words):
        monkeypatch.setattr(runtime.Path, "read_text", lambda path: line.format(words) * 2)
        return {"cpu": runtime._list_instructions()}

    made = platform("fma avx2 ibpb rep_good")
    runtime.check_platform(tmp_path, made, platform("avx512f avx2 fma tsc"))  # other words are the kernel's
    with pytest.raises(ExportError, match="for a CPU that knows avx2, fma: export"):
        runtime.check_platform(tmp_path, made, platform("ibpb rep_good"))


def test_every_file_that_runs_is_in_the_manifest(copy):
    program = next(copy.glob("*.pt2"))
    files = json.loads((copy / runtime.MANIFEST).read_text())["files"]
    program.write_bytes(b"no package")
    edit_manifest(copy, files={**files, **runtime.hash_files(copy, [program.name])})
    with pytest.raises(ExportError, match=f"{program.name}: torch cannot load this package"):
        load_exported(copy)
    edit_manifest(copy, files={name: files[name] for name in files if name != program.name})
    with pytest.raises(ExportError, match="need other files than it lists"):
        load_exported(copy)
    edit_manifest(copy, files=None)
    with pytest.raises(ExportError, match="is damaged"):
        load_exported(copy)
    text = (copy / runtime.MANIFEST).read_text().replace(program.name, f"../{program.name}")
    (copy / runtime.MANIFEST).write_text(text)
    edit_manifest(copy, files={f"../{name}" if name == program.name else name: files[name] for name in files})
    with pytest.raises(ExportError, match="need other files than it lists"):
        load_exported(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "dustin_compile.profile", "format must be 'dustin_compile.export'"),
        ("version", 2, f"version=2, and this dustin_compile reads {runtime.VERSION}"),
    ],
)
def test_other_formats_are_refused(copy, key, value, message):
    edit_manifest(copy, **{key: value})
    with pytest.raises(ExportError, match=message):
        load_exported(copy)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("aot-inductor", "a GPU, sm_90, and there is none here$"),
        ("tensorrt", r"none here; .*dustin-compile\[tensorrt\]"),
    ],
)
def test_a_gpus_directory_is_refused_without_one(copy, monkeypatch, backend, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    edit_manifest(copy, {"device": "cuda", "architecture": "sm_90"}, backend=backend)
    with pytest.raises(ExportError, match=message):
        load_exported(copy)


def test_without_tensorrt_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(runtime, "TENSORRT_PACKAGES", ("no_such_tensorrt",))
    with pytest.raises(ImportError, match=r"dustin-compile\[tensorrt\].*torch-tensorrt-rtx"):
        runtime.find_tensorrt()


def test_of_both_flavours_the_one_in_use_counts(monkeypatch):
    flavours = {name: SimpleNamespace(__file__=f"/site/{name}/__init__.py") for name in runtime.TENSORRT_PACKAGES}
    for name, module in flavours.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", SimpleNamespace())
    for name, module in flavours.items():  # a platform's, when an export is loaded
        assert runtime.find_tensorrt({"torch": "2.11.0", name: "1.4.0"}) == (name, module)
        with monkeypatch.context() as patch:  # torch_tensorrt's, when it is made
            patch.setitem(sys.modules, "tensorrt", module)
            assert export._import_torch_tensorrt()[0] == name


@pytest.mark.parametrize(
    ("flavour", "dtype", "exact"),
    [
        ("tensorrt_rtx", torch.float32, True),
        ("tensorrt_rtx", torch.bfloat16, False),
        ("tensorrt", torch.float32, False),  # can be told to multiply in fp32
    ],
)
def test_tensorrt_rtx_multiplies_fp32_without_its_own_products(monkeypatch, tmp_path, flavour, dtype, exact):
    given = []

    def convert(program, **options):
        given.append((program, options["disable_tf32"]))
        return b"engine"

    tensorrt = SimpleNamespace(dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=convert))
    monkeypatch.setitem(sys.modules, "torch_tensorrt", tensorrt)
    monkeypatch.setattr(export, "find_tensorrt", lambda: (flavour, None))
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32, bias=False)).to(dtype)
    x = torch.randn(1, 5, 64, dtype=dtype)
    export.BUILDERS["tensorrt"]({tmp_path / "x.engine": (torch.export.export(linear, (x,)), (x,))}, print)
    [(program, disable_tf32)] = given
    assert disable_tf32
    products = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert len(products) == (0 if exact else 2)
    torch.testing.assert_close(program.module()(x), linear(x))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch=0 must be an integer of at least 1, or several"),
        ({"batch": [1, "2"]}, ValueError, r"batch=\[1, '2'\] must be"),
        ({"batch": []}, ValueError, r"batch=\[\] must be"),
        ({"max_length": True}, ValueError, "max_length=True must be an integer of at least 1$"),
        ({"max_length": 9999}, ValueError, "max_length=9999"),
        ({"backend": "onnx"}, ValueError, "backend='onnx'"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(exported, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        exported[0].export(tmp_path / "out", **{"backend": "aot-inductor", "batch": 1, "max_length": 64, **changes})
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_and_a_broken_tensorrt_are_named(exported, tmp_path, monkeypatch):
    from torch._inductor import cpp_builder, exc

    def fail(*args):
        raise exc.InvalidCxxCompiler()

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    with pytest.raises(ValueError, match="backend='aot-inductor' needs a C\\+\\+ compiler to export: No working C"):
        exported[0].export(tmp_path / "out", backend="aot-inductor", batch=1, max_length=64)

    def fail(name):
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(export.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"cannot be imported: libnvinfer\.so\.10.*dustin-compile\[tensorrt\]"):
        export._import_torch_tensorrt()


def test_tensorrt_on_a_cpu_says_what_to_install(exported, tmp_path):
    with pytest.raises(ValueError, match=r"dustin-compile\[tensorrt\].*torch-tensorrt-rtx"):
        exported[0].export_tensorrt(tmp_path / "out", batch=1, max_length=64)


def test_files_are_as_readable_as_each_other(exported):
    assert len({path.stat().st_mode for path in exported[1].iterdir()}) == 1


@pytest.mark.parametrize("place", ["new", "empty", "working", "link"])
def test_a_new_or_empty_directory_is_filled(exported, tmp_path, monkeypatch, place):
    directory = tmp_path / "pair"
    if place != "new":
        directory.mkdir()
    if place == "link":
        (tmp_path / "link").symlink_to(directory)
    monkeypatch.chdir(directory if place == "working" else tmp_path)
    given = {"new": directory, "empty": directory, "working": ".", "link": "link"}[place]
    options = {"backend": "aot-inductor", "batch": range(1, 4), "max_length": 64}

    def write_little(writer, *args):
        writer.tensors["weight"] = torch.ones(1)
        return {"programs": {}}

    monkeypatch.setattr(export.Writer, "write_model", write_little)

    def fail(programs, progress):
        raise BuildError("no compiler")

    monkeypatch.setitem(export.BUILDERS, "aot-inductor", fail)
    with pytest.raises(BuildError):
        exported[0].export(given, **options)
    assert directory.exists() == (place != "new") and not list(tmp_path.glob("pair/*")) + list(tmp_path.glob(".*"))
    monkeypatch.setitem(export.BUILDERS, "aot-inductor", lambda programs, progress: None)
    assert exported[0].export(given, **options) == directory
    files = {path.name for path in directory.iterdir()}
    assert files == {runtime.MANIFEST, runtime.PROFILE, "weights.safetensors"}
    manifest = runtime.read_manifest(directory)
    assert (manifest["batches"], manifest["max_length"], manifest["dtype"]) == ([1, 2, 3], 64, "float32")
    assert directory.stat().st_mode & 0o055 == 0o055 and not list(tmp_path.glob(".*"))


def test_a_full_directory_is_left_alone(exported):
    before = {path: path.stat().st_mtime_ns for path in exported[1].iterdir()}
    with pytest.raises(FileExistsError, match="not an empty directory"):
        exported[0].export(exported[1], backend="aot-inductor", batch=1, max_length=64)
    assert {path: path.stat().st_mtime_ns for path in exported[1].iterdir()} == before


def test_alternating_requests_leave_memory_flat(as_traced, tmp_path):
    """Trap 31: both buckets in turn, and short and long prompts; the GPU test makes CALLS calls."""
    pair = compile_tiny(*tiny_pair(num_hidden_layers=1), gamma=1, prefill_chunk=64)
    pair.export(tmp_path / "pair", backend="aot-inductor", batch=(1, 2), max_length=MAX_LENGTH)
    loaded = load_exported(tmp_path / "pair")
    prompts = [torch.ones(rows, width, dtype=torch.int64) for rows in (2, 1) for width in (9, 200)]
    expected = [pair.generate(prompt, max_new_tokens=2).sequences for prompt in prompts]

    def run(count):
        for i in range(count):
            found = loaded.generate(prompts[i % 4], max_new_tokens=2)
            assert torch.equal(found.sequences, expected[i % 4])
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, buffers = run(8), loaded._generation.buffers
    assert run(50) - before <= 2**17  # less than a page a call
    assert loaded._generation.buffers is buffers and (buffers.batch, buffers.capacity) == (2, 1024)


@pytest.fixture(params=["aot-inductor", "tensorrt"])
def backend(request):
    if request.param == "tensorrt":
        pytest.importorskip("torch_tensorrt")
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("verify", ["sparse", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_a_gpu(export_tiny, backend, family, verify):
    changes = {"verify": verify, "draft_attention": verify, "compile": True, "backend": backend}
    if verify == "sparse":
        changes["refresh_every"] = 3
    check_same(*export_tiny(family, "cuda", **changes), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("verify", ["sparse", "dense"])
def test_real_tokens_are_the_pairs(export_once, load_smol, backend, verify, tmp_path):
    loaded = load_smol(device="cuda", dtype=torch.float32)
    changes = {"verify": verify, "draft_attention": verify, "budget": 256, "prefill_chunk": 64, "compile": True}
    pair = compile_tiny(loaded.target, loaded.draft, **changes)
    export_once(pair, tmp_path / "pair", backend=backend, batch=1, max_length=2048)
    prompt = smol.passage(loaded.tokenizer, 1024).cuda()
    options = {"max_new_tokens": 64, "eos_token_id": []}
    found = load_exported(tmp_path / "pair").generate(prompt, **options)
    assert torch.equal(found.sequences, pair.generate(prompt, **options).sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_logits_are_as_exact_as_the_pairs(export_tiny, backend, family):
    """Against fp32, relative: at most one and a half times the compiled pair's own error."""
    changes = {"compile": True, "backend": backend, "dtype": torch.bfloat16}
    pair, directory = export_tiny(family, "cuda", **changes)
    rounded = (model.to(torch.bfloat16).float().cuda() for model in tiny_pair(family, num_hidden_layers=2))
    exact = compile_tiny(*rounded)
    tokens, _ = (x.cuda() for x in random_prompts([64, 64]))
    logits = {}
    for name, each in {"exact": exact, "pair": pair, "exported": load_exported(directory)}.items():
        model = each._generation.target
        start = torch.zeros(2, dtype=torch.int32, device="cuda")
        with torch.no_grad():
            hidden, _ = model.forward(tokens, start, model.new_cache(2, 64), None)
            logits[name] = torch.cat([model.logits(hidden[:, i : i + 2]).float() for i in range(0, 64, 2)])
    error = {name: (logits[name] - logits["exact"]).norm().item() for name in ("pair", "exported")}
    assert error["exported"] <= 1.5 * error["pair"], error


@pytest.mark.gpu
def test_many_alternating_requests_leave_gpu_memory_flat(export_tiny, backend):
    _, directory = export_tiny("llama", "cuda", compile=True, backend=backend, batch=(1, 2))
    loaded = load_exported(directory)
    shapes = ((2, 200, 2), (1, 9, 5), (2, 9, 5), (1, 200, 2))
    calls = [(torch.ones(rows, width, dtype=torch.int64, device="cuda"), limit) for rows, width, limit in shapes]

    def used():
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()  # of the whole GPU, which must have no other processes: engines count, too
        return torch.cuda.memory_allocated(), -free

    for i in range(CALLS):
        loaded.generate(calls[i % 4][0], max_new_tokens=calls[i % 4][1])
        if i == 99:
            before = used()
    after = used()
    assert after[0] == before[0]
    assert after[1] - before[1] <= 2**24


def command(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def tokenizer(tmp_path):
    """One token a letter, in a directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(95)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token=" ").save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_command_runs_what_was_exported_without_the_models(exported, tokenizer, tmp_path, monkeypatch):
    pair, directory = exported
    (tmp_path / "prompt.txt").write_text("Call me Ishmael.")
    prompt = ["--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8", "--json"]
    options = ["generate", "--exported", str(directory), "--tokenizer", str(tokenizer), *prompt]
    process = subprocess.run([sys.executable, "-c", RUN, *options], capture_output=True, text=True, check=True)
    line, models = process.stdout.splitlines()
    assert models == "[]"
    ids = torch.tensor([[ord(letter) - 32 for letter in "Call me Ishmael."]])
    expected = pair.generate(ids, max_new_tokens=8)
    found = json.loads(line)
    assert found["text"] == AutoTokenizer.from_pretrained(tokenizer).decode(expected.sequences[0, ids.shape[1] :])
    assert (found["new_tokens"], found["gamma"], found["budget"]) == (8, 1, 32)

    assert "--gamma: what was exported has its own" in command(*options, "--gamma", "2").stderr
    monkeypatch.setattr("dustin_compile.cli.load_exported", None)  # too late
    assert "names no tokenizer" in command("generate", "--exported", str(directory), *prompt).stderr
    assert "give --target and --draft, or --exported" in command("generate", *prompt).stderr


def test_the_export_command(tokenizer, tmp_path, monkeypatch):
    for name, model in zip(("target", "draft"), tiny_pair(num_hidden_layers=1), strict=True):
        model.save_pretrained(tmp_path / name)
        shutil.copytree(tokenizer, tmp_path / name, dirs_exist_ok=True)
    arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--out", str(tmp_path / "o")]
    arguments += ["--device", "cpu", "--max-length", "64", "--budget", "128", "--gamma", "1"]
    result = command("export", *arguments, "--verify", "dense", "--refresh-every", "2")
    assert result.exit_code == 1 and "refresh_every=2 needs verify='sparse'" in result.stderr
    arguments += ["--refresh-every", "2", "--batch", "1", "--batch", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dustin_compile.cli.load_pair", None)  # too late
        patch.setitem(sys.modules, "torch_tensorrt", None)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for changes, message in (
            (["--backend", "tensorrt"], "the pair is on cpu; backend='tensorrt' needs an NVIDIA GPU and TensorRT"),
            (["--backend", "tensorrt", "--device", "cuda"], "Error: backend='tensorrt' needs an NVIDIA GPU"),
            (["--batch", "0"], "batch=[1, 4, 0] must be"),
            (["--max-length", "9999"], "max_length=9999 must be in 2..4096"),
            (["--out", str(tmp_path)], "is not an empty directory"),
        ):
            result = command("export", *arguments, "--backend", "aot-inductor", *changes)
            assert result.exit_code == 1 and message in " ".join(result.stderr.split())
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        write = lambda pair, out, **options: seen.append((pair.config, options)) or out.mkdir()  # noqa: E731
        patch.setattr("dustin_compile.cli.export_pair", write)
        assert command("export", *arguments, "--backend", "aot-inductor", "--prefill-chunk", "64").exit_code == 0
    assert (seen[0][0].refresh_every, seen[0][0].prefill_chunk, seen[0][1]["batch"]) == (2, 64, [1, 4])

    def fail(programs, progress):
        raise BuildError("AOTInductor failed: no compiler")

    monkeypatch.setattr(export, "build_packages", fail)
    arguments[arguments.index("--out") + 1] = str(tmp_path / "failed")
    result = command("export", *arguments, "--backend", "aot-inductor", "--prefill-chunk", "64")
    assert result.exit_code == 1 and "Error: AOTInductor failed: no compiler\n" in result.stderr
    assert not list(tmp_path.glob("*failed*"))
