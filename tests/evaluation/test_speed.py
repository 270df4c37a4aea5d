"""Speed runs: counts, figures and the report. Nothing here depends on how long anything takes."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from eagle_fsd.acceptance import Exact, build_rule
from eagle_fsd.checkpoint import save_head
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.stats import GenerationStats
from eagle_fsd.target import TargetModel
from evaluation import speed
from evaluation.arms import Answer, DecoderArm, Request, build_arms, parse_arms
from evaluation.speed import Prompt, main, measure, report, warm_up
from evaluation.speed_report import Measurement, arm_figures, baseline_of, table
from tests.stubs import PathDrafter, greedy_reference, head_drafter, random_prompt, tiny_model
from tests.train.tiny import tiny_head, tiny_tokenizer
from tests.train.tiny import tiny_model as trained_model

DEPTH = 3
TREE = TreeConfig(10, DEPTH, 2)  # all candidates, so that the oracle's path is among them
NUM_TOKENS = 1 + 5 * (DEPTH + 1)  # five whole cycles of an oracle
ARM_KEYS = {
    "ratio",
    "tokens_per_second",
    "acceptance_length",
    "acceptance_length_macro",
    "acceptance_by_depth",
    "cost_per_token",
    "phases_s",
    "same_ids_as_plain",
    "num_tokens",
    "seconds",
    "attention",
}
FILES = {speed.REPORT_FILE, speed.MEASURED_FILE, ".lock"}
PHASES = ["prefill", "draft", "target", "verify", "commit", "rest"]


def prompts_of(num: int, num_tokens: int = NUM_TOKENS) -> list[Prompt]:
    rng = random.Random(0)
    requests = [
        Request(random_prompt(rng, low=8, high=20)[0], num_tokens, (), SamplingConfig(), number)
        for number in range(num)
    ]
    return [Prompt(number, request) for number, request in enumerate(requests)]


# Figures


@pytest.mark.parametrize(
    ("is_right", "length", "by_depth"), [(True, DEPTH + 1.0, [1.0] * DEPTH), (False, 1.0, [0.0])]
)
def test_an_oracle_has_the_length_of_its_tree_and_a_wrong_drafter_has_one(
    is_right: bool, length: float, by_depth: list[float]
) -> None:
    model = tiny_model()
    prompt = prompts_of(1)[0]
    ids = prompt.request.input_ids
    continuation = greedy_reference(model, ids[None], NUM_TOKENS)
    drafter = PathDrafter(continuation, ids.numel(), is_right=is_right)
    decoder = SpeculativeDecoder(TargetModel(model), drafter, None, TREE)
    arms = build_arms(parse_arms("hf,plain,exact"), decoder)
    measured = list(measure(arms, [prompt, prompt]))
    assert all(each.answers["exact"].token_ids == continuation for each in measured)
    figures = report(arms, measured, seed=0)["arms"]
    assert figures["exact"]["acceptance_length"] == length
    assert figures["exact"]["acceptance_length_macro"] == length
    assert figures["exact"]["acceptance_by_depth"] == by_depth
    for name in ("hf", "plain"):
        assert figures[name]["acceptance_length"] is None
        assert figures[name]["acceptance_by_depth"] is None


def test_counts_agree_with_the_ids_and_every_part_of_the_time_is_somewhere() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), None, TREE)
    arms = build_arms(parse_arms("hf,plain,exact,fuzzy:inf:js"), decoder)
    measured = list(measure(arms, prompts_of(3)))
    result = report(arms, measured, seed=0)
    assert [each["question_id"] for each in result["per_question"]] == [0, 1, 2]
    for name, figures in result["arms"].items():
        assert set(figures) == ARM_KEYS
        answers = [each.answers[name] for each in measured]
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * 3
        assert figures["num_tokens"] == 3 * NUM_TOKENS
        written = [each["arms"][name]["tokens"] for each in result["per_question"]]
        assert written == [NUM_TOKENS] * 3
        if name == "hf":
            assert figures["phases_s"] is None
        else:
            assert list(figures["phases_s"]) == PHASES
            assert sum(figures["phases_s"].values()) == pytest.approx(figures["seconds"])
            assert min(figures["phases_s"].values()) >= 0.0
    same = {name: figures["same_ids_as_plain"] for name, figures in result["arms"].items()}
    assert same == {"hf": 1.0, "plain": 1.0, "exact": 1.0, "fuzzy:inf:js": 0.0}
    without = report(arms, measured, seed=0, has_phases=False)["arms"]
    assert all(figures["phases_s"] is None for figures in without.values())


def test_ratios_are_by_question_and_lengths_by_cycle_and_by_question() -> None:
    def answer_of(seconds: float, num_tokens: int, cycles: list[list[int]]) -> Answer:
        tried, accepted = cycles
        stats = GenerationStats(
            seed=0,
            rule="exact",
            tree="8,3,2",
            num_tokens=num_tokens,
            num_cycles=tried[0],
            tried_by_depth=tried,
            accepted_by_depth=accepted,
        )
        return Answer(list(range(num_tokens)), seconds, stats)

    drafter = PathDrafter([], 0, is_right=False)
    arm = DecoderArm("exact", SpeculativeDecoder(TargetModel(tiny_model()), drafter), Exact())
    measured = [
        Measurement("a", 5, {"hf": Answer([1] * 8, 8.0), "exact": answer_of(2.0, 4, [[3], [0]])}),
        Measurement(
            "b", 5, {"hf": Answer([1] * 7, 14.0), "exact": answer_of(7.0, 7, [[2, 2], [2, 2]])}
        ),
        Measurement("c", 5, {"hf": Answer([1], 9.0), "exact": answer_of(1.0, 7, [[2], [0]])}),
    ]
    figures = arm_figures(arm, measured, "hf", seed=0, has_phases=True)
    # the questions' own ratios are 2, 2 and 63
    assert figures["ratio"]["median"] == 2.0
    assert figures["ratio"]["high"] == pytest.approx(63.0)
    assert figures["tokens_per_second"] == 18 / 10
    assert figures["acceptance_length"] == (3 + 6 + 6) / (3 + 2 + 2)
    assert figures["acceptance_length_macro"] == pytest.approx((1.0 + 3.0 + 3.0) / 3)
    assert figures["acceptance_by_depth"] == [2 / 7, 2 / 2]
    assert figures["same_ids_as_plain"] is None


@pytest.mark.parametrize(
    ("ledgers", "cost"),
    [
        ([{"kl_spent": 0.5}, {"kl_spent": 1.0}], 1.5 / 8),
        ([{"regret_spent": 0.25}, {"regret_spent": 0.0}], 0.25 / 8),
        ([{"kl_spent": math.inf}, {"kl_spent": 1.0}], "inf"),
        ([{}, {}], None),
    ],
)
def test_a_relaxed_arm_shows_its_nats_per_token(
    ledgers: list[dict[str, float]], cost: float | str | None
) -> None:
    decoder = SpeculativeDecoder(TargetModel(tiny_model()), PathDrafter([], 0, is_right=False))
    arm = DecoderArm("regret:1", decoder, build_rule("regret:1"))
    measured = []
    for number, (ledger, num_tokens) in enumerate(zip(ledgers, (6, 2), strict=True)):
        stats = GenerationStats(seed=0, rule="r", tree="8,3,2", num_tokens=num_tokens, **ledger)
        measured.append(Measurement(number, 5, {arm.name: Answer([1] * num_tokens, 1.0, stats)}))
    figures = arm_figures(arm, measured, arm.name, seed=0, has_phases=False)
    assert figures["cost_per_token"] == cost


def test_the_baseline_is_hf_where_it_is_measured_and_else_the_first() -> None:
    assert baseline_of(["plain", "hf", "exact"]) == "hf"
    assert baseline_of(["plain", "exact"]) == "plain"


def test_the_warm_up_lets_every_arm_decode_a_few_tokens_and_counts_nowhere() -> None:
    class Stub:
        is_drafting, device, attention = False, torch.device("cpu"), "none"

        def __init__(self, name: str) -> None:
            self.name = name
            self.asked: list[int] = []

        def decode(self, request: Request) -> tuple[list[int], None]:
            self.asked.append(request.max_new_tokens)
            return [0] * request.max_new_tokens, None

    arms, prompts = [Stub("hf"), Stub("plain")], prompts_of(2)
    warm_up(arms, prompts[0].request)
    measured = list(measure(arms, prompts))
    assert [arm.asked for arm in arms] == [[speed.WARM_UP_TOKENS, NUM_TOKENS, NUM_TOKENS]] * 2
    assert report(arms, measured, seed=0)["arms"]["hf"]["num_tokens"] == 2 * NUM_TOKENS


def test_an_arm_that_fails_is_named_with_its_question() -> None:
    prompts = prompts_of(2)
    prompts[1] = Prompt("q1", dataclasses.replace(prompts[1].request, max_new_tokens=0))
    arms = [DecoderArm("plain", SpeculativeDecoder(TargetModel(tiny_model())), None)]
    with pytest.raises(RuntimeError, match="arm 'plain' failed on question 'q1': max_new_tokens"):
        list(measure(arms, prompts))


def test_the_table_has_one_line_an_arm() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), None, TREE)
    arms = build_arms(parse_arms("hf,plain,fuzzy:0.3:js"), decoder)
    result = report(arms, list(measure(arms, prompts_of(2, 6))), seed=0) | {
        "num_planned": 4,
        "num_left_out": 1,
        "peak_memory": {"bytes": 3 << 20, "of": "all"},
        "notes": ["a note"],
    }
    lines = table(result).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["hf", "plain", "fuzzy:0.3:js"]
    assert lines[1].split()[1:3] == ["1.00", "1.00..1.00"]
    assert lines[1].split()[-2:] == ["-", "100%"]
    assert [line.split()[0] for line in lines[5:8]] == ["seconds", "plain", "fuzzy:0.3:js"]
    assert "2 of 4 questions, ratios to hf, 1 left out: the prompt does not fit" in table(result)
    assert lines[-2:] == ["peak memory 3 MiB, all", "a note"]


# The command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved target, a draft head, and a question file of five short questions."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained_model().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    save_head(tiny_head(), folder / "head")
    rng = random.Random(0)
    lines = [
        json.dumps({"question_id": 80 + number, "category": "c", "turns": [words(rng, 6), "w1"]})
        for number in range(5)
    ]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return {name: str(folder / name) for name in ("target", "head", "questions.jsonl")}


def words(rng: random.Random, num: int) -> str:
    return " ".join(f"w{rng.randrange(128)}" for _ in range(num))


def flags(models: dict[str, str], output: Path, arms: str, *more: str) -> list[str]:
    return [
        *("--target", models["target"], "--draft-head", models["head"], "--arms", arms),
        *("--questions", models["questions.jsonl"], "--output", str(output)),
        *("--max-new-tokens", "13", "--tree", "30,3,4", "--device", "cpu", "--limit", "3"),
        *more,
    ]


def read(output: Path) -> Any:
    return json.loads((output / speed.REPORT_FILE).read_text())


def test_a_run_writes_the_report_of_all_arms(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = "hf,hf-lookup,plain,exact,fuzzy:0.20:js,draft-model"
    more = ("--draft-model", models["target"])
    assert main(flags(models, tmp_path, arms, *more)) == 0
    result = read(tmp_path)
    assert result["baseline"] == "hf"
    assert list(result["arms"]) == arms.split(",")
    assert all(set(figures) == ARM_KEYS for figures in result["arms"].values())
    assert result["arms"]["hf"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    same = {name: figures["same_ids_as_plain"] for name, figures in result["arms"].items()}
    del same["fuzzy:0.20:js"]
    assert set(same.values()) == {1.0}
    # the target drafts for itself: of its trees, every level is right
    assert result["arms"]["draft-model"]["acceptance_length"] == 4.0
    assert result["arms"]["exact"]["acceptance_length"] < 4.0
    counts = {name: result[name] for name in ("num_questions", "num_planned", "num_left_out")}
    assert counts == {"num_questions": 3, "num_planned": 3, "num_left_out": 0}
    assert [each["question_id"] for each in result["per_question"]] == [80, 81, 82]
    assert result["settings"]["max_new_tokens"] == 13
    assert result["settings"]["tree"] == "30,3,4"
    assert result["settings"]["dtype"] == "float32"
    assert result["environment"]["attention"] == result["arms"]["plain"]["attention"]
    assert result["arms"]["hf"]["attention"] == "sdpa"
    assert result["peak_memory"]["bytes"] > 0
    assert result["notes"] == []
    assert result["source"] == f"the file {models['questions.jsonl']}"
    assert set(os.listdir(tmp_path)) == FILES  # noqa: PTH208
    printed = capsys.readouterr()
    assert all(f"\n{name} " in printed.out for name in arms.split(","))
    assert f"questions: the file {models['questions.jsonl']}" in printed.err


def test_without_a_head_the_draft_model_drafts_for_the_rules_too(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(models, tmp_path, "plain,exact,draft-model", "--limit", "1", "--json")
    place = arguments.index("--draft-head")
    arguments[place : place + 2] = ["--draft-model", models["target"]]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == read(tmp_path)
    assert result["baseline"] == "plain"
    lengths = [result["arms"][name]["acceptance_length"] for name in ("exact", "draft-model")]
    assert lengths == [4.0, 4.0]


def test_arms_that_draft_nothing_need_no_drafter(models: dict[str, str], tmp_path: Path) -> None:
    arguments = flags(models, tmp_path, "hf,plain", "--limit", "1", "--temperature", "0.7")
    place = arguments.index("--draft-head")
    del arguments[place : place + 2]
    assert main(arguments) == 0
    assert "ids differ" in read(tmp_path)["notes"][0]


def test_a_prompt_beyond_the_context_is_left_out_and_one_near_its_end_is_cut_alike(
    models: dict[str, str], tmp_path: Path
) -> None:
    rng = random.Random(1)
    file = tmp_path / "long.jsonl"
    lengths = {"fits": 10, "near": 250, "full": 256, "over": 300}
    file.write_text(
        "\n".join(
            json.dumps({"question_id": name, "turns": [words(rng, num)]})
            for name, num in lengths.items()
        )
    )
    more = ("--questions", str(file), "--limit", "4")
    assert main(flags(models, tmp_path / "out", "hf,hf-lookup,plain,exact", *more)) == 0
    result = read(tmp_path / "out")
    assert result["num_left_out"] == 2
    assert [each["question_id"] for each in result["per_question"]] == ["fits", "near"]
    tokens = [{arm["tokens"] for arm in each["arms"].values()} for each in result["per_question"]]
    assert tokens == [{13}, {6}]
    file.write_text(file.read_text().splitlines()[-1])
    assert main(flags(models, tmp_path / "none", "plain", *more)) == 2


def fail_at(call: int, error: BaseException, original: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1, 1_000_000))

    def maybe(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*arguments, **options)

    return maybe


def test_a_run_that_is_broken_off_leaves_the_figures_so_far(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two arms: the fifth answer is the third question's first
    monkeypatch.setattr(speed, "answer", fail_at(5, KeyboardInterrupt(), speed.answer))
    assert main(flags(models, tmp_path, "plain,exact")) == 130
    result = read(tmp_path)
    assert (result["num_questions"], result["num_planned"]) == (2, 3)
    assert len(result["per_question"]) == 2


def test_the_same_command_goes_on_and_measures_no_question_twice(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def noted(arm: Any, request: Request) -> Answer:
        asked.append((arm.name, request.seed))
        return answer(arm, request)

    answer = speed.answer
    arguments = flags(models, tmp_path, "plain,exact,fuzzy:0.2:js", "--temperature", "1")
    with monkeypatch.context() as patch:  # the second question's first answer is the fourth
        patch.setattr(speed, "answer", fail_at(4, KeyboardInterrupt(), noted))
        assert main(arguments) == 130
    first = read(tmp_path)["per_question"]
    with (tmp_path / speed.MEASURED_FILE).open("ab") as stream:
        stream.write(b'{"question_id": 81, "num_pro')  # cut off by a kill
    (tmp_path / speed.REPORT_FILE).unlink()  # killed before it was written
    monkeypatch.setattr(speed, "answer", noted)
    assert main(arguments) == 0
    assert main([*arguments, "--limit", "5"]) == 0
    assert len(asked) == len(set(asked)) == 5 * 3
    assert [name for name, _ in asked[::3]] == ["plain", "exact", "fuzzy:0.2:js", "plain", "exact"]
    result = read(tmp_path)
    assert [each["question_id"] for each in result["per_question"]] == [80, 81, 82, 83, 84]
    assert result["per_question"][:1] == first
    assert result["arms"]["exact"]["acceptance_by_depth"]
    assert result["resumed"] == []
    finished = (tmp_path / speed.REPORT_FILE).read_bytes()
    assert main([*arguments, "--limit", "5"]) == 0
    assert (tmp_path / speed.REPORT_FILE).read_bytes() == finished
    assert main([*arguments, "--limit", "2", "--tree", "auto", "--device", "auto"]) == 0
    assert len(asked) == 5 * 3
    assert [each["question_id"] for each in read(tmp_path)["per_question"]] == [80, 81]


def test_another_machine_is_refused_and_other_versions_are_noted(
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = speed.environment
    arguments = flags(models, tmp_path, "plain", "--limit", "1")
    assert main(arguments) == 0

    def elsewhere(target: Any) -> dict[str, Any]:
        return environment(target) | {"machine": {"cpu": "another"}}

    def later(target: Any) -> dict[str, Any]:
        return environment(target) | {"git_commit": "later"}

    monkeypatch.setattr(speed, "environment", elsewhere)
    assert main([*arguments, "--limit", "2"]) == 2
    assert "{'cpu': 'another'}; name another folder" in capsys.readouterr().err
    monkeypatch.setattr(speed, "environment", later)
    assert main([*arguments, "--limit", "2"]) == 0
    result = read(tmp_path)
    assert result["num_questions"] == 2
    assert [each["git_commit"] for each in result["resumed"]] == ["later"]
    assert result["environment"]["git_commit"] != "later"


@pytest.mark.parametrize("name", ["packed_weights", "compiled"])
def test_other_forms_of_the_weights_are_refused_and_an_older_file_goes_with_any(
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    environment = speed.environment
    arguments = flags(models, tmp_path, "plain", "--packed-weights", "off")
    assert main([*arguments, "--limit", "1"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(speed, "environment", lambda target: environment(target) | {name: True})
        assert main([*arguments, "--limit", "2"]) == 2
        assert f"with {name} False, here it is True" in capsys.readouterr().err
        path = tmp_path / speed.MEASURED_FILE
        session, line = path.read_text().splitlines()
        fields = json.loads(session)
        del fields["environment"][name]
        path.write_text(f"{json.dumps(fields)}\n{line}\n")
        assert main([*arguments, "--limit", "2"]) == 0
    assert main([*arguments, "--limit", "3"]) == 2
    assert f"with {name} True, here it is False" in capsys.readouterr().err
    assert read(tmp_path)["num_questions"] == 2


def test_arms_and_question_files_are_known_however_they_are_written(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(flags(models, tmp_path, "plain,fuzzy:0.30:js", "--limit", "1")) == 0
    file = Path(models["questions.jsonl"])
    monkeypatch.chdir(file.parent)
    arguments = flags(models, tmp_path, "plain,fuzzy:0.3:js", "--questions", file.name)
    assert main([*arguments, "--limit", "2"]) == 0
    result = read(tmp_path)
    assert result["num_questions"] == 2
    assert list(result["arms"]) == ["plain", "fuzzy:0.30:js"]
    assert result["settings"]["task"] == str(file)
    assert main(flags(models, tmp_path, "plain,fuzzy:0.2:js")) == 2


def test_a_line_without_an_arm_or_with_an_answer_of_nothing_is_told(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(models, tmp_path, "plain,exact", "--limit", "1")
    assert main(arguments) == 0
    path = tmp_path / speed.MEASURED_FILE
    session, line = path.read_text().splitlines()
    fields = json.loads(line)
    answers = fields["answers"]
    for changed, words in (
        ({"plain": answers["plain"]}, "has arms ['plain'], the run ['exact', 'plain']"),
        (answers | {"plain": answers["plain"] | {"token_ids": []}}, "not a measured question"),
        (answers | {"plain": answers["plain"] | {"seconds": math.nan}}, "not a measured question"),
    ):
        path.write_text(f"{session}\n{json.dumps(fields | {'answers': changed})}\n")
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "line 2: " in error
        assert words in error


def test_a_measurement_survives_its_line() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), None, TREE)
    arms = build_arms(parse_arms("hf,plain,fuzzy:inf:js"), decoder)
    (measured,) = measure(arms, prompts_of(1))
    fields = json.loads(measured.to_line(), parse_constant=pytest.fail)
    assert Measurement.from_fields(fields) == measured
    stats = measured.answers["fuzzy:inf:js"].stats
    assert stats is not None
    stats.kl_spent = math.inf
    fields = json.loads(measured.to_line(), parse_constant=pytest.fail)
    assert Measurement.from_fields(fields) == measured
    for bad in ({}, {"answers": 3}, fields | {"more": 1}):
        with pytest.raises(ValueError, match="not a measured question"):
            Measurement.from_fields(bad)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{not json}", "line 1: "),
        (b"[1]", "line 1: not a measured question"),
        (b'{"settings": {}}', "line 1: "),
    ],
)
def test_a_spoilt_file_is_told_by_its_line_and_kept(
    models: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: bytes,
    words: str,
) -> None:
    (tmp_path / speed.MEASURED_FILE).write_bytes(line + b"\n")
    assert main(flags(models, tmp_path, "plain")) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / speed.MEASURED_FILE).read_bytes() == line + b"\n"


def test_a_full_disk_is_told_and_the_figures_before_it_stay(
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail_at(2, full, Path.write_text))
        assert main(flags(models, tmp_path, "plain,exact")) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert read(tmp_path)["num_questions"] == 1
    assert set(os.listdir(tmp_path)) == FILES  # noqa: PTH208


def test_a_report_of_other_settings_is_not_overwritten(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(models, tmp_path, "plain", "--limit", "1")) == 0
    assert main(flags(models, tmp_path, "plain", "--limit", "1")) == 0
    before = (tmp_path / speed.REPORT_FILE).read_bytes()
    assert main(flags(models, tmp_path, "plain", "--limit", "1", "--max-new-tokens", "5")) == 2
    assert "max_new_tokens 13, this run has 5; name another folder" in capsys.readouterr().err
    assert (tmp_path / speed.REPORT_FILE).read_bytes() == before
    (tmp_path / speed.MEASURED_FILE).unlink()
    assert main(flags(models, tmp_path, "plain", "--limit", "1")) == 2
    assert "is there without its speed.jsonl; name another folder" in capsys.readouterr().err
    assert (tmp_path / speed.REPORT_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("arms", "more", "words"),
    [
        ("hf,nothing", (), "unknown arm 'nothing'"),
        ("exact,exact", (), "arm 'exact' comes twice"),
        ("exact,draft-model", (), "arm 'draft-model' needs --draft-model"),
        ("exact", ("--max-new-tokens", "0"), "--max-new-tokens must be >= 1, got 0"),
        ("exact", ("--seed", "-1"), "--seed must be >= 0, got -1"),
        ("exact", ("--limit", "0"), "--limit must be >= 1, got 0"),
        ("exact", ("--temperature", "-1"), "temperature must be finite and >= 0"),
        ("exact", ("--output", ""), "output folder is empty"),
        ("exact", ("--questions", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    models: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arms: str,
    more: tuple[str, ...],
    words: str,
) -> None:
    assert main(flags(models, tmp_path / "out", arms, *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "out" / speed.REPORT_FILE).exists()


def test_nothing_that_drafts_and_nothing_to_answer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--target", "t", "--output", str(tmp_path)]
    assert main([*base, "--arms", "exact", "--task", "mt_bench"]) == 2
    assert "nothing drafts" in capsys.readouterr().err
    assert main([*base, "--arms", "hf"]) == 2
    assert "nothing to answer: give --task, or --questions" in capsys.readouterr().err
