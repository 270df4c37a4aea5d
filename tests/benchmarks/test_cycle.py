"""The cost of a cycle: all parts are measured, and the figures are what their names say."""

from __future__ import annotations

import pytest

from benchmarks.cycle import CycleCosts, growth, main, measure
from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.target import TargetModel
from tests.stubs import head_drafter, tiny_model


def test_all_parts_are_measured_behind_a_context() -> None:
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target))
    costs = measure(decoder, TreeConfig(8, 3, 3), 40, seed=0)
    assert costs.context == 40
    assert min(costs.plain_s, costs.pass_s, costs.draft_s, costs.live_s) > 0.0
    assert costs.memory_bytes > 10**6


def test_overhead_and_growth_are_shares_and_ratios() -> None:
    short = CycleCosts(256, plain_s=1.0, pass_s=2.0, draft_s=1.0, live_s=4.0, memory_bytes=1)
    long = CycleCosts(4096, plain_s=2.0, pass_s=8.0, draft_s=1.0, live_s=12.0, memory_bytes=1)
    assert short.overhead == pytest.approx(0.25)
    assert growth([short, long]) == pytest.approx(1.5)


@pytest.mark.parametrize("contexts", ["", "0", "12,", "a", "-4"])
def test_contexts_that_are_none_are_refused(
    contexts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", "x", "--draft-head", "demo", f"--contexts={contexts}"]
    assert main(flags) == 2
    assert "--contexts takes whole numbers" in capsys.readouterr().err
