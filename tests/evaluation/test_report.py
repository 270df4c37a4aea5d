"""The report on folders whose figures are known."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.stats import GenerationStats
from evaluation.answers import RunFolder
from evaluation.questions import Question
from evaluation.report import main
from evaluation.report_data import Figure, Ratios
from evaluation.report_sections import read_sections
from evaluation.score import main as score

PNG_START = b"\x89PNG\r\n\x1a\n"
TURN = ("turns", "idxs", "new_tokens", "wall_time", "finish_reasons", "token_ids", "stats")
NUMBERS = (4, 9, 25, 36)
SETTINGS: dict[str, Any] = {
    "questions": "0123456789abcdef",
    "target": "demo",
    "draft_head": "demo",
    "dtype": "float32",
    "tree": "16,4,4",
    "budget": None,
    "temperature": 0.0,
    "max_new_tokens": 64,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
}


def save_run(
    folder: Path,
    rule: str,
    *,
    numbers: tuple[int, ...] = NUMBERS,
    length: int = 10,
    seconds: float = 2.0,
    task: str = "math",
    **settings: Any,
) -> str:
    """A run that says `numbers` to the questions, in answers of a length that begin alike."""
    kind = task if task in ("math", "code") else "chat"
    run = RunFolder(folder, "model")
    folder.mkdir(parents=True)
    record = {"task": task, "kind": kind, "model_id": "model", "device": "cpu"}
    run.write_run(record | {"settings": SETTINGS | {"rule": rule} | settings})
    run.write_questions(
        Question(n, kind, (f"{n} as a number?",), (f"#### {right}",))
        for n, right in enumerate(NUMBERS)
    )
    for question_id, number in enumerate(numbers):
        is_exact = rule in ("exact", "plain")
        stats = GenerationStats(
            seed=0,
            rule=rule,
            tree="16,4,4",
            num_tokens=length,
            num_cycles=4,
            regret_spent=None if is_exact else 0.1 * length,
            prefill_s=0.2,
            tried_by_depth=[4, 3],
            accepted_by_depth=[3, 1],
            phases_s={"draft": 0.3, "target": 1.0, "verify": 0.1, "commit": 0.1},
        )
        ids = [1, 2, 3, 4, 5, *([6] * (length - 5) if is_exact else [7] * (length - 5))]
        turn = (f"It is {number}.", 4, length, seconds, "stop", ids, stats.to_dict())
        choice = {"index": 0} | {name: [value] for name, value in zip(TURN, turn, strict=True)}
        run.append({"question_id": question_id, "model_id": "model", "choices": [choice]}, 0)
    run.merge(list(range(len(NUMBERS))))
    return str(folder)


def save_speed(folder: Path, seconds: dict[str, float], **settings: Any) -> str:
    """A speed run in which each arm takes its seconds for ten tokens."""
    folder.mkdir(parents=True)
    first = next(iter(seconds.values()))
    arms = {
        name: {
            "ratio": dict.fromkeys(("median", "low", "high"), first / each),
            "tokens_per_second": 10 / each,
            "acceptance_length": None if name == "plain" else 2.25,
            "acceptance_length_macro": None,
            "acceptance_by_depth": None,
            "phases_s": {"prefill": 1.0, "target": 4 * each - 1.0, "rest": 0.0},
            "same_ids_as_plain": None,
            "num_tokens": 40,
            "seconds": 4 * each,
            "attention": "sdpa",
        }
        for name, each in seconds.items()
    }
    counts = {name: {"tokens": 10, "seconds": each} for name, each in seconds.items()}
    record = {
        "baseline": next(iter(seconds)),
        "arms": arms,
        "num_questions": len(NUMBERS),
        "per_question": [{"question_id": n, "arms": counts} for n in range(len(NUMBERS))],
        "settings": SETTINGS | {"task": "math", "device": "cpu"} | settings,
        "notes": ["a note of the speed run"],
    }
    (folder / "speed.json").write_text(json.dumps(record))
    return str(folder)


def save_replay(folder: Path, **settings: Any) -> str:
    """A replay of three rules, one of them with an infinite cost."""
    folder.mkdir(parents=True)
    rows = [
        {
            "rule": rule,
            "acceptance_length": length,
            "cost_per_token": cost,
            "gain": length / 2.0 - 1.0,
            "intervals": {"gain": [length / 2.0 - 1.1, length / 2.0 - 0.9]},
        }
        for rule, length, cost in (
            ("exact", 2.0, 0.0),
            ("fuzzy:0.1:js", 2.2, 0.04),
            ("fuzzy:0.3:js", 2.6, 0.09),
            ("coverage:inf", 3.0, "inf"),
        )
    ]
    record = {
        "cost": "regret per token, nats",
        "num_prompts": 4,
        "settings": SETTINGS | {"task": "math"} | settings,
        "rows": rows,
        "frontier": [{"max_cost_per_token": 0.05} | rows[1], {"max_cost_per_token": 0.1} | rows[2]],
    }
    (folder / "replay.json").write_text(json.dumps(record))
    return str(folder)


def save_all(folder: Path) -> list[str]:
    """Two tasks, a control, speed and replay: all that a page can show."""
    return [
        save_run(folder / "fuzzy-0.3", "fuzzy:0.3:js", seconds=1.0, numbers=(4, 9, 25, 0)),
        save_run(folder / "exact", "exact"),
        save_run(folder / "fuzzy-0.1", "fuzzy:0.1:js", seconds=1.6),
        save_run(folder / "min-p", "exact", min_p=0.1, seconds=0.8, numbers=(4, 9, 0, 0)),
        save_run(folder / "coverage", "coverage:0.5", seconds=1.25, length=8, budget=3.0),
        save_speed(folder / "speed", {"exact": 3.0, "fuzzy:0.3:js": 2.0}),
        save_replay(folder / "replay"),
        save_run(folder / "chat-exact", "plain", task="chat", tree=None, draft_head=None),
        save_run(folder / "chat-fuzzy", "fuzzy:0.3:js", task="chat", seconds=1.0),
    ]


def write_report(folder: Path, *folders: str) -> str:
    assert main([*folders, "--output", str(folder)]) == 0
    return (folder / "report.html").read_text()


def refused(capsys, *folders: str) -> str:
    """The error of folders of which no report can be made."""
    output = Path("never-written")
    assert main([*folders, "--output", str(output)]) == 2
    assert not output.exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_speed_up_is_per_token() -> None:
    ratios = Ratios.of({1: (5, 1.0), 2: (0, 1.0), 3: (5, 1.0)}, {1: (10, 4.0), 2: (10, 4.0)}, 0)
    assert ratios.wall_time == Figure(4.0, 4.0, 4.0)
    assert ratios.length == Figure(0.5, 0.5, 0.5)
    assert ratios.speed_up == Figure(2.0, 2.0, 2.0)
    assert Ratios.of({}, {}, 0) == Ratios(None, None, None)


def test_a_mean_lies_in_its_interval_and_the_seed_decides_it() -> None:
    values = [0.137 * n**2 % 1.0 for n in range(30)]
    figure = Figure.mean(values, 1)
    assert figure == Figure.mean(values, 1) != Figure.mean(values, 2)
    assert figure is not None
    assert figure.value == pytest.approx(sum(values) / 30)
    # Near the normal interval of a mean.
    spread = 1.96 * statistics.pstdev(values) / 30**0.5
    assert figure.high - figure.low == pytest.approx(2 * spread, rel=0.1)
    assert figure.low < figure.value < figure.high


def test_runs_are_compared_with_the_exact_one_line_by_line(tmp_path: Path) -> None:
    math, chat = read_sections(save_all(tmp_path), seed=0)
    assert [point.label for point in math.points] == [
        "exact",
        "exact min_p 0.1",
        "fuzzy:0.1:js",
        "fuzzy:0.3:js",
        "coverage:0.5 budget 3.0",
    ]
    assert list(math.lines()) == ["exact, min_p varied", "fuzzy:js", "coverage, budget"]
    assert [point.is_control for point in math.points] == [False, True, False, False, False]
    control, first, second, coverage = math.points[1:]
    assert control.ratios.speed_up == Figure(2.5, 2.5, 2.5)
    assert control.scores["against_exact"]["agreement"]["equal"] == 1.0
    assert first.ratios.speed_up == Figure(1.25, 1.25, 1.25)
    assert second.ratios.speed_up == Figure(1.5, 1.5, 1.5)  # side by side, not 2.0
    assert (second.ratios.source, first.ratios.source) == (tmp_path / "speed", None)
    assert coverage.ratios.wall_time == Figure(1.6, 1.6, 1.6)
    assert coverage.ratios.speed_up is not None
    assert coverage.ratios.speed_up.value == pytest.approx(1.6 * 0.8)
    assert (first.prefix.value, coverage.prefix.value) == (0.5, 0.5)
    assert first.cost == pytest.approx(0.1)
    assert second.accuracy is not None
    assert second.accuracy.value == 0.75
    assert (math.is_scored, chat.is_scored) == (True, False)
    assert chat.quality(chat.points[1]).value == 0.5
    assert [point.label for point in chat.points] == ["plain", "fuzzy:0.3:js"]


def test_where_nothing_is_right_agreement_is_the_quality(tmp_path: Path) -> None:
    wrong = (0, 0, 0, 0)
    folders = [
        save_run(tmp_path / "exact", "exact", numbers=wrong),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js"),
    ]
    (section,) = read_sections(folders, seed=0)
    assert section.quality_name == "agreement with exact"
    assert section.quality(section.points[1]) == section.points[1].prefix
    assert any("exact has no right answer" in note for note in section.notes)
    folders[0] = save_run(tmp_path / "right", "exact")
    (section,) = read_sections(folders, seed=0)
    assert section.quality_name == "accuracy"
    assert not any("exact has no right answer" in note for note in section.notes)


def test_rates_by_depth_and_phases_are_those_of_the_turns(tmp_path: Path) -> None:
    (section,) = read_sections([save_run(tmp_path / "exact", "exact")], seed=0)
    (point,) = section.points
    assert point.depth_rates == pytest.approx([3 / 4, 1 / 3])
    assert point.phases_ms == pytest.approx(
        {"prefill": 20, "draft": 30, "target": 100, "verify": 10, "commit": 10, "rest": 30}
    )


def test_an_accelerator_has_no_phases(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "exact", "exact")
    path = Path(folder) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cuda:0"}))
    page = write_report(tmp_path / "out", folder)
    assert "not made on a CPU" in page
    assert not list((tmp_path / "out").glob("*phases*"))


def test_stored_scores_are_read_and_stale_ones_are_not(tmp_path: Path) -> None:
    exact = save_run(tmp_path / "exact", "exact")
    ours = save_run(tmp_path / "fuzzy", "fuzzy:0.3:js")
    assert score([ours]) == 0
    path = Path(ours) / "scores.json"
    stored = json.loads(path.read_text())
    stored["accuracy"] |= {"share": 0.25, "low": 0.1, "high": 0.4}
    path.write_text(json.dumps(stored))
    point = read_sections([exact, ours], seed=0)[0].points[1]
    assert point.accuracy == Figure(0.25, 0.1, 0.4)
    assert point.scores["against_exact"]["agreement"]["common_prefix"] == 0.5
    path.write_text(json.dumps(stored | {"num_tokens": 1}))
    point = read_sections([exact, ours], seed=0)[0].points[1]
    assert point.accuracy is not None
    assert point.accuracy.value == 1.0


def test_the_page_stands_alone_and_shows_everything(tmp_path: Path, capsys) -> None:
    page = write_report(tmp_path / "out", *save_all(tmp_path / "runs"))
    images = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">', page)
    assert page.count("<img ") == len(images) == 5 + 2 + 5 - 1 + 1
    files = sorted((tmp_path / "out").glob("*.png"))
    assert sorted(base64.b64decode(data) for data, _ in images) == sorted(
        path.read_bytes() for path in files
    )
    assert all(path.read_bytes().startswith(PNG_START) for path in files)
    assert "fuzzy:0.3:js: 1.50x at 75.0%" in images[0][1]
    assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(|<script""", page)
    levels = [int(level) for level in re.findall(r"<h([1-6])>", page)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))
    for words in (
        "math, temperature 0",
        "chat, temperature 0",
        "side by side",
        "not comparable",
        "A note of the speed run.",
        "not what got worse",
    ):
        assert words in page
    assert "report.html and 12 pictures" in capsys.readouterr().out


