"""The target's features: on the fly, or cached in memory-mapped bf16 files.

    python -m train.features --shards shards --target demo --output features --limit-tokens 20000

A feature folder, once finished, holds::

    meta.json                   target, identity of the shards, dtype, counts; written last
    train/features-00000.bin    [tokens, H] bf16, the features of consecutive conversations
    train/index-00000.npy       [C + 1] int64, where each of them starts and the last one ends
    validation/...              the same for the held-out conversations

A file appears whole or not at all; an interrupted run goes on behind the last whole one.
"""

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eagle_fsd.checkpoint import load_target
from eagle_fsd.command import run
from eagle_fsd.device import resolve_device
from eagle_fsd.files import locked, write_json
from eagle_fsd.target import TargetModel
from train.prepare import (
    LEFT_BEHIND,
    LOCK_FILE,
    UNFINISHED_FILE,
    read_object,
    tokenizer_identity,
)
from train.shards import (
    META_FILE,
    SPLITS,
    TokenShards,
    read_format_meta,
    read_meta,
)

LOGGER = logging.getLogger(__name__)

FORMAT_NAME = "eagle_fsd features"
FORMAT_VERSION = 1
PART_TOKENS = 2**18
# Tokens of one padded pass of the target: on a CPU as many as its caches like (13% faster than
# 2**14), on an accelerator enough to fill it. And how much of the longest a row must fill.
CPU_PASS_TOKENS = 2**11
PASS_TOKENS = 2**15
LEAST_FILL = 0.8
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class FeatureRequest:
    """Features `start`..`stop` - 1 of a conversation whose tokens are `ids` [T] int64."""

    conversation: int
    ids: Tensor
    start: int
    stop: int


class FeatureSource(Protocol):
    """Where features come from."""

    def features(self, requests: Sequence[FeatureRequest]) -> list[Tensor]:
        """[stop - start, H] for each request, in order."""
        ...


class TargetFeatures:
    """Features computed when they are asked for, from whole sequences.

    Args:
        target: runs in its own dtype, where it is.
    """

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._backbone = target.model.get_decoder()

    @torch.no_grad()
    def features(self, requests: Sequence[FeatureRequest]) -> list[Tensor]:
        results: list[Tensor | None] = [None] * len(requests)
        limit = CPU_PASS_TOKENS if self._target.device.type == "cpu" else PASS_TOKENS
        for group in _groups([request.stop for request in requests], limit):
            longest = max(requests[i].stop for i in group)
            # Padded behind their ends: a causal model's features there are not looked at.
            padded = torch.zeros(len(group), longest, dtype=torch.int64)
            for row, i in enumerate(group):
                padded[row, : requests[i].stop] = requests[i].ids[: requests[i].stop]
            outputs: Any = self._backbone(input_ids=padded.to(self._target.device), use_cache=False)
            hidden = outputs.last_hidden_state.to(self._target.output_device)
            for row, i in enumerate(group):
                results[i] = hidden[row, requests[i].start : requests[i].stop].clone()
        return [result for result in results if result is not None]


