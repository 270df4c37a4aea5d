"""Token shards: tokenized conversations with their loss masks in memory-mapped files.

A shard folder, once finished, holds::

    meta.json                 format version, tokenizer, settings, counts; written last
    train/tokens-00000.bin    token ids, uint16 if the vocabulary has at most 65,536, else uint32
    train/mask-00000.bin      uint8, 1 where the token belongs to an assistant's answer
    train/index-00000.npy     [C + 1] int64, where each conversation starts and the last one ends
    validation/...            the same files for the held-out conversations

All numbers are little endian. Every file is written under a temporary name and renamed, and a
folder without `meta.json` is unfinished, so no reader ever sees half a shard.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import torch
from torch import Tensor

FORMAT_NAME = "eagle_fsd token shards"
FORMAT_VERSION = 1
META_FILE = "meta.json"
SPLITS = ("train", "validation")
DEFAULT_SHARD_TOKENS = 2**24

_KINDS = {"tokens": "bin", "mask": "bin", "index": "npy"}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest little-endian dtype of the format that holds the ids 0..vocab_size - 1.

    Raises:
        ValueError: if the vocabulary is empty or larger than 2**32.
    """
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size must be between 1 and 2**32, got {vocab_size}")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def read_meta(folder: str | Path) -> dict[str, Any]:
    """The `meta.json` of a finished shard folder.

    Raises:
        FileNotFoundError: if the folder has none, so that it is no finished shard folder.
        ValueError: if the file is of another format or version.
    """
    ways_out = "make one with python -m train.prepare", "prepare the shards again"
    return read_format_meta(folder, "shard", (FORMAT_NAME, FORMAT_VERSION), ways_out)


