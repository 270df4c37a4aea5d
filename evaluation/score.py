"""Scores the answers of evaluation runs.

python -m evaluation.score answers --exact answers-exact

Word problems are compared with their references, code with its tests, which are run only with
--allow-code-execution, and everything with the answers of an exact run. Each folder gets a
scores.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.command import Parser, run
from eagle_fsd.files import write_json
from evaluation.answers import (
    TEXTS,
    TEXTS_AND_FIGURES,
    read_answers,
    read_run,
    settings_agree,
)
from evaluation.code_execution import (
    DEFAULT_TIMEOUT_S,
    check_execution,
    namespaces,
    run_program,
)
from evaluation.questions import Question, read_questions
from evaluation.scoring import (
    Acceptance,
    Agreement,
    LengthRatio,
    complete_program,
    cost_per_token,
    extract_number,
    is_right,
    mean,
    repetition_rate,
    wilson_interval,
)
from evaluation.tasks import code_tests, stand_in_note

Judge = Callable[[Question, str], bool | None]

SCORES_FILE = "scores.json"

_RULE_SETTINGS = frozenset(("rule", "budget"))
# They change how fast exact and plain decoding are, not what they answer.
_DRAFT_SETTINGS = frozenset(
    (
        "draft_head",
        "draft_head_sha256",
        "draft_vocab",
        "draft_model",
        "draft_model_sha256",
        "tree",
    )
)


@dataclass(frozen=True)
class Run:
    """A run folder, read.

    Attributes:
        folder: where.
        record: its run.json.
        answers: by question_id, in the order of the file.
        questions: by question_id: all those asked, with their references.
    """

    folder: Path
    record: Mapping[str, Any]
    answers: Mapping[int | str, Mapping[str, Any]]
    questions: Mapping[int | str, Question]

    @classmethod
    def read(
        cls,
        folder: str | Path,
        questions: str | Path | None = None,
        *,
        has_figures: bool = True,
    ) -> Run:
        """Reads a folder of `evaluation.run`, and its questions from `questions` if given.

        Args:
            folder: of the run.
            questions: a file in their place.
            has_figures: whether the rule and what was measured must be there beside the texts.

        Raises:
            FileNotFoundError: if the folder holds no run, or a file of it is missing.
            ValueError: if one of its files is malformed, there is no answer, or one answers none
                of the questions.
        """
        folder = Path(folder)
        record = read_run(folder)
        if has_figures:
            _check_record(folder, record)
        path = folder / "questions.jsonl" if questions is None else Path(questions)
        asked = {question.question_id: question for question in read_questions(path)}
        fields = TEXTS_AND_FIGURES if has_figures else TEXTS
        answers = {answer["question_id"]: answer for answer in read_answers(folder, fields)}
        if not answers:
            raise ValueError(f"{str(folder)!r} holds no answers yet; go on with the run first")
        for question_id in answers:
            if question_id not in asked:
                raise ValueError(
                    f"{str(folder)!r} answers question {question_id!r}, which is not in {path}"
                )
        return cls(folder, record, answers, asked)

    @property
    def rule(self) -> str:
        return str(self.record["settings"]["rule"])

    def choices(self) -> list[tuple[Question, Mapping[str, Any]]]:
        """Every choice of every answer beside its question."""
        return [
            (self.questions[question_id], choice)
            for question_id, answer in self.answers.items()
            for choice in answer["choices"]
        ]

    def cycles_by_question(self) -> list[list[tuple[int, int]]]:
        """(New tokens, cycles) of every turn of every choice, a list a question."""
        return [
            [
                pair
                for choice in answer["choices"]
                for pair in zip(choice["new_tokens"], choice["idxs"], strict=True)
            ]
            for answer in self.answers.values()
        ]

    def turns(self, name: str) -> list[Any]:
        """The entries of one of the choices' lists, over all turns."""
        return [entry for _, choice in self.choices() for entry in choice[name]]


