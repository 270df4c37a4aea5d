"""The target model: the only file that calls a Hugging Face forward, with its masks and cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_fsd.attention import PACKED
from eagle_fsd.cache import PreallocatedCache
from eagle_fsd.chat import merge_stop_ids
from eagle_fsd.errors import UnsupportedModelError
from eagle_fsd.turnstile import Turnstile
from tree import DraftTree, additive_mask, ancestor_mask, sliding_additive_mask, tree_position_ids

logger = logging.getLogger(__name__)

MaskKind = Literal["tensor", "dict"]

# How each family's forward takes a ready 4-D mask: one tensor for all layers (windowed where the
# config has a window), or a dict by layer type. Every entry is proven by the parity harness in
# tests/eagle_fsd/test_parity.py.
FAMILIES: dict[str, MaskKind] = {
    "llama": "tensor",
    "mistral": "tensor",
    "mixtral": "tensor",
    "qwen2": "dict",
    "qwen3": "dict",
    "gemma2": "dict",
}
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa", PACKED)
LAYER_TYPES = ("full_attention", "sliding_attention")
# RoPE kinds whose angles of *all* positions change once the original length is passed: cached keys
# would be wrong.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


# Settings of a generation config that change even greedy ids, with the values that do not.
_NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({},),
    "guidance_scale": (1.0,),
    "stop_strings": ([],),
    "watermarking_config": (),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
}


@dataclass(frozen=True)
class TargetOutput:
    """What one pass gives.

    Attributes:
        logits: [N, V] as the model's own forward gives them (after soft caps and scales), in the
            model's dtype.
        features: [N, H] what `lm_head` read, in the model's dtype. After `prefill` there is one row
            a prompt token, while `logits` has the last one only.
    """

    logits: Tensor
    features: Tensor


class Target(Protocol):
    """What the decoder asks of a target; `TargetModel` is the one for transformers models."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def output_device(self) -> torch.device: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def turnstile(self) -> Turnstile: ...

    def start(self, capacity: int) -> None: ...
    def prefill(self, input_ids: Tensor) -> TargetOutput: ...
    def score(self, tree: DraftTree) -> TargetOutput: ...
    def commit(self, path: list[int]) -> None: ...


