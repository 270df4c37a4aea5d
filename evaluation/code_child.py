"""The process in which a program under test runs; started by `code_execution`, by its path.

It gets `STAGE FOLDER TOKEN_FD RESULT_FD MEMORY_BYTES CPU_S` and the program on its standard input.
In the stage "confine", inside new namespaces, it makes every mount but its folder read-only, gives
up its capabilities and starts itself again, so that nothing of that work is left in memory. In
the stage "run" it limits itself, refuses by an audit hook what a solution has no need for, and
runs the program. Only the standard library is used, and nothing of this package.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import call
from types import ModuleType
from typing import Any, NoReturn

MAX_FILE_BYTES = 2**20
MAX_WRITES = 64  # files and folders made: with their size a limit on the disk that is used
MAX_PROCESSES = 64
MAX_OPEN_FILES = 64

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNREADABLE = frozenset(("proc", "sys", "dev"))
_DEVICES = frozenset(("/dev/null", "/dev/urandom", "/dev/random"))
_FILE_KIND, _FOLDER_KIND = 0o170000, 0o040000  # of st_mode

# Events that are refused, by their first part or by the whole of it.
_REFUSED = (
    "ctypes socket subprocess pty fcntl gc sqlite3 syslog resource ftplib smtplib webbrowser "
    "os.fork os.forkpty os.exec os.posix_spawn os.spawn os.system os.kill os.killpg os.chdir "
    "os.symlink os.link os.chown os.chflags os.setxattr os.removexattr os.lockf "
    "signal.pthread_kill sys._current_frames sys._current_exceptions sys.settrace sys.setprofile "
    "sys.addaudithook"
)
# Native modules that open files, start processes or reach memory without an event.
_REFUSED_MODULES = (
    "posix ctypes _ctypes _posixsubprocess _posixshmem _multiprocessing _sqlite3 _gdbm _dbm "
    "readline _tkinter _curses _ssl nis ossaudiodev _testcapi _testinternalcapi "
    "_xxsubinterpreters _interpreters"
)
# Functions of `os` that have no event.
_REMOVED = (
    "read readv pread preadv sendfile splice copy_file_range dup dup2 mkfifo mknod setsid setpgid "
    "setpgrp chroot unshare setns pidfd_open memfd_create umask"
)
# By event: how many of its arguments are paths, and where descriptors of folders follow them.
_CHANGES = {
    "os.remove": (1, 1),
    "os.rmdir": (1, 1),
    "os.mkdir": (1, 2),
    "os.rename": (2, 2),
    "os.truncate": (1, 2),
    "os.utime": (1, 3),
    "os.chmod": (1, 2),
}


def guard(folder: str, secret_fds: frozenset[int]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses what leaves the folder or the process.

    A program may put functions of its own in the place of any that can be named. So the hook is
    made of closures that hold all that they call; it takes plain texts as paths only, whose
    methods cannot be replaced, and compares them as they stand, which suffices where links cannot
    be made.

    Args:
        folder: where the program may write and what it starts in, no symbolic link in its path.
        secret_fds: descriptors that it may not open.
    """
    refused, modules = frozenset(_REFUSED.split()), frozenset(_REFUSED_MODULES.split())
    check_change = _change_guard(folder)
    check_open = _open_guard(folder, secret_fds, check_change)
    changes, refuse = _CHANGES, _refuse
    import_error = ImportError

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in refused or event.partition(".")[0] in refused:
            refuse(event)
        if event == "import" and args[0] in modules:
            raise import_error("importing " + args[0] + " is not allowed here")
        if event == "open":
            check_open(args[0], args[2])
        elif event in changes:
            num_paths, first_folder = changes[event]
            for descriptor in args[first_folder:]:
                if descriptor != -1:
                    refuse(event + " relative to a descriptor")
            for path in args[:num_paths]:
                check_change(event, path)

    return hook


def _refuse(what: str) -> NoReturn:
    raise PermissionError(what + " is not allowed here")


def _path_parser(folder: str) -> Callable[[str, Any], list[str]]:
    """The parts of an event's path, from the root."""
    type_of, text, data, refuse = type, str, bytes, _refuse

    def parts_of(event: str, path: Any) -> list[str]:
        if type_of(path) is data:
            path = path.decode("utf-8", "surrogateescape")
        if type_of(path) is not text:
            refuse(event + " of a path that is no plain text")
        full = path if path[:1] == "/" else folder + "/" + path
        parts = [part for part in full.split("/") if part not in ("", ".")]
        if ".." in parts:
            refuse(event + " of a path with ..")
        return parts

    return parts_of


def _change_guard(folder: str) -> Callable[[str, Any], None]:
    """Refuses a change outside the folder, and too many files in it."""
    parts_of, refuse, max_writes = _path_parser(folder), _refuse, MAX_WRITES
    num_writes = 0

    def check(event: str, path: Any) -> None:
        nonlocal num_writes
        real = "/" + "/".join(parts_of(event, path))
        if real == "/dev/null" and event == "open":
            return
        if real != folder and not real.startswith(folder + "/"):
            refuse(event + " outside the program's folder")
        num_writes += event in ("open", "os.mkdir")
        if num_writes > max_writes:
            refuse("making so many files")

    return check


