"""The runs of a report, compared with the exact one of their task, and put into sections."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_fsd.calibrate import family
from eagle_fsd.stats import PHASES
from evaluation.answers import read_run, settings_agree
from evaluation.report_data import (
    REPLAY_FILE,
    SPEED_FILE,
    Figure,
    Ratios,
    Replay,
    Speed,
    section_key,
)
from evaluation.score import (
    SCORES_FILE,
    Judge,
    Run,
    check_comparable,
    judge_number,
    leave_unscored,
    score_run,
)
from evaluation.scoring import common_prefix_share
from evaluation.settings import full_name
from evaluation.tasks import stand_in_note

EXACT_RULES = ("exact", "plain")
# What an exact run may change to be a control, with the values that change nothing.
TRUNCATION = {"min_p": 0.0, "top_p": 1.0, "top_k": 0}

_RUN_FILE = "run.json"
# What has to be the same for an arm of evaluation.speed to stand for a run.
_SPEED_SETTINGS = (
    *("questions", "target", "target_sha256", "revision", "dtype", "temperature"),
    "max_new_tokens",
)
_DRAFT_SETTINGS = (
    *("draft_head", "draft_head_sha256", "draft_model", "draft_model_sha256"),
    *("draft_vocab", "tree"),
)
# Of a session, what times depend on and answers do not; older runs do not have all of them.
_TIMING = ("machine", "device", "packed_weights", "compiled")
_NAMES = ("target", "draft_head", "draft_model")


@dataclass(frozen=True)
class Point:
    """A run in a report.

    Attributes:
        run: the run.
        label: tells it from the others of its section.
        line: the line it lies on: its rule and divergence, or what a control truncates.
        is_control: whether it is exact with a truncated law.
        scores: as scores.json has them, compared with the section's exact run.
        prefix: share of an answer up to the first token that is not exact's, mean over questions.
        ratios: to the exact run.
        depth_rates: accepted / tried by depth, 1 first.
        phases_ms: milliseconds per token by phase; None where the run did not measure them.
    """

    run: Run
    label: str
    line: str
    is_control: bool
    scores: Mapping[str, Any]
    prefix: Figure
    ratios: Ratios
    depth_rates: Sequence[float]
    phases_ms: Mapping[str, float] | None

    @property
    def accuracy(self) -> Figure | None:
        """Share of right answers and its Wilson interval; None where nothing is scored."""
        found = self.scores["accuracy"]
        if found["share"] is None:
            return None
        return Figure(found["share"], found["low"], found["high"])

    @property
    def cost(self) -> float | None:
        """Nats per token of KL or regret, infinity included; None without a ledger."""
        costs = (self.scores["kl_per_token"], self.scores["regret_per_token"])
        return next((float(cost) for cost in costs if cost is not None), None)


@dataclass(frozen=True)
class Section:
    """What there is on a task at one temperature.

    Attributes:
        task: its name.
        temperature: of all runs.
        points: the exact run first, then line by line in the order of the knob; may be empty.
        speeds: folders of evaluation.speed.
        replays: folders of evaluation.replay.
        notes: what a reader has to know, a sentence each.
    """

    task: str
    temperature: float
    points: Sequence[Point]
    speeds: Sequence[Speed]
    replays: Sequence[Replay]
    notes: Sequence[str]

    @property
    def is_scored(self) -> bool:
        """Whether accuracy is the quality: every run has one, and exact gets something right."""
        has_all = all(point.accuracy is not None for point in self.points)
        return has_all and not _exact_is_all_wrong(self.points)

    @property
    def quality_name(self) -> str:
        return "accuracy" if self.is_scored else "agreement with exact"

    def quality(self, point: Point) -> Figure:
        """Accuracy, or else the common beginning with the exact answers."""
        return (point.accuracy if self.is_scored else None) or point.prefix

    def lines(self) -> dict[str, list[Point]]:
        """The points without the exact run, by line."""
        found: dict[str, list[Point]] = {}
        for point in self.points[1:]:
            found.setdefault(point.line, []).append(point)
        return found


def read_sections(folders: Iterable[str | Path], seed: int) -> list[Section]:
    """Everything in the folders, a section for each task and temperature, in the order given.

    Args:
        folders: of evaluation.run, evaluation.speed and evaluation.replay; one that comes twice
            counts once.
        seed: of the bootstrap.

    Raises:
        FileNotFoundError: for a folder that is not there.
        ValueError: for one that holds nothing to report or something malformed, runs without an
            exact one, and runs that differ in more than their rule; names the folders.
    """
    runs: list[Run] = []
    speeds: list[Speed] = []
    replays: list[Replay] = []
    for folder in {Path(each).resolve(): Path(each) for each in folders}.values():
        _read_folder(folder, runs, speeds, replays)
    keys = [_run_key(run) for run in runs]
    keys += [section_key(each.settings) for each in speeds]
    keys += [section_key(each.settings) for each in replays]
    return [
        _section(
            key,
            [run for run in runs if _run_key(run) == key],
            [each for each in speeds if section_key(each.settings) == key],
            [each for each in replays if section_key(each.settings) == key],
            seed,
        )
        for key in dict.fromkeys(keys)
    ]


def _read_folder(folder: Path, runs: list[Run], speeds: list[Speed], replays: list[Replay]) -> None:
    """Adds whatever the folder holds."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}; name folders of evaluation.run")
    has_speed, has_replay = (folder / SPEED_FILE).is_file(), (folder / REPLAY_FILE).is_file()
    if has_speed:
        speeds.append(Speed.read(folder))
    if has_replay:
        replays.append(Replay.read(folder))
    if (folder / _RUN_FILE).is_file():
        # A replay has a run.json of its own, without the kind of its task.
        record = read_run(folder)
        if "kind" in record or record["model_id"] != "replay":
            runs.append(Run.read(folder))
        elif not has_replay:
            raise ValueError(
                f"{str(folder)!r} holds a replay without {REPLAY_FILE}; give its command again to "
                "finish it"
            )
    elif not has_speed | has_replay:
        raise ValueError(
            f"{str(folder)!r} holds no run, there is no {_RUN_FILE}, {SPEED_FILE} or {REPLAY_FILE} "
            "in it; name an --output folder of evaluation.run, evaluation.speed or "
            "evaluation.replay"
        )


