"""What the offline profile of a pair tells the step: which heads to score with, and how to split the budget."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from dustin_compile.config import DustinConfig

DEFAULT_TARGET_LAYERS = 4
DEFAULT_DRAFT_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Semantic retrieval heads of a pair and the draft's share of the budget.

    Attributes:
        target_heads, draft_heads: (layer, query head) pairs.
        draft_share: positions taken from the draft's ranking.
    """

    target_heads: tuple[tuple[int, int], ...]
    draft_heads: tuple[tuple[int, int], ...]
    draft_share: int

    def __post_init__(self) -> None:
        for name in ("target_heads", "draft_heads"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; scoring needs at least one (layer, head)")

    def check(self, target: PretrainedConfig, draft: PretrainedConfig, config: DustinConfig) -> None:
        """Refuse a profile that does not fit the pair or its settings.

        Raises:
            ValueError: a head does not exist, or the draft's share exceeds the free budget.
        """
        for name, model in (("target_heads", target), ("draft_heads", draft)):
            for layer, head in getattr(self, name):
                if not (0 <= layer < model.num_hidden_layers and 0 <= head < model.num_attention_heads):
                    raise ValueError(
                        f"{name}: ({layer}, {head}) does not exist in a model of {model.num_hidden_layers} layers "
                        f"and {model.num_attention_heads} heads"
                    )
        free = config.budget - config.sinks - config.window
        if not 0 <= self.draft_share <= free:
            raise ValueError(f"draft_share={self.draft_share} must be in 0..{free} (budget - sinks - window)")


def default_profile(target: PretrainedConfig, draft: PretrainedConfig, config: DustinConfig) -> Profile:
    """The profile of a pair that was never profiled: evenly spread layers, half the free budget to the draft."""
    return Profile(
        target_heads=_spread_heads(target, DEFAULT_TARGET_LAYERS),
        draft_heads=_spread_heads(draft, DEFAULT_DRAFT_LAYERS),
        draft_share=(config.budget - config.sinks - config.window) // 2,
    )


def _spread_heads(model: PretrainedConfig, count: int) -> tuple[tuple[int, int], ...]:
    """The query heads of one KV head, another one in each of `count` evenly spread layers: K is read once for all."""
    count = min(count, model.num_hidden_layers)
    group = model.num_attention_heads // model.num_key_value_heads
    heads = []
    for i in range(count):
        layer = (2 * i + 1) * model.num_hidden_layers // (2 * count)
        first = i % model.num_key_value_heads * group
        heads += [(layer, head) for head in range(first, first + group)]
    return tuple(heads)
