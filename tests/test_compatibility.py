"""What may work together and what is refused; drafts made of the target's layers; profiles."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny_models import SHAPE, compile_tiny, greedy, random_prompts, tiny_model, tiny_pair
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from dustin_compile import DustinConfig, IncompatibleModelError, Profile, compile_pair, layer_skip
from dustin_compile.adapter import defer_rotation
from dustin_compile.loading import choose_place

SMALL = DustinConfig(budget=32, sinks=2, window=8, compile=False)
PROFILE = Profile(target_heads=((0, 0),), draft_heads=((0, 0),), draft_share=8)


def tiny_tokenizer(words):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    )


WORDS = [f"w{i}" for i in range(96)]
SWAPPED = [*WORDS[:17], "w40", *WORDS[18:40], "w17", *WORDS[41:]]


# Models


def with_window():
    return AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=8))


def with_rope(**rope):
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, **rope}))


def gpt2():
    return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4))


def partly(model, change):
    change(model.lm_head)
    return model


class OwnLlama(LlamaForCausalLM):
    """Runs as LlamaForCausalLM does."""


class Adapted:
    """Makes what an adapter puts in the place of a linear layer."""


class Own:
    def forward(self):
        raise NotImplementedError


def with_class(path, kind):
    """A model one of whose modules is of a subclass."""
    model = tiny_model()
    module = model.get_submodule(path)
    module.__class__ = type(kind.__name__, (kind, type(module)), {})
    return model


def with_forward(path):
    model = tiny_model()
    module = model.get_submodule(path)
    module.forward = module.forward  # as accelerate's hooks do
    return model


UNSUPPORTED = {
    # trap 28: sliding windows
    "mistral window": (with_window, "sliding_window=8"),
    "qwen2 window": (
        lambda: tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        r"layer_types\[1\]='sliding_attention'",
    ),
    "qwen3 window": (
        lambda: tiny_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0),
        r"layer_types\[0\]='sliding_attention'",
    ),
    "dynamic RoPE": (lambda: with_rope(rope_type="dynamic", factor=2.0), "rope_type='dynamic'.*llama3, yarn"),
    "longrope": (
        lambda: with_rope(
            rope_type="longrope", factor=2.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8,
            original_max_position_embeddings=64,
        ),
        "rope_type='longrope'",
    ),
    "architecture": (gpt2, "model_type='gpt2'.*llama, mistral, qwen2, qwen3"),
    "no head": (lambda: LlamaModel(LlamaConfig(**SHAPE)), "LlamaModel.*not a causal LM"),
    "classifier": (
        lambda: AutoModelForSequenceClassification.from_config(LlamaConfig(**{**SHAPE, "pad_token_id": 0})),
        "LlamaForSequenceClassification.*not a causal LM",
    ),
    "adapter": (
        lambda: with_class("model.layers.1.self_attn.v_proj", Adapted),
        r"model\.layers\.1\.self_attn\.v_proj is a \S+\.Adapted, not a torch\.nn\.Linear: merge adapters .*first",
    ),
    "adapter of the head": (lambda: with_class("lm_head", Adapted), "lm_head is a .*Adapted.*merge_and_unload"),
    "forward of its own": (lambda: with_class("", Own), r"Own\.forward is not transformers' own"),
    "MLP of its own": (lambda: with_class("model.layers.2.mlp", Own), r"Own\.forward is not transformers' own"),
    "wrapped forward": (lambda: with_forward("model.layers.1.self_attn"), r"self_attn\.forward was replaced"),
    "layer of its own": (lambda: with_class("model.layers.2", Own), r"Own\.forward is not transformers' own"),
    "head_dim of no use": (lambda: tiny_model(head_dim=12), "head_dim=12"),
    "head_dim too large": (lambda: tiny_model(head_dim=512), "head_dim=512.*256"),
    "mixed dtypes": (lambda: partly(tiny_model(), lambda head: head.half()), "float16.*float32"),
    "dtype": (lambda: tiny_model().double(), "float64"),
    "mixed devices": (lambda: partly(tiny_model(), lambda head: head.to("meta")), "cpu.*meta"),
    "no weights": (lambda: tiny_model().to("meta"), "meta"),
}  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_model_is_refused_by_name(name, role):
    make, message = UNSUPPORTED[name]
    pair = {"target": tiny_model(), "draft": tiny_model(), role: make()}
    with pytest.raises(IncompatibleModelError, match=f"(?s)^{role} .*{message}"):
        compile_pair(pair["target"], pair["draft"], config=SMALL, profile=PROFILE)


def test_refusal_names_the_model():
    model = with_window()
    model.config.name_or_path = "some/model"
    with pytest.raises(IncompatibleModelError, match="target 'some/model': sliding_window=8"):
        compile_pair(model, tiny_model(), config=SMALL, profile=PROFILE)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("model", [7, torch.nn.Linear(2, 2)], ids=["int", "Linear"])
def test_what_is_no_model_is_refused(role, model):
    pair = {"target": tiny_model(), "draft": tiny_model(), role: model}
    with pytest.raises(TypeError, match=f"{role} must be a transformers model.*{type(model).__name__}"):
        compile_pair(pair["target"], pair["draft"], config=SMALL, profile=PROFILE)


@pytest.mark.parametrize("settings", [{"gamma": 4}, 7])
def test_config_of_another_type_is_refused(settings):
    with pytest.raises(TypeError, match=f"config must be a DustinConfig.*{type(settings).__name__}"):
        compile_pair(tiny_model(), tiny_model(), config=settings, profile=PROFILE)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("profile", {"draft_share": 8}, "profile must be a Profile or the path of its file, not dict"),
        ("tokenizer", "name", "tokenizer must be a transformers tokenizer, not str"),
        ("assistant_tokenizer", "name", "assistant_tokenizer must be a transformers tokenizer, not str"),
    ],
)
def test_an_argument_of_another_type_is_refused(argument, value, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        compile_pair("nowhere", "nowhere", config=SMALL, **{"profile": PROFILE, argument: value})


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda:1': there is no GPU that torch can use"):
        choose_place("cuda:1", None)


def test_a_subclass_with_the_forward_of_its_family_is_supported():
    target, (prompt, mask) = OwnLlama(LlamaConfig(**SHAPE)).eval(), random_prompts([3, 40])
    sequences = compile_tiny(target, target, verify="dense").generate(prompt, mask, max_new_tokens=4).sequences
    assert torch.equal(sequences, greedy(target, prompt, mask, 4))


@pytest.mark.parametrize(("compile", "rows"), [(True, 8), (False, 5)])
def test_rows_are_rounded_up_only_where_a_step_compiles(compile, rows):
    pair = compile_tiny(*tiny_pair(num_hidden_layers=1), compile=compile)
    assert pair._choose_batch(SimpleNamespace(lengths=[1] * 5, max_new_tokens=1)) == rows


def test_supported_model_with_a_window_that_is_off():
    target = tiny_model("qwen2", use_sliding_window=False, sliding_window=8)
    compile_pair(target, target, config=SMALL, profile=PROFILE)


def test_families_may_differ():
    target, draft = tiny_model("qwen3", num_hidden_layers=2), tiny_model("mistral", num_hidden_layers=1)
    prompt, mask = random_prompts([3, 40])
    sequences = compile_tiny(target, draft, verify="dense").generate(prompt, mask, max_new_tokens=6).sequences
    assert torch.equal(sequences, greedy(target, prompt, mask, 6))


def test_shorter_of_both_limits_counts():
    target, draft = tiny_model(num_hidden_layers=1), tiny_model(num_hidden_layers=1, max_position_embeddings=64)
    for pair in (compile_tiny(target, draft), compile_tiny(draft, target)):
        assert pair.max_length == 64
        with pytest.raises(ValueError, match="max_new_tokens=5 with a prompt of 60 tokens exceeds the 64"):
            pair.generate(random_prompts([60])[0], max_new_tokens=5)


# Weights that the models and a pair share


def assign(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def assign_one(model):
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(96, 64))


def assign_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def add_bias(model):
    model.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.ones(64))


MOVES = {
    "cast": (lambda model: model.half(), "model.embed_tokens.weight"),
    "there and back": (lambda model: model.half().float(), "model."),
    "assigned": (assign, "model."),
    "one assigned": (assign_one, "model.layers.1.mlp.up_proj.weight"),
    "buffer assigned": (assign_buffer, "model.rotary_emb.inv_freq"),
    "bias added": (add_bias, "model.layers.0.self_attn.q_proj.bias"),
    "module replaced": (lambda model: setattr(model, "lm_head", torch.nn.Linear(64, 96, bias=False)), "lm_head"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("move", MOVES)
def test_weights_that_moved_are_noticed(move, role):
    model = tiny_model(num_hidden_layers=2, tie_word_embeddings=role == "draft")
    pair = compile_tiny(**{"target": tiny_model(), "draft": tiny_model(), role: model})
    change, first = MOVES[move]
    change(model)
    with pytest.raises(RuntimeError, match=f"^{re.escape(first)}.* was moved, cast or .*: call compile_pair again"):
        pair.generate(random_prompts([4])[0], max_new_tokens=1)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_may_change_in_place_and_serve_several_pairs(tied):
    target, other = (tiny_model(num_hidden_layers=2, tie_word_embeddings=tied, seed=seed) for seed in (0, 1))
    draft = tiny_model(num_hidden_layers=1, seed=2)
    draft.model.embed_tokens.weight, draft.lm_head.weight = target.model.embed_tokens.weight, target.lm_head.weight
    pairs = [compile_tiny(target, each, verify="dense") for each in (layer_skip(target, [1]), draft, draft)]
    target.load_state_dict(other.state_dict())
    input_ids, mask = random_prompts([5, 33])
    for pair in pairs:
        output = pair.generate(input_ids, mask, max_new_tokens=4)
        assert torch.equal(output.sequences, greedy(other, input_ids, mask, 4))


# What a pair does not apply


def test_a_forward_hook_does_not_run_and_is_named():
    target, draft = tiny_pair(num_hidden_layers=2)
    target(random_prompts([4])[0], output_hidden_states=True)  # transformers installs hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_tiny(target, draft)
    ran = []
    target.model.layers[1].self_attn.register_forward_hook(lambda *args: ran.append(args))
    with pytest.warns(UserWarning, match=r"target\.model\.layers\.1\.self_attn has a forward hook"):
        pair = compile_tiny(target, draft)
    pair.generate(random_prompts([4])[0], max_new_tokens=2)
    assert not ran


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": 1.1, "suppress_tokens": [3]}, "repetition_penalty=1.1, suppress_tokens=[3], which"),
        ({"min_new_tokens": 2, "forced_bos_token_id": 0}, "min_new_tokens=2, forced_bos_token_id=0, which"),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}, None),  # arguments of generate
        ({"min_length": 0, "repetition_penalty": 1.0, "num_beams": 1, "suppress_tokens": []}, None),
        (None, None),
    ],
)  # fmt: skip
def test_settings_that_generate_does_not_apply_are_named(settings, named):
    target = tiny_model(num_hidden_layers=1)
    target.generation_config = settings and GenerationConfig(**settings)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        pair = compile_pair(target, target, config=SMALL, profile=PROFILE)
    assert [f"generation_config has {named}" in str(w.message) for w in warned] == ([True] if named else [])
    assert all(w.filename == __file__ for w in warned)
    assert pair.generate(random_prompts([4])[0], max_new_tokens=2).stats.new_tokens == [2]


# Vocabularies


def padded_vocabulary(model, size, favourite):
    """The model with more logits, of which a padded one wins always."""
    padded = copy.deepcopy(model)
    padded.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        padded.model.embed_tokens.weight[model.config.vocab_size :] = 1.0
        padded.lm_head.weight[model.config.vocab_size :] = 0.0
        padded.lm_head.weight[favourite] = 100 * model.lm_head.weight[:8].sum(0)
    return padded


@pytest.mark.parametrize("padded", ["target", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_logits_are_never_emitted(padded, temperature):  # trap 11
    target, draft = tiny_pair(num_hidden_layers=2)
    input_ids, mask = random_prompts([5, 33])
    sampling = {"max_new_tokens": 16, "temperature": temperature, "seed": 3}
    dense = compile_tiny(target, draft, verify="dense")
    expected = dense.generate(input_ids, mask, **sampling)
    models = {"target": target, "draft": draft}
    models[padded] = padded_vocabulary(models[padded], 128, favourite=100)
    assert models[padded](input_ids).logits.argmax(-1).eq(100).any()  # left alone, padding would win
    pair = compile_pair(
        models["target"], models["draft"], config=dataclasses.replace(SMALL, verify="dense"), profile=dense.profile,
        tokenizer=tiny_tokenizer(WORDS), assistant_tokenizer=tiny_tokenizer(WORDS),
    )  # fmt: skip
    output = pair.generate(input_ids, mask, **sampling)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.acceptance_by_position == expected.stats.acceptance_by_position
    with pytest.raises(ValueError, match="input_ids holds 96, outside the vocabulary of 96"):
        pair.generate(torch.tensor([[3, 96]]), max_new_tokens=1)


def test_unequal_sizes_without_a_tokenizer_warn():  # trap 11
    target = tiny_model(num_hidden_layers=1)
    with pytest.warns(UserWarning, match="96 for the target and 128 for the draft.*96 on are taken for padding"):
        compile_pair(target, padded_vocabulary(target, 128, 100), config=SMALL, profile=PROFILE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_pair(
            target, padded_vocabulary(target, 128, 100), config=SMALL, profile=PROFILE, tokenizer=tiny_tokenizer(WORDS)
        )


@pytest.mark.parametrize(
    ("target", "draft", "first"), [(WORDS, SWAPPED, 17), (SWAPPED, WORDS, 17), (WORDS, WORDS[:90], 90)]
)
def test_different_tokenizers_are_refused_at_the_first_differing_id(target, draft, first):  # trap 12
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(IncompatibleModelError) as error:
        compile_pair(
            model, model, config=SMALL, profile=PROFILE,
            tokenizer=tiny_tokenizer(target), assistant_tokenizer=tiny_tokenizer(draft),
        )  # fmt: skip
    words = [words[first] if first < len(words) else None for words in (target, draft)]
    assert re.search(rf"id {first}: {words[0]!r} for the target, {words[1]!r} for the draft", str(error.value))


def test_tokenizers_of_models_given_by_directory_are_compared(tmp_path):  # trap 12
    for name, words in (("target", WORDS), ("draft", SWAPPED), ("twin", WORDS)):
        tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / name)
        tiny_tokenizer(words).save_pretrained(tmp_path / name)
    with pytest.raises(IncompatibleModelError, match="id 17"):
        compile_pair(tmp_path / "target", str(tmp_path / "draft"), config=SMALL, profile=PROFILE)
    pair = compile_pair(tmp_path / "target", str(tmp_path / "twin"), config=SMALL, profile=PROFILE)
    assert pair.generate(random_prompts([9])[0], max_new_tokens=3).stats.new_tokens == [3]


def test_models_with_fewer_logits_than_tokens_are_refused():
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(IncompatibleModelError, match="tokenizer has 97 tokens, the target only 96"):
        compile_pair(model, model, config=SMALL, profile=PROFILE, tokenizer=tiny_tokenizer([*WORDS, "more"]))


# Drafts made of the target's layers


def test_layer_skip_shares_weights_and_leaves_the_target():
    target = tiny_model("qwen3", num_hidden_layers=4)
    input_ids, mask = random_prompts([5, 33])
    text = greedy(target, input_ids, mask, 8)
    draft = layer_skip(target, [0, 2])
    assert len(draft.model.layers) == draft.config.num_hidden_layers == 2
    for kept, index in zip(draft.model.layers, (0, 2), strict=True):
        for ours, theirs in zip(kept.parameters(), target.model.layers[index].parameters(), strict=True):
            assert ours.data_ptr() == theirs.data_ptr()
    assert draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert len(target.model.layers) == target.config.num_hidden_layers == 4
    assert [layer.self_attn.layer_idx for layer in target.model.layers] == [0, 1, 2, 3]
    greedy(draft, input_ids, mask, 8)
    assert torch.equal(greedy(target, input_ids, mask, 8), text)


def test_layer_skip_has_one_configuration():
    """transformers 5.17 sets the attention of those modules alone whose configuration the model's is."""
    draft = layer_skip(tiny_model(), [0, 2])
    assert all(layer.self_attn.config is draft.config for layer in draft.model.layers)


