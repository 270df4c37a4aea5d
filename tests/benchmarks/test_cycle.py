"""The cost of a cycle: all parts are measured, and the figures are what their names say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cycle
from benchmarks.cycle import CYCLES, FEWEST_CYCLES, CycleCosts, growth, main, measure
from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.target import TargetModel
from tests.benchmarks.models import saved
from tests.stubs import head_drafter, tiny_model


def test_all_parts_are_measured_behind_a_context() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target))
    costs = measure(decoder, TreeConfig(8, 3, 3), 40, seed=0)
    assert costs.context == 40
    assert min(costs.plain_s, costs.pass_s, costs.draft_s, costs.live_s) > 0.0
    assert costs.num_cycles == CYCLES
    assert costs.memory_bytes > 10**6


def test_overhead_and_growth_are_shares_and_ratios() -> None:
    counts = {"num_cycles": 16, "memory_bytes": 1}
    short = CycleCosts(256, plain_s=1.0, pass_s=2.0, draft_s=1.0, live_s=4.0, **counts)
    long = CycleCosts(4096, plain_s=2.0, pass_s=8.0, draft_s=1.0, live_s=12.0, **counts)
    assert short.overhead == pytest.approx(0.25)
    assert growth([short, long]) == pytest.approx(1.5)


@pytest.mark.parametrize("contexts", ["", "0", "12,", "a", "-4"])
def test_contexts_that_are_none_are_refused(
    contexts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", "x", "--draft-head", "demo", f"--contexts={contexts}"]
    assert main(flags) == 2
    assert "--contexts takes whole numbers" in capsys.readouterr().err


def test_an_answer_that_stops_early_is_no_median() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target))
    steps = list(decoder.stream(cycle.random_prompt(target, 40, 0), max_new_tokens=4))
    target.model.generation_config.eos_token_id = steps[-1].tokens[-1].id
    with pytest.raises(ValueError, match=f"where a median needs {FEWEST_CYCLES} .* --seed"):
        measure(decoder, TreeConfig(8, 3, 3), 40, seed=0)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, head, _ = saved(tmp_path_factory.mktemp("models"))
    models = ["--target", target, "--draft-head", head, "--tree", "4,2,2"]
    return [*models, "--dtype", "float32", "--device", "cpu"]


def test_every_row_is_in_the_file_as_soon_as_it_is_measured(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "cycle.json"
    written: list[int] = []

    def noted(*arguments: Any) -> CycleCosts:
        rows = json.loads(output.read_text())["contexts"] if output.exists() else []
        written.append(len(rows))
        return measure(*arguments)

    monkeypatch.setattr(cycle, "measure", noted)
    assert main([*flags, "--contexts", "8,30,60", "--output", str(output)]) == 0
    assert written == [0, 1, 2]
    rows = json.loads(output.read_text())["contexts"]
    assert [row["context"] for row in rows] == [8, 30, 60]
    assert {row["num_cycles"] for row in rows} == {CYCLES}
    assert f"{CYCLES:>9}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        # 17 cycles of 3 tokens, and 5 nodes
        (["--contexts", "8,201"], "--contexts must be <= 200, which leaves room for tree 4,2,2"),
        (["--contexts", "8", "--output", "absent/x.json"], "--output takes a file in a folder"),
        (["--contexts", "8", "--output", "."], "--output takes a file in a folder"),
        (["--contexts", "8", "--output", ""], "--output takes a file in a folder"),
    ],
)
def test_what_has_no_room_or_no_place_is_refused_before_anything_is_measured(
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(cycle, "measure", None)
    assert main([*flags, *more]) == 2
    assert words in capsys.readouterr().err