def _groups(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of sequences of like length that go through the target together."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[group[0]] if group else 0
        is_full = (len(group) + 1) * longest > limit or lengths[i] < LEAST_FILL * longest
        if group and is_full:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


class CachedFeatures:
    """The features of one split of a finished feature folder, read through memory maps.

    Raises:
        FileNotFoundError: if the folder is not finished or a file is missing.
        ValueError: if the folder is of another format, or its files do not fit each other.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.folder = Path(folder)
        self.meta = read_features_meta(folder)
        self.hidden_size = int(self.meta["hidden_size"])
        self._device, self._dtype = device, dtype
        self._indexes: list[np.ndarray[Any, Any]] = []
        self._rows: list[np.ndarray[Any, Any]] = []
        for number in range(self.meta["splits"][split]["parts"]):
            index = _read_index(self.folder / split, number, self.hidden_size)
            shape = (int(index[-1]), self.hidden_size)
            rows = self.folder / split / _part_names(number)[0]
            self._indexes.append(index)
            self._rows.append(np.memmap(rows, dtype="<i2", mode="r", shape=shape))
        self._first = np.cumsum([0, *(len(index) - 1 for index in self._indexes)])
        if len(self) != self.meta["splits"][split]["conversations"]:
            raise ValueError(f"{str(self.folder / split)!r} is not complete; make it again")

    def __len__(self) -> int:
        return int(self._first[-1])

    def features(self, requests: Sequence[FeatureRequest]) -> list[Tensor]:
        return [self._read(request).to(self._device, self._dtype) for request in requests]

    def _read(self, request: FeatureRequest) -> Tensor:
        part = int(np.searchsorted(self._first, request.conversation, side="right")) - 1
        row = request.conversation - int(self._first[part])
        first, end = (int(offset) for offset in self._indexes[part][row : row + 2])
        if end - first != request.ids.numel():
            raise ValueError(
                f"conversation {request.conversation} has {request.ids.numel()} tokens and "
                f"{end - first} cached features; make the features of these shards again"
            )
        rows = self._rows[part][first + request.start : first + request.stop]
        return torch.from_numpy(rows.astype(np.int16, copy=True)).view(torch.bfloat16)


def _read_index(folder: Path, number: int, hidden_size: int) -> np.ndarray[Any, Any]:
    """Where each conversation of a part begins and the last one ends, in rows.

    Raises:
        FileNotFoundError: if a file of the part is missing.
        ValueError: if the two files do not fit each other.
    """
    rows, index = (folder / name for name in _part_names(number))
    for path in (rows, index):
        if not path.is_file():
            raise FileNotFoundError(
                f"feature file {str(path)!r} is missing; clear the folder and make the features "
                "again"
            )
    try:
        offsets = np.load(index, mmap_mode="r")
    except (EOFError, ValueError) as error:
        raise ValueError(
            f"{str(index)!r} is no index; clear the folder and make the features again"
        ) from error
    num_bytes = 2 * int(offsets[-1]) * hidden_size
    if rows.stat().st_size != num_bytes:
        raise ValueError(
            f"{str(rows)!r} has {rows.stat().st_size} bytes, its index says {num_bytes}; clear the "
            "folder and make the features again"
        )
    return offsets


def read_features_meta(folder: str | Path) -> dict[str, Any]:
    """The `meta.json` of a finished feature folder.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if the file is of another format or version.
    """
    ways_out = "make or finish it with python -m train.features", "make the features again"
    return read_format_meta(folder, "feature", (FORMAT_NAME, FORMAT_VERSION), ways_out)


def shards_identity(folder: str | Path) -> str:
    """A digest of what the token shards in `folder` hold: their source, counts and content.

    Shards of an earlier version do not tell their content.
    """
    meta = read_meta(folder)
    facts = {key: meta.get(key) for key in ("dtype", "tokenizer", "identity", "splits")}
    facts["tokenizer"] = {
        key: value for key, value in (meta.get("tokenizer") or {}).items() if key != "name"
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def target_identity(target: TargetModel) -> str:
    """A digest that tells one target's weights from another's, by 64 values of each parameter."""
    digest = hashlib.sha256()
    parameters = dict(target.model.named_parameters())
    for name in sorted(parameters):
        value = parameters[name].detach().flatten()
        sample = value[:: max(1, value.numel() // 64)].to(torch.bfloat16).view(torch.int16)
        digest.update(name.encode())
        digest.update(sample.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_shards(shards: str | Path, target: TargetModel, tokenizer: Any) -> None:
    """Refuses shards of another tokenizer than the target's, or longer than its context.

    Raises:
        ValueError: naming both.
    """
    of_shards = read_meta(shards)["tokenizer"]
    if of_shards["vocab_size"] > target.vocabulary_size:
        raise ValueError(
            f"the shards in {str(shards)!r} have {of_shards['vocab_size']} tokens and the target "
            f"{target.vocabulary_size}; prepare them with the target's own tokenizer"
        )
    of_target = tokenizer_identity(tokenizer)
    if of_shards["tokenizer_sha256"] != of_target["tokenizer_sha256"]:
        raise ValueError(
            f"the shards in {str(shards)!r} were made with the tokenizer "
            f"{of_shards.get('name')!r} ({of_shards['vocab_size']} tokens), not the target's "
            f"({of_target['vocab_size']} tokens); prepare them with the target's own tokenizer"
        )
    for split in SPLITS:
        lengths = TokenShards(shards, split).lengths
        if lengths.numel() and int(lengths.max()) > target.max_positions:
            raise ValueError(
                f"the shards in {str(shards)!r} have a conversation of {int(lengths.max())} tokens "
                f"and the target's context is {target.max_positions}; prepare them with "
                f"--max-length {target.max_positions}"
            )


def load_for_training(name: str, dtype: str, device: torch.device) -> tuple[TargetModel, Any]:
    """A frozen target and its tokenizer.

    Raises:
        ValueError, FileNotFoundError: when it cannot be loaded.
    """
    model, tokenizer = load_target(name, dtype=DTYPES[dtype])
    model.requires_grad_(False)
    return TargetModel(model.to(device)), tokenizer  # type: ignore[arg-type]


@dataclass(frozen=True)
class FeaturesConfig:
    """The settings of the command; each is a flag.

    Raises:
        ValueError: if a number is out of its range.
    """

    shards: str
    target: str
    output: str
    limit_tokens: int | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    num_threads: int | None = None
    part_tokens: int = PART_TOKENS

    def __post_init__(self) -> None:
        for name in ("limit_tokens", "num_threads", "part_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {self.dtype!r}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--shards", required=True, metavar="DIR", help="token shards of train.prepare")
        add("--target", required=True, help="demo, a hub id, a folder or a .gguf file")
        add("--output", required=True, metavar="DIR", help="folder for the features")
        add("--limit-tokens", type=int, metavar="N", help="stop each split once N are done")
        add("--dtype", default=cls.dtype, choices=list(DTYPES), help="of the target's pass")
        add("--device", default=cls.device, help="auto, cpu, cuda, cuda:N or mps")
        add("--num-threads", type=int, metavar="N", help="CPU threads")
        add("--part-tokens", type=int, default=cls.part_tokens, help="tokens of one file")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def compute_features(config: FeaturesConfig) -> dict[str, Any]:
    """Writes the features of `config` and returns their meta data; a finished folder is left alone.

    Raises:
        FileNotFoundError: if the shards or the target are missing.
        ValueError: if they do not fit each other or the output folder holds something else.
        OSError: if the machine fails, for example on a full disk.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    identity = {
        "target": config.target,
        "shards": shards_identity(config.shards),
        "pass_dtype": config.dtype,
        "limit_tokens": config.limit_tokens,
        "part_tokens": config.part_tokens,
    }
    output = Path(config.output)
    _check_output(output, identity)  # before a target is loaded, and anything written
    target, tokenizer = load_for_training(
        config.target, config.dtype, resolve_device(config.device)
    )
    check_shards(config.shards, target, tokenizer)
    output.mkdir(parents=True, exist_ok=True)
    busy = f"another run writes features in {str(output)!r}; wait for it or name another folder"
    with locked(output / LOCK_FILE, busy):
        return _compute(config, identity, target)


def _compute(
    config: FeaturesConfig, identity: dict[str, Any], target: TargetModel
) -> dict[str, Any]:
    """Writes what the folder, which is locked, does not hold yet."""
    output, weights = Path(config.output), target_identity(target)
    finished = _check_output(output, identity)
    if finished is not None:
        _check_weights(output, identity, finished, weights)
        for split in SPLITS:
            CachedFeatures(output, split)  # a damaged part is told
        return finished
    unfinished = output / UNFINISHED_FILE
    begun = read_object(unfinished) if unfinished.is_file() else {}
    _check_weights(output, identity, begun, weights)
    write_json(unfinished, identity | {"target_sha256": weights})
    splits = {split: _write_split(config, split, target) for split in SPLITS}
    meta = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "target_sha256": weights,
        "splits": splits,
        "identity": identity,
    }
    write_json(output / META_FILE, meta)
    unfinished.unlink()
    return meta


