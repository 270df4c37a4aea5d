"""Asks a judge behind any OpenAI-compatible server, patiently."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "OPENAI_API_KEY"

_LONGEST_BACKOFF_S = 60.0
# A server that asks for more than this is not waited for.
_LONGEST_WAIT_S = 600.0
_LONGEST_MESSAGE = 300
# A reply that trickles in, so that the server is never silent, may take this many timeouts.
_TIMEOUTS_OF_A_REPLY = 5
_POLL_S = 0.1
_MOST_TOKENS = 2**53
_FATAL = frozenset((401, 403, 404))  # every other request would get the same
_PASSING = frozenset((408, 409, 425, 429))


class RequestError(Exception):
    """One request failed for good; others may not."""


class ServerError(RuntimeError):
    """No request can succeed: the server is not reached, or refuses the key or the model."""


class StoppedError(Exception):
    """The client was stopped before the request was answered."""


@dataclass(frozen=True)
class JudgeConfig:
    """How the judge is asked.

    Attributes:
        model: the judge, by the server's name for it.
        base_url: of the server, up to and with "/v1".
        temperature: 0 or more; FastChat asks at 0.
        max_tokens: of a judgment, >= 1; FastChat allows 2048.
        request: further fields of each request, which win over ours; None takes a field out.
        timeout_s: seconds without a byte of the server, > 0; a whole reply may take five times as
            long.
        num_retries: after a failure that can pass, >= 0.
        retry_wait_s: before the first retry, > 0; each further one waits twice as long.
        seed: of the waits' jitter.
    """

    model: str
    base_url: str
    temperature: float = 0.0
    max_tokens: int = 2048
    request: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 120.0
    num_retries: int = 6
    retry_wait_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ValueError("the judge's name is empty; give --judge a model of the server")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        for name, lowest in (("max_tokens", 1), ("num_retries", 0)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be >= {lowest}, got {getattr(self, name)}")
        for name in ("timeout_s", "retry_wait_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"base URL must look like http://localhost:8000/v1, got {self.base_url!r}"
            )
        if url.username is not None or url.password is not None:
            raise ValueError(
                f"base URL must not hold a name or a password; put a key into {KEY_VARIABLE}"
            )

    def body(self, system: str, user: str) -> dict[str, Any]:
        """The fields of one request."""
        ours = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": user},
            ],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        return {k: value for k, value in (ours | dict(self.request)).items() if value is not None}


@dataclass(frozen=True)
class Reply:
    """What the judge wrote.

    Attributes:
        text: may be empty.
        finish_reason: as the server says; "length" means cut at max_tokens.
        prompt_tokens, completion_tokens: as the server counts them; None where it does not.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True)
class _Failure:
    """Why one try gave nothing, and whether another one can."""

    message: str
    is_passing: bool
    is_fatal: bool = False
    retry_after_s: float = 0.0


