"""The replay against the recorder and live decoding, its resumption, its figures, bad input."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_fsd.acceptance import RULES, build_rule
from eagle_fsd.calibrate import Calibration, Row, grid
from eagle_fsd.checkpoint import save_head
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.divergence import INFINITE_UNDER_REDUCED_VOCAB
from eagle_fsd.recorder import Expectation, Recorder
from eagle_fsd.tuning import TreeChoice, setting_of, store_choice
from evaluation.answerer import turn_seed
from evaluation.frontier import LARGEST_LEVEL, best_lines, draw, lines
from evaluation.questions import read_questions
from evaluation.replay import (
    PICTURE_FILE,
    REPORT_FILE,
    SUMS_FILE,
    Record,
    SumsFile,
    bootstrap,
    choose_rules,
    main,
    report,
    summarise,
)
from tests.scripted import byte_tokenizer
from tests.stubs import TableDrafter, TableTarget, tiny_head, tiny_model

SETTINGS = {"max_new_tokens": 10, "tree": "6,3,2"}
POINTS = "fuzzy:0.4:js,coverage:0.5,regret:inf:1"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target, a model close to it and two heads, and files of questions."""
    root = tmp_path_factory.mktemp("models")
    model = tiny_model(vocab_size=272, initializer_range=0.15)
    model.save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    with torch.no_grad():  # drafts what the target says, most of the time
        for number, weight in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(root / "near")
    byte_tokenizer().save_pretrained(root / "near")
    for name, seed in (("head", 1), ("other", 2)):
        save_head(tiny_head(model, seed), root / name)
    turns = ["why?", "how?", "who?", "and when, in the end?"]
    lines = [json.dumps({"question_id": f"q{i}", "turns": [t, "2"]}) for i, t in enumerate(turns)]
    (root / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (root / "fewer.jsonl").write_text("\n".join(lines[:3]) + "\n")
    (root / "bad.jsonl").write_text(lines[0] + "\n{}\n")
    return root


def arguments(models: Path, output: Path, **changes: Any) -> list[str]:
    flags = {
        "target": models / "target",
        "draft_head": models / "head",
        "task": models / "questions.jsonl",
        "output": output,
        "rules": POINTS,
        "device": "cpu",
        "temperature": 1.0,
        **SETTINGS,
    } | changes
    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    return [f"--{name}={value}" for name, value in given.items()]


def status(argv: list[str]) -> int:
    """The status of the command, argparse's own exits included."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def result(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(
        (folder / REPORT_FILE).read_text(), parse_constant=pytest.fail
    )
    return data


def by_rule(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["rule"]: row for row in result(folder)["rows"]}


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(arguments(models, folder)) == 0
    return folder


# Figures


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_is_scored_as_a_recorder_of_the_same_request_scores_it(
    models: Path, tmp_path: Path, temperature: float
) -> None:
    assert main(arguments(models, tmp_path, temperature=temperature)) == 0
    decoder = SpeculativeDecoder.from_pretrained(
        models / "target", draft_head=models / "head", device="cpu"
    )
    total, num_tokens, num_cycles = Expectation(), 0, 0
    recorder = Recorder(["fuzzy:0.4:js"])  # alone: no other rule shares its trees
    for question in read_questions(models / "questions.jsonl"):
        stats = decoder.generate(
            question.turns[0],
            observer=recorder.observe,
            temperature=temperature,
            seed=turn_seed(0, question.question_id, 0, 0),
            **SETTINGS,  # type: ignore[typeddict-item]
        ).stats
        num_tokens += stats.num_tokens - 1
        num_cycles += stats.num_cycles
    total = recorder.totals[0]
    row = by_rule(tmp_path)["fuzzy:0.4:js"]
    assert total.num_rescued > 0
    assert row["num_cycles"] == total.num_cycles == num_cycles
    assert row["acceptance_length"] == pytest.approx(total.acceptance_length, rel=1e-12)
    assert row["cost_per_token"] == pytest.approx(total.cost_per_token, rel=1e-12)
    assert row["share_rescued"] == pytest.approx(total.share_rescued, rel=1e-12)
    for name in ("poor_mass", "doubled_mass"):
        wanted = getattr(total, name) / total.num_tokens
        assert row[f"{name}_per_token"] == pytest.approx(wanted, rel=1e-12)
    decoded = result(tmp_path)["decoded"]
    assert decoded == {"acceptance_length": num_tokens / num_cycles, "num_cycles": num_cycles}


def test_at_temperature_0_the_row_of_exact_is_the_exact_answers_own_acceptance_length(
    models: Path, tmp_path: Path
) -> None:
    changes = {"draft_head": None, "draft_model": models / "near", "max_new_tokens": 24}
    assert main(arguments(models, tmp_path, temperature=0.0, **changes)) == 0
    exact = by_rule(tmp_path)["exact"]
    assert exact["acceptance_length"] == result(tmp_path)["decoded"]["acceptance_length"] > 1.2
    assert exact["cost_per_token"] == exact["share_rescued"] == exact["gain"] == 0.0
    assert result(tmp_path)["cost"] == "regret per token, nats"


def test_all_rules_with_all_divergences_that_fit_are_scored(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(models, tmp_path, rules=None, limit=1, kl_levels="0.5,0.02")) == 0
    rows = by_rule(tmp_path)
    assert {rule.partition(":")[0] for rule in rows} == set(RULES)
    for divergence in ("js", "tv", "kl_draft_target", "kl_target_draft", "ag_mean"):
        assert f"fuzzy:0.1:{divergence}" in rows
    assert [level["max_cost_per_token"] for level in result(tmp_path)["frontier"]] == [0.02, 0.5]
    for level in result(tmp_path)["frontier"]:
        affordable = [
            row["acceptance_length"]
            for row in rows.values()
            if float(row["cost_per_token"]) <= level["max_cost_per_token"]
        ]
        assert level["acceptance_length"] == max(affordable)
        assert level["gain"] == rows[level["rule"]]["gain"]
    out = capsys.readouterr().out
    assert all(rule in out for rule in rows)
    assert "at most, KL per token" in out


def test_a_reduced_vocabulary_or_no_law_leaves_out_the_rules_that_do_not_fit() -> None:
    decoder = SpeculativeDecoder(
        TableTarget(torch.zeros(5, 5, 5)), TableDrafter(torch.zeros(5, 5).log_softmax(-1))
    )
    drafter: Any = decoder.drafter
    everything = {rule.spec for rule in choose_rules([], decoder)}
    drafter.has_reduced_vocabulary = True
    fitting = {rule.spec for rule in choose_rules([], decoder)}
    infinite = {s for s in everything if any(d in s for d in INFINITE_UNDER_REDUCED_VOCAB)}
    assert infinite
    assert everything - fitting == infinite
    with pytest.raises(ValueError, match="'ag_mean' is infinite"):
        choose_rules(["fuzzy:0.1:ag_mean"], decoder)
    drafter.has_draft_probs = False
    rules = choose_rules([], decoder)
    assert rules
    assert not any(rule.needs_draft_probs for rule in rules)
    with pytest.raises(ValueError, match="this drafter has none"):
        choose_rules(["fuzzy"], decoder)
    assert choose_rules(["coverage:0.1", "coverage"], decoder) == grid("coverage:0.1") + [
        rule for rule in grid("coverage") if rule.spec != "coverage:0.1"
    ]


def record(number: int, length: float, cost: float) -> Record:
    sums = {"exact": Expectation(10, 10.0 * length), "fuzzy:1:js": Expectation(10, 40.0, 1.0, cost)}
    return Record(number, 10, 10, 10, sums)


def test_intervals_hold_the_figures_and_narrow_with_the_questions() -> None:
    few = [record(n, 1.0 + 0.1 * (n % 5), 4.0 * (n % 2)) for n in range(10)]
    many = [dataclasses.replace(few[n % 10], question_id=n) for n in range(200)]
    widths = []
    for records in (few, many):
        ends = bootstrap(records, seed=3)
        assert ends == bootstrap(records, seed=3)
        for rule in ("exact", "fuzzy:1:js"):
            total = sum((each.sums[rule] for each in records), Expectation())
            for name in ("acceptance_length", "cost_per_token"):
                low, high = map(float, ends[rule][name])
                assert low <= getattr(total, name) <= high
        assert ends["exact"]["gain"] == [0.0, 0.0]
        low, high = map(float, ends["exact"]["acceptance_length"])
        widths.append(high - low)
    # The ends of a mean over 20 times the questions are sqrt(20) = 4.5 times closer.
    assert widths[0] / widths[1] == pytest.approx(20**0.5, rel=0.25)


def test_an_infinite_cost_is_told_and_spoils_no_other_figure(tmp_path: Path) -> None:
    records = [record(1, 1.5, math.inf), record(2, 1.7, 1.0), record(3, 1.6, 1.0)]
    calibration = summarise(records, {"temperature": 1.0})
    data = report(calibration, records, [0.1, 1.0], seed=0)
    row = data["rows"][1]
    assert row["cost_per_token"] == "inf"
    assert row["intervals"]["cost_per_token"][1] == "inf"
    assert row["intervals"]["acceptance_length"] == [4.0, 4.0]
    json.dumps(data, allow_nan=False)
    assert [level["rule"] for level in data["frontier"]] == ["exact", "exact"]
    draw(calibration, [0.1, 1.0], tmp_path / "picture.png")


def test_records_survive_a_line_and_infinity_too() -> None:
    one = record(7, 1.5, math.inf)
    assert Record.from_line(one.to_line()) == one
    assert b"Infinity" not in one.to_line()


# Resuming


def test_a_run_that_was_killed_at_any_byte_goes_on_to_the_same_figures(
    models: Path, whole: Path, tmp_path: Path
) -> None:
    content = (whole / SUMS_FILE).read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 4
    for cut in (0, ends[0] - 1, ends[1] + 37, len(content) - 1):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "run.json").write_bytes((whole / "run.json").read_bytes())
        (folder / SUMS_FILE).write_bytes(content[:cut])
        assert main(arguments(models, folder)) == 0
        assert (folder / SUMS_FILE).read_bytes() == content
        assert by_rule(folder) == by_rule(whole)


def test_a_larger_limit_goes_on_and_nothing_is_decoded_twice(
    models: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    generate = SpeculativeDecoder.generate

    def counting(self: SpeculativeDecoder, prompt: Any, **options: Any) -> Any:
        decoded.append(prompt)
        return generate(self, prompt, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", counting)
    assert main(arguments(models, tmp_path, limit=2, every=2)) == 0
    assert decoded == ["why?", "who?"]
    assert result(tmp_path)["num_prompts"] == 2
    assert main(arguments(models, tmp_path)) == 0
    assert sorted(decoded) == sorted(["why?", "how?", "who?", "and when, in the end?"])
    assert by_rule(tmp_path) == by_rule(whole)
    assert main(arguments(models, tmp_path, limit=1)) == 0  # figures of fewer, lines kept
    assert len(decoded) == 4
    assert result(tmp_path)["num_prompts"] == 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"max_new_tokens": 11}, "max_new_tokens"),
        ({"seed": 1}, "seed"),
        ({"rules": "coverage"}, "rules"),
        ({"tree": "4,2,2"}, "tree"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"draft_head": "other"}, "draft_head"),
        ({"task": "fewer.jsonl"}, "task"),
    ],
)
def test_a_folder_of_other_settings_is_refused_and_kept(
    models: Path,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    name: str,
) -> None:
    for path in ("task", "draft_head"):
        if path in changes:
            changes = changes | {path: models / changes[path]}
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert status(arguments(models, whole, **changes)) == 2
    error = capsys.readouterr().err
    assert f"holds a run with {name} " in error.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{not json}\n", "line 2: not the sums of a question"),
        (b"[]\n", "line 2: not the sums of a question"),
        (b'{"question_id": 1, "sums": {"exact": [1]}}\n', "line 2: not the sums of a question"),
        (b"\n", "line 2: not the sums of a question"),
        (
            record(1, 1.0, 1.0).to_line().replace(b": 1,", b": [1],", 1) + b"\n",
            "line 2: not the sums of a question",
        ),
        (
            record(1, 1.0, 1.0).to_line().replace(b'"num_cycles": 10', b'"num_cycles": 0') + b"\n",
            "line 2: not the sums of a question",
        ),
        (
            record(1, 1.0, 1.0).to_line().replace(b"[10, 10.0", b"[0, 10.0") + b"\n",
            "line 2: not the sums of a question",
        ),
        (
            record(1, 1.0, math.inf).to_line().replace(b'"inf"', b"NaN") + b"\n",
            "line 2: not the sums of a question",
        ),
        (record(8, 1.0, 1.0).to_line() + b"\n", "line 2: holds other rules than those asked for"),
        (None, "line 2: question_id 'q0' comes twice"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(
    models: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: bytes | None,
    words: str,
) -> None:
    first, *others = (whole / SUMS_FILE).read_bytes().splitlines(keepends=True)
    content = b"".join([first, first if line is None else line, *others])
    (tmp_path / "run.json").write_bytes((whole / "run.json").read_bytes())
    (tmp_path / SUMS_FILE).write_bytes(content)
    assert status(arguments(models, tmp_path)) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / SUMS_FILE).read_bytes() == content


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    file = SumsFile(tmp_path / SUMS_FILE, ["exact", "fuzzy:1:js"])
    file.append(record(1, 1.5, 1.0))
    full = SumsFile(tmp_path / "full", [])
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*full: No space left.*goes on from it"):
        full.append(record(2, 1.5, 1.0))
    assert not full.records
    assert list(SumsFile(tmp_path / SUMS_FILE, ["exact", "fuzzy:1:js"]).records) == [1]


# The picture


def calibration_of(rules: dict[str, tuple[float, float]]) -> Calibration:
    rows = [
        Row(rule, Expectation(100, 100 * length, 1.0, 100 * length * cost, 2.0, 3.0))
        for rule, (length, cost) in rules.items()
    ]
    return Calibration(Expectation(100, 150.0), rows, False, 3, {"temperature": 1.0})


def test_the_best_divergence_of_a_rule_is_chosen_by_what_it_gains_at_the_levels() -> None:
    calibration = calibration_of(
        {
            "fuzzy:0.1:js": (1.6, 0.05),
            "fuzzy:0.5:js": (3.0, 2.0),
            "fuzzy:0.1:tv": (1.7, 0.05),
            "coverage:1": (1.2, 0.05),
        }
    )
    assert list(lines(calibration)) == ["fuzzy:js", "fuzzy:tv", "coverage"]
    assert best_lines(calibration, [0.1]) == {"fuzzy": "fuzzy:tv", "coverage": "coverage"}
    assert best_lines(calibration, [0.01, 2.0]) == {"fuzzy": "fuzzy:js", "coverage": "coverage"}


def test_the_picture_is_written_whole_or_not_at_all(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (whole / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in whole.iterdir()) == sorted(
        [".lock", "run.json", SUMS_FILE, REPORT_FILE, PICTURE_FILE]
    )
    path = tmp_path / PICTURE_FILE
    path.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            draw(calibration_of({"fuzzy:1:js": (2.0, 0.0)}), [0.0], path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [PICTURE_FILE]  # noqa: PTH208


# The command


def test_json_prints_the_report(
    models: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(models, whole), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == result(whole)
    assert printed["source"].startswith("the file ")
    assert set(printed["versions"]) >= {"torch", "transformers"}
    assert build_rule(printed["rows"][1]["rule"]).spec == "fuzzy:0.4:js"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": "fuzy"}, "unknown acceptance rule 'fuzy'*did you mean 'fuzzy'?"),
        ({"rules": "fuzzy,exact"}, "rule 'exact' has no knob to choose"),
        ({"rules": ""}, "unknown acceptance rule ''"),
        ({"rules": "lenience:2"}, "leniency must be in (0, 1]*got 2"),
        ({"temperature": 0.0, "kl_levels": "0.1"}, "above 0; use --regret-levels"),
        ({"regret_levels": "0.1"}, "--regret-levels needs temperature 0; use --kl-levels"),
        ({"kl_levels": "0.1,much"}, "--kl-levels takes numbers in 0..1e+06*got '0.1,much'"),
        ({"kl_levels": "-1"}, "--kl-levels takes numbers in 0..1e+06*got '-1'"),
        ({"kl_levels": "inf"}, "--kl-levels takes numbers in 0..1e+06*got 'inf'"),
        ({"kl_levels": "1e308"}, "--kl-levels takes numbers in 0..1e+06*got '1e308'"),
        ({"kl_levels": "1", "regret_levels": "1"}, "not allowed with"),
        ({"temperature": -1.0}, "temperature must be*got -1.0"),
        ({"max_new_tokens": 2}, "--max-new-tokens must be >= 3, got 2"),
        ({"seed": -1}, "--seed must be >= 0, got -1"),
        ({"limit": 0}, "--limit must be >= 1, got 0"),
        ({"draft_head": None}, "give --draft-head or --draft-model"),
        ({"draft_head": "none"}, "none"),
        ({"task": "none"}, "no task and no question file"),
        ({"task": "bad.jsonl"}, "line 2: question_id must be"),
        ({"task": None}, "required: --task"),
        ({"output": None}, "required: --output"),
        ({"output": ""}, "the output folder is empty"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_writes_nothing(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    for path in ("task", "draft_head"):
        if changes.get(path):
            changes = changes | {path: models / changes[path]}
    output = tmp_path / "output"
    assert status(arguments(models, **({"output": output} | changes))) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(part in captured.err for part in message.split("*"))
    assert not captured.out
    assert not output.exists()


def test_the_picture_shows_the_largest_level(tmp_path: Path) -> None:
    records = [record(1, 1.5, 2.0), record(2, 1.7, 1.0)]
    picture = tmp_path / "picture.png"
    draw(summarise(records, {"temperature": 1.0}), [LARGEST_LEVEL], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_question_file_is_one_task_however_it_is_written(
    models: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert result(whole)["task"] == result(whole)["settings"]["task"]
    assert result(whole)["task"] == str(models / "questions.jsonl")
    monkeypatch.chdir(models)
    shutil.copytree(whole, tmp_path / "copy")
    assert main(arguments(models, tmp_path / "copy", task="questions.jsonl")) == 0
    # A folder of an older version has the task as it was typed.
    path = tmp_path / "copy" / "run.json"
    stored = json.loads(path.read_text())
    stored["settings"]["task"] = "questions.jsonl"
    path.write_text(json.dumps(stored))
    assert main(arguments(models, tmp_path / "copy")) == 0


def test_a_question_that_does_not_fit_is_left_out_and_counted(
    models: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    long = {"question_id": 9, "turns": ["x" * 400]}
    first, *others = (models / "fewer.jsonl").read_text().splitlines(keepends=True)
    long = json.dumps({"question_id": 9, "turns": ["x" * 400]}) + "\n"
    questions.write_text("".join([first, long, *others]))
    output = tmp_path / "output"
    assert main(arguments(models, output, task=questions)) == 0
    printed = capsys.readouterr()
    assert "1 left out: the prompt does not fit the context" in printed.out
    assert f"questions: the file {questions}" in printed.err
    assert (result(output)["num_left_out"], result(output)["num_prompts"]) == (1, 3)
    assert len((output / SUMS_FILE).read_bytes().splitlines()) == 3
    assert (output / SUMS_FILE).read_bytes() in (whole / SUMS_FILE).read_bytes()
    questions.write_text(long)
    assert status(arguments(models, tmp_path / "none", task=questions)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: none of 1 prompts")
    assert not (tmp_path / "none" / "run.json").exists()


# Where plain decoding is known to be faster


def test_trees_are_drafted_where_auto_decodes_plainly(
    models: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    decoder = SpeculativeDecoder.from_pretrained(
        models / "target", draft_head=models / "head", device="cpu"
    )
    setting = setting_of(decoder.target, decoder.drafter)  # type: ignore[arg-type]
    store_choice(setting, TreeChoice(TreeConfig.parse("6,3,2"), 0.8))  # type: ignore[arg-type]
    output = tmp_path / "output"
    assert main(arguments(models, output, tree="auto", limit=2)) == 0
    assert main(arguments(models, output, tree="auto")) == 0
    assert (output / SUMS_FILE).read_bytes() == (whole / SUMS_FILE).read_bytes()
    assert by_rule(output) == by_rule(whole)


def test_sums_without_trees_are_made_again_and_what_is_made_alike_is_kept(
    models: Path, whole: Path, tmp_path: Path
) -> None:
    lines = (whole / SUMS_FILE).read_bytes().splitlines(keepends=True)
    empty = json.loads(lines[1])
    empty["num_trees"] = 0
    empty["sums"] = {rule: [0] * len(sums) for rule, sums in empty["sums"].items()}
    (tmp_path / "run.json").write_bytes((whole / "run.json").read_bytes())
    plain = json.dumps(empty).encode() + b"\n"
    (tmp_path / SUMS_FILE).write_bytes(lines[0] + plain)
    assert main(arguments(models, tmp_path)) == 0
    assert (tmp_path / SUMS_FILE).read_bytes() == lines[0] + plain + b"".join(lines[1:])
    assert by_rule(tmp_path) == by_rule(whole)
    short = dataclasses.replace(Record.from_line(plain), num_tokens=1)
    assert Record.from_line(plain).lacks_trees
    assert not short.lacks_trees
    file = SumsFile(tmp_path / "sums", list(short.sums))
    for each in (short, short):
        file.append(each)
    assert len((tmp_path / "sums").read_bytes().splitlines()) == 1


def test_blanks_between_rules_mean_nothing(models: Path, whole: Path, tmp_path: Path) -> None:
    for name in ("run.json", SUMS_FILE):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    assert main(arguments(models, tmp_path, rules=POINTS.replace(",", " , "))) == 0
    assert by_rule(tmp_path) == by_rule(whole)
