"""What "auto" comes to on a machine: the tree; on a CPU the dtype and the layout of weights.

`python -m benchmarks.tree` measures trees and stores the best one; a decoder with `tree="auto"`
looks that up and never measures a tree itself, so that no clock is read inside a request. Whether a
CPU is faster in bfloat16, and with packed weights, is measured in a moment, once, while a target is
loaded.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import nn
from torch.nn import functional as F

from eagle_fsd.config import TreeConfig
from eagle_fsd.default_target import cache_dir
from eagle_fsd.device import available_bytes, device_name
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.files import write_json
from eagle_fsd.packed import copied_bytes, packable_layers, packed_product
from eagle_fsd.target import TargetModel
from tree import DraftTree

TREES_FILE = "trees.json"
CPU_FILE = "cpu.json"
# No measured tree comes near; one with more nodes, levels or children would exhaust the memory.
_MOST_STORED = 4096
# An update takes milliseconds.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class TreeChoice:
    """What was measured to be fastest for exact decoding.

    Attributes:
        tree: the fastest tree.
        ratio: its tokens per second over plain decoding's, live, finite and >= 0; below 1 plain
            decoding is faster.
    """

    tree: TreeConfig
    ratio: float

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float):
            raise TypeError(f"ratio must be a number, got {self.ratio!r}")
        if not (math.isfinite(self.ratio) and self.ratio >= 0.0):
            raise ValueError(f"ratio must be finite and >= 0, got {self.ratio}; measure it anew")


def setting_of(target: TargetModel, drafter: HeadDrafter) -> str:
    """What a choice holds for: machine, target, dtype and head, in one line.

    Kinds of models rather than their weights: two fine-tunes of one shape cost the same.
    """
    config, head = target.config, drafter.head.config
    shape = f"{config.model_type} {config.num_hidden_layers}x{config.hidden_size}"
    facts = (
        device_name(target.device),
        f"{torch.get_num_threads()} threads" if target.device.type == "cpu" else "",
        f"{shape} V{target.vocabulary_size}",
        str(target.dtype).removeprefix("torch."),
        str(config._attn_implementation),
        "packed" if target.has_packed_weights else "",
        "compiled" if target.is_compiled else "",
        f"head {head.intermediate_size} U{drafter.law.size}",
    )
    return ", ".join(fact for fact in facts if fact)


def load_choice(setting: str) -> TreeChoice | None:
    """What was stored for a setting; None where nothing (or nothing readable) was."""
    choice: Any = _read(TREES_FILE).get(setting)
    try:
        num_draft_tokens, depth, top_k = choice["tree"]
        tree = TreeConfig(num_draft_tokens, depth, top_k)
        if max(astuple(tree)) > _MOST_STORED:
            return None
        return TreeChoice(tree, choice["ratio"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def store_choice(setting: str, choice: TreeChoice) -> Path:
    """Adds or replaces a setting's choice, the whole file or nothing of it.

    Raises:
        OSError, RuntimeError: the user's cache cannot be written, or found.
    """
    return _update(TREES_FILE, setting, {"tree": astuple(choice.tree), "ratio": choice.ratio})


def prefers_bfloat16() -> bool:
    """Whether this CPU multiplies faster in bfloat16 than in float32; measured once and kept.

    Processors without instructions for it emulate bfloat16, several times slower than float32.
    Where the user's cache cannot be written, it is kept for this process only.
    """
    return _kept(_machine(), _is_bfloat16_faster)


def gains_by_packing(model: nn.Module) -> bool:
    """Whether packed weights make a model faster and the memory for them is there.

    The first is measured once and kept, the second is half of the memory that is free now.

    Args:
        model: a loaded one.
    """
    layers = packable_layers(model)
    if not layers or 2 * copied_bytes(layers) > available_bytes():
        return False
    dtype = layers[0].weight.dtype
    name = str(dtype).removeprefix("torch.")
    return _kept(f"{_machine()}, packed {name}", partial(_is_packed_faster, dtype))


def _machine() -> str:
    cpu = torch.device("cpu")
    return f"{device_name(cpu)}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _kept(key: str, measure: Callable[[str], bool]) -> bool:
    """What is kept under a key in the user's cache, measured where nothing is."""
    kept = _read(CPU_FILE).get(key)
    if isinstance(kept, bool):
        return kept
    answer = measure(key)
    with suppress(OSError, RuntimeError):
        _update(CPU_FILE, key, answer)
    return answer