def _section(
    key: tuple[str, float],
    runs: Sequence[Run],
    speeds: Sequence[Speed],
    replays: Sequence[Replay],
    seed: int,
) -> Section:
    if not runs:
        return Section(*key, [], speeds, replays, [])
    exact = _exact_run(runs)
    for run in runs:
        _check_questions(run, exact)
        check_comparable(_as_sampled(run, exact), exact)
    ordered = [exact, *sorted((run for run in runs if run is not exact), key=_order)]
    points = [
        _point(run, exact, label, speeds, seed)
        for run, label in zip(ordered, _labels(ordered, exact), strict=True)
    ]
    # One line after another, as they first come.
    places = list(dict.fromkeys(point.line for point in points))
    points[1:] = sorted(points[1:], key=lambda point: places.index(point.line))
    return Section(*key, points, speeds, replays, _notes(points, speeds))


def _exact_run(runs: Sequence[Run]) -> Run:
    """The run that the others are compared with: exact, or else plain, with the law of most.

    Raises:
        ValueError: when there is none.
    """
    candidates = [run for run in runs if run.rule in EXACT_RULES]
    if not candidates:
        folders = ", ".join(repr(str(run.folder)) for run in runs)
        raise ValueError(
            f"no exact run of task {runs[0].record['task']!r} at temperature "
            f"{_run_key(runs[0])[1]:g} beside {folders}; add the folder of one made with --rule "
            "exact or --plain"
        )

    def rank(candidate: Run) -> tuple[int, bool, tuple[float, ...]]:
        law = _truncation(candidate)
        same = sum(_truncation(run) == law for run in runs if run.rule not in EXACT_RULES)
        return same, candidate.rule == "exact", tuple(-each for each in _strength(candidate))

    return max(candidates, key=rank)


def _check_questions(run: Run, exact: Run) -> None:
    """Refuses runs of other questions.

    Raises:
        ValueError: naming both folders.
    """
    digests = [each.record["settings"].get("questions") for each in (run, exact)]
    if run.answers.keys() == exact.answers.keys() and digests[0] == digests[1]:
        return
    number = len(run.answers.keys() & exact.answers.keys())
    raise ValueError(
        f"{str(run.folder)!r} and {str(exact.folder)!r} answer different question sets of task "
        f"{run.record['task']!r} ({len(run.answers)} and {len(exact.answers)} answers, {number} "
        "ids in both); finish both with the same --questions, --limit and --every"
    )


def _as_sampled(run: Run, exact: Run) -> Run:
    """An exact run that truncates the law, as if it did so like `exact`; others as they are."""
    if run.rule not in EXACT_RULES:
        return run
    settings = run.record["settings"] | _truncation(exact)
    return replace(run, record={**run.record, "settings": settings})


def _truncation(run: Run) -> dict[str, float]:
    settings = run.record["settings"]
    return {name: settings.get(name, default) for name, default in TRUNCATION.items()}


def _strength(run: Run) -> tuple[float, ...]:
    """Grows with what is cut off the law."""
    law = _truncation(run)
    return law["min_p"], 1.0 - law["top_p"], 1.0 / law["top_k"] if law["top_k"] else 0.0


