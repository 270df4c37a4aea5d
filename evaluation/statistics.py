"""Medians with bootstrap intervals: what is said about ratios that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A median and the range that it may as well have had.

    Attributes:
        median: of the values.
        low, high: ends of the bootstrap interval; both are the value itself where there is one
            only, which says nothing about its spread.
    """

    median: float
    low: float
    high: float


def bootstrap_median(
    values: Sequence[float], seed: int, num_resamples: int = 2000, level: float = 0.95
) -> Interval:
    """The median and its percentile bootstrap interval.

    The same seed and number of values give the same resamples, so that intervals of several arms
    over the same questions belong together.

    Args:
        values: one a question, finite, one at least.
        seed: of the resamples, >= 0.
        num_resamples: >= 1.
        level: share of the resampled medians inside, in (0, 1).

    Raises:
        ValueError: for no values, or a number out of its range.

    Source: Efron and Tibshirani 1993, section 13.3.
    """
    if len(values) == 0:
        raise ValueError("a median needs at least one value, got none")
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be >= 1, got {num_resamples}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError(f"values must be finite, got {sample[~np.isfinite(sample)][0]}")
    rows = np.random.default_rng(seed).integers(sample.size, size=(num_resamples, sample.size))
    medians = np.median(sample[rows], axis=1)
    low, high = np.quantile(medians, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Interval(float(np.median(sample)), float(low), float(high))
