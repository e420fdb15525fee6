"""Exported pairs: the same tokens without the models, refusals, and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_models import FAMILIES, compile_tiny, random_prompts, tiny_pair
from typer.testing import CliRunner

from dustin_compile import ExportError, export, load_exported, runtime
from dustin_compile.cli import app

MAX_LENGTH = 256
CALLS = 1000  # on a GPU; traps table, 31

RUN = """
import json, sys
import torch
from dustin_compile import load_exported
directory, prompts, limit = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
output = load_exported(directory).generate(torch.tensor(prompts), max_new_tokens=limit)
models = [name for name in sys.modules if name.startswith("transformers.models.") and "modeling" in name]
models = [name for name in models if not name.startswith("transformers.models.auto.")]
print(json.dumps({"sequences": output.sequences.tolist(), "models": models, "rate": output.stats.acceptance_rate}))
"""


@pytest.fixture(scope="module")
def export_tiny(tmp_path_factory):
    """A function that exports a tiny pair, building each distinct program once, and returns pair and directory."""
    built = tmp_path_factory.mktemp("programs")
    build = export.BUILDERS["aot-inductor"]
    fast = {"aot_inductor.compile_wrapper_opt_level": "O0"}

    def build_once(program, inputs, path):
        if not (built / path.name).exists():
            if inputs[0].is_cuda:
                build(program, inputs, built / path.name)
            else:
                with torch._inductor.config.patch(fast):
                    build(program, inputs, built / path.name)
        shutil.copy(built / path.name, path)

    def export_pair(family="llama", device="cpu", **changes):
        target, draft = (model.to(device) for model in tiny_pair(family, num_hidden_layers=2))
        pair = compile_tiny(target, draft, **{"gamma": 1, "prefill_chunk": 64, **changes})
        directory = tmp_path_factory.mktemp("exported") / "pair"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(export.BUILDERS, "aot-inductor", build_once)
            if device == "cpu":  # chunks then run in the step's own sizes, which saves a C++ compiler's time
                patch.setattr(export, "_chunk_sizes", lambda config, max_length: set())
            pair.export(directory, backend="aot-inductor", batch=2, max_length=MAX_LENGTH)
        return pair, directory

    return export_pair


@pytest.fixture(scope="module")
def exported(export_tiny):
    return export_tiny()


@pytest.fixture
def copy(exported, tmp_path):
    shutil.copytree(exported[1], tmp_path / "copy")
    return tmp_path / "copy"


def check_same(pair, directory, device="cpu"):
    input_ids, mask = (x.to(device) for x in random_prompts([150, 101]))
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


def test_a_fresh_process_generates_without_the_models(exported):
    pair, directory = exported
    input_ids, _ = random_prompts([90, 90])
    command = [sys.executable, "-c", RUN, str(directory), json.dumps(input_ids.tolist()), "12"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["models"] == []
    assert found["sequences"] == pair.generate(input_ids, max_new_tokens=12).sequences.tolist()


def test_weights_are_stored_once_and_programs_are_shared(exported):
    pair, directory = exported
    parameters = sum(t.numel() for m in (pair._generation.target, pair._generation.draft) for t in _weights(m))
    tables = 4 * MAX_LENGTH * 16  # cos and sin of both models
    assert (directory / runtime.WEIGHTS).stat().st_size <= 4 * (parameters + tables) + 10_000
    assert len(list(directory.glob("*.pt2"))) == 4  # front and back of two tokens, logits of one and two


def _weights(model):
    tensors = [t for layer in model.layers for t in export._tensors(layer).values()]
    return [*tensors, *model.norm.parameters(), *model.lm_head.buffers(), model.embed_tokens.weight]


def test_programs_hold_no_cache(exported):
    """Traps 29 and 30: an in-place op or a cache inside a program breaks its export or its conversion."""
    pair, _ = exported
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(export.BUILDERS, "aot-inductor", lambda program, inputs, path: seen.append(program))
        with torch.no_grad():
            writer = export.Writer(runtime.Path("/nonexistent"), "aot-inductor", 2, lambda message: None)
            entry = writer.write_model("target", pair._generation.target, {2}, {2}, MAX_LENGTH)
    assert len(entry["layers"]) == 2
    for program in seen:
        assert not program.graph_signature.buffers_to_mutate
        assert not program.graph_signature.user_inputs_to_mutate
        operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert not [name for name in operators if "index_put" in name or "dustin_compile" in name]
    products = [
        sum("matmul" in str(node.target) or "linear" in str(node.target) for node in p.graph.nodes) for p in seen
    ]
    assert [bool(count) for count in products] == [True] * 3


@pytest.mark.parametrize(
    ("shape", "limit"), [((1, 8), 250), ((3, 8), 4), ((2, 250), 7)], ids=["long", "many rows", "just too long"]
)
def test_a_request_outside_the_bucket_names_it(exported, shape, limit):
    loaded = load_exported(exported[1])
    with pytest.raises(ValueError, match="was exported for 2 rows of up to 256 tokens"):
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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architecture", "sm_90", "architecture sm_90, not"),
        ("torch", "2.0.0", r"torch 2\.0\.0, not"),
    ],
)
def test_other_hardware_and_versions_are_refused(copy, key, value, message):
    path = copy / runtime.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["platform"][key] = value
    path.write_text(json.dumps({**manifest, "checksum": runtime.checksum(manifest)}))
    with pytest.raises(ExportError, match=message):
        load_exported(copy)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 3}, ValueError, "batch=3 must be a power of two"),
        ({"max_length": 9999}, ValueError, "max_length=9999"),
        ({"backend": "onnx"}, ValueError, "backend='onnx'"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(exported, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        exported[0].export(tmp_path / "out", **{"backend": "aot-inductor", "batch": 1, "max_length": 64, **changes})
    assert not list(tmp_path.iterdir())


def test_tensorrt_without_a_gpu_says_what_to_install(exported, tmp_path):
    if exported[0]._generation.target.device.type == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"dustin-compile\[tensorrt\].*torch-tensorrt-rtx"):
        exported[0].export_tensorrt(tmp_path / "out", batch=1, max_length=64)


def test_a_full_directory_is_left_alone(exported):
    with pytest.raises(FileExistsError, match="not an empty directory"):
        exported[0].export(exported[1], backend="aot-inductor", batch=1, max_length=64)


def test_alternating_requests_leave_memory_flat(exported):
    """Trap 31, few calls here; the GPU test makes CALLS."""
    import resource

    loaded = load_exported(exported[1])
    calls = [(torch.ones(2, width, dtype=torch.int64), limit) for width, limit in ((9, 5), (70, 3), (200, 2))]

    def run(count):
        for i in range(count):
            loaded.generate(calls[i % 3][0], max_new_tokens=calls[i % 3][1])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = run(6)
    assert run(15) - before <= 2048  # KiB


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("verify", ["sparse", "dense"])
def test_every_family_on_a_gpu(export_tiny, family, verify):
    changes = {"verify": verify, "draft_attention": verify, "compile": True, "gamma": 2}
    check_same(*export_tiny(family, "cuda", **changes), device="cuda")


@pytest.mark.gpu
def test_many_alternating_requests_leave_gpu_memory_flat(export_tiny):
    _, directory = export_tiny("llama", "cuda", compile=True, gamma=2)
    loaded = load_exported(directory)
    calls = [(torch.ones(2, width, dtype=torch.int64, device="cuda"), limit) for width, limit in ((200, 2), (9, 5))]
    for i in range(CALLS):
        loaded.generate(calls[i % 2][0], max_new_tokens=calls[i % 2][1])
        if i == 9:
            free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.mem_get_info()[0] >= free - 2**21


def test_the_command_refuses_tensorrt_on_a_cpu(tmp_path):
    for name, model in zip(("target", "draft"), tiny_pair(num_hidden_layers=1), strict=True):
        model.save_pretrained(tmp_path / name)
    # Without a tokenizer the pair does not load: the command reports this in a line, too.
    arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, ["export", *arguments, "--device", "cpu"])
    assert result.exit_code == 1
    assert "Error:" in result.stderr
