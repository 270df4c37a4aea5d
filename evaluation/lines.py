"""Files of whole lines, which a run that is killed at any moment leaves readable."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class LineFile:
    """A file that grows by one whole line at a time.

    Args:
        path: need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[bytes]:
        """The lines, without their ends; a last one that a killed run left half is cut off."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return whole.split(b"\n")[:-1]

    def append(self, line: bytes) -> None:
        """Adds a line, without its end; it is on the disk afterwards.

        Raises:
            OSError: on a full disk; the earlier lines stay, and nothing of this one.
        """
        try:
            # Unbuffered: nothing is left over for close to write, and to fail at, once more.
            with self.path.open("a+b", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
                    self.read()  # a killed run left half a line
                    size = os.fstat(stream.fileno()).st_size
                rest = memoryview(line + b"\n")
                try:
                    while rest:
                        rest = rest[stream.write(rest) :]
                    os.fsync(stream.fileno())
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(stream.fileno(), size)
                    raise
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {error.strerror}; what is there stays, and the same "
                "command goes on from it"
            ) from error
