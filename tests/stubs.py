"""Tiny targets, stub drafters and a table target: what the tests decode with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from eagle_fsd.attention import PACKED
from eagle_fsd.config import TreeConfig
from eagle_fsd.draft_head import DraftHead, DraftHeadConfig
from eagle_fsd.drafter import Draft, HeadDrafter
from eagle_fsd.target import TargetModel, TargetOutput
from eagle_fsd.turnstile import Turnstile
from tree import DraftTree

VOCABULARY = 128
WINDOW = 16

# Weights this large make attention sharp, so that a wrong mask or position changes the argmax.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_MIXED = ["sliding_attention", "full_attention"]
FAMILY_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, sliding_window=WINDOW, num_local_experts=4
    ),
    "phi3": lambda: transformers.Phi3Config(**_SHAPE, sliding_window=WINDOW),
    "olmo2": lambda: transformers.Olmo2Config(**_SHAPE),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **_SHAPE, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SHAPE,
        **_EXPERTS,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE, **_EXPERTS, use_sliding_window=True, sliding_window=WINDOW
    ),
    "granite": lambda: transformers.GraniteConfig(
        **_SHAPE,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=4.0,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **_SHAPE,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        no_rope_layers=[1, 0],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SHAPE, sliding_window=WINDOW, layer_types=_MIXED, num_local_experts=4
    ),
}
_EAGER_ONLY = ("gemma2", "gpt_oss")  # soft caps and sinks, which sdpa has not
ATTENTION = dict.fromkeys(FAMILY_CONFIGS, ("eager", PACKED, "sdpa"))
ATTENTION |= dict.fromkeys(_EAGER_ONLY, ("eager",))


def tiny_model(
    family: str = "llama", attention: str | None = None, seed: int = 0, **changes: Any
) -> Any:
    """A two-layer random causal LM in fp32, the same for the same seed."""
    config = FAMILY_CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention or ATTENTION[family][-1]
        )
    return model.eval()


def tiny_head(model: Any, seed: int = 1, **changes: Any) -> DraftHead:
    """A random draft head that fits `model`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(DraftHeadConfig.for_target(model.config, **changes))
        for parameter in head.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return head.eval().requires_grad_(False)


def random_prompt(rng: random.Random, low: int = 1, high: int = 60) -> Tensor:
    """[1, P] random ids, P in low..high."""
    return torch.tensor([[rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]])