def test_a_control_is_read_at_the_speed_of_the_relaxed_run(tmp_path: Path) -> None:
    folders = [
        save_run(tmp_path / "exact", "exact"),
        save_run(tmp_path / "min-p", "exact", min_p=0.1, seconds=1.0, numbers=(4, 9, 0, 0)),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js", seconds=2 / 1.5),
        save_run(tmp_path / "more", "fuzzy:0.9:js", seconds=0.5),
    ]
    page = write_report(tmp_path / "out", *folders)
    row = "<td>1.50x</td><td>100.0%</td><td>75.0%</td><td>+25.0 points</td>"
    assert row in page
    assert "faster than every control" in page


def test_markup_of_a_run_is_text(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>$x_$'
    folders = [save_run(tmp_path / f"<b>{n}", "exact", task=evil, seed=1) for n in "a"]
    folders.append(save_run(tmp_path / "<i>&", "fuzzy:0.3:$js_$", task=evil, seed=1))
    page = write_report(tmp_path / "out", *folders)
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(&quot;1&quot;)" in page


def test_the_same_folders_give_the_same_files(tmp_path: Path) -> None:
    folders = save_all(tmp_path / "runs")
    output = tmp_path / "out"
    write_report(output, *folders)
    files = {path: path.read_bytes() for path in output.iterdir()}
    write_report(output, *folders, folders[0] + "/.")
    assert {path: path.read_bytes() for path in output.iterdir()} == files
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_speed_run_of_other_settings_stands_by_itself(tmp_path: Path) -> None:
    folders = [
        save_run(tmp_path / "exact", "exact"),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js", seconds=1.0),
        save_speed(tmp_path / "speed", {"exact": 3.0, "fuzzy:0.3:js": 2.0}, dtype="bfloat16"),
        save_speed(tmp_path / "warm", {"exact": 3.0, "plain": 6.0}, temperature=1.0),
        save_replay(tmp_path / "replay", temperature=1.0),
    ]
    section, warm = read_sections(folders, seed=0)
    assert section.points[1].ratios.source is None
    assert [each.folder.name for each in section.speeds] == ["speed"]
    assert [each.folder.name for each in (*warm.speeds, *warm.replays)] == ["warm", "replay"]
    page = write_report(tmp_path / "out", *folders)
    assert "dtype is &#x27;bfloat16&#x27; there, &#x27;float32&#x27;" in page
    assert "math, temperature 1" in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda:0"}, "device is &#x27;cuda:0&#x27; there, &#x27;cpu&#x27; in"),
        ({"max_new_tokens": 256}, "max_new_tokens is 256 there, 64 in"),
    ],
)
def test_a_speed_run_of_another_device_or_length_does_not_time_the_runs(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folders = [
        save_run(tmp_path / "exact", "exact"),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js", seconds=1.0),
        save_speed(tmp_path / "speed", {"exact": 3.0, "fuzzy:0.3:js": 2.0}, **changes),
    ]
    page = write_report(tmp_path / "out", *folders)
    assert f"does not time these runs: {words}" in page
    assert "side by side</td>" not in page


def test_a_run_that_was_resumed_on_another_device_is_not_timed_by_a_speed_run(
    tmp_path: Path,
) -> None:
    folders = [
        save_run(tmp_path / "exact", "exact"),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js", seconds=1.0),
        save_speed(tmp_path / "speed", {"exact": 3.0, "fuzzy:0.3:js": 2.0}),
    ]
    assert read_sections(folders, seed=0)[0].points[1].ratios.source == tmp_path / "speed"
    path = tmp_path / "fuzzy" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"resumed": [{"device": "cuda:0"}]}))
    (section,) = read_sections(folders, seed=0)
    assert section.points[1].ratios.source is None
    assert "device is 'cpu' there, 'cuda:0' in" in section.notes[-1]


