"""One request at a time, and no way to wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import TargetModel
from eagle_fsd.turnstile import Turnstile
from tests.stubs import head_drafter, tiny_model

PROMPT = torch.tensor([[5, 6, 7]])


def two_decoders(patience_s: float = 60.0) -> tuple[SpeculativeDecoder, SpeculativeDecoder]:
    """Two decoders over one target."""
    target = TargetModel(tiny_model())
    target.turnstile = Turnstile(patience_s)
    return tuple(SpeculativeDecoder(target, head_drafter(target)) for _ in range(2))  # type: ignore[return-value]


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(work())
        except RuntimeError as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    return box[0]


def test_two_decoders_over_one_target_do_not_mix() -> None:
    first, second = two_decoders()
    expected = first.generate(PROMPT, max_new_tokens=20).token_ids
    stream = first.stream(PROMPT, max_new_tokens=20)
    ids = [token.id for _ in range(4) for token in next(stream).tokens]
    with pytest.raises(RuntimeError, match="still open in this thread"):
        second.generate(PROMPT, max_new_tokens=5)
    ids += [token.id for step in stream for token in step.tokens]
    assert ids == expected
    assert second.generate(PROMPT, max_new_tokens=20).token_ids == expected


def test_a_request_inside_an_observer_is_refused_in_any_thread() -> None:
    decoder, _ = two_decoders()

    def nested() -> Any:
        return decoder.generate(
            PROMPT, max_new_tokens=4, observer=lambda *_: decoder.plain(PROMPT, max_new_tokens=2)
        )

    assert "cannot start another one" in str(in_thread(nested))
    with pytest.raises(RuntimeError, match="cannot start another one"):
        nested()
    assert len(decoder.generate(PROMPT, max_new_tokens=4).token_ids) == 4


def test_waiting_for_a_stream_that_nobody_reads_ends() -> None:
    decoder, _ = two_decoders(patience_s=0.2)
    streams: list[Any] = []

    def leave_open() -> None:
        streams.append(decoder.stream(PROMPT, max_new_tokens=20))
        next(streams[0])

    in_thread(leave_open)  # the thread ends, the stream stays
    with pytest.raises(RuntimeError, match="without being read"):
        decoder.generate(PROMPT, max_new_tokens=2)
    streams[0].close()
    assert len(decoder.generate(PROMPT, max_new_tokens=2).token_ids) == 2


def test_a_worker_that_left_its_own_stream_open_does_not_hang() -> None:
    decoder, _ = two_decoders(patience_s=0.2)

    def reenter() -> Any:
        stream = decoder.stream(PROMPT, max_new_tokens=20)
        next(stream)
        return decoder.generate(PROMPT, max_new_tokens=2)

    assert "without being read" in str(in_thread(reenter))


def test_a_stream_begun_here_and_read_elsewhere_is_waited_for() -> None:
    decoder, _ = two_decoders()
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    next(stream)
    is_read = threading.Event()

    def read_on() -> None:
        next(stream)
        is_read.set()
        for _ in stream:
            pass

    reader = threading.Thread(target=read_on, daemon=True)
    reader.start()
    assert is_read.wait(timeout=30)
    assert len(decoder.generate(PROMPT, max_new_tokens=3).token_ids) == 3
    reader.join(timeout=30)
    assert not reader.is_alive()
