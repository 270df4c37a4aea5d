"""A reduced draft vocabulary: the head drafts over the most frequent tokens only.

Most of a draft step is the product with the target's lm_head; over U of its V rows it costs U/V of
that. The draft's law is zero outside, which exact verification does not notice.

Source: FR-Spec (Zhao et al. 2025, arXiv:2502.14856), section 3.
"""

from __future__ import annotations

import json
import reprlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_fsd.packed import PackedWeight, may_pack, tensor_state
from eagle_fsd.target import TargetModel

VOCAB_FILE = "draft_vocab.json"
FULL, AUTO = "full", "auto"


def read_vocab(path: str | Path) -> dict[str, Any]:
    """A draft vocabulary file.

    Returns:
        At least token_ids, ascending and distinct; counts, as many and >= 0, where the file has
        them. All are whole numbers below 2^63.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is not one, or its ids are not ascending and distinct.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no draft vocabulary at {str(path)!r}; give a file or a number")
    try:
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is no draft vocabulary: {error!r}") from error
    if not isinstance(vocab, dict) or "token_ids" not in vocab:
        raise ValueError(f"{str(path)!r} is no draft vocabulary: an object with token_ids is")
    token_ids: Any = vocab["token_ids"]
    counts: Any = vocab.get("counts", token_ids)
    for name, values in (("token_ids", token_ids), ("counts", counts)):
        if not _are_whole_numbers(values):
            raise ValueError(
                f"{str(path)!r} is no draft vocabulary: {name} must be a list of whole numbers in "
                f"0..2^63-1, got {reprlib.repr(values)}"
            )
    if not token_ids or any(a >= b for a, b in pairwise(token_ids)):
        raise ValueError(f"{str(path)!r} must hold ascending, distinct token ids >= 0")
    if len(counts) != len(token_ids):
        raise ValueError(f"{str(path)!r} has {len(token_ids)} token ids but {len(counts)} counts")
    return vocab


def _are_whole_numbers(values: object) -> bool:
    """Whether these are what a tensor of int64 holds: True is an int in Python, and no number."""
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def choose_vocab(folder: str | Path, choice: str | int = AUTO) -> Tensor | None:
    """The token ids that a head drafts over.

    Args:
        folder: the head's.
        choice: "full" for all tokens, "auto" for those of the head's draft_vocab.json where it has
            one, or a number U: the U most frequent of them.

    Returns:
        [U] int64, ascending; None for all tokens.

    Raises:
        FileNotFoundError, ValueError: for a number where there is no such file, or not so many
            tokens in it, or no order among them.
    """
    path = Path(folder) / VOCAB_FILE
    text = str(choice)
    if isinstance(choice, bool) or not (text in (FULL, AUTO) or text.isdecimal()):
        raise ValueError(f"draft_vocab must be full, auto or a number of tokens, got {choice!r}")
    if text == FULL or (text == AUTO and not path.exists()):
        return None
    if not path.exists():
        raise FileNotFoundError(
            f"draft_vocab {text}: the draft head has no {VOCAB_FILE}; write one beside its weights "
            "with python -m train.vocab, or use full"
        )
    vocab = read_vocab(path)
    token_ids = torch.tensor(vocab["token_ids"])
    size = token_ids.numel() if text == AUTO else int(text)
    if not 1 <= size <= token_ids.numel():
        raise ValueError(
            f"draft_vocab must be in 1..{token_ids.numel()}, the tokens of {path}, got {size}"
        )
    if size == token_ids.numel():
        return token_ids
    if "counts" not in vocab:
        raise ValueError(
            f"{path} has no counts to choose the {size} most frequent tokens by; write it anew "
            "with python -m train.vocab, or use auto"
        )
    order = torch.tensor(vocab["counts"]).sort(descending=True, stable=True).indices
    return token_ids[order[:size]].sort().values


class DraftLaw:
    """Features -> logits of the target's lm_head, over all tokens or those of a draft vocabulary.

    The rows of a draft vocabulary are a copy. They are read again when the weights were converted,
    moved or loaded anew since; what is written through `weight.data` or by an offloaded model's
    hooks leaves no trace that could be seen without reading all of it.

    Args:
        target: its lm_head is used and never changed.
        token_ids: [U] int64, ascending and distinct, or None for all tokens.

    Raises:
        ValueError: if the ids are not those of the target.
    """

    def __init__(self, target: TargetModel, token_ids: Tensor | None = None) -> None:
        self.token_ids = token_ids
        self._target = target
        if token_ids is None:
            return
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < target.vocabulary_size:
            raise ValueError(
                f"the draft vocabulary has ids {int(token_ids.min())}..{int(token_ids.max())}, "
                f"the target has {target.vocabulary_size} tokens; use one that was made for it"
            )
        self.token_ids = token_ids.to(target.output_device)
        self._version: tuple[object, ...] = ()
        self._refresh(self.token_ids)

    @property
    def size(self) -> int:
        """U, or V."""
        return self._target.vocabulary_size if self.token_ids is None else self.token_ids.numel()

    def logits(self, features: Tensor) -> Tensor:
        """[..., H] -> [..., U], in the target's dtype; differentiable in the features."""
        features = features.to(self._target.dtype)
        if self.token_ids is None:
            return self._target.logits(features)
        self._refresh(self.token_ids)
        if self._packed is not None and not torch.is_grad_enabled():
            return self._target.cap(self._packed(features))
        return self._target.cap(F.linear(features, self._weight, self._bias))

    def _refresh(self, token_ids: Tensor) -> None:
        """Reads the rows where the target's lm_head is not what they were read from."""
        version = _version(self._target)
        if version == self._version:
            return
        with torch.inference_mode(False):  # training takes a gradient through them
            self._weight, self._bias = self._target.output_rows(token_ids)
        is_packed = self._target.packs_weights and may_pack(self._weight)
        self._packed = PackedWeight(self._weight, self._bias) if is_packed else None
        self._version = version


def _version(target: TargetModel) -> tuple[object, ...]:
    """Differs when the target's lm_head does, as far as can be told without reading it."""
    lm_head = target.model.get_output_embeddings()
    held = [each for each in (*lm_head.parameters(), *lm_head.buffers()) if not each.is_meta]
    return (target.dtype, target.output_device, *map(tensor_state, held))
