"""What a report is made of: figures with intervals, and the folders of speed and replay runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evaluation.arms import arm_spec
from evaluation.replay import REPORT_FILE as REPLAY_FILE
from evaluation.settings import full_name
from evaluation.speed import REPORT_FILE as SPEED_FILE
from evaluation.statistics import bootstrap_median
from evaluation.tasks import TASKS

__all__ = [
    "REPLAY_FILE",
    "SPEED_FILE",
    "Arm",
    "Counts",
    "Figure",
    "Ratios",
    "Replay",
    "ReplayRow",
    "Speed",
    "section_key",
]

_NUM_RESAMPLES = 2000

Counts = Mapping[int | str, tuple[int, float]]
"""By question: new tokens and seconds."""
Part = TypeVar("Part")


@dataclass(frozen=True)
class Figure:
    """A figure and its 95% interval.

    Attributes:
        value: the figure.
        low, high: ends of the interval.
    """

    value: float
    low: float
    high: float

    @classmethod
    def median(cls, values: Sequence[float], seed: int) -> Figure | None:
        """The median of values by question, with `bootstrap_median`; None of nothing."""
        if not values:
            return None
        interval = bootstrap_median(values, seed, _NUM_RESAMPLES)
        return cls(interval.median, interval.low, interval.high)

    @classmethod
    def mean(cls, values: Sequence[float], seed: int) -> Figure | None:
        """The mean of values by question and its percentile bootstrap interval; None of nothing.

        Source: Efron and Tibshirani 1993, section 13.3.
        """
        if not values:
            return None
        sample = np.asarray(values, dtype=np.float64)
        shape = (_NUM_RESAMPLES, sample.size)
        means = sample[np.random.default_rng(seed).integers(sample.size, size=shape)].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return cls(float(sample.mean()), float(low), float(high))


@dataclass(frozen=True)
class Ratios:
    """A run beside the exact one, question by question; medians over the questions.

    Attributes:
        speed_up: exact's seconds / this run's x this run's tokens / exact's: seconds per token.
        wall_time: exact's seconds / this run's, which an answer gains by ending early.
        length: this run's tokens / exact's.
        source: the folder that both were measured in side by side; None for two separate runs.
    """

    speed_up: Figure | None
    wall_time: Figure | None
    length: Figure | None
    source: Path | None = None

    @classmethod
    def of(cls, ours: Counts, exact: Counts, seed: int, source: Path | None = None) -> Ratios:
        """Over the questions that both gave a token to."""
        both = [
            (ours[each], exact[each])
            for each in ours
            if each in exact and min(*ours[each], *exact[each]) > 0
        ]
        wall_time = [theirs[1] / own[1] for own, theirs in both]
        length = [own[0] / theirs[0] for own, theirs in both]
        speed_up = [a * b for a, b in zip(wall_time, length, strict=True)]
        return cls(
            Figure.median(speed_up, seed),
            Figure.median(wall_time, seed),
            Figure.median(length, seed),
            source,
        )


@dataclass(frozen=True)
class Arm:
    """An arm of a speed run.

    Attributes:
        name: as on the command line.
        ratio: baseline's seconds per token / this arm's, as speed.json has it.
        tokens_per_second: over all questions.
        acceptance_length: None for arms that draft nothing.
        same_ids: share of questions with the ids of plain decoding; None where not measured.
        phases_ms: milliseconds per token by phase; empty where not measured.
        counts: by question.
    """

    name: str
    ratio: Figure
    tokens_per_second: float
    acceptance_length: float | None
    same_ids: float | None
    phases_ms: Mapping[str, float]
    counts: Counts


@dataclass(frozen=True)
class Speed:
    """A folder of evaluation.speed.

    Attributes:
        folder: where.
        settings: of the run.
        baseline: the arm that the ratios are to.
        arms: by name.
        num_questions: measured so far.
        num_planned: of the run, once it is finished.
        num_left_out: questions that do not fit the context.
        notes: of the run.
    """

    folder: Path
    settings: Mapping[str, Any]
    baseline: str
    arms: Mapping[str, Arm]
    num_questions: int
    num_planned: int
    num_left_out: int
    notes: Sequence[str]

    def arm(self, rule: str) -> Arm | None:
        """The arm of a rule, however it was written; None where there is none."""
        return next((arm for name, arm in self.arms.items() if arm_spec(name) == rule), None)

    @classmethod
    def read(cls, folder: Path) -> Speed:
        """Reads speed.json.

        Raises:
            ValueError: when it is not one of evaluation.speed.
        """
        return _parsed(folder / SPEED_FILE, "evaluation.speed", cls._of)

    @classmethod
    def _of(cls, folder: Path, record: Mapping[str, Any]) -> Speed:
        arms = {name: _arm(name, record) for name in record["arms"]}
        section_key(record["settings"])
        if len({frozenset(arm.phases_ms) for arm in arms.values() if arm.phases_ms}) > 1:
            raise ValueError("its arms have different phases")
        num_questions = int(record["num_questions"])
        return cls(
            folder,
            dict(record["settings"]),
            str(record["baseline"]),
            arms,
            num_questions,
            int(record.get("num_planned", num_questions)),
            int(record.get("num_left_out", 0)),
            [str(note) for note in record["notes"]],
        )


@dataclass(frozen=True)
class ReplayRow:
    """What a rule would do on the trees of an exact run.

    Attributes:
        rule: as it is written.
        cost: nats per token, may be infinite.
        acceptance_length: tokens per cycle.
        gain: over exact.
    """

    rule: str
    cost: float
    acceptance_length: float
    gain: Figure


@dataclass(frozen=True)
class Replay:
    """A folder of evaluation.replay.

    Attributes:
        folder: where.
        settings: of the run.
        cost_name: what the costs are, with their unit.
        num_questions: replayed.
        rows: of all rules, exact first.
        frontier: (cost allowed, the best rule within it).
    """

    folder: Path
    settings: Mapping[str, Any]
    cost_name: str
    num_questions: int
    rows: Sequence[ReplayRow]
    frontier: Sequence[tuple[float, ReplayRow]]

    @classmethod
    def read(cls, folder: Path) -> Replay:
        """Reads replay.json.

        Raises:
            ValueError: when it is not one of evaluation.replay.
        """
        return _parsed(folder / REPLAY_FILE, "evaluation.replay", cls._of)

    @classmethod
    def _of(cls, folder: Path, record: Mapping[str, Any]) -> Replay:
        section_key(record["settings"])
        if not record["rows"]:
            raise ValueError("it has no rows")
        return cls(
            folder,
            dict(record["settings"]),
            str(record["cost"]),
            int(record["num_prompts"]),
            [_replay_row(row) for row in record["rows"]],
            [(_finite(row["max_cost_per_token"]), _replay_row(row)) for row in record["frontier"]],
        )


def section_key(settings: Mapping[str, Any]) -> tuple[str, float]:
    """The task and the temperature, which make a section.

    A question file counts by its full path, which older folders may not have.
    """
    task = str(settings["task"])
    return task if task in TASKS else str(full_name(task)), _finite(settings["temperature"])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} where a finite number belongs")
    return number


def _parsed(path: Path, command: str, parse: Callable[[Path, Any], Part]) -> Part:
    try:
        return parse(path.parent, json.loads(path.read_bytes()))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} is not a report of {command} ({type(error).__name__}: {error}); make it anew"
        ) from error


def _arm(name: str, record: Mapping[str, Any]) -> Arm:
    found = record["arms"][name]
    ratio, phases = found["ratio"], found["phases_s"] or {}
    num_tokens = int(found["num_tokens"])
    return Arm(
        name=name,
        ratio=Figure(*(_finite(ratio[name]) for name in ("median", "low", "high"))),
        tokens_per_second=_finite(found["tokens_per_second"]),
        acceptance_length=_optional(found["acceptance_length"]),
        same_ids=_optional(found["same_ids_as_plain"]),
        phases_ms={phase: 1000.0 * _finite(s) / num_tokens for phase, s in phases.items()},
        counts={
            each["question_id"]: (
                int(each["arms"][name]["tokens"]),
                _finite(each["arms"][name]["seconds"]),
            )
            for each in record["per_question"]
        },
    )


def _replay_row(row: Mapping[str, Any]) -> ReplayRow:
    low, high = row["intervals"]["gain"]
    cost = float(row["cost_per_token"])
    return ReplayRow(
        rule=str(row["rule"]),
        cost=cost if cost == math.inf else _finite(cost),
        acceptance_length=_finite(row["acceptance_length"]),
        gain=Figure(_finite(row["gain"]), _finite(low), _finite(high)),
    )


def _optional(value: Any) -> float | None:
    return None if value is None else _finite(value)
