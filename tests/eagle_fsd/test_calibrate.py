"""Calibration: predictions against live decoding, wishes, prompt files, the command."""

from __future__ import annotations

import errno
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_fsd.__main__ import main
from eagle_fsd.acceptance import RULES, build_rule
from eagle_fsd.calibrate import Calibration, Row, calibrate, grid, grids, read_prompts, save
from eagle_fsd.checkpoint import save_head
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.recorder import Expectation
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import TreeChoice, setting_of, store_choice
from tests.laws import tables
from tests.scripted import byte_tokenizer
from tests.stubs import TableDrafter, TableTarget, head_drafter, tiny_head, tiny_model

SIZE = 24


def table_decoder() -> SpeculativeDecoder:
    """A draft that half agrees with the target, on contexts enough for no one of them to matter.

    The trees of an exact run are not quite those of a relaxed one. On a table of 12 tokens, 144
    contexts, that shift alone reaches a fifth of the acceptance length.
    """
    logits, draft = tables(1, SIZE, spread=1.0)
    agreeing = (0.6 * logits.mean(0) + 0.8 * draft).log_softmax(-1)
    return SpeculativeDecoder(TableTarget(logits), TableDrafter(agreeing))


def table_prompts(seed: int, number: int) -> list[Tensor]:
    rng = random.Random(seed)
    return [torch.tensor([[rng.randrange(SIZE), rng.randrange(SIZE)]]) for _ in range(number)]


# Predictions


@pytest.mark.parametrize(
    ("rule", "divergences", "knobs"),
    [("fuzzy", ["js"], [0.1, 0.15]), ("coverage", [], [1.5]), ("lenience", [], [0.5])],
)
def test_predicted_acceptance_length_is_within_a_tenth_of_held_out_decoding(
    rule: str, divergences: list[str], knobs: list[float]
) -> None:
    decoder = table_decoder()
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 24, "tree": "8,3,3"}
    prompts: Any = table_prompts(0, 40)
    calibration = calibrate(
        decoder, prompts, grid(rule, divergences, knobs), options, progress=False
    )
    assert calibration.num_prompts == 40
    assert not calibration.is_greedy
    num_checked = 0
    for row in calibration.rows:
        predicted = row.expectation.acceptance_length
        gain = predicted / calibration.exact.acceptance_length - 1.0
        assert gain >= 0.0
        if gain > 0.5:
            continue
        runs = [
            decoder.generate(prompt, rule=row.rule, seed=seed, **options).stats
            for seed, prompt in enumerate(table_prompts(1, 40))
        ]
        live = sum(run.num_tokens - 1 for run in runs) / sum(run.num_cycles for run in runs)
        assert predicted == pytest.approx(live, rel=0.1)
        num_checked += gain > 0.02
    assert num_checked > 0


def test_trees_are_scored_where_exact_decoding_is_faster_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    target = TargetModel(tiny_model())
    drafter = head_drafter(target)
    store_choice(setting_of(target, drafter), TreeChoice(TreeConfig(9, 3, 3), 0.5))
    decoder = SpeculativeDecoder(target, drafter)
    prompts: Any = [torch.tensor([[4, 8, 15]])]
    assert decoder.generate(prompts[0], max_new_tokens=12).stats.tree == "plain"
    options: list[dict[str, Any]] = [{}, {"tree": "auto"}, {"tree": "9,3,3"}]
    runs = [
        calibrate(decoder, prompts, ["fuzzy:inf:js"], {"max_new_tokens": 12} | each, progress=False)
        for each in options
    ]
    assert runs[0].settings["tree"] == "9,3,3"
    assert runs[0].rows == runs[1].rows == runs[2].rows
    assert runs[0].rows[0].expectation.acceptance_length > 1.0


# Wishes


def row(rule: str, length: float, cost: float) -> Row:
    return Row(rule, Expectation(num_cycles=100, num_tokens=100 * length, cost=100 * length * cost))


CALIBRATION = Calibration(
    exact=Expectation(100, 200.0),
    rows=[
        row("fuzzy:0.1:js", 2.2, 0.01),
        row("fuzzy:0.2:js", 2.5, 0.03),
        row("fuzzy:0.1:tv", 2.5, 0.02),
        row("fuzzy:0.3:js", 3.0, 0.10),
        row("fuzzy_2025:0.3:js", 3.2, math.inf),
    ],
    is_greedy=False,
    num_prompts=3,
    settings={},
)


