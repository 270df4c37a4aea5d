"""The folder of an evaluation run, which can be killed at any moment and gone on with.

It holds::

    run.json                        the settings, versions and commit; written before any answer
    questions.jsonl                 the questions asked so far, with their references
    model_answer/ID.jsonl           answers in FastChat's format, in the questions' order
    model_answer/ID.jsonl.part-R    answers of process R, one whole line each, until they are merged

`read_answers` and `read_run` are for those who read a run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle_fsd.files import locked, temporary_path, whole_file
from evaluation.lines import LineFile
from evaluation.questions import Question

AUTO = "auto"
# Settings of which "auto" goes with whatever it came to.
CAN_BE_AUTO = ("dtype", "device", "tree", "draft_vocab")
# None where the files of a model are not on this machine yet: unknown, no other model.
CAN_BE_UNKNOWN = ("target_sha256", "draft_model_sha256")

_RUN = "run.json"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# A choice of an answer has lists with an entry a turn.
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "turns": lambda value: isinstance(value, str),
    "idxs": _is_count,
    "new_tokens": _is_count,
    "wall_time": lambda value: isinstance(value, int | float) and 0.0 <= value < math.inf,
    "finish_reasons": lambda value: isinstance(value, str),
    "token_ids": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "stats": lambda value: isinstance(value, dict),
}
TEXTS = ("turns",)
TEXTS_AND_FIGURES = tuple(_ENTRIES)
_QUESTIONS = "questions.jsonl"
_ANSWERS = "model_answer"
_LOCK = ".lock"
# The longest name of a file is 255 bytes on most disks, and parts add to it.
_MODEL_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,@-]{0,199}")


def read_run(folder: str | Path) -> dict[str, Any]:
    """What run.json says: task, model_id, settings, argv, versions, git_commit, device, ...

    Raises:
        FileNotFoundError: when the folder holds no run.
        ValueError: when the file is not one that a run writes.
    """
    path = Path(folder) / _RUN
    if not path.is_file():
        raise FileNotFoundError(
            f"no run in {str(folder)!r}: {path} is missing; make it with python -m evaluation.run"
        )
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    is_run = isinstance(record, dict) and isinstance(record.get("settings"), dict)
    if not is_run or not isinstance(record.get("model_id"), str):
        raise ValueError(f"{path} is not of an evaluation run; name the --output folder of one")
    return dict(record)


def read_answers(folder: str | Path, fields: Sequence[str] = TEXTS) -> list[dict[str, Any]]:
    """The answers of a run folder, each question once, without a half-written last line.

    Those of an unfinished run that are not merged yet come behind the merged ones.

    Args:
        folder: of the run.
        fields: lists that every choice must have: TEXTS or TEXTS_AND_FIGURES.

    Raises:
        FileNotFoundError: when the folder holds no run.
        ValueError: for a malformed line, by its number.
    """
    return RunFolder(folder, read_run(folder)["model_id"]).answers(fields)


def settings_agree(name: str, stored: Any, asked: Any) -> bool:
    """Whether a setting is that of a stored run.

    "auto" goes with what it can have come to, and a digest that is unknown with any. A file of
    questions may be written in several ways.
    """
    if name == "task" and stored is not None and asked is not None:
        stored, asked = (Path(each).resolve() for each in (stored, asked))
    is_auto = name in CAN_BE_AUTO and asked == AUTO
    is_unknown = name in CAN_BE_UNKNOWN and None in (stored, asked)
    return bool(stored == asked) or is_auto or is_unknown


def safe_model_id(text: str) -> str:
    """`text` as a name of files: other characters than letters, digits and "_.+=,@-" become "-"."""
    return re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", text).strip("-.")[:200] or "model"


def digest(questions: Iterable[Question]) -> str:
    """16 hexadecimal digits that tell sets of questions apart."""
    return hashlib.sha256(b"".join(map(_question_line, questions))).hexdigest()[:16]


class RunFolder:
    """Files of one run. Each appears whole or not at all; only parts grow, line by line.

    Args:
        folder: need not exist.
        model_id: names the answer file.

    Raises:
        ValueError: for a model_id that names no file, or a folder that is a file.
    """

    def __init__(self, folder: str | Path, model_id: str) -> None:
        if not _MODEL_ID.fullmatch(model_id):
            raise ValueError(
                f"model id {model_id!r} cannot name a file; use up to 200 letters, digits and "
                "_.+=,@- and begin with a letter or digit"
            )
        if not str(folder):
            raise ValueError("the output folder is empty; name one, . is the current one")
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output {str(folder)!r} is a file; name a folder")
        self.model_id = model_id
        self.answer_file = self.folder / _ANSWERS / f"{model_id}.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run out of the folder, which is made when it is absent.

        Raises:
            RuntimeError: when another run is at work there.
        """
        with _explain_full_disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"another run is at work in {str(self.folder)!r}; wait for it or name another folder"
        with locked(self.folder / _LOCK, busy):
            yield

    def resume(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The run.json of a run with these settings; None in a new folder.

        Args:
            settings: ready for JSON; see `settings_agree`.

        Raises:
            ValueError: when the folder holds a run with other settings, or something else.
        """
        if not (self.folder / _RUN).exists():
            # What a run that was killed in its first moment left of its first file.
            temporary_path(self.folder / _RUN).unlink(missing_ok=True)
            if self.folder.is_dir() and any(path.name != _LOCK for path in self.folder.iterdir()):
                raise ValueError(
                    f"output folder {str(self.folder)!r} holds no run and is not empty; name "
                    "another one"
                )
            return None
        record = read_run(self.folder)
        stored = record["settings"]
        asked = json.loads(json.dumps(dict(settings)))
        for name in [*asked, *(name for name in stored if name not in asked)]:
            found, wanted = stored.get(name), asked.get(name)
            if not settings_agree(name, found, wanted):
                raise ValueError(
                    f"{str(self.folder)!r} holds a run with {name} {found!r}, asked for is "
                    f"{wanted!r}; give its settings or name another --output"
                )
        if record["model_id"] != self.model_id:
            raise ValueError(
                f"{str(self.folder)!r} holds a run with model_id {record['model_id']!r}, asked for "
                f"is {self.model_id!r}; give its settings or name another --output"
            )
        return record

    def write_run(self, record: Mapping[str, Any]) -> None:
        """Writes run.json."""
        text = json.dumps(dict(record), indent=2, ensure_ascii=False) + "\n"
        self._write(self.folder / _RUN, text.encode("utf-8", "backslashreplace"))

    def write_questions(self, questions: Iterable[Question]) -> None:
        """Writes questions.jsonl."""
        self._write(self.folder / _QUESTIONS, b"".join(map(_question_line, questions)))

    def append(self, answer: Mapping[str, Any], rank: int) -> None:
        """Adds one answer to the part of process `rank`; it is on the disk afterwards.

        Raises:
            OSError: on a full disk; earlier answers stay.
        """
        path = self.answer_file.with_name(f"{self.answer_file.name}.part-{rank}")
        with _explain_full_disk(self.folder):
            path.parent.mkdir(exist_ok=True)
        LineFile(path).append(_record(answer))

    def answers(self, fields: Sequence[str] = ()) -> list[dict[str, Any]]:
        """All answers, the merged ones first, each question once.

        Args:
            fields: see `read_answers`; none are not looked at.
        """
        found: dict[int | str, dict[str, Any]] = {}
        for path in [self.answer_file, *self._parts()]:
            for answer in _read_lines(path, fields):
                found.setdefault(answer["question_id"], answer)
        return list(found.values())

    def merge(self, order: Sequence[int | str]) -> list[dict[str, Any]]:
        """Brings the parts of all processes, of this and earlier runs, into the answer file.

        Killed before the file is renamed, the parts are still there; killed after that, they hold
        nothing new.

        Args:
            order: question ids as the file shall have them.

        Returns:
            The answers in that order.

        Raises:
            OSError: on a full disk; all parts stay.
            ValueError: for a malformed line, by its number.
        """
        parts = self._parts()
        places = {identity: place for place, identity in enumerate(order)}
        answers = sorted(
            self.answers(), key=lambda answer: places.get(answer["question_id"], len(places))
        )
        content = b"".join(map(_line, answers))
        old = self.answer_file.read_bytes() if self.answer_file.exists() else b""
        if content != old:
            self._write(self.answer_file, content)
        for left in [*parts, temporary_path(self.answer_file)]:
            left.unlink(missing_ok=True)
        return answers

    def _parts(self) -> list[Path]:
        prefix = f"{self.answer_file.name}.part-"
        if not self.answer_file.parent.is_dir():
            return []
        paths = self.answer_file.parent.iterdir()
        return sorted(path for path in paths if path.name.startswith(prefix))

    def _write(self, path: Path, content: bytes) -> None:
        with _explain_full_disk(self.folder):
            path.parent.mkdir(exist_ok=True)
            with whole_file(path) as temporary:
                temporary.write_bytes(content)


@contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk of {str(folder)!r} is full; make room and give the same command again, all "
            "finished answers are kept"
        ) from error


def _record(record: Mapping[str, Any]) -> bytes:
    """JSON in ASCII: a reader may open it in any encoding, and no cut splits a letter."""
    return json.dumps(dict(record)).encode("ascii")


def _line(record: Mapping[str, Any]) -> bytes:
    return _record(record) + b"\n"


def _question_line(question: Question) -> bytes:
    return _line(
        {
            "question_id": question.question_id,
            "category": question.category,
            "turns": question.turns,
            "reference": question.reference,
        }
    )


def _read_lines(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The answers of a file; none when it is absent; what a kill left of a last line is skipped."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline behind it
                return
            raise ValueError(f"{path}, line {number}: not valid JSON; mend or remove it") from error
        identity = record.get("question_id") if isinstance(record, dict) else None
        if isinstance(identity, bool) or not isinstance(identity, int | str):
            raise ValueError(f"{path}, line {number}: not an answer; mend or remove it")
        spoilt = _spoilt_field(record, fields)
        if spoilt is not None:
            raise ValueError(
                f"{path}, line {number}: the answer's {spoilt} are not as evaluation.run writes "
                "them; mend or remove it"
            )
        yield record


def _spoilt_field(answer: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    """The first of the fields that some choice lacks or has wrong, None when all are right."""
    choices = answer.get("choices") if fields else [{}]
    if not isinstance(choices, list) or not choices:
        return "choices"
    for choice in choices:
        if not isinstance(choice, dict):
            return "choices"
        number = len(choice.get("turns") or ())
        for name in fields:
            entries = choice.get(name)
            if not isinstance(entries, list) or not entries or len(entries) != number:
                return name
            if not all(map(_ENTRIES[name], entries)):
                return name
    return None
