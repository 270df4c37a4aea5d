"""How good a head is: agreement with the target on held-out text, and acceptance length live."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from train.batches import BatchLoader
from train.losses import (
    ROWS_AT_ONCE,
    Batch,
    TargetLaw,
    is_drafted,
    ranks,
    soft_cross_entropy,
    unroll,
)
from train.shards import TokenShards

TOP = (1, 3, 10)
# Prompts longer than this are left out of the live check, whose time they would take.
LONGEST_PROMPT = 1024

Reduce = Callable[[Tensor], Tensor]


@torch.no_grad()
def measure_agreement(
    head: DraftHead,
    embed: Callable[[Tensor], Tensor],
    law: TargetLaw,
    batches: Sequence[np.ndarray],
    loader: BatchLoader,
    num_steps: int,
    reduce: Reduce,
) -> dict[str, Any]:
    """Loss and agreement on held-out pieces.

    Returns:
        loss: [K] nats by unrolled step. top_1, top_3, top_10: [K] share of rows where the target's
        best token of all is among the head's 1, 3, 10 best. rows: how many.
    """
    sums = torch.zeros(num_steps, 2 + len(TOP), dtype=torch.float64)
    for chosen in batches:
        batch = loader.load(chosen)
        sums += _agreement_sums(head, embed(batch.token_ids), law, batch, num_steps).cpu()
    sums = reduce(sums)
    count = sums[:, 0].clamp(min=1)
    shares = sums / count[:, None]
    figures: dict[str, Any] = {"loss": _rounded(shares[:, 1]), "rows": int(sums[0, 0])}
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
    for start in range(0, rows.numel(), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        best = law.best(targets[some])
        for step in range(num_steps):
            places[step, some] = ranks(law.logits(predicted[step, some]), best)
    columns = [torch.ones_like(losses), losses, *((places < top).float() for top in TOP)]
    return torch.stack([each.where(drafted, 0.0).double().sum(dim=1) for each in columns], dim=1)


@dataclass(frozen=True)
class LiveConfig:
    """The live check: how many prompts, new tokens of each, and the draft tree."""

    num_prompts: int
    num_tokens: int
    tree: TreeConfig


def live_prompts(shards: TokenShards, num_prompts: int) -> list[Tensor]:
    """The openings, up to the first answer, of the first held-out conversations: [1, P] each."""
    prompts: list[Tensor] = []
    for ids, mask in shards:
        if len(prompts) == num_prompts:
            break
        length = int(mask.int().argmax())
        if mask.any() and 1 <= length <= LONGEST_PROMPT:
            prompts.append(ids[None, :length])
    return prompts


def measure_live(
    head: DraftHead,
    target: TargetModel,
    tokenizer: Any,
    prompts: Sequence[Tensor],
    config: LiveConfig,
    reduce: Reduce,
) -> float | None:
    """Acceptance length of the decoder with this head, greedy and exact, over whole prompts.

    Returns:
        sum(new tokens - 1) / sum(cycles), or None without a cycle.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    if prompts:
        copied = copy.deepcopy(head).to(target.output_device, target.dtype).eval()
        decoder = SpeculativeDecoder(target, HeadDrafter(copied, target), tokenizer, config.tree)
        for prompt in prompts:
            stats = decoder.generate(prompt, max_new_tokens=config.num_tokens).stats
            counts += torch.tensor([stats.num_tokens - 1, stats.num_cycles])
    counts = reduce(counts)
    return round(float(counts[0] / counts[1]), 4) if counts[1] else None


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
