"""One generation at a time on the shared decoder, in the order the requests came."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from eagle_fsd.acceptance import build_rule
from eagle_fsd.chat import encode_prompt
from eagle_fsd.decoder import SpeculativeDecoder, Step
from eagle_fsd.demo.answer import Answer, Lens, nothing_spent
from eagle_fsd.demo.render import Turn
from eagle_fsd.demo.settings import Settings

MAX_WAITING: Final = 64
_TREE_EVERY_S: Final = 0.3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a visitor asks for.

    Attributes:
        message: the new message.
        turns: the chat before it, oldest first; those without an answer are not sent.
        settings: of this message.
        is_comparison: answer twice, by plain decoding and by the tree.
        seed: of the noise, the same for both answers.
        num_forgotten: oldest turns that the message before went without; where to look first for
            how many this one goes without.
    """

    message: str
    turns: tuple[Turn, ...]
    settings: Settings
    is_comparison: bool
    seed: int
    num_forgotten: int = 0

    @classmethod
    def new(
        cls,
        message: str,
        turns: Sequence[Turn],
        settings: Settings,
        *,
        is_comparison: bool,
        num_forgotten: int = 0,
    ) -> Request:
        """A request with a seed of its own.

        Raises:
            ValueError: for a message without text.
        """
        if not message.strip():
            raise ValueError("write a message first")
        message = message.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        seed = secrets.randbits(31)
        return cls(message, tuple(turns), settings, is_comparison, seed, num_forgotten)

    def messages(self, num_forgotten: int) -> list[dict[str, str]]:
        """The chat as the template takes it, without the oldest turns."""
        system = self.settings.system
        chat = [{"role": "system", "content": system}] if system else []
        for turn in self.turns[num_forgotten:]:
            if turn.answer.text:
                chat.append({"role": "user", "content": turn.message})
                chat.append({"role": "assistant", "content": turn.answer.text})
        return [*chat, {"role": "user", "content": self.message}]


