"""The target model: the only file that calls a Hugging Face forward, with its masks and cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_fsd.attention import PACKED
from eagle_fsd.cache import PreallocatedCache
from eagle_fsd.chat import merge_stop_ids
from eagle_fsd.errors import UnsupportedModelError
from eagle_fsd.packed import PackedLayers
from eagle_fsd.turnstile import Turnstile
from tree import DraftTree, additive_mask, ancestor_mask, sliding_additive_mask, tree_position_ids

logger = logging.getLogger(__name__)

MaskKind = Literal["tensor", "dict"]

# How each family's forward takes a ready 4-D mask: one tensor for all layers (windowed where the
# config has a window), or a dict by layer type. Every entry is proven by the parity harness in
# tests/eagle_fsd/test_parity.py; docs/families.md tells more.
FAMILIES: dict[str, MaskKind] = {
    "llama": "tensor",
    "mistral": "tensor",
    "mixtral": "tensor",
    "qwen2": "dict",
    "qwen2_moe": "dict",
    "qwen3": "dict",
    "qwen3_moe": "tensor",
    "gemma2": "dict",
    "gemma3_text": "dict",
    "gpt_oss": "dict",
    "granite": "tensor",
    "olmo2": "tensor",
    "phi3": "tensor",
    "smollm3": "dict",
}
# They take one tensor and have no window, whatever their config says.
_WINDOWLESS = ("llama", "granite", "olmo2")
# Families that are near to a supported one, and why they are refused.
_REFUSED_FAMILIES = {
    "gemma3": "reads images, whose tokens see each other both ways; load its text model, "
    "Gemma3ForCausalLM",
}
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa", PACKED)
LAYER_TYPES = ("full_attention", "sliding_attention")
# peft adapters that change weights only, so that a token's pass stays what it was. Others add
# virtual tokens, or choose by the whole sequence.
ADAPTERS = ("ADALORA", "IA3", "LOHA", "LOKR", "LORA", "OFT", "VERA")
# RoPE kinds whose angles of *all* positions change once the original length is passed: cached keys
# would be wrong.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_DYNAMICALLY_QUANTIZED = "torch.ao.nn.quantized.dynamic"


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

    The model can be whole, spread over devices or offloaded (accelerate's hooks), quantised,
    adapted (peft), or sharded by transformers' tensor parallelism; in the last case every process
    runs the same requests, with the same seeds.

    Args:
        model: a loaded transformers causal LM, or a peft model around one; it is not changed.
        prefill_chunk: prompt tokens a pass at most, so that a long prompt needs no long score
            matrix.
        packs_weights: compute on a CPU with linear layers laid out for few rows (see
            `eagle_fsd.packed`), which takes their memory a second time. A model that is split,
            quantised, adapted or hooked is computed as it is.
        is_compiled: compute passes with `torch.compile`, by graphs that serve all lengths; the
            first passes then take minutes.

    Raises:
        UnsupportedModelError: when the model is of a kind that is not proven to be decoded right.
    """

    def __init__(
        self,
        model: nn.Module,
        prefill_chunk: int = 1024,
        *,
        packs_weights: bool = False,
        is_compiled: bool = False,
    ) -> None:
        model = _unwrapped(model)
        _refuse_unsupported(model)
        self.model = model
        self.config: Any = model.config
        self._backbone: nn.Module = model.get_decoder()
        self._lm_head: Any = model.get_output_embeddings()
        self._packed = PackedLayers(model) if packs_weights else None
        self._compiled = torch.compile(self._backbone, dynamic=True) if is_compiled else None
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
        self._input_device = self._find_input_device()
        self._cap = self._find_output_transform()
        self._num_embeddings = self._embedding_weight.shape[0]
        self._own_forward = _own_forward(model)
        self._counts_and_scales = _counts_and_scales(self.config)
        self._hooked_modules = _hooked_modules(model) if is_compiled else []

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
        device = self._embedding_weight.device
        return self._input_device if device.type == "meta" else device

    @property
    def output_device(self) -> torch.device:
        """Where features and logits come out."""
        return self._output_device

    @property
    def packs_weights(self) -> bool:
        """Whether passes are to be computed with packed weights where the model allows it."""
        return self._packed is not None

    @property
    def is_compiled(self) -> bool:
        """Whether passes are computed with `torch.compile`."""
        return self._compiled is not None

    @property
    def has_packed_weights(self) -> bool:
        """Whether they are."""
        return self._packed is not None and self._packed.num_layers > 0

    @property
    def num_shards(self) -> int:
        """Processes among which the weights are divided; each runs every request."""
        return int(self.model.tp_size or 1)

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
            UnsupportedModelError, ValueError: the model was changed, since it was looked at, into
            one that is not decoded right.
        """
        _refuse_unsupported(self.model)
        self._refuse_changes()
        if self._packed is not None:
            self._packed.refresh()
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
        with self._computing():
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

    def _computing(self) -> AbstractContextManager[None]:
        """The time of a pass."""
        return nullcontext() if self._packed is None else self._packed.computing()

    def _refuse_changes(self) -> None:
        """What was looked at once, and would be another now."""
        changed = None
        if self.model.get_output_embeddings() is not self._lm_head:
            changed = "lm_head was replaced"
        elif self._embedding_weight.shape[0] != self._num_embeddings:
            changed = "embeddings were resized"
        elif _own_forward(self.model) != self._own_forward:
            changed = "forward was changed"
        elif _counts_and_scales(self.config) != self._counts_and_scales:
            changed = "configuration was changed"
        elif self.is_compiled and _hooked_modules(self.model) != self._hooked_modules:
            changed = "modules or hooks were changed after it was compiled"
        if changed:
            raise ValueError(f"the target's {changed}; make a new decoder for it")

    def _forward(self, token_ids: Tensor, masks: Any, positions: Tensor | None) -> Tensor:
        """[N] ids -> [N, H] features."""
        if positions is None:
            positions = torch.arange(self.num_rows, self.num_rows + token_ids.numel())
        input_ids = token_ids.to(self.device)[None]
        backbone: Any = self.model.get_decoder()
        if self._compiled is not None:
            backbone, input_ids = self._compiled, input_ids.clone()  # one kind of tensor, one graph
        with self._computing():
            outputs = backbone(
                input_ids=input_ids,
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
        has_window = self.config.model_type not in _WINDOWLESS
        window = getattr(self.config, "sliding_window", None) if has_window else None

        def full() -> Tensor:
            return additive_mask(ancestors, num_prefix, self.dtype)

        def sliding() -> Tensor:
            assert window is not None
            return sliding_additive_mask(ancestors, depths, num_prefix, window, self.dtype)

        if self._mask_kind == "tensor":
            return sliding() if window else full()
        makers = {"full_attention": full, "sliding_attention": sliding}
        return {kind: makers[kind]() for kind in set(self.config.layer_types)}

    @torch.inference_mode()
    def _find_input_device(self) -> torch.device:
        """Where the embedding computes: not where its weight lies when it is offloaded."""
        device = self._embedding_weight.device
        if device.type != "meta":
            return device
        embed: Any = self.model.get_input_embeddings()
        embedded: Tensor = embed(torch.tensor([0]))
        return embedded.device

    @torch.inference_mode()
    def _find_output_transform(self) -> Callable[[Tensor], Tensor]:
        """What the model does between `lm_head` and its logits, proven on a two-token pass."""
        token_ids = torch.tensor([[0, 1]], device=self.device)
        outputs = self.model(input_ids=token_ids, use_cache=False)
        features = self._backbone(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = self._lm_head(features)
        self._vocabulary_size: int = outputs.logits.shape[-1]
        self._output_device: torch.device = logits.device
        for transform in _output_transforms(self.config):
            expected = outputs.logits.to(logits.device)
            if torch.allclose(transform(logits), expected, rtol=1e-3, atol=1e-3, equal_nan=True):
                return transform
        raise UnsupportedModelError(
            f"{type(self.model).__name__} does more between lm_head and its logits than a soft "
            "cap or a scale; supported are models "
            "whose logits are lm_head(final hidden state), soft-capped, scaled or neither"
        )


def _own_forward(model: nn.Module) -> tuple[object, ...]:
    """What decides, beside the class, what calling the model gives."""
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    return (vars(model).get("forward"), *hooks)


def _counts_and_scales(config: Any) -> tuple[object, ...]:
    """What the cache and the output transform were made for."""
    names = ("num_hidden_layers", "final_logit_softcapping", "logits_scaling")
    return tuple(getattr(config, name, None) for name in names)


def _hooked_modules(model: nn.Module) -> list[tuple[int, int, int]]:
    """What compiled code does not look at again."""
    return [
        (id(module), len(module._forward_pre_hooks), len(module._forward_hooks))
        for module in model.modules()
    ]


def _output_transforms(config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """What a family may do between `lm_head` and its logits, what its config asks for first."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        yield lambda scores: torch.tanh(scores / cap) * cap
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        yield lambda scores: scores / scaling
    yield lambda scores: scores


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight lies in memory as numbers, not offloaded and not quantised."""
    return (
        type(weight) is nn.Parameter and weight.device.type != "meta" and weight.is_floating_point()
    )


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself; adapters that change weights stand inside it.

    Raises:
        TypeError: there is none.
        UnsupportedModelError: peft's wrapper does more than its base.
    """
    base: Any = model
    if type(model).__name__ == "PeftMixedModel":
        raise TypeError(
            "a PeftMixedModel is no target; give the model that its merge_and_unload() returns"
        )
    if hasattr(model, "get_base_model"):
        _refuse_adapters(model)
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"target must be a loaded transformers causal LM, got {type(model).__name__}"
        )
    return base


