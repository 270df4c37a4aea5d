"""A process that serves request after request does not grow."""

from __future__ import annotations

import psutil
import pytest

from eagle_fsd import SpeculativeDecoder

pytestmark = pytest.mark.target

NUM_TOKENS = 10_000
NEW_TOKENS = 256
WARM_UP = 8  # allocators and buffers reach their size


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("demo", draft_head="demo", dtype="float32")


@pytest.mark.slow
def test_ten_thousand_tokens_in_several_requests_take_no_more_memory(
    decoder: SpeculativeDecoder,
) -> None:
    process = psutil.Process()
    held: list[int] = []
    num_tokens = 0
    while num_tokens < NUM_TOKENS:
        number = len(held)
        result = decoder.generate(
            f"Tell me everything about the number {number}.",
            max_new_tokens=NEW_TOKENS,
            rule=("exact", "fuzzy:0.3:js")[number % 2],
            temperature=(0.0, 1.0)[number // 2 % 2],
            stop_ids=(),
        )
        num_tokens += len(result.token_ids)
        held.append(process.memory_info().rss)
    print(f"{num_tokens} tokens, {held[WARM_UP] / 1e6:.0f} MB -> {held[-1] / 1e6:.0f} MB")
    assert held[-1] < 1.03 * max(held[: WARM_UP + 1])
