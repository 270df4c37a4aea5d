"""Conversations from files and data sets, cleaned: read -> clean -> drop evaluation questions.

Every stage is a generator that holds one conversation at a time and counts what it leaves out in a
`Tally`, so a corpus of any size passes through in constant memory.
"""

import hashlib
import importlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from eagle_fsd.files import read_lines

LOGGER = logging.getLogger(__name__)

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
}
NGRAM = 13
MIN_PHRASE = 8
MIN_ASCII_LETTERS = 0.9

_TURN_KEYS = ("conversations", "messages", "conversation")
_CHUNK = 2**20
_MAX_ITEM = 2**26
_MAX_LOGGED = 5
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of such bytes
_BLANK = " \t\r\n\ufeff"  # the last is the byte order mark, which a second file may begin with
_DECODER = json.JSONDecoder()
# A string, a quote that opens one without an end, or a character of JSON's structure.
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)
# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf"
_SPACELESS += "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")
_DATASET_MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow", b"\xff\xff\xff\xff": "arrow"}


class UnusableConversationError(ValueError):
    """A conversation whose answers cannot be tokenized and marked; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: "system", "user" or "assistant".
        content: stripped, not empty.
        is_cut: whether a length limit cut the answer off, so that no end of turn is to be learnt.
    """

    role: str
    content: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """An optional system message, then user and assistant in turn; the last is an assistant's."""

    messages: tuple[Message, ...]

    def chat(self) -> list[dict[str, str]]:
        """The messages as `apply_chat_template` takes them."""
        return [{"role": each.role, "content": each.content} for each in self.messages]

    @property
    def opening(self) -> str:
        """The first user message."""
        return next(each.content for each in self.messages if each.role == "user")


