"""Greedy ids equal the unmodified model's, for every family, drafter, tree and attention."""

from __future__ import annotations

import random

import pytest
import torch

from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import FAMILIES
from tests.parity import FIRST_FAMILIES, TIE, TREES, check_greedy_parity, top2_gap
from tests.sampling_ties import distance_to_a_tie
from tests.stubs import FAMILY_CONFIGS, RecordingTarget, head_drafter, random_prompt, tiny_model

WARPERS = (
    {},
    {"top_p": 0.8},
    {"top_k": 12},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
)


def test_every_supported_family_has_a_harness() -> None:
    assert set(FAMILIES) == set(FAMILY_CONFIGS)


@pytest.mark.parametrize("family", FIRST_FAMILIES)
def test_greedy_ids_equal_generate_token_for_token(family: str) -> None:
    report = check_greedy_parity(family, num_prompts=100, seed=1)
    assert report.num_prompts == 100
    assert report.faults == []
    assert report.num_scattered > 0  # paths that are not contiguous were committed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_sampled_exact_ids_equal_plain_ids_for_the_same_seed(temperature: float) -> None:
    rng = random.Random(7)
    target = RecordingTarget(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target))
    others = 0
    for seed, warpers in enumerate(WARPERS * 3):
        prompt = random_prompt(rng)
        options = {"temperature": temperature, "max_new_tokens": 40, "seed": seed, **warpers}
        exact = decoder.generate(prompt, tree=TREES[seed % len(TREES)], **options).token_ids
        plain = decoder.plain(prompt, **options).token_ids
        if exact != plain:
            distance = distance_to_a_tie(target, prompt, exact, plain, options)
            print(f"temperature {temperature}, seed {seed}: distance to a tie {distance:.2e}")
            assert distance < TIE
        others += decoder.plain(prompt, **options | {"seed": seed + 1000}).token_ids != plain
    assert others >= len(WARPERS) * 3 - 1  # another seed, other ids
    assert target.num_scattered > 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_tie_is_told_from_a_fault(family: str) -> None:
    """The harness would not call a clear difference a tie."""
    model = tiny_model(family)
    gaps = [top2_gap(model, random_prompt(random.Random(seed))) for seed in range(20)]
    assert sum(gap > TIE for gap in gaps) >= 19
    assert torch.tensor(gaps).median() > 100 * TIE
