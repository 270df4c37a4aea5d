"""What the flags of the models mean for a result: the settings that two runs must share."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.checkpoint import locate_head
from eagle_fsd.config import TreeConfig
from evaluation.answers import AUTO


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags of the models say, in a form that does not depend on how they are written.

    Raises:
        ValueError, FileNotFoundError: for a tree or a draft head that is none.
    """
    dtype = getattr(torch, args.dtype, None)
    is_known = isinstance(dtype, torch.dtype)  # "half" is float16
    tree = TreeConfig.parse(args.tree)
    return {
        "target": full_name(args.target),
        "revision": args.revision,
        "draft_head": full_name(args.draft_head),
        "draft_head_sha256": None if args.draft_head is None else head_digest(args.draft_head),
        "draft_vocab": args.draft_vocab,
        "draft_model": full_name(args.draft_model),
        "dtype": str(dtype).removeprefix("torch.") if is_known else args.dtype,
        "attn_implementation": args.attn_implementation,
        "tree": str(tree or AUTO),
    }


def full_name(name: str | None) -> str | None:
    """A path in full, anything else as it is."""
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name


def head_digest(head: str) -> str:
    """16 digits that tell a head from what it is after further training."""
    whole = hashlib.sha256()
    for path in sorted(locate_head(head).iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin"):
            with path.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:16]