def test_layer_skip_runs_the_kept_layers():
    target = tiny_model("qwen2", num_hidden_layers=4)
    expected = copy.deepcopy(target)
    del expected.model.layers[3], expected.model.layers[1]
    expected.config.num_hidden_layers = 2
    for index, layer in enumerate(expected.model.layers):
        layer.self_attn.layer_idx = index
    input_ids, mask = random_prompts([5, 33])
    assert torch.equal(greedy(layer_skip(target, [0, 2]), input_ids, mask, 8), greedy(expected, input_ids, mask, 8))


def test_layer_skip_draft_generates_with_its_target():
    target = tiny_model(num_hidden_layers=4)
    draft = layer_skip(target, keep=[0, 1, 3])
    input_ids, mask = random_prompts([5, 33])
    expected, proposed = greedy(target, input_ids, mask, 12), greedy(draft, input_ids, mask, 12)
    output = compile_tiny(target, draft, verify="dense").generate(input_ids, mask, max_new_tokens=12)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(greedy(target, input_ids, mask, 12), expected)
    assert torch.equal(greedy(draft, input_ids, mask, 12), proposed)
    for kept, index in zip(draft.model.layers, (0, 1, 3), strict=True):  # still shared once the pair has merged them
        assert kept.self_attn.k_proj.weight.data_ptr() == target.model.layers[index].self_attn.k_proj.weight.data_ptr()


