"""Relaxed rules over whole requests: lossless values, infinite thresholds, enumerated laws."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_fsd.acceptance import build_rule
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder, Step
from eagle_fsd.recorder import Recorder
from eagle_fsd.target import TargetModel
from tests.eagle_fsd.walk_reference import Reference, TableReference
from tests.laws import PROMPT, chi_square_p, slow_law, tables
from tests.stubs import TableDrafter, TableTarget, head_drafter, random_prompt, tiny_model

DIVERGENCES = (
    *("js", "kl_draft_target", "kl_target_draft", "tv", "ag_mean"),
    *("js@4", "kl_draft_target@20", "tv@3"),
)
OTHERS_LOSSLESS = (
    *("coverage:0", "head_set:-0.001:min_p", "head_set:0:top_n", "head_set:0:nucleus"),
    *("lenience:1", "cactus:0", "cascade_opt:-inf", "regret:0", "regret:inf:0", "typical:1:inf"),
)
WARPERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 4, "min_p": 0.05},
)
NUM_SEEDS = 600
STOPS = frozenset({3})


def table_decoder(seed: int = 0, stops: frozenset[int] = frozenset()) -> SpeculativeDecoder:
    logits, draft = tables(seed)
    return SpeculativeDecoder(TableTarget(logits, stops), TableDrafter(draft))


@pytest.fixture(scope="module")
def tiny() -> SpeculativeDecoder:
    """A tiny model with a random head, whose sampled laws are sharp but not points."""
    target = TargetModel(tiny_model())
    return SpeculativeDecoder(target, head_drafter(target), tree=TreeConfig(8, 3, 3))


def leaves_of(step: Step) -> set[int]:
    assert step.tree is not None
    return set(range(step.tree.num_nodes)) - set(step.tree.parents.tolist())


def assert_root_path(step: Step) -> None:
    """The path of a step goes from the root down, one child at a time, along its tokens."""
    assert step.tree is not None
    parents, tokens = step.tree.parents.tolist(), step.tree.token_ids.tolist()
    assert [parents[row] for row in step.path] == [0, *step.path][: len(step.path)]
    assert [tokens[row] for row in step.path] == [token.id for token in step.tokens][
        : len(step.path)
    ]


# The lossless value


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_fuzzy_at_threshold_0_gives_the_ids_of_exact(
    tiny: SpeculativeDecoder, divergence: str
) -> None:
    """25 prompts for each of eight divergences: ten of a tiny model, fifteen of a table."""
    rng = random.Random(divergence)
    rule = build_rule("fuzzy", threshold=0.0, divergence=divergence)
    for number in range(25):
        decoder, prompt = (
            (tiny, random_prompt(rng, high=40))
            if number < 10
            else (table_decoder(number), torch.tensor([[rng.randrange(5), rng.randrange(5)]]))
        )
        options = WARPERS[number % len(WARPERS)] | {"max_new_tokens": 8, "seed": number}
        exact = decoder.generate(prompt, tree="8,3,3", **options)
        fuzzy = decoder.generate(prompt, tree="8,3,3", rule=rule, **options)
        assert fuzzy.token_ids == exact.token_ids
        assert fuzzy.stats.num_rescued == 0
        assert (fuzzy.stats.kl_spent or 0.0) + (fuzzy.stats.regret_spent or 0.0) == 0.0


@pytest.mark.parametrize("written", OTHERS_LOSSLESS)
def test_every_rule_at_its_lossless_value_gives_the_ids_of_exact(
    tiny: SpeculativeDecoder, written: str
) -> None:
    rng = random.Random(written)
    for number in range(10):
        decoder, prompt = (
            (tiny, random_prompt(rng, high=40))
            if number < 2
            else (table_decoder(number), torch.tensor([[rng.randrange(5), rng.randrange(5)]]))
        )
        options = WARPERS[number % len(WARPERS)] | {"max_new_tokens": 8, "seed": number}
        exact = decoder.generate(prompt, tree="8,3,3", **options)
        assert (
            decoder.generate(prompt, tree="8,3,3", rule=written, **options).token_ids
            == exact.token_ids
        )


# The infinite threshold


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("written", ["fuzzy:inf:js", "fuzzy:inf:kl_target_draft", "coverage:inf"])
def test_an_infinite_knob_descends_to_a_leaf_in_every_cycle(
    tiny: SpeculativeDecoder, temperature: float, written: str
) -> None:
    rng = random.Random(4)
    num_rescued = 0
    for seed in range(5):
        for step in tiny.stream(
            random_prompt(rng),
            rule=written,
            temperature=temperature,
            max_new_tokens=24,
            seed=seed,
            tree=("8,3,3", "5,5,1", "16,4,4")[seed % 3],
        ):
            if step.tree is None:
                continue
            assert_root_path(step)
            end = step.path[-1] if step.path else 0
            assert end in leaves_of(step)
            assert step.tokens[-1].origin == "bonus"
            assert len(step.tokens) == len(step.path) + 1
            num_rescued += sum(token.origin == "rescued" for token in step.tokens)
    assert num_rescued > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_infinite_threshold_stops_short_only_at_stops_and_without_an_eligible_child(
    temperature: float,
) -> None:
    config = SamplingConfig(temperature, top_p=0.6)
    endings: Counter[str] = Counter()
    for seed in range(60):
        decoder = table_decoder(seed, STOPS)
        text = PROMPT[0].tolist()
        for step in decoder.stream(
            PROMPT,
            rule="fuzzy:inf:js",
            temperature=temperature,
            top_p=0.6,
            tree="8,3,3",
            max_new_tokens=12,
            seed=seed,
        ):
            text += [token.id for token in step.tokens]
            if step.tree is None:
                continue
            assert_root_path(step)
            end, last = (step.path[-1] if step.path else 0), step.tokens[-1]
            if last.id in STOPS:
                assert last.origin != "rescued"
                endings["stop"] += 1
            elif end in leaves_of(step):
                assert last.origin == "bonus"
                endings["leaf"] += 1
            else:
                target = decoder.target
                assert isinstance(target, TableTarget)
                law = slow_law(target.table[text[-3], text[-2]], config)
                inside = step.tree.token_ids[step.tree.parents == end].tolist()
                assert all(law[child] == 0.0 or child in STOPS for child in inside)
                assert last.origin == "recovered"
                endings["no eligible child"] += 1
    assert min(endings[kind] for kind in ("stop", "leaf", "no eligible child")) > 5


# Acceptance length and the threshold

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.4, math.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_expected_acceptance_length_grows_with_the_threshold_on_every_tree(
    temperature: float,
) -> None:
    rules = [build_rule("fuzzy", threshold=knob, divergence="js") for knob in THRESHOLDS]
    num_grown = 0
    for seed in range(30):
        recorder = Recorder(rules)
        table_decoder(seed).generate(
            PROMPT,
            temperature=temperature,
            tree="10,3,3",
            max_new_tokens=8,
            seed=seed,
            observer=recorder.observe,
        )
        lengths = [total.acceptance_length for total in recorder.totals]
        assert all(a <= b + 1e-9 for a, b in pairwise(lengths))
        num_grown += lengths[-1] > lengths[0]
    assert num_grown > 15


def test_live_acceptance_length_grows_with_the_threshold() -> None:
    decoder = table_decoder(3)
    lengths = []
    for threshold in THRESHOLDS:
        runs = [
            decoder.generate(
                PROMPT,
                rule="fuzzy",
                threshold=threshold,
                temperature=1.0,
                tree="6,3,2",
                max_new_tokens=12,
                seed=seed,
            ).stats
            for seed in range(50)
        ]
        emitted = sum(stats.num_tokens - 1 for stats in runs)
        lengths.append(emitted / sum(stats.num_cycles for stats in runs))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1.3 * lengths[0]


# The law of whole requests

PLAIN = SamplingConfig(temperature=1.0)
CUT = SamplingConfig(temperature=0.8, top_p=0.8)
LAW_CASES = (
    ("fuzzy:0.2:js", PLAIN, frozenset(), "10,3,3"),
    ("fuzzy:0.2:js", CUT, STOPS, "6,3,2"),
    ("fuzzy:0.6:kl_draft_target", PLAIN, STOPS, "3,3,1"),
    ("coverage:1", PLAIN, STOPS, "6,3,2"),
    ("coverage:1", CUT, frozenset(), "3,3,1"),
    ("lenience:0.4", PLAIN, STOPS, "3,3,1"),
    ("cactus:0.2", PLAIN, STOPS, "3,3,1"),
    ("head_set:0.7:nucleus", PLAIN, STOPS, "6,3,2"),
    ("head_set:0.6:min_p", CUT, frozenset(), "3,3,1"),
    ("cascade_opt:0.1", PLAIN, STOPS, "6,3,2"),
    ("regret:2:1", PLAIN, frozenset(), "3,3,1"),
    ("fuzzy_2025:0.2:js", PLAIN, STOPS, "6,3,2"),
    ("fuzzy_2025:0.2:js:chain", PLAIN, frozenset(), "6,3,2"),
    ("typical", CUT, STOPS, "6,3,2"),
)


@pytest.mark.parametrize(("written", "config", "stops", "tree"), LAW_CASES)
def test_the_law_of_three_tokens_equals_the_enumeration_of_all_walks(
    written: str, config: SamplingConfig, stops: frozenset[int], tree: str
) -> None:
    """The law of tokens and origins, so that the same tokens by another way would show too."""
    logits, draft = tables(6, spread=0.8)
    size = TreeConfig.parse(tree)
    assert size is not None
    law: Counter[tuple[tuple[int, str], ...]] = Counter()
    for probability, ways in TableReference(
        Reference(written, config, stops), logits, draft, size
    ).answers(3):
        law[tuple((way.token, way.origin) for way in ways)] += probability  # type: ignore[assignment]
    exact = TableReference(Reference("exact", config, stops), logits, draft, size).law(3)
    assert math.fsum(law.values()) == pytest.approx(1.0)

    decoder = SpeculativeDecoder(TableTarget(logits, stops), TableDrafter(draft))
    observed: Counter[tuple[tuple[int, str], ...]] = Counter()
    overridden_stops = 0
    for seed in range(NUM_SEEDS):
        steps = decoder.stream(
            PROMPT,
            rule=written,
            temperature=config.temperature,
            top_p=config.top_p,
            tree=tree,
            max_new_tokens=3,
            seed=seed,
        )
        tokens = [token for step in steps for token in step.tokens]
        observed[tuple((token.id, token.origin) for token in tokens)] += 1
        overridden_stops += sum(token.exact_id in stops - {token.id} for token in tokens)
    assert set(observed) <= set(law)
    assert chi_square_p(observed, law) > 1e-3

    answers: Counter[tuple[int, ...]] = Counter()
    seen: Counter[tuple[bool, str]] = Counter()
    for answer, count in observed.items():
        answers[tuple(token for token, _ in answer)] += count
        seen.update((token in stops, origin) for token, origin in answer)
    assert chi_square_p(answers, exact) < 1e-3  # the rule does change the law, and it would show
    assert seen[False, "rescued"] > 0
    if not written.startswith(("fuzzy_2025", "typical")):
        assert set(answers) <= set(exact)  # nothing that the cuts forbid
        assert seen[True, "rescued"] == overridden_stops == 0
    if stops:
        assert seen[True, "accepted"] > 0  # a stop among the children
    if stops and "1" in tree.split(","):
        assert seen[True, "recovered"] > 0  # and elsewhere


def test_the_enumeration_of_exact_walks_is_the_targets_own_law() -> None:
    logits, draft = tables()
    for config in (PLAIN, CUT):
        law = TableReference(Reference("exact", config), logits, draft, TreeConfig(10, 3, 3)).law(3)
        for answer, probability in law.items():
            text, expected = [1, 2, *answer], 1.0
            for place, token in enumerate(answer):
                expected *= slow_law(logits[text[place], text[place + 1]], config)[token]
            assert probability == pytest.approx(expected)


# Temperature 0

GREEDY_RULES = (
    *("fuzzy:0.2:js", "fuzzy:inf:js", "coverage:1.5", "head_set:0.8:min_p", "regret:2:1"),
    *("lenience:0.5", "lenience:0.2", "cactus:0.1", "cactus:0.5", "cascade_opt:0.1"),
    *("fuzzy_2025:0.2:js", "fuzzy_2025:0.2:js:chain", "typical"),
)


@pytest.mark.parametrize("written", GREEDY_RULES)
def test_greedy_requests_follow_the_rule_at_every_node(written: str) -> None:
    num_rescued = num_refused = 0
    size = TreeConfig(8, 3, 3)
    for seed in range(25):
        stops = STOPS if seed % 2 else frozenset()
        logits, draft = tables(seed)
        reference = TableReference(Reference(written, SamplingConfig(), stops), logits, draft, size)
        ((_, expected),) = reference.answers(12)
        steps = table_decoder(seed, stops).stream(
            PROMPT, rule=written, tree=str(size), max_new_tokens=12
        )
        tokens = [token for step in steps for token in step.tokens]
        assert [(token.id, token.origin) for token in tokens] == [
            (way.token, way.origin) for way in expected
        ]
        costs = [way.cost for way in expected]
        assert [token.cost for token in tokens] == pytest.approx(costs, abs=1e-5)
        num_rescued += sum(token.origin == "rescued" for token in tokens)
        num_refused += sum(token.origin == "recovered" for token in tokens)
    assert num_rescued > 10
    assert num_refused > 0


def test_a_greedy_rescue_takes_the_best_eligible_child() -> None:
    num_rescued = 0
    for seed in range(30):
        logits, _ = tables(seed)
        text = PROMPT[0].tolist()
        for step in table_decoder(seed, STOPS).stream(
            PROMPT, rule="fuzzy:inf:js", tree="8,3,3", max_new_tokens=12
        ):
            rows = [0, *step.path]
            for token, row in zip(step.tokens, rows, strict=False):
                if token.origin == "rescued":
                    law: Tensor = logits[text[-2], text[-1]]
                    assert step.tree is not None
                    siblings = step.tree.token_ids[step.tree.parents == row].tolist()
                    best = max((x for x in siblings if x not in STOPS), key=law.__getitem__)
                    assert token.id == best != token.exact_id == int(law.argmax())
                    num_rescued += 1
                text.append(token.id)
    assert num_rescued > 30