def read_key() -> str:
    """The key of the environment.

    Raises:
        ValueError: when there is none, or one that cannot be sent.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise ValueError(
            f"{KEY_VARIABLE} is not set; set it in the environment, or give --no-key for a server "
            "that needs none"
        )
    if not key.isascii() or not key.isprintable() or " " in key:  # and the key is not shown
        raise ValueError(f"{KEY_VARIABLE} holds spaces or other characters that no key has")
    return key


class JudgeClient:
    """Asks one question after the other, from any number of threads.

    Args:
        config: how.
        key: for the server; None sends none. It is in no message and no file.

    Raises:
        ImportError: without the openai package.
    """

    def __init__(self, config: JudgeConfig, key: str | None) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                f"judging needs the openai package, which does not import ({error}); install "
                "eagle-fsd[judge]"
            ) from error
        self._config = config
        self._key = key
        self._errors = openai
        self._stopped = threading.Event()
        self._abandoned = threading.Event()
        self._client = openai.OpenAI(
            api_key=key or "none",
            base_url=config.base_url,
            timeout=config.timeout_s,
            max_retries=0,  # ours wait longer and can be stopped
        )
        self._headers: dict[str, Any] = {} if key else {"Authorization": openai.Omit()}

    def ask(self, system: str, user: str, name: str) -> Reply:
        """The judge's reply, after as many tries as it takes.

        Args:
            system: the system message.
            user: the user's message.
            name: of the request; its waits come from it and the seed.

        Raises:
            RequestError: when it failed for good.
            ServerError: when every other request would fail too; the client is stopped then.
            StoppedError: after `stop`.
        """
        rng = random.Random(f"{self._config.seed} {name}")
        body = self._config.body(system, user)
        for num_tries in range(1, self._config.num_retries + 2):
            if self._stopped.is_set():
                raise StoppedError
            outcome = self._try_in_time(body)
            if isinstance(outcome, Reply):
                return outcome
            is_last = num_tries > self._config.num_retries or not outcome.is_passing
            if is_last or outcome.retry_after_s > _LONGEST_WAIT_S:
                tries = f" ({num_tries} tries)" if num_tries > 1 else ""
                if outcome.is_fatal:
                    self.stop()
                    raise ServerError(outcome.message + tries)
                raise RequestError(outcome.message + tries)
            if self._stopped.wait(self._wait_s(num_tries, outcome.retry_after_s, rng)):
                raise StoppedError
        raise AssertionError  # the last try returns or raises

    def stop(self) -> None:
        """Ends all waits and lets no further request begin; those under way are finished."""
        self._stopped.set()

    def abandon(self) -> None:
        """Waits for no request any more, not even for those under way."""
        self.stop()
        self._abandoned.set()

    def _wait_s(self, num_tries: int, retry_after_s: float, rng: random.Random) -> float:
        """Twice as long each time, spread over its upper half; never before the server allows."""
        first = self._config.retry_wait_s
        backoff = min(first * 2.0 ** min(num_tries - 1, 30), _LONGEST_BACKOFF_S)
        return max(backoff * rng.uniform(0.5, 1.0), retry_after_s + first * rng.random())

    def _try_in_time(self, body: dict[str, Any]) -> Reply | _Failure:
        """One try in a thread of its own, which can be given up."""
        found: list[Reply | _Failure] = []
        thread = threading.Thread(target=lambda: found.append(self._try(body)), daemon=True)
        limit_s = _TIMEOUTS_OF_A_REPLY * self._config.timeout_s
        deadline = time.monotonic() + limit_s
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            if self._abandoned.is_set():
                raise StoppedError
            if time.monotonic() > deadline and not found:
                return _Failure(f"no whole answer within {limit_s:g} s", is_passing=True)
        if not found:
            raise RuntimeError("a request failed for no reason that is known; see what is above")
        return found[0]

    def _try(self, body: dict[str, Any]) -> Reply | _Failure:
        errors = self._errors
        extra = {k: value for k, value in body.items() if k not in ("model", "messages")}
        try:
            raw = self._client.chat.completions.with_raw_response.create(
                model=body["model"],
                messages=body["messages"],
                extra_body=extra,
                extra_headers=self._headers,
            )
            return _read_reply(raw.content)
        except _MalformedReplyError as error:
            return _Failure(self._clean(str(error)), is_passing=True)
        except UnicodeEncodeError as error:
            return _Failure(f"the request is no Unicode text: {error}", is_passing=False)
        except errors.APIStatusError as error:
            return self._status_failure(error)
        except errors.APIConnectionError as error:
            # openai's words are the same for all; the cause has the reason.
            cause = error.__cause__
            reason = self._clean(str(cause) if cause is not None and str(cause) else str(error))
            # By name: the HTTP library is another one from version to version.
            if type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
                message = f"no server answers at {self._config.base_url}: {reason}"
                return _Failure(message, is_passing=True, is_fatal=True)
            if isinstance(error, errors.APITimeoutError):
                reason = f"no answer within {self._config.timeout_s:g} s"
            return _Failure(reason, is_passing=True)

    def _status_failure(self, error: Any) -> _Failure:
        status = error.status_code
        is_out_of_money = error.code == "insufficient_quota"
        is_fatal = status in _FATAL or is_out_of_money
        retry_after_s = _retry_after_s(error.response.headers.get("retry-after"))
        message = f"the server answered {status}: {self._clean(error.message)}"
        if retry_after_s > _LONGEST_WAIT_S:
            message += f"; it asks to wait for {retry_after_s:.0f} s"
        is_passing = (status >= 500 or status in _PASSING) and not is_fatal
        return _Failure(message, is_passing, is_fatal, retry_after_s)

    def _clean(self, text: str) -> str:
        """One short line without the key, which some servers repeat."""
        if self._key:
            text = text.replace(self._key, "[key]")
        text = " ".join(text.split())
        return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


class _MalformedReplyError(Exception):
    """The server said 200 and no completion came."""


def _read_reply(content: bytes) -> Reply:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _MalformedReplyError(f"the reply is not JSON: {error}") from error
    try:
        choice = record["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _MalformedReplyError("the reply holds no completion") from error
    if text is not None and not isinstance(text, str):
        raise _MalformedReplyError("the reply's completion is no text")
    usage = record.get("usage")
    counts = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
    return Reply(text or "", reason if isinstance(reason, str) else None, *counts)


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and 0 <= value <= _MOST_TOKENS else None


def _retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header, which has a number or a date; 0 without either."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        # A date without a zone is one of GMT.
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