def _open_guard(
    folder: str, secret_fds: frozenset[int], check_change: Callable[[str, Any], None]
) -> Callable[[Any, int], None]:
    """Refuses to open what tells about other processes, folders, and the secret descriptors."""
    parts_of, refuse, stat = _path_parser(folder), _refuse, os.stat
    write_flags, devices, unreadable = _WRITE_FLAGS, _DEVICES, _UNREADABLE
    file_kind, folder_kind = _FILE_KIND, _FOLDER_KIND
    type_of, integer, machine_error = type, int, OSError

    def check(path: Any, flags: int) -> None:
        if type_of(path) is integer:
            if path in secret_fds:
                refuse("opening this descriptor")
            return
        if flags & write_flags:
            check_change("open", path)
            return
        parts = parts_of("open", path)
        real = "/" + "/".join(parts)
        try:
            # Paths could be relative to the descriptor of a folder, which no event tells.
            is_folder = stat(real).st_mode & file_kind == folder_kind
        except machine_error:
            is_folder = False
        if is_folder or (parts[0] in unreadable and real not in devices):
            refuse("opening " + real)

    return check


def confine(folder: str) -> None:
    """Leaves only `folder` writable in this mount namespace and gives up all capabilities.

    A kernel before 5.12 cannot make all mounts read-only at once; there the audit hook is what
    remains. The capabilities go when the process starts itself again.
    """
    import ctypes  # only here: the stage that runs the program must not have it

    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, at_recursive, read_only, mount_setattr = -100, 0x8000, 1, 442
    ms_bind = 0x1000
    path = os.fsencode(folder)

    def set_attributes(mount: bytes, flags: int, added: int, cleared: int) -> None:
        attributes = (ctypes.c_uint64 * 4)(added, cleared, 0, 0)
        libc.syscall(mount_setattr, at_fdcwd, mount, flags, attributes, ctypes.c_size_t(32))

    if libc.mount(path, path, None, ctypes.c_ulong(ms_bind), None) == 0:
        set_attributes(b"/", at_recursive, read_only, 0)
        set_attributes(path, 0, 0, read_only)
        os.chdir(folder)  # the working folder so far is on the mount below
    pr_capbset_drop, pr_set_no_new_privs = 24, 38
    for capability in range(64):
        libc.prctl(pr_capbset_drop, ctypes.c_ulong(capability), 0, 0, 0)
    libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0)


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Sets the limits of this process; the one on processes does not bind root."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        # A lower limit of the machine's stays, and macOS refuses some of them.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def proof(token_fd: int, result_fd: int) -> Callable[[], None]:
    """What tells the parent that the program ran to its end.

    The token stays in the pipe until then, not in this process's memory.
    """
    read, write, leave = os.read, os.write, os._exit

    def prove() -> None:
        write(result_fd, read(token_fd, 64))
        leave(0)  # at once: neither threads nor exit handlers of the program may go on

    return prove


def run(folder: str, token_fd: int, result_fd: int) -> None:
    """Runs the program of the standard input in a fresh module; ends the process."""
    source = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write, leave = os.write, os._exit
    try:
        # The steps are in no variable while the program runs, so that no frame of the stack
        # leads to the proof: `map` and `deque` hold them, and `gc` is refused.
        steps = [_steps(source, folder, token_fd, result_fd)]
        deque(steps.pop(), maxlen=0)
    except BaseException as error:  # noqa: BLE001  SystemExit too is a program that did not finish
        words = f"{type(error).__name__}: {_message(error)}"
        write(result_fd, words.encode("utf-8", "replace")[:500])
        leave(1)


def _steps(source: bytes, folder: str, token_fd: int, result_fd: int) -> Iterator[None]:
    """The program, then the proof: an exception of the first keeps the second from happening."""
    prove = proof(token_fd, result_fd)
    module = ModuleType("program")  # as imported: no main block of its own
    code = compile(source, "<program>", "exec", dont_inherit=True)
    for name in _REMOVED.split():
        for holder in (os, sys.modules["posix"]):
            vars(holder).pop(name, None)
    os.supports_dir_fd.clear()  # what removes a tree by descriptors does it by paths then
    vars(_posixsubprocess)["fork_exec"] = _refuse_process
    vars(sys)["settrace"] = _keep_trace
    sys.modules["program"] = sys.modules["__main__"] = module
    sys.addaudithook(guard(folder, frozenset((token_fd, result_fd))))
    steps: tuple[Callable[[], None], ...] = (partial(exec, code, vars(module)), prove)
    return map(call, steps)


def _refuse_process(*_arguments: object) -> NoReturn:
    raise PermissionError("starting a process is not allowed here")


def _keep_trace(function: object) -> None:
    """Lets `doctest` put back that nothing traces; the event would not tell what is set."""
    if function is not None:
        _refuse("sys.settrace")


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the program's own class: its text may raise anything
        return "no text"


def main() -> None:
    """One stage; see the head of this file."""
    stage, folder, *numbers = sys.argv[1:]
    if stage == "confine":
        confine(folder)
        script = [__file__, "run", folder, *numbers]
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-X", "utf8", *script])
    token_fd, result_fd, memory_bytes, cpu_s = map(int, numbers)
    limit(memory_bytes, cpu_s)
    run(folder, token_fd, result_fd)


if __name__ == "__main__":
    main()
