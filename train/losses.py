"""What a draft head is trained on: row pairing, the unrolled forward, and the loss.

Head row t takes (embedding of token t+1, feature t) at RoPE position t and predicts feature t+1,
whose law is that of token t+2. In step j of the unrolling (j = 1, 2, ...) the row's feature is the
head's own prediction of step j-1, as it is for a node of depth j in decoding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_fsd.draft_head import DraftHead
from eagle_fsd.draft_vocab import DraftLaw

# Rows whose logits exist at one time: on a CPU enough for a fast product and few enough for its
# caches, on an accelerator enough to fill it.
CPU_ROWS_AT_ONCE = 256
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class TrainingRows:
    """The head's rows of one conversation; row t also takes feature t and predicts feature t+1.

    Attributes:
        token_ids: [R] int64, token t+1.
        position_ids: [R] int64, t.
        is_supervised: [R] bool, whether token t+2 is one of an answer.
    """

    token_ids: Tensor
    position_ids: Tensor
    is_supervised: Tensor


def training_rows(ids: Tensor, mask: Tensor) -> TrainingRows:
    """Pairs the tokens of a conversation for the head: ids and mask shift together.

    Args:
        ids: [T] int64.
        mask: [T] bool, True on the tokens of answers.

    Returns:
        R = max(T - 2, 0) rows: the last two tokens are no row's, as nothing follows to compare.

    Raises:
        ValueError: if the two differ in length.

    Source: Li et al. 2024 (arXiv:2401.15077), section 4.1.
    """
    if ids.shape != mask.shape:
        raise ValueError(f"ids and mask need one length, got {ids.numel()} and {mask.numel()}")
    return TrainingRows(ids[1:-1], torch.arange(max(ids.numel() - 2, 0)), mask[2:])


class TargetLaw(DraftLaw):
    """What the target's features say: its logits and its best tokens, over a draft vocabulary."""

    @torch.no_grad()
    def best(self, features: Tensor) -> Tensor:
        """The target's most probable token of all, as an index into U; -1 where U lacks it.

        [R, H] -> [R] int64.
        """
        best = self._target.logits(features.to(self._target.dtype)).argmax(dim=-1)
        if self.token_ids is None:
            return best
        slots = torch.searchsorted(self.token_ids, best).clamp_(max=self.size - 1)
        return torch.where(self.token_ids[slots] == best, slots, -1)


def unroll(
    head: DraftHead,
    embeddings: Tensor,
    features: Tensor,
    position_ids: Tensor,
    lengths: list[int],
    num_steps: int,
) -> Tensor:
    """The head's predictions for packed rows, fed with its own predictions step by step.

    In step j, row t of a segment sees the true rows up to t - (j - 1) and, as its own drafted
    ancestors, row t - (j - i) of every step i = 2..j: what a node of depth j sees in decoding. The
    segments of a pack do not see each other.

    Args:
        head: the head; its parameters get the gradient.
        embeddings: [T, H] of tokens t+1.
        features: [T, H] true features t.
        position_ids: [T] int64, t.
        lengths: rows of each segment, summing to T.
        num_steps: K >= 1.

    Returns:
        [K, T, H] predicted features t+1. In step j the first j - 1 rows of a segment have no
        ancestors to be drafted from; what is returned there means nothing.

    Source: arXiv:2503.01840 (EAGLE-3), section 3.1, training-time test, with EAGLE-2's row layout.
    """
    layer: Any = head.layers[0]
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    predicted: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for _ in range(num_steps):
        if predicted:  # row t goes on from what row t-1 predicted for position t
            features = predicted[-1].roll(1, dims=0)
        hidden = head.fc(torch.cat([embeddings.to(features.dtype), features], dim=-1))
        cos, sin = head.rotary(hidden[None], position_ids[None])
        query, key, value = (
            projection(hidden).view(hidden.shape[0], -1, attention.head_dim).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        group = query.shape[0] // key.shape[0]
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        keys.append(key.repeat_interleave(group, dim=0))
        values.append(value.repeat_interleave(group, dim=0))
        attended = _attend(query, keys, values, lengths)
        hidden = hidden + attention.o_proj(attended.transpose(0, 1).flatten(1))
        predicted.append(hidden + mlp(norm(hidden.to(norm.weight.dtype))))
    return torch.stack(predicted)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor], lengths: list[int]) -> Tensor:
    """Attention of one step by segment: [heads, T, D] each -> [heads, T, D]."""
    pieces = []
    for segment in zip(
        query.split(lengths, dim=1),
        zip(*(key.split(lengths, dim=1) for key in keys), strict=True),
        zip(*(value.split(lengths, dim=1) for value in values), strict=True),
        strict=True,
    ):
        one_query, its_keys, its_values = segment
        if len(keys) == 1:
            rows = F.scaled_dot_product_attention(
                one_query[None], its_keys[0][None], its_values[0][None], is_causal=True
            )[0]
        else:
            rows = _attend_drafted(one_query, its_keys, its_values)
        pieces.append(rows)
    return torch.cat(pieces, dim=1)