def _refuse_unsupported(model: PreTrainedModel) -> None:
    """One clear sentence for everything that is not proven right."""
    name = f"{type(model).__name__} ({model.config.model_type})"
    _refuse_family(model, name)
    _refuse_training_mode(model)
    _refuse_attention(model, name)
    _refuse_adapters(model)
    _refuse_dynamic_quantization(model, name)
    _refuse_placement(model, name)


def _refuse_family(model: PreTrainedModel, name: str) -> None:
    config: Any = model.config
    supported = f"supported families are {', '.join(sorted(FAMILIES))}"
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; {supported}")
    if config.model_type in _REFUSED_FAMILIES:
        raise UnsupportedModelError(f"{name} {_REFUSED_FAMILIES[config.model_type]}")
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{name} is not a family that tree decoding is proven right for (state-space, "
            "linear-attention and other "
            f"caches cannot drop rejected tokens); {supported}"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no lm_head; load it with AutoModelForCausalLM")


def _refuse_attention(model: PreTrainedModel, name: str) -> None:
    config: Any = model.config
    implementation = config._attn_implementation
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attention {implementation!r} takes no tree mask; load {name} with "
            "attn_implementation='sdpa' or 'eager'"
        )
    if implementation != "eager" and not model._supports_sdpa:
        # Another kernel would leave out what eager adds: GPT-OSS's sinks, Gemma-2's soft caps.
        raise UnsupportedModelError(
            f"attention {implementation!r} is not what {name} computes; load it with "
            "attn_implementation='eager'"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            f"{name} has bidirectional attention, in which earlier tokens see later ones; only "
            "causal models are decoded"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of type {unknown}; supported are {list(LAYER_TYPES)}"
        )