def test_an_arm_is_its_rule_however_it_is_written(tmp_path: Path) -> None:
    folders = [
        save_run(tmp_path / "exact", "exact"),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js", seconds=1.0),
        save_speed(tmp_path / "speed", {"exact": 3.0, "fuzzy:0.30:js": 2.0}),
    ]
    (section,) = read_sections(folders, seed=0)
    assert section.points[1].ratios.speed_up == Figure(1.5, 1.5, 1.5)
    assert list(section.speeds[0].arms) == ["exact", "fuzzy:0.30:js"]


def test_a_question_file_is_one_task_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "questions.jsonl"
    file.touch()
    monkeypatch.chdir(tmp_path)
    folders = [
        save_run(tmp_path / "exact", "exact", task=str(file)),
        save_run(tmp_path / "fuzzy", "fuzzy:0.3:js", task="questions.jsonl"),
        save_speed(tmp_path / "speed", {"exact": 3.0, "plain": 2.0}, task=str(file)),
        save_replay(tmp_path / "replay", task="./questions.jsonl"),
    ]
    (section,) = read_sections(folders, seed=0)
    assert section.task == str(file)
    assert (len(section.points), len(section.speeds), len(section.replays)) == (2, 1, 1)


def test_runs_of_packed_and_of_plain_weights_are_told(tmp_path: Path) -> None:
    folders = [save_run(tmp_path / name, name) for name in ("exact", "plain")]
    paths = [Path(folder) / "run.json" for folder in folders]
    records = [json.loads(path.read_text()) for path in paths]
    paths[0].write_text(json.dumps(records[0] | {"packed_weights": True}))
    assert read_sections(folders, seed=0)[0].notes == []  # an older run does not say
    paths[1].write_text(json.dumps(records[1] | {"packed_weights": False}))
    note = "the runs differ in packed_weights: their times say little"
    assert read_sections(folders, seed=0)[0].notes == [note]


