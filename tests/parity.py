"""The parity harness: speculative ids against the model's own, whatever drafts, whatever tree."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.attention import PACKED
from eagle_fsd.decoder import SpeculativeDecoder
from tests.stubs import (
    ATTENTION,
    PathDrafter,
    RecordingTarget,
    greedy_reference,
    head_drafter,
    random_prompt,
    tiny_model,
)

TREES = ("6,6,1", "8,3,3", "24,5,4", "59,6,10")
DRAFTERS = ("random", "oracle", "wrong")
NEW_TOKENS = 40
# The others are checked with shorter answers, in test_parity_families.py.
FIRST_FAMILIES = ("llama", "qwen2", "gemma2", "qwen3", "mistral", "mixtral")
# Two fp32 passes of different shapes round differently; logits closer than this are a tie.
TIE = 1e-4
# Whether weights are packed: both where there is no other attention to tell them apart by.
_LAYOUTS = {"eager": (False, True), PACKED: (True,), "sdpa": (False,)}


@dataclass
class ParityReport:
    """Counts over many prompts."""

    num_prompts: int = 0
    num_ties: int = 0
    num_scattered: int = 0
    faults: list[str] = field(default_factory=list)


def top2_gap(model: Any, tokens: Tensor) -> float:
    """Difference of the two largest logits that follow [1, T] tokens."""
    with torch.inference_mode():
        best = model(tokens).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def check_greedy_parity(
    family: str, num_prompts: int, seed: int, num_new_tokens: int = NEW_TOKENS
) -> ParityReport:
    """Compares `num_prompts` random prompts with `model.generate(do_sample=False)`.

    Prompts are spread over drafters, trees and attention implementations; a difference counts as a
    fault unless the top-2 logits at the first one are closer than TIE, and then the gap is printed.
    """
    rng = random.Random(seed)
    report = ParityReport()
    targets = [
        RecordingTarget(tiny_model(family, attention), prefill_chunk=24, packs_weights=packs)
        for attention in ATTENTION[family]
        for packs in _LAYOUTS[attention]
    ]
    for number in range(num_prompts):
        target = targets[number % len(targets)]
        kind = DRAFTERS[number // len(targets) % len(DRAFTERS)]
        tree = TREES[number // (len(targets) * len(DRAFTERS)) % len(TREES)]
        prompt = random_prompt(rng)
        expected = greedy_reference(target.model, prompt, num_new_tokens)
        if kind == "random":
            drafter: Any = head_drafter(target)
        else:
            drafter = PathDrafter(expected, prompt.shape[1], is_right=kind == "oracle", seed=number)
        result = SpeculativeDecoder(target, drafter).generate(
            prompt, tree=tree, max_new_tokens=num_new_tokens
        )
        report.num_prompts += 1
        if result.token_ids == expected:
            continue
        place = next(
            i
            for i, pair in enumerate(zip(result.token_ids, expected, strict=False))
            if pair[0] != pair[1]
        )
        gap = top2_gap(
            target.model,
            torch.cat([prompt, torch.tensor([expected[:place]], dtype=torch.int64)], dim=1),
        )
        where = f"{family} prompt {number}, {kind}, tree {tree}: token {place}, top-2 gap {gap:.2e}"
        print(where)
        if gap < TIE:
            report.num_ties += 1
        else:
            report.faults.append(where)
    report.num_scattered = sum(target.num_scattered for target in targets)
    return report
