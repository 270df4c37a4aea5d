"""What a speed run says: the figures of each arm, and the tables for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle_fsd.stats import PHASES, GenerationStats
from evaluation.arms import HF, PLAIN, Answer, Arm
from evaluation.statistics import bootstrap_median

_LEDGERS = ("kl_spent", "regret_spent")


@dataclass(frozen=True)
class Measurement:
    """One question, answered by every arm.

    Attributes:
        question_id: the question.
        num_prompt_tokens: P, the same in every arm.
        answers: by arm.
        peak_memory_bytes: the most that the process, or the device, had held by then.
    """

    question_id: int | str
    num_prompt_tokens: int
    answers: dict[str, Answer]
    peak_memory_bytes: int = 0

    def has_same_ids(self, arm: str) -> bool | None:
        """Whether an arm gave the ids of plain decoding; None where that was not measured."""
        plain = self.answers.get(PLAIN)
        return None if plain is None else self.answers[arm].token_ids == plain.token_ids

    def to_line(self) -> bytes:
        """All of it as JSON, which has no infinity: "inf" then."""
        arms = {
            name: {
                "token_ids": answer.token_ids,
                "seconds": answer.seconds,
                "stats": answer.stats and {k: _json(v) for k, v in vars(answer.stats).items()},
            }
            for name, answer in self.answers.items()
        }
        return json.dumps(vars(self) | {"answers": arms}).encode("ascii")

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Measurement:
        """What `to_line` wrote, parsed.

        Raises:
            ValueError: for anything else.
        """
        try:
            answers = {name: _answer(each) for name, each in fields["answers"].items()}
            return cls(**(fields | {"answers": answers}))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError("not a measured question; mend or remove it") from error

    def to_dict(self) -> dict[str, Any]:
        """Tokens and seconds of each arm, for JSON."""
        return {
            "question_id": self.question_id,
            "num_prompt_tokens": self.num_prompt_tokens,
            "arms": {
                name: {
                    "tokens": len(answer.token_ids),
                    "seconds": answer.seconds,
                    "cycles": answer.stats.num_cycles if answer.stats else None,
                    "same_ids_as_plain": self.has_same_ids(name),
                }
                for name, answer in self.answers.items()
            },
        }


def _json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _answer(fields: dict[str, Any]) -> Answer:
    answer = Answer(list(fields["token_ids"]), fields["seconds"], _stats(fields["stats"]))
    if not answer.token_ids or not 0.0 < answer.seconds < math.inf:
        raise ValueError("an answer has a token and takes time")
    return answer


def _stats(fields: dict[str, Any] | None) -> GenerationStats | None:
    if fields is None:
        return None
    # What a ledger holds may be infinite.
    ledgers = {k: float(v) for k, v in fields.items() if isinstance(v, str) and k in _LEDGERS}
    return GenerationStats(**(fields | ledgers))


def baseline_of(names: Sequence[str]) -> str:
    """The arm that the others are divided by: hf where it is measured, else the first."""
    return HF if HF in names else names[0]


def arm_figures(
    arm: Arm, measured: Sequence[Measurement], baseline: str, *, seed: int, has_phases: bool
) -> dict[str, Any]:
    """One arm's figures over the questions so far, as they stand in speed.json.

    Args:
        arm: whose figures.
        measured: one question at least.
        baseline: name of the arm to divide by.
        seed: of the bootstrap.
        has_phases: whether the phases mean something.

    Returns:
        "ratio" {"median", "low", "high"} of (baseline seconds per token) / (the arm's), by
        question; "tokens_per_second" (all tokens / all seconds); "acceptance_length" over all
        cycles ((tokens - questions) / cycles) and "acceptance_length_macro", the mean of the
        questions' own; "acceptance_by_depth"; "cost_per_token" of a relaxed rule, nats of KL when
        sampling and of regret at temperature 0, "inf" where it is infinite; "phases_s";
        "same_ids_as_plain", a share of the questions; "num_tokens", "seconds"; "attention" of the
        target. None stands for what an arm does not have.
    """
    answers = [each.answers[arm.name] for each in measured]
    ratios = [
        each.answers[baseline].seconds_per_token / each.answers[arm.name].seconds_per_token
        for each in measured
    ]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    same_ids = [each.has_same_ids(arm.name) for each in measured]
    return {
        "ratio": asdict(bootstrap_median(ratios, seed)),
        "tokens_per_second": num_tokens / seconds,
        **(_acceptance(answers) if arm.is_drafting else _NO_ACCEPTANCE),
        "cost_per_token": _cost_per_token(answers),
        "phases_s": _phases(answers) if has_phases else None,
        "same_ids_as_plain": None if None in same_ids else sum(map(bool, same_ids)) / len(same_ids),
        "num_tokens": num_tokens,
        "seconds": seconds,
        "attention": arm.attention,
    }


_NO_ACCEPTANCE = dict.fromkeys(
    ("acceptance_length", "acceptance_length_macro", "acceptance_by_depth")
)


def _acceptance(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens per cycle and rates by depth; answers of one token have no cycle and count nowhere."""
    stats = [answer.stats for answer in answers if answer.stats is not None]
    num_cycles = sum(each.num_cycles for each in stats)
    lengths = [each.acceptance_length for each in stats if each.acceptance_length is not None]
    depths = range(max((len(each.tried_by_depth) for each in stats), default=0))
    tried, accepted = (
        [sum(counts[depth] for counts in rows if depth < len(counts)) for depth in depths]
        for rows in (
            [each.tried_by_depth for each in stats],
            [each.accepted_by_depth for each in stats],
        )
    )
    return {
        "acceptance_length": (
            sum(each.num_tokens - 1 for each in stats) / num_cycles if num_cycles else None
        ),
        "acceptance_length_macro": sum(lengths) / len(lengths) if lengths else None,
        "acceptance_by_depth": [a / t for a, t in zip(accepted, tried, strict=True) if t],
    }


def _cost_per_token(answers: Sequence[Answer]) -> float | str | None:
    stats = [answer.stats for answer in answers if answer.stats is not None]
    spent = [each.regret_spent if each.kl_spent is None else each.kl_spent for each in stats]
    if not spent or None in spent:
        return None
    cost: float | str = _json(sum(filter(None, spent)) / sum(each.num_tokens for each in stats))
    return cost


def _phases(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Seconds by phase; "rest" is what no phase of the decoder accounts for."""
    stats = [answer.stats for answer in answers if answer.stats is not None]
    if not stats:
        return None
    phases = {"prefill": sum(each.prefill_s for each in stats)}
    phases |= {phase: sum(each.phases_s[phase] for each in stats) for phase in PHASES}
    return phases | {"rest": sum(answer.seconds for answer in answers) - sum(phases.values())}


def table(report: dict[str, Any]) -> str:
    """Speed.json for people: one line an arm, and one more where its phases are known."""
    arms: dict[str, dict[str, Any]] = report["arms"]
    width = max(len("arm"), *map(len, arms))
    lines = [
        f"{'arm':<{width}}{'ratio':>8}{'95% interval':>16}{'tokens/s':>10}{'length':>8}"
        f"{'nats/token':>12}{'same ids':>10}"
    ]
    for name, figures in arms.items():
        ratio = figures["ratio"]
        interval = f"{ratio['low']:.2f}..{ratio['high']:.2f}"
        lines.append(
            f"{name:<{width}}{ratio['median']:>8.2f}{interval:>16}"
            f"{figures['tokens_per_second']:>10.1f}{_shown(figures['acceptance_length'], '.2f'):>8}"
            f"{_shown(figures['cost_per_token'], '.3f'):>12}"
            f"{_shown(figures['same_ids_as_plain'], '.0%'):>10}"
        )
    timed = {name: each["phases_s"] for name, each in arms.items() if each["phases_s"]}
    if timed:
        phases = list(next(iter(timed.values())))
        lines += ["", f"{'seconds':<{width}}" + "".join(f"{phase:>10}" for phase in phases)]
        for name, seconds in timed.items():
            lines.append(
                f"{name:<{width}}" + "".join(f"{seconds[phase]:>10.2f}" for phase in phases)
            )
    memory = report["peak_memory"]
    lines += [
        "",
        _summary(report),
        f"peak memory {memory['bytes'] / 2**20:.0f} MiB, {memory['of']}",
    ]
    return "\n".join([*lines, *report["notes"]])


def _summary(report: dict[str, Any]) -> str:
    """How many questions the table is about."""
    parts = [
        f"{report['num_questions']} of {report['num_planned']} questions",
        f"ratios to {report['baseline']}",
    ]
    if report["num_left_out"]:
        parts.append(f"{report['num_left_out']} left out: the prompt does not fit the context")
    return ", ".join(parts)


def _shown(value: float | str | None, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)
