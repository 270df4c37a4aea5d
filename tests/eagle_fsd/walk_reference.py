"""A slow reference of the tree walk: every draw, coin and child of every node, one at a time.

The rules themselves come from `rule_reference`; nothing here uses the library's rules or its walk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.drafter import Draft
from tests.eagle_fsd.rule_reference import (
    Case,
    Choice,
    choose,
    divergence,
    enumerate_outcomes,
    kl,
)
from tests.laws import PROMPT, slow_law
from tests.stubs import TableDrafter
from tree import DraftTree

UNWARPED = SamplingConfig(temperature=1.0)


@dataclass(frozen=True)
class Way:
    """One way in which a node can go on.

    Attributes:
        probability: of this way at its node.
        token, origin: what is emitted.
        cost: nats.
        poor, doubled: mass moved at the node, however it goes on: to tokens under a fifth of the
            best, and above twice the target's.
    """

    probability: float
    token: int
    origin: str
    cost: float = 0.0
    poor: float = 0.0
    doubled: float = 0.0


@dataclass(frozen=True)
class Reference:
    """A written rule and everything that it decides with."""

    written: str
    config: SamplingConfig = UNWARPED
    stops: frozenset[int] = frozenset()
    budget: float | None = None

    def ways(
        self,
        logits: Tensor,
        draft: list[float],
        children: list[int],
        num_rescued: int = 0,
        spent: float = 0.0,
    ) -> list[Way]:
        """All ways on from one node; their probabilities sum to 1."""
        law = slow_law(logits, self.config)
        case = Case(law, draft, children, sorted(self.stops), num_rescued)
        choice = choose(self._settled(slow_law(logits, UNWARPED), draft), case)
        if self.config.is_greedy:
            return [self._greedy_way(case, choice, logits.tolist(), spent)]
        emitted = enumerate_outcomes(case, choice).law
        cost = kl(emitted, law)
        if _is_relaxed(choice) and not self._affords(spent + cost):
            choice, emitted, cost = Choice(0.0, []), law, 0.0
        pairs = list(zip(emitted, law, strict=True))
        poor = math.fsum(max(0.0, e - p) for e, p in pairs if p < 0.2 * max(law))
        doubled = math.fsum(max(0.0, e - 2.0 * p) for e, p in pairs)
        return [
            Way(probability, token, origin, cost, poor, doubled)
            for (token, origin), probability in self._outcomes(case, choice).items()
        ]

    def _outcomes(self, case: Case, choice: Choice) -> dict[tuple[int, str], float]:
        """P of each (token, origin) of a sampled node."""
        outcomes: dict[tuple[int, str], float] = {}

        def add(token: int, origin: str, probability: float) -> None:
            if probability > 0.0:
                outcomes[token, origin] = outcomes.get((token, origin), 0.0) + probability

        eligible_mass = math.fsum(case.target[x] for x in choice.eligible)
        for drawn, chance in enumerate(case.target):
            if choice.take is not None:
                add(choice.take, "accepted" if drawn == choice.take else "rescued", chance)
            elif drawn in case.children or drawn in case.stops:
                add(drawn, self._origin_of_draw(case, drawn), chance)
            else:
                for child in choice.eligible:
                    share = case.target[child] / eligible_mass
                    add(child, "rescued", chance * choice.rescue_prob * share)
                rest = chance * (1.0 - choice.rescue_prob)
                add(drawn, self._origin_of_draw(case, drawn), rest)
        return outcomes

    def _greedy_way(self, case: Case, choice: Choice, logits: list[float], spent: float) -> Way:
        p = case.target
        drawn = token = max(range(len(logits)), key=logits.__getitem__)
        if choice.take is not None:
            token = choice.take
        elif drawn in case.refused and choice.eligible:
            best = max(choice.eligible, key=p.__getitem__)
            eligible_mass = math.fsum(p[x] for x in choice.eligible)
            raised = p[best] * (1.0 + choice.rescue_prob * case.refused_mass / eligible_mass)
            if raised >= (1.0 - choice.rescue_prob) * max(p[x] for x in case.refused):
                token = best
        cost = logits[drawn] - logits[token]
        if token == drawn or not self._affords(spent + cost):
            return Way(1.0, drawn, self._origin_of_draw(case, drawn, choice))
        poor = float(p[token] < 0.2 * max(p))
        return Way(1.0, token, "rescued", cost, poor, max(0.0, 1.0 - 2.0 * p[token]))

    def _origin_of_draw(self, case: Case, drawn: int, choice: Choice | None = None) -> str:
        if not case.children:
            return "bonus"
        is_taken = choice is not None and choice.take == drawn
        descends = is_taken or not self.written.endswith(":chain")
        return "accepted" if drawn in case.children and descends else "recovered"

    def _affords(self, spent: float) -> bool:
        return self.budget is None or spent < self.budget

    def _settled(self, target: list[float], draft: list[float]) -> str:
        """The rule with its comparison of the laws at temperature 1 replaced by its outcome."""
        name, *knobs = self.written.split(":")
        knob = float(knobs[0]) if knobs else 0.0
        if name == "fuzzy":
            is_close = knob == math.inf or divergence(knobs[1], target, draft) < knob
            return "fuzzy:inf" if is_close else "exact"
        if name == "fuzzy_2025":
            is_close = divergence(knobs[1], target, draft) <= knob
            return "fuzzy_2025:inf:js" if is_close else "exact"
        if name == "cascade_opt":
            is_sure = max(draft) >= max(target) - knob * divergence("tv", target, draft)
            return "fuzzy:inf" if is_sure else "exact"
        return "typical:0.09:0.3" if self.written == "typical" else self.written


def _is_relaxed(choice: Choice) -> bool:
    return choice.take is not None or choice.rescue_prob > 0.0


@dataclass(frozen=True)
class SlowTree:
    """A drafted tree with the target's logits."""

    draft: Draft
    logits: Tensor

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each row, its children's rows by token."""
        tree = self.draft.tree
        children: list[dict[int, int]] = [{} for _ in range(tree.num_nodes)]
        for row in range(1, tree.num_nodes):
            children[int(tree.parents[row])][int(tree.token_ids[row])] = row
        return children

    def draft_law(self, row: int) -> list[float]:
        law_row = int(self.draft.law_rows[row])
        if self.draft.log_probs is None or law_row < 0:
            return []
        law: list[float] = self.draft.log_probs[law_row].double().exp().tolist()
        return law

    def walks(
        self, reference: Reference, row: int = 0, num_rescued: int = 0, spent: float = 0.0
    ) -> Iterator[tuple[float, list[Way]]]:
        """Every walk from a row down, with its probability."""
        children = self.children[row]
        law = self.draft_law(row) or slow_law(self.logits[row], UNWARPED)
        for way in reference.ways(self.logits[row], law, list(children), num_rescued, spent):
            goes_on = way.origin in ("accepted", "rescued") and way.token not in reference.stops
            if not goes_on:
                yield way.probability, [way]
                continue
            count = num_rescued + (way.origin == "rescued")
            below = self.walks(reference, children[way.token], count, spent + way.cost)
            for probability, ways in below:
                yield way.probability * probability, [way, *ways]


