"""EAGLE's draft head: one decoder layer that extrapolates features (arXiv:2401.15077)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle_fsd.cache import PreallocatedLayer


@dataclass(frozen=True)
class DraftHeadConfig:
    """Shape of a draft head.

    Attributes:
        hidden_size: H, the target's.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads, a divisor of the query heads.
        head_dim: size of one head.
        vocab_size: V, the target's.
        max_position_embeddings: longest sequence that the head drafts for.
        rms_norm_eps: epsilon of its one norm.
        rope_parameters: RoPE kind and numbers as transformers 5 writes them, at least rope_type and
            rope_theta.
        hidden_act: activation of the MLP, a transformers name.
        bias: whether `fc` has a bias (EAGLE's default; other engines have none).
        qkv_bias: whether q, k and v have biases, as in heads for Qwen2.
        own_embeddings: whether the head carries `embed_tokens` instead of reading the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    hidden_act: str = "silu"
    bias: bool = False
    qkv_bias: bool = False
    own_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name} of a draft head must be a whole number >= 1, got {value!r}"
                )
        if self.head_dim % 2:
            raise ValueError(f"head_dim of a draft head must be even for RoPE, got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_key_value_heads must divide num_attention_heads, got "
                f"{self.num_key_value_heads} and "
                f"{self.num_attention_heads}"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"unknown hidden_act {self.hidden_act!r} of a draft head; use a transformers "
                "activation name"
            )
        try:
            LlamaRotaryEmbedding(self.rotary_config())
        except KeyError as error:  # an unknown kind, or one that lacks a number
            raise ValueError(
                f"rope_parameters of a draft head make no RoPE: {error.args[0]}, got "
                f"{self.rope_parameters}"
            ) from error

    @classmethod
    def for_target(cls, config: Any, **changes: Any) -> DraftHeadConfig:
        """The usual head for a target: one layer of its own width, heads and RoPE.

        Args:
            config: the target's transformers config.
            **changes: fields to set otherwise.
        """
        rope = dict(config.rope_parameters)
        if "full_attention" in rope:  # RoPE by layer type: the head has one full-attention layer
            rope = dict(rope["full_attention"])
        heads = config.num_attention_heads
        fields: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": rope,
        }
        return cls(**(fields | changes))

    def rotary_config(self) -> LlamaConfig:
        """The fields that transformers' rotary embedding reads."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )


class DraftHead(nn.Module):
    """Predicts the next feature from (embedding of token t+1, feature t).

    Layer 0 has no input norm and there is no final norm; the target's `lm_head` turns a predicted
    feature into the draft's law. Parameter names are EAGLE's.

    Source: arXiv:2401.15077, section 4.1.
    """

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([_DecoderLayer(config)])
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config.rotary_config())

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        position_ids: Tensor,
        mask: Tensor | None = None,
        cache: PreallocatedLayer | None = None,
    ) -> Tensor:
        """Predicts one feature a row.

        Args:
            embeddings: [B, T, H] of tokens t+1.
            features: [B, T, H] features t, of the same dtype.
            position_ids: [B, T] int64, t.
            mask: [T, M] or broadcastable to [B, heads, T, M], bool (True is visible) or additive; M
                counts the cache's rows and then the T new ones. None is causal when the cache is
                empty.
            cache: rows seen before; the new rows are appended. Needs B = 1.

        Returns:
            [B, T, H] predicted features t+1.
        """
        hidden = self.fc(torch.cat([embeddings, features], dim=-1))
        cos, sin = self.rotary(hidden, position_ids)
        predicted: Tensor = self.layers[0](hidden, cos, sin, mask, cache)
        return predicted


class _DecoderLayer(nn.Module):
    """A Llama layer without the first norm."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: PreallocatedLayer | None,
    ) -> Tensor:
        hidden = hidden + self.self_attn(hidden, cos, sin, mask, cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class _Mlp(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(
            self.activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return output


class _Attention(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_key_value_heads != config.num_attention_heads
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: PreallocatedLayer | None,
    ) -> Tensor:
        batch, length, _ = hidden.shape
        queries, keys, values = (
            projection(hidden).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
        if cache is not None:
            keys, values = cache.update(keys, values)
        is_first = keys.shape[2] == length
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and is_first and length > 1,
            enable_gqa=self.is_grouped,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return output


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, heads, T, head_dim] with [B, T, head_dim] angles, by halves of a head."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return states * cos[:, None] + turned * sin[:, None]
