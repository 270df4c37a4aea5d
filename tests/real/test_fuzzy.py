"""The default target itself: what relaxed rules gain and cost, and whether predictions hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.calibrate import Calibration, calibrate, grid
from eagle_fsd.recorder import Expectation

pytestmark = pytest.mark.target

MT_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "mt_bench.jsonl"
PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "How do I boil an egg?",
    "Explain what a binary search does, with an example.",
)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("demo", draft_head="demo", dtype="float32")


def first_turns() -> list[str]:
    """MT-Bench's first turns where they are at hand, otherwise a few prompts of our own."""
    if not MT_BENCH.is_file():
        return list(PROMPTS) * 10
    return [json.loads(line)["turns"][0] for line in MT_BENCH.read_text().splitlines()]


def live_length(decoder: SpeculativeDecoder, prompts: list[str], options: dict[str, Any]) -> float:
    """Tokens per cycle over all prompts."""
    stats = [decoder.generate(prompt, **options).stats for prompt in prompts]
    return sum(s.num_tokens - 1 for s in stats) / sum(s.num_cycles for s in stats)


def cost_at_gain(calibration: Calibration, rule: str, gain: float) -> float:
    """Nats per token at a gain in acceptance length, between the two nearest knobs."""
    rows = [row.expectation for row in calibration.rows if row.rule.startswith(f"{rule}:")]
    rows = [row for row in [calibration.exact, *rows] if math.isfinite(row.cost_per_token)]
    rows.sort(key=lambda row: row.acceptance_length)
    gains = [row.acceptance_length / calibration.exact.acceptance_length - 1 for row in rows]
    assert gains[-1] >= gain
    return float(np.interp(gain, gains, [row.cost_per_token for row in rows]))


def test_rescues_happen_at_temperature_zero_and_are_reported(decoder: SpeculativeDecoder) -> None:
    exact = decoder.generate(PROMPTS[0], max_new_tokens=32).stats
    fuzzy = decoder.generate(PROMPTS[0], max_new_tokens=32, rule="fuzzy:inf:js").stats
    assert fuzzy.num_rescued > 0
    assert fuzzy.num_cycles < exact.num_cycles
    assert fuzzy.regret_spent is not None
    assert fuzzy.regret_spent > 0


def test_fuzzy_at_zero_is_exact(decoder: SpeculativeDecoder) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        exact = decoder.generate(PROMPTS[0], max_new_tokens=24, **options)
        fuzzy = decoder.generate(PROMPTS[0], max_new_tokens=24, rule="fuzzy:0:js", **options)
        assert fuzzy.token_ids == exact.token_ids


@pytest.mark.slow
def test_acceptance_length_grows_with_the_threshold(decoder: SpeculativeDecoder) -> None:
    prompts = first_turns()[::10]
    lengths = [
        live_length(decoder, prompts, {"max_new_tokens": 48, "rule": f"fuzzy:{threshold}:js"})
        for threshold in (0.0, 0.2, 0.4, 0.6, math.inf)
    ]
    print(f"acceptance length at thresholds 0, 0.2, 0.4, 0.6, inf: {np.round(lengths, 3)}")
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1.3 * lengths[0]


@pytest.mark.slow
def test_fuzzy_costs_at_most_half_of_its_published_form_at_equal_gain(
    decoder: SpeculativeDecoder,
) -> None:
    rules = [*grid("fuzzy", ["js"]), *grid("fuzzy_2025", ["js"])]
    options = {"temperature": 1.0, "max_new_tokens": 48, "tree": "59,6,10"}
    calibration = calibrate(decoder, first_turns()[::10], rules, options, progress=False)
    for gain in (0.10, 0.25, 0.50):
        ours, published = (cost_at_gain(calibration, r, gain) for r in ("fuzzy", "fuzzy_2025"))
        print(f"+{gain:.0%}: fuzzy {ours:.4f}, fuzzy_2025 {published:.4f} nats per token")
        assert ours <= 0.5 * published


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predicted_acceptance_length_is_what_decoding_shows(
    decoder: SpeculativeDecoder, temperature: float
) -> None:
    """Knobs predicted up to +50% over exact, prompts that were not calibrated on."""
    questions = first_turns()
    options = {"temperature": temperature, "max_new_tokens": 64}
    rules = grid("fuzzy", ["js"], [0.2, 0.35, 0.45])
    calibration = calibrate(decoder, questions[::4], rules, options, progress=False)
    predicted: list[tuple[str, Expectation]] = [("exact", calibration.exact)]
    predicted += [(row.rule, row.expectation) for row in calibration.rows]
    for rule, expectation in predicted:
        live = live_length(decoder, questions[2::4], options | {"rule": rule})
        error = expectation.acceptance_length / live - 1
        print(
            f"{rule}: predicted {expectation.acceptance_length:.3f}, live {live:.3f}, {error:+.1%}"
        )
        if expectation.acceptance_length <= 1.5 * calibration.exact.acceptance_length:
            assert abs(error) < 0.10