def _order(run: Run) -> tuple[float, float, tuple[float, ...]]:
    """By the knob, the budget, and what a control truncates."""
    _, _, knobs = run.rule.partition(":")
    budget = run.record["settings"].get("budget")
    return (
        _number(knobs.partition(":")[0]),
        math.inf if budget is None else float(budget),
        _strength(run),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # a rule without a knob
        return 0.0


def _labels(runs: Sequence[Run], exact: Run) -> list[str]:
    """Names of the runs; the folder is added where two would be the same."""
    names = [_name(run, exact) for run in runs]
    return [
        f"{name} ({run.folder.name or run.folder})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _name(run: Run, exact: Run) -> str:
    parts = [run.rule]
    budget = run.record["settings"].get("budget")
    if budget is not None:
        parts.append(f"budget {budget}")
    base = _truncation(exact)
    parts += [
        f"{name} {value:g}" for name, value in _truncation(run).items() if value != base[name]
    ]
    return " ".join(parts)


def _point(run: Run, exact: Run, label: str, speeds: Sequence[Speed], seed: int) -> Point:
    """A run with its figures.

    Raises:
        ValueError: when its answers lack what evaluation.run writes.
    """
    changed = [
        name for name, value in _truncation(exact).items() if _truncation(run)[name] != value
    ]
    line = family(run.rule)
    if run.record["settings"].get("budget") is not None:
        line += ", budget"
    if changed:
        line = f"{run.rule}, {' and '.join(changed)} varied"
    try:
        return Point(
            run=run,
            label=label,
            line=line,
            is_control=bool(changed),
            scores=_scores(run, exact),
            prefix=_prefix(run, exact, seed),
            ratios=_ratios(run, exact, speeds, seed),
            depth_rates=_depth_rates(run),
            phases_ms=_phases_ms(run),
        )
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the answers or scores in {str(run.folder)!r} are not as evaluation.run and "
            f"evaluation.score write them ({type(error).__name__}: {error}); make them anew"
        ) from error


def _scores(run: Run, exact: Run) -> dict[str, Any]:
    """The figures of scores.json, or new ones where it is absent, older or of another exact run."""
    judge: Judge = judge_number if run.record["kind"] == "math" else leave_unscored
    # A control cannot be compared as it is: its law is another one on purpose.
    ours, reference = _as_sampled(run, exact), None if run is exact else exact
    stored = _stored_scores(run)
    if stored is None:
        return score_run(ours, reference, judge)
    against = stored["against_exact"]
    if reference is None or (against and _is_same(against["folder"], reference.folder)):
        return stored
    return stored | {"against_exact": score_run(ours, exact, leave_unscored)["against_exact"]}


def _stored_scores(run: Run) -> dict[str, Any] | None:
    """What scores.json says; None where it is absent or speaks of other answers."""
    path = run.folder / SCORES_FILE
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_bytes())
        is_current = (stored["num_answers"], stored["num_tokens"]) == (
            len(run.answers),
            sum(run.turns("new_tokens")),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not of evaluation.score; make it anew or remove it") from error
    return dict(stored) if is_current else None


def _is_same(folder: str, other: Path) -> bool:
    return Path(folder).resolve() == other.resolve()


def _prefix(run: Run, exact: Run, seed: int) -> Figure:
    """Mean over questions of the common beginning of all its turns."""
    shares = []
    for question_id, answer in run.answers.items():
        others = exact.answers[question_id]["choices"]
        pairs = [
            pair
            for ours, theirs in zip(answer["choices"], others, strict=True)
            for pair in zip(ours["token_ids"], theirs["token_ids"], strict=True)
        ]
        shares.append(sum(common_prefix_share(*pair) for pair in pairs) / max(len(pairs), 1))
    figure = Figure.mean(shares, seed)
    assert figure is not None  # a Run has an answer
    return figure


def _ratios(run: Run, exact: Run, speeds: Sequence[Speed], seed: int) -> Ratios:
    """Those measured side by side where there are any, else those of the two runs."""
    for speed in speeds:
        if other_setting(speed, run, exact) is None:
            arms = [speed.arm(each.rule) for each in (run, exact)]
            ours, theirs = (arm.counts for arm in arms if arm is not None)
            # One turn of perhaps several questions: the length is that of the whole answers.
            measured = Ratios.of(ours, theirs, seed, speed.folder)
            return replace(measured, length=Ratios.of(_counts(run), _counts(exact), seed).length)
    return Ratios.of(_counts(run), _counts(exact), seed)


def other_setting(speed: Speed, run: Run, exact: Run) -> str | None:
    """Why a speed run says nothing of a run and its exact one; None where it does."""
    if run.record["settings"].get("budget") is not None:
        return "evaluation.speed measures rules without a budget"
    for each in (run, exact):
        if speed.arm(each.rule) is None:
            return f"it has no arm {each.rule!r}"
        device = speed.settings.get("device")
        others = {session.get("device") for session in _sessions(each)} - {device, None}
        if device is not None and others:
            return f"device is {device!r} there, {min(others)!r} in {str(each.folder)!r}"
        ours = each.record["settings"]
        drafts = () if each.rule == "plain" else _DRAFT_SETTINGS
        for name in (*_SPEED_SETTINGS, *TRUNCATION, *drafts):
            if name not in speed.settings:  # an older report
                continue
            measured, wanted = speed.settings[name], ours.get(name, TRUNCATION.get(name))
            if name in _NAMES:  # a path may be written in several ways
                measured, wanted = full_name(measured), full_name(wanted)
            if not settings_agree(name, measured, wanted):
                return f"{name} is {measured!r} there, {wanted!r} in {str(each.folder)!r}"
    return None


def _sessions(run: Run) -> list[Mapping[str, Any]]:
    """What each session of a run noted of its machine, the first one before the resumed."""
    return [run.record, *run.record.get("resumed", [])]


def _counts(run: Run) -> dict[int | str, tuple[int, float]]:
    return {
        question_id: (
            sum(sum(choice["new_tokens"]) for choice in answer["choices"]),
            sum(sum(choice["wall_time"]) for choice in answer["choices"]),
        )
        for question_id, answer in run.answers.items()
    }


def _depth_rates(run: Run) -> list[float]:
    """Means of the turns' own rates, weighted by the cycles that got as far as that depth.

    A turn's rates are kept, not its counts: those that tried depth d + 1 are taken to be those that
    accepted depth d, which is off only where a tree ends there.
    """
    weights: list[float] = []
    accepted: list[float] = []
    for stats in run.turns("stats"):
        reached = float(stats["num_cycles"])
        for depth, rate in enumerate(stats["acceptance_by_depth"]):
            if depth == len(weights):
                weights.append(0.0)
                accepted.append(0.0)
            weights[depth] += reached
            reached *= rate
            accepted[depth] += reached
    pairs = zip(accepted, weights, strict=True)
    return [taken / weight for taken, weight in pairs if weight > 0]


def _phases_ms(run: Run) -> dict[str, float] | None:
    """Milliseconds per token; None on accelerators, which run on while a phase's clock is read."""
    if any((each.get("device") or "cpu") != "cpu" for each in _sessions(run)):
        return None
    stats, num_tokens = run.turns("stats"), sum(run.turns("new_tokens"))
    if not num_tokens:
        return None
    seconds = {"prefill": sum(each["prefill_s"] for each in stats)}
    seconds |= {name: sum(each["phases_s"][name] for each in stats) for name in PHASES}
    seconds["rest"] = max(0.0, sum(run.turns("wall_time")) - sum(seconds.values()))
    return {name: 1000.0 * spent / num_tokens for name, spent in seconds.items()}


def _exact_is_all_wrong(points: Sequence[Point]) -> bool:
    """Whether the exact run, the first, is scored and has no right answer."""
    accuracy = points[0].accuracy if points else None
    return accuracy is not None and not accuracy.value


def _notes(points: Sequence[Point], speeds: Sequence[Speed]) -> list[str]:
    """What does not show in the figures themselves."""
    exact = points[0].run
    sources = dict.fromkeys(point.run.record.get("source") or "" for point in points)
    notes = [note for source in sources for note in stand_in_note(exact.record["task"], source)]
    sessions = [session for point in points for session in _sessions(point.run)]
    differing = [
        name
        for name in _TIMING
        if len({json.dumps(each[name]) for each in sessions if name in each}) > 1
    ]
    if differing:
        notes.append(f"the runs differ in {', '.join(differing)}: their times say little")
    if exact.record["kind"] == "code" and points[0].accuracy is None:
        notes.append(
            "code is not scored: evaluation.score --allow-code-execution runs the answers, and "
            "this report reads its scores"
        )
    if _exact_is_all_wrong(points):
        notes.append("exact has no right answer, so that agreement is shown instead of accuracy")
    unfinished = [p.label for p in points if len(p.run.answers) < len(p.run.questions)]
    if unfinished:
        notes.append(f"questions without an answer yet: {', '.join(unfinished)}")
    for speed in speeds:
        if all(point.ratios.source != speed.folder for point in points[1:]):
            reasons = [other_setting(speed, point.run, exact) for point in points[1:]]
            reason = next((each for each in reasons if each is not None), "another one is used")
            notes.append(
                f"{speed.folder} is shown by itself and does not time these runs: {reason}"
            )
    return notes


def _run_key(run: Run) -> tuple[str, float]:
    settings = run.record["settings"]
    return section_key({"task": run.record["task"], "temperature": 0.0} | settings)
