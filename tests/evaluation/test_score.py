"""The scoring command on run folders whose figures are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.stats import GenerationStats
from evaluation.answers import RunFolder
from evaluation.questions import Question
from evaluation.score import SCORES_FILE, Run, main
from evaluation.tasks import INSTRUCTION

MATH = [
    Question(1, "math", ("2 + 2?",), ("so\n#### 4",)),
    Question(2, "math", ("1000 + 234?",), ("#### 1,234",)),
    Question(3, "math", ("half?",), ("#### 1/2",)),
    Question(4, "math", ("why?",), ("because",)),
]
TURN = ("turns", "idxs", "new_tokens", "wall_time", "finish_reasons", "token_ids", "stats")
SETTINGS = {
    "task": "math",
    "target": "demo",
    "draft_head": "demo",
    "rule": "exact",
    "budget": None,
    "temperature": 0.0,
    "tree": "16,4,4",
}


def turn(text: str, ids: list[int], cycles: int = 2, reason: str = "stop", **stats: Any) -> tuple:
    figures = GenerationStats(0, "exact", "16,4,4", num_tokens=len(ids), **stats)
    return text, cycles, len(ids), 0.5, reason, ids, figures.to_dict()


def save(
    folder: Path,
    questions: list[Question],
    answers: dict[Any, list[list[tuple]]],
    kind: str = "math",
    **settings: Any,
) -> str:
    """A run folder with the given turns of each choice of each question."""
    run = RunFolder(folder, "model")
    folder.mkdir()
    run.write_run(
        {"task": kind, "kind": kind, "model_id": "model", "settings": SETTINGS | settings}
    )
    run.write_questions(questions)
    for question_id, choices in answers.items():
        lists = [
            {"index": n} | dict(zip(TURN, map(list, zip(*turns, strict=True)), strict=True))
            for n, turns in enumerate(choices)
        ]
        run.append({"question_id": question_id, "model_id": "model", "choices": lists}, 0)
    run.merge([question.question_id for question in questions])
    return str(folder)


def simple(texts: dict[Any, str]) -> dict[Any, list[list[tuple]]]:
    return {each: [[turn(text, [1, 2, 3, 4, 5])]] for each, text in texts.items()}


def scores(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / SCORES_FILE).read_text())


def test_math_is_right_by_its_number(tmp_path: Path, capsys) -> None:
    texts = {1: "It is $4.00.", 2: "1234", 3: "0.4", 4: "so"}
    folder = save(tmp_path / "a", MATH, simple(texts))
    assert main([folder]) == 0
    found = scores(folder)
    assert found["accuracy"] == {
        "num_right": 2,
        "num_scored": 3,
        "num_unscored": 1,
        "share": pytest.approx(2 / 3),
        "low": pytest.approx(0.2077, abs=1e-4),
        "high": pytest.approx(0.9385, abs=1e-4),
    }
    assert found["num_questions"] == found["num_answers"] == found["num_turns"] == 4
    assert found["acceptance_length"] == {"micro": 2.0, "macro": 2.0}
    assert found["tokens_per_second"] == 10.0
    assert found["against_exact"] is None
    printed = capsys.readouterr().out
    assert "66.7% (20.8%-93.9%)" in printed
    assert "4/4" in printed


def test_a_question_is_one_trial_however_many_choices_it_has(tmp_path: Path) -> None:
    one = save(tmp_path / "one", MATH[:2], {1: [[turn("4", [1])]], 2: [[turn("5", [1])]]})
    alike = {1: [[turn("4", [1])]] * 3, 2: [[turn("5", [1])]] * 3}
    three = save(tmp_path / "three", MATH[:2], alike)
    assert main([one, three]) == 0
    assert scores(one)["accuracy"] == scores(three)["accuracy"]
    assert scores(three)["num_turns"] == 6
    mixed = {1: [[turn("4", [1])], [turn("5", [1])]], 2: [[turn("5", [1])]] * 2}
    folder = save(tmp_path / "mixed", MATH[:2], mixed)
    assert main([folder]) == 0
    accuracy = scores(folder)["accuracy"]
    assert (accuracy["num_right"], accuracy["num_scored"], accuracy["share"]) == (0.5, 2, 0.25)


def test_the_macro_acceptance_length_is_over_questions(tmp_path: Path) -> None:
    answers = {
        1: [[turn("4", [1] * 5, cycles=1), turn("4", [1] * 3, cycles=2)]],
        2: [[turn("4", [1] * 4, cycles=1), turn("4", [1], cycles=0)]],
    }
    folder = save(tmp_path / "a", MATH[:2], answers)
    assert main([folder]) == 0
    assert scores(folder)["acceptance_length"] == {"micro": 9 / 4, "macro": 2.5}


def test_a_stand_in_for_the_tasks_questions_is_told(tmp_path: Path, capsys) -> None:
    folder = Path(save(tmp_path / "a", MATH, simple({1: "4"})))
    record = json.loads((folder / "run.json").read_text())
    source = "our own 40 word problems, since gsm8k was not reachable (no)"
    (folder / "run.json").write_text(json.dumps(record | {"task": "gsm8k", "source": source}))
    assert main([str(folder)]) == 0
    printed = capsys.readouterr()
    assert f"questions: {source}" in printed.err
    last = printed.out.splitlines()[-1]
    assert last == f"model: not the questions of gsm8k, but {source}"
    assert scores(str(folder))["source"] == source


def test_what_drafts_may_differ_from_the_exact_run(tmp_path: Path) -> None:
    drafts = {"draft_vocab": "64", "draft_head_sha256": "a", "draft_model_sha256": "b"}
    ours = save(tmp_path / "ours", MATH, simple({1: "4"}), rule="fuzzy:0.3:js", **drafts)
    plain = {"rule": "plain", "draft_vocab": "auto", "tree": None, "target_sha256": "c"}
    exact = save(tmp_path / "exact", MATH, simple({1: "4"}), **plain)
    assert main([ours, "--exact", exact]) == 0


def test_cuts_repetition_and_costs_are_counted(tmp_path: Path) -> None:
    answers = {
        1: [[turn("4", [7] * 13, cycles=3, reason="length", kl_spent=1.3)]],
        2: [[turn("4", [1, 2], cycles=0, kl_spent=float("inf"))]],
        3: [[turn("", [], cycles=0, reason="context")]],
    }
    folder = save(tmp_path / "a", MATH[:3], answers)
    assert main([folder, "--json"]) == 0
    found = scores(folder)
    assert found["cut_share"] == pytest.approx(1 / 3)
    assert found["repetition_rate"] == pytest.approx(0.9)
    assert found["acceptance_length"] == {"micro": 4.0, "macro": 4.0}
    assert found["kl_per_token"] == "inf"
    assert found["regret_per_token"] is None


def test_a_run_is_compared_with_an_exact_one_by_turn(tmp_path: Path, capsys) -> None:
    questions = [Question(1, "", ("a", "b")), Question("x", "", ("a", "b"))]
    exact = save(
        tmp_path / "exact",
        questions,
        {
            1: [[turn("t", [1, 2]), turn("t", [3, 4])]],
            "x": [[turn("t", [5]), turn("t", [6, 7, 8, 9])]],
        },
        kind="chat",
        rule="plain",
        tree=None,
        draft_head=None,
    )
    ours = save(
        tmp_path / "ours",
        questions,
        {
            "x": [[turn("t", [5]), turn("t", [6, 7])]],
            1: [[turn("t", [1, 2]), turn("t", [3, 9])]],
        },
        kind="chat",
        rule="fuzzy:0.3:js",
        budget=2.0,
    )
    assert main([ours, "--exact", exact]) == 0
    against = scores(ours)["against_exact"]
    assert against["agreement"] == {"num_turns": 4, "equal": 0.5, "common_prefix": 0.75}
    assert [turn["equal"] for turn in against["agreement_by_turn"]] == [1.0, 0.0]
    assert [turn["common_prefix"] for turn in against["agreement_by_turn"]] == [1.0, 0.5]
    assert against["length_ratio"] == {"mean": 0.875, "of_sums": pytest.approx(7 / 9)}
    assert "75.0%" in capsys.readouterr().out
    assert scores(ours)["accuracy"]["num_unscored"] == 2


@pytest.mark.parametrize(
    ("changes", "texts", "words"),
    [
        ({"temperature": 1.0}, {1: "4"}, "temperature 0.0, the exact run .* has 1.0"),
        ({"target": "other"}, {1: "4"}, "target 'demo'"),
        ({"target_sha256": "b"}, {1: "4"}, "target_sha256 'a', the exact run .* has 'b'"),
        ({"rule": "fuzzy:0.1:js"}, {1: "4"}, "is a run of rule 'fuzzy:0.1:js'"),
        ({}, {1: "4", 2: "5"}, "1 questions are answered in only one"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys, changes, texts, words
) -> None:
    relaxed = {"rule": "fuzzy:0.3:js", "target_sha256": "a"}
    ours = save(tmp_path / "ours", MATH, simple({1: "4"}), **relaxed)
    exact = save(tmp_path / "exact", MATH, simple(texts), **changes)
    assert main([ours, "--exact", exact]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error)
    assert not (tmp_path / "ours" / SCORES_FILE).exists()


CODE = [
    Question(
        n,
        "code",
        (f'{INSTRUCTION}def f(x):\n    """Returns x + 1."""\n',),
        ("    return x + 1\n", "assert f(1) == 2\nassert f(-1) == 0\n", "f"),
    )
    for n in range(1, 6)
] + [Question(6, "code", ("Write something that no test knows.",))]
CODE_TEXTS = {
    1: "    return x + 1\n",
    2: "```python\ndef f(x):\n    return x + 1\n```",
    3: "    return x - 1\n",
    4: "    import sys\n    sys.exit(0)\n",
    5: "    while True: pass\n",
    6: "    return 3",
}


def test_code_is_run_only_when_allowed(tmp_path: Path, capsys) -> None:
    folder = save(tmp_path / "a", CODE, simple(CODE_TEXTS), kind="code")
    assert main([folder]) == 0
    assert "--allow-code-execution" in capsys.readouterr().out
    accuracy = scores(folder)["accuracy"]
    assert (accuracy["num_scored"], accuracy["num_unscored"], accuracy["share"]) == (0, 6, None)
    assert main([folder, "--allow-code-execution", "--timeout", "2"]) == 0
    accuracy = scores(folder)["accuracy"]
    assert (accuracy["num_right"], accuracy["num_scored"], accuracy["num_unscored"]) == (2, 5, 1)


def test_references_may_come_from_another_file(tmp_path: Path, capsys) -> None:
    folder = save(tmp_path / "a", MATH[:1], simple({1: "5"}))
    other = tmp_path / "q.jsonl"
    other.write_text('{"question_id": 1, "turns": ["q"], "reference": ["#### 5"]}\n')
    assert main([folder, "--questions", str(other)]) == 0
    assert scores(folder)["accuracy"]["num_right"] == 1
    other.write_text('{"question_id": 2, "turns": ["q"]}\n')
    assert main([folder, "--questions", str(other)]) == 2
    assert "question 1, which is not in" in capsys.readouterr().err


def test_a_half_written_last_answer_is_left_out(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", MATH, simple({1: "4", 2: "1,234"}))
    with (Path(folder) / "model_answer" / "model.jsonl").open("a") as stream:
        stream.write('{"question_id": 3, "choi')
    assert list(Run.read(folder).answers) == [1, 2]
    assert main([folder]) == 0
    assert scores(folder)["num_answers"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "no run in 'absent'"),
        (["{a}", "--timeout", "0"], "--timeout must be > 0"),
        (["{a}", "--exact", "absent"], "no run in 'absent'"),
        (["{a}", "--questions", "absent"], "no question file"),
        (["{empty}"], "holds no answers yet"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(tmp_path: Path, capsys, arguments, words) -> None:
    folders = {
        "a": save(tmp_path / "a", MATH, simple({1: "4"})),
        "empty": save(tmp_path / "empty", MATH, {}),
    }
    assert main([each.format(**folders) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