@dataclass
class Tally:
    """What was read, kept, left out and shortened, by reason. Stages add to it in place.

    `faults` counts damage in the files (malformed lines, files cut off) that is no whole row. Of
    the rows, num_read = num_kept + the sum of skipped.
    """

    num_read: int = 0
    num_kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON, most frequent reason first."""
        by_reason = {
            name: dict(getattr(self, name).most_common()) for name in ("skipped", "cut", "faults")
        }
        return {"read": self.num_read, "kept": self.num_kept, **by_reason}

    def reasons(self) -> str:
        """The reasons for skipping in one line, most frequent first."""
        found = (self.skipped + self.faults).most_common()
        return ", ".join(f"{reason}: {count}" for reason, count in found) or "nothing was read"

    def table(self) -> str:
        """The counts as lines of text."""
        lines = [f"{'conversations read':<42}{self.num_read:>9}"]
        for title, counter in (
            ("skipped", self.skipped),
            ("cut", self.cut),
            ("file fault", self.faults),
        ):
            lines += [f"  {title + ': ' + key:<40}{n:>9}" for key, n in counter.most_common()]
        lines.append(f"{'conversations kept':<42}{self.num_kept:>9}")
        return "\n".join(lines)


# Reading


def read_rows(
    source: str, tally: Tally, on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """The rows of one source, in order.

    A file may be a JSON array (also several in a row, and one that is cut off in the middle: the
    whole items before the cut are read), JSON lines, parquet or arrow; its content decides, not its
    name. Lines and items that cannot be decoded, or are not in UTF-8, are skipped and counted.
    Anything else is a folder of, or the id of, a Hugging Face data set.

    Args:
        source: path or data-set id.
        tally: gets the damage found in the file.
        on_bytes: called with the number of bytes read since the last call, for a progress bar.

    Raises:
        FileNotFoundError: if `source` looks like a path and there is nothing.
        ValueError: if the file is empty or neither JSON nor JSON lines, or the data set has no
            training split.
        ImportError: if a data set is asked for and the `datasets` package is missing.
    """
    _check_source(source)
    path = Path(source)
    if not path.is_file():
        yield from _dataset_rows(source)
        return
    with path.open("rb") as binary:
        kind = _DATASET_MAGIC.get(binary.read(4))
    if kind is not None:
        yield from _load_dataset(source, kind, data_files=source)["train"]
        return
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        first = _first_character(stream)
        if first not in ("[", "{"):
            found = f"starts with {first!r}" if first else "is empty"
            raise ValueError(
                f"{source!r} {found}; expected a JSON array or JSON lines of conversations"
            )
        rows = _array_items if first == "[" else _lines
        yield from rows(stream, source, tally, _Progress(stream, on_bytes))


def source_identity(source: str) -> dict[str, Any]:
    """Name, size and digest of a file, which hold after a move; the name of anything else.

    Raises:
        FileNotFoundError: if `source` looks like a path and there is nothing.
    """
    _check_source(source)
    path = Path(source)
    if not path.is_file():
        return {"name": source}
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _check_source(source: str) -> None:
    path = Path(source)
    if not path.exists() and (path.suffix or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"no file {source!r}")


class _Progress:
    """Tells a callback how far a text stream has been read, in bytes of the file."""

    def __init__(self, stream: TextIO, on_bytes: Callable[[int], None]) -> None:
        self._stream = stream
        self._on_bytes = on_bytes
        self._position = 0

    def update(self) -> None:
        position = self._stream.buffer.tell()
        self._on_bytes(position - self._position)
        self._position = position


def _first_character(stream: TextIO) -> str:
    """The first character that is no white space; the stream is back at its start afterwards."""
    first = ""
    while not first:
        chunk = stream.read(4096)
        if not chunk:
            break
        first = chunk.lstrip()[:1]
    stream.seek(0)
    return first


class _Window:
    """What of a text is in memory: about one item of a JSON array, from `position` on.

    Raises:
        EOFError: by `grow` and `peek`, at the text's end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = 0
        self.buffer = ""
        self.position = 0

    def grow(self) -> None:
        """Reads as much again as the item already has: the decoding of long items stays linear."""
        rest = len(self.buffer) - self.position
        more = self._stream.read(max(_CHUNK, rest)) if rest < _MAX_ITEM else ""
        if not more:
            raise EOFError
        self._dropped += self.position
        self.buffer, self.position = self.buffer[self.position :] + more, 0

    def peek(self, ignored: str) -> str:
        """The next character that is not ignored; the position is before it."""
        while True:
            self.position = _skip(self.buffer, self.position, ignored)
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            self.grow()

    def decode(self) -> tuple[Any, str]:
        """The item at the position, which is behind it afterwards, and why it is skipped or "".

        Raises:
            EOFError: if it is cut off.
            JSONDecodeError: if it is no JSON.
        """
        while True:
            try:
                item, end = _DECODER.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                if not self._may_go_on(error):
                    raise
                self.grow()
            except (ValueError, RecursionError) as error:  # JSON, but more than can be taken in
                self._pass_over()
                return None, str(error)
            else:
                if isinstance(item, int | float) and end == len(self.buffer):
                    self.grow()  # digits may follow
                    continue
                text = self.buffer[self.position : end]
                self.position = end
                return item, "" if _is_utf8(text) else "not UTF-8 text"

    def place(self, position: int) -> int:
        """Where a position in the buffer is in the text."""
        return self._dropped + position

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether more text could mend it: it lies at the buffer's end or in an open string."""
        is_open = error.msg.startswith("Unterminated string")
        return is_open or error.pos >= len(self.buffer) - 8

    def _pass_over(self) -> None:
        """Moves behind an item that cannot be decoded."""
        while (end := _item_end(self.buffer, self.position)) is None:
            self.grow()
        self.position = end


def _array_items(
    stream: TextIO, source: str, tally: Tally, progress: _Progress
) -> Iterator[dict[str, Any]]:
    """The items of JSON arrays, one behind the other, decoded one by one."""
    window = _Window(stream)
    is_inside = False
    try:
        while True:
            progress.update()
            character = window.peek(_BLANK + "," if is_inside else _BLANK)
            if character == ("]" if is_inside else "["):
                window.position += 1
                is_inside = not is_inside
                continue
            item, problem = window.decode()
            if not is_inside:
                where = window.place(window.position)
                LOGGER.warning("%s: the item before character %d is in no array", source, where)
                tally.faults["item outside of an array"] += 1
            elif problem:
                _count_item(problem, source, window, tally)
            elif isinstance(item, dict):
                yield item
            else:
                tally.faults["item that is no object"] += 1
    except json.JSONDecodeError as error:
        where = window.place(error.pos)
        LOGGER.warning("%s: the JSON breaks at character %d: %s", source, where, error.msg)
        tally.faults["file cut off or broken"] += 1
    except EOFError:
        if is_inside:
            where = window.place(len(window.buffer))
            LOGGER.warning("%s: the JSON breaks off at character %d", source, where)
            tally.faults["file cut off or broken"] += 1


def _count_item(problem: str, source: str, window: _Window, tally: Tally) -> None:
    tally.faults["malformed item"] += 1
    if tally.faults["malformed item"] <= _MAX_LOGGED:
        where = window.place(window.position)
        LOGGER.warning("%s: item before character %d skipped: %s", source, where, problem)


