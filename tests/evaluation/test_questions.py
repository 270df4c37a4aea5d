"""Question files: what is read, and what is refused by the number of its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.questions import Question, read_questions, select

GOOD = {"question_id": 81, "category": "writing", "turns": ["a\u2028b", "c"], "reference": ["r"]}


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_question_keeps_its_id_turns_and_reference(tmp_path: Path) -> None:
    text = json.dumps(GOOD, ensure_ascii=False)
    questions = read_questions(write(tmp_path, text, "", '{"question_id": "x", "turns": ["q"]}'))
    assert questions == [
        Question(81, "writing", ("a\u2028b", "c"), ("r",)),
        Question("x", "", ("q",), ()),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "JSON object"),
        ('{"turns": ["q"]}', "question_id"),
        ('{"question_id": true, "turns": ["q"]}', "question_id"),
        ('{"question_id": 1}', "turns"),
        ('{"question_id": 1, "turns": []}', "turns"),
        ('{"question_id": 1, "turns": [" "]}', "turns"),
        ('{"question_id": 1, "turns": "q"}', "turns"),
        ('{"question_id": 1, "turns": ["q", 2]}', "turns"),
        ('{"question_id": 1, "turns": ["q"], "category": 3}', "category"),
        ('{"question_id": 1, "turns": ["q"], "reference": "r"}', "reference"),
        (json.dumps(GOOD), "comes twice"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"line 2: .*{words}"):
        read_questions(write(tmp_path, json.dumps(GOOD), line))


def test_no_file_no_question_and_no_text_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no question file"):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="no questions"):
        read_questions(write(tmp_path, "", " "))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        read_questions(tmp_path / "bytes.jsonl")


def test_selection_takes_every_kth_from_the_first_on() -> None:
    questions = [Question(n, "", ("q",)) for n in range(10)]
    assert [q.question_id for q in select(questions, None, 4)] == [0, 4, 8]
    assert [q.question_id for q in select(questions, 2, 4)] == [0, 4]
    for limit, every in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be >= 1"):
            select(questions, limit, every)
