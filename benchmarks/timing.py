"""What the benchmarks share: medians of calls that take turns, and trees of any size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.device import synchronize
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from tree import DraftTree

ROUNDS = 7
Key = TypeVar("Key", bound=Hashable)


def models_of(decoder: SpeculativeDecoder) -> tuple[TargetModel, HeadDrafter]:
    """The decoder's target and head.

    Raises:
        ValueError: when something else drafts.
    """
    target, drafter = decoder.target, decoder.drafter
    if not isinstance(target, TargetModel) or not isinstance(drafter, HeadDrafter):
        raise ValueError("trees are chosen for a draft head; give --draft-head")
    return target, drafter


def shared_positions(target: TargetModel, drafter: HeadDrafter) -> int:
    """Tokens up to which both the target and the head can work."""
    limits = (target.max_positions, drafter.max_positions)
    return min(limit for limit in limits if limit is not None)


def output_file(path: str | None) -> Path | None:
    """Where the figures go, checked before they are measured.

    Raises:
        ValueError: for a folder, or a file in a folder that is not there.
    """
    if path is None:
        return None
    file = Path(path)
    if not path or file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"--output takes a file in a folder that is there, got {path!r}")
    return file


def read_contexts(text: str) -> list[int]:
    """Context lengths of --contexts, in their order.

    Raises:
        ValueError: unless it is whole numbers >= 1, separated by commas.
    """
    parts = text.split(",")
    contexts = [int(part) for part in parts if part.strip().isdecimal()]
    if not contexts or min(contexts) < 1 or len(contexts) != len(parts):
        raise ValueError(f"--contexts takes whole numbers >= 1 by commas, got {text!r}")
    return contexts


def median_seconds(
    calls: Mapping[Key, Callable[[], object]], target: TargetModel, rounds: int = ROUNDS
) -> dict[Key, float]:
    """Median seconds of each call over rounds in which all take turns; one round warms up."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for key, call in calls.items():
                synchronize(target.output_device)
                start = time.perf_counter()
                call()
                synchronize(target.output_device)
                seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(times[1:]) for key, times in seconds.items()}


def comb(size: int) -> DraftTree:
    """A tree of `size` nodes, the root included: a chain with a leaf at each of its nodes."""
    parents = [-1] + [max(0, row - 2) for row in range(1, size)]
    depths = [0] * size
    for row in range(1, size):
        depths[row] = depths[parents[row]] + 1
    return DraftTree(
        torch.arange(size), torch.tensor(parents), torch.tensor(depths), torch.zeros(size)
    )
