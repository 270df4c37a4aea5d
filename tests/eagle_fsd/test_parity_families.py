"""Greedy parity of the further families; their answers are shorter, their windows crossed too."""

from __future__ import annotations

import pytest

from tests.parity import FIRST_FAMILIES, check_greedy_parity
from tests.stubs import FAMILY_CONFIGS


@pytest.mark.parametrize("family", sorted(set(FAMILY_CONFIGS) - set(FIRST_FAMILIES)))
def test_greedy_ids_equal_generate_token_for_token(family: str) -> None:
    report = check_greedy_parity(family, num_prompts=100, seed=1, num_new_tokens=12)
    assert report.num_prompts == 100
    assert report.faults == []
    assert report.num_scattered > 0  # paths that are not contiguous were committed