def _check_output(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The meta data of a finished folder, None where there is something to do."""
    meta = read_features_meta(output) if (output / META_FILE).exists() else None
    unfinished = output / UNFINISHED_FILE
    if meta is not None:
        found = meta["identity"]
    elif unfinished.is_file():
        found = read_object(unfinished)
    elif output.exists() and {path.name for path in output.iterdir()} - LEFT_BEHIND:
        raise ValueError(f"output folder {str(output)!r} is not empty and holds no features")
    else:
        return None
    if differing := sorted(key for key in identity if found.get(key) != identity[key]):
        raise ValueError(
            f"output folder {str(output)!r} holds features of other settings "
            f"({', '.join(differing)}); choose or clear a folder"
        )
    return meta


def _check_weights(
    output: Path, identity: dict[str, Any], begun: dict[str, Any], weights: str
) -> None:
    """Refuses a target that has other weights than when the folder was begun."""
    if begun.get("target_sha256", weights) != weights:
        raise ValueError(
            f"output folder {str(output)!r} was begun with other weights of the target "
            f"{identity['target']!r}; choose or clear a folder"
        )


def _write_split(config: FeaturesConfig, split: str, target: TargetModel) -> dict[str, int]:
    shards = TokenShards(config.shards, split)
    source = TargetFeatures(target)
    folder = Path(config.output) / split
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(shards.lengths.tolist(), config.part_tokens, config.limit_tokens))
    num_tokens = sum(int(shards.lengths[first:end].sum()) for first, end in parts)
    with tqdm(total=num_tokens, unit="tok", unit_scale=True, desc=split, disable=None) as bar:
        for number, (first, end) in enumerate(parts):
            if _is_whole(folder, number, target.hidden_size, end - first):
                bar.update(int(shards.lengths[first:end].sum()))
            else:
                _write_part(folder, number, shards, range(first, end), source, bar)
    count = parts[-1][1] if parts else 0
    return {"parts": len(parts), "conversations": count, "tokens": num_tokens}


def _is_whole(folder: Path, number: int, hidden_size: int, num_conversations: int) -> bool:
    try:
        return len(_read_index(folder, number, hidden_size)) == num_conversations + 1
    except (FileNotFoundError, ValueError):
        return False


def _parts(
    lengths: list[int], part_tokens: int, limit_tokens: int | None
) -> Iterator[tuple[int, int]]:
    """Ranges of conversations, each of at least `part_tokens` but for the last."""
    first = in_part = in_all = 0
    for i, length in enumerate(lengths):
        in_part += length
        in_all += length
        is_last = limit_tokens is not None and in_all >= limit_tokens
        if in_part >= part_tokens or is_last:
            yield first, i + 1
            first, in_part = i + 1, 0
        if is_last:
            return
    if first < len(lengths):
        yield first, len(lengths)


def _write_part(
    folder: Path,
    number: int,
    shards: TokenShards,
    conversations: range,
    source: TargetFeatures,
    bar: Any,
) -> None:
    rows_name, index_name = _part_names(number)
    temporary = folder / (rows_name + ".tmp")
    offsets = [0]
    try:
        with temporary.open("wb") as stream:
            for group in _chunks(conversations, shards):
                for rows in source.features(group):
                    stored = rows.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
                    stream.write(stored.numpy().astype("<i2", copy=False).tobytes())
                    offsets.append(offsets[-1] + rows.shape[0])
                    bar.update(rows.shape[0])
            stream.flush()
            os.fsync(stream.fileno())
        index = folder / (index_name + ".tmp")
        with index.open("wb") as stream:
            np.save(stream, np.asarray(offsets, dtype="<i8"))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / rows_name)
        index.replace(folder / index_name)
    finally:
        for name in (rows_name, index_name):
            (folder / (name + ".tmp")).unlink(missing_ok=True)


def _chunks(conversations: range, shards: TokenShards) -> Iterator[list[FeatureRequest]]:
    """Requests for whole conversations, a few passes of the target at a time."""
    group: list[FeatureRequest] = []
    for i in conversations:
        ids, _ = shards.conversation(i)
        group.append(FeatureRequest(i, ids, 0, ids.numel()))
        if sum(request.stop for request in group) >= PASS_TOKENS:
            yield group
            group = []
    if group:
        yield group


def _part_names(number: int) -> tuple[str, str]:
    return f"features-{number:05d}.bin", f"index-{number:05d}.npy"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m train.features",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    FeaturesConfig.add_arguments(parser)
    args = parser.parse_args(argv)
    return run(lambda: _report(compute_features(FeaturesConfig.from_args(args))))


def _report(meta: dict[str, Any]) -> None:
    for name, split in meta["splits"].items():
        print(
            f"{name}: features of {split['conversations']} conversations, {split['tokens']} tokens"
        )


if __name__ == "__main__":
    raise SystemExit(main())
