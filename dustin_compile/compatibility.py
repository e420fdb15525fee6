"""May this target and this draft work together? What may not is refused by name, before any work."""

from __future__ import annotations

import warnings

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dustin_compile.kv_cache import head_dim

SUPPORTED_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
WEIGHTED = {**dict.fromkeys(LINEARS, nn.Linear), "embed_tokens": nn.Embedding}  # of which only the weights count
REPLACED = {*WEIGHTED, "self_attn", "mlp"}  # and layers: modules whose forward does not run in a pair
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# Settings of a GenerationConfig that change the text, and with which values besides None they do not.
TEXT_SETTINGS = {
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "token_healing": False,
    "guidance_scale": 1,
    "watermarking_config": None,
}


class IncompatibleModelError(ValueError):
    """A model, or a pair of models, that dustin_compile does not support; the message says why."""


def check_model(model: PreTrainedModel, role: str) -> None:
    """Refuse a model that the adapter does not run.

    Args:
        model: a transformers causal LM.
        role: "target" or "draft", for the message.

    Raises:
        IncompatibleModelError: naming the model's property that is not supported.
        TypeError: not a transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{role} must be a transformers model, or for compile_pair the name of one, not {type(model).__name__}"
        )

    def refuse(reason: str) -> None:
        raise IncompatibleModelError(f"{role} {model.config.name_or_path or type(model).__name__!r}: {reason}")

    config = model.config
    if config.model_type not in SUPPORTED_MODELS:
        refuse(f"model_type={config.model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODELS)}")
    causal_lm = getattr(transformers, SUPPORTED_MODELS[config.model_type])
    if not isinstance(model, causal_lm):
        refuse(f"{type(model).__name__} is not a causal LM ({causal_lm.__name__})")
    layers = model.model.layers
    for module in (model, model.model, *layers, *(layer.mlp for layer in layers)):  # which the adapter runs itself
        kind = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        if not kind.__module__.startswith("transformers."):
            refuse(f"{kind.__qualname__}.forward is not transformers' own, and would not run")
    if getattr(model, "is_quantized", False):
        refuse("quantized weights are not supported")
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        found, expected = type(module), WEIGHTED.get(name)
        if expected is not None and found is not expected:
            refuse(
                f"{path} is a {found.__module__}.{found.__qualname__}, not a torch.nn.{expected.__name__}: merge "
                "adapters (merge_and_unload) and parametrizations first"
            )
        if "forward" in vars(module) and (name in REPLACED or name.isdigit()):  # a number is a layer's
            refuse(f"{path}.forward was replaced, and would not run")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE:
        refuse(f"rope_type={rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}")
    layer_types = getattr(config, "layer_types", None) or []
    sliding = [index for index, kind in enumerate(layer_types) if kind != "full_attention"]
    if sliding:
        refuse(f"layer_types[{sliding[0]}]={layer_types[sliding[0]]!r} is not supported, only full attention is")
    if config.model_type == "mistral" and config.sliding_window is not None:
        refuse(f"sliding_window={config.sliding_window} is not supported; only full attention (None) is")
    if head_dim(config) % 8 or head_dim(config) > MAX_HEAD_DIM:
        refuse(f"head_dim={head_dim(config)} must be a multiple of 8 and at most {MAX_HEAD_DIM}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1 or not dtypes <= set(SUPPORTED_DTYPES):
        refuse(f"weights must be all of one of float32, float16 and bfloat16, not {sorted(map(str, dtypes))}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        refuse(f"weights must be all on one CPU or CUDA device, not {sorted(map(str, devices))}")


def check_pair(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse models that cannot share a generation.

    Raises:
        IncompatibleModelError: they are on different devices.
    """
    if target.device != draft.device:
        raise IncompatibleModelError(f"target is on {target.device} and draft on {draft.device}; move them together")


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse tokenizers that differ in any token.

    Raises:
        IncompatibleModelError: naming the first id that stands for different tokens.
    """
    first, second = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    for token_id in sorted(first.keys() | second.keys()):
        if first.get(token_id) != second.get(token_id):
            raise IncompatibleModelError(
                f"the tokenizers differ at id {token_id}: {first.get(token_id)!r} for the target, "
                f"{second.get(token_id)!r} for the draft"
            )


def warn_of_hooks(model: PreTrainedModel, role: str) -> None:
    """Warn of a model's first forward hook: none runs in a pair. Those that transformers installs do not count."""
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                name = f"{role}.{path}".rstrip(".")
                warnings.warn(f"{name} has a forward hook: hooks do not run in a pair", stacklevel=3)
                return


def warn_of_settings(defaults: GenerationConfig | None) -> None:
    """Warn of settings of the target's generation_config that change what transformers generates, but not a pair.

    Those of the sampling do not count: they are arguments of `generate`.
    """
    found = {name: getattr(defaults, name, None) for name in TEXT_SETTINGS}
    active = [f"{name}={value!r}" for name, value in found.items() if value not in (None, [], TEXT_SETTINGS[name])]
    if active:
        warnings.warn(
            f"the target's generation_config has {', '.join(active)}, which `generate` does not apply", stacklevel=3
        )


def shared_vocab_size(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> int:
    """Logits that both models have; those behind are padding, which is never emitted.

    Without a tokenizer to tell padding from tokens, a difference in size is taken for padding, with a warning.

    Raises:
        IncompatibleModelError: a model has fewer logits than the tokenizer has tokens.
    """
    sizes = {"target": target.config.vocab_size, "draft": draft.config.vocab_size}
    common = min(sizes.values())
    if tokenizer is None and len(set(sizes.values())) > 1:
        warnings.warn(
            f"vocab_size is {sizes['target']} for the target and {sizes['draft']} for the draft, and no tokenizer was "
            f"found: ids from {common} on are taken for padding and never emitted",
            stacklevel=3,
        )
    if tokenizer is not None and len(tokenizer) > common:
        role = min(sizes, key=lambda name: sizes[name])
        raise IncompatibleModelError(f"the tokenizer has {len(tokenizer)} tokens, the {role} only {common} logits")
    return common


def max_length(target: PreTrainedModel, draft: PreTrainedModel) -> int:
    """Tokens that a row may have: the shorter of both models' RoPE limits."""
    return min(target.config.max_position_embeddings, draft.config.max_position_embeddings)
