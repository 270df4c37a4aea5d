"""Programs under test: what passes, and what a hostile one can neither fake nor touch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.code_execution import (
    _MARK,
    Outcome,
    _Run,
    check_execution,
    namespaces,
    run_program,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
CONFINEMENTS = [
    pytest.param(False, id="hook"),
    pytest.param(
        True, id="namespaces", marks=pytest.mark.skipif(not namespaces(), reason="kernel forbids")
    ),
]


@pytest.fixture(params=CONFINEMENTS)
def execute(request: pytest.FixtureRequest):
    """Runs a program in either confinement; nothing of it may be left."""

    def run(program: str, timeout_s: float = 20.0, memory_bytes: int = 2**29) -> Outcome:
        return run_program(program, timeout_s, memory_bytes, use_namespaces=request.param)

    before = children()
    yield run
    assert children() <= before


def children() -> set[int]:
    """Living processes below this one, and orphans that run the child's script."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent == os.getpid() or b"code_child" in entry.joinpath("cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "program",
    [
        "",
        "assert sum([1, 2]) == 3",
        "with open('a', 'w') as f: f.write('x')\nassert open('a').read() == 'x'",
        "from pathlib import Path\np = Path('a')\np.write_text('x')\np.rename('b')\n"
        "Path('b').unlink()\nPath('d').mkdir()\nPath('d').rmdir()",
        "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(d + '/x', 'w')",
        "import json, re, math, collections, dataclasses, typing, heapq, datetime, decimal\n"
        "import hashlib, logging, threading, asyncio, unittest, random, statistics",
        "import os\nassert os.path.samefile(os.getcwd(), os.environ['HOME'])",
        "from dataclasses import dataclass\n@dataclass\nclass A: x: 'int'\nassert A(1) == A(1)",
        "if __name__ == '__main__': input()",
        "for _ in range(20000): print('x' * 100)",
        "def f(): pass\nf.__doc__ = '>>> f()'\nimport doctest\nassert doctest.testmod() == (0, 1)",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    ],
)
def test_what_a_solution_does_passes(execute, program: str) -> None:
    assert execute(program) == Outcome("passed")


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("assert 1 == 2, 'no'", "failed"),
        ("def f(:", "failed"),
        ("import numpy", "failed"),
        ("import sys; sys.exit(0)", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "failed"),
        ("import os; os._exit(0)", "crashed"),
        ("import os; os.abort()", "crashed"),
        ("print('passed')\nraise SystemExit", "failed"),
        ("x = [0] * (10 * 2**30 // 8)", "failed"),
        ("x = [bytes(2**20) for _ in range(10**4)]", "failed"),
        ("import os\nos.closerange(0, 4096)", "crashed"),
        ("import os\nfor fd in range(3, 64):\n    os.write(fd, b'0' * 32)", "failed"),
        ("import atexit, sys\natexit.register(print, 'passed')\nsys.exit(0)", "failed"),
    ],
)
def test_a_program_that_does_not_reach_its_end_does_not_pass(execute, program, status) -> None:
    outcome = execute(program)
    assert outcome.status == status
    assert outcome.detail
    assert not outcome.has_passed


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n    try:\n        raise SystemExit\n    except BaseException: pass",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.alarm(0)\n"
        "while True: pass",
        "import os\nos.closerange(0, 4096)\nwhile True: pass",
    ],
)
def test_an_endless_program_is_stopped_in_time(execute, program: str) -> None:
    start = time.monotonic()
    assert execute(program, timeout_s=0.5).status == "timeout"
    assert time.monotonic() - start < 15  # far above, for busy machines


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import socket\nsocket.socket()",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')",
        "import ctypes",
        "import sqlite3",
        "import os\nos.symlink('/etc', 'x')",
        "import os\nos.link('/etc/passwd', 'x')",
        "import os\nos.mkfifo('x')",
        "for n in range(1000): open(str(n), 'w')",
        "with open('x', 'wb') as f:\n    f.write(bytes(10**8))",
        "open('/proc/self/environ').read()",
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
        "import os\nos.open('/', os.O_RDONLY)",
        "import gc\ngc.get_objects()",
        "import sys\nsys._current_frames()",
        "import sys\nsys.settrace(print)",
        "import sys\nsys.setprofile(print)",
    ],
)
def test_what_leaves_the_process_is_refused(execute, program: str) -> None:
    assert execute(program).status == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.remove({path!r})",
        "import os\nos.rename({path!r}, 'x')",
        "import os\nos.truncate({path!r}, 0)",
        "import os\nos.chmod({path!r}, 0)",
        "import os\nos.utime({path!r}, (0, 0))",
        "import os\nos.chdir(os.path.dirname({path!r}))\nos.remove('victim')",
        "import os\nos.open({path!r}, os.O_WRONLY | os.O_TRUNC)",
        "import shutil, os\nshutil.rmtree(os.path.dirname({path!r}))",
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "open({path!r}.encode(), 'r+')",
        "open({path!r} + '.new', 'x')",
        "import os\nopen(os.path.relpath({path!r}), 'w')",
        "import os\nos.path.realpath = os.fsdecode = lambda path: os.getcwd()\nos.remove({path!r})",
        "import builtins, os\nbuiltins.PermissionError = builtins.frozenset = print\n"
        "builtins.type = builtins.str = lambda *_: os.getcwd()\nos.remove({path!r})",
        "import io\nclass P:\n    n = 0\n    def __fspath__(self):\n        P.n += 1\n"
        "        return 'a' if P.n % 2 else {path!r}\n"
        "for _ in range(2): io.FileIO(P(), 'w')\nraise ValueError",
        "class S(str):\n    def startswith(self, *_): return True\nopen(S({path!r}), 'w')",
    ],
)
def test_nothing_outside_the_folder_is_touched(execute, tmp_path: Path, program: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    before = victim.stat()
    assert execute(program.format(path=str(victim))).status in ("failed", "crashed")
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert victim.read_text() == "whole"
    after = victim.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_the_environment_is_empty(execute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "x")
    assert execute("import os\nassert 'SECRET_OF_THE_PARENT' not in os.environ").has_passed


def test_no_frame_or_variable_leads_to_the_proof(execute) -> None:
    program = """
import sys
frame, seen = sys._getframe(), []
while frame:
    seen += frame.f_locals.values()
    frame = frame.f_back
assert not [value for value in seen if getattr(value, '__name__', '') == 'prove']
assert not [value for value in seen if isinstance(value, map)]
"""
    assert execute(program).has_passed


@LINUX
@pytest.mark.skipif(not namespaces(), reason="kernel forbids")
def test_native_code_in_namespaces_is_alone_without_network_and_read_only(tmp_path: Path) -> None:
    """What the kernel enforces, with the audit hook left out."""
    probe = f"""
import os, socket
assert os.getpid() == 1
assert [name for name in os.listdir("/proc") if name.isdigit()] == ["1"]
assert [name for _, name in socket.if_nameindex()] == ["lo"]
try:
    open({str(tmp_path / "x")!r}, "w")
except OSError:
    pass
else:
    raise SystemExit("written")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert int(status["CapEff"], 16) == 0
open("inside", "w").close()
"""
    work = tmp_path / "work"
    work.mkdir()
    child = "evaluation/code_child.py"
    root = Path(__file__).resolve().parents[2]
    # The second stage is replaced by the probe: the first starts what sys.executable names.
    start = (
        f"import sys, runpy, os; sys.argv = ['x', 'confine', {str(work)!r}];"
        f"os.execv = lambda *_: exec_(sys.executable, [sys.executable, '-c', {probe!r}]);"
        f"runpy.run_path({str(root / child)!r}, run_name='__main__')"
    )
    start = f"import os; exec_ = os.execv; {start}"
    done = subprocess.run(
        [*namespaces(), sys.executable, "-c", start], cwd=work, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@LINUX
def test_a_process_that_left_the_session_is_found_and_killed(tmp_path: Path) -> None:
    """A descendant that native code might make: it has left the session and its parent is gone."""
    run = _Run(tmp_path, ())
    program = "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        env={_MARK: run._mark},
        start_new_session=True,
    )
    process.wait()
    assert list(run._left(process.pid))
    run._end(process)
    assert not list(run._left(process.pid))


def test_limits_out_of_range_are_refused() -> None:
    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s must be > 0"):
            run_program("", timeout_s)
    with pytest.raises(ValueError, match="memory_bytes must be >="):
        run_program("", memory_bytes=2**20)


def test_a_machine_that_runs_no_program_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    check_execution()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="programs cannot be run here"):
        check_execution()
