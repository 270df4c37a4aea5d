"""The walk itself: golden trees by hand, origins, seeds, numbers that are none."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_fsd.acceptance import Coverage, Exact, Fuzzy2025, Lenience, Regret, build_rule
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.drafter import Draft
from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.sampling import SeededNoise
from eagle_fsd.target import TargetOutput
from eagle_fsd.verify import Verdict, Verifier
from tests.laws import PROMPT, tables
from tests.stubs import TableDrafter, TableTarget
from tree import DraftTree

SAMPLING = SamplingConfig(temperature=1.0)
GREEDY = SamplingConfig()
SIZE = 8
FIRST = 3  # number of the first token that the hand-made cycles emit

# Row: token (parent row).    0: 0
#                       1: 1 (0)      2: 2 (0)      3: 3 (0)
#               4: 4 (1)   5: 5 (1)                 6: 6 (3)
#                          7: 1 (5)
TOKENS, PARENTS, DEPTHS = (
    [0, 1, 2, 3, 4, 5, 6, 1],
    [-1, 0, 0, 0, 1, 1, 3, 5],
    [0, 1, 1, 1, 2, 2, 2, 3],
)
PROBS = torch.tensor(
    [  # of tokens 0 to 7 after each row
        [0.10, 0.20, 0.15, 0.05, 0.10, 0.10, 0.10, 0.20],
        [0.05, 0.05, 0.10, 0.10, 0.15, 0.25, 0.10, 0.20],
        [0.30, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10, 0.10],
        [0.10, 0.10, 0.10, 0.10, 0.10, 0.10, 0.20, 0.20],
        [0.20, 0.10, 0.10, 0.10, 0.20, 0.10, 0.10, 0.10],
        [0.40, 0.10, 0.10, 0.10, 0.00, 0.10, 0.10, 0.10],
        [0.10, 0.10, 0.30, 0.10, 0.10, 0.10, 0.10, 0.10],
        [0.10, 0.10, 0.10, 0.30, 0.10, 0.10, 0.10, 0.10],
    ]
)


def hand_drawn(log_probs: Tensor | None = None) -> Draft:
    tree = DraftTree(
        torch.tensor(TOKENS), torch.tensor(PARENTS), torch.tensor(DEPTHS), torch.zeros(SIZE)
    )
    tree.check()
    rows = torch.arange(SIZE) if log_probs is not None else torch.full((SIZE,), -1)
    return Draft(tree, log_probs, rows)


@dataclass
class FixedNoise:
    """Draws what it is told to, wherever that has any mass, and notes what it was asked for."""

    draws: list[int]
    coins: list[float] = field(default_factory=list)
    rescues: list[int] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)

    def draw(self, index: int) -> Tensor:
        self.asked.append(("draw", index))
        return self._in_favour_of(self.draws[index - FIRST])

    def rescue(self, index: int) -> tuple[float, Tensor]:
        self.asked.append(("rescue", index))
        number = sum(stream == "rescue" for stream, _ in self.asked) - 1
        return self.coins[number], self._in_favour_of(self.rescues[number])

    def _in_favour_of(self, token: int) -> Tensor:
        exponentials = torch.ones(SIZE, dtype=torch.float64)
        exponentials[token] = 1e-30
        return exponentials


def told(verdict: Verdict) -> list[tuple[int, str, int | None]]:
    return [(token.id, token.origin, token.exact_id) for token in verdict.tokens]


# Golden walks, drawn by hand

ANY = Coverage(math.inf)
HALF = Lenience(0.62)  # at the root: c = 0.4, r = (0.4 / 0.62 - 0.4) / 0.6 = 0.409
A, R, E, B = "accepted", "rescued", "recovered", "bonus"


@pytest.mark.parametrize(
    ("rule", "stops", "noise", "tokens", "path"),
    [
        # exact: recovered at once; down to a leaf; a leaf in another branch; recovered halfway
        (Exact(), (), FixedNoise([7]), [(7, E, 7)], []),
        (Exact(), (), FixedNoise([1, 4, 7]), [(1, A, 1), (4, A, 4), (7, B, 7)], [1, 4]),
        (Exact(), (), FixedNoise([3, 6, 2]), [(3, A, 3), (6, A, 6), (2, B, 2)], [3, 6]),
        (Exact(), (), FixedNoise([2, 0]), [(2, A, 2), (0, B, 0)], [2]),
        (Exact(), (), FixedNoise([1, 5, 4]), [(1, A, 1), (5, A, 5), (0, E, 0)], [1, 5]),
        # a stop among the children is committed and ends the walk; elsewhere it is recovered
        (Exact(), (5,), FixedNoise([1, 5]), [(1, A, 1), (5, A, 5)], [1, 5]),
        (Exact(), (7,), FixedNoise([1, 7]), [(1, A, 1), (7, E, 7)], [1]),
        # rescued at the root, accepted below; accepted above, rescued below; twice
        (ANY, (), FixedNoise([7, 4, 0], [0.9], [1]), [(1, R, 7), (4, A, 4), (0, B, 0)], [1, 4]),
        (ANY, (), FixedNoise([1, 7, 3, 2], [0.9, 0.9], [5, 1]),
         [(1, A, 1), (5, R, 7), (1, R, 3), (2, B, 2)], [1, 5, 7]),
        # a drawn stop is never overridden, a stop is never rescued
        (ANY, (7,), FixedNoise([7]), [(7, E, 7)], []),
        (ANY, (2,), FixedNoise([7, 6, 0], [0.1, 0.5], [2, 4]),
         [(1, R, 7), (4, R, 6), (0, B, 0)], [1, 4]),
        # the coin: below r it rescues, above it does not
        (HALF, (), FixedNoise([7, 2], [0.40, 0.99], [3, 6]), [(3, R, 7), (2, E, 2)], [3]),
        (HALF, (), FixedNoise([7], [0.42], [3]), [(7, E, 7)], []),
        # one rescue a cycle
        (Regret(math.inf, max_rescues=1), (), FixedNoise([7, 0], [0.5], [1]),
         [(1, R, 7), (0, E, 0)], [1]),
    ],
)  # fmt: skip
def test_golden_walks(
    rule: Any, stops: tuple[int, ...], noise: FixedNoise, tokens: list[Any], path: list[int]
) -> None:
    verifier = Verifier(rule, SAMPLING, noise, frozenset(stops))
    verdict = verifier.verify(hand_drawn(), PROBS.log(), FIRST)
    assert told(verdict) == tokens
    assert verdict.path == path
    drawn = [index for stream, index in noise.asked if stream == "draw"]
    assert drawn == list(range(FIRST, FIRST + len(tokens)))
    coins = [index for stream, index in noise.asked if stream == "rescue"]
    assert set(coins) <= set(drawn)
    assert len(coins) == len(set(coins)) == len(noise.coins)  # each once, and only where needed


@pytest.mark.parametrize(
    ("rule", "stops", "tokens", "path"),
    [
        # best after the root: 1 and 7 tie at 0.20, the first of them is the argmax
        (Exact(), (), [(1, A, 1), (5, A, 5), (0, E, 0)], [1, 5]),
        (ANY, (), [(1, A, 1), (5, A, 5), (1, R, 0), (3, B, 3)], [1, 5, 7]),
        (ANY, (0,), [(1, A, 1), (5, A, 5), (0, E, 0)], [1, 5]),
        (ANY, (1,), [(1, A, 1)], [1]),
        # r = 0.155 after row 5: 0.1 (1 + 0.155 * 0.9 / 0.1) < 0.845 * 0.4
        (Lenience(0.4), (), [(1, A, 1), (5, A, 5), (0, E, 0)], [1, 5]),
        # r = 0.704 there: 0.1 (1 + 0.704 * 9) = 0.73 > 0.296 * 0.4
        (Lenience(0.136), (), [(1, A, 1), (5, A, 5), (1, R, 0), (3, B, 3)], [1, 5, 7]),
    ],
)
def test_golden_walks_at_temperature_0(
    rule: Any, stops: tuple[int, ...], tokens: list[Any], path: list[int]
) -> None:
    noise = FixedNoise([])
    verdict = Verifier(rule, GREEDY, noise, frozenset(stops)).verify(
        hand_drawn(), PROBS.log(), FIRST
    )
    assert told(verdict) == tokens
    assert verdict.path == path
    assert noise.asked == []
    costs = [token.cost for token in verdict.tokens if token.origin == R]
    assert costs == pytest.approx([math.log(4.0)] * len(costs))


def test_accept_first_rules_name_the_origin_by_the_exact_draw() -> None:
    take = Fuzzy2025(math.inf, "js")
    draft = hand_drawn(PROBS.log())
    verdict = Verifier(take, SAMPLING, FixedNoise([1, 7, 0])).verify(draft, PROBS.log(), FIRST)
    assert told(verdict) == [(1, A, 1), (4, R, 7), (0, B, 0)]
    costs = [token.cost for token in verdict.tokens]
    assert costs == pytest.approx([math.log(5.0), math.log(1 / 0.15), 0.0])
    chain = Fuzzy2025(0.0, "js", chain=True)  # the laws differ: nothing is taken
    other = hand_drawn(PROBS.roll(1, 0).log())
    verdict = Verifier(chain, SAMPLING, FixedNoise([1])).verify(other, PROBS.log(), FIRST)
    assert told(verdict) == [(1, E, 1)]
    assert verdict.path == []


def test_a_node_of_a_relaxed_rule_costs_its_kl_whether_or_not_a_rescue_happened() -> None:
    def costs(*draws: int, coins: tuple[float, ...] = ()) -> list[float]:
        noise = FixedNoise(list(draws), list(coins), [1, 4])
        verdict = Verifier(ANY, SAMPLING, noise).verify(hand_drawn(), PROBS.log(), FIRST)
        return [token.cost for token in verdict.tokens]

    root, inner = math.log(1 / 0.4), math.log(1 / 0.4)  # p(C) is 0.4 at the root and after 1
    assert costs(1, 4, 0) == pytest.approx([root, inner, 0.0])
    assert costs(7, 7, 0, coins=(0.5, 0.5)) == pytest.approx([root, inner, 0.0])
    assert costs(2, 0) == pytest.approx([root, 0.0])


def test_a_budget_is_kept_along_the_walk_with_what_was_spent_before() -> None:
    node = math.log(1 / 0.4)
    for spent, budget, origins in (
        (0.0, 2.1 * node, [R, R, B]),
        (0.0, 1.9 * node, [R, E]),
        (0.2 * node, 2.1 * node, [R, E]),
        (0.0, node * 0.99, [E]),
        (5.0, 4.0, [E]),
    ):
        rule = Coverage(math.inf, budget=budget)
        verifier = Verifier(rule, SAMPLING, FixedNoise([7, 7, 0], [0.5] * 2, [1, 4]))
        verdict = verifier.verify(hand_drawn(), PROBS.log(), FIRST, spent)
        assert [token.origin for token in verdict.tokens] == origins
        relaxed = [token.cost for token in verdict.tokens if token.origin == R]
        assert relaxed == pytest.approx([node] * len(relaxed))
        assert verdict.tokens[-1].cost == 0.0


def test_stop_ids_outside_the_vocabulary_are_no_trouble() -> None:
    noise = FixedNoise([7, 4, 0], [0.9], [1])
    verdict = Verifier(ANY, SAMPLING, noise, frozenset({SIZE, 10_000})).verify(
        hand_drawn(), PROBS.log(), FIRST
    )
    assert [token.origin for token in verdict.tokens] == [R, A, B]


# Every verdict is a path from the root, and counts add up

RULES = (
    *("exact", "fuzzy:0.2:js", "fuzzy:inf:js", "coverage:0.5", "head_set:0.7:nucleus"),
    *("lenience:0.3", "cactus:0.3", "cascade_opt:0.1", "regret:2:1", "fuzzy_2025:0.2:js"),
    *("fuzzy_2025:0.2:js:chain", "typical"),
)


@pytest.mark.parametrize("written", RULES)
def test_every_verdict_is_an_ascending_path_from_the_root(written: str) -> None:
    rng = random.Random(written)
    rule = build_rule(written)
    for seed in range(40):
        logits, draft_law = tables(seed)
        target, drafter = TableTarget(logits), TableDrafter(draft_law)
        size = rng.choice(["10,3,3", "4,4,1", "12,4,2"])
        verdicts: list[tuple[Draft, Verdict]] = []

        def keep(draft: Draft, logits: Tensor, verifier: Verifier, kept: Any = verdicts) -> None:
            kept.append((draft, verifier.verify(draft, logits, 1)))

        decoder = SpeculativeDecoder(target, drafter)
        steps = list(
            decoder.stream(
                PROMPT,
                rule=rule,
                tree=size,
                max_new_tokens=9,
                seed=seed,
                temperature=float(seed % 2),
                observer=keep,
            )
        )
        shown = [(s.tree, s.path, [(t.id, t.origin) for t in s.tokens]) for s in steps if s.tree]
        for draft, verdict in verdicts:
            parents, ids = draft.tree.parents.tolist(), draft.tree.token_ids.tolist()
            assert verdict.path == sorted(set(verdict.path))
            assert [parents[row] for row in verdict.path] == [0, *verdict.path][: len(verdict.path)]
            tokens = [token.id for token in verdict.tokens]
            assert [ids[row] for row in verdict.path] == tokens[: len(verdict.path)]
            assert len(tokens) == len(verdict.path) + 1
            assert all(0 <= token < 5 for token in tokens)
            origins = [token.origin for token in verdict.tokens]
            assert set(origins[:-1]) <= {A, R}
            assert origins[-1] in (E, B)
            for token in verdict.tokens:
                assert (token.origin == R) == (token.id != token.exact_id)
        for (_, path, tokens_shown), (draft, _) in zip(shown, verdicts, strict=True):
            assert len(tokens_shown) == len(path) + 1
            assert max([0, *path]) < draft.tree.num_nodes


# Seeds

RELAXED = ("fuzzy:0.3:js", "coverage:0.7", "lenience:0.4", "cactus:0.3", "head_set:0.8:min_p")


@pytest.mark.parametrize("written", [*RELAXED, "fuzzy_2025:0.2:js", "typical"])
def test_the_same_seed_repeats_and_another_one_does_not(written: str) -> None:
    logits, draft = tables()
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))

    def ids(seed: int) -> list[int]:
        return decoder.generate(
            PROMPT, rule=written, temperature=1.0, tree="6,3,2", max_new_tokens=10, seed=seed
        ).token_ids

    state = torch.get_rng_state()
    runs = [ids(seed) for seed in range(12)]
    assert [ids(seed) for seed in range(12)] == runs
    assert len({tuple(run) for run in runs}) > 6
    assert torch.equal(torch.get_rng_state(), state)


class OtherRescues(SeededNoise):
    """The same exact draws with other coins and rescues."""

    def rescue(self, index: int) -> tuple[float, Tensor]:
        return super().rescue(index + 1000)


class OtherDraws(SeededNoise):
    """The same coins and rescues with other exact draws."""

    def draw(self, index: int) -> Tensor:
        return super().draw(index + 1000)


@pytest.mark.parametrize("written", RELAXED)
def test_the_rescue_stream_leaves_exact_draws_before_the_first_rescue_unchanged(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, draft = tables()
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))

    def tokens(seed: int) -> list[Any]:
        steps = decoder.stream(
            PROMPT, rule=written, temperature=1.0, tree="6,3,2", max_new_tokens=10, seed=seed
        )
        return [token for step in steps for token in step.tokens]

    before = [tokens(seed) for seed in range(40)]
    monkeypatch.setattr("eagle_fsd.decoder.SeededNoise", OtherRescues)
    after = [tokens(seed) for seed in range(40)]
    num_different = num_compared = 0
    for one, other in zip(before, after, strict=True):
        origins = [(a.origin, b.origin) for a, b in zip(one, other, strict=True)]
        first = next((i for i, pair in enumerate(origins) if R in pair), len(origins))
        assert one[:first] == other[:first]
        if first < len(one):  # the coin comes after the draw
            assert one[first].exact_id == other[first].exact_id
        num_compared += first
        num_different += one != other
    assert num_different > 5
    assert num_compared > 40
    monkeypatch.setattr("eagle_fsd.decoder.SeededNoise", OtherDraws)
    assert [tokens(seed) for seed in range(40)] != before


# Numbers that are none

BAD_ROWS = {
    "nan": torch.full((5,), math.nan),
    "one nan": torch.tensor([0.0, 1.0, math.nan, 0.0, 0.0]),
    "inf": torch.tensor([0.0, math.inf, 0.0, 0.0, 0.0]),
    "nothing": torch.full((5,), -math.inf),
}


class SpoiltTarget(TableTarget):
    """Spoils every third node below the root; the root itself is always right."""

    def __init__(self, logits: Tensor, bad: Tensor) -> None:
        super().__init__(logits)
        self._bad = bad
        self.spoilt: list[set[int]] = []

    def score(self, tree: DraftTree) -> TargetOutput:
        output = super().score(tree)
        logits = output.logits.clone()
        rows = [row for row in range(1, tree.num_nodes) if (row + len(self.tokens)) % 3 == 0]
        logits[rows] = self._bad
        self.spoilt.append(set(rows))
        return TargetOutput(logits, output.features)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_node_without_finite_logits_is_reached_by_exact_draws_alone(
    bad: Tensor, temperature: float
) -> None:
    """It becomes the next root; other nodes are as they were: exact ids stay those of plain."""
    num_met = 0
    for seed in range(15):
        logits, draft = tables(seed)
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": 10,
            "seed": seed,
        }
        target = SpoiltTarget(logits, bad)
        decoder = SpeculativeDecoder(target, TableDrafter(draft))
        plain = SpeculativeDecoder(TableTarget(logits)).plain(PROMPT, **options)
        exact = decoder.generate(PROMPT, tree="10,3,3", **options)
        assert exact.token_ids == plain.token_ids
        for written in ("fuzzy:inf:js", "lenience:0.2", "fuzzy_2025:inf:js"):
            target.spoilt.clear()
            steps = list(decoder.stream(PROMPT, rule=written, tree="10,3,3", **options))
            cycles = [step for step in steps if step.tree is not None]
            for step, rows in zip(cycles, target.spoilt, strict=True):
                assert not rows & set(step.path)
                assert all(0 <= token.id < 5 for token in step.tokens)
                assert len(step.tokens) == len(step.path) + 1
                if step.tokens[-1].origin not in (E, B):
                    assert step.tokens[-1].origin == A  # into the spoilt node, by its own draw
                    num_met += 1
    assert num_met > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_root_without_finite_logits_is_an_error(bad: Tensor, temperature: float) -> None:
    logits, draft = tables()
    logits[:, 4] = bad
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))
    options: dict[str, Any] = {"temperature": temperature, "rule": "fuzzy:inf:js"}
    for seed in range(10):
        text: list[int] = []

        def read(into: list[int] = text, seed: int = seed) -> None:
            for step in decoder.stream(PROMPT, tree="10,3,3", seed=seed, **options):
                into += [token.id for token in step.tokens]

        with pytest.raises(NonFiniteLogitsError, match="logits hold NaN"):
            read()
        assert text[-1] == 4
        assert 4 not in text[:-1]


def test_infinite_and_missing_draft_laws_rescue_nothing_by_accident() -> None:
    logits, _ = tables()
    draft = torch.full((5, 5), -math.inf)
    draft[:, :3] = torch.log_softmax(torch.arange(15.0).reshape(5, 3), -1)  # zeros in q
    decoder = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft))
    options: dict[str, Any] = {"temperature": 1.0, "tree": "6,3,2", "max_new_tokens": 10}
    for seed in range(20):
        exact = decoder.generate(PROMPT, seed=seed, **options).token_ids
        for name in ("kl_target_draft", "ag_mean"):  # infinite everywhere
            rule = f"fuzzy:1e300:{name}"
            assert decoder.generate(PROMPT, seed=seed, rule=rule, **options).token_ids == exact
    relaxed = decoder.generate(PROMPT, rule="fuzzy:inf:ag_mean", **options)
    assert relaxed.stats.num_recovered == 0
