"""No option that makes a cycle faster changes an exact id, alone or with any other."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.attention import PACKED
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from tests.stubs import VOCABULARY, greedy_reference, random_prompt, tiny_head, tiny_model

OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention": ("eager", "sdpa", PACKED),
    "packs_weights": (False, True),
    "draft_vocab": (None, VOCABULARY // 3),
    "tree": ("5,5,1", "8,3,3", "24,4,6"),
    "prefill_chunk": (1024, 7),
}
NUM_PROMPTS = 4
NEW_TOKENS = 24


def all_pairs() -> list[dict[str, Any]]:
    """Few settings that hold every pair of values of two options, chosen greedily."""
    settings = [
        dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())
    ]

    def pairs(setting: dict[str, Any]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(setting.items(), 2))

    missing = set().union(*map(pairs, settings))
    chosen = []
    while missing:
        best = max(settings, key=lambda setting: len(pairs(setting) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("setting", all_pairs(), ids=str)
def test_exact_ids_are_those_of_generate(family: str, setting: dict[str, Any]) -> None:
    model = tiny_model(family, setting["attention"])
    target = TargetModel(
        model, setting["prefill_chunk"], packs_weights=bool(setting["packs_weights"])
    )
    size = setting["draft_vocab"]
    vocabulary = None if size is None else torch.arange(0, VOCABULARY, 3)[:size]
    drafter = HeadDrafter(tiny_head(model), target, vocabulary)
    decoder = SpeculativeDecoder(target, drafter, tree=setting["tree"])
    rng = random.Random(11)
    num_accepted = 0
    for _ in range(NUM_PROMPTS):
        prompt = random_prompt(rng)
        result = decoder.generate(prompt, max_new_tokens=NEW_TOKENS)
        assert result.token_ids == greedy_reference(model, prompt, NEW_TOKENS)
        assert result.token_ids == decoder.plain(prompt, max_new_tokens=NEW_TOKENS).token_ids
        num_accepted += result.stats.num_accepted
    assert num_accepted > 0 or setting["tree"] == "5,5,1"  # a random chain is seldom right