def _attend_drafted(query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
    """Step j = len(keys) of one segment: [heads, L, D] each -> [heads, L, D].

    Shifted by j - 1 rows the view of the true rows is causal; to it comes one drafted row a step.
    """
    shift = len(keys) - 1
    num_rows = query.shape[1] - shift
    if num_rows <= 0:
        return torch.zeros_like(query)
    query = query[:, shift:] * query.shape[-1] ** -0.5
    scores = query @ keys[0][:, :num_rows].transpose(1, 2)  # [heads, n, n]
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    drafted = [
        (query * keys[i][:, i : i + num_rows]).sum(-1, keepdim=True) for i in range(1, shift + 1)
    ]
    weights = torch.cat([scores, *drafted], dim=-1).softmax(-1).to(query.dtype)
    rows = weights[..., :num_rows] @ values[0][:, :num_rows]
    for i in range(1, shift + 1):
        rows = rows + weights[..., num_rows + i - 1, None] * values[i][:, i : i + num_rows]
    return F.pad(rows, (0, 0, shift, 0))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [heads, T, D] with [1, T, D] angles, as in the decoder."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def is_drafted(lengths: list[int], num_steps: int, device: torch.device) -> Tensor:
    """Which rows of `unroll` mean something: [K, T] bool, False on the first j - 1 of a segment."""
    index = torch.cat([torch.arange(length, device=device) for length in lengths])
    return index >= torch.arange(num_steps, device=device)[:, None]


def row_blocks(features: Tensor) -> list[slice]:
    """[R, H] cut into blocks whose logits fit."""
    size = CPU_ROWS_AT_ONCE if features.device.type == "cpu" else ROWS_AT_ONCE
    return [slice(start, start + size) for start in range(0, features.shape[0], size)]


def soft_cross_entropy(predicted: Tensor, targets: Tensor, law: TargetLaw) -> Tensor:
    """Cross-entropy of the head's law on the target's, in nats.

    The logits of a few rows exist at a time; the target's are computed once for all steps.

    Args:
        predicted: [K, R, H], gets the gradient.
        targets: [R, H] true features, without gradient.
        law: turns both into logits; over a draft vocabulary the target's law is renormalised.

    Returns:
        [K, R] float32, >= the entropy of the target's law.
    """
    losses: Tensor = _SoftCrossEntropy.apply(predicted, targets, law)
    return losses


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient on the features is taken along with the value, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, targets: Tensor, law: TargetLaw) -> Tensor:
        losses = predicted.new_empty(predicted.shape[:2], dtype=torch.float32)
        slopes = torch.empty_like(predicted)
        for rows in row_blocks(targets):
            target_probs = law.logits(targets[rows]).float().softmax(dim=-1)
            for step in range(predicted.shape[0]):
                losses[step, rows], slopes[step, rows] = _value_and_slope(
                    predicted[step, rows], target_probs, law
                )
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grads[0][..., None].to(slopes.dtype), None, None


def _value_and_slope(
    features: Tensor, target_probs: Tensor, law: TargetLaw
) -> tuple[Tensor, Tensor]:
    """[R, H] and [R, U] -> losses [R] and their gradient on the features [R, H]."""
    with torch.enable_grad():
        features = features.detach().requires_grad_()
        logits = law.logits(features)
    scores = logits.detach().float()
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    losses = normaliser[:, 0] - torch.linalg.vecdot(target_probs, scores)
    slope = scores.sub_(normaliser).exp_().sub_(target_probs)  # draft law - target law
    (gradient,) = torch.autograd.grad(logits, features, slope.to(logits.dtype))
    return losses, gradient


def feature_distance(predicted: Tensor, targets: Tensor) -> Tensor:
    """SmoothL1 between features, averaged over H: [K, R, H] and [R, H] -> [K, R] float32.

    Source: arXiv:2401.15077, section 4.2.
    """
    distances = F.smooth_l1_loss(
        predicted.float(), targets.float().expand_as(predicted), reduction="none"
    )
    return distances.mean(dim=-1)


