"""The stored choice of a tree, and how long trees get, against trees that are really drafted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.decoder import GenerationResult
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import (
    CPU_FILE,
    TREES_FILE,
    TreeChoice,
    acceptance_length,
    load_choice,
    needed_tokens,
    prefers_bfloat16,
    setting_of,
    store_choice,
)
from tests.stubs import head_drafter, random_prompt, tiny_model
from tests.train.tiny import tiny_tokenizer
from tree import DraftTree

DEPTH, TOP_K = 5, 4
ALL = TreeConfig(TOP_K + (DEPTH - 1) * TOP_K**2, DEPTH, TOP_K)
PROMPT = torch.tensor([7, 3, 9, 1, 5])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def drafted(drafter: HeadDrafter, features: torch.Tensor, config: TreeConfig) -> DraftTree:
    drafter.start(20)
    drafter.commit(PROMPT, features)
    return drafter.propose(42, config).tree


def depth_reached(tree: DraftTree, continuation: list[int]) -> int:
    node = 0
    for depth, token in enumerate(continuation):
        rows = [
            row
            for row in range(tree.num_nodes)
            if tree.parents[row] == node and tree.token_ids[row] == token
        ]
        if not rows:
            return depth
        node = rows[0]
    return len(continuation)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, DEPTH), top_k=st.integers(1, TOP_K))
def test_needed_tokens_are_those_of_trees_that_are_really_drafted(
    seed: int, depth: int, top_k: int
) -> None:
    rng = random.Random(seed)
    target = TargetModel(tiny_model())
    drafter = head_drafter(target, seed=seed % 5)
    features = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed))
    whole = drafted(drafter, features, ALL)
    node, continuation = 0, []
    for _ in range(DEPTH):  # down a random branch
        children = [row for row in range(whole.num_nodes) if whole.parents[row] == node]
        if not children:
            break
        node = rng.choice(children)
        continuation.append(int(whole.token_ids[node]))
    needed = needed_tokens(whole, continuation, depth, top_k)
    for size in range(1, top_k + (depth - 1) * top_k**2 + 1):
        tree = drafted(drafter, features, TreeConfig(size, depth, top_k))
        assert sum(n <= size for n in needed) == depth_reached(tree, continuation)


def test_acceptance_length_walks_from_root_to_root() -> None:
    # Trees of 3 hold one token at place 0, so the next root is place 2, which holds two.
    needed = [[2, 5], [1], [1, 3, 9], [], [4]]
    assert acceptance_length(needed, 3) == 5 / 2
    assert acceptance_length(needed, 1) == 5 / 4
    assert acceptance_length(needed, 0) == 1.0
    assert acceptance_length([[1, 2, 3, 4]], 4) == 1.0  # the text ends there
    assert acceptance_length([], 4) == 1.0


def decode(target: TargetModel, **options: object) -> GenerationResult:
    prompt = random_prompt(random.Random(0))
    decoder = SpeculativeDecoder(target, head_drafter(target))
    return decoder.generate(prompt, max_new_tokens=12, **options)  # type: ignore[arg-type]


def test_a_stored_choice_becomes_the_default_tree(own_cache: Path) -> None:
    target = TargetModel(tiny_model())
    before = decode(target)
    assert before.stats.tree == str(TreeConfig.default("cpu"))
    setting = setting_of(target, head_drafter(target))
    store_choice("another machine", TreeChoice(TreeConfig(3, 3, 1), 2.0))
    assert load_choice(setting) is None
    store_choice(setting, TreeChoice(TreeConfig(9, 3, 3), 1.3))
    assert load_choice(setting) == TreeChoice(TreeConfig(9, 3, 3), 1.3)
    assert load_choice("another machine") == TreeChoice(TreeConfig(3, 3, 1), 2.0)
    assert decode(target).stats.tree == "9,3,3"
    assert decode(target, tree="auto").stats.tree == "9,3,3"
    assert decode(target, tree="5,5,1").stats.tree == "5,5,1"
    assert decode(target).token_ids == before.token_ids
    assert [path.name for path in own_cache.iterdir()] == [TREES_FILE]


def test_where_speculation_loses_exact_decoding_is_plain() -> None:
    target = TargetModel(tiny_model())
    before = decode(target)
    setting = setting_of(target, head_drafter(target))
    store_choice(setting, TreeChoice(TreeConfig(9, 3, 3), 0.8))
    exact = decode(target)
    assert exact.stats.tree == "plain"
    assert exact.token_ids == before.token_ids
    assert decode(target, tree="8,3,3").stats.tree == "8,3,3"
    # A relaxed rule accepts more than was measured.
    assert decode(target, rule="fuzzy:0.5:js").stats.tree == "9,3,3"


@pytest.mark.parametrize("is_faster", [True, False])
def test_bfloat16_is_timed_once_and_decides_half_precision_on_a_cpu(
    is_faster: bool, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def seconds(dtype: torch.dtype) -> float:
        timed.append(dtype)
        return 1.0 if (dtype == torch.bfloat16) == is_faster else 2.0

    monkeypatch.setattr("eagle_fsd.tuning._seconds", seconds)
    fast = torch.bfloat16 if is_faster else torch.float32
    tokenizer = tiny_tokenizer()
    for stored, asked, used in (
        (torch.bfloat16, "auto", fast),
        (torch.float16, "auto", fast),
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ):
        tiny_model().to(stored).save_pretrained(tmp_path / "target")
        decoder = SpeculativeDecoder.from_pretrained(
            tmp_path / "target", tokenizer=tokenizer, dtype=asked
        )
        assert isinstance(decoder.target, TargetModel)
        assert decoder.target.dtype == used
    assert len(timed) == 2
    assert [path.name for path in own_cache.iterdir()] == [CPU_FILE]


def test_both_dtypes_are_really_timed(own_cache: Path) -> None:
    first = prefers_bfloat16()
    kept = json.loads((own_cache / CPU_FILE).read_text())
    assert list(kept.values()) == [first]
    assert prefers_bfloat16() is first


@pytest.mark.parametrize("content", ["", "[]", "{", '{"SETTING": 3}', '{"SETTING": {"tree": [0]}}'])
def test_a_spoilt_file_is_no_choice(own_cache: Path, content: str) -> None:
    target = TargetModel(tiny_model())
    setting = setting_of(target, head_drafter(target))
    own_cache.mkdir()
    (own_cache / TREES_FILE).write_text(content.replace("SETTING", setting))
    assert load_choice(setting) is None
    store_choice(setting, TreeChoice(TreeConfig(9, 3, 3), 1.3))
    assert load_choice(setting) is not None
