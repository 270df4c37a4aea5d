"""Attention masks and positions of a draft tree behind a prefix."""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_mask(parents: Tensor) -> Tensor:
    """Which nodes each node may see: itself and its ancestors.

    Args:
        parents: [N] int64, parents before children, -1 for the root.

    Returns:
        [N, N] bool on the device of `parents`; row i is node i.
    """
    num_nodes = parents.numel()
    # A last row, which sees nothing, stands for what is above the root.
    seen = torch.eye(num_nodes + 1, num_nodes, dtype=torch.bool, device=parents.device)
    above = torch.cat([parents, parents.new_full((1,), -1)])
    above = torch.where(above < 0, num_nodes, above)
    # After n rounds a row sees its nearest 2^n - 1 ancestors, and `above` is the next one.
    for _ in range(max(0, num_nodes - 1).bit_length()):
        seen = seen | seen[above]
        above = above[above]
    return seen[:num_nodes]


def tree_position_ids(depths: Tensor, num_prefix: int) -> Tensor:
    """[N] int64 depths -> [N] int64 positions: siblings share one, whatever their row."""
    return depths + num_prefix


def additive_mask(ancestors: Tensor, num_prefix: int, dtype: torch.dtype) -> Tensor:
    """The mask of full attention, to be added to attention scores.

    Args:
        ancestors: [M, N] bool, which of N nodes the last M of them see; all of `ancestor_mask`, or
            its last rows when the nodes before them are in the cache already.
        num_prefix: rows of the prefix, visible to every node.
        dtype: floating dtype of the model; blocked cells hold its most negative finite value.

    Returns:
        [1, 1, M, num_prefix + N] of `dtype`.
    """
    prefix = ancestors.new_ones((ancestors.shape[0], num_prefix))
    return _to_additive(torch.cat([prefix, ancestors], dim=1), dtype)


def sliding_additive_mask(
    ancestors: Tensor, depths: Tensor, num_prefix: int, window: int, dtype: torch.dtype
) -> Tensor:
    """The mask of sliding-window attention: a visible key is also near enough.

    Positions follow depth, not row: a prefix row t sits at position t, a node of depth d at
    num_prefix + d.

    Args:
        ancestors: [M, N] bool, as for `additive_mask`.
        depths: [N] int64, of all nodes.
        num_prefix: rows of the prefix.
        window: positions a query sees, its own included, >= 1.
        dtype: floating dtype of the model.

    Returns:
        [1, 1, M, num_prefix + N] of `dtype`.
    """
    positions = tree_position_ids(depths, num_prefix)
    key_positions = torch.cat([torch.arange(num_prefix, device=depths.device), positions])
    queries = positions[-ancestors.shape[0] :]
    near = queries[:, None] - key_positions[None, :] < window
    prefix = ancestors.new_ones((ancestors.shape[0], num_prefix))
    return _to_additive(torch.cat([prefix, ancestors], dim=1) & near, dtype)


def _to_additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, M] bool -> [1, 1, N, M]: 0 where visible, the dtype's lowest finite value elsewhere."""
    blocked = torch.finfo(dtype).min
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, blocked)[None, None]
