"""Acceptance rules: what may happen at a tree node when the target's draw is not a child.

The exact step always goes first: a token is drawn from the target's law p, and a draw that is a
child is descended. A relaxed rule then says, for a draw outside the children and the stops, with
which probability r the node is *rescued* and which children E it may be rescued with; the child is
drawn from p restricted to E. Two published forms, `Fuzzy2025` and `Typical`, take a child without a
draw instead and are kept as baselines.

Notation, for one node: C the children, S the stop ids, C' the children outside S with p > 0,
R the mass of p outside C and S. Logarithms are natural, costs are in nats.

    rule = build_rule("fuzzy:0.3:js", budget=1.0)
    decision = rule.decide(node)
    spent += decision_cost(node, decision)
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import ClassVar, Final, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from eagle_fsd.divergence import DIVERGENCES, get_divergence, unknown_name

_ASCII = re.ASCII | re.IGNORECASE  # Python's own float() reads "1_0" and other scripts' digits
Law = Literal["raw", "warped"]
HeadForm = Literal["min_p", "top_n", "nucleus"]


# A node, a decision, and the mathematics that joins them


@dataclass(frozen=True, eq=False)
class Node:
    """What a rule sees at one visited node of the draft tree.

    Attributes:
        target_logits: [V], raw, like all tensors here on a device that has float64.
        target_probs: [V] float32 or float64, p after the warpers. At temperature 0: the law at
            temperature 1 after top-k, top-p and min-p.
        draft_log_probs: [V], log q at temperature 1, -inf where q is zero (reduced draft
            vocabulary); None when the drafter has no law here.
        warped_draft_log_probs: gives [V], log q after the warpers of p, when called; None when the
            drafter has no law here.
        children: [K] int64, K >= 0, distinct token ids in draft order, best first.
        stops: [S] int64, stop ids in [0, V).
        num_rescued: rescues so far in this cycle.
        target_log_probs: [V], log p, where p itself would round to 0; None takes the logarithm of
            `target_probs`.
    """

    target_logits: Tensor
    target_probs: Tensor
    draft_log_probs: Tensor | None
    warped_draft_log_probs: Callable[[], Tensor] | None
    children: Tensor
    stops: Tensor
    num_rescued: int = 0
    target_log_probs: Tensor | None = None

    def after(self, num_rescued: int) -> Node:
        """The same node, reached with `num_rescued` rescues in this cycle."""
        return replace(self, num_rescued=num_rescued)

    @cached_property
    def partition(self) -> Partition:
        """The node's law split into stops, children and the rest, computed once."""
        return partition(self.target_probs, self.children, self.stops)

    @cached_property
    def has_finite_logits(self) -> bool:
        """Whether the logits are free of NaN and +inf and not all -inf, computed once."""
        return math.isfinite(self.target_logits.max().item())

    @cached_property
    def raw_laws(self) -> tuple[Tensor, Tensor]:
        """(log p, log q) at temperature 1, each [V], computed once.

        Raises:
            ValueError: the node has no draft law.
        """
        draft = self.draft_log_probs
        if draft is None:
            raise ValueError("this node has no draft law; use a rule that needs none")
        # in the draft's precision, so that equal logits give equal laws
        return torch.log_softmax(self.target_logits, dim=-1, dtype=draft.dtype), draft

    @cached_property
    def warped_laws(self) -> tuple[Tensor, Tensor]:
        """(log p, log q) after the warpers, each [V], computed once.

        Raises:
            ValueError: the node has no warped draft law.
        """
        if self.warped_draft_log_probs is None:
            raise ValueError("this node has no warped draft law; compare on='raw'")
        draft, target = self.warped_draft_log_probs(), self.target_log_probs
        return (self.target_probs.log() if target is None else target).to(draft.dtype), draft

    def divergence(self, name: str, on: Law = "raw") -> float:
        """D(p, q) in nats by a name that `get_divergence` takes; each is computed once."""
        if (name, on) not in self._divergences:
            laws = self.raw_laws if on == "raw" else self.warped_laws
            self._divergences[name, on] = get_divergence(name)(*laws).item()
        return self._divergences[name, on]

    @cached_property
    def _divergences(self) -> dict[tuple[str, Law], float]:
        return {}


