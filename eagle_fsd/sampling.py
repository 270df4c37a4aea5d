"""From logits to laws, and draws from laws by passed noise."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.config import SamplingConfig
from eagle_fsd.device import supports_float64


def law_log_probs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """The log-law that tokens are drawn from, after temperature, top-k, top-p and min-p.

    At temperature 0 this is the temperature-1 law after the same cuts: what relaxed rules weigh
    tokens by while the draw itself is the argmax.

    Args:
        logits: [..., V] any float dtype; -inf is allowed, rows with NaN, +inf or nothing finite
            give NaN.
        config: the warpers.

    Returns:
        [..., V] float32, -inf where the law is 0.
    """
    scores = logits.float()
    if not config.is_greedy:
        scores = scores / config.temperature
    vocabulary = scores.shape[-1]
    if 0 < config.top_k < vocabulary:
        kth = scores.topk(config.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if config.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1)
        # A token stays while the mass before it is short of top_p: the best one always does.
        dropped = (mass.cumsum(dim=-1) - mass) >= config.top_p
        dropped[..., 0] = False  # a top_p that float32 rounds to 0
        scores = scores.masked_fill(
            torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf
        )
    log_probs = scores.log_softmax(dim=-1)
    if config.min_p > 0.0:
        floor = log_probs.amax(dim=-1, keepdim=True) + float(np.log(config.min_p))
        log_probs = log_probs.masked_fill(log_probs < floor, -torch.inf).log_softmax(dim=-1)
    return log_probs


def finite_rows(logits: Tensor) -> Tensor:
    """[..., V] -> [...] bool: False for rows with NaN or +inf, or with nothing but -inf."""
    return torch.isfinite(logits.amax(dim=-1))


class Noise(Protocol):
    """Where draws get their randomness: fixed vectors, one for each emitted token and stream."""

    def draw(self, index: int) -> Tensor:
        """[V] float64 exponentials for the exact draw of emitted token number `index`."""
        ...

    def rescue(self, index: int) -> tuple[float, Tensor]:
        """A uniform in [0, 1) and [V] float64 exponentials, of a stream independent of `draw`'s."""
        ...


class SeededNoise:
    """Noise that depends on the seed and the token's number alone, the same on every device.

    Philox is counter-based: each (stream, index) owns its own block of the counter, so that no
    value is used twice.
    """

    def __init__(self, seed: int, vocabulary_size: int, device: torch.device | str = "cpu") -> None:
        digest = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
        self._key = np.frombuffer(digest, dtype=np.uint64)
        self._size = vocabulary_size
        self._device = (
            torch.device(device) if supports_float64(torch.device(device)) else torch.device("cpu")
        )

    def draw(self, index: int) -> Tensor:
        return self._exponentials(self._generator(index, stream=0))

    def rescue(self, index: int) -> tuple[float, Tensor]:
        generator = self._generator(index, stream=1)
        coin = float(generator.random())
        return coin, self._exponentials(generator)

    def _generator(self, index: int, stream: int) -> np.random.Generator:
        counter = np.array([0, 0, stream, index], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=self._key, counter=counter))

    def _exponentials(self, generator: np.random.Generator) -> Tensor:
        return torch.from_numpy(generator.standard_exponential(self._size)).to(self._device)


def race(log_probs: Tensor, exponentials: Tensor) -> Tensor:
    """The winner of an exponential race: argmin of e_x / p(x), which has law p.

    Args:
        log_probs: [V] log p, -inf where p is 0.
        exponentials: [V] float64, independent Exp(1).

    Returns:
        [] int64, never a token with p = 0 (p must have some mass).
    """
    log_probs = log_probs.to(exponentials.device, torch.float64)
    # An exponential of exactly 0 would turn a forbidden token's inf into NaN.
    times = (exponentials.log() - log_probs).masked_fill(log_probs == -torch.inf, torch.inf)
    return times.argmin()
