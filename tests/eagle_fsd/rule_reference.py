"""Slow, clear references for divergences and acceptance rules: plain Python, one number at a time.

Nothing here uses the library. Laws are lists of probabilities; a rule is given by its written form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Case:
    """One node: laws of V tokens, distinct children best first, stop ids."""

    target: list[float]
    draft: list[float]
    children: list[int]
    stops: list[int]
    num_rescued: int = 0

    @property
    def eligible(self) -> list[int]:
        return [x for x in self.children if x not in self.stops and self.target[x] > 0.0]

    @property
    def refused(self) -> list[int]:
        taken = set(self.children) | set(self.stops)
        return [x for x in range(len(self.target)) if x not in taken]

    @property
    def stop_mass(self) -> float:
        return math.fsum(self.target[x] for x in set(self.stops))

    @property
    def refused_mass(self) -> float:
        return math.fsum(self.target[x] for x in self.refused)


@dataclass(frozen=True)
class Choice:
    """A rule's decision: rescue probability, eligible tokens, token taken without a draw."""

    rescue_prob: float
    eligible: list[int]
    take: int | None = None


def kl(first: list[float], second: list[float]) -> float:
    if any(a > 0.0 and b == 0.0 for a, b in zip(first, second, strict=True)):
        return math.inf
    terms = [a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0.0]
    return max(0.0, math.fsum(terms))


def divergence(name: str, target: list[float], draft: list[float]) -> float:
    base, _, k = name.partition("@")
    if k:
        top = sorted(range(len(target)), key=lambda x: -target[x])[: int(k)]
        rest = [x for x in range(len(target)) if x not in top]
        target, draft = (
            [law[x] for x in top] + [math.fsum(law[x] for x in rest)] for law in (target, draft)
        )
    mean = [(a + b) / 2 for a, b in zip(target, draft, strict=True)]
    return {
        "kl_draft_target": lambda: kl(draft, target),
        "kl_target_draft": lambda: kl(target, draft),
        "js": lambda: 0.5 * kl(target, mean) + 0.5 * kl(draft, mean),
        "tv": lambda: 0.5 * math.fsum(abs(a - b) for a, b in zip(target, draft, strict=True)),
        "ag_mean": lambda: 0.5 * kl(mean, target) + 0.5 * kl(mean, draft),
    }[base]()


def choose(written: str, case: Case) -> Choice:
    """What a rule decides, from the definitions."""
    name, *knobs = written.split(":")
    p, q = case.target, case.draft
    if name == "exact" or not case.children:
        return Choice(0.0, [])
    if name == "fuzzy_2025":
        is_close = divergence(knobs[1], p, q) <= float(knobs[0])
        return Choice(0.0, [], case.children[0] if is_close else None)
    if name == "typical":
        entropy = -math.fsum(x * math.log(x) for x in p if x > 0.0)
        floor = min(float(knobs[0]), float(knobs[1]) * math.exp(-entropy))
        typical = [x for x in case.children if p[x] > floor]
        return Choice(0.0, [], typical[0] if typical else None)
    if not case.eligible or case.refused_mass == 0.0:
        return Choice(0.0, [])
    eligible = case.eligible
    if name == "head_set":
        eligible = [x for x in eligible if x in _head(p, float(knobs[0]), knobs[1])]
    if name == "regret":
        eligible = [x for x in eligible if math.log(max(p)) - math.log(p[x]) < float(knobs[0])]
    rescue_prob = min(1.0, max(0.0, _rescue_prob(name, knobs, case))) if eligible else 0.0
    return Choice(rescue_prob, eligible if rescue_prob > 0.0 else [])


def _rescue_prob(name: str, knobs: list[str], case: Case) -> float:
    p, q = case.target, case.draft
    child_mass = math.fsum(p[x] for x in case.eligible)
    on_share = child_mass / (1.0 - case.stop_mass)  # c
    knob = float(knobs[0])
    if name == "lenience":
        return (min(1.0, on_share / knob) - on_share) / (1.0 - on_share)
    if name == "cactus":
        raised = min(1.0, on_share + math.sqrt(2.0 * knob * on_share * (1.0 - on_share)))
        return (raised - on_share) / (1.0 - on_share)
    is_rescued = True
    if name == "fuzzy":
        is_rescued = knob == math.inf or divergence(knobs[1], p, q) < knob
    elif name == "coverage":
        off_stops = 1.0 - case.stop_mass
        is_rescued = off_stops * math.log(off_stops / child_mass) < knob
    elif name == "cascade_opt":
        is_rescued = max(q) >= max(p) - knob * divergence("tv", p, q)
    elif name == "regret":
        is_rescued = len(knobs) < 2 or case.num_rescued < int(knobs[1])
    return float(is_rescued)


def _head(p: list[float], alpha: float, form: str) -> set[int]:
    if form == "min_p":
        return {x for x in range(len(p)) if p[x] >= (1.0 - alpha) * max(p)}
    best_first = sorted(range(len(p)), key=lambda x: -p[x])
    if form == "top_n":
        return set(best_first[: int(alpha)])
    head: set[int] = set()
    for x in best_first:
        if math.fsum(p[y] for y in head) >= alpha:
            break
        head.add(x)
    return head


@dataclass(frozen=True)
class Outcome:
    """The law of the emitted token, and the chance of recovering with a token that is no stop."""

    law: list[float]
    recovered: float


def enumerate_outcomes(case: Case, choice: Choice) -> Outcome:
    """Walk every draw x coin x rescued child of a node and add up what is emitted."""
    law = [0.0] * len(case.target)
    if choice.take is not None:
        law[choice.take] = 1.0
        return Outcome(law, 0.0)
    recovered = 0.0
    eligible_mass = math.fsum(case.target[x] for x in choice.eligible)
    coins = ((True, choice.rescue_prob), (False, 1.0 - choice.rescue_prob))
    for (drawn, chance), (is_rescued, coin) in product(enumerate(case.target), coins):
        weight = chance * coin
        if drawn in case.children or drawn in case.stops:
            law[drawn] += weight
        elif not is_rescued:
            law[drawn] += weight
            recovered += weight
        elif weight > 0.0:
            for child in choice.eligible:
                law[child] += weight * case.target[child] / eligible_mass
    return Outcome(law, recovered)
