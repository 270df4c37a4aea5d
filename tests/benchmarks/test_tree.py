"""Choosing a tree: the prediction against live decoding, on a target whose ids are known."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import tree as tree_module
from benchmarks.timing import models_of
from benchmarks.tree import (
    DEPTHS,
    PASS_SIZES,
    TOP_KS,
    Costs,
    live,
    main,
    measure,
    predict,
    record,
    trees,
)
from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import TREES_FILE, load_choice, setting_of
from tests.benchmarks.models import saved
from tests.stubs import head_drafter, random_prompt, tiny_model

FREE = Costs(
    passes=dict.fromkeys(PASS_SIZES, 1.0),
    first_steps=dict.fromkeys(TOP_KS, 0.0),
    further_steps=dict.fromkeys(TOP_KS, 0.0),
)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = TargetModel(tiny_model())
    return SpeculativeDecoder(target, head_drafter(target))


def test_predicted_acceptance_lengths_are_those_of_live_decoding(
    decoder: SpeculativeDecoder,
) -> None:
    rng = random.Random(2)
    prompts = [random_prompt(rng, 5, 20) for _ in range(2)]
    predictions = {p.tree: p for p in predict(FREE, [record(decoder, p, 24) for p in prompts])}
    assert set(predictions) == set(trees())
    for tree in (TreeConfig(4, 4, 1), TreeConfig(8, 3, 3), TreeConfig(59, 6, 10)):
        # The last cycles of a request draft less deep, which changes nothing that is emitted.
        runs = [decoder.generate(p, tree=tree, max_new_tokens=24).stats for p in prompts]
        live = sum(r.num_tokens - 1 for r in runs) / sum(r.num_cycles for r in runs)
        assert predictions[tree].acceptance_length == pytest.approx(live)


def test_the_fastest_is_what_costs_and_lengths_say() -> None:
    # Every root finds one token in a tree of 2, two in a tree of 10.
    text = {(d, k): [[2, 10]] * 300 for d in DEPTHS for k in TOP_KS}
    shorter = {key: ([[2]] * 300 if key[0] == 1 else rows) for key, rows in text.items()}
    free = predict(FREE, [shorter])[0]
    assert free.tree.num_draft_tokens >= 10
    assert free.acceptance_length == pytest.approx(3.0, abs=0.05)
    dear = Costs(
        passes={size: 1.0 + 0.2 * size for size in PASS_SIZES},
        first_steps=FREE.first_steps,
        further_steps=dict.fromkeys(TOP_KS, 0.5),
    )
    best = predict(dear, [shorter])[0]
    assert best.tree.num_draft_tokens == 2
    assert best.tree.depth == 1
    assert best.ratio == pytest.approx(2.0 * 1.2 / 1.6, abs=0.02)


def test_costs_are_measured_for_every_size(decoder: SpeculativeDecoder) -> None:
    costs = measure(decoder, random_prompt(random.Random(0)))
    assert set(costs.passes) == set(PASS_SIZES)
    assert set(costs.first_steps) == set(costs.further_steps) == set(TOP_KS)
    assert min(costs.passes.values()) > 0.0
    assert costs.cycle(TreeConfig(8, 3, 3)) > costs.passes[8]


def test_answers_of_one_token_have_nothing_to_choose_by() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target))
    prompt = random_prompt(random.Random(0))
    first = decoder.plain(prompt, max_new_tokens=1).token_ids[0]
    target.model.generation_config.eos_token_id = first
    text = record(decoder, prompt, 24)
    for texts in ([text], []):
        with pytest.raises(ValueError, match="every answer ends with its first token"):
            predict(FREE, texts)
    with pytest.raises(ValueError, match="every answer ends with its first token"):
        live(decoder, [prompt], [TreeConfig(4, 4, 1)], 24)
    # Beside a text with places, an empty one changes nothing.
    longer = {(d, k): [[2, 10]] * 9 for d in DEPTHS for k in TOP_KS}
    assert predict(FREE, [longer, text]) == predict(FREE, [longer])


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, head, questions = saved(tmp_path_factory.mktemp("models"))
    return [
        *("--target", target, "--draft-head", head, "--questions", questions),
        *("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--check", "1"),
        *("--limit", "3"),
    ]


def test_the_command_stores_the_best_tree_and_writes_its_figures(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "tree.json"
    assert main([*command, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "1 questions left out: too long for the context" in printed
    figures = json.loads(output.read_text())
    assert len(figures["predictions"]) == len(list(trees()))
    decoder = SpeculativeDecoder.from_pretrained(
        command[1], draft_head=command[3], dtype="float32", device="cpu"
    )
    assert figures["setting"] == setting_of(*models_of(decoder))
    choice = load_choice(figures["setting"])
    assert choice is not None
    assert choice.tree == decoder.tree
    assert f"best: --tree {choice.tree}, {choice.ratio:.2f} times" in printed
    assert figures["live"][str(choice.tree)]["acceptance_length"] >= 1.0


def test_a_dry_run_stores_nothing_and_what_was_measured_stays_when_the_rest_fails(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "cache" / TREES_FILE).exists()
    output = tmp_path / "tree.json"

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(tree_module, "live", fail)
    assert main([*command, "--output", str(output)]) == 2
    figures = json.loads(output.read_text())
    assert figures["predictions"]
    assert figures["live"] == {}


def test_a_file_that_cannot_be_written_is_refused_first(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--target", "absent", "--output", "absent/tree.json"]) == 2
    assert "--output takes a file in a folder that is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "nothing drafts"),
        (["--draft-head", "demo", "--tree", "4,4,1"], "--tree is what this command chooses"),
        (["--draft-head", "demo", "--check", "0"], "--check must be >= 1"),
        (["--draft-head", "demo"], "no question file"),
    ],
)
def test_bad_flags_are_one_sentence(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target", "x", "--questions", str(tmp_path / "absent.jsonl"), *flags]) == 2
    assert words in capsys.readouterr().err
