"""What a judge is asked: FastChat's prompts, filled in, and how its rating is read.

Source: Zheng et al. 2023 (arXiv:2306.05685), single-answer grading; the rules and file formats are
those of FastChat's llm_judge.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.files import read_lines
from evaluation.questions import Question

MALFORMED = -1

# Their answers are right or wrong, so that the judge gets a reference to compare with.
REFERENCE_CATEGORIES = frozenset(("math", "reasoning", "coding", "arena-hard-200"))

_FORMAT = "[[rating]]"
_TURN_1, _TURN_2 = ("question", "answer"), ("question_1", "question_2", "answer_1", "answer_2")
_PLACES = {
    "single-v1": {*_TURN_1},
    "single-math-v1": {*_TURN_1, "ref_answer_1"},
    "single-v1-multi-turn": {*_TURN_2},
    "single-math-v1-multi-turn": {*_TURN_2, "ref_answer_1", "ref_answer_2"},
}
# Bounded, so that a judge that repeats one digit for ever gives no rating.
_NUMBER = r"(\d{1,9}(?:\.\d{0,20})?)"
_RATINGS = (re.compile(rf"\[\[{_NUMBER}\]\]"), re.compile(rf"\[{_NUMBER}\]"))


@dataclass(frozen=True)
class JudgePrompt:
    """One of FastChat's judge prompts.

    Attributes:
        name: "single-v1", "single-math-v1", or one of them with "-multi-turn".
        system: the system message.
        template: the user's message, with places for question, answer and reference.
    """

    name: str
    system: str
    template: str

    def __post_init__(self) -> None:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(self.template)]
        except ValueError as error:
            raise ValueError(f"prompt {self.name!r} is no template: {error}") from error
        places = {field for field in fields if field is not None}
        if places != _PLACES[self.name]:
            raise ValueError(
                f"prompt {self.name!r} must have the places {sorted(_PLACES[self.name])}, has "
                f"{sorted(places)}"
            )


@dataclass(frozen=True)
class Match:
    """One judgment to ask for.

    Attributes:
        question_id: of the question.
        model_id: whose answer is judged.
        turn: 1 or 2.
        prompt_name: of the judge prompt.
        system: the judge's system message.
        user_prompt: what the judge reads.
    """

    question_id: int | str
    model_id: str
    turn: int
    prompt_name: str
    system: str
    user_prompt: str

    @property
    def key(self) -> tuple[int | str, str, int]:
        """What tells it from the judge's other matches."""
        return self.question_id, self.model_id, self.turn


def read_judge_prompts(path: str | Path) -> dict[str, JudgePrompt]:
    """The prompts of single-answer grading in a file of FastChat's format, by name.

    Others, such as those that compare two answers, are left out.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a malformed line, by its number, or a file without such prompts.
    """
    prompts: dict[str, JudgePrompt] = {}
    for number, record in _records(path, "judge prompts"):
        name = record.get("name")
        if name not in _PLACES:
            continue
        texts = [record.get(key) for key in ("system_prompt", "prompt_template")]
        where = f"{path}, line {number}"
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: a prompt has texts system_prompt and prompt_template")
        if record.get("output_format") != _FORMAT:
            raise ValueError(
                f"{where}: output_format must be {_FORMAT!r}, got {record.get('output_format')!r}"
            )
        try:
            prompts[name] = JudgePrompt(name, *map(str, texts))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} holds none of the prompts {', '.join(_PLACES)}")
    return prompts


def read_references(path: str | Path) -> dict[int | str, tuple[str, ...]]:
    """Reference answers in FastChat's format: the turns of each question's first choice.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a malformed line, by its number, or a file without answers.
    """
    references: dict[int | str, tuple[str, ...]] = {}
    for number, record in _records(path, "reference answers"):
        try:
            question_id, turns = record["question_id"], record["choices"][0]["turns"]
            is_answer = isinstance(question_id, int | str) and all(
                isinstance(turn, str) for turn in turns
            )
        except (KeyError, IndexError, TypeError):
            is_answer = False
        if not is_answer:
            raise ValueError(f"{path}, line {number}: not an answer of FastChat's format")
        references[question_id] = tuple(turns)
    if not references:
        raise ValueError(f"{path} holds no reference answers")
    return references


def build_matches(
    question: Question,
    answers: Mapping[str, Sequence[str]],
    prompts: Mapping[str, JudgePrompt],
    references: Mapping[int | str, Sequence[str]],
) -> list[Match]:
    """All matches of one question: the first turn, and the second where there are exactly two.

    Args:
        question: the question.
        answers: by model_id, a text a turn.
        prompts: by name.
        references: by question_id; needed for the categories of REFERENCE_CATEGORIES only.

    Raises:
        ValueError: when a prompt, a reference or a turn of an answer is missing.
    """
    needs_reference = question.category in REFERENCE_CATEGORIES
    matches = []
    for turn in (1, 2)[: 2 if len(question.turns) == 2 else 1]:
        name = f"single{'-math' if needs_reference else ''}-v1{'-multi-turn' if turn == 2 else ''}"
        if name not in prompts:
            raise ValueError(
                f"question {question.question_id!r} needs prompt {name!r}, which the file of judge "
                "prompts has not"
            )
        reference = references.get(question.question_id, ()) if needs_reference else ()
        if needs_reference and len(reference) < turn:
            raise ValueError(
                f"question {question.question_id!r} of category {question.category!r} needs a "
                f"reference answer to turn {turn}; give --references a file that has it"
            )
        for model_id, texts in answers.items():
            if len(texts) < turn:
                raise ValueError(
                    f"the answer of {model_id!r} to question {question.question_id!r} has no turn "
                    f"{turn}"
                )
            text = _fill(prompts[name], question.turns, texts, reference[:turn])
            matches.append(
                Match(question.question_id, model_id, turn, name, prompts[name].system, text)
            )
    return matches


def read_rating(judgment: str) -> int | float:
    """The first [[N]] of a judgment, or else the first [N]; MALFORMED without one."""
    for pattern in _RATINGS:
        match = pattern.search(judgment)
        if match:
            number = match.group(1)
            return float(number) if "." in number else int(number)
    return MALFORMED


def _fill(
    prompt: JudgePrompt, questions: Sequence[str], answers: Sequence[str], references: Sequence[str]
) -> str:
    values = {"question": questions[0], "answer": answers[0]}
    for name, texts in (("question", questions), ("answer", answers), ("ref_answer", references)):
        values |= {f"{name}_{turn}": text for turn, text in enumerate(texts, start=1)}
    return prompt.template.format(**values)


def _records(path: str | Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file, with their line numbers."""
    path = Path(path)
    for number, line in enumerate(read_lines(path, f"file of {what}"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        yield number, record