class TargetModel:
    """A stock causal LM with a preallocated cache, scoring whole trees in one pass.

    Args:
        model: a loaded transformers causal LM; it is not changed.
        prefill_chunk: prompt tokens a pass at most, so that a long prompt needs no long score
            matrix.

    Raises:
        UnsupportedModelError: when the model is of a kind that is not proven to be decoded right.
    """

    def __init__(self, model: PreTrainedModel, prefill_chunk: int = 1024) -> None:
        _refuse_unsupported(model)
        self.model = model
        self.config: Any = model.config
        self._backbone: nn.Module = model.get_decoder()
        self._lm_head: Any = model.get_output_embeddings()
        self._mask_kind = FAMILIES[self.config.model_type]
        self._prefill_chunk = prefill_chunk
        self._cache = PreallocatedCache(self.config.num_hidden_layers)
        self._tree_start = 0
        self.turnstile = Turnstile()
        _warn_of_ignored_settings(model)
        if self.dtype == torch.float16 and self.config.model_type.startswith("qwen2"):
            logger.warning(
                "%s overflows in float16 at times; prefer bfloat16", type(model).__name__
            )
        self._cap = self._find_output_transform()

    @property
    def vocabulary_size(self) -> int:
        """V: rows of the logits, which can be more than the tokenizer's tokens."""
        return self._vocabulary_size

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype as it is now (`model.dtype` can be stale after `.float()`)."""
        return self._embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where token ids are read."""
        return self._embedding_weight.device

    @property
    def output_device(self) -> torch.device:
        """Where features and logits come out."""
        return self._output_device

    @property
    def max_positions(self) -> int:
        """The longest sequence, prompt and answer, that this model decodes right."""
        limit = int(self.config.max_position_embeddings)
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        for kind in kinds:
            original = kind.get("original_max_position_embeddings") or getattr(
                self.config, "original_max_position_embeddings", None
            )
            if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE and original:
                limit = min(limit, int(original))
        return limit

    @property
    def stop_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the generation config, which may name several."""
        config = getattr(self.model, "generation_config", None)
        return merge_stop_ids(getattr(config, "eos_token_id", None))

    @property
    def num_rows(self) -> int:
        """Rows in the cache."""
        return self._cache.num_rows

    @property
    def _embedding_weight(self) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @torch.inference_mode()
    def start(self, capacity: int) -> None:
        """Forgets the last request and makes room for `capacity` rows.

        Raises:
            ValueError: the model was changed since it was looked at.
        """
        _refuse_training_mode(self.model)
        if self.model.get_output_embeddings() is not self._lm_head:
            raise ValueError("the target's lm_head was replaced; make a new decoder for it")
        self._cache.reserve(capacity)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> TargetOutput:
        """Reads a prompt behind the rows that are there, in chunks.

        Args:
            input_ids: [P] int64.

        Returns:
            logits [1, V] of the last position, features [P, H].
        """
        features = [
            self._forward(chunk, None, None)
            for chunk in torch.split(input_ids, self._prefill_chunk)
        ]
        return TargetOutput(self.logits(features[-1][-1:]), torch.cat(features))

    @torch.inference_mode()
    def score(self, tree: DraftTree) -> TargetOutput:
        """One pass over all nodes behind the rows that are there; appends one row a node."""
        self._tree_start = self.num_rows
        if tree.num_nodes == 1:  # the model's own step, so that plain decoding is nothing else
            features = self._forward(tree.token_ids, None, None)
            return TargetOutput(self.logits(features), features)
        return self.extend(tree.token_ids, ancestor_mask(tree.parents), tree.depths)

    @torch.inference_mode()
    def extend(self, token_ids: Tensor, ancestors: Tensor, depths: Tensor) -> TargetOutput:
        """One pass over further nodes of a tree whose first nodes are in the cache already.

        Args:
            token_ids: [M] int64, the new nodes.
            ancestors: [M, N] bool, which of the tree's N nodes so far each of them sees.
            depths: [N] int64, of all nodes so far, the new ones last.
        """
        num_prefix = self.num_rows - (depths.numel() - token_ids.numel())
        positions = tree_position_ids(depths, num_prefix)[-token_ids.numel() :]
        masks = self._masks(ancestors.to(self.device), depths.to(self.device), num_prefix)
        features = self._forward(token_ids, masks, positions)
        return TargetOutput(self.logits(features), features)

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """Keeps the prefix and some nodes of the tree scored last; drops its other rows.

        Args:
            path: tree rows to keep, ascending, the root's 0 included.
        """
        self._cache.commit(self._tree_start, path)

    def truncate(self, num_rows: int) -> None:
        """Drops all rows from `num_rows` on."""
        self._cache.commit(num_rows, [])

    def logits(self, features: Tensor) -> Tensor:
        """What the model's forward makes of features: [..., H] -> [..., V]."""
        return self.cap(self._lm_head(features))

    def cap(self, scores: Tensor) -> Tensor:
        """What the model does between `lm_head` and its logits, token by token."""
        return self._cap(scores)

    @torch.no_grad()
    def output_rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """`lm_head` for some tokens only: [U] int64 -> weight [U, H] and bias [U] or None.

        An lm_head that is not plain weights in memory (offloaded, quantised, adapted) is read by
        calling it on the unit vectors.
        """
        lm_head = self._lm_head
        if isinstance(lm_head, nn.Linear) and _is_plain(lm_head.weight):
            bias: Tensor | None = lm_head.bias
            rows = lm_head.weight.detach()[token_ids]
            return rows, None if bias is None else bias.detach()[token_ids]
        zero = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.output_device)
        bias = lm_head(zero)[0, token_ids]
        units = torch.eye(self.hidden_size, dtype=self.dtype, device=self.output_device)
        columns = [lm_head(block)[:, token_ids] - bias for block in torch.split(units, 256)]
        return torch.cat(columns).T.contiguous(), bias

    def embed(self, token_ids: Tensor) -> Tensor:
        """The model's own embeddings, on the output device: [...] int64 -> [..., H]."""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids.to(self.device))
        return embedded.to(self.output_device)

    def _forward(self, token_ids: Tensor, masks: Any, positions: Tensor | None) -> Tensor:
        """[N] ids -> [N, H] features."""
        if positions is None:
            positions = torch.arange(self.num_rows, self.num_rows + token_ids.numel())
        outputs = self._backbone(
            input_ids=token_ids.to(self.device)[None],
            attention_mask=masks,
            position_ids=positions.to(self.device)[None],
            cache=self._cache,
            use_cache=True,
        )
        features: Tensor = outputs.last_hidden_state[0]
        return features.to(self._output_device)

    def _masks(
        self, ancestors: Tensor, depths: Tensor, num_prefix: int
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks in the form that this family's forward takes.

        Additive because a bool mask is added as 0 and 1 under eager attention.
        """
        window = getattr(self.config, "sliding_window", None)

        def full() -> Tensor:
            return additive_mask(ancestors, num_prefix, self.dtype)

        def sliding() -> Tensor:
            assert window is not None
            return sliding_additive_mask(ancestors, depths, num_prefix, window, self.dtype)

        if self._mask_kind == "tensor":
            # Llama has no window whatever its config says; the others apply theirs to all layers.
            return sliding() if window and self.config.model_type != "llama" else full()
        makers = {"full_attention": full, "sliding_attention": sliding}
        return {kind: makers[kind]() for kind in set(self.config.layer_types)}

    @torch.inference_mode()
    def _find_output_transform(self) -> Callable[[Tensor], Tensor]:
        """What the model does between `lm_head` and its logits, proven on a two-token pass."""
        token_ids = torch.tensor([[0, 1]], device=self.device)
        outputs = self.model(input_ids=token_ids, use_cache=False)
        features = self._backbone(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = self._lm_head(features)
        self._vocabulary_size: int = outputs.logits.shape[-1]
        self._output_device: torch.device = logits.device
        cap = getattr(self.config, "final_logit_softcapping", None)
        transforms: list[Callable[[Tensor], Tensor]] = [lambda x: x]
        if cap is not None:
            transforms.append(lambda x: torch.tanh(x / cap) * cap)
        for transform in transforms:
            expected = outputs.logits.to(logits.device)
            if torch.allclose(transform(logits), expected, rtol=1e-3, atol=1e-3, equal_nan=True):
                return transform
        raise UnsupportedModelError(
            f"{type(self.model).__name__} does more between lm_head and its logits than a soft "
            "cap; supported are models "
            "whose logits are lm_head(final hidden state), soft-capped or not"
        )


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight lies in memory as numbers, not offloaded and not quantised."""
    return (
        type(weight) is nn.Parameter and weight.device.type != "meta" and weight.is_floating_point()
    )


def _refuse_unsupported(model: PreTrainedModel) -> None:
    """One clear sentence for everything that is not proven right."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"target must be a loaded transformers causal LM, got {type(model).__name__}"
        )
    config: Any = model.config
    name = f"{type(model).__name__} ({config.model_type})"
    supported = f"supported families are {', '.join(sorted(FAMILIES))}"
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; {supported}")
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{name} is not a family that tree decoding is proven right for (state-space, "
            "linear-attention and other "
            f"caches cannot drop rejected tokens); {supported}"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no lm_head; load it with AutoModelForCausalLM")
    _refuse_training_mode(model)
    implementation = config._attn_implementation
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attention {implementation!r} takes no tree mask; load {name} with "
            "attn_implementation='sdpa' or 'eager'"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of type {unknown}; supported are {list(LAYER_TYPES)}"
        )


def _refuse_training_mode(model: PreTrainedModel) -> None:
    if model.training:
        raise ValueError(
            f"{type(model).__name__} is in training mode, where dropout changes its logits; call "
            "model.eval() first"
        )


def _warn_of_ignored_settings(model: PreTrainedModel) -> None:
    """Names what `model.generate` would apply by the model's generation config and we do not."""
    config: Any = getattr(model, "generation_config", None)
    asked = {name: getattr(config, name, None) for name in _NEUTRAL_SETTINGS}
    active = [
        f"{name}={value!r}"
        for name, value in asked.items()
        if value is not None and value not in _NEUTRAL_SETTINGS[name]
    ]
    if active:
        logger.warning(
            "the generation config of %s asks for %s, which is not applied: ids are those of "
            "model.generate without it",
            type(model).__name__,
            ", ".join(active),
        )