@dataclass(frozen=True, eq=False)
class Decision:
    """What a rule decided for one node, before the node's draw.

    Attributes:
        rescue_prob: r in [0, 1].
        eligible: [K] bool, E as a mask over the children.
        take: index of the child that is taken without a draw; accept-first rules only.
        descend: whether a draw that is a child is descended; if not, it is emitted and the cycle
            ends.
    """

    rescue_prob: float
    eligible: Tensor
    take: int | None = None
    descend: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.rescue_prob <= 1.0:
            raise ValueError(f"rescue_prob must be in [0, 1], got {self.rescue_prob}")
        if self.take is not None and self.rescue_prob > 0.0:
            raise ValueError("a decision either takes a child or may rescue one, not both")

    @property
    def is_relaxed(self) -> bool:
        """Whether the emitted law may differ from the target's; False costs nothing."""
        return self.rescue_prob > 0.0 or self.take is not None

    def exact(self) -> Decision:
        """The same decision without its relaxation, for a node that the budget cannot pay."""
        return replace(self, rescue_prob=0.0, eligible=torch.zeros_like(self.eligible), take=None)


@dataclass(frozen=True, eq=False)
class Partition:
    """The target's law at a node, split as the rules need it.

    Attributes:
        probs: [V] float64, p, sums to 1.
        child_probs: [K] float64, p of the children in draft order.
        eligible: [K] bool, C': children outside the stops with p > 0.
        outside: [V] bool, tokens that are neither children nor stops.
        stop_mass: p(S), children that are stops included.
        child_mass: p(C').
        outside_mass: R, summed over `outside`.
    """

    probs: Tensor
    child_probs: Tensor
    eligible: Tensor
    outside: Tensor
    stop_mass: float
    child_mass: float
    outside_mass: float


def partition(probs: Tensor, children: Tensor, stops: Tensor) -> Partition:
    """Split a law into stops, eligible children and the rest.

    Args:
        probs: [V] float32 or float64, >= 0. It is divided by its sum: the exponential race that
            draws from it does not depend on its scale, so that is the law of the draw.
        children: [K] int64, distinct.
        stops: [S] int64 in [0, V).

    Returns:
        The masks and, read in one transfer from the device, the three masses. NaN in `probs` gives
        NaN masses and an empty C'.
    """
    probs = probs.double()
    probs = probs / probs.sum()
    is_child = torch.zeros_like(probs, dtype=torch.bool)
    is_child[children] = True
    is_stop = torch.zeros_like(is_child)
    is_stop[stops] = True
    outside = ~(is_child | is_stop)
    masses = torch.stack(
        [(probs * mask).sum() for mask in (is_stop, is_child & ~is_stop, outside)]
    ).tolist()
    child_probs = probs[children]
    eligible = (child_probs > 0) & ~is_stop[children]
    return Partition(probs, child_probs, eligible, outside, *masses)


def emitted_law(node: Node, decision: Decision) -> Tensor:
    """Law of the token emitted at a node when the walk follows a decision.

    Args:
        node: the node.
        decision: what a rule decided there.

    Returns:
        [V] float64, sums to 1: p(x) + r R p(x) / p(E) on E, (1 - r) p(x) outside the children and
        the stops, p(x) elsewhere; a point mass where a child is taken without a draw.
    """
    parts = node.partition
    if decision.take is not None:
        law = torch.zeros_like(parts.probs)
        law[node.children[decision.take]] = 1.0
        return law
    law = parts.probs.clone()
    if decision.rescue_prob > 0.0:
        shares = torch.where(decision.eligible, parts.child_probs, 0.0)
        moved = decision.rescue_prob * parts.outside_mass
        law[parts.outside] *= 1.0 - decision.rescue_prob
        law[node.children] += moved * shares / shares.sum()
    return law


def decision_cost(node: Node, decision: Decision) -> float:
    """KL(emitted law || target law) of a decision, in nats, by the closed formula.

    Args:
        node: the node.
        decision: what a rule decided there.

    Returns:
        A number in [0, inf]. A rescue costs
        (p(E) + r R) log(1 + r R / p(E)) + (1 - r) R log(1 - r); a child taken without a draw costs
        -log p(child), inf where the target cannot emit it; an exact decision costs 0.
    """
    if not decision.is_relaxed:
        return 0.0
    parts = node.partition
    if decision.take is not None:
        taken = parts.child_probs[decision.take].item()
        return 0.0 - math.log(taken) if taken > 0.0 else math.inf
    eligible_mass = torch.where(decision.eligible, parts.child_probs, 0.0).sum().item()
    return _rescue_cost(eligible_mass, parts.outside_mass, decision.rescue_prob)


