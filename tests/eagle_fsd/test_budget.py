"""The ledger: what a request spends, what a budget allows, and what that bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eagle_fsd.acceptance import Fuzzy, build_rule
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.drafter import Draft
from eagle_fsd.target import TargetOutput
from eagle_fsd.verify import Verifier
from tests.eagle_fsd.walk_reference import Reference, TableReference
from tests.laws import PROMPT, enumerate_law, tables
from tests.scripted import ScriptTarget, byte_tokenizer
from tests.stubs import PathDrafter, TableDrafter, TableTarget
from tree import DraftTree

BUDGETS = (0.0, 0.05, 0.3, 1.0)
RULES = ("fuzzy:0.4:js", "coverage:0.5", "lenience:0.4", "fuzzy_2025:0.3:js", "typical")
STOPS = frozenset({3})


def table_decoder(seed: int = 0, stops: frozenset[int] = frozenset()) -> SpeculativeDecoder:
    logits, draft = tables(seed)
    return SpeculativeDecoder(TableTarget(logits, stops), TableDrafter(draft))


def generate(decoder: SpeculativeDecoder, **options: Any) -> Any:
    """Steps' tokens and the result."""
    steps = list(decoder.stream(PROMPT, **{"tree": "6,3,2", "max_new_tokens": 8} | options))
    return [token for step in steps for token in step.tokens], steps[-1].result


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_path_of_250_sampled_requests_spends_more_than_its_budget(budget: float) -> None:
    """With four budgets: 1,000 requests, spread over rules, tables, temperatures and stops."""
    largest, num_rescued = 0.0, 0
    for seed in range(250):
        decoder = table_decoder(seed % 10, STOPS if seed % 3 == 0 else frozenset())
        options: dict[str, Any] = {"seed": seed, "temperature": (1.0, 0.7)[seed % 2]}
        written = RULES[seed % len(RULES)]
        tokens, result = generate(decoder, rule=written, budget=budget, **options)
        spent = result.stats.kl_spent
        assert result.stats.regret_spent is None
        assert spent == pytest.approx(math.fsum(token.cost for token in tokens))
        assert spent <= budget
        largest = max(largest, spent)
        num_rescued += result.stats.num_rescued
        if budget == 0.0:
            exact, _ = generate(decoder, **options)
            assert [token.id for token in tokens] == [token.id for token in exact]
    assert (largest > 0.8 * budget) == (num_rescued > 0) == (budget > 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_budget_of_0_allows_not_even_a_rescue_that_costs_nothing(temperature: float) -> None:
    """Two tokens of equal probability: taking the other one costs no regret, but is another id."""
    logits = torch.zeros(2, 2, 2)
    draft = torch.tensor([[0.1, 0.9]] * 2).log()
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))
    options: dict[str, Any] = {"temperature": temperature, "tree": "1,1,1"}
    prompt = torch.tensor([[0, 0]])
    exact = decoder.generate(prompt, max_new_tokens=9, **options)
    strict = decoder.generate(prompt, rule=Fuzzy(math.inf, budget=0.0), max_new_tokens=9, **options)
    free = decoder.generate(prompt, rule=Fuzzy(math.inf), max_new_tokens=9, **options)
    assert strict.token_ids == exact.token_ids
    assert free.token_ids != exact.token_ids


@pytest.mark.parametrize("written", RULES)
def test_an_unlimited_ledger_is_what_the_enumerated_walks_cost(written: str) -> None:
    """The mean ledger of many requests is the enumerated mean, and no less than the output's KL."""
    logits, draft = tables()
    size = TreeConfig(6, 3, 2)
    reference = TableReference(Reference(written), logits, draft, size)
    ledgers = [
        (probability, math.fsum(way.cost for way in ways))
        for probability, ways in reference.answers(3)
    ]
    mean = math.fsum(probability * cost for probability, cost in ledgers)
    variance = math.fsum(probability * (cost - mean) ** 2 for probability, cost in ledgers)
    spent = [
        generate(table_decoder(), rule=written, temperature=1.0, seed=seed, max_new_tokens=3)[
            1
        ].stats.kl_spent
        for seed in range(300)
    ]
    assert sum(spent) / 300 == pytest.approx(mean, abs=4 * math.sqrt(variance / 300))
    assert kl(reference.law(3), enumerate_law(logits, SamplingConfig(1.0))) <= mean + 1e-9
    possible = [cost for _, cost in ledgers]
    assert all(min(abs(one - other) for other in possible) < 1e-5 for one in spent)


