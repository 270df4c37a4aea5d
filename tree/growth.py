"""EAGLE-2's dynamic draft tree, as pure functions on scores (arXiv:2406.16858, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Frontier:
    """The nodes that the next draft step expands, best first.

    Attributes:
        token_ids: [K] int64.
        parent_slots: [K] int64. Which node of the previous frontier is each node's parent.
    """

    token_ids: Tensor
    parent_slots: Tensor


class Growth:
    """Collects the levels of one tree, then keeps its best nodes.

    Level 1 is the root's children; each further level holds the children of the `top_k` nodes of
    the last level that have the best cumulative log-probability. Shapes depend on the configuration
    only, so a fixed configuration never waits for the device: children with log-probability -inf or
    NaN stay in the buffers and are dropped by `finish`.

    Source: arXiv:2406.16858, sections 4.1 (expansion) and 4.2 (reranking).
    """

    def __init__(self, root_token_id: int, top_k: int, device: torch.device | str = "cpu") -> None:
        self._top_k = top_k
        self._root = torch.tensor([root_token_id], device=device)
        self._token_ids: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []  # among all candidates, -1 for the root
        self._frontier_nodes = torch.tensor([-1], device=device)
        self._frontier_scores = torch.zeros(1, device=device)
        self._inner_nodes: list[Tensor] = []
        self._num_candidates = 0

    def add_level(self, token_ids: Tensor, log_probs: Tensor) -> Frontier:
        """Adds the children of the current frontier and chooses the next one.

        Args:
            token_ids: [M, K] int64, distinct in a row, best first. M is 1 for the first level, then
                the frontier's size.
            log_probs: [M, K] float32, the draft's log-probability of each child given its parent.

        Returns:
            The next frontier, at most `top_k` nodes.
        """
        log_probs = torch.nan_to_num(log_probs.float(), nan=-torch.inf, neginf=-torch.inf)
        scores = self._frontier_scores[:, None] + log_probs
        num_parents, num_children = scores.shape
        self._inner_nodes.append(self._frontier_nodes)
        self._token_ids.append(token_ids.flatten())
        self._scores.append(scores.flatten())
        self._parents.append(self._frontier_nodes.repeat_interleave(num_children))

        best = _stable_top(scores.flatten(), min(self._top_k, num_parents * num_children))
        self._frontier_scores = scores.flatten()[best]
        self._frontier_nodes = best + self._num_candidates
        self._num_candidates += scores.numel()
        return Frontier(token_ids.flatten()[best], best // num_children)

    def finish(self, num_draft_tokens: int) -> tuple[DraftTree, Tensor]:
        """Keeps the `num_draft_tokens` best candidates.

        Returns:
            The tree, nodes in level order, and [N] int64: for each node the row of its children's
            draft law in the concatenation of all expanded frontiers (the root's own row is 0), or
            -1 where the node was not expanded.
        """
        scores = torch.cat(self._scores)
        parents = torch.cat(self._parents)
        depths = torch.cat(
            [torch.full_like(level, depth) for depth, level in enumerate(self._parents, start=1)]
        )
        kept = rerank(scores, depths, num_draft_tokens)
        root = parents.new_zeros(1)

        # Candidate c moves to row row_of[c + 1]; slot 0 stands for the root, whose candidate number
        # is -1.
        row_of = parents.new_full((scores.numel() + 1,), -1)
        row_of[torch.cat([root, kept + 1])] = torch.arange(kept.numel() + 1, device=kept.device)
        law_of = parents.new_full((scores.numel() + 1,), -1)
        inner = torch.cat(self._inner_nodes) + 1
        law_of[inner] = torch.arange(inner.numel(), device=inner.device)

        tree = DraftTree(
            token_ids=torch.cat([self._root, torch.cat(self._token_ids)[kept]]),
            parents=torch.cat([root - 1, row_of[parents[kept] + 1]]),
            depths=torch.cat([root, depths[kept]]),
            scores=torch.cat([scores.new_zeros(1), scores[kept]]),
        )
        return tree, law_of[torch.cat([root, kept + 1])]


def rerank(scores: Tensor, depths: Tensor, num_draft_tokens: int) -> Tensor:
    """Chooses the best candidates of a tree whose candidates are listed level by level.

    The order is (score, depth, index): a child's score is never above its parent's and its depth is
    larger, so ties cannot keep a child and drop its parent. Candidates with score -inf are not
    nodes.

    Args:
        scores: [C] float32, cumulative log-probabilities.
        depths: [C] int64, ascending.
        num_draft_tokens: how many to keep at most, >= 1.

    Returns:
        [M] int64, M <= num_draft_tokens, ascending: parents before children.

    Source: arXiv:2406.16858, section 4.2.
    """
    # Candidates are listed by depth, so a stable sort by score alone yields (score, depth, index).
    if bool((depths[1:] < depths[:-1]).any()):
        raise ValueError("candidates must be listed level by level")
    best = _stable_top(scores, min(num_draft_tokens, scores.numel()))
    best = best[scores[best] > -torch.inf]
    return best.sort().values


def _stable_top(scores: Tensor, count: int) -> Tensor:
    """[C] -> [count] int64, best first, lower index first among equals."""
    return scores.sort(descending=True, stable=True).indices[:count]
