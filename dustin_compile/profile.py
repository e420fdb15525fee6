"""The profile of a pair: which heads its step scores with, how it splits the budget, and the file that says so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from dustin_compile.config import DustinConfig
from dustin_compile.paths import cache_directory
from dustin_compile.profiling.fingerprint import Fingerprint, fingerprint

DEFAULT_TARGET_LAYERS = 4
DEFAULT_DRAFT_LAYERS = 3
DEFAULT_HEADS = 4  # of a layer
FORMAT = "dustin_compile.profile"
VERSION = 1
SETTINGS = ("budget", "sinks", "window", "gamma")  # of the config that a profile was searched for

FINGERPRINT = {f.name: int if f.type == "int" else str for f in dataclasses.fields(Fingerprint)}  # types of its fields

Head = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Semantic retrieval heads of a pair and the draft's share of the budget.

    Made by `profile_pair`, or by hand from the first three fields alone: what is None is not checked.

    Attributes:
        target_heads, draft_heads: (layer, query head) pairs.
        draft_share: positions taken from the draft's ranking.
        budget, sinks, window, gamma: the settings that it was searched for.
        arr: attention recovery rate of the verification set on the recorded steps, 0 to 1.
        target, draft: fingerprints of the models.
        versions: of the packages that made it.
        record: how it was found: amount of data, seconds of each phase, frontier. It does not count in comparisons.
        path: the file that it was loaded from.
    """

    target_heads: tuple[Head, ...]
    draft_heads: tuple[Head, ...]
    draft_share: int
    budget: int | None = None
    sinks: int | None = None
    window: int | None = None
    gamma: int | None = None
    arr: float | None = None
    target: Fingerprint | None = None
    draft: Fingerprint | None = None
    versions: dict[str, str] = field(default_factory=dict, compare=False)
    record: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    path: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            ValueError: naming the field.
        """

        def require(name: str, valid: bool, what: str) -> None:
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {what}")

        for name in ("target_heads", "draft_heads"):
            heads = getattr(self, name)
            valid = isinstance(heads, tuple | list) and all(map(_is_pair, heads))
            require(name, valid, "a list of (layer, head) pairs")
            heads = tuple(map(tuple, heads))
            if not heads:
                raise ValueError(f"{name} is empty; scoring needs at least one (layer, head)")
            if repeated := find_repeated(heads):
                raise ValueError(f"{name} has {repeated[0]} more than once")
            object.__setattr__(self, name, heads)
        require("draft_share", _is_int(self.draft_share) and self.draft_share >= 0, "an integer of at least 0")
        for name in SETTINGS:
            require(name, getattr(self, name) is None or _is_int(getattr(self, name)), "an integer or None")
        arr = self.arr
        require("arr", arr is None or (isinstance(arr, float | int) and 0 <= arr <= 1), "in 0 to 1, or None")
        for name in ("versions", "record"):
            require(name, isinstance(getattr(self, name), dict), "a dict")
        for role in ("target", "draft"):
            model = getattr(self, role)
            values = vars(model) if isinstance(model, Fingerprint) else {}
            valid = all(isinstance(values.get(name), kind) for name, kind in FINGERPRINT.items())
            require(role, model is None or valid, f"None or a fingerprint of {', '.join(FINGERPRINT)}")

    def check(self, target: PretrainedConfig, draft: PretrainedConfig, config: DustinConfig) -> None:
        """Refuse a profile that does not fit the pair or its settings.

        Raises:
            ValueError: a head does not exist, or the draft's share in use exceeds the free budget.
        """
        for name, model in (("target_heads", target), ("draft_heads", draft)):
            for layer, head in getattr(self, name):
                if not (0 <= layer < model.num_hidden_layers and 0 <= head < model.num_attention_heads):
                    raise ValueError(
                        f"{name}: ({layer}, {head}) does not exist in a model of {model.num_hidden_layers} layers "
                        f"and {model.num_attention_heads} heads"
                    )
        free = config.budget - config.sinks - config.window
        if config.draft_share is None and self.draft_share > free:
            raise ValueError(f"draft_share={self.draft_share} must be in 0..{free} (budget - sinks - window)")

    def check_models(self, target: PreTrainedModel, draft: PreTrainedModel) -> None:
        """Refuse the profile of another pair.

        Raises:
            ValueError: naming the profile and what differs.
        """
        for role, model in (("target", target), ("draft", draft)):
            expected = getattr(self, role)
            if expected is not None and (differences := expected.differences(fingerprint(model))):
                raise ValueError(f"{self} is of another pair: its {role} has {', '.join(differences)}")

    def fit(self, config: DustinConfig) -> Profile:
        """The profile for other settings than it was searched for.

        The heads stay. The draft keeps its proportion of the free budget (budget - sinks - window), and `arr` is
        dropped, since it was measured with the old settings. A warning says so.
        """
        settings = {name: getattr(config, name) for name in SETTINGS}
        changed = {name: value for name, value in settings.items() if getattr(self, name) not in (None, value)}
        if not changed:
            return self
        share = self.draft_share
        if None not in (self.budget, self.sinks, self.window) and changed.keys() - {"gamma"}:
            free = self.budget - self.sinks - self.window  # type: ignore[operator]
            share = round(share * (config.budget - config.sinks - config.window) / free) if free else 0
        warnings.warn(
            f"{self} was made for {_list(vars(self), changed)}, not {_list(settings, changed)}: keeping its "
            f"heads, with draft_share={share if config.draft_share is None else config.draft_share}",
            stacklevel=3,
        )
        return dataclasses.replace(self, **settings, draft_share=share, arr=None)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, replacing the file at once or not at all."""
        path = Path(path)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "path"}
        for role in ("target", "draft"):
            fields[role] = fields[role] and vars(fields[role])
        content = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **fields}))
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({**content, "checksum": checksum(content)}, indent=1))
        try:
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink()
            raise

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a profile, is damaged, was edited, or is of a newer version; the message names the
                file and the field.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"profile {path} is damaged: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a profile: format must be {FORMAT!r}")
        version = content.pop("version", None)
        if not _is_int(version) or version < 1:
            raise ValueError(f"profile {path}: version={version!r} must be a positive integer")
        if version > VERSION:
            raise ValueError(
                f"profile {path}: version={version} is newer than {VERSION}, the newest that this dustin_compile reads"
            )
        stored = content.pop("checksum", None)
        found = checksum({"version": version, **content})
        del content["format"]
        try:
            profile = Profile(**_parse(content), path=path)
        except ValueError as error:
            raise ValueError(f"profile {path}: {error}") from None
        if stored != found:
            raise ValueError(
                f"profile {path}: checksum does not match: it was damaged or edited; to change a profile, "
                "dataclasses.replace() it and save() it"
            )
        return profile

    def __str__(self) -> str:
        return f"profile {self.path}" if self.path else "the profile"