def test_an_unfinished_speed_run_is_marked(tmp_path: Path) -> None:
    folder = save_speed(tmp_path / "speed", {"exact": 3.0, "plain": 2.0})
    assert "Unfinished" not in write_report(tmp_path / "out", folder)
    path = tmp_path / "speed" / "speed.json"
    counts = {"num_planned": 80, "num_left_out": 5}
    path.write_text(json.dumps(json.loads(path.read_text()) | counts))
    page = write_report(tmp_path / "out", folder)
    assert "Unfinished: 4 of 80 questions are measured so far" in page
    assert "5 questions do not fit the context: left out." in page


def test_code_without_scores_is_not_run_and_the_page_says_so(tmp_path: Path) -> None:
    folders = [save_run(tmp_path / rule[:5], rule, task="code") for rule in ("exact", "regret:1")]
    page = write_report(tmp_path / "out", *folders)
    assert "Code is not scored" in page
    assert "Agreement" in page


def test_unfinished_runs_are_named(tmp_path: Path) -> None:
    folders = [
        save_run(tmp_path / rule[:5], rule, numbers=(4, 9)) for rule in ("exact", "fuzzy:0.3:js")
    ]
    page = write_report(tmp_path / "out", *folders)
    assert "Questions without an answer yet: exact, fuzzy:0.3:js." in page
    assert "<td>2/4</td>" in page


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [save_run(tmp_path / "exact", "exact")]
    folders += [save_run(tmp_path / name, "fuzzy:0.3:js", tree=name) for name in ("a", "b")]
    (section,) = read_sections(folders, seed=0)
    labels = [point.label for point in section.points]
    assert labels == ["exact", "fuzzy:0.3:js (a)", "fuzzy:0.3:js (b)"]


