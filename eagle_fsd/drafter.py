"""Drafters: who proposes the tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_fsd.cache import PreallocatedLayer
from eagle_fsd.config import TreeConfig
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.draft_vocab import DraftLaw
from eagle_fsd.packed import PackedLayers
from eagle_fsd.target import TargetModel
from tree import DraftTree, Frontier, Growth


@dataclass(frozen=True)
class Draft:
    """A proposed tree and the laws that it was drafted from.

    Attributes:
        tree: N nodes.
        log_probs: [I, V] float32 log q at temperature 1 of the nodes that were expanded, [I, U]
            over a draft vocabulary, or None when the drafter has no law (retrieved text, stubs).
        law_rows: [N] int64 row of `log_probs` for each node's children, -1 where there is none.
        vocabulary: [U] int64 ids of the columns of `log_probs`, None for all V.
    """

    tree: DraftTree
    log_probs: Tensor | None
    law_rows: Tensor
    vocabulary: Tensor | None = None

    def law(self, row: int, vocabulary_size: int) -> Tensor | None:
        """[V] log q at a node, or None: -inf outside the draft vocabulary."""
        law_row = int(self.law_rows[row])
        if self.log_probs is None or law_row < 0:
            return None
        law = self.log_probs[law_row]
        if self.vocabulary is None:
            return law
        return law.new_full((vocabulary_size,), -torch.inf).index_copy_(0, self.vocabulary, law)


class Drafter(Protocol):
    """Proposes a tree below the last committed token.

    One request is `start`, then `commit` of the prompt, then `propose` and `commit` in turn. A
    drafter keeps nothing from one request to the next.
    """

    @property
    def has_draft_probs(self) -> bool:
        """Whether its drafts carry the laws that they were drawn from."""
        ...

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether its law is zero on some tokens by construction."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that it drafts for; None for any."""
        ...

    def start(self, capacity: int) -> None:
        """Forgets the last request and makes room for sequences of `capacity` tokens."""
        ...

    def commit(self, token_ids: Tensor, features: Tensor) -> None:
        """Takes in committed tokens [M] int64 and the target's true features there [M, H]."""
        ...

    def propose(self, root_token_id: int, config: TreeConfig) -> Draft:
        """Drafts below `root_token_id`, the token that comes right after all committed ones."""
        ...


