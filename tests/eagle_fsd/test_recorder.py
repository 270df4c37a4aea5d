"""The recorder: expectations on a tree against an enumeration of every walk, and live decoding."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from eagle_fsd.acceptance import build_rule
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.drafter import Draft
from eagle_fsd.recorder import Expectation, Recorder
from eagle_fsd.sampling import SeededNoise
from eagle_fsd.verify import Verifier
from tests.eagle_fsd.walk_reference import Reference, SlowTree
from tests.laws import PROMPT, tables
from tests.stubs import TableDrafter, TableTarget

RULES = (
    *("exact", "fuzzy:0.15:js", "fuzzy:inf:js", "fuzzy:0.5:kl_draft_target", "fuzzy:0.3:tv@2"),
    *("coverage:1.5", "head_set:0.7:nucleus", "head_set:0.5:min_p", "head_set:2:top_n"),
    *("lenience:0.4", "cactus:0.3", "cascade_opt:0.1", "regret:2", "regret:2:1", "regret:inf:2"),
    *("fuzzy_2025:0.2:js", "fuzzy_2025:inf:js:chain", "fuzzy_2025:0.1:js:chain", "typical"),
)
CONFIGS = (
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.7, top_p=0.8),
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.0, top_k=3),
)


def random_tree(seed: int) -> tuple[Draft, Tensor, frozenset[int]]:
    """A drafted tree of a random size, the target's logits on it, and stops."""
    rng = random.Random(seed)
    size = rng.randint(4, 7)
    logits, log_probs = tables(seed, size, spread=rng.choice([0.7, 1.5]))
    shape = rng.choice([(3, 3, 1), (6, 3, 2), (10, 4, 2), (8, 2, 3)])
    before, root = rng.randrange(size), rng.randrange(size)
    draft = TableDrafter(log_probs).propose(root, TreeConfig(*shape))
    tokens, parents = draft.tree.token_ids.tolist(), draft.tree.parents.tolist()
    above = [before if parent < 0 else tokens[parent] for parent in parents]
    stops = frozenset(rng.sample(range(size), rng.randint(0, 2)))
    return draft, logits[above, tokens], stops


def enumerated(reference: Reference, tree: SlowTree) -> Expectation:
    """Sums over every walk of the tree."""
    total = Expectation(num_cycles=1)
    for probability, ways in tree.walks(reference):
        total += Expectation(
            num_tokens=probability * len(ways),
            num_rescued=probability * sum(way.origin == "rescued" for way in ways),
            cost=probability * math.fsum(way.cost for way in ways),
            poor_mass=probability * math.fsum(way.poor for way in ways),
            doubled_mass=probability * math.fsum(way.doubled for way in ways),
        )
    return total


def assert_close(expectation: Expectation, expected: Expectation) -> None:
    for field in fields(Expectation):
        value, wanted = getattr(expectation, field.name), getattr(expected, field.name)
        assert value == pytest.approx(wanted, rel=1e-4, abs=1e-5), field.name


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_expectations_equal_the_enumeration_of_every_walk(config: SamplingConfig) -> None:
    has_moved = dict.fromkeys(RULES, False)
    for seed in range(25):
        draft, logits, stops = random_tree(seed)
        verifier = Verifier(build_rule("exact"), config, SeededNoise(0, logits.shape[-1]), stops)
        recorder = Recorder(map(build_rule, RULES))
        recorder.observe(draft, logits, verifier)
        assert recorder.is_greedy == config.is_greedy
        for written, total in zip(RULES, recorder.totals, strict=True):
            expected = enumerated(Reference(written, config, stops), SlowTree(draft, logits))
            assert_close(total, expected)
            has_moved[written] |= total.cost > 0.0
    assert [written for written, moved in has_moved.items() if not moved] == ["exact"]


def test_a_limit_of_rescues_is_kept_on_every_way_to_a_node() -> None:
    """The same node is met with the limit reached and not: both count with their probability."""
    differs = False
    for seed in range(10):
        draft, logits, stops = random_tree(seed)
        config = SamplingConfig(1.0)
        verifier = Verifier(build_rule("exact"), config, SeededNoise(0, logits.shape[-1]), stops)
        recorder = Recorder(map(build_rule, ("regret:inf:1", "regret:inf:1000000", "regret:inf")))
        recorder.observe(draft, logits, verifier)
        limited, many, unlimited = recorder.totals
        assert_close(many, unlimited)
        assert limited.num_tokens <= unlimited.num_tokens
        differs |= limited.num_tokens < unlimited.num_tokens - 1e-3
    assert differs