class Job:
    """A request on its way. One thread writes its answers, any may look or stop it.

    Attributes:
        request: what was asked.
        answers: one for each arm that has begun (plain decoding first in a comparison).
        future: its place in the worker's queue.
        num_forgotten: oldest turns that were not sent, for want of room; None before it is known.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answers: tuple[Answer, ...] = ()
        self.future: Future[None] | None = None
        self.num_forgotten: int | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._done = threading.Event()
        self._seen = time.monotonic()

    def stop(self) -> None:
        """Ends it before its next step, or at once while it waits."""
        self._stop.set()
        if self.future is not None:
            self.future.cancel()

    def look(self) -> tuple[Answer, ...]:
        """The answers so far; a job that nobody looks at is ended."""
        self._seen = time.monotonic()
        return self.answers

    @property
    def is_stopped(self) -> bool:
        """Whether somebody stopped it."""
        return self._stop.is_set()

    @property
    def is_done(self) -> bool:
        """Whether its answers will not change any more, and the decoder is free of it."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What ended it, when that was an error."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it is done; False after the timeout."""
        return self._done.wait(timeout_s)

    def is_wanted(self, patience_s: float) -> bool:
        """Whether nobody stopped it and somebody looked within the last `patience_s`."""
        return not self.is_stopped and time.monotonic() - self._seen < patience_s

    def finish(self, error: BaseException | None) -> None:
        """Marks it as done."""
        self._error = error
        self._done.set()


class Worker:
    """The only thread that uses the decoder and its tokenizer.

    Args:
        decoder: with a drafter and a tokenizer.
        patience_s: how long a job goes on that nobody looks at: the page that asked is gone.
    """

    def __init__(self, decoder: SpeculativeDecoder, patience_s: float = 10.0) -> None:
        self._decoder = decoder
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decoder")
        self._lock = threading.Lock()
        self._jobs: list[Job] = []  # in order; the first one runs

    @property
    def num_jobs(self) -> int:
        """Jobs that run or wait."""
        return len(self._jobs)

    def submit(self, request: Request) -> Job:
        """Puts a request at the end of the queue.

        Raises:
            RuntimeError: too many wait already, or the worker is closed.
        """
        job = Job(request)
        with self._lock:
            if len(self._jobs) > MAX_WAITING:
                raise RuntimeError(f"{MAX_WAITING} requests are waiting already; try again later")
            job.future = self._pool.submit(self._run, job)
            self._jobs.append(job)
        job.future.add_done_callback(partial(self._finish, job))
        return job

    def _finish(self, job: Job, future: Future[None]) -> None:
        with self._lock:
            self._jobs.remove(job)
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, ValueError):  # those are the visitor's
            _logger.warning("a request failed: %s", " ".join(str(error).split()))
        job.finish(error)

    def num_before(self, job: Job) -> int:
        """How many jobs are served before this one; 0 when it runs or is done."""
        with self._lock:
            return self._jobs.index(job) if job in self._jobs else 0

    def close(self) -> None:
        """Stops everything and waits for the step that runs."""
        for job in tuple(self._jobs):
            job.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job) -> None:
        if not job.is_wanted(self._patience_s):
            return
        request, decoder = job.request, self._decoder
        settings = request.settings
        number = self._num_forgotten(job)
        if not job.is_wanted(self._patience_s):
            return
        job.num_forgotten = number
        messages = request.messages(number)
        options: dict[str, Any] = settings.sampling | {"seed": request.seed}
        start = Answer(is_greedy=settings.is_greedy, seed=request.seed)
        if request.is_comparison:
            plain = decoder.plain_stream(messages, **options)
            self._stream(job, plain, Lens(decoder.tokenizer), replace(start, rule="plain"))
        rule = build_rule(settings.rule)
        lens = Lens(decoder.tokenizer, settings.divergence)
        tree = decoder.stream(messages, rule=rule, tree=settings.tree, observer=lens, **options)
        self._stream(job, tree, lens, replace(start, rule=rule.spec, nats=nothing_spent(rule)))

    def _stream(
        self, job: Job, steps: Generator[Step, None, None], lens: Lens, answer: Answer
    ) -> None:
        """Decodes one answer into the job until its end, or until nobody wants it."""
        before = job.answers
        tree_shown = -_TREE_EVERY_S
        step: Step | None = None
        with closing(steps):
            while job.is_wanted(self._patience_s) and not (step is not None and step.result):
                begin = time.perf_counter()
                step = next(steps)
                now = time.perf_counter()
                answer = answer.after(step, lens.rescues(step), now - begin)
                if now - tree_shown >= _TREE_EVERY_S:  # dozens of texts, too dear for every step
                    answer = replace(answer, tree=lens.tree(step) or answer.tree)
                    tree_shown = now
                job.answers = (*before, answer)
        if step is not None:
            job.answers = (*before, replace(answer, tree=lens.tree(step) or answer.tree))

    def _num_forgotten(self, job: Job) -> int:
        request, decoder = job.request, self._decoder
        limit = decoder.target.max_positions
        room = min(request.settings.max_new_tokens, limit // 4)

        def length(number: int) -> int:
            if job.is_stopped:  # any answer will do, as long as it comes at once
                return 0
            messages = request.messages(number)
            return encode_prompt(
                messages, decoder.tokenizer, decoder.target.vocabulary_size
            ).numel()

        return num_forgotten(length, len(request.turns), limit - room, request.num_forgotten)


def num_forgotten(length: Callable[[int], int], num_turns: int, limit: int, guess: int = 0) -> int:
    """The fewest oldest turns to leave out so that the prompt fits.

    Args:
        length: tokens of the prompt without so many turns; never more for more turns. It costs a
            tokenization of the chat, so it is asked seldom.
        num_turns: before the new message.
        limit: tokens that the prompt may have.
        guess: where to look first; what the message before left out is right, or nearly so.

    Returns:
        A number in 0..num_turns; num_turns also where the message alone is too long, which the
        decoder refuses or answers in the room that is left.
    """

    def fits(number: int) -> bool:
        return length(number) <= limit

    low, high = 0, num_turns
    for number in (guess, guess - 1, guess + 1):
        if low <= number < high:
            low, high = (low, number) if fits(number) else (number + 1, high)
    return bisect_left(range(high), True, lo=low, key=fits)