@dataclass(frozen=True)
class TableReference:
    """Requests on a table target with a table drafter, enumerated.

    Attributes:
        reference: the rule.
        logits: [V, V, V] as TableTarget takes them.
        log_probs: [V, V] as TableDrafter takes them.
        tree: size of the tree.
    """

    reference: Reference
    logits: Tensor
    log_probs: Tensor
    tree: TreeConfig
    _drafts: dict[tuple[int, int], Draft] = field(default_factory=dict)

    def law(self, num_tokens: int, prompt: Tensor = PROMPT) -> dict[tuple[int, ...], float]:
        """P of each answer of at most `num_tokens` tokens; shorter ones end with a stop."""
        law: dict[tuple[int, ...], float] = {}
        for probability, ways in self.answers(num_tokens, prompt):
            answer = tuple(way.token for way in ways)
            law[answer] = law.get(answer, 0.0) + probability
        return law

    def answers(
        self, num_tokens: int, prompt: Tensor = PROMPT
    ) -> Iterator[tuple[float, list[Way]]]:
        """Every way in which a request can go."""
        before, last = prompt[0, -2:].tolist()
        first = Reference("exact", self.reference.config)
        for way in first.ways(self.logits[before, last], [], []):
            yield from self._continue(way.probability, [way], last, num_tokens)

    def _continue(
        self, probability: float, ways: list[Way], before: int, num_tokens: int
    ) -> Iterator[tuple[float, list[Way]]]:
        """All continuations of the text so far, whose last token but one is `before`."""
        root = ways[-1].token
        if root in self.reference.stops or len(ways) == num_tokens:
            yield probability, ways
            return
        tree = self._tree(before, root, room=num_tokens - len(ways) - 1)
        spent = math.fsum(way.cost for way in ways)
        for share, cycle in tree.walks(self.reference, spent=spent):
            tokens = [before, root, *(way.token for way in cycle)]
            yield from self._continue(probability * share, [*ways, *cycle], tokens[-2], num_tokens)

    def _tree(self, before: int, root: int, room: int) -> SlowTree:
        if (root, room) not in self._drafts:
            self._drafts[root, room] = self._draft(root, room)
        draft = self._drafts[root, room]
        tokens, parents = draft.tree.token_ids.tolist(), draft.tree.parents.tolist()
        above = [before if parent < 0 else tokens[parent] for parent in parents]
        return SlowTree(draft, self.logits[above, tokens])

    def _draft(self, root: int, room: int) -> Draft:
        size = self.tree.limited(room)
        if size is not None:
            return TableDrafter(self.log_probs).propose(root, size)
        return Draft(DraftTree.root_only(root), None, torch.tensor([-1]))
