"""The evaluation commands on the default target, with the published questions where they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation import replay, run, score, speed
from evaluation.answers import read_answers

pytestmark = pytest.mark.target

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SETS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "qa", "sum")
MODELS = ["--target", "demo", "--draft-head", "demo", "--dtype", "float32", "--tree", "8,3,3"]


def questions_of(task: str) -> list[str]:
    path = DATA / f"{task}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return ["--task", task, "--questions", str(path)]


def answers(folder: Path) -> list[dict[str, Any]]:
    kept = ("turns", "token_ids", "new_tokens", "idxs", "finish_reasons")
    return [
        {name: answer["choices"][0][name] for name in kept} | {"id": answer["question_id"]}
        for answer in read_answers(folder)
    ]


@pytest.mark.parametrize("task", SETS)
def test_a_set_runs_end_to_end_twice_with_the_same_answers(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*questions_of(task), *MODELS, "--limit", "1"]
    flags += ["--max-new-tokens", "5", "--rule", "fuzzy:0.3:js", "--temperature", "0.7"]
    for name in ("first", "second"):
        assert run.main([*flags, "--output", str(tmp_path / name)]) == 0
    first, second = answers(tmp_path / "first"), answers(tmp_path / "second")
    assert first == second
    assert len(first) == 1
    for answer in first:
        assert [len(ids) for ids in answer["token_ids"]] == answer["new_tokens"]
        assert len(answer["turns"]) == (2 if task == "mt_bench" else 1)
    assert score.main([str(tmp_path / "first"), "--json"]) == 0
    figures = json.loads((tmp_path / "first" / "scores.json").read_text())
    assert figures
    capsys.readouterr()


def test_the_arms_of_a_speed_run_give_the_same_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--task", "chat", *MODELS, "--limit", "1", "--max-new-tokens", "12"]
    flags += ["--arms", "hf,hf-lookup,plain,exact,fuzzy:inf:js", "--output", str(tmp_path)]
    assert speed.main(flags) == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    same = {name: arm["same_ids_as_plain"] for name, arm in report["arms"].items()}
    assert {same[name] for name in ("hf", "hf-lookup", "plain", "exact")} == {1.0}
    lengths = {name: arm["acceptance_length"] for name, arm in report["arms"].items()}
    assert lengths["fuzzy:inf:js"] > lengths["exact"] >= 1.0
    assert report["environment"]["dtype"] == "float32"
    assert "exact" in capsys.readouterr().out


def test_a_replay_scores_many_rules_on_the_trees_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--task", "chat", *MODELS, "--limit", "1", "--max-new-tokens", "12"]
    flags += ["--temperature", "1", "--rules", "fuzzy,coverage,fuzzy_2025"]
    assert replay.main([*flags, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "replay.json").read_text())["rows"]
    assert len(rows) > 30
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    capsys.readouterr()
