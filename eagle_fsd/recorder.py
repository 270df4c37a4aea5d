"""Scoring rules on the trees of an exact run: what each would have accepted, and at what cost.

While requests are decoded exactly, every scored tree is walked in expectation under each rule: the
law at a node is known in closed form, so nothing is sampled and all rules see the same trees. Only
sums are kept, never a law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eagle_fsd.acceptance import (
    AcceptanceRule,
    Decision,
    Node,
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
        names = [field.name for field in fields(self)]
        return Expectation(**{name: getattr(self, name) + getattr(other, name) for name in names})

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
        child_law: probability of going on with each child, in the tree's order.
        rescued: probability of a token that the exact step would not have drawn.
        cost: nats.
        poor_mass, doubled_mass: as in Expectation.
    """

    child_law: list[float]
    rescued: float
    cost: float
    poor_mass: float = 0.0
    doubled_mass: float = 0.0


class Recorder:
    """Collects, for each rule, its expectation over all trees shown to it.

    Pass `observe` as a request's `observer`; the request itself should be exact.

    Args:
        rules: what to score; their budgets are not applied.
    """

    def __init__(self, rules: Iterable[AcceptanceRule]) -> None:
        self.rules = tuple(rules)
        self.totals = [Expectation() for _ in self.rules]
        self.is_greedy = False

    def observe(self, draft: Draft, logits: Tensor, verifier: Verifier) -> None:
        """Scores all rules on one tree; called with each scored tree before it is verified."""
        scored = ScoredTree(draft, logits, verifier)
        nodes = {row: scored.node(row) for row in scored.inner_rows if scored.is_finite[row]}
        cycle = [expect(rule, scored, nodes) for rule in self.rules]
        self.totals = [total + new for total, new in zip(self.totals, cycle, strict=True)]
        self.is_greedy = verifier.sampling.is_greedy


def expect(rule: AcceptanceRule, scored: ScoredTree, nodes: dict[int, Node]) -> Expectation:
    """Walks one tree in expectation.

    Args:
        rule: its `num_rescued` limit is applied along the most probable way of reaching a node.
        scored: the tree with its logits.
        nodes: the nodes that have children and finite logits.
    """
    is_greedy = scored.verifier.sampling.is_greedy
    reach = {0: 1.0}
    num_rescued = {0: 0}
    total = Expectation(num_cycles=1, num_tokens=1.0)
    for row in sorted(nodes):
        if reach.get(row, 0.0) <= 0.0:
            continue
        node = nodes[row]
        if num_rescued[row]:
            node = node.after(num_rescued[row])
        decision = rule.decide(node)
        if is_greedy:
            branch = _greedy_branch(scored, row, node, decision)
        else:
            branch = _branch(node, decision)
        weight = reach[row]
        goes_on = 0.0
        for (token, child), probability in zip(
            scored.children[row].items(), branch.child_law, strict=True
        ):
            is_stop = token in scored.verifier.stop_ids
            goes_on += 0.0 if is_stop else probability
            reach[child] = 0.0 if is_stop else weight * probability
            num_rescued[child] = num_rescued[row] + (is_greedy and branch.rescued > 0)
        total += Expectation(
            num_tokens=weight * goes_on,
            num_rescued=weight * branch.rescued,
            cost=weight * branch.cost,
            poor_mass=weight * branch.poor_mass,
            doubled_mass=weight * branch.doubled_mass,
        )
    return total


def _branch(node: Node, decision: Decision) -> _Branch:
    """The closed form of a sampled node."""
    parts = node.partition
    probs = parts.child_probs
    law = probs.clone()
    rescued = decision.rescue_prob * parts.outside_mass
    if decision.take is not None:
        law = torch.zeros_like(probs)
        law[decision.take] = 1.0
        rescued = 1.0 - float(probs[decision.take])
    elif decision.rescue_prob > 0.0:
        shares = torch.where(decision.eligible, probs, 0.0)
        law = law + rescued * shares / shares.sum()
    raised = (law - probs).clamp_min(0.0)
    is_poor = probs < POOR_SHARE * parts.probs.max()
    return _Branch(
        child_law=(law if decision.descend or decision.take is not None else 0.0 * law).tolist(),
        rescued=rescued,
        cost=decision_cost(node, decision),
        poor_mass=float(raised[is_poor].sum()),
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
    if choice is None or tokens[choice] == drawn:
        return _Branch(law, 0.0, 0.0)
    parts = node.partition
    probability = float(parts.child_probs[choice])
    return _Branch(
        law,
        rescued=1.0,
        cost=regret(node, tokens[choice]),
        poor_mass=float(probability < POOR_SHARE * float(parts.probs.max())),
        doubled_mass=max(0.0, 1.0 - 2.0 * probability),
    )
