"""Scoring rules on the trees of an exact run: what each would have accepted, and at what cost.

While requests are decoded exactly, every scored tree is walked in expectation under each rule: the
law at a node is known in closed form, so nothing is sampled and all rules see the same trees. Only
sums are kept, never a law.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.acceptance import (
    AcceptanceRule,
    Decision,
    Node,
    build_rule,
    decision_cost,
    greedy_rescue,
    regret,
)
from eagle_fsd.drafter import Draft
from eagle_fsd.verify import ScoredTree, Verifier

# A token is called poor below this share of the best token's probability.
POOR_SHARE = 0.2


@dataclass(frozen=True)
class Expectation:
    """What one rule does on one tree, in expectation; sums over trees add up.

    Attributes:
        num_cycles: trees.
        num_tokens: tokens that the cycles emit.
        num_rescued: tokens that are not what the exact step would have drawn.
        cost: nats: KL of the emitted laws from the target's when sampling, regret at temperature 0.
        poor_mass: probability moved to tokens under a fifth of the target's best.
        doubled_mass: probability above twice the target's.
    """

    num_cycles: int = 0
    num_tokens: float = 0.0
    num_rescued: float = 0.0
    cost: float = 0.0
    poor_mass: float = 0.0
    doubled_mass: float = 0.0

    def __add__(self, other: Expectation) -> Expectation:
        return Expectation(*map(operator.add, self.sums, other.sums))

    @property
    def sums(self) -> tuple[int, float, float, float, float, float]:
        """The fields in their order; `Expectation(*sums)` makes it again."""
        moved = (self.poor_mass, self.doubled_mass)
        return (self.num_cycles, self.num_tokens, self.num_rescued, self.cost, *moved)

    @property
    def acceptance_length(self) -> float:
        """Tokens per cycle."""
        return self.num_tokens / self.num_cycles if self.num_cycles else math.nan

    @property
    def share_rescued(self) -> float:
        """Rescued tokens per token."""
        return self.num_rescued / self.num_tokens if self.num_tokens else math.nan

    @property
    def cost_per_token(self) -> float:
        """Nats per token."""
        return self.cost / self.num_tokens if self.num_tokens else math.nan


@dataclass(frozen=True)
class _Branch:
    """What a rule does at one node.

    Attributes:
        accepted: probability of going on with each child, in the tree's order, because it was
            drawn.
        rescued: probability of going on with each child in the place of another draw.
        cost: nats.
        poor_mass, doubled_mass: as in Expectation.
    """

    accepted: list[float]
    rescued: list[float]
    cost: float
    poor_mass: float = 0.0
    doubled_mass: float = 0.0


class Recorder:
    """Collects, for each rule, its expectation over all trees shown to it.

    Pass `observe` as a request's `observer`; the request itself should be exact.

    Args:
        rules: what to score, or its written form; budgets are not applied.
    """

    def __init__(self, rules: Iterable[AcceptanceRule | str]) -> None:
        self.rules = tuple(build_rule(rule) for rule in rules)
        self.totals = [Expectation() for _ in self.rules]
        self.is_greedy = False
        self.num_trees = 0  # cycles in which anything was drafted

    def observe(self, draft: Draft, logits: Tensor, verifier: Verifier) -> None:
        """Scores all rules on one tree; called with each scored tree before it is verified."""
        tree = _SharedTree(ScoredTree(draft, logits, verifier))
        self.num_trees += bool(tree.scored.inner_rows)
        cycle = [_expect(rule, tree) for rule in self.rules]
        self.totals = [total + new for total, new in zip(self.totals, cycle, strict=True)]
        self.is_greedy = verifier.sampling.is_greedy


class _SharedTree:
    """A scored tree that many rules walk: its laws, and what follows from a decision, once for all.

    Most rules of a grid decide alike at most nodes, and some nodes are reached by none.
    """

    def __init__(self, scored: ScoredTree) -> None:
        self.scored = scored
        self._nodes: dict[tuple[int, int], Node] = {}
        self._branches: dict[Hashable, _Branch] = {}

    def branch(self, rule: AcceptanceRule, row: int, num_rescued: int) -> _Branch:
        """What a rule does at a row that was reached with `num_rescued` rescues."""
        node = self._node(row, num_rescued)
        decision = self.scored.decide(rule, row, node)
        eligible = tuple(decision.eligible.tolist())
        key = (row, decision.rescue_prob, eligible, decision.take, decision.descend)
        if key not in self._branches:
            make = _greedy_branch if self.scored.verifier.sampling.is_greedy else _branch
            self._branches[key] = make(self.scored, row, node, decision)
        return self._branches[key]

    def _node(self, row: int, num_rescued: int) -> Node:
        if (row, num_rescued) not in self._nodes:
            self._nodes[row, num_rescued] = self.scored.node(row, num_rescued)
        return self._nodes[row, num_rescued]


def _expect(rule: AcceptanceRule, tree: _SharedTree) -> Expectation:
    """Walks one tree in expectation under a rule, whose budget is not applied."""
    scored = tree.scored
    # Rescues are counted as far as the rule tells them apart: most rules meet a node in one state.
    limit = min(getattr(rule, "max_rescues", None) or 0, len(scored.children))
    reach = {row: [0.0] * (limit + 1) for row in range(len(scored.children))}
    reach[0][0] = 1.0
    total = Expectation(num_cycles=1, num_tokens=1.0)
    for row in scored.inner_rows:
        for num_rescued, weight in enumerate(reach[row]):
            if weight <= 0.0 or not scored.is_finite[row]:
                continue
            branch = tree.branch(rule, row, num_rescued)
            goes_on = 0.0
            for (token, child), accepted, rescued in zip(
                scored.children[row].items(), branch.accepted, branch.rescued, strict=True
            ):
                if token not in scored.verifier.stop_ids:
                    goes_on += accepted + rescued
                    reach[child][num_rescued] += weight * accepted
                    reach[child][min(num_rescued + 1, limit)] += weight * rescued
            total += Expectation(
                num_tokens=weight * goes_on,
                num_rescued=weight * sum(branch.rescued),
                cost=weight * branch.cost,
                poor_mass=weight * branch.poor_mass,
                doubled_mass=weight * branch.doubled_mass,
            )
    return total


def _branch(_scored: ScoredTree, _row: int, node: Node, decision: Decision) -> _Branch:
    """The closed form of a sampled node."""
    parts = node.partition
    probs = parts.child_probs
    accepted, rescued = probs, torch.zeros_like(probs)
    if decision.take is not None:
        is_taken = torch.zeros_like(probs)
        is_taken[decision.take] = 1.0
        accepted, rescued = is_taken * probs, is_taken * (1.0 - probs)
    elif decision.rescue_prob > 0.0:
        shares = torch.where(decision.eligible, probs, 0.0)
        rescued = decision.rescue_prob * parts.outside_mass * shares / shares.sum()
    law = accepted + rescued
    is_poor = probs < POOR_SHARE * parts.probs.max()
    goes_on = decision.descend or decision.take is not None
    return _Branch(
        accepted=(accepted if goes_on else torch.zeros_like(accepted)).tolist(),
        rescued=rescued.tolist(),
        cost=decision_cost(node, decision),
        poor_mass=float((law - probs).clamp_min(0.0)[is_poor].sum()),
        doubled_mass=float((law - 2.0 * probs).clamp_min(0.0).sum()),
    )


def _greedy_branch(scored: ScoredTree, row: int, node: Node, decision: Decision) -> _Branch:
    """The one way on at temperature 0."""
    drawn = scored.argmax[row]
    tokens = list(scored.children[row])
    choice: int | None
    if decision.take is not None:
        choice = decision.take
    elif drawn in scored.children[row]:
        choice = tokens.index(drawn) if decision.descend else None
    elif drawn in scored.verifier.stop_ids:
        choice = None
    else:
        choice = greedy_rescue(node, decision)
    law = [float(index == choice) for index in range(len(tokens))]
    nothing = [0.0] * len(tokens)
    if choice is None or tokens[choice] == drawn:
        return _Branch(accepted=law, rescued=nothing, cost=0.0)
    parts = node.partition
    probability = float(parts.child_probs[choice])
    return _Branch(
        accepted=nothing,
        rescued=law,
        cost=regret(node, tokens[choice]),
        poor_mass=float(probability < POOR_SHARE * float(parts.probs.max())),
        doubled_mass=max(0.0, 1.0 - 2.0 * probability),
    )