def greedy_rescue(node: Node, decision: Decision) -> int | None:
    """Choose the child that is rescued at temperature 0, where there is no coin.

    Args:
        node: the node; the caller has checked that the target's argmax is neither a child nor a
            stop.
        decision: what a rule decided there.

    Returns:
        Index of the best child of E by p (the first in draft order among equals) when r = 1, or
        when 0 < r < 1 and the emitted law puts at least as much on it as on any refused token:
        p(best) (1 + r R / p(E)) >= (1 - r) max p outside. None otherwise.
    """
    if decision.rescue_prob == 0.0:
        return None
    parts = node.partition
    masses = torch.where(decision.eligible, parts.child_probs, -1.0).tolist()
    best = max(range(len(masses)), key=masses.__getitem__)
    if decision.rescue_prob < 1.0:
        eligible_mass = sum(mass for mass in masses if mass > 0.0)
        raised = masses[best] * (1.0 + decision.rescue_prob * parts.outside_mass / eligible_mass)
        refused = torch.where(parts.outside, parts.probs, 0.0).max().item()
        if raised < (1.0 - decision.rescue_prob) * refused:
            return None
    return best


def regret(node: Node, token: int) -> float:
    """Log-probability that a token gives up against the target's best, at temperature 1.

    Args:
        node: the node, with finite logits.
        token: id in [0, V).

    Returns:
        log p(argmax) - log p(token) >= 0 in nats; taken from the raw logits, whose differences are
        those of the temperature-1 log-probabilities and survive any truncation of p.
    """
    logits = node.target_logits.double()
    return (logits.max() - logits[token]).item()


def _rescue_cost(eligible_mass: float, outside_mass: float, rescue_prob: float) -> float:
    """Cost in nats of rescuing with probability r > 0 within a set of mass p(E) > 0."""
    moved = rescue_prob * outside_mass
    kept = 1.0 - rescue_prob
    raised_cost = (eligible_mass + moved) * math.log1p(moved / eligible_mass)
    refused_cost = kept * outside_mass * math.log(kept) if kept > 0.0 else 0.0
    return max(0.0, raised_cost + refused_cost)


# The interface


@runtime_checkable
class AcceptanceRule(Protocol):
    """A rule that relaxes verification, one node at a time.

    A decision depends on the node alone and is made before the node's draw; with both, the ledger
    of `decision_cost` bounds KL(output || target) of a request.
    """

    @property
    def needs_draft_probs(self) -> bool:
        """Whether `decide` reads the draft's law q."""

    @property
    def budget(self) -> float | None:
        """Nats that a request may spend, kept by the decoder; None for no limit."""

    @property
    def is_lossless(self) -> bool:
        """Whether the knob is at the value where every decision is exact."""

    @property
    def spec(self) -> str:
        """The written form without the budget, such as "fuzzy:0.3:js"; `build_rule` reads it."""

    def decide(self, node: Node) -> Decision:
        """Decide r and E at a node.

        Raises:
            ValueError: the rule needs a draft law and the node has none.
        """


@dataclass(frozen=True)
class _Rule(ABC):
    """A rule whose knobs are its fields and are written in their order."""

    name: ClassVar[str]
    needs_draft_probs: ClassVar[bool] = False
    # Whether a node whose exact draw is a child is left to that draw, whatever is decided there.
    only_rescues: ClassVar[bool] = False

    @property
    @abstractmethod
    def budget(self) -> float | None: ...

    @property
    @abstractmethod
    def is_lossless(self) -> bool: ...

    @abstractmethod
    def decide(self, node: Node) -> Decision: ...

    @property
    def spec(self) -> str:
        parts = [_write_knob(knob.name, getattr(self, knob.name)) for knob in _knobs(type(self))]
        return ":".join([self.name, *(part for part in parts if part is not None)])


@dataclass(frozen=True)
class Exact(_Rule):
    """Verify without loss: r = 0 everywhere. No knob; always lossless; needs no q."""

    name: ClassVar[str] = "exact"
    budget: ClassVar[None] = None

    @property
    def is_lossless(self) -> bool:
        return True

    def decide(self, node: Node) -> Decision:
        return _exact_decision(node)