def test_layer_skip_of_every_layer_is_the_target():
    target = tiny_model(num_hidden_layers=3)
    pair = compile_tiny(target, layer_skip(target, range(3)), verify="dense", draft_attention="dense")
    assert pair.generate(random_prompts([30])[0], max_new_tokens=11).stats.acceptance_rate == 1


@pytest.mark.parametrize("keep", [[], [1, 0], [0, 0], [-1, 0], [0, 3], [True]], ids=str)
def test_layer_skip_refuses_bad_layers(keep):
    with pytest.raises(ValueError, match=rf"{re.escape(f'keep={keep}')}.*0 to 2"):
        layer_skip(tiny_model(), keep)


def test_layer_skip_refuses_what_is_not_supported():
    with pytest.raises(TypeError, match=r"target must be a transformers model.* not str"):
        layer_skip("name", [0])
    with pytest.raises(IncompatibleModelError, match="model_type='gpt2'"):
        layer_skip(gpt2(), [0])


# Profiles


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("head", [(3, 0), (-1, 0), (0, 4), (0, -1)])
def test_profile_of_heads_that_do_not_exist_is_refused(role, head):
    heads = {"target_heads": ((0, 0),), "draft_heads": ((0, 0),), f"{role}_heads": ((0, 1), head)}
    with pytest.raises(ValueError, match=rf"{role}_heads: {re.escape(str(head))} .* 3 layers and 4 heads"):
        compile_pair(tiny_model(), tiny_model(), config=SMALL, profile=Profile(**heads, draft_share=8))


