"""What the flags of the models mean for a result: the settings that two runs must share."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from eagle_fsd.checkpoint import files_sha256, locate_head, model_files
from eagle_fsd.config import TreeConfig
from eagle_fsd.default_target import DEMO, FOLDER_NAME, cache_dir
from evaluation.answers import AUTO

# Beside its weights, what decides a model's answers; a folder may hold more, which does not.
_TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


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
        **model_digests(args),
    }


def model_digests(args: argparse.Namespace) -> dict[str, str | None]:
    """Those of the settings that a model has from its files, None while they are not here.

    A model of the hub may be downloaded, or be another one, only when it is loaded.
    """
    return {
        "target_sha256": model_digest(args.target, args.revision),
        "draft_model_sha256": model_digest(args.draft_model),
    }


def full_name(name: str | None) -> str | None:
    """A path in full, anything else as it is."""
    if name in (None, DEMO):
        return name
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def head_digest(head: str) -> str:
    """16 digits that tell a head from what it is after further training."""
    whole = hashlib.sha256()
    for path in sorted(locate_head(head).iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin"):
            with path.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:16]


def model_digest(model: str | None, revision: str | None = None) -> str | None:
    """16 digits that tell a model from another one in its place, without reading all of it.

    Configuration and tokenizer count whole, files of weights by their size, first and last MiB.

    Args:
        model: as --target has it.
        revision: of a hub id.

    Returns:
        None without a model, or where its files are not on this machine.
    """
    place = None if model is None else _local_place(model, revision)
    if place is None:
        return None
    return files_sha256(model_files(place, _TEXTS), _TEXTS)[:16]


def _local_place(model: str, revision: str | None) -> Path | None:
    """The folder of a model or its .gguf file; None for a hub id that was not downloaded."""
    place = cache_dir() / FOLDER_NAME if model == DEMO else Path(model).expanduser()
    if place.exists():
        return place
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # a path that is not there, which is told when it is loaded
        return None
    return Path(config).parent if isinstance(config, str) else None
