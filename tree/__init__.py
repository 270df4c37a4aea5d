"""Draft trees: structure, EAGLE-2 growth, masks and positions, as pure functions on tensors.

Shape letters used throughout the project: B batch, P prompt, N tree nodes (root included), K
children, D depth, H hidden, V vocabulary, U draft vocabulary.
"""

from tree.draft_tree import DraftTree
from tree.growth import Frontier, Growth, rerank
from tree.mask import additive_mask, ancestor_mask, sliding_additive_mask, tree_position_ids

__all__ = [
    "DraftTree",
    "Frontier",
    "Growth",
    "additive_mask",
    "ancestor_mask",
    "rerank",
    "sliding_additive_mask",
    "tree_position_ids",
]
