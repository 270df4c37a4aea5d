"""EAGLE-2's growth and reranking: drawn by hand, against a slow reference, and as invariants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree import DraftTree, Growth, rerank


def test_golden_tree_drawn_by_hand() -> None:
    """Root 7; level 1: tokens 1 (p .6), 2 (.3); level 2 below each: .9/.1 and .5/.4.

    Cumulative: 1 .6, 2 .3, 1-3 .54, 1-4 .06, 2-3 .15, 2-5 .12. The best four are 1, 1-3, 2, 2-3.
    """
    growth = Growth(root_token_id=7, top_k=2)
    frontier = growth.add_level(torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.3]]).log())
    assert frontier.token_ids.tolist() == [1, 2]
    assert frontier.parent_slots.tolist() == [0, 0]
    frontier = growth.add_level(
        torch.tensor([[3, 4], [3, 5]]), torch.tensor([[0.9, 0.1], [0.5, 0.4]]).log()
    )
    assert frontier.token_ids.tolist() == [3, 3]
    assert frontier.parent_slots.tolist() == [0, 1]

    tree, law_rows = growth.finish(num_draft_tokens=4)

    tree.check()
    assert tree.token_ids.tolist() == [7, 1, 2, 3, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2]
    assert tree.scores.exp().tolist() == pytest.approx([1.0, 0.6, 0.3, 0.54, 0.15])
    # Row 0 of the laws is the root's, rows 1 and 2 those of level 1's frontier; leaves have none.
    assert law_rows.tolist() == [0, 1, 2, -1, -1]


def test_frontier_is_chosen_by_cumulative_not_by_own_probability() -> None:
    growth = Growth(0, top_k=2)
    growth.add_level(torch.tensor([[1, 2]]), torch.tensor([[0.9, 0.05]]).log())
    frontier = growth.add_level(
        torch.tensor([[3, 4], [5, 6]]), torch.tensor([[0.5, 0.4], [0.9, 0.1]]).log()
    )
    assert frontier.token_ids.tolist() == [3, 4]  # .45 and .36, before .045 of the surest child
    assert frontier.parent_slots.tolist() == [0, 0]


def test_ties_never_orphan_a_child() -> None:
    """A child of probability 1 has its parent's score: the parent must win the tie."""
    growth = Growth(0, top_k=2)
    growth.add_level(torch.tensor([[1, 2]]), torch.tensor([[0.0, 0.0]]))
    growth.add_level(torch.tensor([[3, 4], [5, 6]]), torch.zeros(2, 2))
    for count in range(1, 7):
        tree, _ = growth.finish(count)
        tree.check()
        assert tree.num_nodes == count + 1


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_children_without_probability_are_not_nodes(bad: float) -> None:
    growth = Growth(0, top_k=2)
    growth.add_level(torch.tensor([[1, 2]]), torch.tensor([[-0.1, bad]]))
    growth.add_level(torch.tensor([[3, 4], [5, 6]]), torch.tensor([[-0.2, bad], [-0.1, -0.1]]))
    tree, _ = growth.finish(6)
    tree.check()
    assert tree.token_ids.tolist() == [0, 1, 3]


def test_rerank_refuses_candidates_out_of_level_order() -> None:
    with pytest.raises(ValueError, match="level by level"):
        rerank(torch.tensor([-1.0, -2.0]), torch.tensor([2, 1]), 2)


def test_check_refuses_what_is_no_tree() -> None:
    good = DraftTree.root_only(3)
    good.check()
    two = torch.tensor([5, 5])
    for parents, depths, fault in (
        ([0, 0], [0, 1], "root"),
        ([-1, 1], [0, 1], "after its parent"),
        ([-1, 0], [0, 2], "depth"),
    ):
        with pytest.raises(ValueError, match=fault):
            DraftTree(two, torch.tensor(parents), torch.tensor(depths), torch.zeros(2)).check()
    with pytest.raises(ValueError, match="repeats token"):
        DraftTree(
            torch.tensor([1, 2, 2]),
            torch.tensor([-1, 0, 0]),
            torch.tensor([0, 1, 1]),
            torch.zeros(3),
        ).check()


Level = tuple[list[list[int]], list[list[float]]]


def slow_growth(levels: list[Level], top_k: int, num_draft_tokens: int) -> list[tuple[int, ...]]:
    """EAGLE-2 node by node, with paths as names: the kept paths in level order."""
    candidates: list[tuple[float, int, int, tuple[int, ...]]] = []
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for depth, (tokens, log_probs) in enumerate(levels, start=1):
        level = []
        for (path, score), row_tokens, row_probs in zip(frontier, tokens, log_probs, strict=True):
            for token, log_prob in zip(row_tokens, row_probs, strict=True):
                level.append(((*path, token), float(torch.tensor(score) + torch.tensor(log_prob))))
        candidates += [
            (score, depth, len(candidates) + i, path) for i, (path, score) in enumerate(level)
        ]
        order = sorted(range(len(level)), key=lambda i: (-level[i][1], i))
        frontier = [level[i] for i in order[:top_k]]
    kept = sorted(candidates, key=lambda c: (-c[0], c[1], c[2]))[:num_draft_tokens]
    return [
        path for score, _, _, path in sorted(kept, key=lambda c: (c[1], c[2])) if score > -math.inf
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_growth_equals_the_slow_reference(seed: int, top_k: int, depth: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    growth = Growth(99, top_k)
    levels: list[Level] = []
    for level in range(depth):
        rows = 1 if level == 0 else min(top_k, len(levels[-1][0]) * top_k)
        tokens = torch.stack([torch.randperm(50, generator=generator)[:top_k] for _ in range(rows)])
        log_probs = -torch.rand(rows, top_k, generator=generator)
        if coarse:  # many ties, some impossible
            log_probs = (log_probs * 3).round()
            log_probs[log_probs < -2] = -math.inf
        growth.add_level(tokens, log_probs)
        levels.append((tokens.tolist(), log_probs.tolist()))
    num_candidates = top_k + (depth - 1) * top_k**2
    for count in {1, min(3, num_candidates), num_candidates}:
        tree, law_rows = growth.finish(count)
        tree.check()
        paths = path_names(tree)
        assert paths[1:] == slow_growth(levels, top_k, count)
        # Every node with children says where their law is.
        assert all(law_rows[parent] >= 0 for parent in set(tree.parents.tolist()) - {-1})


def path_names(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    names: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        names.append((*names[parent], token))
    return names


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-9, 0, width=32), min_size=1, max_size=40), st.integers(1, 50))
def test_rerank_keeps_the_best_in_ascending_order(scores: list[float], count: int) -> None:
    values = torch.tensor(scores)
    kept = rerank(values, torch.ones(len(scores), dtype=torch.int64), count)
    assert kept.tolist() == sorted(kept.tolist())
    assert len(kept) == min(count, len(scores))
    dropped = set(range(len(scores))) - set(kept.tolist())
    assert all(values[i] <= values[kept].min() for i in dropped)
