"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` at the end, on the disk.

    After an error nothing of it is left, and what was at `path` stays. What a killed run left is
    written over by the next, for which the name beside is always the same: processes that may write
    one file at once hold a lock for it.
    """
    temporary = path.with_name(path.name + ".tmp")
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