def _check_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuses a run.json without what says how the answers were made.

    Raises:
        ValueError: naming the folder and what is missing or wrong.
    """
    settings = record["settings"]
    texts = {"task": record.get("task"), "kind": record.get("kind"), "rule": settings.get("rule")}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = settings.get(name, 0)
        if not isinstance(value, int | float) or not math.isfinite(value):
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"the run.json of {str(folder)!r} has no {' and no '.join(wrong)} as evaluation.run "
            "writes it; name the --output folder of one"
        )


def score_run(run: Run, exact: Run | None, judge: Judge) -> dict[str, Any]:
    """All figures of a run, as scores.json has them.

    Args:
        run: the run.
        exact: an exact or plain run of the same questions and settings, to compare with.
        judge: whether an answer is right; None leaves it unscored.

    Raises:
        ValueError: if `exact` cannot be compared with.
    """
    tokens = run.turns("new_tokens")
    wall_s, stats = sum(run.turns("wall_time")), run.turns("stats")
    repetition = [repetition_rate(ids) for ids in run.turns("token_ids")]
    reasons = run.turns("finish_reasons")
    return {
        "model_id": run.record["model_id"],
        "task": run.record["task"],
        "source": run.record.get("source"),
        "kind": run.record["kind"],
        "rule": run.rule,
        "num_questions": len(run.questions),
        "num_answers": len(run.answers),
        "num_turns": len(tokens),
        "num_tokens": sum(tokens),
        "accuracy": _accuracy(run, judge),
        "against_exact": None if exact is None else _comparison(run, exact),
        "repetition_rate": mean([rate for rate in repetition if rate is not None]),
        "cut_share": mean([float(reason == "length") for reason in reasons]),
        "acceptance_length": asdict(Acceptance.of(run.cycles_by_question())),
        "kl_per_token": _json_number(cost_per_token(stats, "kl_spent")),
        "regret_per_token": _json_number(cost_per_token(stats, "regret_spent")),
        "tokens_per_second": sum(tokens) / wall_s if wall_s else None,
    }


def judge_number(question: Question, answer: str) -> bool | None:
    """Whether a word problem's answer is right; None without a number to compare with."""
    reference = question.reference[0] if question.reference else ""
    return is_right(answer, reference) if extract_number(reference) is not None else None


def judge_code(question: Question, answer: str, timeout_s: float) -> bool | None:
    """Whether an answer passes its question's tests, which are run; None without tests."""
    tests = code_tests(question)
    if tests is None:
        return None
    program = complete_program(tests.prompt, answer, tests.entry_point)
    return run_program(f"{program}\n{tests.tests}\n", timeout_s).has_passed


def leave_unscored(_question: Question, _answer: str) -> None:
    """Judges nothing: of chats, and of code that must not run."""


def _accuracy(run: Run, judge: Judge) -> dict[str, Any]:
    """Right answers to first turns, by question: of several choices the share that is right.

    The choices of one question are alike (at temperature 0 equal), so that only questions count as
    trials of the interval.
    """
    choices = tqdm(run.choices(), desc=f"scoring {run.folder.name}", leave=False, delay=2.0)
    verdicts: dict[int | str, list[bool | None]] = {}
    for question, choice in choices:
        verdict = judge(question, choice["turns"][0])
        verdicts.setdefault(question.question_id, []).append(verdict)
    shares = [mean([float(v) for v in each if v is not None]) for each in verdicts.values()]
    scored = [share for share in shares if share is not None]
    interval = wilson_interval(sum(scored), len(scored))
    return {
        "num_right": sum(scored),
        "num_scored": len(scored),
        "num_unscored": len(shares) - len(scored),
        "share": mean(scored),
        "low": interval[0] if interval else None,
        "high": interval[1] if interval else None,
    }


def _comparison(run: Run, exact: Run) -> dict[str, Any]:
    """Agreement and length ratio, over all turns and by turn."""
    check_comparable(run, exact)
    by_turn: dict[int, list[tuple[list[int], list[int]]]] = {}
    for question_id, answer in run.answers.items():
        others = exact.answers[question_id]["choices"]
        for ours, theirs in zip(answer["choices"], others, strict=True):
            pairs = zip(ours["token_ids"], theirs["token_ids"], strict=True)
            for number, pair in enumerate(pairs):
                by_turn.setdefault(number, []).append(pair)
    pairs_of_all = [pair for pairs in by_turn.values() for pair in pairs]
    lengths = LengthRatio.of([(len(ours), len(theirs)) for ours, theirs in pairs_of_all])
    return {
        "folder": str(exact.folder),
        "agreement": asdict(Agreement.of(pairs_of_all)),
        "agreement_by_turn": [asdict(Agreement.of(by_turn[number])) for number in sorted(by_turn)],
        "length_ratio": asdict(lengths),
    }


def check_comparable(run: Run, exact: Run) -> None:
    """Makes sure that two runs differ in nothing but the rule.

    The draft head and the tree of an exact run may be others: its answers do not depend on them.

    Raises:
        ValueError: naming the first thing that differs.
    """
    if exact.rule not in ("exact", "plain"):
        raise ValueError(
            f"--exact {str(exact.folder)!r} is a run of rule {exact.rule!r}; name one of --rule "
            "exact or --plain"
        )
    ours, theirs = run.record["settings"], exact.record["settings"]
    for name in sorted(set(ours) | set(theirs)):
        if name in _RULE_SETTINGS | _DRAFT_SETTINGS:
            continue
        if settings_agree(name, ours.get(name), theirs.get(name)):
            continue
        raise ValueError(
            f"{str(run.folder)!r} has {name} {ours.get(name)!r}, the exact run "
            f"{str(exact.folder)!r} has {theirs.get(name)!r}; compare runs that differ in the rule "
            "only"
        )
    different = set(run.answers) ^ set(exact.answers)
    if different:
        raise ValueError(
            f"{len(different)} questions are answered in only one of {str(run.folder)!r} and the "
            f"exact run {str(exact.folder)!r}; finish both with the same --limit and --every"
        )