@dataclass(frozen=True)
class _RelaxedRule(_Rule):
    """A rule with a budget that relaxes only where the node lets it."""

    budget: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_number and str(knob.type).startswith("float"):
                # a numpy scalar or a fraction would carry its own arithmetic into the ledger
                object.__setattr__(self, knob.name, _as_float(knob.name, value))
        if self.budget is not None:
            _check_number("budget", self.budget)
            _check_domain("budget", self.budget, self.budget >= 0, "nats >= 0; 0 is exact")

    def decide(self, node: Node) -> Decision:
        if node.children.numel() == 0:
            return self._refuse(node)
        if self.needs_draft_probs and node.draft_log_probs is None:
            raise ValueError(
                f"rule {self.spec!r} compares the target with the draft's law, and this node has "
                "none; use a rule that needs none, such as 'coverage' or 'lenience'"
            )
        if self.is_lossless or not node.has_finite_logits:
            return self._refuse(node)
        return self._relax(node)

    def _refuse(self, node: Node) -> Decision:
        """The decision at a node where the rule does not apply."""
        return _exact_decision(node)

    @abstractmethod
    def _relax(self, node: Node) -> Decision:
        """Decide at a node with children, finite logits and the law that the rule needs."""


@dataclass(frozen=True)
class _RescueRule(_RelaxedRule):
    """A rule in rescue order: (r, E) with E within C'."""

    only_rescues: ClassVar[bool] = True

    def _relax(self, node: Node) -> Decision:
        parts = node.partition
        if not (parts.outside_mass > 0.0 and parts.child_mass > 0.0):
            return self._refuse(node)
        eligible = self._eligible(node)
        rescue_prob = self._rescue_prob(node)
        if not rescue_prob > 0.0 or not eligible.any():
            return self._refuse(node)
        return Decision(min(rescue_prob, 1.0), eligible)

    def _eligible(self, node: Node) -> Tensor:
        """E as a mask [K] bool: all of C' unless a rule says less."""
        return node.partition.eligible

    @abstractmethod
    def _rescue_prob(self, node: Node) -> float:
        """The rescue probability r at a node with R > 0 and p(C') > 0; clamped to [0, 1] later."""


# Rules in rescue order


@dataclass(frozen=True)
class Fuzzy(_RescueRule):
    """Fuzzy speculative decoding: rescue where target and draft agree, D(p, q) < T. Needs q.

    Attributes:
        threshold: T in [0, inf], in the divergence's unit (nats; `tv` has none). 0 is lossless; inf
            rescues wherever D is not NaN, an infinite D included.
        divergence: a name that `get_divergence` takes, such as "js" or "js@50".
        on: "raw" compares softmax(logits) with q at temperature 1, "warped" both after the warpers.
        budget: nats that a request may spend, or None.

    Source: Holsman et al. 2025 (arXiv:2502.20704), in the rescue order of r-fuzzy
        (arXiv:2607.08690, Eq. 10).
    Differs: the papers draft a chain; here one verdict serves all children of a node.
    """

    name: ClassVar[str] = "fuzzy"
    needs_draft_probs: ClassVar[bool] = True
    threshold: float
    divergence: str = "js"
    on: Law = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_threshold(self.threshold, "0 is lossless, inf never recovers")
        get_divergence(self.divergence)
        _check_choice("law", self.on, get_args(Law))

    @property
    def is_lossless(self) -> bool:
        return self.threshold == 0

    def _rescue_prob(self, node: Node) -> float:
        value = node.divergence(self.divergence, self.on)
        is_close = value < self.threshold or (self.threshold == math.inf and value == math.inf)
        return 1.0 if is_close else 0.0


@dataclass(frozen=True)
class Coverage(_RescueRule):
    """Rescue where the children cover the target's law: the cost of r = 1, E = C' is < B. No q.

    Attributes:
        bound: B in [0, inf], nats per node. 0 is lossless.
        budget: nats that a request may spend, or None.
    """

    name: ClassVar[str] = "coverage"
    bound: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("bound", self.bound)
        _check_domain("bound", self.bound, self.bound >= 0, "nats >= 0; 0 is lossless")

    @property
    def is_lossless(self) -> bool:
        return self.bound == 0

    def _rescue_prob(self, node: Node) -> float:
        parts = node.partition
        return 1.0 if _rescue_cost(parts.child_mass, parts.outside_mass, 1.0) < self.bound else 0.0


