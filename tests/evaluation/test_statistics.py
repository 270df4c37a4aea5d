"""Medians and their bootstrap intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluation.statistics import Interval, bootstrap_median


def test_the_interval_covers_the_known_median_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).lognormal(mean=0.5, sigma=0.4, size=(300, 40))
    intervals = [bootstrap_median(row.tolist(), seed=0, num_resamples=400) for row in draws]
    share = np.mean([each.low <= math.exp(0.5) <= each.high for each in intervals])
    # 95% of 300, with two standard deviations of a binomial and the bootstrap's own bias
    assert 0.90 <= share <= 0.99


def test_the_interval_is_ordered_seeded_and_follows_the_scale() -> None:
    values = np.random.default_rng(1).exponential(size=30).tolist()
    one = bootstrap_median(values, seed=3)
    assert one == bootstrap_median(values, seed=3)
    assert one != bootstrap_median(values, seed=4)
    assert one.low < one.median == np.median(values) < one.high
    doubled = bootstrap_median([2.0 * value for value in values], seed=3)
    assert (doubled.low, doubled.high) == (2.0 * one.low, 2.0 * one.high)
    narrow = bootstrap_median(values, seed=3, level=0.5)
    assert one.low <= narrow.low <= narrow.high <= one.high


def test_values_without_spread_have_an_interval_without_width() -> None:
    assert bootstrap_median([1.5], seed=0) == Interval(1.5, 1.5, 1.5)
    assert bootstrap_median([1.0] * 20, seed=0) == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ([], {}, "at least one value"),
        ([1.0, math.nan], {}, "finite, got nan"),
        ([1.0], {"num_resamples": 0}, "num_resamples must be >= 1, got 0"),
        ([1.0], {"level": 1.0}, r"level must be in \(0, 1\), got 1.0"),
    ],
)
def test_what_makes_no_median_is_refused(values: list[float], options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bootstrap_median(values, seed=0, **options)