def _item_end(text: str, position: int) -> int | None:
    """Where the item of an array ends that starts at `position`; None if `text` ends before."""
    depth = 0
    for match in _STRUCTURE.finditer(text, position):
        found = match.group()
        if found == '"':
            return None
        if depth == 0 and found in ",]":
            return match.start()
        depth += (found in "[{") - (found in "]}")
    return None


def _is_utf8(text: str) -> bool:
    return text.isascii() or _NOT_UTF8.search(text) is None


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _lines(
    stream: TextIO, source: str, tally: Tally, progress: _Progress
) -> Iterator[dict[str, Any]]:
    num_rows = num_malformed = 0
    for number, line in enumerate(stream, start=1):
        progress.update()
        if not line.strip():
            continue
        row, problem = _parse_line(line)
        if row is not None:
            num_rows += 1
            yield row
            continue
        num_malformed += 1
        tally.faults["malformed line"] += 1
        if num_malformed <= _MAX_LOGGED:
            LOGGER.warning("%s: line %d skipped: %s", source, number, problem)
    if not num_rows:
        raise ValueError(
            f"{source!r} is neither a JSON array nor JSON lines: "
            f"all {num_malformed} lines are malformed"
        )


def _parse_line(line: str) -> tuple[dict[str, Any] | None, str]:
    if not _is_utf8(line):
        return None, "not UTF-8 text"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    return (row, "") if isinstance(row, dict) else (None, "not a JSON object")


def _dataset_rows(source: str) -> Iterator[dict[str, Any]]:
    path = Path(source)
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    loaded = _datasets(source).load_from_disk(source) if saved else _load_dataset(source, source)
    if not isinstance(loaded, dict):
        yield from loaded
        return
    train = sorted((name for name in loaded if name.startswith("train")), key=len)
    if not train:
        raise ValueError(f"data set {source!r} has no train split, only {sorted(loaded)}")
    yield from loaded[train[0]]


def _load_dataset(source: str, name: str, **options: str) -> Any:
    """Streamed, so that a limit does not wait for the whole download."""
    return _datasets(source).load_dataset(name, streaming=True, **options)


def _datasets(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no JSON file, and reading it as a Hugging Face data set needs the "
            "datasets package; pip install datasets, or give a file"
        ) from error


# Cleaning


def clean(
    rows: Iterable[Mapping[str, Any]], tally: Tally, *, english_only: bool = False
) -> Iterator[Conversation]:
    """The rows as conversations: what comes before a row's first fault, up to its last answer.

    A row whose first fault comes before any answer is skipped. Both are counted by reason.

    Args:
        rows: with the turns under `conversations`, `messages` or `conversation`, each with `from`
            and `value` or `role` and `content`.
        tally: gets the counts.
        english_only: skip conversations with under 90% ASCII among their letters.
    """
    for row in rows:
        tally.num_read += 1
        messages, fault = _usable_messages(row)
        if not messages:
            tally.skipped[fault] += 1
        elif english_only and not is_mostly_ascii(each.content for each in messages):
            tally.skipped["not English"] += 1
        else:
            if fault:
                tally.cut[fault] += 1
            yield Conversation(tuple(messages))


def is_mostly_ascii(texts: Iterable[str]) -> bool:
    """Whether at least 90% of the letters are ASCII; True without letters."""
    num_letters = num_ascii = 0
    for text in texts:
        if text.isascii():
            letters = sum(map(str.isalpha, text))
            num_letters += letters
            num_ascii += letters
        else:
            num_letters += sum(map(str.isalpha, text))
            num_ascii += sum(each.isascii() and each.isalpha() for each in text)
    return num_ascii >= MIN_ASCII_LETTERS * num_letters


def _usable_messages(row: Mapping[str, Any]) -> tuple[list[Message], str]:
    """The messages before the first fault up to the last answer, and the fault or ""."""
    messages: list[Message] = []
    fault = ""
    for turn in _turns(row):
        role, text = _role_and_text(turn)
        if role == "system" and text == "" and not messages:
            continue
        fault = _fault(role, text, messages)
        if fault or role is None or text is None:
            break
        messages.append(Message(role, text, _is_cut(turn)))
    while messages and messages[-1].role != "assistant":
        messages.pop()
        fault = fault or "last turn unanswered"
    if not messages and fault in ("", "last turn unanswered"):
        fault = "no assistant turn"
    return messages, fault