@pytest.mark.parametrize(
    ("gain", "chosen"),
    [
        (0.0, "fuzzy:0.1:js"),
        (0.1, "fuzzy:0.1:js"),
        (0.2, "fuzzy:0.1:tv"),
        (0.5, "fuzzy:0.3:js"),
        (0.55, "fuzzy_2025:0.3:js"),
        (0.7, None),
    ],
)
def test_a_gain_takes_the_cheapest_row_that_reaches_it(gain: float, chosen: str | None) -> None:
    found = CALIBRATION.for_gain(gain)
    assert (found and found.rule) == chosen


@pytest.mark.parametrize(
    ("cost", "chosen"),
    [(0.005, None), (0.01, "fuzzy:0.1:js"), (0.02, "fuzzy:0.1:tv"), (0.2, "fuzzy:0.3:js")],
)
def test_a_bound_takes_the_longest_row_within_it(cost: float, chosen: str | None) -> None:
    found = CALIBRATION.within_cost(cost)
    assert (found and found.rule) == chosen


def test_what_is_saved_is_valid_json_and_a_picture(tmp_path: Path) -> None:
    text, picture = save(CALIBRATION, tmp_path / "new" / "folder")
    data = json.loads(text.read_text(), parse_constant=pytest.fail)
    assert [entry["rule"] for entry in data["rows"]] == [
        "exact",
        *(entry.rule for entry in CALIBRATION.rows),
    ]
    assert data["rows"][1]["acceptance_length"] == pytest.approx(2.2)
    assert data["rows"][-1]["cost_per_token"] == "inf"
    assert data["cost"] == "KL per token, nats"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in text.parent.iterdir()) == [text.name, picture.name]
    assert "fuzzy:0.1:js" in CALIBRATION.table()


# The grid


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"exact"}))
def test_every_relaxed_rule_has_a_grid(rule: str) -> None:
    rules = grid(rule)
    assert len(rules) > 5
    assert len({one.spec for one in rules}) == len(rules)
    assert not any(one.is_lossless for one in rules)


def test_a_grid_varies_divergences_and_knobs() -> None:
    specs = [rule.spec for rule in grid("fuzzy", ["js", "tv@5"], [0.1, 0.2])]
    assert specs == ["fuzzy:0.1:js", "fuzzy:0.2:js", "fuzzy:0.1:tv@5", "fuzzy:0.2:tv@5"]
    assert grid("regret:0.5:2") == [build_rule("regret:0.5:2")]


def test_divergences_go_to_those_rules_that_compare_laws() -> None:
    specs = [rule.spec for rule in grids(["coverage", "fuzzy"], ["tv"], [0.5])]
    assert specs == ["coverage:0.5", "fuzzy:0.5:tv"]
    assert grids(["regret:1", "fuzzy"], ["tv"])[0].spec == "regret:1"
    with pytest.raises(ValueError, match="'coverage' compares no laws and takes no divergence"):
        grids(["coverage", "lenience"], ["tv"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fuzy",), "unknown acceptance rule 'fuzy'.*did you mean 'fuzzy'"),
        (("exact",), "no knob to choose"),
        (("fuzzy", ["jss"]), "unknown divergence 'jss'.*did you mean 'js'"),
        (("coverage", ["js"]), "takes no divergence"),
        (("fuzzy", ["js"], [-1.0]), "threshold must be >= 0; .*got -1.0"),
        (("lenience", [], [0.0]), "leniency must be in"),
        (("fuzzy:0.3", ["tv"]), "'fuzzy:0.3' is one point of the grid"),
        (("fuzzy:0.3", [], [0.1]), "'fuzzy:0.3' is one point of the grid"),
    ],
)
def test_a_wrong_grid_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(*arguments)


def test_nothing_runs_when_a_rule_does_not_go_with_the_drafter() -> None:
    decoder = table_decoder()
    assert decoder.drafter is not None
    decoder.drafter.has_reduced_vocabulary = True  # type: ignore[misc]
    prompts: Any = table_prompts(0, 2)
    with pytest.raises(ValueError, match="'ag_mean' is infinite"):
        calibrate(decoder, prompts, grid("fuzzy", ["js", "ag_mean"]), {}, progress=False)
    assert isinstance(decoder.target, TableTarget)
    assert decoder.target.tokens == []


def test_a_calibration_without_a_tree_is_refused() -> None:
    prompts: Any = table_prompts(0, 2)
    for max_new_tokens in (1, 2):  # with two tokens the only cycle drafts nothing
        options = {"max_new_tokens": max_new_tokens}
        with pytest.raises(ValueError, match="no tree was scored"):
            calibrate(table_decoder(), prompts, grid("fuzzy"), options, progress=False)


