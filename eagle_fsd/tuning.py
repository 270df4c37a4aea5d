"""What "auto" comes to on a machine: the tree, and the dtype of a CPU.

`python -m benchmarks.tree` measures trees and stores the best one; a decoder with `tree="auto"`
looks that up and never measures a tree itself, so that no clock is read inside a request. Whether a
CPU is faster in bfloat16 is measured in a moment, once, while a target is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_fsd.config import TreeConfig
from eagle_fsd.default_target import cache_dir
from eagle_fsd.device import device_name
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.files import write_json
from eagle_fsd.target import TargetModel
from tree import DraftTree

TREES_FILE = "trees.json"
CPU_FILE = "cpu.json"


@dataclass(frozen=True)
class TreeChoice:
    """What was measured to be fastest for exact decoding.

    Attributes:
        tree: the fastest tree.
        ratio: its tokens per second over plain decoding's, live; below 1 plain decoding is faster.
    """

    tree: TreeConfig
    ratio: float


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
        f"head {head.intermediate_size} U{drafter.law.size}",
    )
    return ", ".join(fact for fact in facts if fact)


def load_choice(setting: str) -> TreeChoice | None:
    """What was stored for a setting; None where nothing (or nothing readable) was."""
    choice: Any = _read(cache_dir() / TREES_FILE).get(setting)
    try:
        return TreeChoice(TreeConfig(*choice["tree"]), float(choice["ratio"]))
    except (TypeError, KeyError, ValueError):
        return None


def store_choice(setting: str, choice: TreeChoice) -> Path:
    """Adds or replaces a setting's choice, the whole file or nothing of it."""
    path = cache_dir() / TREES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    choices = _read(path) | {setting: {"tree": astuple(choice.tree), "ratio": choice.ratio}}
    write_json(path, choices)
    return path


def prefers_bfloat16() -> bool:
    """Whether this CPU multiplies faster in bfloat16 than in float32; measured once and kept.

    Processors without instructions for it emulate bfloat16, several times slower than float32.
    """
    cpu = torch.device("cpu")
    path = cache_dir() / CPU_FILE
    machine = f"{device_name(cpu)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    kept = _read(path)
    if not isinstance(kept.get(machine), bool):
        kept[machine] = _seconds(torch.bfloat16) < _seconds(torch.float32)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept)
    return bool(kept[machine])


def _seconds(dtype: torch.dtype) -> float:
    """The least of a few products of the shape of a small model's layer and a tree."""
    features, weight = torch.ones(16, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        torch.nn.functional.linear(features, weight)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return choices if isinstance(choices, dict) else {}
