"""Every rule on the trees of one exact run: what each would gain, and at what cost.

python -m evaluation.replay --target demo --draft-head demo --dtype float32 --temperature 1 \
    --task mt_bench --limit 4 --max-new-tokens 32 --output replay

Each question's first turn is decoded once, exactly, and all rules and knobs are scored in
expectation on its trees (see `eagle_fsd.recorder`): acceptance length, share of rescued tokens, KL
per token of the emitted law from the target's (regret at temperature 0), and per token the
probability moved to tokens under a fifth of the best and above twice the target's. The sums of
each question are a line of replay.jsonl as soon as it is answered, so that a run that was killed,
or is given a larger --limit, goes on. From them come replay.json, with bootstrap intervals over
questions, and frontier.png. A rule that is the best of hundreds on the questions that it was chosen
on flatters itself: measure it on others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eagle_fsd.acceptance import RULES, AcceptanceRule, Exact
from eagle_fsd.calibrate import Calibration, Row, figures, grid, has_divergence
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.divergence import DIVERGENCES, is_infinite_under_reduced_vocab
from eagle_fsd.files import write_text
from eagle_fsd.recorder import Expectation, Recorder
from evaluation.answerer import turn_seed
from evaluation.answers import RunFolder, digest
from evaluation.arms import loaded_target
from evaluation.environment import environment
from evaluation.frontier import LARGEST_LEVEL, draw
from evaluation.lines import LineFile
from evaluation.prompts import first_turns
from evaluation.questions import Question, add_selection_arguments, select
from evaluation.settings import model_digests, model_settings
from evaluation.tasks import load_questions, stand_in_note

SUMS_FILE = "replay.jsonl"
REPORT_FILE = "replay.json"
PICTURE_FILE = "frontier.png"

LEVELS = (0.01, 0.05, 0.1, 0.2, 0.5)
# The first token and the last two leave no room for a tree below.
MIN_NEW_TOKENS = 3
NUM_RESAMPLES = 1000
EXACT = Exact().spec
ALL = "all"


@dataclass(frozen=True)
class Record:
    """One question's line.

    Attributes:
        question_id: the question.
        num_tokens: new tokens of the exact answer.
        num_cycles: its cycles.
        num_trees: cycles in which anything was drafted.
        sums: by written rule, exact first.
    """

    question_id: int | str
    num_tokens: int
    num_cycles: int
    num_trees: int
    sums: dict[str, Expectation]

    def __post_init__(self) -> None:
        if isinstance(self.question_id, bool) or not isinstance(self.question_id, int | str):
            raise TypeError(f"question_id must be a number or a text, got {self.question_id!r}")
        for name in ("num_tokens", "num_cycles", "num_trees"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")
        if self.num_trees > self.num_cycles:
            raise ValueError(f"{self.num_trees} trees in {self.num_cycles} cycles")
        for rule, sums in self.sums.items():
            is_empty = min(sums.num_cycles, sums.num_tokens) <= 0
            if (is_empty and self.num_trees) or any(map(math.isnan, sums.sums)):
                raise ValueError(f"the sums of {rule} are {sums.sums}")

    @property
    def lacks_trees(self) -> bool:
        """Whether nothing was drafted though the answer had room: it was decoded plainly."""
        return self.num_trees == 0 and self.num_tokens >= MIN_NEW_TOKENS

    def to_line(self) -> bytes:
        """JSON, which has no infinity: "inf" then."""
        sums = {rule: [_to_json(x) for x in e.sums] for rule, e in self.sums.items()}
        return json.dumps(vars(self) | {"sums": sums}).encode("ascii")

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """Reads what `to_line` wrote.

        Raises:
            ValueError: for anything else.
        """
        try:
            fields = json.loads(line)
            sums = {
                rule: Expectation(int(sums[0]), *map(float, sums[1:]))
                for rule, sums in fields.pop("sums").items()
            }
            return cls(**fields, sums=sums)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ValueError("not the sums of a question; mend or remove it") from error


class SumsFile:
    """The sums of a run, a line a question.

    Args:
        path: need not exist.
        rules: written forms that every line must have, in their order.

    Raises:
        ValueError: for a malformed line, by its number, an id that comes twice or a line of other
            rules.
    """

    def __init__(self, path: Path, rules: Sequence[str]) -> None:
        self.records: dict[int | str, Record] = {}
        self._file = LineFile(path)
        for number, line in enumerate(self._file.read(), start=1):
            try:
                self._add(Record.from_line(line), rules)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error

    def append(self, record: Record) -> None:
        """Adds a line, unless it is there; it is on the disk afterwards.

        Raises:
            OSError: on a full disk; the earlier lines stay.
        """
        if self.records.get(record.question_id) != record:
            self._file.append(record.to_line())
            self.records[record.question_id] = record

    def _add(self, record: Record, rules: Sequence[str]) -> None:
        if list(record.sums) != list(rules):
            raise ValueError("holds other rules than those asked for; name another --output")
        earlier = self.records.get(record.question_id)
        if earlier is not None and not earlier.lacks_trees:
            raise ValueError(f"question_id {record.question_id!r} comes twice; remove one of them")
        self.records[record.question_id] = record


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; a user's error is one line on stderr and status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    return run(lambda: _replay(args, arguments))


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m evaluation.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)
    SamplingConfig.add_arguments(parser)
    add_selection_arguments(parser)
    group = parser.add_argument_group("replay")
    group.add_argument("--task", required=True, help="name of a task, or a file of questions")
    group.add_argument("--questions", help="FastChat questions instead of the task's own")
    group.add_argument(
        "--rules",
        default=ALL,
        metavar="LIST",
        help="names (the whole grid, all divergences that fit) and written forms such as "
        f"fuzzy:0.3:js, separated by commas; {ALL} (default) is every rule",
    )
    group.add_argument("--max-new-tokens", type=int, default=128)
    group.add_argument("--seed", type=int, default=0, help="of sampling and of the intervals")
    group.add_argument("--output", required=True, help="folder of the run; goes on where it ended")
    group.add_argument("--json", action="store_true", help="print replay.json, not the tables")
    levels = parser.add_mutually_exclusive_group()
    default = ",".join(map(str, LEVELS))
    levels.add_argument(
        "--kl-levels", help=f"KL per token to name the best rule for, when sampling ({default})"
    )
    levels.add_argument("--regret-levels", help="the same at temperature 0, in regret per token")
    return parser


def _replay(args: argparse.Namespace, argv: Sequence[str]) -> None:
    sampling = SamplingConfig.from_args(args)
    levels = _levels(args, sampling)
    names = [name.strip() for name in args.rules.split(",")]
    names = [] if names == [ALL] else names
    for name in names:
        grid(name)  # tells an unknown one before anything is loaded
    for flag, value, least in (
        ("--max-new-tokens", args.max_new_tokens, MIN_NEW_TOKENS),
        ("--seed", args.seed, 0),
    ):
        if value < least:
            raise ValueError(f"{flag} must be >= {least}, got {value}")
    require_drafter(args)
    folder = RunFolder(args.output, "replay")
    task, questions, source = load_questions(args.task, args.questions)
    selected = select(questions, args.limit, args.every)
    numbers = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
    requests = dataclasses.asdict(sampling) | numbers
    settings = model_settings(args) | {
        "task": task.name,
        "questions": digest(questions),
        "rules": ",".join(names) or ALL,
        **requests,
    }
    with folder.locked():
        print(f"questions: {source}", file=sys.stderr)
        stored = folder.resume(settings)
        if stored is not None:  # what "auto" was then
            settings |= stored["settings"]
            vars(args).update({name: settings[name] for name in ("dtype", "tree", "draft_vocab")})
        decoder = load_decoder(args)
        rules = choose_rules(names, decoder)
        fitting = [question for question, _ in first_turns(decoder, selected)]
        facts = environment(loaded_target(decoder))
        settings |= {"dtype": facts["dtype"], "tree": str(decoder.tree), **model_digests(args)}
        folder.resume(settings)  # what was loaded may be another model
        record = {"model_id": folder.model_id, "task": task.name, "source": source, "argv": argv}
        folder.write_run(record | facts | (stored or {}) | {"settings": settings})
        file = SumsFile(folder.folder / SUMS_FILE, [EXACT, *(rule.spec for rule in rules)])
        records = replay(decoder, fitting, rules, requests, file)
        calibration = summarise(records, settings)
        result = report(calibration, records, levels, args.seed) | {"source": source} | facts
        result |= {"task": task.name, "num_left_out": len(selected) - len(fitting)}
        write_text(folder.folder / REPORT_FILE, json.dumps(result, indent=1) + "\n")
        draw(calibration, levels, folder.folder / PICTURE_FILE)
    print(json.dumps(result) if args.json else _shown(calibration, result, folder.folder))


def choose_rules(names: Sequence[str], decoder: SpeculativeDecoder) -> list[AcceptanceRule]:
    """Rules by name, with their whole grid and all divergences that fit, or by written form.

    Args:
        names: empty for every relaxed rule that goes with the drafter.
        decoder: with the drafter.

    Raises:
        ValueError: for an unknown rule, or one that does not go with the drafter.
    """
    drafter = decoder.drafter
    divergences = [
        name
        for name in DIVERGENCES
        if not (
            drafter and drafter.has_reduced_vocabulary and is_infinite_under_reduced_vocab(name)
        )
    ]
    has_law = drafter is not None and drafter.has_draft_probs
    all_names = [
        name
        for name, kind in RULES.items()
        if name != EXACT and (has_law or not kind.needs_draft_probs)
    ]
    rules: dict[str, AcceptanceRule] = {}
    for name in names or all_names:
        varied = divergences if name in RULES and has_divergence(name) else ()
        rules |= {rule.spec: rule for rule in grid(name, varied)}
    for rule in rules.values():
        decoder.check_rule(rule)
    return list(rules.values())


def replay(
    decoder: SpeculativeDecoder,
    questions: Sequence[Question],
    rules: Sequence[AcceptanceRule],
    options: Mapping[str, Any],
    file: SumsFile,
) -> list[Record]:
    """Decodes the first turns that the file does not hold yet, and adds their sums to it.

    Args:
        decoder: with its drafter and tree.
        questions: in the order of the result.
        rules: scored beside the exact one.
        options: of the requests, without rule and observer; `seed` is that of the whole run.
        file: what is there already, made with the same rules and options.

    Returns:
        The records of the questions.

    Raises:
        ValueError: a question that cannot be decoded, by its id.
    """
    total = sum((record.sums[EXACT] for record in file.records.values()), Expectation())
    done = {key for key, record in file.records.items() if not record.lacks_trees}
    todo = [question for question in questions if question.question_id not in done]
    with tqdm(todo, desc="decoding exactly", unit="question") as bar:
        for question in bar:
            record = _record(decoder, question, rules, dict(options))
            file.append(record)
            total += record.sums[EXACT]
            bar.set_postfix_str(f"acceptance length {total.acceptance_length:.2f}")
    return [file.records[question.question_id] for question in questions]


def summarise(records: Sequence[Record], settings: dict[str, Any]) -> Calibration:
    """The sums of all questions, the exact rule apart.

    Args:
        records: one at least, all of the same rules.
        settings: what they were made with; its temperature says what the costs are.

    Raises:
        ValueError: when nothing was drafted in any of them.
    """
    if not any(record.num_trees for record in records):
        raise ValueError(
            "no tree was scored: all answers end at once, or the prompts are longer than what the "
            "drafter reads; ask other questions"
        )
    exact, *rows = [
        Row(rule, sum((record.sums[rule] for record in records), Expectation()))
        for rule in records[0].sums
    ]
    is_greedy = SamplingConfig(settings["temperature"]).is_greedy
    return Calibration(exact.expectation, rows, is_greedy, len(records), settings)


def report(
    calibration: Calibration, records: Sequence[Record], levels: Sequence[float], seed: int
) -> dict[str, Any]:
    """What replay.json holds, beside what it was made on.

    Args:
        calibration: the totals.
        records: by question, for the intervals.
        levels: costs per token to name the best rule for.
        seed: of the bootstrap.

    Returns:
        "rows" of all rules with their figures and 95% "intervals", the "frontier" (per level the
        best rule, exact where none gains) and "decoded", the acceptance length of the exact
        answers themselves: at temperature 0 that of the rule exact, else near it.
    """
    exact = Row(EXACT, calibration.exact)
    num_cycles = sum(record.num_cycles for record in records)
    num_tokens = sum(max(record.num_tokens - 1, 0) for record in records)
    intervals = bootstrap(records, seed)
    rows = [
        {
            "rule": row.rule,
            **figures(row.expectation),
            "gain": _gain(row, calibration),
            "intervals": intervals[row.rule],
        }
        for row in [exact, *calibration.rows]
    ]
    best = [(level, calibration.within_cost(level) or exact) for level in levels]
    return calibration.to_dict() | {
        "decoded": {"acceptance_length": num_tokens / num_cycles, "num_cycles": num_cycles},
        "rows": rows,
        "frontier": [
            {
                "max_cost_per_token": level,
                "rule": row.rule,
                **figures(row.expectation),
                "gain": _gain(row, calibration),
                "intervals": intervals[row.rule],
            }
            for level, row in best
        ],
    }


def bootstrap(
    records: Sequence[Record], seed: int, num_resamples: int = NUM_RESAMPLES
) -> dict[str, dict[str, list[float | str]]]:
    """95% percentile intervals of figures that are ratios of sums over questions.

    All rules share the resamples of questions, so that a gain compares with exact on the same ones.

    Args:
        records: one at least; of a single one all ends are its own figures.
        seed: of the resamples.
        num_resamples: >= 1.

    Returns:
        By written rule, exact first: [low, high] of "acceptance_length", "gain" over exact and
        "cost_per_token".

    Source: Efron and Tibshirani 1993, section 13.3.
    """
    rules, number = list(records[0].sums), len(records)
    sums = np.array([[record.sums[rule].sums[:4] for rule in rules] for record in records])
    is_infinite = np.isinf(sums)  # 0 x inf would make NaN of questions that were not drawn
    draws = np.random.default_rng(seed).multinomial(
        number, np.full(number, 1.0 / number), size=num_resamples
    )
    totals = np.tensordot(draws, np.where(is_infinite, 0.0, sums), axes=1)
    totals[np.tensordot(draws, is_infinite, axes=1) > 0] = np.inf
    totals = totals[totals[:, 0, 0] > 0]  # a draw of nothing but answers without a cycle
    num_cycles, num_tokens, _, cost = np.moveaxis(totals, -1, 0)  # each [resamples, rules]
    length = num_tokens / num_cycles
    drawn = {
        "acceptance_length": length,
        "gain": length / length[:, :1] - 1.0,
        "cost_per_token": cost / num_tokens,
    }
    # The nearest draw, as nothing lies between a finite cost and an infinite one.
    ends = {
        name: np.quantile(values, [0.025, 0.975], axis=0, method="nearest").T.tolist()
        for name, values in drawn.items()
    }
    return {
        rule: {name: [_to_json(end) for end in ends[name][index]] for name in ends}
        for index, rule in enumerate(rules)
    }


def frontier_table(result: Mapping[str, Any]) -> str:
    """The frontier of a report, for people."""
    cost = str(result["cost"]).removesuffix(", nats")
    lines = [f"{'at most, ' + cost:<27}{'best rule':<34}{'length':>8}{'gain':>8}  95% of the gain"]
    for row in result["frontier"]:
        low, high = row["intervals"]["gain"]
        lines.append(
            f"{row['max_cost_per_token']:<27g}{row['rule']:<34}{row['acceptance_length']:>8.3f}"
            f"{row['gain']:>8.1%}  {low:.1%} to {high:.1%}"
        )
    return "\n".join(lines)


def _shown(calibration: Calibration, result: Mapping[str, Any], folder: Path) -> str:
    """All of a replay for people."""
    parts = [calibration.table(), "", frontier_table(result), ""]
    parts += stand_in_note(result["task"], result["source"])
    if result["num_left_out"]:
        parts.append(f"{result['num_left_out']} left out: the prompt does not fit the context")
    return "\n".join([*parts, f"written: {folder / REPORT_FILE}, {folder / PICTURE_FILE}"])


def _record(
    decoder: SpeculativeDecoder,
    question: Question,
    rules: Sequence[AcceptanceRule],
    options: dict[str, Any],
) -> Record:
    recorder = Recorder([Exact(), *rules])
    options["tree"] = decoder.tree  # left out, exact decoding may do without one
    options["seed"] = turn_seed(options["seed"], question.question_id, choice=0, turn=0)
    try:
        stats = decoder.generate(question.turns[0], observer=recorder.observe, **options).stats
    except ValueError as error:
        raise ValueError(f"question {question.question_id!r}: {error}") from error
    specs = [rule.spec for rule in recorder.rules]
    return Record(
        question_id=question.question_id,
        num_tokens=stats.num_tokens,
        num_cycles=stats.num_cycles,
        num_trees=recorder.num_trees,
        sums=dict(zip(specs, recorder.totals, strict=True)),
    )


def _levels(args: argparse.Namespace, sampling: SamplingConfig) -> list[float]:
    if sampling.is_greedy and args.kl_levels is not None:
        raise ValueError("--kl-levels needs a temperature above 0; use --regret-levels")
    if not sampling.is_greedy and args.regret_levels is not None:
        raise ValueError("--regret-levels needs temperature 0; use --kl-levels")
    flag, text = (
        ("--regret-levels", args.regret_levels)
        if sampling.is_greedy
        else ("--kl-levels", args.kl_levels)
    )
    if text is None:
        return list(LEVELS)
    try:
        levels = [float(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0.0 <= level <= LARGEST_LEVEL for level in levels):
        raise ValueError(
            f"{flag} takes numbers in 0..{LARGEST_LEVEL:g} separated by commas, got {text!r}"
        )
    return sorted(set(levels))


def _gain(row: Row, calibration: Calibration) -> float:
    return row.expectation.acceptance_length / calibration.exact.acceptance_length - 1.0


def _to_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


if __name__ == "__main__":
    raise SystemExit(main())