@dataclass(frozen=True)
class HeadSet(_RescueRule):
    """Rescue with children in the head of the target's law. Needs no q.

    Tokens of equal probability are in the head together.

    Attributes:
        alpha: by form. "min_p": a <= 1, the head is p >= (1 - a) max p; a < 0 is lossless. "top_n":
            a whole number n >= 0, the n most probable tokens; 0 is lossless. "nucleus": a in
            [0, 1], the smallest set of most probable tokens of mass a; 0 is lossless.
        form: "min_p", "top_n" or "nucleus".
        budget: nats that a request may spend, or None.

    Source: min_p as in speculative cascades (arXiv:2405.19261), top_n as TensorRT-LLM's relaxed
        acceptance, nucleus as in arXiv:2610.07822.
    Differs: the set only qualifies children for a rescue; nothing is accepted outright.
    """

    name: ClassVar[str] = "head_set"
    alpha: float
    form: HeadForm = "min_p"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("alpha", self.alpha)
        _check_choice("form", self.form, get_args(HeadForm))
        allowed, domain = {
            "min_p": (self.alpha <= 1, "<= 1 for 'min_p'; below 0 is lossless"),
            "top_n": (
                self.alpha >= 0 and float(self.alpha).is_integer(),
                "a whole number >= 0 for 'top_n'; 0 is lossless",
            ),
            "nucleus": (0 <= self.alpha <= 1, "in [0, 1] for 'nucleus'; 0 is lossless"),
        }[self.form]
        _check_domain("alpha", self.alpha, allowed, domain)

    @property
    def is_lossless(self) -> bool:
        return self.alpha < 0 if self.form == "min_p" else self.alpha == 0

    def _eligible(self, node: Node) -> Tensor:
        parts = node.partition
        if self.form == "min_p":
            in_head = parts.child_probs >= (1.0 - self.alpha) * parts.probs.max()
        else:
            is_better = parts.probs > parts.child_probs[:, None]  # [K, V]
            if self.form == "top_n":
                in_head = is_better.sum(-1) < self.alpha
            else:
                in_head = (is_better * parts.probs).sum(-1) < self.alpha
        return parts.eligible & in_head

    def _rescue_prob(self, node: Node) -> float:  # noqa: ARG002 - the set alone decides
        return 1.0


@dataclass(frozen=True)
class Lenience(_RescueRule):
    """Raise the chance c of going on to min(1, c / l). Needs no q.

    c = p(C') / (1 - p(S)) and r = (min(1, c / l) - c) / (1 - c). No child's probability is raised
    by more than 1 / l.

    Attributes:
        leniency: l in (0, 1]. 1 is lossless.
        budget: nats that a request may spend, or None.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), appendix.
    Differs: the paper scales the ratio p / q of one drawn token; children here are a deterministic
        set, and c is the ratio's counterpart.
    """

    name: ClassVar[str] = "lenience"
    leniency: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("leniency", self.leniency)
        _check_domain("leniency", self.leniency, 0 < self.leniency <= 1, "in (0, 1]; 1 is lossless")

    @property
    def is_lossless(self) -> bool:
        return self.leniency == 1

    def _rescue_prob(self, node: Node) -> float:
        # min(1, c/l) - c = min(1 - c, c (1 - l)/l) and c/(1 - c) = p(C')/R: no cancellation
        return (1.0 - self.leniency) / self.leniency * _odds_of_going_on(node)


@dataclass(frozen=True)
class Cactus(_RescueRule):
    """Raise the chance c of going on to min(1, c + sqrt(2 d c (1 - c))). Needs no q.

    c = p(C') / (1 - p(S)) and r = (min(1, c + sqrt(2 d c (1 - c))) - c) / (1 - c).

    Attributes:
        delta: d in [0, inf]. 0 is lossless.
        budget: nats that a request may spend, or None.

    Source: arXiv:2604.04987.
    Differs: the paper raises the probability of one drawn token; here that of the children's set.
    """

    name: ClassVar[str] = "cactus"
    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("delta", self.delta)
        _check_domain("delta", self.delta, self.delta >= 0, ">= 0; 0 is lossless")

    @property
    def is_lossless(self) -> bool:
        return self.delta == 0

    def _rescue_prob(self, node: Node) -> float:
        # sqrt(2 d c (1 - c)) / (1 - c) = sqrt(2 d c/(1 - c)) and c/(1 - c) = p(C')/R
        return math.sqrt(2.0 * self.delta * _odds_of_going_on(node))