@cache
def _is_bfloat16_faster(machine: str) -> bool:  # noqa: ARG001 - what it is remembered by
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


@cache
def _is_packed_faster(dtype: torch.dtype, machine: str) -> bool:  # noqa: ARG001 - as above
    return _seconds(dtype, is_packed=True) < _seconds(dtype)


def _seconds(dtype: torch.dtype, *, is_packed: bool = False) -> float:
    """The least of a few products of the shape of a small model's layer and a tree.

    Infinite for a packed product that this build of PyTorch has not.
    """
    rows, weight = torch.ones(16, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
    product = packed_product(rows, weight) if is_packed else partial(F.linear, rows, weight)
    if product is None:
        return math.inf
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def needed_tokens(
    tree: DraftTree, continuation: Sequence[int], depth: int, top_k: int
) -> list[int]:
    """How large a tree must be to hold the next tokens of a text.

    Args:
        tree: *all* candidates of a tree of at least this depth and top_k, none dropped.
        continuation: the tokens that follow the root.
        depth: levels of the tree asked about.
        top_k: children and expanded nodes a level of the tree asked about.

    Returns:
        For j = 1, 2, ... the least num_draft_tokens at which the first j tokens are a path; as many
        entries as there are such j.
    """
    parents, depths = tree.parents.numpy(), tree.depths.numpy()
    is_candidate = _candidates(tree, depth, top_k)
    rows = np.flatnonzero(is_candidate)
    order = rows[np.argsort(-tree.scores.numpy()[rows], kind="stable")]
    place = np.zeros(len(parents), dtype=np.int64)
    place[order] = np.arange(1, len(order) + 1)
    token_ids = tree.token_ids.numpy()
    needed: list[int] = []
    node = 0
    for token in continuation[:depth]:
        is_next = is_candidate & (parents == node) & (token_ids == token) & (depths > 0)
        found = np.flatnonzero(is_next)
        if not len(found):
            break
        node = int(found[0])
        needed.append(int(place[node]))
    return needed


def _candidates(tree: DraftTree, depth: int, top_k: int) -> np.ndarray[Any, Any]:
    """[N] bool, which nodes a smaller tree would have drafted too."""
    parents, depths = tree.parents.numpy(), tree.depths.numpy()
    scores = tree.scores.numpy()
    rows = np.arange(len(parents))
    first = np.full(len(parents) + 1, len(parents))
    np.minimum.at(first, parents, rows)  # siblings stand together, best first
    is_near = rows - first[parents] < top_k
    is_expanded = rows == 0
    is_candidate = np.zeros(len(parents), dtype=bool)
    for level in range(1, depth + 1):
        drafted = np.flatnonzero((depths == level) & is_near & is_expanded[parents])
        is_candidate[drafted] = True
        is_expanded[drafted[np.argsort(-scores[drafted], kind="stable")[:top_k]]] = True
    return is_candidate


def acceptance_length(needed: Sequence[Sequence[int]], num_draft_tokens: int) -> float:
    """Tokens per cycle of exact decoding along one text.

    Args:
        needed: for every place of the text where a root can stand, see `needed_tokens`.
        num_draft_tokens: of the tree asked about.
    """
    num_cycles = sum(1 for _ in _roots(needed, num_draft_tokens))
    return len(needed) / num_cycles if num_cycles else 1.0


def _roots(needed: Sequence[Sequence[int]], num_draft_tokens: int) -> Iterator[int]:
    place = 0
    while place < len(needed):
        yield place
        place += 1 + sum(size <= num_draft_tokens for size in needed[place])


def _read(name: str) -> dict[str, Any]:
    """What a file of the user's cache holds; nothing where it cannot be read.

    A user without a home has no cache either: `cache_dir` raises RuntimeError, as JSON that is
    nested too deep does.
    """
    try:
        entries = json.loads((cache_dir() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _update(name: str, key: str, value: object) -> Path:
    """Adds or replaces one entry of a file of the user's cache, which other processes write too.

    Raises:
        OSError, RuntimeError: the cache cannot be written or found, or another process holds the
            file for long.
    """
    path = cache_dir() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{name}.lock"), timeout=_PATIENCE_S):
        write_json(path, _read(name) | {key: value})
    return path
