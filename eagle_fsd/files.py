"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` at the end, on the disk.

    After an error nothing of it is left, and what was at `path` stays. What a killed run left is
    written over by the next, for which the name beside is always the same: processes that may write
    one file at once hold a lock for it.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8: the whole file or none of it."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON: the whole file or none of it.

    Raises:
        ValueError: for NaN and infinity, which JSON does not have.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def locked(lock_file: Path, busy: str) -> Iterator[None]:
    """Keeps a second process away for as long as it lasts.

    Args:
        lock_file: in a folder that is there; it stays.
        busy: what is said when another process holds it, and the way out.

    Raises:
        RuntimeError: at once, when another process holds it.
    """
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RuntimeError(busy) from error
    try:
        yield
    finally:
        lock.release()


def temporary_path(path: Path) -> Path:
    """Where `whole_file` writes; what a killed process left there is of no use."""
    return path.with_name(path.name + ".tmp")


def read_lines(path: Path, what: str) -> list[str]:
    """The lines of a UTF-8 text, empty ones included.

    Only a newline ends a line: JSON may hold the other separators that splitlines knows.

    Args:
        path: with a byte order mark or without.
        what: what messages call the file.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is no UTF-8 text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}")
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from error