def score_folders(args: argparse.Namespace) -> None:
    """The command.

    Raises:
        ValueError, FileNotFoundError: one sentence about what does not fit.
        RuntimeError: if programs cannot be run here.
        OSError: if a file cannot be written.
    """
    if not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout must be > 0 s and finite, got {args.timeout}")
    runs = [Run.read(folder, args.questions) for folder in args.folders]
    exact = None if args.exact is None else Run.read(args.exact, args.questions)
    if exact is not None:
        for each in runs:
            check_comparable(each, exact)
    kinds = {each.record["kind"] for each in runs}
    judges: dict[str, Judge] = {"math": judge_number}
    if args.allow_code_execution and "code" in kinds:
        judges["code"] = _code_judge(args.timeout)
    for source in filter(None, dict.fromkeys(each.record.get("source") for each in runs)):
        print(f"questions: {source}", file=sys.stderr)
    scores = []
    for each in runs:
        judge = judges.get(each.record["kind"], leave_unscored)
        try:
            scores.append(score_run(each, exact, judge))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the answers in {str(each.folder)!r} are not as evaluation.run writes them "
                f"({type(error).__name__}: {error}); make them anew"
            ) from error
        write_json(each.folder / SCORES_FILE, scores[-1])
    if args.json:
        print(json.dumps(scores, indent=2))
    else:
        print("\n".join([table(scores), *_stand_ins(scores)]))
        if "code" in kinds and not args.allow_code_execution:
            print("code is not scored: --allow-code-execution runs the answers")


def _code_judge(timeout_s: float) -> Judge:
    """Judges code, after it is sure that code can run here."""
    check_execution()
    if not namespaces():
        sys.stderr.write(
            "warning: this machine gives no namespaces; an audit hook is all that holds the "
            "answers' code back, run it in a container\n"
        )
    return partial(judge_code, timeout_s=timeout_s)


def table(scores: Sequence[Mapping[str, Any]]) -> str:
    """One line a run; "-" where there is no figure."""
    rows = [_HEADS] + [_cells(each) for each in scores]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _stand_ins(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which runs are no figures of the task that they name."""
    return [
        f"{each['model_id']}: {note}"
        for each in scores
        for note in stand_in_note(each["task"], each["source"] or "")
    ]


_HEADS = (
    "run",
    "answers",
    "right",
    "unscored",
    "equal",
    "prefix",
    "length",
    "repeated",
    "cut",
    "tokens/cycle",
    "nats/token",
    "tokens/s",
)


def _cells(score: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy = score["accuracy"]
    against = score["against_exact"] or {"agreement": {}, "length_ratio": {}}
    right = _percent(accuracy["share"])
    if accuracy["share"] is not None:
        right += f" ({_percent(accuracy['low'])}-{_percent(accuracy['high'])})"
    cost = score["kl_per_token"] if score["kl_per_token"] is not None else score["regret_per_token"]
    return (
        score["model_id"],
        f"{score['num_answers']}/{score['num_questions']}",
        right,
        str(accuracy["num_unscored"]),
        _percent(against["agreement"].get("equal")),
        _percent(against["agreement"].get("common_prefix")),
        _figure(against["length_ratio"].get("of_sums"), 3),
        _percent(score["repetition_rate"]),
        _percent(score["cut_share"]),
        _figure(score["acceptance_length"]["micro"], 2),
        _figure(cost, 4),
        _figure(score["tokens_per_second"], 1),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _figure(value: float | str | None, decimals: int) -> str:
    return "-" if value is None else f"{float(value):.{decimals}f}"


def _json_number(value: float | None) -> float | str | None:
    """JSON has no infinity: "inf" then, as in the statistics."""
    return "inf" if value == float("inf") else value


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m evaluation.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders of evaluation.run")
    parser.add_argument("--exact", metavar="DIR", help="an exact or plain run to compare with")
    parser.add_argument(
        "--questions", metavar="FILE", help="references from this file instead of the run's own"
    )
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the code of answers, each in a limited process of its own",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds for the code of one answer (default {DEFAULT_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    args = build_parser().parse_args(argv)
    return run(lambda: score_folders(args))


if __name__ == "__main__":
    raise SystemExit(main())