def _refuse_adapters(model: nn.Module) -> None:
    adapters: dict[str, Any] = getattr(model, "peft_config", None) or {}
    for adapter, config in adapters.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in ADAPTERS or getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"{type(model).__name__} has the adapter {adapter!r} of kind {kind}, which is not "
                "proven to leave each token's pass what it was; supported are "
                f"{', '.join(ADAPTERS)} without invocation tokens"
            )


def _refuse_placement(model: PreTrainedModel, name: str) -> None:
    config = getattr(model.config, "distributed_config", None)
    ways = {way: getattr(config, f"{way}_size", None) or 1 for way in ("pp", "fsdp")}
    if max(ways.values()) > 1:
        raise UnsupportedModelError(
            f"{name} is distributed with {ways}; only tensor parallelism runs every request in "
            "every process, load it with tp_plan='auto'"
        )
    is_empty = any(parameter.device.type == "meta" for parameter in model.parameters())
    if is_empty and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} has weights on the meta device and nothing that loads them; load it with "
            "from_pretrained, with device_map where it does not fit"
        )


def _refuse_dynamic_quantization(model: PreTrainedModel, name: str) -> None:
    kinds = {type(module) for module in model.modules()}
    dynamic = [each for each in kinds if each.__module__.startswith(_DYNAMICALLY_QUANTIZED)]
    if dynamic:
        raise UnsupportedModelError(
            f"{name} has layers of {sorted(each.__name__ for each in dynamic)} with PyTorch's "
            "dynamic quantisation, whose scale depends on all tokens of a pass; quantise weights "
            "only, for example with torchao"
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
