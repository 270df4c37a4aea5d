"""Following a draft tree with a rule: the exact step first, then, where allowed, a rescue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from eagle_fsd.acceptance import (
    AcceptanceRule,
    Decision,
    Exact,
    Node,
    decision_cost,
    greedy_rescue,
    regret,
)
from eagle_fsd.config import SamplingConfig
from eagle_fsd.device import supports_float64
from eagle_fsd.drafter import Draft
from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.sampling import Noise, finite_rows, law_log_probs, race

Origin = Literal["accepted", "rescued", "recovered", "bonus"]


@dataclass(frozen=True)
class EmittedToken:
    """One emitted token.

    Attributes:
        id: the token.
        origin: accepted (the exact draw was a child), rescued (the draw was not the child that the
            relaxed rule went on with), recovered (the draw, and the cycle ended), bonus (the draw
            at a leaf).
        cost: nats charged for the node that emitted it: KL of the emitted law from the target's
            when sampling, regret log p(argmax) - log p(token) of a rescued token at temperature 0.
        exact_id: the token that the exact step drew there.
    """

    id: int
    origin: Origin
    cost: float = 0.0
    exact_id: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What one cycle emits.

    Attributes:
        path: tree rows to commit below the root, ascending; one for each leading token of `tokens`.
        tokens: at least one. The last one is the next root unless the path includes it (a stop
            ended the walk).
    """

    path: list[int]
    tokens: list[EmittedToken]


@dataclass(frozen=True)
class Verifier:
    """Everything that is fixed for a request before its first draw.

    Attributes:
        rule: exact or relaxed.
        sampling: the target's law.
        noise: one vector for each emitted token and stream.
        stop_ids: tokens that end a request: never rescued, never overridden.
    """

    rule: AcceptanceRule
    sampling: SamplingConfig
    noise: Noise
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    def draw(self, logits: Tensor, index: int) -> int:
        """The exact draw of emitted token number `index` from one row of logits, [V].

        Raises:
            NonFiniteLogitsError: for a row with NaN or +inf, or with nothing finite.
        """
        _require_finite(bool(finite_rows(logits)))
        return int(logits.argmax()) if self.sampling.is_greedy else self.draw_finite(logits, index)

    def draw_finite(self, logits: Tensor, index: int) -> int:
        """The draw at a temperature above 0 from a row that is known to be finite."""
        return int(race(law_log_probs(logits, self.sampling), self.noise.draw(index)))

    def verify(self, draft: Draft, logits: Tensor, index: int, spent: float = 0.0) -> Verdict:
        """Walks the tree from its root.

        Args:
            draft: the scored tree.
            logits: [N, V] of all nodes.
            index: number of the first token that this cycle emits.
            spent: nats that the request's ledger holds already.

        Raises:
            NonFiniteLogitsError: when the root's own logits are not finite.
        """
        return _Walk(ScoredTree(draft, logits, self), index, spent).run()


def _require_finite(is_finite: bool) -> None:
    if not is_finite:
        raise NonFiniteLogitsError(
            "the target's logits hold NaN or +inf, or nothing finite, where the next token is "
            "drawn; float16 overflows on some models: try dtype bfloat16 or float32"
        )


class ScoredTree:
    """A tree with the target's logits, read once: what walking it needs.

    Attributes:
        children: for each row its children's rows by token id, in draft order.
        is_finite: for each row whether its logits are usable.
        argmax: for each row the best token; empty unless greedy.
    """

    def __init__(self, draft: Draft, logits: Tensor, verifier: Verifier) -> None:
        if not supports_float64(logits.device):  # laws and costs are weighed in float64
            logits = logits.cpu()
        self.draft = draft
        self.logits = logits
        self.verifier = verifier
        self.children: list[dict[int, int]] = [{} for _ in range(draft.tree.num_nodes)]
        is_greedy = verifier.sampling.is_greedy
        # `max` gives the first of equals, as `argmax` does, and is far faster in bfloat16.
        best = logits.max(dim=-1).indices if is_greedy else draft.tree.parents
        facts = (draft.tree.parents, draft.tree.token_ids, finite_rows(logits), best)
        # One transfer, so that the device is waited for once.
        read = torch.stack([each.to(logits.device, torch.int64) for each in facts]).tolist()
        parents, token_ids, is_finite, argmax = read
        for row in range(1, draft.tree.num_nodes):
            self.children[parents[row]][token_ids[row]] = row
        self.is_finite = [bool(each) for each in is_finite]
        self.argmax: list[int] = argmax if is_greedy else []

    @property
    def inner_rows(self) -> list[int]:
        """Rows that have children, ascending."""
        return [row for row, children in enumerate(self.children) if children]

    def node(self, row: int, num_rescued: int = 0) -> Node:
        """What a rule sees at a row."""
        logits, sampling = self.logits[row], self.verifier.sampling
        draft_law = self.draft.law(row, logits.shape[-1])
        draft_log_probs = None if draft_law is None else draft_law.to(logits.device)
        # Stop ids past the vocabulary have no probability to keep.
        stops = sorted(token for token in self.verifier.stop_ids if 0 <= token < logits.shape[-1])
        log_probs = law_log_probs(logits, sampling)
        return Node(
            target_logits=logits,
            target_probs=log_probs.double().exp(),
            draft_log_probs=draft_log_probs,
            warped_draft_log_probs=(
                None
                if draft_log_probs is None
                else lambda: law_log_probs(draft_log_probs, sampling)
            ),
            children=torch.tensor(list(self.children[row]), device=logits.device),
            stops=torch.tensor(stops, dtype=torch.int64, device=logits.device),
            num_rescued=num_rescued,
            target_log_probs=log_probs,
        )

    def decide(self, rule: AcceptanceRule, row: int, node: Node) -> Decision:
        """What a rule decides at a row, without the children that could not be gone on from."""
        decision = rule.decide(node)
        finite = [self.is_finite[child] for child in self.children[row].values()]
        if all(finite):
            return decision
        eligible = decision.eligible & torch.tensor(finite, device=decision.eligible.device)
        rescue_prob = decision.rescue_prob if bool(eligible.any()) else 0.0
        take = decision.take if decision.take is None or finite[decision.take] else None
        return Decision(rescue_prob, eligible, take, decision.descend)