def kl(law: dict[tuple[int, ...], float], target: dict[tuple[int, ...], float]) -> float:
    return math.fsum(p * math.log(p / target[answer]) for answer, p in law.items() if p > 0.0)


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("written", ["fuzzy:inf:js", "lenience:0.3", "typical"])
def test_the_enumerated_output_is_within_the_budget_of_the_target(
    written: str, budget: float
) -> None:
    logits, draft = tables(1)
    reference = Reference(written, budget=budget)
    requests = TableReference(reference, logits, draft, TreeConfig(6, 3, 2))
    ledgers, law = [], {}
    for probability, ways in requests.answers(4):
        answer = tuple(way.token for way in ways)
        law[answer] = law.get(answer, 0.0) + probability
        ledgers.append(math.fsum(way.cost for way in ways))
    target = enumerate_law(logits, SamplingConfig(1.0), num_tokens=4)
    assert max(ledgers) <= budget
    divergence = kl(law, target)
    assert divergence <= budget
    tv = 0.5 * math.fsum(abs(law.get(answer, 0.0) - p) for answer, p in target.items())
    assert tv <= min(math.sqrt(budget / 2), math.sqrt(1 - math.exp(-budget)))
    if budget >= 0.3:
        assert divergence > 0.0  # the budget was used


def test_live_requests_follow_the_enumeration_with_its_budget() -> None:
    """The ids that are possible under a budget, and no others, with the ledgers they end with."""
    logits, draft = tables(1)
    reference = Reference("fuzzy:inf:js", budget=0.4)
    possible: dict[tuple[int, ...], set[float]] = {}
    for _, ways in TableReference(reference, logits, draft, TreeConfig(6, 3, 2)).answers(4):
        answer = tuple(way.token for way in ways)
        possible.setdefault(answer, set()).add(round(sum(way.cost for way in ways), 4))
    decoder = table_decoder(1)
    for seed in range(200):
        tokens, result = generate(
            decoder,
            rule="fuzzy:inf:js",
            budget=0.4,
            temperature=1.0,
            seed=seed,
            max_new_tokens=4,
        )
        ledgers = possible[tuple(token.id for token in tokens)]
        assert min(abs(result.stats.kl_spent - ledger) for ledger in ledgers) < 2e-4


@pytest.mark.parametrize("budget", [None, 0.5, 2.0])
@pytest.mark.parametrize("written", ["fuzzy:inf:js", "regret:2", "cactus:0.3", "typical"])
def test_regret_is_the_sum_along_the_text_and_the_budget_bounds_it(
    written: str, budget: float | None
) -> None:
    rule = build_rule(written, budget=budget)
    largest = 0.0
    for seed in range(20):
        logits, _ = tables(seed)
        tokens, result = generate(table_decoder(seed), rule=rule, max_new_tokens=15)
        text = [*PROMPT[0].tolist(), *(token.id for token in tokens)]
        expected = 0.0
        for place, token in enumerate(tokens):
            log_probs = logits[text[place], text[place + 1]].double().log_softmax(-1)
            gap = float(log_probs.max() - log_probs[token.id])
            assert (gap > 0.0) == (token.origin == "rescued")
            assert token.exact_id == int(log_probs.argmax())
            expected += gap
        assert result.stats.kl_spent is None
        assert result.stats.regret_spent == pytest.approx(expected)
        assert budget is None or result.stats.regret_spent < budget
        largest = max(largest, expected)
    assert largest > (budget or 4.0) / 2


class FlatScript(ScriptTarget):
    """The script again, but hardly more probable than anything else."""

    def _logits(self, positions: list[int]) -> torch.Tensor:
        return 3.0 * super()._logits(positions)