def _turns(row: Mapping[str, Any]) -> list[Any]:
    turns = next((row[key] for key in _TURN_KEYS if row.get(key) is not None), None)
    if isinstance(turns, Mapping):  # a data set may store the list of turns by column
        columns = [value for value in turns.values() if isinstance(value, list)]
        return [dict(zip(turns, values, strict=False)) for values in zip(*columns, strict=False)]
    return turns if isinstance(turns, list) else []


def _role_and_text(turn: Any) -> tuple[str | None, str | None]:
    """Role and stripped text; None where the role is unknown or the content is not text."""
    if not isinstance(turn, Mapping):
        return None, None
    name = turn.get("role") or turn.get("from")
    text = turn.get("content") if turn.get("content") is not None else turn.get("value")
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    # A lone half of a surrogate pair, left by a careless split, is no text to a tokenizer.
    return role, _SURROGATE.sub("\ufffd", text).strip() if isinstance(text, str) else None


def _is_cut(turn: Mapping[str, Any]) -> bool:
    """Regenerated answers tell how they ended."""
    return turn.get("finish_reason") == "length"


def _fault(role: str | None, text: str | None, messages: Sequence[Message]) -> str:
    """What is wrong with a turn after `messages`, "" if nothing is."""
    last = messages[-1].role if messages else "system"
    faults = {
        "unknown role": role is None,
        "turn without text": text is None,
        "empty turn": text == "",
        "system turn not first": role == "system" and bool(messages),
        "assistant first": role == "assistant" and last == "system",
        "two user turns in a row": role == last == "user",
        "two assistant turns in a row": role == last == "assistant",
        "turn after an answer that was cut off": bool(messages) and messages[-1].is_cut,
    }
    return next((name for name, holds in faults.items() if holds), "")


# Evaluation questions


class Exclusion:
    """The word sequences of evaluation questions, to keep them out of the training data.

    A text matches if it shares 13 words in a row with a question or a reference answer, or holds
    the whole of a question of 8 to 12 words. Words are lower-cased runs of letters, digits and
    underscores, and single characters of scripts that are written without spaces. Shorter questions
    are everyday phrases and match nothing.
    """

    def __init__(self) -> None:
        self.num_texts = 0
        self._phrases: dict[tuple[str, ...], dict[int, set[tuple[str, ...]]]] = {}

    @classmethod
    def from_files(cls, paths: Iterable[str | Path]) -> "Exclusion":
        """From question, reference-answer and judge-prompt files in FastChat's JSON lines.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file is no UTF-8 text, a line is not JSON, or a file has no question
                and no answer.
        """
        exclusion = cls()
        for path in map(Path, paths):
            before = exclusion.num_texts
            for number, line in enumerate(read_lines(path, "file to exclude"), start=1):
                if line.strip():
                    exclusion._add_line(line, f"{path}: line {number}")
            if exclusion.num_texts == before:
                raise ValueError(f"{str(path)!r} holds no question; expected lines with 'turns'")
        return exclusion

    def add(self, text: str, *, min_words: int = NGRAM) -> None:
        """Excludes the 13-grams of `text`, or all of it if it has `min_words` to 12 words."""
        words = _words(text)
        self.num_texts += 1
        length = min(NGRAM, len(words))
        if length < min_words:
            return
        for start in range(len(words) - length + 1):
            phrase = tuple(words[start : start + length])
            self._phrases.setdefault(phrase[:3], {}).setdefault(length, set()).add(phrase)

    def matches(self, text: str) -> bool:
        """Whether `text` holds an excluded sequence of words."""
        words = _words(text)
        for start, head in enumerate(zip(words, words[1:], words[2:], strict=False)):
            for length, phrases in self._phrases.get(head, {}).items():
                if tuple(words[start : start + length]) in phrases:
                    return True
        return False

    def drop(self, conversations: Iterable[Conversation], tally: Tally) -> Iterator[Conversation]:
        """The conversations without a match in any message; the others are counted."""
        for conversation in conversations:
            if any(self.matches(each.content) for each in conversation.messages):
                tally.skipped["evaluation question"] += 1
            else:
                yield conversation

    def _add_line(self, line: str, where: str) -> None:
        row, problem = _parse_line(line)
        if row is None:
            raise ValueError(f"{where} cannot be excluded: {problem}")
        for question in _strings(row.get("turns")):
            self.add(question, min_words=MIN_PHRASE)
        choices = row.get("choices")
        answers = [
            choice.get("turns") if isinstance(choice, Mapping) else choice
            for choice in (choices if isinstance(choices, list) else ())
        ]
        for value in (row.get("reference"), row.get("system_prompt"), *answers):
            for text in _strings(value):
                self.add(text)
        for text in _strings(row.get("prompt_template")):
            self.add(text)


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