def test_folders_that_do_not_go_together_are_named(tmp_path: Path, capsys) -> None:
    exact = save_run(tmp_path / "exact", "exact")
    fuzzy = save_run(tmp_path / "fuzzy", "fuzzy:0.3:js")
    fewer = save_run(tmp_path / "fewer", "fuzzy:0.1:js", numbers=(4, 9))
    others = save_run(tmp_path / "others", "fuzzy:0.1:js", questions="fedcba9876543210")
    target = save_run(tmp_path / "target", "fuzzy:0.1:js", target="another")
    for folders, words in (
        ([fuzzy], ["no exact run of task 'math' at temperature 0", repr(fuzzy)]),
        ([exact, fewer], [repr(exact), repr(fewer), "different question sets", "2 and 4 answers"]),
        ([exact, others], [repr(exact), repr(others), "different question sets"]),
        ([exact, target], ["has target 'another'", repr(exact), repr(target)]),
    ):
        error = refused(capsys, *folders)
        assert all(each in error for each in words), error


def test_folders_without_a_report_in_them_are_named(tmp_path: Path, capsys) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{str(empty)!r} holds no run" in refused(capsys, str(empty))
    assert "no folder" in refused(capsys, str(tmp_path / "absent"))
    (empty / "speed.json").write_text('{"arms": {"exact": {}}}')
    assert "is not a report of evaluation.speed" in refused(capsys, str(empty))
    (empty / "speed.json").write_text("[")
    assert "is not a report of evaluation.speed" in refused(capsys, str(empty))
    (empty / "speed.json").unlink()
    (empty / "replay.json").write_text("3")
    assert "is not a report of evaluation.replay" in refused(capsys, str(empty))
    (empty / "replay.json").unlink()
    (empty / "run.json").write_text('{"model_id": "replay", "settings": {}}')
    assert "a replay without replay.json" in refused(capsys, str(empty))


