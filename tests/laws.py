"""Laws by enumeration and the chi-square test that decides whether samples follow them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.config import SamplingConfig

TOKENS = 5
PROMPT = torch.tensor([[1, 2]])


def tables(seed: int = 0, size: int = TOKENS, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """[V, V, V] target logits and [V, V] log q, neither close to the other."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(size, size, size, generator=generator)
    draft = torch.randn(size, size, generator=generator).log_softmax(-1)
    return logits, draft


def slow_law(logits: Tensor, config: SamplingConfig) -> list[float]:
    """The law of one row, warper by warper, in plain Python; at temperature 0 that of 1."""
    temperature = 1.0 if config.is_greedy else config.temperature
    scaled = [value / temperature for value in logits.tolist()]
    kept = set(range(len(scaled)))
    if config.top_k:
        floor = sorted(scaled, reverse=True)[min(config.top_k, len(scaled)) - 1]
        kept = {i for i in kept if scaled[i] >= floor}
    total = sum(math.exp(scaled[i]) for i in kept)
    probs = [math.exp(scaled[i]) / total if i in kept else 0.0 for i in range(len(scaled))]
    mass, nucleus = 0.0, set()
    for i in sorted(kept, key=lambda i: (-probs[i], i)):
        if mass < config.top_p:
            nucleus.add(i)
        mass += probs[i]
    total = sum(probs[i] for i in nucleus)
    probs = [probs[i] / total if i in nucleus else 0.0 for i in range(len(scaled))]
    final = {i for i in nucleus if probs[i] >= config.min_p * max(probs)}
    total = sum(probs[i] for i in final)
    return [probs[i] / total if i in final else 0.0 for i in range(len(scaled))]


def enumerate_law(
    logits: Tensor, config: SamplingConfig, num_tokens: int = 3
) -> dict[tuple[int, ...], float]:
    """P of each answer of `num_tokens` tokens after PROMPT, without stops."""
    law = {}
    for answer in product(range(logits.shape[-1]), repeat=num_tokens):
        text, probability = [*PROMPT[0].tolist(), *answer], 1.0
        for place, token in enumerate(answer):
            probability *= slow_law(logits[text[place], text[place + 1]], config)[token]
        law[answer] = probability
    return law


def chi_square_p(observed: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """P of a chi-square at least as large, cells expected under 5 pooled (Wilson-Hilferty)."""
    total = sum(observed.values())
    cells, rest = [], [0.0, 0.0]
    for answer, probability in law.items():
        pair = (observed.get(answer, 0), total * probability)
        if pair[1] >= 5:
            cells.append(pair)
        else:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
    if rest[1] > 0:
        cells.append((rest[0], rest[1]))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
