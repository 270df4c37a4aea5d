"""How close a sampled difference was to being decided by rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_fsd.config import SamplingConfig
from eagle_fsd.sampling import SeededNoise, law_log_probs
from eagle_fsd.target import TargetModel


def distance_to_a_tie(
    target: TargetModel, prompt: Tensor, ids: list[int], others: list[int], options: dict[str, Any]
) -> float:
    """The smaller of two distances at the first differing token, in log units.

    One is that of the race's second arrival from its first, the other that of any probability from
    the nearest cut of a warper.
    """
    place = next(i for i, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1])
    context = torch.cat([prompt, torch.tensor([ids[:place]], dtype=torch.int64)], dim=1)
    with torch.inference_mode():
        logits = target.model(context).logits[0, -1]
    config = SamplingConfig(
        options["temperature"],
        options.get("top_k", 0),
        options.get("top_p", 1.0),
        options.get("min_p", 0.0),
    )
    noise = SeededNoise(options["seed"], target.vocabulary_size).draw(place)
    arrivals = (noise.log() - law_log_probs(logits, config).double()).sort().values
    return min(float(arrivals[1] - arrivals[0]), _distance_to_a_cut(logits, config))


def _distance_to_a_cut(logits: Tensor, config: SamplingConfig) -> float:
    scores = (logits.double() / config.temperature).log_softmax(-1).sort(descending=True).values
    distances = []
    if 0 < config.top_k < scores.numel():
        distances.append(scores[config.top_k - 1] - scores[config.top_k])
    if config.top_p < 1.0:
        before = scores.exp().cumsum(-1) - scores.exp()
        distances.append((before - config.top_p).abs().min())
    if config.min_p > 0.0:
        floor = scores[0] + torch.tensor(config.min_p).double().log()
        distances.append((scores - floor).abs().min())
    return min((float(distance) for distance in distances), default=torch.inf)