def test_what_calibrate_cannot_do_is_named() -> None:
    prompts: Any = table_prompts(0, 2)
    for given, rules, options, words in (
        ([], grid("fuzzy"), {}, "no prompt to calibrate on"),
        (prompts, [], {}, "no rule to calibrate"),
        (prompts, grid("fuzzy"), {"rule": "exact"}, r"calibrate sets \['rule'\] itself"),
        (prompts, ["fuzy:0.3"], {}, "did you mean 'fuzzy'"),
        ([prompts[0], torch.empty(1, 0, dtype=torch.int64)], ["fuzzy:1"], {}, "prompt 2: "),
    ):
        with pytest.raises(ValueError, match=words):
            calibrate(table_decoder(), given, rules, options, progress=False)


def test_rules_may_be_written() -> None:
    prompts: Any = table_prompts(0, 2)
    options = {"max_new_tokens": 8, "temperature": 1.0}
    calibration = calibrate(table_decoder(), prompts, ["fuzzy:0.3"], options, progress=False)
    assert [row.rule for row in calibration.rows] == ["fuzzy:0.3:js"]


def test_a_knob_that_gains_nothing_is_not_picked() -> None:
    exact = Expectation(100, 200.0)
    rows = [row("fuzzy:0.1:js", 2.0, 0.0), row("fuzzy_2025:0.1:js:chain", 1.9, 0.01)]
    assert Calibration(exact, rows, False, 3, {}).within_cost(1.0) is None


# Prompt files


def test_prompts_are_read_from_questions_json_lines_and_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    question = {"question_id": 1, "category": "x", "turns": ["one?", "two?"]}
    path.write_text(json.dumps(question) + "\n\n" + json.dumps({"prompt": "three?"}) + "\n")
    assert read_prompts(path) == ["one?", "three?"]
    path.write_bytes(b"Why?\r\n\r\n  And how?\r\n[1] brackets")
    assert read_prompts(path) == ["Why?", "  And how?", "[1] brackets"]


def test_only_newlines_end_a_line_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = ["a\u2028b", "c\x85d", "e\x1cf"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts[:2]]
    path.write_text("\n".join([*lines, prompts[2]]), encoding="utf-8-sig")
    assert read_prompts(path) == prompts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "x"}\n{"prompt": \n', "line 2: not valid JSON"),
        (b'text\n\n{"text": "x"}\n', 'line 3: needs "turns" .a list of texts. or "prompt"'),
        (b'{"turns": []}\n', "line 1: needs"),
        (b'{"turns": [3]}\n', "line 1: needs"),
        (b'{"prompt": ""}\n', "line 1: needs"),
        (b'{"turns": ["a"]} trailing\n', "line 1: not valid JSON"),
        (b"", "holds no prompts"),
        (b"\n  \n", "holds no prompts"),
        (b"\xff\xfe\xfa", "prompts.jsonl is not UTF-8 text"),
    ],
)
def test_malformed_prompt_files_are_refused_by_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no prompt file at {path}"):
            read_prompts(path)


