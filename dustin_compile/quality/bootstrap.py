"""Means over prompts with bootstrap intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 4000
LEVEL = 0.95


def interval(values: ArrayLike, seed: int = 0) -> tuple[float, float, float]:
    """Mean of one value a prompt, and the percentile interval of its bootstrap over prompts: mean, low, high.

    For a paired comparison, pass the prompts' differences.
    """
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.quantile(sample[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(sample.mean()), float(low), float(high)