@dataclass(frozen=True)
class CascadeOpt(_RescueRule):
    """Rescue where the draft is sure enough: max q >= max p - a TV(p, q). Needs q.

    p and q are compared at temperature 1 on raw logits, as in `Fuzzy`.

    Attributes:
        alpha: a in [-inf, inf). Only -inf is lossless; 0 and above rescue wherever the draft is at
            least as sure as the target.
        budget: nats that a request may spend, or None.

    Source: Narasimhan et al. 2024 (arXiv:2405.19261), the OPT rule, in rescue order.
    """

    name: ClassVar[str] = "cascade_opt"
    needs_draft_probs: ClassVar[bool] = True
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("alpha", self.alpha)
        _check_domain("alpha", self.alpha, self.alpha < math.inf, "< inf; -inf is lossless")

    @property
    def is_lossless(self) -> bool:
        return self.alpha == -math.inf

    def _rescue_prob(self, node: Node) -> float:
        target, draft = node.raw_laws
        best_target, best_draft = target.max().exp().item(), draft.max().exp().item()
        return 1.0 if best_draft >= best_target - self.alpha * node.divergence("tv") else 0.0


@dataclass(frozen=True)
class Regret(_RescueRule):
    """Rescue with children whose log-probability is within a gap of the best. Needs no q.

    E holds the x in C' with log max p - log p(x) < g.

    Attributes:
        gap: g in [0, inf], nats. 0 is lossless.
        max_rescues: most rescues per cycle, >= 0; None for no limit, 0 is lossless.
        budget: nats that a request may spend, or None.

    Source: arXiv:2608.03447.
    Differs: the gap is not divided by the tokens left in the block, as a tree has no block length.
    """

    name: ClassVar[str] = "regret"
    gap: float
    max_rescues: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("gap", self.gap)
        _check_domain("gap", self.gap, self.gap >= 0, "nats >= 0; 0 is lossless")
        limit = self.max_rescues
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, Integral):
            raise TypeError(f"max_rescues must be a whole number >= 0 or None, got {limit!r}")
        _check_domain("max_rescues", limit, limit >= 0, ">= 0, or None for no limit")
        object.__setattr__(self, "max_rescues", int(limit))

    @property
    def is_lossless(self) -> bool:
        return self.gap == 0 or self.max_rescues == 0

    def _eligible(self, node: Node) -> Tensor:
        parts = node.partition
        return parts.eligible & (parts.probs.max().log() - parts.child_probs.log() < self.gap)

    def _rescue_prob(self, node: Node) -> float:
        may_rescue = self.max_rescues is None or node.num_rescued < self.max_rescues
        return 1.0 if may_rescue else 0.0


# Published accept-first rules, kept as baselines


@dataclass(frozen=True)
class Fuzzy2025(_RelaxedRule):
    """Take the draft's best child without a draw where D(p, q) <= T, else draw from p. Needs q.

    The child is taken whatever the target thinks of it, a stop or a token with p = 0 included.
    Never lossless: T = 0 still takes the child where p = q.

    Attributes:
        threshold: T in [0, inf], in the divergence's unit; inf takes the child wherever D is not
            NaN.
        divergence: a name that `get_divergence` takes; the published `js_div` is "ag_mean".
        chain: False descends a draw that is a child. True ends the cycle there, as the 2025 code
            does; written "chain".
        budget: nats that a request may spend, or None.

    Source: Holsman et al. 2025 (arXiv:2502.20704) and the authors' 2025 code.
    Differs: unless `chain`, a draw that is a child is descended, which keeps the law.
    """

    name: ClassVar[str] = "fuzzy_2025"
    needs_draft_probs: ClassVar[bool] = True
    threshold: float
    divergence: str
    chain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_threshold(self.threshold, "0 takes a child only where the laws are equal")
        get_divergence(self.divergence)
        if not isinstance(self.chain, bool):
            raise TypeError(
                f"chain must be True or False (written 'chain' or left out), got {self.chain!r}"
            )

    @property
    def is_lossless(self) -> bool:
        return False

    def _refuse(self, node: Node) -> Decision:
        return replace(_exact_decision(node), descend=not self.chain)

    def _relax(self, node: Node) -> Decision:
        refusal = self._refuse(node)
        is_close = node.divergence(self.divergence) <= self.threshold
        return replace(refusal, take=0) if is_close else refusal