def test_children_without_finite_logits_are_not_counted_as_rescues() -> None:
    draft, logits, _ = random_tree(2)
    verifier = Verifier(build_rule("exact"), SamplingConfig(1.0), SeededNoise(0, logits.shape[-1]))
    children = (draft.tree.parents == 0).nonzero().flatten()
    logits[children] = math.nan
    recorder = Recorder(map(build_rule, ("exact", "fuzzy:inf:js", "fuzzy_2025:inf:js")))
    recorder.observe(draft, logits, verifier)
    exact, *relaxed = recorder.totals
    for total in relaxed:
        assert total == exact


@pytest.mark.parametrize(
    "written", ["exact", "fuzzy:0.2:js", "lenience:0.5", "regret:2:1", "fuzzy_2025:0.2:js"]
)
@pytest.mark.parametrize("stops", [frozenset(), frozenset({3})], ids=["no stop", "a stop"])
def test_the_expectation_of_a_live_run_is_its_acceptance_length(
    written: str, stops: frozenset[int]
) -> None:
    """Tokens minus what was expected of each tree are fair bets: their sum is within 4 errors."""
    logits, draft = tables()
    decoder = SpeculativeDecoder(TableTarget(logits, stops), TableDrafter(draft))
    recorder = Recorder([build_rule(written)])
    surprises: list[float] = []
    for seed in range(60):
        before = recorder.totals[0]
        for step in decoder.stream(
            PROMPT,
            rule=written,
            temperature=1.0,
            tree="6,3,2",
            max_new_tokens=10,
            seed=seed,
            observer=recorder.observe,
        ):
            after = recorder.totals[0]
            if step.stats is not None:
                surprises.append(step.stats.num_emitted - (after.num_tokens - before.num_tokens))
            before = after
    assert len(surprises) == recorder.totals[0].num_cycles > 60
    spread = math.sqrt(math.fsum(surprise**2 for surprise in surprises))
    assert spread > 0.0
    assert abs(sum(surprises)) < 4 * spread


def test_only_sums_are_kept() -> None:
    """No attribute grows with the cycles, and none holds a law."""
    logits, draft = tables()
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))
    recorder = Recorder(map(build_rule, RULES))
    shapes = []
    for seed in range(3):
        decoder.generate(PROMPT, tree="6,3,2", max_new_tokens=8, observer=recorder.observe)
        assert sorted(vars(recorder)) == ["is_greedy", "num_trees", "rules", "totals"]
        numbers = [getattr(total, f.name) for total in recorder.totals for f in fields(total)]
        assert {type(number) for number in numbers} <= {int, float}
        shapes.append((len(recorder.rules), len(recorder.totals), len(numbers)))
        assert recorder.totals[0].num_cycles > seed
    assert len(set(shapes)) == 1


def test_the_observer_sees_every_tree_and_changes_nothing() -> None:
    logits, draft = tables()
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))
    recorder = Recorder([build_rule("fuzzy:0.3:js")])
    for temperature in (0.0, 1.0):
        plain = decoder.generate(PROMPT, tree="6,3,2", max_new_tokens=12, temperature=temperature)
        seen = decoder.generate(
            PROMPT,
            tree="6,3,2",
            max_new_tokens=12,
            temperature=temperature,
            observer=recorder.observe,
        )
        assert seen.token_ids == plain.token_ids
        assert recorder.is_greedy == (temperature == 0.0)


def test_figures_of_nothing_are_nan_and_sums_add_up() -> None:
    nothing = Expectation()
    for figure in (nothing.acceptance_length, nothing.share_rescued, nothing.cost_per_token):
        assert math.isnan(figure)
    one = Expectation(1, 3.0, 1.0, 0.5, 0.25, 0.125)
    both = one + Expectation(1, 1.0)
    assert both == Expectation(2, 4.0, 1.0, 0.5, 0.25, 0.125)
    assert (both.acceptance_length, both.share_rescued, both.cost_per_token) == (2.0, 0.25, 0.125)


def test_a_root_without_children_counts_one_token() -> None:
    draft, logits, _ = random_tree(0)
    lone = type(draft.tree).root_only(0)
    verifier = Verifier(build_rule("exact"), SamplingConfig(1.0), SeededNoise(0, logits.shape[-1]))
    recorder = Recorder([build_rule("fuzzy:inf:js")])
    recorder.observe(Draft(lone, None, torch.tensor([-1])), logits[:1], verifier)
    assert recorder.totals == [Expectation(1, 1.0)]