class HeadDrafter:
    """Grows EAGLE-2's tree with a draft head.

    Row t of the head's cache takes (embedding of token t+1, feature t) at RoPE position t. Rows of
    committed tokens always come from true features; rows of drafted nodes are dropped when the tree
    is done.

    Args:
        head: on the target's output device, in any dtype.
        target: gives embeddings and turns predicted features into logits.
        vocabulary: [U] int64 ascending, the tokens to draft over; None for all.

    Source: arXiv:2406.16858, section 4; the true-feature rewrite is arXiv:2401.15077, section 4.1.
    """

    has_draft_probs = True

    def __init__(
        self, head: DraftHead, target: TargetModel, vocabulary: Tensor | None = None
    ) -> None:
        self.head = head
        self.law = DraftLaw(target, vocabulary)
        self.has_reduced_vocabulary = vocabulary is not None
        self.max_positions: int | None = head.config.max_position_embeddings
        self._packed = PackedLayers(head) if target.packs_weights else None
        self._compiled = torch.compile(head, dynamic=True) if target.is_compiled else None
        self._target = target
        self._cache = PreallocatedLayer(capacity=0)
        self._pending: list[tuple[Tensor, Tensor]] = []

    @property
    def num_rows(self) -> int:
        """Rows in the head's cache."""
        return self._cache.num_rows

    @torch.inference_mode()
    def start(self, capacity: int) -> None:
        self._cache.reserve(capacity)
        self._pending = []
        if self._packed is not None:
            self._packed.refresh()

    def commit(self, token_ids: Tensor, features: Tensor) -> None:
        self._pending.append((token_ids, features))

    @torch.inference_mode()
    def propose(self, root_token_id: int, config: TreeConfig) -> Draft:
        features = self._extend(root_token_id)[-1:]  # [1, H], what the children are drafted from
        num_committed = self._cache.num_rows

        def step(level: int, frontier: Frontier, lineage: Tensor) -> Tensor:
            nonlocal features
            prefix = lineage.new_ones((lineage.shape[0], num_committed))
            features = self._predict(
                frontier.token_ids,
                features[frontier.parent_slots],
                torch.full_like(frontier.token_ids, num_committed + level - 1),
                torch.cat([prefix, lineage], dim=1),
            )
            return self._law(features)

        draft = _grow(root_token_id, config, self._law(features), step, self.law.token_ids)
        self._cache.truncate(num_committed)
        return draft

    def _extend(self, root_token_id: int) -> Tensor:
        """Writes the rows of all pending tokens from true features: [M, H] predictions."""
        token_ids = torch.cat([ids for ids, _ in self._pending])
        features = torch.cat([rows for _, rows in self._pending])
        self._pending = []
        following = torch.cat([token_ids[1:], token_ids.new_tensor([root_token_id])])
        start, length = self._cache.num_rows, following.numel()
        mask = None
        if start > 0:
            mask = torch.ones(
                (length, start + length), dtype=torch.bool, device=features.device
            ).tril(start)
        positions = torch.arange(start, start + length, device=features.device)
        return self._predict(following, features, positions, mask)

    def _predict(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """[T] tokens t+1 and [T, H] features t -> [T, H] predicted features t+1."""
        dtype = self.head.fc.weight.dtype
        embed = self.head.embed_tokens if self.head.config.own_embeddings else self._target.embed
        embeddings = embed(token_ids.to(features.device)).to(dtype)
        head = self.head if self._compiled is None else self._compiled
        with nullcontext() if self._packed is None else self._packed.computing():
            predicted: Tensor = head(
                embeddings[None], features.to(dtype)[None], positions[None], mask, self._cache
            )
        return predicted[0]

    def _law(self, features: Tensor) -> Tensor:
        """[K, H] -> [K, U] float32 log q."""
        return self.law.logits(features).float().log_softmax(dim=-1)


class ModelDrafter:
    """Grows a chain or a tree with a small language model of the same vocabulary.

    A tree of top_k 1 is the chain of two-model speculative decoding.

    Args:
        model: the small model, on any device.
        vocabulary_size: V of the target; the small model may have other padding rows.

    Source: Holsman et al. 2025 (arXiv:2502.20704), whose setting is a chain of five tokens.
    """

    has_draft_probs = True

    def __init__(self, model: TargetModel, vocabulary_size: int) -> None:
        self.max_positions: int | None = model.max_positions
        self.has_reduced_vocabulary = model.vocabulary_size < vocabulary_size
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._unread = torch.empty(0, dtype=torch.int64)
        self._is_root_read = False

    @property
    def model(self) -> TargetModel:
        """The small model."""
        return self._model

    def start(self, capacity: int) -> None:
        self._model.start(capacity)
        self._unread = self._unread[:0]
        self._is_root_read = False

    def commit(self, token_ids: Tensor, features: Tensor) -> None:  # noqa: ARG002
        # The root is the first of the tokens that are committed after it was drafted from.
        self._unread = torch.cat([self._unread, token_ids.cpu()[int(self._is_root_read) :]])
        self._is_root_read = False

    @torch.inference_mode()
    def propose(self, root_token_id: int, config: TreeConfig) -> Draft:
        read = torch.cat([self._unread, torch.tensor([root_token_id])])
        self._unread, self._is_root_read = self._unread[:0], True
        law = self._law(self._model.prefill(self._known(read)).logits)
        num_committed = self._model.num_rows
        depths = read[:0]  # of the rows drafted so far

        def step(level: int, frontier: Frontier, lineage: Tensor) -> Tensor:
            nonlocal depths
            known = self._known(frontier.token_ids)
            depths = torch.cat([depths, torch.full_like(known, level - 1).to(depths.device)])
            return self._law(self._model.extend(known, lineage, depths).logits)

        draft = _grow(root_token_id, config, law, step)
        self._model.truncate(num_committed)
        return draft

    def _known(self, token_ids: Tensor) -> Tensor:
        """Ids that the small model can read: its last row stands for padding rows it lacks."""
        return token_ids.clamp(max=self._model.vocabulary_size - 1)

    def _law(self, logits: Tensor) -> Tensor:
        """[K, rows of the small model] -> [K, V] float32 log q, 0 mass on rows that it lacks."""
        log_probs = logits[:, : self._vocabulary_size].float().log_softmax(dim=-1)
        missing = self._vocabulary_size - log_probs.shape[-1]
        return torch.nn.functional.pad(log_probs, (0, missing), value=-torch.inf)


def _grow(
    root_token_id: int,
    config: TreeConfig,
    law: Tensor,
    step: Callable[[int, Frontier, Tensor], Tensor],
    vocabulary: Tensor | None = None,
) -> Draft:
    """Grows EAGLE-2's tree level by level.

    Args:
        root_token_id: the root.
        config: the tree's size.
        law: [1, U] float32 log q of the root's children.
        step: drafts below a frontier: level (1, 2, ...), the K nodes, and which rows drafted so far
            are each node itself or its ancestor [K, rows] bool -> [K, U] float32 log q.
        vocabulary: [U] int64, or None for all tokens.
    """
    growth = Growth(root_token_id, config.top_k, law.device)
    laws = [law]
    frontier = growth.add_level(*_children(law, config.top_k, vocabulary))
    lineage: Tensor | None = None
    for level in range(1, config.depth):
        own = torch.eye(frontier.token_ids.numel(), dtype=torch.bool, device=law.device)
        before = () if lineage is None else (lineage[frontier.parent_slots],)
        lineage = torch.cat([*before, own], dim=1)
        laws.append(step(level, frontier, lineage))
        frontier = growth.add_level(*_children(laws[-1], config.top_k, vocabulary))
    tree, law_rows = growth.finish(config.num_draft_tokens)
    return Draft(tree, torch.cat(laws), law_rows, vocabulary)


def _children(log_probs: Tensor, top_k: int, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """[M, U] -> ids and log-probabilities [M, K] of each row's best tokens, best first."""
    best = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
    return best.indices if vocabulary is None else vocabulary[best.indices], best.values