def default_profile(target: PretrainedConfig, draft: PretrainedConfig, config: DustinConfig) -> Profile:
    """The profile of a pair that was never profiled: evenly spread layers, half the free budget to the draft."""
    return Profile(
        target_heads=_spread_heads(target, DEFAULT_TARGET_LAYERS),
        draft_heads=_spread_heads(draft, DEFAULT_DRAFT_LAYERS),
        draft_share=(config.budget - config.sinks - config.window) // 2,
    )


def cached_path(profile: Profile) -> Path:
    """Where a profile that `profile_pair` made is cached."""
    settings = "-".join(f"{name}{getattr(profile, name)}" for name in SETTINGS)
    return cache_directory() / "profiles" / f"{_pair_key(profile.target, profile.draft)}-{settings}.json"


def find_profile(target: PreTrainedModel, draft: PreTrainedModel, config: DustinConfig) -> Profile | None:
    """The cached profile of a pair whose settings are the nearest: by the budget first, then sinks, window and gamma.

    A cached file that cannot be read is passed over, with a warning.
    """
    found = []
    key = _pair_key(fingerprint(target), fingerprint(draft))
    for path in sorted((cache_directory() / "profiles").glob(f"{key}-*.json")):
        try:
            found.append(Profile.load(path))
        except (ValueError, OSError) as error:
            warnings.warn(f"passing over a cached profile: {error}", stacklevel=3)

    def distance(profile: Profile) -> tuple[int, ...]:
        return tuple(abs((getattr(profile, name) or 0) - getattr(config, name)) for name in SETTINGS)

    return min(found, key=distance, default=None)


def _pair_key(target: Fingerprint | None, draft: Fingerprint | None) -> str:
    return hashlib.sha256(f"{target}\n{draft}".encode()).hexdigest()[:16]


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of what a JSON file says, which finds damage and edits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _list(values: dict[str, Any], names: dict[str, Any]) -> str:
    return ", ".join(f"{name}={values[name]}" for name in names)


def _parse(content: dict[str, Any]) -> dict[str, Any]:
    """Fields of a file as those of a Profile.

    Raises:
        ValueError: naming one that is missing or none of a profile.
    """
    names = {f.name for f in dataclasses.fields(Profile)} - {"path"}
    for problem, wrong in (("missing", names - content.keys()), ("not a field of a profile", content.keys() - names)):
        if wrong:
            raise ValueError(f"{sorted(wrong)[0]} is {problem}")

    fields = dict(content)
    for role in ("target", "draft"):
        if isinstance(content[role], dict) and content[role].keys() == FINGERPRINT.keys():
            fields[role] = Fingerprint(**content[role])
    return fields


def find_repeated(values: Sequence[Any]) -> list[Any]:
    """Those of the values that are there more than once."""
    return [value for value in values if values.count(value) > 1]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_int, value))


def _spread_heads(model: PretrainedConfig, count: int) -> tuple[Head, ...]:
    """Query heads of one KV head, another one in each of `count` evenly spread layers: K is read once for all."""
    count = min(count, model.num_hidden_layers)
    group = model.num_attention_heads // model.num_key_value_heads
    heads = []
    for i in range(count):
        layer = (2 * i + 1) * model.num_hidden_layers // (2 * count)
        first = i % model.num_key_value_heads * group
        heads += [(layer, head) for head in range(first, first + min(group, DEFAULT_HEADS))]
    return tuple(heads)