# The command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target, a head and a draft model, and a prompt file."""
    root = tmp_path_factory.mktemp("models")
    model = tiny_model(vocab_size=272, initializer_range=0.15)
    model.save_pretrained(root / "target")
    tiny_model(vocab_size=272, seed=3).save_pretrained(root / "small")
    for name in ("target", "small"):
        byte_tokenizer().save_pretrained(root / name)
    save_head(tiny_head(model), root / "head")
    (root / "prompts.jsonl").write_text('{"turns": ["why?"]}\n{"prompt": "how?"}\nand text\n')
    (root / "empty").write_text("\n")
    (root / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    return root


def arguments(models: Path, folder: Path, **changes: Any) -> list[str]:
    flags = {
        "target": models / "target",
        "draft_head": models / "head",
        "prompts": models / "prompts.jsonl",
        "output": folder,
        "max_new_tokens": 8,
        "tree": "6,3,2",
        "temperature": 1.0,
        "knobs": "0.1,0.4,inf",
        "device": "cpu",
    } | changes
    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    return ["calibrate", *(f"--{name}={value}" for name, value in given.items())]


def test_the_command_prints_saves_and_picks(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(models, tmp_path, divergence="js,tv", acceptance_gain="5%")
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "decoding exactly" in captured.err
    data = json.loads((tmp_path / "calibration.json").read_text(), parse_constant=pytest.fail)
    assert data["num_prompts"] == 3
    assert data["settings"]["max_new_tokens"] == 8
    assert data["settings"]["tree"] == "6,3,2"
    rules = [entry["rule"] for entry in data["rows"]]
    assert rules[:4] == ["exact", "fuzzy:0.1:js", "fuzzy:0.4:js", "fuzzy:inf:js"]
    assert all(rule in captured.out for rule in rules)
    assert (tmp_path / "calibration.png").stat().st_size > 1000
    chosen = captured.out.splitlines()[-1].removeprefix("--rule ")
    assert build_rule(chosen).spec == chosen
    lengths = {entry["rule"]: entry["acceptance_length"] for entry in data["rows"]}
    assert lengths[chosen] >= 1.05 * lengths["exact"]


def test_the_table_and_the_pick_are_told_when_the_disk_is_full(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eagle_fsd.calibrate._plot", full)
    changes = {"rule": "coverage", "max_kl_per_token": 50.0}
    assert main(arguments(models, tmp_path, **changes)) != 0
    captured = capsys.readouterr()
    assert "coverage:inf" in captured.out
    assert captured.out.splitlines()[-1].startswith("--rule coverage")
    assert "cannot write into" in captured.err
    assert "No space left on device" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0, "max_regret_per_token": 50.0},
        {"max_kl_per_token": 50.0, "rule": "coverage"},
        {"draft_head": None, "draft_model": "small", "rule": "regret", "limit": 1},
        {"rule": "fuzzy_2025:0.3:js", "knobs": None, "top_p": 0.5, "acceptance_gain": "0"},
    ],
)
def test_the_command_serves_both_temperatures_and_both_drafters(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    if "draft_model" in changes:
        changes = changes | {"draft_model": models / "small"}
    assert main(arguments(models, tmp_path, **changes)) == 0
    out = capsys.readouterr().out
    is_greedy = changes.get("temperature") == 0.0
    assert ("regret/token" in out) == is_greedy
    json.loads((tmp_path / "calibration.json").read_text(), parse_constant=pytest.fail)
    assert ("--rule " in out) == any("per_token" in name or "gain" in name for name in changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "fuzy"}, "unknown acceptance rule 'fuzy'*did you mean 'fuzzy'?"),
        ({"rule": "exact"}, "rule 'exact' has no knob to choose"),
        ({"divergence": "jss"}, "unknown divergence 'jss'*did you mean 'js'?"),
        ({"rule": "coverage", "divergence": "js"}, "takes no divergence"),
        ({"rule": "lenience", "knobs": "1.5"}, "leniency must be in (0, 1]*got 1.5"),
        ({"rule": "fuzzy:0.3"}, "is one point of the grid"),
        ({"knobs": "0.1,much"}, "--knobs takes numbers, got 'much'"),
        ({"acceptance_gain": "lots"}, "--acceptance-gain takes numbers, got 'lots'"),
        ({"acceptance_gain": "x%"}, "--acceptance-gain takes numbers, got 'x'"),
        ({"acceptance_gain": "-5%"}, "--acceptance-gain must be >= 0*got '-5%'"),
        ({"acceptance_gain": "nan"}, "--acceptance-gain must be >= 0"),
        ({"acceptance_gain": "inf"}, "--acceptance-gain must be >= 0"),
        ({"max_kl_per_token": -1.0}, "cost per token must be >= 0 nats, got -1.0"),
        ({"max_kl_per_token": "nan"}, "cost per token must be >= 0 nats, got nan"),
        ({"max_regret_per_token": 1.0}, "needs temperature 0; use --max-kl-per-token"),
        ({"temperature": 0.0, "max_kl_per_token": 1.0}, "use --max-regret-per-token"),
        ({"temperature": -1.0}, "temperature must be*got -1.0"),
        ({"limit": 0}, "--limit must be >= 1, got 0"),
        ({"draft_head": None}, "give --draft-head or --draft-model"),
        ({"prompts": "none"}, "no prompt file at"),
        ({"prompts": "empty"}, "holds no prompts"),
        ({"prompts": "bad.jsonl"}, "line 2: needs"),
        ({"prompts": None}, "required: --prompts"),
        ({"output": None}, "required: --output"),
        ({"max_kl_per_token": 1, "acceptance_gain": 1}, "not allowed with"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_writes_nothing(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    if changes.get("prompts"):
        changes = changes | {"prompts": models / changes["prompts"]}
    output = tmp_path / "output"
    assert status(arguments(models, output, **changes)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(part in captured.err for part in message.split("*"))
    assert not captured.out
    assert not output.exists()


def test_an_output_that_is_a_file_is_named_before_the_work(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "taken"
    output.write_text("mine")
    assert status(arguments(models, output)) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert status(arguments(models, "")) == 2  # type: ignore[arg-type]
    assert "the output folder is empty" in capsys.readouterr().err


def test_a_wish_that_no_knob_meets_is_status_2_after_the_table(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(arguments(models, tmp_path, acceptance_gain="9900%")) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "error: no knob of the grid meets the wish; ask for less, or give --knobs"
    )
    assert "fuzzy:0.1:js" in captured.out
    assert "--rule" not in captured.out
    assert (tmp_path / "calibration.json").is_file()


def status(argv: list[str]) -> int:
    """The status of a command, argparse's own exits included."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
