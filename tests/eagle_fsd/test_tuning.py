"""The stored choice of a tree, and how long trees get, against trees that are really drafted."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.decoder import GenerationResult, _suit_cpu
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import (
    CPU_FILE,
    TREES_FILE,
    TreeChoice,
    _is_bfloat16_faster,
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
    _is_bfloat16_faster.cache_clear()
    return tmp_path / "cache"


def kept_files(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


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
    assert kept_files(own_cache) == [TREES_FILE]


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
    # An observer is there for the trees.
    sizes: list[int] = []
    seen = decode(target, observer=lambda draft, *_: sizes.append(draft.tree.num_nodes))
    assert seen.stats.tree == "9,3,3"
    assert max(sizes) == 10
    assert seen.token_ids == before.token_ids


def test_a_decoder_of_other_models_keeps_a_given_tree_and_looks_an_automatic_one_up() -> None:
    target, other = TargetModel(tiny_model()), TargetModel(tiny_model().to(torch.bfloat16))
    drafter, other_drafter = head_drafter(target), head_drafter(other)
    store_choice(setting_of(target, drafter), TreeChoice(TreeConfig(9, 3, 3), 0.8))
    store_choice(setting_of(other, other_drafter), TreeChoice(TreeConfig(6, 3, 2), 1.5))
    prompt = random_prompt(random.Random(0))
    for tree, here, there in (
        (None, "plain", "6,3,2"),
        ("auto", "plain", "6,3,2"),
        ("9,3,3", "9,3,3", "9,3,3"),
        (TreeConfig(5, 5, 1), "5,5,1", "5,5,1"),
    ):
        decoder = SpeculativeDecoder(target, drafter, None, tree)
        moved = decoder.with_models(other, other_drafter)
        back = moved.with_models(target, drafter)
        runs = [each.generate(prompt, max_new_tokens=8) for each in (decoder, moved, back)]
        assert [run.stats.tree for run in runs] == [here, there, here]
    decoder = SpeculativeDecoder(target, drafter)
    decoder.tree = TreeConfig(4, 4, 1)  # set is given
    assert decoder.generate(prompt, max_new_tokens=8).stats.tree == "4,4,1"
    decoder.tree = "auto"  # type: ignore[assignment]
    assert decoder.generate(prompt, max_new_tokens=8).stats.tree == "plain"


def test_writers_at_the_same_time_lose_nothing(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = TreeChoice(TreeConfig(9, 3, 3), 1.3)
    monkeypatch.setattr(
        "eagle_fsd.tuning._seconds", lambda dtype, **_: float(dtype == torch.float32)
    )
    start = Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for each in range(5):
            store_choice(f"{number} {each}", choice)
        assert prefers_bfloat16()

    with ThreadPoolExecutor(4) as pool:  # a lock of its own in each, as in processes
        for future in [pool.submit(write, number) for number in range(4)]:
            future.result()
    assert all(load_choice(f"{n} {each}") == choice for n in range(4) for each in range(5))
    assert sorted(kept_files(own_cache)) == [CPU_FILE, TREES_FILE]


@pytest.mark.parametrize("place", ["file/cache", "~nobody-of-this-name/cache"])
def test_without_a_cache_everything_runs_and_only_storing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    cache = place if place.startswith("~") else str(tmp_path / place)
    monkeypatch.setenv("EAGLE_FSD_CACHE", cache)
    timed: list[torch.dtype] = []

    def seconds(dtype: torch.dtype) -> float:
        timed.append(dtype)
        return 2.0 if dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr("eagle_fsd.tuning._seconds", seconds)
    target = TargetModel(tiny_model())
    assert load_choice(setting_of(target, head_drafter(target))) is None
    assert decode(target).stats.tree == str(TreeConfig.default("cpu"))
    assert [prefers_bfloat16() for _ in range(3)] == [False] * 3
    assert len(timed) == 2
    with pytest.raises((OSError, RuntimeError)):
        store_choice("here", TreeChoice(TreeConfig(9, 3, 3), 1.3))


def test_a_file_that_another_process_holds_for_long_is_not_waited_for(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_fsd.tuning._PATIENCE_S", 0.01)
    monkeypatch.setattr(
        "eagle_fsd.tuning._seconds", lambda dtype, **_: float(dtype == torch.float32)
    )
    own_cache.mkdir()
    with FileLock(own_cache / f"{CPU_FILE}.lock"):
        assert prefers_bfloat16()
    assert kept_files(own_cache) == []


def test_a_target_with_a_quantisation_of_its_own_keeps_its_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "eagle_fsd.tuning._seconds", lambda dtype, **_: float(dtype != torch.float32)
    )
    model = tiny_model().to(torch.bfloat16)
    model.is_quantized = True  # as transformers sets it
    model.to = lambda *_: pytest.fail("it was converted")
    _suit_cpu(model, "auto", {})
    assert model.dtype == torch.bfloat16
    plain = tiny_model().to(torch.bfloat16)
    _suit_cpu(plain, "auto", {})
    assert plain.dtype == torch.float32


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
            tmp_path / "target", tokenizer=tokenizer, dtype=asked, packed_weights=False
        )
        assert isinstance(decoder.target, TargetModel)
        assert decoder.target.dtype == used
    assert len(timed) == 2
    assert kept_files(own_cache) == [CPU_FILE]


def test_both_dtypes_are_really_timed(own_cache: Path) -> None:
    first = prefers_bfloat16()
    kept = json.loads((own_cache / CPU_FILE).read_text())
    assert list(kept.values()) == [first]
    assert prefers_bfloat16() is first


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", "[" * 100_000, '{"SETTING": 3}', '{"SETTING": null}'),
        *(
            f'{{"SETTING": {{"tree": {tree}, "ratio": {ratio}}}}}'
            for tree, ratio in (
                *(("[0]", "1.5"), ("[9, 3]", "1.5"), ("[9, 3, 3, 1]", "1.5"), ("null", "1.5")),
                *(("[true, 1, 1]", "1.5"), ("[9.0, 3, 3]", "1.5"), ('"933"', "1.5")),
                *(('{"9": 1, "3": 2, "4": 3}', "1.5"), (f"[9, {10**30}, 3]", "1.5")),
                *(("[9, 3, 3]", '"nan"'), ("[9, 3, 3]", "NaN"), ("[9, 3, 3]", "Infinity")),
                *(("[9, 3, 3]", f"1{'0' * 400}"), ("[9, 3, 3]", "true"), ("[9, 3, 3]", "-1.0")),
            )
        ),
    ],
)
def test_a_spoilt_file_is_no_choice(own_cache: Path, content: str) -> None:
    target = TargetModel(tiny_model())
    setting = setting_of(target, head_drafter(target))
    own_cache.mkdir()
    (own_cache / TREES_FILE).write_text(content.replace("SETTING", setting))
    assert load_choice(setting) is None
    store_choice(setting, TreeChoice(TreeConfig(9, 3, 3), 1.3))
    assert load_choice(setting) is not None


@pytest.mark.parametrize(
    ("ratio", "kind"),
    [(float("nan"), ValueError), (float("inf"), ValueError), (-0.5, ValueError), ("1", TypeError)],
)
def test_a_choice_that_was_not_measured_is_refused(ratio: float, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="ratio must be"):
        TreeChoice(TreeConfig(9, 3, 3), ratio)
