"""Questions in FastChat's format: JSON lines with an id, a category and the user's turns."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.files import read_lines


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question_id: a number or a text, unique in its file.
        category: for tables; may be empty.
        turns: the user's messages, one at least, none empty.
        reference: what a scorer compares with: a worked answer, tests, ...; may be empty.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


def read_questions(path: str | Path) -> list[Question]:
    """Questions in the order of the file.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a malformed line, by its number, an id that comes twice, a file without
            questions, or one that is no UTF-8 text.
    """
    path = Path(path)
    lines = read_lines(path, "question file")
    questions: dict[int | str, Question] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _question(line)
            if question.question_id in questions:
                raise ValueError(f"question_id {question.question_id!r} comes twice")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        questions[question.question_id] = question
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return list(questions.values())


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --limit and --every, which `select` takes."""
    group = parser.add_argument_group("selection")
    group.add_argument("--limit", type=int, metavar="N", help="questions at most (default all)")
    group.add_argument(
        "--every", type=int, default=1, metavar="K", help="every K-th question (default 1)"
    )


def select(questions: Sequence[Question], limit: int | None, every: int) -> list[Question]:
    """Every `every`-th question from the first on, `limit` of them at most.

    Raises:
        ValueError: if one of the numbers is below 1.
    """
    for name, value in (("limit", limit), ("every", every)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be >= 1, got {value}")
    return list(questions[::every])[:limit]


def _question(line: str) -> Question:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a question is a JSON object, got {line.strip()[:40]!r}")
    identity = record.get("question_id")
    if isinstance(identity, bool) or not isinstance(identity, int | str):
        raise ValueError(f"question_id must be a number or a text, got {identity!r}")
    category = record.get("category") or ""
    if not isinstance(category, str):
        raise ValueError(f"category must be a text, got {category!r}")
    turns = _texts(record, "turns")
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError('"turns" must be a list of one text or more, none of them empty')
    return Question(identity, category, turns, _texts(record, "reference"))


def _texts(record: dict[str, Any], name: str) -> tuple[str, ...]:
    value = record.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f'"{name}" must be a list of texts, got {str(value)[:40]!r}')
    return tuple(value)
