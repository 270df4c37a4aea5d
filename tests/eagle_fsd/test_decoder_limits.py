"""Contexts, caches that are used again, broken numbers, dtypes, and what the statistics say."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd.checkpoint import load_head, save_head
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.stats import GenerationStats, StepStats
from eagle_fsd.target import TargetModel, TargetOutput
from tests.scripted import PROMPT, run, scripted
from tests.stubs import (
    VOCABULARY,
    PathDrafter,
    TableDrafter,
    TableTarget,
    greedy_reference,
    head_drafter,
    random_prompt,
    tiny_head,
    tiny_model,
)
from tree import DraftTree

TREE = TreeConfig(16, 4, 3)
SCRIPT = list(range(10, 90))


def prompt_of(length: int, seed: int = 0) -> Tensor:
    return random_prompt(random.Random(seed), length, length)


# the target's context


@pytest.mark.parametrize("tree", ["6,6,1", "48,6,3"])
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("room", range(1, 12))
def test_a_run_that_ends_exactly_at_the_context_finishes(tree, is_right, room):
    limit = PROMPT.shape[1] + room
    decoder = scripted(SCRIPT, tree=tree, is_right=is_right, max_positions=limit)
    _, result = run(decoder, max_new_tokens=50)
    assert result.token_ids == SCRIPT[:room]
    assert result.finish_reason == "context"
    _, result = run(decoder, max_new_tokens=room)
    assert (result.token_ids, result.finish_reason) == (SCRIPT[:room], "length")


@pytest.mark.parametrize("length", [59, 60, 63])
def test_a_real_model_decodes_up_to_its_last_position(length):
    target = TargetModel(tiny_model(max_position_embeddings=64))
    prompt = prompt_of(length)
    expected = greedy_reference(target.model, prompt, 64 - length)
    for drafter in (head_drafter(target), PathDrafter(expected, length, is_right=True)):
        result = SpeculativeDecoder(target, drafter, tree=TREE).generate(prompt)
        assert result.token_ids == expected
        assert result.finish_reason == "context"
        assert target.num_rows <= 64


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    target = TargetModel(tiny_model(max_position_embeddings=64))
    decoder = SpeculativeDecoder(target, head_drafter(target))
    for call in (decoder.stream, decoder.generate, decoder.plain):
        with pytest.raises(
            ValueError, match=f"the prompt has {length} tokens and the target's context is 64"
        ):
            call(prompt_of(length))
    assert target.num_rows == 0


@pytest.mark.parametrize("head_limit", [4, 8, 16, 25])
@pytest.mark.parametrize("length", [3, 8, 16, 30])
def test_past_the_heads_context_decoding_goes_on_without_it(head_limit, length):
    target = TargetModel(tiny_model())
    prompt = prompt_of(length)
    drafter = head_drafter(target, max_position_embeddings=head_limit)
    result = SpeculativeDecoder(target, drafter, tree=TREE).generate(prompt, max_new_tokens=40)
    assert result.token_ids == greedy_reference(target.model, prompt, 40)
    assert drafter.num_rows <= head_limit
    assert (result.stats.accepted_by_depth == []) == (length + 1 >= head_limit)


def rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": kind, **extra}


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        (rope("default"), 256),
        (rope("linear", factor=2.0), 256),
        (rope("dynamic", factor=4.0, original_max_position_embeddings=64), 64),
        (rope("dynamic", factor=4.0), 256),
        (rope("longrope", original_max_position_embeddings=64, **LONGROPE), 64),
        (rope("yarn", factor=4.0, original_max_position_embeddings=64), 256),
        ({"full_attention": rope("dynamic", original_max_position_embeddings=48)}, 48),
    ],
)
def test_rope_that_changes_with_the_length_limits_the_context(parameters, limit):
    target = TargetModel(tiny_model())
    target.config.rope_parameters = parameters
    assert target.max_positions == limit


def test_longrope_targets_of_the_older_form_are_limited():
    target = TargetModel(tiny_model())
    target.config.rope_parameters = rope("longrope", **LONGROPE)
    target.config.original_max_position_embeddings = 32
    assert target.max_positions == 32


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_decodes_right_up_to_its_original_length(kind):
    extra = LONGROPE if kind == "longrope" else {"factor": 4.0}
    parameters = rope(kind, original_max_position_embeddings=48, **extra)
    target = TargetModel(tiny_model(rope_parameters=parameters))
    assert target.max_positions == 48
    prompt = prompt_of(20)
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    result = decoder.generate(prompt, max_new_tokens=100)
    assert result.token_ids == greedy_reference(target.model, prompt, 28)
    assert result.finish_reason == "context"
    with pytest.raises(ValueError, match="has 48 tokens and the target's context is 48"):
        decoder.generate(prompt_of(48))


# one cache, many requests


def test_requests_do_not_see_each_other():
    target = TargetModel(tiny_model(), prefill_chunk=16)
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    long, short = prompt_of(100), prompt_of(3, seed=1)
    first = decoder.generate(long, max_new_tokens=40)
    second = decoder.generate(short, max_new_tokens=10)
    third = decoder.generate(long, max_new_tokens=40)
    fourth = decoder.generate(long, max_new_tokens=7)
    assert first.token_ids == greedy_reference(target.model, long, 40)
    assert second.token_ids == greedy_reference(target.model, short, 10)
    assert third.token_ids == first.token_ids
    assert fourth.token_ids == first.token_ids[:7]
    assert third.stats.accepted_by_depth == first.stats.accepted_by_depth


def test_a_prompt_longer_than_the_cache_makes_it_grow():
    target = TargetModel(tiny_model(), prefill_chunk=16)
    drafter = head_drafter(target)
    decoder = SpeculativeDecoder(target, drafter, tree=TREE)
    for length in (2, 40, 5, 120, 1):
        prompt = prompt_of(length)
        expected = greedy_reference(target.model, prompt, 12)
        assert decoder.generate(prompt, max_new_tokens=12).token_ids == expected
        assert decoder.plain(prompt, max_new_tokens=12).token_ids == expected


def test_a_huge_token_limit_reserves_no_more_than_the_context():
    target = TargetModel(tiny_model(max_position_embeddings=64))
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    result = decoder.generate(prompt_of(50), max_new_tokens=10**9)
    assert len(result.token_ids) == 14


def test_plain_and_tree_requests_alternate():
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    prompt = prompt_of(30)
    options = {"temperature": 1.0, "seed": 4, "max_new_tokens": 20}
    results = [decoder.generate(prompt, **options), decoder.plain(prompt, **options)] * 2
    assert len({tuple(result.token_ids) for result in results}) == 1


# numbers that are not finite


class BrokenTarget(TargetModel):
    """Spoils the logits of some nodes of one pass.

    Args:
        value: what every logit of the node, or only one of them, becomes.
        number: of the pass after the prompt.
        depth: which nodes; None spoils none.
    """

    def __init__(self, model: Any, value: float, number: int, depth: int | None) -> None:
        super().__init__(model)
        self.value, self.number, self.depth = value, number, depth
        self._passes = 0

    def start(self, capacity: int) -> None:
        self._passes = 0
        super().start(capacity)

    def prefill(self, input_ids: Tensor) -> TargetOutput:
        output = super().prefill(input_ids)
        return self._spoil(output, torch.zeros(1, dtype=torch.int64))

    def score(self, tree: DraftTree) -> TargetOutput:
        self._passes += 1
        return self._spoil(super().score(tree), tree.depths)

    def _spoil(self, output: TargetOutput, depths: Tensor) -> TargetOutput:
        if self._passes != self.number or self.depth is None:
            return output
        logits = output.logits.clone()
        rows = depths == self.depth
        columns = slice(None) if self.value == -torch.inf else slice(5, 6)
        logits[rows, columns] = self.value
        return TargetOutput(logits, output.features)


BROKEN_VALUES = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("value", BROKEN_VALUES)
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("tree", ["4,4,1", "30,4,3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_inner_node_becomes_the_next_root(value, depth, tree, temperature):
    model = tiny_model()
    prompt = prompt_of(9)
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 20}
    plain = SpeculativeDecoder(TargetModel(model)).plain(prompt, **options)
    drafter = PathDrafter(plain.token_ids, 9, is_right=True)
    target = BrokenTarget(model, value, number=1, depth=depth)
    steps = list(SpeculativeDecoder(target, drafter).stream(prompt, tree=tree, **options))
    result = steps[-1].result
    assert result.token_ids == plain.token_ids
    # The walk reached the broken node by a right draw, emitted it, and ended there.
    assert len(steps[1].tokens) == depth
    assert steps[1].stats.num_accepted == depth
    assert sum(result.stats.accepted_by_depth) == result.stats.num_accepted
    assert steps[2].tree.token_ids[0] == plain.token_ids[depth]


@pytest.mark.parametrize("value", BROKEN_VALUES)
def test_a_broken_node_off_the_path_disturbs_nothing(value):
    model = tiny_model()
    prompt = prompt_of(9)
    expected = greedy_reference(model, prompt, 20)
    target = BrokenTarget(model, value, number=1, depth=2)
    drafter = PathDrafter(expected, 9, is_right=False)
    decoder = SpeculativeDecoder(target, drafter, tree=TREE)
    assert decoder.generate(prompt, max_new_tokens=20).token_ids == expected


@pytest.mark.parametrize("value", BROKEN_VALUES)
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_root_is_a_named_error_and_the_decoder_lives(value, number, temperature):
    target = BrokenTarget(tiny_model(), value, number, depth=0)
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    prompt = prompt_of(9)
    options = {"temperature": temperature, "max_new_tokens": 20}
    for call in (decoder.generate, decoder.plain):
        with pytest.raises(NonFiniteLogitsError, match="try dtype bfloat16 or float32"):
            call(prompt, **options)
    target.depth = None
    fresh = SpeculativeDecoder(TargetModel(target.model)).plain(prompt, **options)
    assert decoder.generate(prompt, **options).token_ids == fresh.token_ids


def test_a_relaxed_rule_accepts_nothing_at_a_broken_node():
    model = tiny_model()
    prompt = prompt_of(9)
    first = greedy_reference(model, prompt, 1)
    target = BrokenTarget(model, torch.nan, number=1, depth=1)
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    steps = list(decoder.stream(prompt, rule="fuzzy", threshold=float("inf"), max_new_tokens=12))
    # Every child of the root is broken, so none of them is rescued.
    assert [token.id for token in steps[0].tokens] == first
    assert [token.origin for token in steps[1].tokens] in (["recovered"], ["accepted"])
    assert all(0 <= token < VOCABULARY for token in steps[-1].result.token_ids)


def test_a_broken_draft_law_costs_speed_and_nothing_else():
    target = TargetModel(tiny_model())
    head = tiny_head(target.model)
    head.fc.weight.fill_(torch.nan)
    decoder = SpeculativeDecoder(target, HeadDrafter(head, target), tree=TREE)
    prompt = prompt_of(9)
    expected = greedy_reference(target.model, prompt, 10)
    assert decoder.generate(prompt, max_new_tokens=10).token_ids == expected


# dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_half_precision_gives_ids_of_the_vocabulary_only(dtype, attention):
    target = TargetModel(tiny_model(attention=attention).to(dtype))
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    for seed in range(3):
        for temperature in (0.0, 0.5, 1.5):
            result = decoder.generate(
                prompt_of(20, seed), temperature=temperature, seed=seed, max_new_tokens=15
            )
            assert len(result.token_ids) == 15
            assert all(0 <= token < VOCABULARY for token in result.token_ids)


def test_overflow_in_float16_is_an_error_and_not_a_token():
    model = tiny_model()
    model.model.norm.weight.data.fill_(1e30)
    target = TargetModel(model.to(torch.float16))
    decoder = SpeculativeDecoder(target, head_drafter(target))
    with pytest.raises(NonFiniteLogitsError, match="float16 overflows"):
        decoder.generate(prompt_of(5))


def test_a_model_that_is_converted_after_loading_is_followed():
    target = TargetModel(tiny_model().to(torch.bfloat16))
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    prompt = prompt_of(20)
    decoder.generate(prompt, max_new_tokens=10)
    target.model.float()
    assert target.dtype == torch.float32
    expected = greedy_reference(target.model, prompt, 20)
    assert decoder.generate(prompt, max_new_tokens=20).token_ids == expected
    target.model.to(torch.bfloat16)
    assert len(decoder.generate(prompt, max_new_tokens=20).token_ids) == 20


@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dtype", [torch.bfloat16, torch.float32])
def test_a_head_file_of_another_dtype_works(tmp_path, target_dtype, head_dtype):
    model = tiny_model().to(target_dtype)
    save_head(tiny_head(model).to(head_dtype), tmp_path / "head")
    assert load_head(tmp_path / "head").fc.weight.dtype == head_dtype
    decoder = SpeculativeDecoder.from_pretrained(model, draft_head=tmp_path / "head", tree=TREE)
    assert decoder.drafter.head.fc.weight.dtype == target_dtype
    result = decoder.generate(prompt_of(20), max_new_tokens=10)
    assert len(result.token_ids) == 10


def test_a_head_that_stays_in_float32_beside_a_bfloat16_target_works():
    target = TargetModel(tiny_model().to(torch.bfloat16))
    drafter = HeadDrafter(tiny_head(target.model).float(), target)
    decoder = SpeculativeDecoder(target, drafter, tree=TREE)
    prompt = prompt_of(20)
    plain = decoder.plain(prompt, max_new_tokens=5)
    assert len(decoder.generate(prompt, max_new_tokens=5).token_ids) == len(plain.token_ids)


# statistics


def step(num_accepted: int, num_tried: int) -> StepStats:
    return StepStats(8, num_accepted, 0, num_accepted + 1, num_tried, {"draft": 0.5, "target": 2.0})


def test_acceptance_rate_by_depth_is_conditional_on_all_earlier_levels():
    stats = GenerationStats(seed=0, rule="exact", tree="8,3,2")
    for num_accepted, num_tried in ((1, 2), (1, 2), (0, 1), (3, 3)):
        stats.add_step(step(num_accepted, num_tried))
    assert stats.tried_by_depth == [4, 3, 1]
    assert stats.accepted_by_depth == [3, 1, 1]
    assert stats.acceptance_by_depth == [3 / 4, 1 / 3, 1.0]
    assert stats.phases_s == {"draft": 2.0, "target": 8.0, "verify": 0.0, "commit": 0.0}


def test_a_level_that_nobody_tried_has_no_rate():
    stats = GenerationStats(seed=0, rule="exact", tree="8,3,2")
    stats.add_step(step(0, 0))
    assert stats.acceptance_by_depth == []


def test_acceptance_length_counts_the_targets_own_token():
    _, nothing = run(scripted(SCRIPT, is_right=False), max_new_tokens=10)
    assert nothing.stats.acceptance_length == 1.0
    assert nothing.stats.acceptance_by_depth == [0.0]
    assert nothing.stats.num_recovered == 8  # the last token needs no tree
    assert nothing.stats.num_bonus == 2
    _, everything = run(scripted(SCRIPT), max_new_tokens=15)
    assert everything.stats.acceptance_length == 7.0
    assert everything.stats.acceptance_by_depth == [1.0] * 6
    assert (everything.stats.num_accepted, everything.stats.num_bonus) == (12, 3)


def test_without_a_cycle_there_is_no_acceptance_length():
    _, result = run(scripted(SCRIPT), max_new_tokens=1)
    assert result.stats.num_cycles == 0
    assert result.stats.acceptance_length is None
    assert result.stats.num_bonus == 1


def test_plain_decoding_takes_one_cycle_a_token():
    plain = scripted(SCRIPT).plain(PROMPT, max_new_tokens=9)
    assert plain.stats.tree == "plain"
    assert plain.stats.num_cycles == 8
    assert plain.stats.acceptance_length == 1.0
    assert plain.stats.num_bonus == 9


def test_tokens_per_second_counts_the_tokens_of_the_result_over_all_work():
    stats = GenerationStats(seed=0, rule="exact", tree="plain", num_tokens=30, wall_s=1.5)
    assert stats.tokens_per_second == 20.0
    assert GenerationStats(seed=0, rule="exact", tree="plain").tokens_per_second == 0.0
    _, result = run(scripted(SCRIPT), max_new_tokens=9)
    assert result.stats.wall_s >= result.stats.prefill_s > 0.0
    assert result.stats.tokens_per_second == pytest.approx(9 / result.stats.wall_s)
    assert sum(result.stats.phases_s.values()) <= result.stats.wall_s


def test_time_is_counted_for_work_and_not_for_the_reader(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("eagle_fsd.decoder.time", clock)
    decoder = scripted(SCRIPT)

    def slow(work: Any, seconds: float) -> Any:
        def working(*args: Any) -> Any:
            now[0] += seconds
            return work(*args)

        return working

    target = decoder.target
    target.prefill = slow(target.prefill, 5.0)
    target.score = slow(target.score, 2.0)
    target.commit = slow(target.commit, 0.5)
    steps = []
    for step in decoder.stream(PROMPT, max_new_tokens=15):
        steps.append(step)
        now[0] += 100.0  # the reader
    stats = steps[-1].result.stats
    assert len(steps) == 3
    assert stats.prefill_s == 5.0
    assert stats.wall_s == 5.0 + 2 * 2.5
    assert stats.phases_s == {"draft": 0.0, "target": 4.0, "verify": 0.0, "commit": 1.0}
    assert stats.tokens_per_second == 15 / 10.0


def test_to_dict_has_every_count_and_figure():
    _, result = run(scripted(SCRIPT), max_new_tokens=9, seed=11)
    values = result.stats.to_dict()
    assert (values["seed"], values["rule"], values["tree"]) == (11, "exact", "6,6,1")
    assert (values["num_prompt_tokens"], values["num_tokens"]) == (3, 9)
    assert values["acceptance_length"] == result.stats.acceptance_length
    assert values["kl_spent"] is values["regret_spent"] is None


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.7]),
    rule=st.sampled_from(
        ["exact", "fuzzy:inf:js", "fuzzy:0.3:js", "coverage:0.5", "fuzzy_2025:0.4:ag_mean"]
    ),
    sizes=st.sampled_from(["1,1,1", "4,4,1", "9,3,3", "20,4,3"]),
    limit=st.integers(1, 14),
    stop=st.integers(0, 7),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_origins_add_up_to_the_tokens_for_every_rule(seed, temperature, rule, sizes, limit, stop):
    generator = torch.Generator().manual_seed(seed)
    target = TableTarget(3 * torch.randn(6, 6, 6, generator=generator), frozenset({stop}))
    drafter = TableDrafter((3 * torch.randn(6, 6, generator=generator)).log_softmax(-1))
    decoder = SpeculativeDecoder(target, drafter)
    options = {"rule": rule, "temperature": temperature, "tree": sizes, "seed": seed}
    steps = list(decoder.stream(torch.tensor([[0, 1]]), max_new_tokens=limit, **options))
    result = steps[-1].result
    stats = result.stats
    assert stats.num_accepted + stats.num_rescued == sum(stats.accepted_by_depth)
    origins = [token.origin for step in steps for token in step.tokens]
    assert len(origins) == stats.num_tokens == len(result.token_ids) <= limit
    for name in ("accepted", "rescued", "recovered", "bonus"):
        assert origins.count(name) == getattr(stats, f"num_{name}")
    for step in steps[1:]:
        # Inside a cycle every token but the last is a node.
        assert {token.origin for token in step.tokens[:-1]} <= {"accepted", "rescued"}
        assert step.stats.num_emitted == len(step.tokens)
        assert step.stats.num_accepted <= step.stats.num_tried <= step.stats.num_accepted + 1
    if stats.num_cycles:
        assert stats.acceptance_length == (stats.num_tokens - 1) / stats.num_cycles >= 1.0
    if rule == "exact":
        assert stats.num_rescued == 0