def add_feature_noise(features: Tensor, amplitude: float, seed: int) -> Tensor:
    """Uniform noise on the features of one segment, less of it the longer the segment is.

    Args:
        features: [L, H].
        amplitude: EAGLE's `std`; 0.2 there. The noise is within +-amplitude / 2 * 512 / L.
        seed: of this segment's noise alone, whatever batch or process it is in.

    Source: EAGLE's training code, AddUniformNoise.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(features.shape, generator=generator) - 0.5
    noise *= amplitude * 512 / features.shape[0]
    return features + noise.to(features.device, features.dtype)


def ranks(scores: Tensor, best: Tensor) -> Tensor:
    """How many tokens score above `best`: [R, U] and [R] -> [R] int64.

    -1, a token that is not in the vocabulary, has the largest rank there is, however small the
    vocabulary.
    """
    own = scores.gather(1, best.clamp(min=0)[:, None])
    above = (scores > own).sum(dim=-1)
    return torch.where(best >= 0, above, torch.iinfo(torch.int64).max)


@dataclass(frozen=True)
class Batch:
    """Packed rows of several conversations, or of pieces of them.

    Attributes:
        token_ids: [T] int64, token t+1.
        position_ids: [T] int64, t.
        is_supervised: [T] bool, whether token t+2 is one of an answer.
        features: [T, H] true features t.
        targets: [T, H] true features t+1.
        lengths: rows of each segment, summing to T.
    """

    token_ids: Tensor
    position_ids: Tensor
    is_supervised: Tensor
    features: Tensor
    targets: Tensor
    lengths: list[int]


@dataclass(frozen=True)
class LossConfig:
    """What is minimised.

    Attributes:
        num_steps: K >= 1, unrolled steps.
        decay: > 0; step j weighs decay^(j-1), the weights scaled to sum 1.
        smooth_l1: >= 0, weight of SmoothL1 between the features.
    """

    num_steps: int = 1
    decay: float = 0.8
    smooth_l1: float = 0.0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"unroll must be >= 1 step, got {self.num_steps}")
        if not 0.0 < self.decay < float("inf"):
            raise ValueError(f"unroll_decay must be > 0, got {self.decay}; 1 weighs steps alike")
        if not 0.0 <= self.smooth_l1 < float("inf"):
            raise ValueError(f"smooth_l1 must be >= 0, got {self.smooth_l1}; 0 turns it off")

    def weights(self) -> list[float]:
        """Of steps 1..K."""
        raw = [self.decay**step for step in range(self.num_steps)]
        return [weight / sum(raw) for weight in raw]


@dataclass(frozen=True)
class BatchLoss:
    """Sums over the supervised rows of a batch.

    Attributes:
        total: what to minimise, a scalar with gradient; 0 without supervised rows.
        step_sums: [K] cross-entropy of each step, in nats.
        step_counts: [K] rows of each step.
        segment_sums: [S] what each segment adds to `total`.
    """

    total: Tensor
    step_sums: Tensor
    step_counts: Tensor
    segment_sums: Tensor


def batch_loss(
    head: DraftHead, embeddings: Tensor, batch: Batch, law: TargetLaw, config: LossConfig
) -> BatchLoss:
    """The loss of one batch; only supervised rows are turned into logits.

    Args:
        head: gets the gradient.
        embeddings: [T, H] of `batch.token_ids`.
        batch: the rows.
        law: the target's.
        config: what is minimised.
    """
    device = batch.features.device
    predicted = unroll(
        head, embeddings, batch.features, batch.position_ids, batch.lengths, config.num_steps
    )
    rows = batch.is_supervised.nonzero()[:, 0]
    drafted = is_drafted(batch.lengths, config.num_steps, device)[:, rows]
    predicted, targets = predicted[:, rows], batch.targets[rows]
    entropies = soft_cross_entropy(predicted, targets, law).where(drafted, 0.0)
    losses = entropies
    if config.smooth_l1 > 0.0:
        distances = feature_distance(predicted, targets)
        losses = losses + config.smooth_l1 * distances.where(drafted, 0.0)
    weights = torch.tensor(config.weights(), device=device)
    row_losses = (weights[:, None] * losses).sum(dim=0)  # no product: autocast would round it
    segments = torch.arange(len(batch.lengths), device=device)
    owners = segments.repeat_interleave(torch.tensor(batch.lengths, device=device))[rows]
    segment_sums = torch.zeros(len(batch.lengths), device=device)
    return BatchLoss(
        total=row_losses.sum(),
        step_sums=entropies.detach().sum(dim=1),
        step_counts=drafted.sum(dim=1).float(),
        segment_sums=segment_sums.index_add(0, owners, row_losses.detach()),
    )
