"""The draft vocabulary: the most frequent answer tokens of token shards.

python -m train.vocab --shards shards --size 16384 --output draft_vocab.json
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.command import run
from eagle_fsd.draft_vocab import VOCAB_FILE
from eagle_fsd.files import write_text
from train.features import shards_identity
from train.shards import TokenShards


def count_tokens(shards: TokenShards) -> Tensor:
    """How often each token is one of an answer: [V] int64."""
    counts = torch.zeros(int(shards.meta["tokenizer"]["vocab_size"]), dtype=torch.int64)
    for ids, mask in shards:
        counts += torch.bincount(ids[mask], minlength=counts.numel())
    return counts


def build_vocab(shards: TokenShards, size: int) -> dict[str, Any]:
    """The `size` most frequent tokens of the answers, the smaller id first among equals.

    Returns:
        token_ids: ascending. counts: how often each is one of an answer. size: U. coverage: share
        of the answers' tokens that are among them. source: digest of the shards.

    Raises:
        ValueError: if the size is not within the vocabulary, or no token is one of an answer.
    """
    counts = count_tokens(shards)
    if not 1 <= size <= counts.numel():
        raise ValueError(f"the draft vocabulary must have 1..{counts.numel()} tokens, got {size}")
    total = int(counts.sum())
    if not total:
        raise ValueError(f"the shards in {str(shards.folder)!r} have no supervised token")
    chosen = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return {
        "token_ids": chosen.tolist(),
        "counts": counts[chosen].tolist(),
        "size": size,
        "coverage": round(int(counts[chosen].sum()) / total, 6),
        "source": f"shards {shards_identity(shards.folder)[:16]}, {shards.split} answers",
    }


def write_vocab(path: Path, vocab: dict[str, Any]) -> None:
    """Writes a draft vocabulary on one line: the whole file or none of it."""
    write_text(path, json.dumps(vocab) + "\n")


def vocab_sha256(vocab: dict[str, Any] | None) -> str | None:
    """A digest of the token ids; None for the full vocabulary."""
    if vocab is None:
        return None
    return hashlib.sha256(json.dumps(vocab["token_ids"]).encode()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m train.vocab", description=__doc__)
    parser.add_argument("--shards", required=True, metavar="DIR", help="of train.prepare")
    parser.add_argument("--size", required=True, type=int, metavar="U", help="tokens to keep")
    parser.add_argument("--output", required=True, metavar="FILE", help=f"usually {VOCAB_FILE}")
    args = parser.parse_args(argv)
    return run(lambda: _build_and_write(args.shards, args.size, Path(args.output)))


def _build_and_write(shards: str, size: int, output: Path) -> None:
    vocab = build_vocab(TokenShards(shards), size)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_vocab(output, vocab)
    print(f"{vocab['size']} tokens cover {100 * vocab['coverage']:.2f}% of the answers' tokens")


if __name__ == "__main__":
    raise SystemExit(main())