def greedy_reference(model: Any, prompt: Tensor, max_new_tokens: int) -> list[int]:
    """What transformers' own greedy generation gives."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


class RecordingTarget(TargetModel):
    """Notes the paths that were committed."""

    def __init__(
        self, model: Any, prefill_chunk: int = 1024, *, packs_weights: bool = False
    ) -> None:
        super().__init__(model, prefill_chunk, packs_weights=packs_weights)
        self.paths: list[list[int]] = []

    @property
    def num_scattered(self) -> int:
        """Committed paths with a gap between their rows."""
        return sum(path != list(range(len(path))) for path in self.paths)

    def commit(self, path: list[int]) -> None:
        self.paths.append(path)
        super().commit(path)


class PathDrafter:
    """Drafts along a known continuation, or never along it.

    Args:
        continuation: the tokens that follow the prompt.
        is_right: whether the tree holds the continuation (oracle) or avoids it (wrong).
        seed: of the other candidates and of where the right one stands among its siblings.
        num_prompt: tokens of the prompt, to know how far the text is.
    """

    has_draft_probs = False
    has_reduced_vocabulary = False
    max_positions: int | None = None

    def __init__(
        self, continuation: list[int], num_prompt: int, *, is_right: bool, seed: int = 0
    ) -> None:
        self._continuation = continuation
        self._num_prompt = num_prompt
        self._is_right = is_right
        self._rng = random.Random(seed)
        self._num_committed = 0

    def start(self, capacity: int) -> None:
        self._num_committed = 0

    def commit(self, token_ids: Tensor, features: Tensor) -> None:
        assert token_ids.shape[0] == features.shape[0]
        self._num_committed += token_ids.numel()

    def propose(self, root_token_id: int, config: TreeConfig) -> Draft:
        ahead = self._continuation[self._num_committed - self._num_prompt + 1 :]
        nodes: list[tuple[int, int, int, bool]] = [(root_token_id, -1, 0, True)]
        level = [0]
        for depth in range(1, config.depth + 1):
            right = ahead[depth - 1] if depth <= len(ahead) else None
            following: list[int] = []
            for parent in level:
                for token in self._children(right, nodes[parent][3], config.top_k):
                    if len(nodes) <= config.num_draft_tokens:
                        on_path = nodes[parent][3] and token == right
                        following.append(len(nodes))
                        nodes.append((token, parent, depth, on_path))
            # The right node is expanded for sure, wherever it stands among its siblings.
            following.sort(key=lambda row: (not nodes[row][3], row))
            level = sorted(following[: config.top_k])
        tree = DraftTree(
            token_ids=torch.tensor([node[0] for node in nodes]),
            parents=torch.tensor([node[1] for node in nodes]),
            depths=torch.tensor([node[2] for node in nodes]),
            scores=torch.zeros(len(nodes)),
        )
        return Draft(tree, None, torch.full_like(tree.parents, -1))

    def _children(self, right: int | None, on_path: bool, top_k: int) -> list[int]:
        others = [token for token in range(VOCABULARY) if token != right]
        tokens = self._rng.sample(others, top_k)
        if self._is_right and on_path and right is not None:
            tokens[self._rng.randrange(top_k)] = right
        return tokens


def head_drafter(target: TargetModel, seed: int = 1, **changes: Any) -> HeadDrafter:
    """A drafter with a random head."""
    return HeadDrafter(tiny_head(target.model, seed, **changes), target)


class TableTarget:
    """A target whose logits are a table of the last two tokens: every law can be enumerated.

    Args:
        logits: [V, V, V], logits[a, b] follows tokens a, b.
    """

    output_device = torch.device("cpu")
    max_positions = 1_000_000

    def __init__(self, logits: Tensor, stop_ids: frozenset[int] = frozenset()) -> None:
        self.turnstile = Turnstile()
        self.table = logits
        self.stop_ids = stop_ids
        self.tokens: list[int] = []
        self._tree: DraftTree | None = None

    @property
    def vocabulary_size(self) -> int:
        return self.table.shape[0]

    def start(self, capacity: int) -> None:
        self.tokens = []

    def prefill(self, input_ids: Tensor) -> TargetOutput:
        self.tokens += input_ids.tolist()
        logits = self.table[self.tokens[-2], self.tokens[-1]]
        return TargetOutput(logits[None], torch.zeros(input_ids.numel(), 1))

    def score(self, tree: DraftTree) -> TargetOutput:
        self._tree = tree
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        before = [self.tokens[-1] if parent < 0 else tokens[parent] for parent in parents]
        logits = torch.stack([self.table[a, b] for a, b in zip(before, tokens, strict=True)])
        return TargetOutput(logits, torch.zeros(len(tokens), 1))

    def commit(self, path: list[int]) -> None:
        assert self._tree is not None
        self.tokens += self._tree.token_ids[torch.tensor(path)].tolist()


class TableDrafter:
    """Grows trees of varying shape from a draft law that is a table of the last token.

    Args:
        log_probs: [V, V] log q of the next token.
    """

    has_draft_probs = True
    has_reduced_vocabulary = False
    max_positions: int | None = None

    def __init__(self, log_probs: Tensor) -> None:
        self._log_probs = log_probs

    def start(self, capacity: int) -> None:
        pass

    def commit(self, token_ids: Tensor, features: Tensor) -> None:
        pass

    def propose(self, root_token_id: int, config: TreeConfig) -> Draft:
        from tree import Growth

        growth = Growth(root_token_id, config.top_k)
        laws = [self._log_probs[root_token_id][None]]
        for level in range(config.depth):
            best = laws[-1].topk(min(config.top_k, laws[-1].shape[-1]), dim=-1)
            frontier = growth.add_level(best.indices, best.values)
            if level + 1 < config.depth:
                laws.append(self._log_probs[frontier.token_ids])
        tree, law_rows = growth.finish(config.num_draft_tokens)
        return Draft(tree, torch.cat(laws), law_rows)
