"""A pair of models from names or directories."""

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
    """Load a target and a draft.

    Args:
        target, draft: Hugging Face names or directories. A draft whose checkpoint holds neither an embedding nor a
            head shares the target's.
        device: None: the GPU if there is one, else the CPU.
        dtype: None: bfloat16 on a GPU, float32 on a CPU.

    Raises:
        OSError: a model or the target's tokenizer is not there.
        ValueError: the draft's checkpoint lacks other weights.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device)
    draft_model, report = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype, output_loading_info=True)
    draft_model.to(device)
    if report["missing_keys"]:
        if set(report["missing_keys"]) != SHARED_WITH_TARGET:
            raise ValueError(f"the checkpoint of {draft} lacks {', '.join(sorted(report['missing_keys']))}")
        draft_model.model.embed_tokens.weight = target_model.get_input_embeddings().weight
        draft_model.lm_head.weight = target_model.get_output_embeddings().weight
    return LoadedPair(target_model, draft_model, AutoTokenizer.from_pretrained(target), _find_tokenizer(draft))


def _find_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
