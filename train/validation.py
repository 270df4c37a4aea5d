"""How good a head is: agreement with the target on held-out text, and acceptance length live."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from train.losses import (
    Batch,
    TargetLaw,
    is_drafted,
    ranks,
    row_blocks,
    soft_cross_entropy,
    unroll,
)
from train.shards import TokenShards

TOP = (1, 3, 10)
# Prompts longer than this are left out of the live check, whose time they would take.
LONGEST_PROMPT = 1024


@torch.no_grad()
def agreement_sums(
    head: DraftHead, batches: Iterable[tuple[Batch, Tensor]], law: TargetLaw, num_steps: int
) -> Tensor:
    """Loss and agreement on held-out rows, as sums that add up over processes.

    Args:
        head: the head.
        batches: rows and the embeddings [T, H] of their tokens.
        law: the target's.
        num_steps: K.

    Returns:
        [K, 5] float64 by unrolled step: rows, nats of loss, and rows where the target's best token
        of all is among the head's 1, 3 and 10 best.
    """
    sums = torch.zeros(num_steps, 2 + len(TOP), dtype=torch.float64)
    for batch, embeddings in batches:
        sums += _agreement_sums(head, embeddings, law, batch, num_steps)
    return sums


def agreement_figures(sums: Tensor) -> dict[str, Any]:
    """Means of `agreement_sums` by unrolled step, and the rows of step 1."""
    shares = sums / sums[:, :1].clamp(min=1)
    figures: dict[str, Any] = {"rows": int(sums[0, 0]), "loss": _rounded(shares[:, 1])}
    for column, top in enumerate(TOP, start=2):
        figures[f"top_{top}"] = _rounded(shares[:, column])
    return figures


def _agreement_sums(
    head: DraftHead, embeddings: Tensor, law: TargetLaw, batch: Batch, num_steps: int
) -> Tensor:
    """[K, 5]: rows, loss, hits in the best 1, 3 and 10."""
    predicted = unroll(
        head, embeddings, batch.features, batch.position_ids, batch.lengths, num_steps
    )
    rows = batch.is_supervised.nonzero()[:, 0]
    drafted = is_drafted(batch.lengths, num_steps, rows.device)[:, rows]
    predicted, targets = predicted[:, rows], batch.targets[rows]
    losses = soft_cross_entropy(predicted, targets, law)
    places = torch.empty(losses.shape, dtype=torch.int64, device=losses.device)
    for some in row_blocks(targets):
        best = law.best(targets[some])
        for step in range(num_steps):
            places[step, some] = ranks(law.logits(predicted[step, some]), best)
    columns = [torch.ones_like(losses), losses, *((places < top).float() for top in TOP)]
    return torch.stack(
        [each.where(drafted, 0.0).cpu().double().sum(dim=1) for each in columns], dim=1
    )


@dataclass(frozen=True)
class LiveConfig:
    """The live check: how many prompts, new tokens of each, and the draft tree."""

    num_prompts: int
    num_tokens: int
    tree: TreeConfig


def live_prompts(shards: TokenShards, num_prompts: int, longest: int) -> list[Tensor]:
    """The openings, up to the first answer, of the first held-out conversations: [1, P] each.

    Args:
        shards: the held-out split.
        num_prompts: how many at most.
        longest: P that the target's context leaves room for.
    """
    longest = min(longest, LONGEST_PROMPT)
    prompts: list[Tensor] = []
    for ids, mask in shards:
        if len(prompts) == num_prompts:
            break
        length = int(mask.int().argmax())
        if mask.any() and 1 <= length <= longest:
            prompts.append(ids[None, :length])
    return prompts


def live_counts(
    head: DraftHead,
    target: TargetModel,
    tokenizer: Any,
    prompts: Sequence[Tensor],
    config: LiveConfig,
) -> Tensor:
    """What the decoder does with this head, greedy and exact, in the target's dtype.

    Returns:
        [2] float64: sum(new tokens - 1) and sum(cycles), whose ratio is the acceptance length.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    if not prompts:
        return counts
    copied = copy.deepcopy(head).to(target.output_device, target.dtype).eval()
    decoder = SpeculativeDecoder(target, HeadDrafter(copied, target), tokenizer, config.tree)
    for prompt in prompts:
        stats = decoder.generate(prompt, max_new_tokens=config.num_tokens).stats
        counts += torch.tensor([stats.num_tokens - 1, stats.num_cycles])
    return counts


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
