"""The profile's file, and which profile a pair takes."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from tiny_models import tiny_model, tiny_pair

from dustin_compile import DustinConfig, Profile, compile_pair
from dustin_compile.profile import cached_path, default_profile
from dustin_compile.profiling.fingerprint import fingerprint

CONFIG = DustinConfig(budget=32, sinks=2, window=8, compile=False)  # 22 positions are free


@pytest.fixture(scope="module")
def models():
    return tiny_pair(num_hidden_layers=2)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "cache"))


def make_profile(models, **changes) -> Profile:
    fields = {
        "target_heads": ((0, 1), (1, 0)),
        "draft_heads": ((1, 2),),
        "draft_share": 11,
        "budget": 32,
        "sinks": 2,
        "window": 8,
        "gamma": 4,
        "arr": 0.75,
        "target": fingerprint(models[0]),
        "draft": fingerprint(models[1]),
        "versions": {"torch": "1"},
        "record": {"steps": 3},
        **changes,
    }
    return Profile(**fields)


# The file


def test_what_is_saved_is_loaded(models, tmp_path):
    profile = make_profile(models)
    profile.save(tmp_path / "new" / "profile.json")
    loaded = Profile.load(tmp_path / "new" / "profile.json")
    assert loaded == profile
    assert (loaded.versions, loaded.record) == (profile.versions, profile.record)
    by_hand = Profile(target_heads=((0, 0),), draft_heads=((0, 0),), draft_share=3)
    by_hand.save(tmp_path / "profile.json")
    assert Profile.load(str(tmp_path / "profile.json")) == by_hand


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "something else"}, "is not a profile: format"),
        ({"version": 2}, "version=2 is newer than 1"),
        ({"version": "1"}, "version='1' must be"),
        ({"draft_share": ...}, "draft_share is missing"),
        ({"extra": 1}, "extra is not a field"),
        ({"target_heads": [[0, 1, 2]]}, "target_heads=.* must be a list of"),
        ({"draft_heads": []}, "draft_heads is empty"),
        ({"draft_share": -1}, "draft_share=-1 must be"),
        ({"budget": "32"}, "budget='32' must be"),
        ({"arr": 1.5}, "arr=1.5 must be"),
        ({"record": None}, "record=None must be"),
        ({"draft": {"layers": 2}}, "draft=.* must be None or a fingerprint"),
        ({"draft_share": 12}, "checksum does not match"),
        ({"target_heads": [[0, 2], [1, 0]]}, "checksum does not match"),
        ({"checksum": ...}, "checksum does not match"),
    ],
)
def test_a_mangled_file_is_refused_by_name(models, tmp_path, changes, message):
    path = tmp_path / "mangled.json"
    make_profile(models).save(path)
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    with pytest.raises(ValueError, match=rf"mangled\.json.*{message}"):
        Profile.load(path)


def test_a_damaged_file_is_refused_by_name(models, tmp_path):
    path = tmp_path / "damaged.json"
    make_profile(models).save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"damaged\.json is damaged"):
        Profile.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"damaged\.json is damaged"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_heads": ((0, 1), (1, 0), (0, 1))}, r"target_heads has \(0, 1\) more than once"),
        ({"target_heads": ((0, 1.0),)}, r"target_heads=.*1\.0.* must be a list of \(layer, head\) pairs"),
        ({"draft_heads": (3, 4)}, r"draft_heads=\(3, 4\) must be"),
        ({"draft_heads": ()}, "draft_heads is empty"),
        ({"draft_share": None}, "draft_share=None must be an integer of at least 0"),
        ({"draft_share": -1}, "draft_share=-1 must be"),
        ({"budget": "x"}, "budget='x' must be an integer or None"),
        ({"draft": "other"}, "draft='other' must be None or a fingerprint"),
    ],
)
def test_a_field_made_by_hand_is_checked_as_one_of_a_file(models, changes, message):
    with pytest.raises(ValueError, match=message):
        make_profile(models, **changes)


# Fingerprints


def test_the_fingerprint_is_of_the_weights_whatever_their_dtype():
    model = tiny_model(num_hidden_layers=2)
    found = fingerprint(model)
    assert fingerprint(tiny_model(num_hidden_layers=2)) == found
    assert fingerprint(tiny_model(num_hidden_layers=2).bfloat16()) == found
    compile_pair(model, model, config=CONFIG, profile=default_profile(model.config, model.config, CONFIG))
    assert fingerprint(model) == found  # whose weights are views of merged ones now
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    assert fingerprint(model).differences(found) == ["other weights"]


# Which profile a pair takes


def test_another_pairs_profile_is_refused(models, tmp_path):
    make_profile(models).save(tmp_path / "theirs.json")
    with pytest.raises(ValueError, match=r"theirs\.json is of another pair: its draft has other weights"):
        compile_pair(models[0], models[0], config=CONFIG, profile=tmp_path / "theirs.json")
    with pytest.raises(ValueError, match="the profile is of another pair: its target has layers 2, not 3"):
        compile_pair(tiny_model(), models[1], config=CONFIG, profile=make_profile(models))


def test_a_profile_of_the_pair_is_taken_without_a_word(models, tmp_path):
    profile = make_profile(models)
    profile.save(tmp_path / "ours.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = compile_pair(*models, config=CONFIG, profile=tmp_path / "ours.json")
    assert pair.profile == profile and pair.config.draft_share == 11


@pytest.mark.parametrize(("budget", "window", "share"), [(54, 8, 22), (32, 19, 6), (11, 8, 0)])
def test_other_settings_scale_the_split_and_say_so(models, budget, window, share):
    config = dataclasses.replace(CONFIG, budget=budget, window=window)
    with pytest.warns(UserWarning, match=f"draft_share={share}") as warned:
        pair = compile_pair(*models, config=config, profile=make_profile(models))
    assert len(warned) == 1
    assert pair.config.draft_share == share
    assert pair.profile.target_heads == ((0, 1), (1, 0)) and pair.profile.arr is None


def test_another_gamma_keeps_the_split(models):
    config = dataclasses.replace(CONFIG, gamma=2)
    with pytest.warns(UserWarning, match=r"made for gamma=4, not gamma=2: .* draft_share=11"):
        assert compile_pair(*models, config=config, profile=make_profile(models)).config.draft_share == 11


def test_the_cached_profile_of_the_pair_is_found(cache, models):
    with pytest.warns(UserWarning, match="no profile for this pair.*dustin-compile profile"):
        pair = compile_pair(*models, config=CONFIG)
    assert pair.profile == default_profile(models[0].config, models[1].config, CONFIG)

    profiles = [make_profile(models), make_profile(models, budget=64, draft_share=40)]
    stranger = tiny_model(num_hidden_layers=2, seed=5)
    for profile in (*profiles, make_profile((models[0], stranger))):
        profile.save(cached_path(profile))
    with pytest.warns(UserWarning, match=f"cached profile {cached_path(profiles[0])}") as warned:
        assert compile_pair(*models, config=CONFIG).profile == profiles[0]
    assert len(warned) == 1
    with pytest.warns(UserWarning) as warned:
        pair = compile_pair(*models, config=dataclasses.replace(CONFIG, budget=60))
    assert [str(warning.message).split(",")[0] for warning in warned] == [
        f"using the cached profile {cached_path(profiles[1])}",
        f"profile {cached_path(profiles[1])} was made for budget=64",
    ]
    assert pair.config.draft_share == round(40 * 50 / 54)
    with pytest.warns(UserWarning, match="no profile for this pair"):
        compile_pair(stranger, models[1], config=CONFIG)

    cached_path(profiles[0]).write_text("{")
    with pytest.warns(UserWarning) as warned:
        pair = compile_pair(*models, config=CONFIG)
    assert pair.profile.target_heads == profiles[1].target_heads
    assert "passing over a cached profile" in str(warned[0].message)
    assert str(cached_path(profiles[0])) in str(warned[0].message)
