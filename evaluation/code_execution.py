"""Runs untrusted Python programs, each in a process of its own: did it run to its end.

What holds a program back, from the outside in:

* where the Linux kernel allows it, new user, mount, process, network and IPC namespaces: no
  network, no other process to see or signal, every folder but its own read-only, and nothing
  outlives the first process (an ordinary user may make them too; containers often forbid it);
* a session of its own, killed as a whole and searched for in /proc afterwards; an environment
  with nothing in it; limits on CPU, memory, file size, files, processes and open files
  (RLIMIT_NPROC does not bind root: there the audit hook and the kill remain);
* a Python audit hook that refuses sockets, processes, signals to others, links, native modules
  and every change outside the folder. An audit hook is no security boundary: native code, or a
  program written against this very hook, gets around it. Without namespaces it is all that stands
  between the program and the user's files, so that code of unknown origin belongs into a container
  then.

A pass is proven by a random token that waits in a pipe. The harness takes it out after the last
statement of the program ran and sends it back. Leaving early by any exit, printing, or waiting
for the time to pass proves nothing. No frame, variable or memory of the process holds the token or
the function that fetches it while the program runs, and the calls that read from a descriptor are
taken away. Tests that are fooled from within (an object that equals everything) are beyond it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_MEMORY_BYTES = 2**30

_CHILD = Path(__file__).with_name("code_child.py")
_MARK = "EAGLE_FSD_PROGRAM"
_MAX_REPLY_BYTES = 1000
_NAMESPACES = "--user --map-root-user --mount --pid --net --ipc --fork --kill-child --mount-proc"


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        status: "passed" (it ran to its end), "failed" (an exception or an early exit left it),
            "timeout", or "crashed" (its process died without a word).
        detail: the exception or the way it died; empty after a pass.
    """

    status: str
    detail: str = ""

    @property
    def has_passed(self) -> bool:
        return self.status == "passed"


def run_program(
    program: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    use_namespaces: bool = True,
) -> Outcome:
    """Runs `program`, named "program" as if imported, and returns when nothing of it is left.

    What it prints is thrown away, its standard input is empty, and only Python's standard library
    can be imported. Its working folder and HOME is a fresh folder, removed afterwards.

    Args:
        program: Python source; a pass means that its last statement ran.
        timeout_s: wall-clock seconds, > 0, the start of the process included.
        memory_bytes: of address space, 64 MiB at least, for it and each process it might start.
        use_namespaces: new Linux namespaces where the kernel allows them.

    Raises:
        ValueError: if a limit is out of range.
        OSError: if no process can be started or no file written.
    """
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be > 0 and finite, got {timeout_s}")
    if memory_bytes < 2**26:
        raise ValueError(f"memory_bytes must be >= {2**26} (64 MiB), got {memory_bytes}")
    with (
        tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
    ):
        source.write(program.encode("utf-8", "replace"))
        source.seek(0)
        run = _Run(Path(folder).resolve(), namespaces() if use_namespaces else ())
        return run.outcome(source.fileno(), timeout_s, memory_bytes)


@functools.cache
def namespaces() -> tuple[str, ...]:
    """The command that starts another in new namespaces; empty where this machine has none."""
    unshare = shutil.which("unshare") if sys.platform == "linux" else None
    if unshare is None:
        return ()
    prefix = (unshare, *_NAMESPACES.split(), "--")
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-I", "-S", "-c", "pass"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return prefix if done.returncode == 0 else ()


def check_execution() -> None:
    """Makes sure that a program can pass here, before failures are blamed on programs.

    Raises:
        RuntimeError: if an empty program does not pass.
    """
    outcome = run_program("", timeout_s=60.0)
    if not outcome.has_passed:
        raise RuntimeError(
            f"programs cannot be run here: an empty one {outcome.status} ({outcome.detail}); "
            "leave out --allow-code-execution"
        )


class _Run:
    """One process from its start to the last of its descendants."""

    def __init__(self, folder: Path, prefix: tuple[str, ...]) -> None:
        self._folder = folder
        self._prefix = prefix
        self._mark = secrets.token_hex(16)
        self._token = secrets.token_hex(16).encode()

    def outcome(self, source_fd: int, timeout_s: float, memory_bytes: int) -> Outcome:
        """Starts the process, waits for its reply and ends it."""
        deadline = time.monotonic() + timeout_s
        with _pipe() as (token_read, token_write), _pipe() as (reply_read, reply_write):
            os.write(token_write, self._token)
            stage = "confine" if self._prefix else "run"
            numbers = (token_read, reply_write, memory_bytes, int(timeout_s) + 1)
            python = (sys.executable, "-I", "-S", "-X", "utf8")
            process = subprocess.Popen(
                [*self._prefix, *python, _CHILD, stage, self._folder, *map(str, numbers)],
                cwd=self._folder,
                env={"HOME": str(self._folder), "TMPDIR": str(self._folder), _MARK: self._mark},
                stdin=source_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(token_read, reply_write),
                start_new_session=True,
            )
            try:
                os.close(reply_write)
                reply, is_complete = _read_reply(reply_read, self._token, deadline)
                if not reply and is_complete:  # it may close the pipe and go on
                    is_complete = _has_ended(process, deadline)
            finally:
                self._end(process)
        if reply == self._token:
            return Outcome("passed")
        if reply:
            return Outcome("failed", reply.decode("utf-8", "replace"))
        if not is_complete:
            return Outcome("timeout", f"stopped after {timeout_s:g} s")
        return Outcome("crashed", _death(process.returncode))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the session, then whatever left it, until nothing is found."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        give_up = time.monotonic() + 10.0
        while (left := list(self._left(process.pid))) and time.monotonic() < give_up:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _left(self, session: int) -> Iterator[int]:
        """Living processes of the session, or with our mark in the environment they began with."""
        mark = f"{_MARK}={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                # After the name in parentheses: state, parent, group, session.
                state, _, _, of_session = (
                    entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[:4]
                )
                if state not in b"ZX" and (
                    int(of_session) == session or mark in entry.joinpath("environ").read_bytes()
                ):
                    yield int(entry.name)
            except (OSError, ValueError):
                continue  # it ended meanwhile, or is another user's


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe; an end that was closed before is let be."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


def _read_reply(descriptor: int, token: bytes, deadline: float) -> tuple[bytes, bool]:
    """What came until it was the token or the other end closed, cut off; whether it was in time."""
    reply = b""
    while reply != token and len(reply) < _MAX_REPLY_BYTES:
        wait_s = deadline - time.monotonic()
        if wait_s <= 0 or not select.select([descriptor], [], [], wait_s)[0]:
            return reply, False
        block = os.read(descriptor, _MAX_REPLY_BYTES)
        if not block:
            break
        reply += block
    return reply, True


def _has_ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _death(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode} before its end"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