def test_nodes_of_tokens_that_are_cut_off_do_not_count() -> None:
    """A stop string in the middle of a cycle: what was spent behind it is not in the ledger."""
    script = list(b"abXcdefghi")
    decoder = SpeculativeDecoder(
        FlatScript(script), PathDrafter(script, 3, is_right=True), byte_tokenizer()
    )
    walked: list[float] = []

    def keep(draft: Draft, logits: torch.Tensor, verifier: Verifier) -> None:
        tokens = verifier.verify(draft, logits, index=1).tokens
        walked.append(math.fsum(token.cost for token in tokens))

    prompt = torch.tensor([[80, 81, 82]])
    options: dict[str, Any] = {"rule": "coverage:inf", "temperature": 1.0, "tree": "6,6,1"}
    steps = list(
        decoder.stream(prompt, max_new_tokens=9, stop=["cd"], observer=keep, seed=1, **options)
    )
    result = steps[-1].result
    assert result is not None
    assert result.finish_reason == "stop"
    assert len(steps) == 2
    assert bytes(token.id for token in steps[1].tokens) == b"bXcd"  # of six that were accepted
    costs = [token.cost for token in steps[1].tokens]
    assert all(cost > 0.0 for cost in costs)
    assert result.stats.kl_spent == pytest.approx(math.fsum(costs))
    assert result.stats.kl_spent < walked[0] - min(costs)


class UntouchedTarget(TableTarget):
    """Fails the test when anything is run on it."""

    def start(self, capacity: int) -> None:
        raise AssertionError("the target was used")

    def score(self, tree: DraftTree) -> TargetOutput:
        raise AssertionError("the target was used")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "fuzzy:0.3:js"}, "'fuzzy:0.3:js' compares with the draft's law"),
        ({"rule": "cascade_opt:0"}, "compares with the draft's law"),
        ({"rule": "fuzzy_2025:0.3:js"}, "compares with the draft's law"),
        ({"rule": "coverage:0.3", "budget": -0.1}, "budget must be nats >= 0; .* got -0.1"),
        ({"rule": "coverage:0.3", "budget": math.nan}, "budget must be a number, got nan"),
        ({"rule": "exact", "budget": 1.0}, "'exact' has no knob 'budget'"),
        ({"rule": "coverge:0.3"}, "did you mean 'coverage'"),
        ({"rule": "coverage:-1"}, "bound must be nats >= 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    options: dict[str, Any], message: str
) -> None:
    logits, _ = tables()
    drafter = PathDrafter([0], 2, is_right=True)  # it has no law
    decoder = SpeculativeDecoder(UntouchedTarget(logits), drafter)
    with pytest.raises(ValueError, match=message):
        decoder.stream(PROMPT, **options)
    with pytest.raises(ValueError, match=message):
        decoder.generate(PROMPT, temperature=1.0, **options)


@pytest.mark.parametrize("name", ["kl_target_draft", "ag_mean", "ag_mean@3"])
@pytest.mark.parametrize("written", ["fuzzy:0.3", "fuzzy_2025:0.3"])
def test_a_divergence_that_is_always_infinite_is_refused_with_the_reason(
    name: str, written: str
) -> None:
    logits, draft = tables()
    drafter = TableDrafter(draft)
    drafter.has_reduced_vocabulary = True
    decoder = SpeculativeDecoder(UntouchedTarget(logits), drafter)
    with pytest.raises(ValueError, match=f"'{name}' is infinite wherever the draft's law is zero"):
        decoder.generate(PROMPT, rule=f"{written}:{name}")
    for finite in ("js", "tv", "kl_draft_target"):
        with pytest.raises(AssertionError, match="the target was used"):
            decoder.generate(PROMPT, rule=f"{written}:{finite}")


def test_a_rule_without_law_goes_with_a_drafter_without_one() -> None:
    logits, _ = tables()
    oracle = table_decoder().plain(PROMPT, max_new_tokens=8).token_ids
    decoder = SpeculativeDecoder(TableTarget(logits), Oracle(oracle))
    for written in ("coverage:0.5", "lenience:0.4", "head_set:2:top_n", "regret:1", "typical"):
        result = decoder.generate(PROMPT, rule=written, tree="4,2,2", max_new_tokens=8)
        assert result.stats.num_accepted + result.stats.num_rescued > 0


class Oracle(PathDrafter):
    """A PathDrafter for the table's few tokens."""

    def __init__(self, continuation: list[int]) -> None:
        super().__init__(continuation, 2, is_right=True)

    def _children(self, right: int | None, on_path: bool, top_k: int) -> list[int]:
        first = 0 if right is None else right
        return [first, *(token for token in range(5) if token != first)][:top_k]
