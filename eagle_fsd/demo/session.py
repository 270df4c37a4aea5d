"""Chats by browser session: who said what, and which job is whose."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from eagle_fsd.demo.answer import Answer
from eagle_fsd.demo.render import Turn, error_text
from eagle_fsd.demo.settings import Settings
from eagle_fsd.demo.worker import Job, Request, Worker

MAX_SESSIONS: Final = 200


@dataclass(eq=False)
class Session:
    """One browser tab's chat.

    Attributes:
        turns: oldest first.
        num_forgotten: turns at the beginning that the last message went without.
        job: what is being answered, None when nothing is.
        last: the newest job of this chat, whether it runs or not; None after `clear`.
        is_coloured: whether tokens show their origin.
    """

    turns: list[Turn] = field(default_factory=list)
    num_forgotten: int = 0
    job: Job | None = None
    last: Job | None = None
    is_coloured: bool = True

    def ask(self, worker: Worker, message: str, settings: Settings) -> Job:
        """Sends a message.

        Raises:
            ValueError: for a message without text.
            RuntimeError: while an answer is being written, or when too many requests wait.
        """
        return self._submit(worker, message, settings, is_comparison=False)

    def retry(self, worker: Worker, settings: Settings) -> Job:
        """Asks the last message again, in place of its answer.

        Raises:
            ValueError: when nothing was asked yet.
            RuntimeError: as `ask`.
        """
        self._check_free()
        if not self.turns:
            raise ValueError("there is nothing to retry yet; send a message first")
        *before, last = self.turns
        job = self._submit(worker, last.message, settings, is_comparison=False, turns=before)
        self.turns = before
        self.num_forgotten = min(self.num_forgotten, len(before))
        return job

    def compare(self, worker: Worker, message: str, settings: Settings) -> Job:
        """Answers a message by plain decoding and by the tree, beside the chat.

        Args:
            worker: runs both.
            message: empty takes the last one of the chat, with what came before it.
            settings: of the tree, and what both share.

        Raises:
            ValueError, RuntimeError: as `ask`.
        """
        self._check_free()
        turns = self.turns
        if not message.strip() and turns:
            message, turns = turns[-1].message, turns[:-1]
        return self._submit(worker, message, settings, is_comparison=True, turns=turns)

    def stop(self) -> None:
        """Ends what is being answered; the text so far stays."""
        if self.job is not None:
            self.job.stop()

    def clear(self) -> None:
        """Forgets the chat, and what is being answered with it."""
        self.stop()
        self.job = self.last = None
        self.turns = []
        self.num_forgotten = 0

    def settle(self, job: Job) -> None:
        """Takes what a job has made into the chat, once, unless the chat was cleared meanwhile.

        The page does so when it sees that a job is done; a request that comes sooner does it first.
        """
        if self.job is not job:
            return
        self.job = None
        if job.request.is_comparison:
            return
        answer = job.answers[-1] if job.answers else Answer()
        self.turns.append(Turn(job.request.message, answer, ending_text(job)))
        if job.num_forgotten is not None:
            self.num_forgotten = job.num_forgotten

    def _check_free(self) -> None:
        """Takes in what is done; refuses another request while something is not."""
        if self.job is not None and self.job.is_done:
            self.settle(self.job)
        if self.job is not None:
            raise RuntimeError(
                "the answer is being stopped; try again in a moment"
                if self.job.is_stopped
                else "an answer is still being written; stop it first"
            )

    def _submit(
        self,
        worker: Worker,
        message: str,
        settings: Settings,
        *,
        is_comparison: bool,
        turns: list[Turn] | None = None,
    ) -> Job:
        self._check_free()
        before = self.turns if turns is None else turns
        request = Request.new(
            message,
            before,
            settings,
            is_comparison=is_comparison,
            num_forgotten=self.num_forgotten,
        )
        self.job = self.last = worker.submit(request)
        return self.job


def ending_text(job: Job) -> str:
    """How a job ended, where its answer does not say it itself; empty for nothing."""
    if job.error is not None:
        return error_text(job.error)
    if job.answers and job.answers[-1].finish_reason is not None:
        return ""
    return "stopped" if job.is_stopped else "ended early: the page that asked was gone for a while"


class Sessions:
    """All chats, by the session that the browser was given; the longest unused one goes first."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def get(self, key: str) -> Session:
        """The session of that key, made when it is new."""
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._limit:
            _, oldest = self._sessions.popitem(last=False)
            oldest.stop()
        return session

    def leave(self, key: str) -> None:
        """The tab is gone: nothing of it runs or waits any longer.

        Its chat stays until others need the place: a lost connection looks the same, and comes
        back.
        """
        if key in self._sessions:
            self._sessions[key].stop()
