"""Losslessness decided on a table target: the law of three tokens equals exact enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.sampling import SeededNoise, law_log_probs, race
from tests.laws import PROMPT, chi_square_p, enumerate_law, slow_law, tables
from tests.stubs import TableDrafter, TableTarget

NUM_SEEDS = 4000
CONFIGS = [
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.6, top_p=0.8),
    SamplingConfig(temperature=1.5, top_k=3, min_p=0.1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("tree", ["3,3,1", "10,3,3"])
def test_the_law_of_three_tokens_is_the_targets(config: SamplingConfig, tree: str) -> None:
    logits, draft = tables()
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))
    law = enumerate_law(logits, config)
    observed: dict[tuple[int, ...], int] = {}
    accepted = 0
    for seed in range(NUM_SEEDS):
        result = decoder.generate(
            PROMPT,
            tree=tree,
            max_new_tokens=3,
            seed=seed,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
        )
        answer = tuple(result.token_ids)
        observed[answer] = observed.get(answer, 0) + 1
        accepted += result.stats.num_accepted
    assert accepted > NUM_SEEDS / 50  # the tree did take part
    assert all(law[answer] > 0 for answer in observed)
    assert chi_square_p(observed, law) > 1e-3


def test_the_chi_square_would_see_a_biased_law() -> None:
    logits, _ = tables()
    law, other = (enumerate_law(logits, SamplingConfig(temperature=t)) for t in (1.0, 1.3))
    observed = {answer: round(NUM_SEEDS * p) for answer, p in other.items()}
    assert chi_square_p(observed, law) < 1e-3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_warped_laws_equal_the_slow_reference(config: SamplingConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        logits = 2 * torch.randn(9, generator=generator)
        expected = torch.tensor(slow_law(logits, config))
        law = law_log_probs(logits, config).exp()
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-6)


def test_greedy_laws_are_those_of_temperature_one_after_the_cuts() -> None:
    logits, _ = tables()
    greedy = SamplingConfig(temperature=0.0, top_k=3)
    at_one = SamplingConfig(temperature=1.0, top_k=3)
    assert torch.equal(law_log_probs(logits, greedy), law_log_probs(logits, at_one))


def test_a_race_has_the_law_it_is_given() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    noise = [SeededNoise(seed, 5).draw(0) for seed in range(5000)]
    counts = np.bincount([int(race(probs.log(), e)) for e in noise], minlength=5)
    observed = {(i,): int(count) for i, count in enumerate(counts)}
    assert counts[4] == 0
    assert chi_square_p(observed, {(i,): float(p) for i, p in enumerate(probs)}) > 1e-3


def test_a_race_never_picks_a_forbidden_token_even_with_zero_noise() -> None:
    log_probs = torch.tensor([-math.inf, -0.5, -0.9])
    assert int(race(log_probs, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))) == 1


def test_noise_depends_on_seed_token_number_and_stream_alone() -> None:
    noise = SeededNoise(3, 1000)
    first = noise.draw(4)
    noise.draw(0)
    assert torch.equal(noise.draw(4), first)
    vectors = [first, noise.draw(5), noise.rescue(4)[1], SeededNoise(4, 1000).draw(4)]
    for one, other in itertools.combinations(vectors, 2):
        assert not (one == other).any()
    coins = [noise.rescue(index)[0] for index in range(200)]
    assert 0.35 < sum(coins) / 200 < 0.65
    assert all(0.0 <= coin < 1.0 for coin in coins)


def test_a_top_p_that_float32_rounds_to_zero_keeps_the_best_token() -> None:
    logits = torch.tensor([0.1, 2.0, 0.3])
    for top_p in (1e-300, 1e-46, 1e-9):
        law = law_log_probs(logits, SamplingConfig(temperature=1.0, top_p=top_p)).exp()
        assert law.tolist() == [0.0, 1.0, 0.0]


def test_the_hottest_law_is_still_a_law() -> None:
    logits = torch.tensor([-math.inf, 2.0, 50.0])
    law = law_log_probs(logits, SamplingConfig(temperature=1e6)).exp()
    torch.testing.assert_close(law, torch.tensor([0.0, 0.5, 0.5]), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="temperature must be <="):
        SamplingConfig(temperature=1e39)
