"""The draft tree as four aligned tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """A tree of candidate tokens below the last committed token.

    Attributes:
        token_ids: [N] int64. Row 0 is the root, the last committed token.
        parents: [N] int64. Row of each node's parent, always smaller than the node's own row; -1
            for the root.
        depths: [N] int64. 0 for the root, parent's depth + 1 otherwise, ascending.
        scores: [N] float32. Cumulative draft log-probability, <= 0; 0 for the root.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

    @classmethod
    def root_only(cls, token_id: int, device: torch.device | str = "cpu") -> DraftTree:
        """A tree of one node: scoring it is one step of plain decoding."""
        return cls(
            token_ids=torch.tensor([token_id], device=device),
            parents=torch.tensor([-1], device=device),
            depths=torch.tensor([0], device=device),
            scores=torch.zeros(1, device=device),
        )

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.token_ids.numel()

    def check(self) -> None:
        """Raises ValueError when the tensors do not describe a tree."""
        parents, depths, tokens = (
            self.parents.tolist(),
            self.depths.tolist(),
            self.token_ids.tolist(),
        )
        if not parents or parents[0] != -1 or depths[0] != 0:
            raise ValueError("row 0 of a draft tree must be the root: parent -1, depth 0")
        siblings: set[tuple[int, int]] = set()
        for row, (parent, depth, token) in enumerate(zip(parents, depths, tokens, strict=True)):
            if row == 0:
                continue
            if not 0 <= parent < row:
                raise ValueError(f"node {row} must come after its parent, got parent {parent}")
            if depth != depths[parent] + 1:
                raise ValueError(f"node {row} must have depth {depths[parent] + 1}, got {depth}")
            if (parent, token) in siblings:
                raise ValueError(f"node {row} repeats token {token} below node {parent}")
            siblings.add((parent, token))
