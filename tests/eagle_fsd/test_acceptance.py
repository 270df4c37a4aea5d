"""Acceptance rules by exact enumeration: laws, costs, lossless values, guards, the written form."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd.acceptance import (
    RULES,
    AcceptanceRule,
    Cactus,
    CascadeOpt,
    Coverage,
    Decision,
    Exact,
    Fuzzy,
    Fuzzy2025,
    HeadSet,
    Lenience,
    Node,
    Regret,
    Typical,
    add_rule_arguments,
    build_rule,
    decision_cost,
    emitted_law,
    greedy_rescue,
    partition,
    regret,
    rule_from_args,
)
from eagle_fsd.divergence import DIVERGENCES
from tests.eagle_fsd import rule_reference as reference
from tests.eagle_fsd.rule_reference import Case

RESCUE_ORDER = [
    "fuzzy:0.2:js",
    "fuzzy:inf:js",
    "fuzzy:inf:ag_mean",
    "fuzzy:0.4:tv",
    "fuzzy:0.5:kl_draft_target",
    "fuzzy:0.5:kl_target_draft",
    "fuzzy:0.5:ag_mean",
    "fuzzy:0.15:js@3",
    "coverage:0.3",
    "coverage:inf",
    "head_set:0.6:min_p",
    "head_set:1:min_p",
    "head_set:3:top_n",
    "head_set:0.7:nucleus",
    "lenience:0.5",
    "lenience:0.9",
    "cactus:0.1",
    "cactus:inf",
    "cascade_opt:0.1",
    "cascade_opt:-0.5",
    "regret:1.5",
    "regret:2:1",
]
ACCEPT_FIRST = ["fuzzy_2025:0.2:js", "fuzzy_2025:inf:ag_mean:chain", "typical:0.09:0.3", "typical"]
LOSSLESS = [
    "exact",
    "fuzzy:0:js",
    "fuzzy:0:ag_mean@5",
    "coverage:0",
    "head_set:-0.001:min_p",
    "head_set:0:top_n",
    "head_set:0:nucleus",
    "lenience:1",
    "cactus:0",
    "cascade_opt:-inf",
    "regret:0",
    "regret:inf:0",
    "typical:1:inf",
]
NUM_CASES = 60


def make_case(seed: int) -> Case:
    """A random node: zeros on both sides, children that are stops or forbidden, sometimes none."""
    generator = torch.Generator().manual_seed(seed)
    size = 4 + seed % 9
    laws = (
        torch.randn(2, size, generator=generator, dtype=torch.float64).mul(1 + seed % 3).softmax(-1)
    )
    if seed % 2:
        laws[1] = 0.8 * laws[0] + 0.2 * laws[1]  # a draft that agrees
    if seed % 3 == 0:
        laws[0, torch.randint(size, (2,), generator=generator)] = 0.0
    if seed % 4 == 0:
        laws[1, torch.randint(size, (1,), generator=generator)] = 0.0
    target, draft = laws / laws.sum(-1, keepdim=True)
    if seed % 7 == 0:
        draft = target.clone()
    num_children = seed % min(size, 6)
    children = draft.argsort(descending=True)[:num_children]
    stops = torch.randperm(size, generator=generator)[: seed % 4]
    return Case(target.tolist(), draft.tolist(), children.tolist(), stops.tolist(), seed % 3)


def make_node(case: Case) -> Node:
    target = torch.tensor(case.target, dtype=torch.float64)
    draft = torch.tensor(case.draft, dtype=torch.float64)
    return Node(
        target_logits=target.log(),
        target_probs=target,
        draft_log_probs=draft.log(),
        warped_draft_log_probs=draft.log,
        children=torch.tensor(case.children, dtype=torch.int64),
        stops=torch.tensor(case.stops, dtype=torch.int64),
        num_rescued=case.num_rescued,
    )


def node_of(
    target: list[float], children: list[int], stops: list[int], draft: list[float] | None = None
) -> Node:
    return make_node(Case(target, target if draft is None else draft, children, stops))


CASES = [make_case(seed) for seed in range(NUM_CASES)]
OPEN_CASE = Case(  # every relaxed rule of the lists above relaxes here
    [0.3, 0.25, 0.2, 0.15, 0.1], [0.32, 0.26, 0.2, 0.12, 0.1], children=[0, 1, 2], stops=[4]
)


def numeric_kl(law: Tensor, target: Tensor) -> float:
    return reference.kl(law.tolist(), target.tolist())


# The law, against an enumeration of draw x coin x child


@pytest.mark.parametrize("written", [*RESCUE_ORDER, *ACCEPT_FIRST, "exact"])
def test_the_emitted_law_equals_the_enumeration_of_the_rule(written: str) -> None:
    rule = build_rule(written)
    num_relaxed = 0
    for case in CASES:
        node = make_node(case)
        decision = rule.decide(node)
        choice = reference.choose(rule.spec, case)
        assert decision.rescue_prob == pytest.approx(choice.rescue_prob, abs=1e-9)
        assert node.children[decision.eligible].tolist() == choice.eligible
        taken = None if decision.take is None else case.children[decision.take]
        assert taken == choice.take
        outcome = reference.enumerate_outcomes(case, choice)
        expected = torch.tensor(outcome.law, dtype=torch.float64)
        torch.testing.assert_close(emitted_law(node, decision), expected, rtol=0, atol=1e-9)
        num_relaxed += decision.is_relaxed
    assert num_relaxed > 0 or written == "exact"


@pytest.mark.parametrize("written", RESCUE_ORDER)
def test_recovered_mass_and_total_variation_share_the_refused_mass(written: str) -> None:
    rule = build_rule(written)
    for case in CASES:
        node = make_node(case)
        decision = rule.decide(node)
        law = emitted_law(node, decision)
        chosen = node.children[decision.eligible].tolist()
        choice = reference.Choice(decision.rescue_prob, chosen)
        recovered = reference.enumerate_outcomes(case, choice).recovered
        tv = 0.5 * (law - node.target_probs).abs().sum().item()
        assert recovered + tv == pytest.approx(case.refused_mass, abs=1e-9)
        assert law[node.partition.outside].sum().item() == pytest.approx(recovered, abs=1e-9)


@pytest.mark.parametrize("written", RESCUE_ORDER)
def test_a_rescue_never_touches_stops_or_forbidden_tokens(written: str) -> None:
    rule = build_rule(written)
    for case in CASES:
        node = make_node(case)
        decision = rule.decide(node)
        law = emitted_law(node, decision)
        assert law.sum().item() == pytest.approx(1.0, abs=1e-12)
        assert (law[node.target_probs == 0] == 0).all()
        assert torch.equal(law[node.stops], node.partition.probs[node.stops])
        assert not (decision.eligible & ~node.partition.eligible).any()


@pytest.mark.parametrize("written", [*RESCUE_ORDER, *ACCEPT_FIRST, "exact"])
def test_the_closed_cost_equals_the_kl_of_the_emitted_law(written: str) -> None:
    rule = build_rule(written)
    for case in CASES:
        node = make_node(case)
        decision = rule.decide(node)
        expected = numeric_kl(emitted_law(node, decision), node.partition.probs)
        assert decision_cost(node, decision) == pytest.approx(expected, abs=1e-9)
        assert decision_cost(node, decision.exact()) == 0.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, NUM_CASES - 1), st.floats(0.0, 1.0), st.integers(1, 63))
def test_any_rescue_probability_and_set_cost_their_kl(seed: int, prob: float, subset: int) -> None:
    node = make_node(CASES[seed])
    kept = [bool(subset >> index & 1) for index in range(node.children.numel())]
    eligible = node.partition.eligible & torch.tensor(kept, dtype=torch.bool)
    decision = Decision(prob if eligible.any() else 0.0, eligible)
    expected = numeric_kl(emitted_law(node, decision), node.partition.probs)
    assert decision_cost(node, decision) == pytest.approx(expected, abs=1e-9)


# What rescue order is for


def test_rescuing_all_children_is_the_least_kl_law_that_keeps_the_stops() -> None:
    generator = torch.Generator().manual_seed(0)
    num_checked = 0
    for case in CASES:
        node = make_node(case)
        decision = build_rule("fuzzy:inf:js").decide(node)
        if not decision.is_relaxed:
            continue
        least = decision_cost(node, decision)
        for _ in range(20):
            raw = torch.rand(len(case.eligible), generator=generator, dtype=torch.float64) ** 3
            other = torch.zeros_like(node.target_probs)
            other[case.eligible] = raw / raw.sum() * (1.0 - case.stop_mass)
            other[node.stops] = node.target_probs[node.stops]
            assert numeric_kl(other, node.target_probs) >= least - 1e-12
            num_checked += 1
    assert num_checked > 200


def test_fuzzy_costs_no_more_than_the_2025_rule_and_less_with_two_children() -> None:
    num_strict = 0
    for case in CASES:
        node = make_node(case)
        ours = build_rule("fuzzy:inf:js").decide(node)
        theirs = build_rule("fuzzy_2025:inf:js").decide(node)
        if ours.rescue_prob != 1.0 or case.children[0] in case.stops:
            continue
        assert theirs.take == 0
        cost, cost_2025 = decision_cost(node, ours), decision_cost(node, theirs)
        assert cost <= cost_2025 + 1e-12
        if len(case.eligible) >= 2:
            assert cost < cost_2025
            num_strict += 1
    assert num_strict > 5


def test_a_fuzzy_threshold_is_strict_and_the_2025_one_is_not() -> None:
    node = node_of([0.5, 0.3, 0.2], [1], [], draft=[0.25, 0.55, 0.2])
    assert node.draft_log_probs is not None
    value = DIVERGENCES["tv"](node.target_logits.log_softmax(-1), node.draft_log_probs).item()
    assert value == pytest.approx(0.25)
    below, above = math.nextafter(value, 0.0), math.nextafter(value, 1.0)
    assert [Fuzzy(knob, "tv").decide(node).rescue_prob for knob in (value, above)] == [0.0, 1.0]
    assert [Fuzzy2025(knob, "tv").decide(node).take for knob in (below, value)] == [None, 0]
    same = node_of([0.5, 0.3, 0.2], [1], [])  # D = 0
    assert not Fuzzy(threshold=0.0).decide(same).is_relaxed
    assert Fuzzy2025(threshold=0.0, divergence="js").decide(same).take == 0


def test_an_infinite_threshold_rescues_at_an_infinite_divergence_but_not_at_nan() -> None:
    node = node_of([0.5, 0.3, 0.2], [1], [], draft=[0.0, 0.6, 0.4])
    infinite = Fuzzy(threshold=math.inf, divergence="kl_target_draft")
    assert infinite.decide(node).rescue_prob == 1.0
    assert not replace(infinite, threshold=1e300).decide(node).is_relaxed
    broken = replace(node, draft_log_probs=torch.full((3,), math.nan, dtype=torch.float64))
    assert not infinite.decide(broken).is_relaxed
    assert not Fuzzy2025(threshold=math.inf, divergence="js").decide(broken).is_relaxed
    assert not CascadeOpt(alpha=1.0).decide(broken).is_relaxed


# The lossless value


@pytest.mark.parametrize("written", LOSSLESS)
def test_the_lossless_value_leaves_every_law_unchanged(written: str) -> None:
    rule = build_rule(written)
    assert rule.is_lossless
    for case in CASES:
        node = make_node(case)
        decision = rule.decide(node)
        assert not decision.is_relaxed
        assert torch.equal(emitted_law(node, decision), node.partition.probs)


@pytest.mark.parametrize("written", [*RESCUE_ORDER, *ACCEPT_FIRST])
def test_other_values_are_not_called_lossless(written: str) -> None:
    assert not build_rule(written).is_lossless


@pytest.mark.parametrize(
    "close", ["lenience:0.999999999", "cactus:1e-18", "coverage:1e-9", "fuzzy:1e-12:js"]
)
def test_a_knob_near_its_lossless_value_changes_little(close: str) -> None:
    rule = build_rule(close)
    for case in CASES:
        if case.target == case.draft:
            continue
        node = make_node(case)
        assert decision_cost(node, rule.decide(node)) < 1e-8


# Guards


@pytest.mark.parametrize("written", [*RESCUE_ORDER, *ACCEPT_FIRST])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_target_logits_refuse_every_rule(written: str, bad: float) -> None:
    node = make_node(OPEN_CASE)
    assert build_rule(written).decide(node).is_relaxed
    logits = node.target_logits.clone()
    logits[1] = bad
    nothing = torch.full_like(logits, -math.inf)
    for broken in (logits, nothing):
        for probs in (broken.softmax(-1), node.target_probs):
            unknown = replace(node, target_logits=broken, target_probs=probs)
            assert not build_rule(written).decide(unknown).is_relaxed


@pytest.mark.parametrize("written", [*RESCUE_ORDER, "fuzzy_2025:inf:js"])
def test_nothing_is_relaxed_without_children_or_without_an_eligible_one(written: str) -> None:
    target = [0.4, 0.3, 0.3, 0.0]
    rule = build_rule(written)
    assert not rule.decide(node_of(target, [], [])).is_relaxed
    if written in RESCUE_ORDER:
        assert not rule.decide(node_of(target, [0, 3], [0])).is_relaxed
        assert not rule.decide(node_of(target, [0, 1], [2])).is_relaxed  # R = 0


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_that_needs_a_draft_law_refuses_a_node_without_one(name: str) -> None:
    written = {"exact": "exact", "typical": "typical"} | {
        form.split(":")[0]: form for form in [*RESCUE_ORDER, *ACCEPT_FIRST]
    }
    rule = build_rule(written[name])
    node = replace(make_node(OPEN_CASE), draft_log_probs=None, warped_draft_log_probs=None)
    assert rule.needs_draft_probs == (name in {"fuzzy", "cascade_opt", "fuzzy_2025"})
    if rule.needs_draft_probs:
        with pytest.raises(ValueError, match="needs none"):
            rule.decide(node)
    else:
        rule.decide(node)


def test_a_relaxed_rule_takes_no_account_of_the_global_generator() -> None:
    state = torch.get_rng_state()
    for written in [*RESCUE_ORDER, *ACCEPT_FIRST]:
        build_rule(written).decide(make_node(OPEN_CASE))
    assert torch.equal(torch.get_rng_state(), state)


def test_float32_laws_of_a_large_vocabulary_keep_their_masses() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(50_000, generator=generator)
    children = logits.topk(10).indices
    parts = partition(logits.softmax(-1), children, torch.tensor([3, 4]))
    total = parts.stop_mass + parts.child_mass + parts.outside_mass
    assert total == pytest.approx(1.0, abs=1e-12)
    assert parts.probs.dtype == torch.float64


def test_a_decision_outside_its_domain_is_refused() -> None:
    mask = torch.tensor([True])
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"rescue_prob must be in \[0, 1\]"):
            Decision(bad, mask)
    with pytest.raises(ValueError, match="not both"):
        Decision(0.5, mask, take=0)


# Single rules, by hand


def test_partition_counts_a_child_that_is_a_stop_as_a_stop() -> None:
    parts = partition(
        torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]), torch.tensor([2, 0, 4]), torch.tensor([0, 1])
    )
    assert parts.stop_mass == pytest.approx(0.3)
    assert parts.child_mass == pytest.approx(0.3)
    assert parts.outside_mass == pytest.approx(0.4)
    assert parts.eligible.tolist() == [True, False, False]
    assert parts.outside.tolist() == [False, False, False, True, False]


def test_lenience_and_cactus_raise_the_chance_of_going_on_as_written() -> None:
    node = node_of([0.2, 0.1, 0.3, 0.4], [0, 1], [2])  # c = 0.3 / 0.7
    share = 0.3 / 0.7
    for rule, wanted in (
        (Lenience(leniency=0.5), 2 * share),
        (Lenience(leniency=0.1), 1.0),
        (Cactus(delta=0.02), share + math.sqrt(0.04 * share * (1 - share))),
    ):
        law = emitted_law(node, rule.decide(node))
        assert (law[:2].sum() / 0.7).item() == pytest.approx(wanted)
        assert law[2].item() == pytest.approx(0.3)


def test_coverage_compares_the_cost_of_a_full_rescue_with_its_bound() -> None:
    node = node_of([0.2, 0.1, 0.3, 0.4], [0, 1], [2])
    cost = 0.7 * math.log(0.7 / 0.3)
    assert not Coverage(bound=cost - 1e-9).decide(node).is_relaxed
    decision = Coverage(bound=cost + 1e-9).decide(node)
    assert decision_cost(node, decision) == pytest.approx(cost)


def test_head_set_forms_qualify_the_children_they_name() -> None:
    node = node_of([0.4, 0.3, 0.2, 0.1, 0.0], [3, 2, 1, 4], [])

    def members(alpha: float, form: str) -> list[int]:
        decision = build_rule("head_set", alpha=alpha, form=form).decide(node)
        return sorted(node.children[decision.eligible].tolist())

    assert members(0.25, "min_p") == [1]
    assert members(0.5, "min_p") == [1, 2]
    assert members(1.0, "min_p") == [1, 2, 3]
    assert members(1, "top_n") == []
    assert members(3, "top_n") == [1, 2]
    assert members(0.3, "nucleus") == []
    assert members(0.6, "nucleus") == [1]
    assert members(0.95, "nucleus") == [1, 2, 3]


def test_tokens_of_equal_probability_are_in_the_head_together() -> None:
    node = node_of([0.3, 0.3, 0.3, 0.1], [0, 1, 2], [])
    for rule in (HeadSet(alpha=1, form="top_n"), HeadSet(alpha=0.2, form="nucleus")):
        assert rule._eligible(node).tolist() == [True, True, True]


def test_regret_stops_at_its_limit_of_rescues_in_a_cycle() -> None:
    node = node_of([0.4, 0.3, 0.2, 0.1], [1, 3], [])
    assert Regret(gap=0.5).decide(node).eligible.tolist() == [True, False]
    limited = Regret(gap=math.inf, max_rescues=2)
    assert limited.decide(replace(node, num_rescued=1)).eligible.tolist() == [True, True]
    assert not limited.decide(replace(node, num_rescued=2)).is_relaxed


def test_fuzzy_on_warped_laws_reads_the_warped_draft_only_when_asked() -> None:
    node = node_of([0.6, 0.3, 0.1], [1], [], draft=[0.05, 0.9, 0.05])
    agreeing = replace(node, warped_draft_log_probs=node.target_probs.log)
    assert not Fuzzy(threshold=0.01).decide(agreeing).is_relaxed
    assert Fuzzy(threshold=0.01, on="warped").decide(agreeing).rescue_prob == 1.0

    def refuse() -> Tensor:
        raise AssertionError("the warped law was computed for a rule on raw laws")

    Fuzzy(threshold=0.01).decide(replace(node, warped_draft_log_probs=refuse))
    with pytest.raises(ValueError, match="on='raw'"):
        Fuzzy(threshold=0.1, on="warped").decide(replace(node, warped_draft_log_probs=None))


def test_the_2025_rule_takes_stops_and_forbidden_tokens_and_pays_for_them() -> None:
    rule = Fuzzy2025(threshold=math.inf, divergence="js", chain=True)
    stop = node_of([0.25, 0.75], [0], [0])
    assert rule.decide(stop).take == 0
    assert decision_cost(stop, rule.decide(stop)) == pytest.approx(math.log(4.0))
    forbidden = node_of([0.0, 1.0], [0], [])
    assert decision_cost(forbidden, rule.decide(forbidden)) == math.inf
    certain = node_of([1.0, 0.0], [0], [])
    assert decision_cost(certain, rule.decide(certain)) == 0.0


@pytest.mark.parametrize("is_taken", [True, False])
def test_the_chain_form_never_descends_a_draw(is_taken: bool) -> None:
    node = node_of([0.4, 0.6], [0], [], draft=[0.9, 0.1])
    threshold = math.inf if is_taken else 0.0
    for chain in (True, False):
        decision = Fuzzy2025(threshold, "js", chain=chain).decide(node)
        assert (decision.take == 0) == is_taken
        assert decision.descend is not chain


def test_typical_takes_the_first_typical_child_in_draft_order() -> None:
    node = node_of([0.05, 0.35, 0.6], [0, 1, 2], [])
    assert Typical(epsilon=0.09, delta=0.3).decide(node).take == 1
    assert Typical(epsilon=0.04).decide(node).take == 0
    assert Typical(epsilon=1.0, delta=100.0).decide(node).take is None


# Temperature 0


def test_greedy_rescue_picks_what_the_emitted_law_makes_likeliest() -> None:
    num_partial = 0
    for case in CASES:
        node = make_node(case)
        for written in RESCUE_ORDER:
            decision = build_rule(written).decide(node)
            index = greedy_rescue(node, decision)
            if not decision.is_relaxed:
                assert index is None
                continue
            law = emitted_law(node, decision)
            best = max(node.children[decision.eligible].tolist(), key=law.__getitem__)
            refused = law[node.partition.outside].max().item()
            if abs(law[best].item() - refused) < 1e-12:
                continue  # a tie, decided by rounding
            assert (index is not None) == (law[best].item() >= refused)
            if index is not None:
                assert law[node.children[index]] == law[best]
            num_partial += 0.0 < decision.rescue_prob < 1.0
    assert num_partial > 20


def test_greedy_rescue_prefers_the_draft_s_first_child_among_equals() -> None:
    node = node_of([0.2, 0.2, 0.2, 0.4], [2, 0, 1], [])
    assert greedy_rescue(node, Fuzzy(threshold=1.0).decide(node)) == 0
    assert greedy_rescue(node, Exact().decide(node)) is None


def test_regret_is_the_log_ratio_to_the_best_token() -> None:
    node = node_of([0.5, 0.25, 0.25], [1], [])
    assert regret(node, 1) == pytest.approx(math.log(2.0))
    assert regret(node, 0) == 0.0


# Names, the written form, the command line


@pytest.mark.parametrize("written", [*RESCUE_ORDER, *ACCEPT_FIRST, *LOSSLESS])
def test_the_written_form_survives_a_round_trip(written: str) -> None:
    rule = build_rule(written)
    assert build_rule(rule.spec) == rule
    assert isinstance(rule, AcceptanceRule)
    assert rule.budget is None


@pytest.mark.parametrize(
    ("rule", "written"),
    [
        (Exact(), "exact"),
        (Fuzzy(0.3), "fuzzy:0.3:js"),
        (Fuzzy(threshold=1.0, divergence="js@50", on="warped"), "fuzzy:1:js@50:warped"),
        (Coverage(0.1), "coverage:0.1"),
        (HeadSet(0.2), "head_set:0.2:min_p"),
        (Lenience(0.5), "lenience:0.5"),
        (Cactus(0.5), "cactus:0.5"),
        (CascadeOpt(-math.inf), "cascade_opt:-inf"),
        (Regret(0.5), "regret:0.5"),
        (Regret(0.5, max_rescues=2), "regret:0.5:2"),
        (Regret(0, max_rescues=0), "regret:0:0"),
        (Fuzzy2025(0.4, "ag_mean", chain=True), "fuzzy_2025:0.4:ag_mean:chain"),
        (Typical(), "typical:0.09:0.3"),
    ],
)
def test_a_rule_and_its_written_form_are_the_same(rule: AcceptanceRule, written: str) -> None:
    assert rule.spec == written
    assert build_rule(written) == rule


def test_a_rule_is_built_from_an_object_a_name_or_a_form_with_a_budget() -> None:
    rule = Fuzzy(threshold=0.3, divergence="js", budget=1.0)
    assert build_rule(rule) is rule
    assert build_rule("fuzzy", threshold=0.3, divergence="js", budget=1.0) == rule
    assert build_rule("fuzzy:0.3:js", budget=1.0) == rule
    assert build_rule("fuzzy:0.3", budget=1.0) == rule


@pytest.mark.parametrize(
    ("rule", "knobs", "message"),
    [
        ("fuzy:0.3", {}, r"unknown acceptance rule 'fuzy'.*'coverage'.*did you mean 'fuzzy'\?"),
        ("fuzzy:0.3:jss", {}, r"unknown divergence 'jss'.*'ag_mean'.*did you mean 'js'\?"),
        ("fuzzy", {}, "'fuzzy' needs threshold; write 'fuzzy:THRESHOLD"),
        (
            "fuzzy_2025:0.4",
            {},
            r"needs divergence; write 'fuzzy_2025:THRESHOLD:DIVERGENCE\[:chain\]'",
        ),
        ("fuzzy:-0.1", {}, "threshold must be >= 0; .*got -0.1"),
        ("fuzzy:nan", {}, "threshold must be a number, got nan"),
        ("fuzzy:0.3:js:cooked", {}, r"unknown law 'cooked'; choose one of \['raw', 'warped'\]"),
        (
            "fuzzy:0.3:js:raw:1",
            {},
            r"too many parts; write 'fuzzy:THRESHOLD\[:DIVERGENCE\[:ON\]\]'",
        ),
        ("exact:1", {}, "too many parts; write 'exact'"),
        ("exact", {"budget": 1.0}, "'exact' has no knob 'budget'; it takes none"),
        ("fuzzy", {"treshold": 0.3}, r"no knob 'treshold'.*did you mean 'threshold'\?"),
        (
            "coverage:0.1",
            {"threshold": 0.3},
            r"'coverage' has no knob 'threshold'.*'bound', 'budget'",
        ),
        ("fuzzy:0.3", {"threshold": 0.4}, "threshold is given twice"),
        ("fuzzy:0.3", {"budget": -1.0}, "budget must be nats >= 0; .*got -1.0"),
        ("fuzzy:0.3", {"budget": math.nan}, "budget must be a number, got nan"),
        ("coverage:-1", {}, "bound must be nats >= 0"),
        ("head_set:1.5:min_p", {}, "alpha must be <= 1 for 'min_p'"),
        ("head_set:1.5:top_n", {}, "alpha must be a whole number >= 0"),
        ("head_set:inf:top_n", {}, "alpha must be a whole number >= 0"),
        ("head_set:-0.1:nucleus", {}, r"alpha must be in \[0, 1\]"),
        ("head_set:0.5:nucleous", {}, r"unknown form 'nucleous'.*did you mean 'nucleus'\?"),
        ("lenience:0", {}, r"leniency must be in \(0, 1\]; 1 is lossless; got 0"),
        ("lenience:1.1", {}, "leniency must be in"),
        ("cactus:-1", {}, "delta must be >= 0"),
        ("cascade_opt:inf", {}, "alpha must be < inf; -inf is lossless"),
        ("regret:-1", {}, "gap must be nats >= 0"),
        ("regret:1:-1", {}, "max_rescues must be >= 0"),
        ("typical:1.5", {}, r"epsilon must be in \[0, 1\]"),
        (Fuzzy(0.3), {"budget": 1.0}, "'fuzzy:0.3:js' is built already and takes no budget"),
    ],
)
def test_bad_values_are_refused_with_the_value_and_the_way_out(
    rule: str | AcceptanceRule, knobs: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_rule(rule, **knobs)


@pytest.mark.parametrize(
    ("rule", "knobs", "message"),
    [
        (3, {}, "rule must be a rule object"),
        (None, {}, "rule must be a rule object"),
        (Fuzzy, {}, "rule must be a rule object"),
        ("fuzzy:close", {}, "threshold must be a number, got 'close'"),
        ("fuzzy", {"threshold": True}, "threshold must be a number, got True"),
        ("fuzzy", {"threshold": "0.3"}, "threshold must be a number, got '0.3'"),
        ("fuzzy:0.3:4", {}, "divergence must be a name"),
        ("fuzzy:0.3", {"budget": "much"}, "budget must be a number, got 'much'"),
        ("head_set:0.2:3", {}, "form must be one of"),
        ("regret:0.5:1.5", {}, "max_rescues must be a whole number"),
        ("fuzzy_2025:0.4:js:tree", {}, "chain must be True or False .*got 'tree'"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(
    rule: object, knobs: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        build_rule(rule, **knobs)  # type: ignore[arg-type]


def parse(*argv: str) -> AcceptanceRule:
    parser = argparse.ArgumentParser()
    add_rule_arguments(parser)
    return rule_from_args(parser.parse_args(argv))


def test_the_command_line_gives_the_rule_its_flags() -> None:
    assert parse() == Exact()
    assert parse("--rule", "fuzzy", "--threshold", "0.3") == Fuzzy(0.3)
    assert parse(
        "--rule", "fuzzy", "--threshold", "inf", "--divergence", "tv", "--budget", "2"
    ) == Fuzzy(math.inf, divergence="tv", budget=2.0)
    assert parse("--rule", "lenience:0.5", "--budget", "0.1") == Lenience(0.5, budget=0.1)


@pytest.mark.parametrize(
    "argv",
    [
        ("--threshold", "0.3"),
        ("--budget", "1"),
        ("--rule", "coverage:0.1", "--threshold", "0.3"),
        ("--rule", "typical", "--divergence", "js"),
        ("--rule", "fuzzy:0.3", "--threshold", "0.3"),
        ("--rule", "fuzzy"),
        ("--rule", "fuzzy:0.3", "--budget", "nan"),
    ],
)
def test_a_flag_that_the_rule_does_not_take_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"has no knob|given twice|needs threshold|got nan"):
        parse(*argv)


def test_every_rule_is_listed_under_its_written_name() -> None:
    assert list(RULES) == [rule.name for rule in RULES.values()]
    covered = {form.split(":")[0] for form in [*RESCUE_ORDER, *ACCEPT_FIRST, "exact"]}
    assert covered == set(RULES)


@pytest.mark.parametrize("divergence", ["js", "tv", "kl_draft_target", "ag_mean", "ag_mean@4"])
def test_equal_laws_have_no_divergence_however_peaked_they_are(divergence: str) -> None:
    """p rounds to 0 long before log p does."""
    log_probs = torch.tensor([0.0, -90.0, -200.0, -1000.0, -3e4]).log_softmax(-1)
    node = Node(
        target_logits=log_probs,
        target_probs=log_probs.double().exp(),
        draft_log_probs=log_probs,
        warped_draft_log_probs=lambda: log_probs,
        children=torch.tensor([1]),
        stops=torch.tensor([], dtype=torch.int64),
        target_log_probs=log_probs,
    )
    assert node.divergence(divergence, "warped") == 0.0
    assert node.divergence(divergence, "raw") == 0.0


def test_a_child_far_below_the_best_is_charged_what_it_costs() -> None:
    logits = torch.tensor([0.0, -401.0])
    node = Node(
        target_logits=logits,
        target_probs=logits.log_softmax(-1).double().exp(),
        draft_log_probs=logits.log_softmax(-1),
        warped_draft_log_probs=None,
        children=torch.tensor([1]),
        stops=torch.tensor([], dtype=torch.int64),
    )
    decision = build_rule("fuzzy_2025:inf:js").decide(node)
    assert decision_cost(node, decision) == pytest.approx(401.0)
    rescue = build_rule("fuzzy:inf:js").decide(node)
    assert rescue.rescue_prob == 1.0
    assert decision_cost(node, rescue) == pytest.approx(401.0)


@pytest.mark.parametrize(
    ("rule", "knobs"),
    [
        ("lenience", {"leniency": np.float16(0.5)}),
        ("coverage", {"bound": Fraction(1, 2)}),
        ("fuzzy", {"threshold": np.float32(0.5), "budget": np.float64(1.0)}),
        ("regret", {"gap": np.int64(2), "max_rescues": np.int64(3)}),
    ],
)
def test_knobs_become_plain_numbers(rule: str, knobs: dict[str, Any]) -> None:
    built = build_rule(rule, **knobs)
    assert all(type(getattr(built, knob)) in (int, float) for knob in knobs)
    assert build_rule(built.spec) == replace(built, budget=None)  # type: ignore[type-var]


@pytest.mark.parametrize(
    "written",
    ["fuzzy:0_3", "fuzzy:\u0663", "fuzzy: 0.3", "fuzzy:0x1", "coverage:1e", "fuzzy:1__0"],
)
def test_only_plain_decimal_numbers_are_read(written: str) -> None:
    with pytest.raises((ValueError, TypeError), match="must be a number"):
        build_rule(written)


@pytest.mark.parametrize("rule", ["fuzzy", "head_set", "regret", "coverage"])
def test_numbers_too_large_for_a_float_are_named(rule: str) -> None:
    first = {"fuzzy": "threshold", "head_set": "alpha", "regret": "gap", "coverage": "bound"}[rule]
    with pytest.raises(ValueError, match=f"{first} is too large"):
        build_rule(rule, **{first: 10**400})
    assert build_rule("head_set:99999999999999999999:top_n").spec == "head_set:1e+20:top_n"
