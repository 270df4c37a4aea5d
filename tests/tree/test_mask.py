"""Masks and positions: drawn by hand, and as invariants on random trees."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree import additive_mask, ancestor_mask, sliding_additive_mask, tree_position_ids

#      0
#    1   2
#   3 4   5
#        6
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 5])
DEPTHS = torch.tensor([0, 1, 1, 2, 2, 2, 3])


def test_golden_ancestor_mask() -> None:
    drawn = """
        1000000
        1100000
        1010000
        1101000
        1100100
        1010010
        1010011
    """
    expected = [[cell == "1" for cell in row] for row in drawn.split()]
    assert ancestor_mask(PARENTS).tolist() == expected


def test_siblings_share_a_position_whatever_their_row() -> None:
    assert tree_position_ids(DEPTHS, 10).tolist() == [10, 11, 11, 12, 12, 12, 13]


def test_additive_mask_shows_the_prefix_and_blocks_with_the_lowest_finite_value() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = additive_mask(ancestor_mask(PARENTS), 3, dtype)
        assert mask.shape == (1, 1, 7, 10)
        assert mask.dtype == dtype
        assert (mask[..., :3] == 0).all()
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}
        assert ((mask[0, 0, :, 3:] == 0) == ancestor_mask(PARENTS)).all()


def test_golden_sliding_mask() -> None:
    """Window 3, prefix of 4 (positions 0..3), root at 4: a key is seen when less than 3 behind."""
    drawn = """
        0011 1000000
        0001 1100000
        0001 1010000
        0000 1101000
        0000 1100100
        0000 1010010
        0000 0010011
    """
    mask = sliding_additive_mask(ancestor_mask(PARENTS), DEPTHS, 4, 3, torch.float32)
    rows = ["".join(row.split()) for row in drawn.strip().splitlines()]
    assert (mask[0, 0] == 0).tolist() == [[cell == "1" for cell in row] for row in rows]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 10**6), st.integers(0, 9), st.integers(1, 12))
def test_masks_follow_their_definitions(nodes: int, seed: int, prefix: int, window: int) -> None:
    rng = random.Random(seed)
    parents = [-1] + [rng.randrange(row) for row in range(1, nodes)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)

    ancestors = ancestor_mask(torch.tensor(parents))
    sliding = sliding_additive_mask(ancestors, torch.tensor(depths), prefix, window, torch.float32)[
        0, 0
    ]
    for row in range(nodes):
        line = {row}
        node = row
        while parents[node] >= 0:
            node = parents[node]
            line.add(node)
        assert set(ancestors[row].nonzero().flatten().tolist()) == line
        for key in range(prefix + nodes):
            position = key if key < prefix else prefix + depths[key - prefix]
            is_seen = key < prefix or key - prefix in line
            is_near = prefix + depths[row] - position < window
            assert (sliding[row, key] == 0).item() == (is_seen and is_near)
        assert (sliding[row] == 0).any()  # no row is ever fully blocked


@given(st.lists(st.integers(0, 10**6), max_size=70))
def test_ancestors_are_those_that_the_parents_lead_to(draws: list[int]) -> None:
    parents = [-1, *(draw % row for row, draw in enumerate(draws, start=1))]
    expected = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row in range(len(parents)):
        node = row
        while node >= 0:
            expected[row, node] = True
            node = parents[node]
    assert torch.equal(ancestor_mask(torch.tensor(parents)), expected)
