"""Between people and tokens: prompts to ids, ids to text as it grows, stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

Prompt = str | Sequence[Mapping[str, Any]] | Tensor


def encode_prompt(prompt: Prompt, tokenizer: Any | None, vocabulary_size: int) -> Tensor:
    """Token ids of one prompt.

    Args:
        prompt: one user message, a list of chat messages ({"role", "content"}), or raw ids [1, P]
            or [P].
        tokenizer: its chat template renders messages; without a template a string is encoded as it
            is.
        vocabulary_size: ids must be below it.

    Returns:
        [P] int64, P >= 1.

    Raises:
        TypeError: for anything else.
        ValueError: for an empty prompt, several prompts, messages that the template refuses or ids
            outside the vocabulary.
    """
    if isinstance(prompt, Tensor):
        return _check_ids(prompt, vocabulary_size)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(
            "prompt must be text, a list of chat messages or input_ids [1, P], got "
            f"{type(prompt).__name__}"
        )
    if prompt and all(isinstance(item, str) for item in prompt):
        raise ValueError(
            f"one prompt at a time: got a list of {len(prompt)} texts; call once for each"
        )
    messages: Sequence[Any] = prompt
    _check_messages(messages)
    if tokenizer is None:
        raise ValueError(
            "text needs a tokenizer and this target came without one; pass tokenizer= or raw "
            "input_ids [1, P]"
        )
    return _check_ids(
        torch.tensor(_render(messages, tokenizer), dtype=torch.int64), vocabulary_size
    )


def _render(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """Ids of chat messages by the tokenizer's template, or of one text without a template."""
    if getattr(tokenizer, "chat_template", None):
        try:
            ids: list[int] = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:  # some templates refuse system messages or two users in turn
            raise ValueError(
                f"the target's chat template refuses these messages: {error}"
            ) from error
    elif len(messages) == 1:
        ids = tokenizer(messages[0]["content"])["input_ids"]
    else:
        raise ValueError(
            "this tokenizer has no chat template for a list of messages; pass one text or raw "
            "input_ids [1, P]"
        )
    return ids


def _check_messages(messages: Sequence[Any]) -> None:
    if not messages:
        raise ValueError(
            "the prompt is empty; give a text, at least one chat message, or input_ids [1, P]"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise TypeError(
                f'chat message {number} must have "role" and "content", got {message!r}'
            )
        if not isinstance(message["content"], str):
            raise TypeError(
                f"content of chat message {number} must be text, got "
                f"{type(message['content']).__name__}"
            )
        if not _is_utf8(message["content"]):
            raise ValueError(
                f"content of chat message {number} holds bytes that are not UTF-8; decode it first"
            )
    if messages[-1]["role"] == "user" and not messages[-1]["content"]:
        raise ValueError("the prompt is empty; give at least one character")


def _is_utf8(text: str) -> bool:
    """False for text with lone surrogates, which is what undecodable bytes become."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_ids(ids: Tensor, vocabulary_size: int) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids must be int64, got {ids.dtype}")
    if ids.dim() == 2 and ids.shape[0] > 1:
        raise ValueError(
            f"one prompt at a time: got input_ids of shape {list(ids.shape)}, want [1, P]; call "
            "once for each"
        )
    if ids.dim() not in (1, 2):
        raise ValueError(f"input_ids must have shape [1, P] or [P], got {list(ids.shape)}")
    ids = ids.reshape(-1).to(torch.int64)
    if ids.numel() == 0:
        raise ValueError("the prompt is empty; give at least one token")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"input_ids must be in [0, {vocabulary_size}), got {low if low < 0 else high}; is it "
            "another model's tokenizer?"
        )
    return ids


class Detokenizer:
    """Turns ids into text as they come, never inside a multi-byte character.

    All pieces joined, `flush` included, are the decoding of all ids. The one exception are bytes
    that make no character: some tokenizers, when they meet one, take back readable text before it,
    which has been shown by then.
    """

    # A character has at most four bytes. More tokens than this without text are no character.
    _MAX_UNREAD = 8

    # Decoding can look back (a leading space, a byte run), so the last readable piece is decoded
    # again with each new one.
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._read = 0

    def add(self, token_id: int) -> str:
        """Takes one id; returns the text that it made readable, which may be none."""
        self._ids.append(token_id)
        known, text = self._decode(self._read), self._decode(len(self._ids))
        is_unread = len(text) <= len(known) or text.endswith("\ufffd")
        if is_unread and len(self._ids) - self._read <= self._MAX_UNREAD:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """The text held back, bytes that never became a character included (as U+FFFD)."""
        text = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        self._start = self._read = len(self._ids)
        return text

    def _decode(self, stop: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._start : stop],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may become one.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Takes a piece; returns the text that is safe to show, and whether a stop string came.

        The stop string itself and all behind it are not shown.
        """
        self._held += text
        found = [place for string in self._strings if (place := self._held.find(string)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, string) for string in self._strings), default=0)
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown, False

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, short of all of it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0


def check_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One stop string or several, as a tuple.

    Raises:
        TypeError: for anything but text.
        ValueError: for an empty stop string, which would stop before the first token.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(
                f"stop must be text or a list of texts, got {string!r}; token ids go to stop_ids"
            )
        if not string:
            raise ValueError("a stop string must not be empty")
    return strings


def special_token_id(string: str, tokenizer: Any) -> int | None:
    """The id of the special token that is written like this; text never shows it."""
    if (
        string in getattr(tokenizer, "all_special_tokens", ())
        or string in tokenizer.get_added_vocab()
    ):
        token_id = tokenizer.convert_tokens_to_ids(string)
        return token_id if isinstance(token_id, int) else None
    return None


def merge_stop_ids(*sources: object) -> frozenset[int]:
    """Every id of every source: generation config, tokenizer, user.

    Args:
        *sources: a whole number, several, a tensor of them, or None each. Negative ids, which some
            configs write for "none", never occur and are left out.

    Raises:
        TypeError: for anything else.
    """
    merged: set[int] = set()
    for source in sources:
        values = source.flatten().tolist() if isinstance(source, Tensor) else source
        ids = values if isinstance(values, list | tuple | set | frozenset) else [values]
        for token_id in ids:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"stop ids must be whole numbers, got {source!r}")
            merged.add(token_id)
    return frozenset(token_id for token_id in merged if token_id >= 0)
