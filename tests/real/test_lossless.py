"""The default target itself: exact ids equal the unmodified model's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.chat import encode_prompt
from tests.parity import TIE, top2_gap
from tests.sampling_ties import distance_to_a_tie
from tests.stubs import greedy_reference

pytestmark = pytest.mark.target

MT_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "mt_bench.jsonl"
PROMPTS = ("Why is the sky blue?", "Write a haiku about rain. Then explain it.")


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("demo", draft_head="demo", dtype="float32")


def assert_greedy_parity(decoder: SpeculativeDecoder, prompt: str, num_tokens: int) -> float:
    """Compares one prompt; returns its acceptance length."""
    target: Any = decoder.target
    ids = encode_prompt(prompt, decoder.tokenizer, target.vocabulary_size)[None]
    expected = greedy_reference(target.model, ids, num_tokens)
    result = decoder.generate(prompt, max_new_tokens=num_tokens)
    if result.token_ids != expected:
        pairs = zip(result.token_ids, expected, strict=False)
        place = next(i for i, pair in enumerate(pairs) if pair[0] != pair[1])
        context = torch.cat([ids, torch.tensor([expected[:place]], dtype=torch.int64)], dim=1)
        gap = top2_gap(target.model, context)
        print(f"{prompt[:40]!r}: differs at token {place}, top-2 gap {gap:.2e}")
        assert gap < TIE
    assert decoder.tokenizer is not None
    assert result.text == decoder.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    return result.stats.acceptance_length or 1.0


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_ids_equal_generate(decoder: SpeculativeDecoder, prompt: str) -> None:
    assert assert_greedy_parity(decoder, prompt, 48) > 1.2


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_exact_ids_equal_plain_ids(decoder: SpeculativeDecoder, temperature: float) -> None:
    options: Any = {"temperature": temperature, "top_p": 0.9, "seed": 5, "max_new_tokens": 32}
    exact = decoder.generate(PROMPTS[0], **options).token_ids
    plain = decoder.plain(PROMPTS[0], **options).token_ids
    if exact != plain:
        target: Any = decoder.target
        ids = encode_prompt(PROMPTS[0], decoder.tokenizer, target.vocabulary_size)[None]
        assert distance_to_a_tie(target, ids, exact, plain, options) < TIE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_text(dtype: str) -> None:
    decoder = SpeculativeDecoder.from_pretrained("demo", draft_head="demo", dtype=dtype)
    result = decoder.generate(PROMPTS[0], max_new_tokens=24)
    assert all(0 <= token < decoder.target.vocabulary_size for token in result.token_ids)
    assert "sky" in result.text or "light" in result.text


def test_the_compare_command_prints_identical_texts() -> None:
    command = [sys.executable, "-m", "eagle_fsd", "compare", "--target", "demo", "--draft-head"]
    command += ["demo", "--dtype", "float32", "--max-new-tokens", "16", "--prompt", PROMPTS[0]]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "the two texts are identical" in done.stdout
    assert "acceptance length" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not MT_BENCH.is_file(), reason="needs the MT-Bench questions")
def test_greedy_parity_on_twenty_first_turns(decoder: SpeculativeDecoder) -> None:
    questions = [json.loads(line) for line in MT_BENCH.read_text().splitlines()]
    lengths = [assert_greedy_parity(decoder, q["turns"][0], 64) for q in questions[::4]]
    assert len(lengths) == 20
    print(f"mean acceptance length {sum(lengths) / 20:.2f}")
