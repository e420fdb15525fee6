"""Models and tokenizers from names or directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SHARED_WITH_TARGET = {"model.embed_tokens.weight", "lm_head.weight"}


@dataclass(frozen=True)
class LoadedPair:
    """Models and their tokenizers; a draft's directory may hold no tokenizer."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    assistant_tokenizer: PreTrainedTokenizerBase | None


def load_pair(
    target: str | Path, draft: str | Path, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> LoadedPair:
    """Load a target and a draft with their tokenizers; the arguments are those of `load_target` and `load_draft`.

    Raises:
        OSError: a model or the target's tokenizer is not there.
        ValueError: the draft's checkpoint lacks weights, or the device is not there.
    """
    target_model = load_target(target, device=device, dtype=dtype)
    return LoadedPair(
        target_model, load_draft(draft, target_model), AutoTokenizer.from_pretrained(target), find_tokenizer(draft)
    )


def choose_place(device: str | torch.device | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Where and in what to run: by default the GPU, or the CPU without one; bfloat16 there, float32 on a CPU.

    Raises:
        ValueError: the device is a GPU, and there is none.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device='{device}': there is no GPU that torch can use")
    return device, dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def load_target(
    name: str | Path, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a causal LM.

    Args:
        name: Hugging Face name or directory.
        device: None: the GPU if there is one, else the CPU.
        dtype: None: bfloat16 on a GPU, float32 on a CPU.

    Raises:
        OSError: it is not there.
        ValueError: the device is not there.
    """
    device, dtype = choose_place(device, dtype)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)


def load_draft(name: str | Path, target: PreTrainedModel) -> PreTrainedModel:
    """Load a draft to where its target is, in the target's dtype.

    A checkpoint that holds neither an embedding nor a head shares the target's.

    Raises:
        OSError: it is not there.
        ValueError: the checkpoint lacks other weights.
    """
    draft, report = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype, output_loading_info=True)
    draft.to(target.device)
    if report["missing_keys"]:
        if set(report["missing_keys"]) != SHARED_WITH_TARGET:
            raise ValueError(f"the checkpoint of {name} lacks {', '.join(sorted(report['missing_keys']))}")
        draft.model.embed_tokens.weight = target.get_input_embeddings().weight
        draft.lm_head.weight = target.get_output_embeddings().weight
    return draft


def find_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that comes with a model, if one does."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