def read_format_meta(
    folder: str | Path, kind: str, expected: tuple[str, int], ways_out: tuple[str, str]
) -> dict[str, Any]:
    """The `meta.json` of a finished folder of some format.

    Args:
        folder: the folder.
        kind: what messages call it.
        expected: name and version of the format.
        ways_out: what to do when there is no such file, and when it is of another format.

    Raises:
        FileNotFoundError: if the folder has none, so that it is not finished.
        ValueError: if the file is of another format or version.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"no {META_FILE} in {str(folder)!r}: not a finished {kind} folder; {ways_out[0]}"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from error
    found = (meta.get("format"), meta.get("version")) if isinstance(meta, dict) else (None, None)
    if found != expected:
        raise ValueError(
            f"{str(path)!r} has format and version {found}, expected {expected}; {ways_out[1]}"
        )
    return dict(meta)


class ShardWriter:
    """Writes the conversations of one split, a new shard whenever one is full.

    A context manager: leaving it finishes the last shard, leaving it by an exception drops the
    unfinished files. The caller writes `meta.json` when every split is finished.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], shard_tokens: int = DEFAULT_SHARD_TOKENS
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be >= 1, got {shard_tokens}")
        self.num_shards = 0
        self.num_conversations = 0
        self.num_tokens = 0
        self.num_supervised_tokens = 0
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._offsets = [0]
        self._tokens: IO[bytes] | None = None
        self._mask: IO[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, ids: Sequence[int], mask: Sequence[bool]) -> None:
        """Appends one conversation.

        Args:
            ids: [T] token ids, T >= 1.
            mask: [T] True where the token belongs to an answer.

        Raises:
            ValueError: if the two differ in length, are empty, or an id does not fit the dtype.
        """
        if not len(ids) == len(mask) > 0:
            raise ValueError(f"ids and mask need one length >= 1, got {len(ids)} and {len(mask)}")
        if not 0 <= min(ids) <= max(ids) <= np.iinfo(self._dtype).max:
            raise ValueError(f"token ids {min(ids)}..{max(ids)} do not fit {self._dtype.name}")
        if self._tokens is None or self._mask is None:
            self._tokens = self._temporary("tokens").open("wb")
            self._mask = self._temporary("mask").open("wb")
        self._tokens.write(np.asarray(ids, dtype=self._dtype).tobytes())
        self._mask.write(np.asarray(mask, dtype=np.uint8).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        self.num_conversations += 1
        self.num_tokens += len(ids)
        self.num_supervised_tokens += sum(mask)
        if self._offsets[-1] >= self._shard_tokens:
            self._finish_shard()

    def summary(self) -> dict[str, int]:
        """The split's entry in `meta.json`."""
        return {
            "shards": self.num_shards,
            "conversations": self.num_conversations,
            "tokens": self.num_tokens,
            "supervised_tokens": self.num_supervised_tokens,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exception_type is None:
                self._finish_shard()
        finally:
            self._drop_unfinished()

    def _path(self, kind: str) -> Path:
        return self._folder / _file_name(kind, self.num_shards)

    def _temporary(self, kind: str) -> Path:
        path = self._path(kind)
        return path.with_name(path.name + ".tmp")

    def _drop_unfinished(self) -> None:
        for stream in (self._tokens, self._mask):
            if stream is not None:
                with suppress(OSError):  # closing writes what is buffered: not on a full disk
                    stream.close()
        for kind in _KINDS:
            self._temporary(kind).unlink(missing_ok=True)

    def _finish_shard(self) -> None:
        if self._tokens is None or self._mask is None:
            return
        with self._temporary("index").open("wb") as index:
            np.save(index, np.asarray(self._offsets, dtype="<i8"))
            _to_disk(index)
        for stream in (self._tokens, self._mask):
            _to_disk(stream)
            stream.close()
        for kind in _KINDS:
            self._temporary(kind).replace(self._path(kind))
        self._tokens = self._mask = None
        self._offsets = [0]
        self.num_shards += 1


class TokenShards:
    """The conversations of one split of a finished shard folder, read through memory maps.

    Only the offsets that are looked at and the conversation that is asked for are ever in memory.
    Copies sent to worker processes map the files again.

    Raises:
        FileNotFoundError: if the folder is not finished or a shard is missing.
        ValueError: if the split is unknown or a shard's files do not fit each other.
    """

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        self.folder = Path(folder)
        self.split = split
        self.meta = read_meta(folder)
        if split not in self.meta["splits"]:
            raise ValueError(f"unknown split {split!r}; choose one of {list(self.meta['splits'])}")
        summary = self.meta["splits"][split]
        self._indexes: list[np.ndarray[Any, Any]] = []
        self._tokens: list[np.ndarray[Any, Any]] = []
        self._masks: list[np.ndarray[Any, Any]] = []
        for number in range(summary["shards"]):
            self._open_shard(number, np.dtype(self.meta["dtype"]).newbyteorder("<"))
        self._first = np.cumsum([0, *(len(index) - 1 for index in self._indexes)])
        self.num_tokens = sum(len(tokens) for tokens in self._tokens)
        self.num_supervised_tokens = int(summary["supervised_tokens"])
        found = (len(self), self.num_tokens)
        if found != (summary["conversations"], summary["tokens"]):
            raise ValueError(
                f"{str(self.folder / split)!r} holds {found[0]} conversations and {found[1]} "
                f"tokens, {META_FILE} says {summary['conversations']} and {summary['tokens']}; "
                "prepare the shards again"
            )

    def __len__(self) -> int:
        return int(self._first[-1])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.conversation(i) for i in range(len(self)))

    def __reduce__(self) -> tuple[type[Self], tuple[Path, str]]:
        return type(self), (self.folder, self.split)

    @property
    def lengths(self) -> Tensor:
        """[C] int64, the number of tokens of every conversation."""
        parts = [np.diff(index) for index in self._indexes]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))

    def conversation(self, i: int) -> tuple[Tensor, Tensor]:
        """The token ids and the loss mask of conversation `i`, counted through all shards.

        Returns:
            ids: [T] int64. mask: [T] bool, True on answer tokens and their end-of-turn token. Both
            are copies that the caller may change.

        Raises:
            IndexError: if `i` is not in 0..len - 1.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"conversation must be in 0..{len(self) - 1}, got {i}")
        shard = int(np.searchsorted(self._first, i, side="right")) - 1
        row = i - int(self._first[shard])
        start, end = (int(offset) for offset in self._indexes[shard][row : row + 2])
        ids = self._tokens[shard][start:end].astype(np.int64)
        mask = self._masks[shard][start:end].astype(np.bool_)
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def _open_shard(self, number: int, dtype: np.dtype[Any]) -> None:
        tokens, mask, index = (
            self.folder / self.split / _file_name(kind, number) for kind in _KINDS
        )
        for path in (tokens, mask, index):
            if not path.is_file():
                raise FileNotFoundError(
                    f"shard file {str(path)!r} is missing; prepare the shards again"
                )
        offsets = np.load(index, mmap_mode="r")
        num_tokens = int(offsets[-1])
        expected = (num_tokens * dtype.itemsize, num_tokens)
        found = (tokens.stat().st_size, mask.stat().st_size)
        if found != expected:
            raise ValueError(
                f"{str(tokens)!r} and its mask have {found} bytes, the index says {expected}; "
                "prepare the shards again"
            )
        self._indexes.append(offsets)
        self._tokens.append(np.memmap(tokens, dtype=dtype, mode="r"))
        self._masks.append(np.memmap(mask, dtype=np.uint8, mode="r"))


def _file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.{_KINDS[kind]}"


def _to_disk(stream: IO[Any]) -> None:
    """A renamed file must not turn out empty after a power cut."""
    stream.flush()
    os.fsync(stream.fileno())
