"""The file of a judge's ratings: FastChat's `model_judgment`, which grows by whole lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle_fsd.files import locked, write_json
from evaluation.answers import safe_model_id
from evaluation.judge_prompts import Match
from evaluation.lines import LineFile
from evaluation.questions import Question

Key = tuple[int | str, str, int]

_FOLDER = Path("data", "mt_bench", "model_judgment")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "question_id": (int, str),
    "model": str,
    "judge": list,
    "user_prompt": str,
    "judgment": str,
    "score": (int, float),
    "turn": int,
}


class JudgmentFile:
    """One judge's ratings below an output folder, where FastChat's show_result looks for them.

    Beside the ratings, JUDGE_single.run.json holds how they were asked for.

    Args:
        output: need not exist.
        judge: names the files.

    Raises:
        ValueError: when the output folder is a file.
    """

    def __init__(self, output: str | Path, judge: str) -> None:
        output = Path(output)
        if output.exists() and not output.is_dir():
            raise ValueError(f"output {str(output)!r} is a file; name a folder")
        self.path = output / _FOLDER / f"{safe_model_id(judge)}_single.jsonl"
        self._judge = judge
        self._run_file = self.path.with_suffix(".run.json")
        self._lines = LineFile(self.path)
        self._lock = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second judge run away from the file, whose folder is made when it is absent.

        Raises:
            RuntimeError: when another run is at work there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        busy = f"another run writes to {self.path}; wait for it or name another --output"
        with locked(self.path.with_suffix(".lock"), busy):
            yield

    def begin(self, settings: Mapping[str, Any], session: Mapping[str, Any]) -> None:
        """Notes how the judge is asked.

        Args:
            settings: what decides the ratings, ready for JSON.
            session: what does not: argv, machine, versions.

        Raises:
            ValueError: when the file was begun with other settings.
        """
        record = self.check(settings)
        if record is None:
            record = {"settings": dict(settings), **session, "resumed": []}
        else:
            record["resumed"].append(dict(session))
        write_json(self._run_file, record)

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `begin` noted; None where nothing was begun.

        Args:
            settings: as `begin` takes them.

        Raises:
            ValueError: when the file was begun with other settings, or the notes are spoilt.
        """
        if not self._run_file.exists():
            return None
        record = _notes(self._run_file)
        for name, wanted in json.loads(json.dumps(dict(settings))).items():
            found = record["settings"].get(name)
            if found != wanted:
                raise ValueError(
                    f"{self.path} was begun with {name} {found!r}, asked for is {wanted!r}; "
                    "give its settings or name another --output"
                )
        return record

    def read(self) -> dict[Key, dict[str, Any]]:
        """The ratings by question, model and turn; of several, the last.

        What a kill left of a last line is cut off.

        Raises:
            ValueError: for a malformed line, by its number, or the rating of another judge.
        """
        found: dict[Key, dict[str, Any]] = {}
        for number, line in enumerate(self._lines.read(), start=1):
            if line.strip():
                record = _parse(line, f"{self.path}, line {number}")
                if record["judge"][:1] != [self._judge]:
                    raise ValueError(
                        f"{self.path}, line {number}: a rating of judge {record['judge'][:1]!r}, "
                        f"not of {self._judge!r}; name another --output"
                    )
                found[record["question_id"], record["model"], record["turn"]] = record
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one rating; it is on the disk afterwards. Any thread may call it.

        Raises:
            OSError: on a full disk; earlier ratings stay.
        """
        line = json.dumps(dict(record)).encode("ascii")
        with self._lock:
            self._lines.append(line)


def check_same(
    found: Mapping[Key, Mapping[str, Any]],
    questions: Mapping[int | str, Question],
    matches: Sequence[Match],
) -> None:
    """Makes sure that the ratings in a file are of these questions and answers.

    Args:
        found: ratings by question, model and turn; there may be other models among them.
        questions: all of the runs, by question_id.
        matches: all of the runs.

    Raises:
        ValueError: naming the first rating that is not.
    """
    asked = {match.key: match for match in matches}
    for key, record in found.items():
        question_id, model, turn = key
        turns = questions[question_id].turns if question_id in questions else ()
        # Every prompt has a place for its question.
        if len(turns) < turn or turns[turn - 1] not in record["user_prompt"]:
            raise ValueError(
                f"the output holds a rating of question {question_id!r}, turn {turn}, which these "
                "runs do not have; name another --output for another set of questions"
            )
        if key in asked and asked[key].user_prompt != record["user_prompt"]:
            raise ValueError(
                f"the output holds a rating of another answer of {model!r} to question "
                f"{question_id!r}, turn {turn}, or of another prompt; name another --output"
            )


def _notes(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        record = None
    kinds = {"settings": dict, "resumed": list}
    if not isinstance(record, dict) or not all(
        isinstance(record.get(name), kind) for name, kind in kinds.items()
    ):
        raise ValueError(
            f"{path} does not say how the ratings were asked for; mend it or name another --output"
        )
    return record


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON; mend or remove it") from error
    if not isinstance(record, dict) or not all(
        isinstance(record.get(name), kind) for name, kind in _FIELDS.items()
    ):
        raise ValueError(f"{where}: not a rating; mend or remove it")
    return record