def test_spoilt_figures_of_a_speed_run_are_refused(tmp_path: Path, capsys) -> None:
    folder = save_speed(tmp_path / "speed", {"exact": 3.0, "plain": 2.0})
    path = tmp_path / "speed" / "speed.json"
    whole = path.read_text()
    for old, new in (
        ('"num_tokens": 40', '"num_tokens": 0'),
        ('"median": 1.0', '"median": NaN'),
        ('"seconds": 3.0', '"seconds": Infinity'),
        ('"rest": 0.0', '"other": 0.0'),
        ('"temperature": 0.0', '"temperature": NaN'),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new, 1))
        assert f"{path} is not a report of evaluation.speed" in refused(capsys, folder)


def test_spoilt_figures_of_a_replay_are_refused(tmp_path: Path, capsys) -> None:
    folder = save_replay(tmp_path / "replay")
    path = tmp_path / "replay" / "replay.json"
    whole = json.loads(path.read_text())
    row = whole["rows"][0]
    for changes in (
        {"rows": []},
        {"rows": [row | {"acceptance_length": math.nan}]},
        {"rows": [row | {"cost_per_token": math.nan}]},
        {"frontier": [row | {"max_cost_per_token": math.inf}]},
    ):
        path.write_text(json.dumps(whole | changes))
        assert f"{path} is not a report of evaluation.replay" in refused(capsys, folder)
    level = whole["frontier"][0] | {"max_cost_per_token": 1e308}
    path.write_text(json.dumps(whole | {"frontier": [level]}))
    assert "1e+308" in write_report(tmp_path / "out", folder)


def test_a_run_without_its_settings_is_refused(tmp_path: Path, capsys) -> None:
    folder = save_run(tmp_path / "exact", "exact")
    path = tmp_path / "exact" / "run.json"
    whole = json.loads(path.read_text())
    for changes, words in (
        ({"task": None}, "task"),
        ({"kind": 3}, "kind"),
        ({"settings": {}}, "rule"),
        ({"settings": whole["settings"] | {"temperature": "warm"}}, "temperature"),
    ):
        path.write_text(json.dumps(whole | changes))
        error = refused(capsys, folder)
        assert f"run.json of {folder!r} has no {words} as evaluation.run writes it" in error
    del whole["kind"]
    path.write_text(json.dumps(whole))
    assert f"run.json of {folder!r} has no kind" in refused(capsys, folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("choices", None),
        ("choices", []),
        ("choices", [3]),
        ("turns", []),
        ("turns", [3]),
        ("wall_time", [math.nan]),
        ("new_tokens", [-1]),
        ("token_ids", [["a"]]),
        ("stats", [None]),
        ("idxs", [4, 4]),
    ],
)
def test_incomplete_answers_are_named_by_their_line(
    tmp_path: Path, capsys, name: str, value: Any
) -> None:
    folder = save_run(tmp_path / "exact", "exact")
    path = Path(folder) / "model_answer" / "model.jsonl"
    lines = path.read_text().splitlines()
    answer = json.loads(lines[1])
    (answer if name == "choices" else answer["choices"][0])[name] = value
    path.write_text("\n".join([lines[0], json.dumps(answer), *lines[2:]]) + "\n")
    expected = f"{path}, line 2: the answer's {name} are not as evaluation.run writes them"
    assert expected in refused(capsys, folder)
    assert score([folder]) == 2
    assert expected in capsys.readouterr().err


def test_statistics_of_others_are_refused(tmp_path: Path, capsys) -> None:
    folder = save_run(tmp_path / "exact", "exact")
    path = Path(folder) / "model_answer" / "model.jsonl"
    path.write_text(path.read_text().replace('"kl_spent"', '"other"'))
    assert f"the answers or scores in {folder!r} are not as" in refused(capsys, folder)
    assert score([folder]) == 2
    assert f"the answers in {folder!r} are not as evaluation.run" in capsys.readouterr().err


def test_answers_and_scores_of_others_are_refused(tmp_path: Path, capsys) -> None:
    exact = save_run(tmp_path / "exact", "exact")
    (Path(exact) / "scores.json").write_text("[]")
    assert "is not of evaluation.score" in refused(capsys, exact)
    (Path(exact) / "scores.json").unlink()
    path = Path(exact) / "model_answer" / "model.jsonl"
    path.write_text(path.read_text().replace('"stats"', '"other"'))
    assert "are not as evaluation.run" in refused(capsys, exact)


def test_wrong_flags_are_told(tmp_path: Path, capsys) -> None:
    exact = save_run(tmp_path / "exact", "exact")
    assert main([exact, "--output", exact + "/run.json"]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main([exact, "--output", str(tmp_path / "out"), "--seed", "-1"]) == 2
    assert "--seed must be >= 0" in capsys.readouterr().err