@dataclass(frozen=True)
class Typical(_RelaxedRule):
    """Take the first child with p(x) > min(epsilon, delta exp(-H(p))), else draw from p. No q.

    Attributes:
        epsilon: in [0, 1].
        delta: in [0, inf]. Lossless only with epsilon 1 and delta inf, where nothing is taken.
        budget: nats that a request may spend, or None.

    Source: Cai et al. 2024, Medusa (arXiv:2401.10774), section 2.3.1.
    Differs: Medusa keeps the longest of all accepted paths, this rule the first child in draft
        order at each node; Medusa's first token is the argmax unconditionally, here it is drawn
        like any other; at temperature 0 Medusa falls back to exact matching, here the law at
        temperature 1 is tested.
    """

    name: ClassVar[str] = "typical"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("epsilon", self.epsilon)
        _check_domain("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "in [0, 1]")
        _check_number("delta", self.delta)
        _check_domain("delta", self.delta, self.delta >= 0, ">= 0")

    @property
    def is_lossless(self) -> bool:
        return self.epsilon == 1 and self.delta == math.inf

    def _relax(self, node: Node) -> Decision:
        parts = node.partition
        entropy = torch.special.entr(parts.probs).sum().item()
        floor = min(self.epsilon, self.delta * math.exp(-entropy))
        masses = parts.child_probs.tolist()
        take = next((index for index, mass in enumerate(masses) if mass > floor), None)
        return replace(self._refuse(node), take=take)


def _exact_decision(node: Node) -> Decision:
    return Decision(0.0, torch.zeros_like(node.children, dtype=torch.bool))


def _odds_of_going_on(node: Node) -> float:
    """p(C') / R: the odds that a draw outside the stops is an eligible child."""
    return node.partition.child_mass / node.partition.outside_mass


# Validation of knobs


def _check_number(knob: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{knob} must be a number, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{knob} must be a number, got nan")


def _as_float(knob: str, value: Real) -> float:
    try:
        return float(value) + 0.0  # -0.0 becomes 0.0
    except OverflowError as error:
        raise ValueError(f"{knob} is too large for a number; write inf for no limit") from error


def _check_domain(knob: str, value: object, is_allowed: bool, domain: str) -> None:
    if not is_allowed:
        raise ValueError(f"{knob} must be {domain}; got {value!r}")


def _check_threshold(value: float, meaning: str) -> None:
    _check_number("threshold", value)
    _check_domain("threshold", value, value >= 0, f">= 0; {meaning}")


def _check_choice(kind: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{kind} must be one of {list(allowed)}, got {value!r}")
    if value not in allowed:
        raise unknown_name(kind, value, allowed)


# Names, the written form, the command line

RULES: Final[dict[str, type[_Rule]]] = {
    rule.name: rule
    for rule in (
        Exact,
        Fuzzy,
        Coverage,
        HeadSet,
        Lenience,
        Cactus,
        CascadeOpt,
        Regret,
        Fuzzy2025,
        Typical,
    )
}


def build_rule(rule: str | AcceptanceRule, **knobs: object) -> AcceptanceRule:
    """Make a rule from an object, a name with knobs, or the written form.

    Args:
        rule: a rule (returned as it is), a name ("fuzzy"), or a name with its knobs in order
            ("fuzzy:0.3:js", "regret:0.5:2", "fuzzy_2025:0.4:ag_mean:chain").
        knobs: the rule's fields by name; with a written form only those not written, such as
            `budget`.

    Returns:
        The rule, validated.

    Raises:
        TypeError: `rule` is neither a string nor a rule, or a knob is of the wrong kind.
        ValueError: unknown rule, divergence or knob, a knob that is missing, given twice or out of
            its domain.
    """
    if not isinstance(rule, str):
        return _checked_rule(rule, knobs)
    name, *written = rule.split(":")
    if name not in RULES:
        raise unknown_name("acceptance rule", name, RULES)
    rule_class = RULES[name]
    order = _knobs(rule_class)
    if len(written) > len(order):
        raise ValueError(f"rule {rule!r} has too many parts; write {_written_form(rule_class)!r}")
    values = {
        knob.name: _read_knob(knob.name, text) for knob, text in zip(order, written, strict=False)
    }
    for knob, value in knobs.items():
        _check_knob_name(rule_class, knob)
        if knob in values:
            raise ValueError(f"{knob} is given twice: {rule!r} and {knob}={value!r}")
        values[knob] = value
    missing = [knob.name for knob in order if _is_required(knob) and knob.name not in values]
    if missing:
        raise ValueError(
            f"rule {name!r} needs {' and '.join(missing)}; write {_written_form(rule_class)!r}"
        )
    make: Callable[..., AcceptanceRule] = rule_class
    return make(**values)


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --rule, --threshold, --divergence and --budget on a parser."""
    forms = ", ".join(_written_form(rule_class) for rule_class in RULES.values())
    group = parser.add_argument_group("acceptance rule")
    group.add_argument(
        "--rule", default="exact", metavar="RULE", help=f"a name or a written form: {forms}"
    )
    group.add_argument(
        "--threshold", type=float, metavar="T", help="largest divergence that is still rescued"
    )
    group.add_argument(
        "--divergence",
        metavar="NAME",
        help=f"one of {', '.join(DIVERGENCES)}; NAME@K for the top-k form (js where not given)",
    )
    group.add_argument(
        "--budget", type=float, metavar="NATS", help="KL from the target that a request may spend"
    )


def rule_from_args(args: argparse.Namespace) -> AcceptanceRule:
    """Make the rule that the flags of `add_rule_arguments` ask for.

    Raises:
        TypeError: as `build_rule`.
        ValueError: as `build_rule`; also a flag that the chosen rule does not take.
    """
    flags = {knob: getattr(args, knob) for knob in ("threshold", "divergence", "budget")}
    return build_rule(args.rule, **{k: value for k, value in flags.items() if value is not None})


def _checked_rule(rule: object, knobs: dict[str, object]) -> AcceptanceRule:
    if isinstance(rule, type) or not isinstance(rule, AcceptanceRule):
        raise TypeError(
            f"rule must be a rule object such as Exact(), or one of {list(RULES)} as a string, "
            f"got {rule!r}"
        )
    if knobs:
        raise ValueError(
            f"rule {rule.spec!r} is built already and takes no {' or '.join(knobs)}; "
            "give them where it is built"
        )
    return rule


def _check_knob_name(rule_class: type[_Rule], knob: str) -> None:
    names = [known.name for known in fields(rule_class)]
    if knob in names:
        return
    takes = f"it takes {sorted(names)}" if names else "it takes none"
    nearest = difflib.get_close_matches(knob, names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"rule {rule_class.name!r} has no knob {knob!r}; {takes}{hint}")


def _knobs(rule_class: type[_Rule]) -> list[Field[object]]:
    """The fields that the written form holds, in its order."""
    return [knob for knob in fields(rule_class) if not knob.kw_only]


def _is_required(knob: Field[object]) -> bool:
    return knob.default is MISSING


def _written_form(rule_class: type[_Rule]) -> str:
    """The shape of a rule's written form: "fuzzy:THRESHOLD[:DIVERGENCE[:ON]]"."""
    form, num_optional = rule_class.name, 0
    for knob in _knobs(rule_class):
        shown = knob.name if knob.default is False else knob.name.upper()
        if _is_required(knob):
            form += f":{shown}"
        else:
            form += f"[:{shown}"
            num_optional += 1
    return form + "]" * num_optional


def _read_knob(name: str, text: str) -> object:
    """A written knob: a number where it reads as one; a switch is written by its own name."""
    if text == name:
        return True
    if re.fullmatch(r"[+-]?\d{1,300}", text, re.ASCII):
        return int(text)
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan", text, _ASCII)
    return float(text) if is_number else text


def _write_knob(name: str, value: object) -> str | None:
    """The inverse of `_read_knob`; None for a last knob at the default that goes unwritten."""
    if value is None or value is False or value == "raw":
        return None
    if value is True:
        return name
    return str(value).removesuffix(".0")