class _Walk:
    """The state of one walk."""

    def __init__(self, tree: ScoredTree, index: int, spent: float) -> None:
        self._tree = tree
        self._verifier = tree.verifier
        self._index = index
        self._spent = spent
        self._path: list[int] = []
        self._tokens: list[EmittedToken] = []

    def run(self) -> Verdict:
        _require_finite(self._tree.is_finite[0])
        row: int | None = 0
        while row is not None:
            if row > 0 and not self._tree.is_finite[row]:
                # Its token was drawn rightly; only what follows it is unknown. As the next root it
                # is scored once more.
                self._path.pop()
                break
            row = self._visit(row)
        return Verdict(self._path, self._tokens)

    def _visit(self, row: int) -> int | None:
        """Emits the token that follows `row`; returns the child that the walk goes on with."""
        index = self._index + len(self._tokens)
        if self._verifier.sampling.is_greedy:
            drawn = self._tree.argmax[row]
        else:
            drawn = self._verifier.draw_finite(self._tree.logits[row], index)
        if isinstance(self._verifier.rule, Exact) or not self._tree.children[row]:
            return self._emit_exact(row, drawn, 0.0)
        if self._verifier.sampling.is_greedy:
            return self._visit_greedy(row, drawn)
        return self._visit_sampled(row, drawn, index)

    def _visit_greedy(self, row: int, drawn: int) -> int | None:
        children = self._tree.children[row]
        is_settled = drawn in children or drawn in self._verifier.stop_ids
        if is_settled and getattr(self._verifier.rule, "only_rescues", False):
            return self._emit_exact(row, drawn, 0.0)
        node, decision = self._decide(row)
        if decision.take is not None:
            token = int(node.children[decision.take])
        elif is_settled:
            return self._emit_exact(row, drawn, 0.0, decision.descend)
        else:
            rescued = greedy_rescue(node, decision)
            if rescued is None:
                return self._emit_exact(row, drawn, 0.0)
            token = int(node.children[rescued])
        cost = regret(node, token)
        if token != drawn and not self._affords(cost):
            return self._emit_exact(row, drawn, 0.0, decision.descend)
        return self._go_on(row, token, drawn, cost)

    def _visit_sampled(self, row: int, drawn: int, index: int) -> int | None:
        children = self._tree.children[row]
        node, decision = self._decide(row)
        cost = decision_cost(node, decision)
        if decision.is_relaxed and not self._affords(cost):
            return self._emit_exact(row, drawn, 0.0, decision.descend)
        if decision.take is not None:
            return self._go_on(row, int(node.children[decision.take]), drawn, cost)
        if drawn in children or drawn in self._verifier.stop_ids or decision.rescue_prob <= 0.0:
            return self._emit_exact(row, drawn, cost, decision.descend)
        coin, exponentials = self._verifier.noise.rescue(index)
        if coin >= decision.rescue_prob:
            return self._emit_exact(row, drawn, cost)
        eligible = node.children[decision.eligible]
        log_probs = node.target_probs[eligible].log()
        winner = race(log_probs, exponentials.to(log_probs.device)[eligible])
        return self._go_on(row, int(eligible[winner]), drawn, cost)

    def _affords(self, cost: float) -> bool:
        """Whether a deviation stays below the budget; 0 affords none, not even a free one."""
        budget = self._verifier.rule.budget
        return budget is None or self._spent + cost < budget

    def _decide(self, row: int) -> tuple[Node, Decision]:
        num_rescued = sum(token.origin == "rescued" for token in self._tokens)
        node = self._tree.node(row, num_rescued)
        return node, self._tree.decide(self._verifier.rule, row, node)

    def _emit_exact(self, row: int, drawn: int, cost: float, descend: bool = True) -> int | None:
        """Emits the exact draw; the walk goes on when it is a child and no stop."""
        children = self._tree.children[row]
        if drawn in children and descend:
            return self._go_on(row, drawn, drawn, cost)
        self._emit(EmittedToken(drawn, "recovered" if children else "bonus", cost, drawn))
        return None

    def _go_on(self, row: int, token: int, drawn: int, cost: float) -> int | None:
        child = self._tree.children[row][token]
        self._path.append(child)
        self._emit(EmittedToken(token, "accepted" if token == drawn else "rescued", cost, drawn))
        return None if token in self._verifier.stop_ids else child

    def _emit(self, token: EmittedToken) -> None:
        self._tokens.append(token)
        self._spent += token.cost