def test_profile_with_a_share_outside_the_budget_is_refused():
    target, profile = tiny_model(num_hidden_layers=1), dataclasses.replace(PROFILE, draft_share=23)
    with pytest.raises(ValueError, match=r"draft_share=23 must be in 0\.\.22"):
        compile_pair(target, target, config=SMALL, profile=profile)
    config = dataclasses.replace(SMALL, draft_share=3)  # takes its place
    assert compile_pair(target, target, config=config, profile=profile).config.draft_share == 3


def test_draft_share_of_the_config_outranks_the_profile():
    target = tiny_model(num_hidden_layers=1)
    assert compile_pair(target, target, config=SMALL, profile=PROFILE).config.draft_share == 8
    config = DustinConfig(budget=32, sinks=2, window=8, draft_share=3, compile=False)
    assert compile_pair(target, target, config=config, profile=PROFILE).config.draft_share == 3


@pytest.mark.parametrize("share", [0, 22])
def test_one_signal_alone_may_fill_the_budget(share):
    target, draft = tiny_pair(num_hidden_layers=2)
    pair = compile_tiny(target, draft, draft_share=share)
    assert pair.generate(random_prompts([70])[0], max_new_tokens=6).stats.new_tokens == [6]


def test_an_attention_that_rotates_by_another_name_is_refused():
    class Attention(torch.nn.Module):
        def forward(self, query):
            return query

    with pytest.raises(RuntimeError, match=r"Attention.forward of transformers .* has no apply_rotary_pos_emb"):
        defer_rotation(Attention)
