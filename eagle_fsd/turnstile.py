"""One request at a time, without a way to wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """Lets one request in; the next one waits until the first has left.

    A request that is a generator is *running* while its code runs and *open* between its steps.
    An open one goes on only if somebody reads it, so waiting for it is limited.

    Args:
        patience_s: how long to wait for an open request in which nothing happens.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self._condition = threading.Condition()
        self._patience_s = patience_s
        self._is_taken = False
        self._runner: int | None = None  # the thread that runs the request at this moment
        self._last_runner: int | None = None
        self._num_steps = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Waits for its turn and keeps it until the block is left.

        Raises:
            RuntimeError: the turn is held by a request that this very thread runs or has left
                open, or by one that nobody reads.
        """
        with self._condition:
            while self._is_taken:
                self._wait()
            self._is_taken = True
        try:
            yield
        finally:
            with self._condition:
                self._is_taken = False
                self._runner = self._last_runner = None
                self._condition.notify_all()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Marks one step of the request that holds the turn."""
        with self._condition:
            self._runner = self._last_runner = threading.get_ident()
        try:
            yield
        finally:
            with self._condition:
                self._runner = None
                self._num_steps += 1
                self._condition.notify_all()

    def _wait(self) -> None:
        """Waits for the holder to make a step or to leave."""
        me = threading.get_ident()
        if self._runner == me:
            raise RuntimeError("a request cannot start another one on the same target")
        is_main = threading.current_thread() is threading.main_thread()
        if self._runner is None and self._last_runner == me and is_main:
            raise RuntimeError(
                "another stream on this target is still open in this thread; read it to its end or "
                "close() it"
            )
        # A worker of a pool may have made the last step of a stream that another one reads on.
        steps = self._num_steps
        if self._runner is not None:
            self._condition.wait_for(lambda: not self._is_taken or self._num_steps != steps)
            return
        moved = self._condition.wait_for(
            lambda: not self._is_taken or self._runner is not None, timeout=self._patience_s
        )
        if not moved:
            raise RuntimeError(
                f"another stream on this target was open for {self._patience_s:g} s without being "
                "read; read it to its end or close() it"
            )
