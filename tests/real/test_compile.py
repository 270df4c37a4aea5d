"""`compile=True` with the real compiler, which takes about a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: the compiler imports build tools that other tests may have loaded.
SCRIPT = """
import random
import torch
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import TargetModel
from tests.stubs import greedy_reference, head_drafter, random_prompt, tiny_model

model = tiny_model()
target = TargetModel(model, is_compiled=True)
decoder = SpeculativeDecoder(target, head_drafter(target), tree="8,3,3")
for seed in range(8):
    prompt = random_prompt(random.Random(seed))
    expected = greedy_reference(model, prompt, 24)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert decoder.generate(prompt, max_new_tokens=24).token_ids == expected
    assert decoder.plain(prompt, max_new_tokens=24).token_ids == expected
    # The first two requests meet every kind of pass.
    assert seed < 2 or torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.target
def test_the_graphs_of_two_requests_serve_all_lengths() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
