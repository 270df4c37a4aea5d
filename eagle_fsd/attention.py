"""Attention of a few queries over many keys without copying the keys for every query head.

With grouped heads and a mask, PyTorch's kernels want keys and values repeated for every query head,
a copy of the whole cache in every layer of every pass. Here the query heads of a group stand in one
longer query instead, and the mask, which is far smaller, is repeated for them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKED = "sdpa_packed"


def packed_attention(  # noqa: PLR0913 - the signature of transformers' attention interface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, the same as "sdpa" up to rounding.

    Args:
        module: the attention layer; its number of groups is read off the shapes.
        query: [B, heads, N, D].
        key: [B, heads / groups, S, D].
        value: [B, heads / groups, S, D].
        attention_mask: [B or 1, 1, N, S] additive; anything else is left to "sdpa".
        dropout: 0 outside training.
        scaling: factor on the scores.
        **options: left to "sdpa" where they ask for something.

    Returns:
        [B, N, heads, D], and None for the weights.
    """
    batch, num_heads, length, _ = query.shape
    groups = num_heads // key.shape[1]
    is_plain = not any(options.get(name) is not None for name in ("position_bias", "softcap"))
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or not is_plain:
        # It is part of transformers' own interface, but untyped.
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return result
    attended = F.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * length, -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    return attended.reshape(batch, num_heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
