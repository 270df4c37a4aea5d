"""Lets a judge model rate the answers of evaluation runs, one by one, as MT-Bench does.

OPENAI_API_KEY=... python -m evaluation.judge answers answers-exact --judge gpt-4 \
    --judge-prompts judge_prompts.jsonl --references reference_answer/gpt-4.jsonl --output ratings

The prompts and the reference answers (for math, reasoning and coding) are files of FastChat's
format; any server that speaks OpenAI's protocol will do (--base-url http://localhost:8000/v1
--no-key). Killed at any moment, the same command goes on where it was and asks nothing twice;
requests that failed for good are asked again, and the status is 1 while some are missing. Then
FastChat shows the ratings:

python -m fastchat.llm_judge.show_result --mode single \
    --input-file ratings/data/mt_bench/model_judgment/gpt-4_single.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from eagle_fsd.command import Parser, run
from evaluation.environment import environment
from evaluation.judge_client import (
    JudgeClient,
    JudgeConfig,
    RequestError,
    ServerError,
    StoppedError,
    read_key,
)
from evaluation.judge_file import JudgmentFile, check_same
from evaluation.judge_prompts import (
    MALFORMED,
    JudgePrompt,
    Match,
    build_matches,
    read_judge_prompts,
    read_rating,
    read_references,
)
from evaluation.questions import Question, add_selection_arguments, select
from evaluation.score import Run

DEFAULT_BASE_URL = "https://api.openai.com/v1"

_MILLION = 1_000_000


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost, in any currency.

    Attributes:
        prompt: of tokens that the judge reads, >= 0; None where it is not known.
        completion: of tokens that it writes, >= 0; None where it is not known.
    """

    prompt: float | None = None
    completion: float | None = None

    def __post_init__(self) -> None:
        for flag, price in (("--price-in", self.prompt), ("--price-out", self.completion)):
            if price is not None and not 0.0 <= price < math.inf:
                raise ValueError(f"{flag} must be finite and >= 0, got {price}")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("--price-in and --price-out go together; give both or none")

    def describe(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Tokens of some ratings, and their cost where the prices are known."""
        usages = [record.get("usage") or {} for record in records]
        prompt, completion = (
            [usage.get(name) for usage in usages] for name in ("prompt_tokens", "completion_tokens")
        )
        num_prompt, num_completion = (
            sum(count for count in counts if count is not None) for counts in (prompt, completion)
        )
        text = f"{num_prompt:,} tokens in, {num_completion:,} out"
        if self.prompt is not None and self.completion is not None:
            cost = (num_prompt * self.prompt + num_completion * self.completion) / _MILLION
            text += f", cost {cost:.4f}"
        num_uncounted = sum(None in pair for pair in zip(prompt, completion, strict=True))
        return text + (f" ({num_uncounted} replies not counted)" if num_uncounted else "")


@dataclass(frozen=True)
class Outcome:
    """What came of a judge run.

    Attributes:
        judged: ratings of this run, as the file has them.
        failed: matches that failed for good, with the reasons.
    """

    judged: list[dict[str, Any]]
    failed: list[tuple[Match, str]]


def read_runs(folders: Sequence[str]) -> list[Run]:
    """The runs to compare: finished, of the same questions, each of a model of its own.

    Raises:
        FileNotFoundError: for a folder without a run.
        ValueError: about the first thing that does not go together.
    """
    runs = [Run.read(folder, has_figures=False) for folder in folders]
    for number, each in enumerate(runs):
        name, first = str(each.folder), runs[0]
        if len(each.answers) < len(each.questions):
            raise ValueError(
                f"{name!r} has answers to {len(each.answers)} of {len(each.questions)} questions; "
                "finish the run first"
            )
        differ = [
            question_id
            for question_id in {**first.questions, **each.questions}
            if _asked(first, question_id) != _asked(each, question_id)
        ]
        if differ:
            raise ValueError(
                f"{str(first.folder)!r} and {name!r} differ in {len(differ)} questions, the first "
                f"is {differ[0]!r}; judge runs of the same task, --limit and --every together"
            )
        for other in runs[:number]:
            if other.record["model_id"] == each.record["model_id"]:
                raise ValueError(
                    f"{str(other.folder)!r} and {name!r} both have model id "
                    f"{each.record['model_id']!r}; answer one of them again with another --model-id"
                )
    return runs


def _asked(run: Run, question_id: int | str) -> tuple[str, tuple[str, ...]] | None:
    """What a judge is told of a question; None where the run has not asked it."""
    question = run.questions.get(question_id)
    return None if question is None else (question.category, question.turns)


def all_matches(
    runs: Sequence[Run],
    questions: Sequence[Question],
    prompts: Mapping[str, JudgePrompt],
    references: Mapping[int | str, Sequence[str]],
) -> list[Match]:
    """Everything there is to judge, question by question; of several choices the first.

    Raises:
        ValueError: as `build_matches`.
    """
    matches = []
    for question in questions:
        answers = {
            str(run.record["model_id"]): run.answers[question.question_id]["choices"][0]["turns"]
            for run in runs
        }
        matches += build_matches(question, answers, prompts, references)
    return matches


class Judging:
    """Asks for matches, several at a time; every rating is on the disk before it counts.

    Args:
        client: reaches the judge.
        file: locked.
        judge: the judge's name.
    """

    def __init__(self, client: JudgeClient, file: JudgmentFile, judge: str) -> None:
        self._client = client
        self._file = file
        self._judge = judge

    def run(self, pending: Sequence[Match], num_parallel: int) -> Outcome:
        """Judges all of them; those that fail for good are told and left out.

        Raises:
            ServerError: when none can succeed. As after Ctrl-C, requests under way are waited for,
                so that no reply that is paid for is lost; a second Ctrl-C gives them up.
            OSError: when a rating cannot be written.
        """
        outcome = Outcome([], [])
        try:
            with ThreadPoolExecutor(num_parallel) as pool:
                futures = {pool.submit(self._rate, match): match for match in pending}
                try:
                    self._collect(futures, outcome)
                except ServerError as error:
                    raise ServerError(
                        f"{error}; all ratings so far are kept, the same command goes on from there"
                    ) from error
                except KeyboardInterrupt:
                    self._wait(pool)
                    raise
                finally:
                    self._client.stop()
                    pool.shutdown(wait=False, cancel_futures=True)
        except KeyboardInterrupt:  # one that ends the wait at the pool's end
            self._client.abandon()
            raise
        return outcome

    def _wait(self, pool: ThreadPoolExecutor) -> None:
        """Waits for the requests under way; from the words on another Ctrl-C gives them up."""
        try:
            sys.stderr.write("waiting for the requests under way; Ctrl-C again gives them up\n")
            self._client.stop()
            pool.shutdown(cancel_futures=True)
        except KeyboardInterrupt:
            self._client.abandon()
            raise

    def _collect(self, futures: Mapping[Future[dict[str, Any]], Match], outcome: Outcome) -> None:
        num_malformed = 0
        with tqdm(total=len(futures), unit="rating", desc="judging") as bar:
            for future in as_completed(futures):
                match = futures[future]
                try:
                    record = future.result()
                except StoppedError:  # what stopped it is the result of another future
                    continue
                except RequestError as error:
                    outcome.failed.append((match, str(error)))
                    bar.write(f"{_name(match)}: {error}", file=sys.stderr)
                else:
                    outcome.judged.append(record)
                    num_malformed += record["score"] == MALFORMED
                counts = {"malformed": num_malformed, "failed": len(outcome.failed)}
                bar.set_postfix(counts, refresh=False)
                bar.update()

    def _rate(self, match: Match) -> dict[str, Any]:
        """One rating, written by the thread that got it: after Ctrl-C nobody else would."""
        name = json.dumps(match.key)
        reply = self._client.ask(match.system, match.user_prompt, name)
        record = {
            "question_id": match.question_id,
            "model": match.model_id,
            "judge": [self._judge, match.prompt_name],
            "user_prompt": match.user_prompt,
            "judgment": reply.text,
            "score": read_rating(reply.text),
            "turn": match.turn,
            "tstamp": time.time(),
            "finish_reason": reply.finish_reason,
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
            },
        }
        self._file.append(record)
        return record


def judge_folders(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """The command.

    Returns:
        Ratings that are still missing.

    Raises:
        ValueError, FileNotFoundError, ImportError: one sentence about what does not fit.
        RuntimeError: if the server cannot be used, or another run is at work.
        OSError: if a file cannot be written.
    """
    if args.parallel < 1:
        raise ValueError(f"--parallel must be >= 1, got {args.parallel}")
    config, prices = _config(args), Prices(args.price_in, args.price_out)
    runs = read_runs(args.folders)
    questions = list(runs[0].questions.values())
    prompts = read_judge_prompts(args.judge_prompts)
    references = read_references(args.references) if args.references else {}
    chosen = select(questions, args.limit, args.every)
    matches = all_matches(runs, chosen, prompts, references)
    file = JudgmentFile(args.output, config.model)
    with file.locked():
        found = file.read()
        check_same(found, runs[0].questions, matches)
        settings = _settings(config, prompts)
        file.check(settings)
        pending = [match for match in matches if not _is_rated(found, match, args.redo_malformed)]
        outcome = Outcome([], [])
        if pending:
            client = JudgeClient(config, None if args.no_key else read_key())
            session = {"argv": list(argv), "base_url": config.base_url, **environment()}
            file.begin(settings, session)
            outcome = Judging(client, file, config.model).run(pending, args.parallel)
            found = file.read()
    records = [found[match.key] for match in matches if match.key in found]
    print(_summary(records, len(matches), outcome, prices))
    print(file.path)
    return len(matches) - len(records)


def _is_rated(found: Mapping[Any, Mapping[str, Any]], match: Match, redo_malformed: bool) -> bool:
    record = found.get(match.key)
    return record is not None and not (redo_malformed and record["score"] == MALFORMED)


def _summary(
    records: Sequence[Mapping[str, Any]], num_matches: int, outcome: Outcome, prices: Prices
) -> str:
    malformed = [record for record in records if record["score"] == MALFORMED]
    num_cut = sum(record.get("finish_reason") == "length" for record in malformed)
    parts = [f"{len(records)} of {num_matches} ratings", f"{len(malformed)} malformed"]
    if num_cut:
        parts[-1] += f" ({num_cut} of replies cut at --max-tokens)"
    num_off = sum(not 1 <= record["score"] <= 10 for record in records) - len(malformed)
    if num_off:
        parts.append(f"{num_off} outside 1 to 10")
    lines = [", ".join(parts), f"this run: {prices.describe(outcome.judged)}"]
    if len(outcome.judged) < len(records):
        lines.append(f"all ratings: {prices.describe(records)}")
    if outcome.failed:
        lines.append(f"{len(outcome.failed)} failed; the same command asks for them again")
    return "\n".join(lines)


def _name(match: Match) -> str:
    return f"question {match.question_id!r}, turn {match.turn}, {match.model_id}"


def _config(args: argparse.Namespace) -> JudgeConfig:
    try:
        request = json.loads(args.request)
        # Python reads NaN and lone surrogates, which cannot be sent.
        json.dumps(request, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--request is not valid JSON: {error}") from error
    if not isinstance(request, dict) or request.keys() & {"model", "messages", "stream"}:
        raise ValueError(
            "--request must be a JSON object without model, messages and stream, got "
            f"{args.request!r}"
        )
    return JudgeConfig(
        model=args.judge,
        base_url=args.base_url,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        request=tuple(request.items()),
        timeout_s=args.timeout,
        num_retries=args.retries,
        retry_wait_s=args.retry_wait,
        seed=args.seed,
    )


def _settings(config: JudgeConfig, prompts: Mapping[str, JudgePrompt]) -> dict[str, Any]:
    """What decides the ratings; where the server is does not."""
    texts = json.dumps([asdict(prompts[name]) for name in sorted(prompts)])
    return {
        "judge": config.model,
        "judge_prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "request": dict(config.request),
    }


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m evaluation.judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders of evaluation.run")
    parser.add_argument(
        "--judge-prompts", required=True, metavar="FILE", help="FastChat's judge_prompts.jsonl"
    )
    parser.add_argument(
        "--references", metavar="FILE", help="a file of FastChat's reference_answer"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="of the ratings")
    parser.add_argument(
        "--redo-malformed", action="store_true", help="ask again where a reply had no rating"
    )
    add_selection_arguments(parser)
    _add_judge_arguments(parser)
    return parser


def _add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("judge")
    group.add_argument("--judge", required=True, metavar="MODEL", help="the server's name for it")
    group.add_argument(
        "--base-url",
        default=DEFAULT_BASE_URL,
        metavar="URL",
        help=f"of the server, with its /v1 (default {DEFAULT_BASE_URL})",
    )
    group.add_argument("--no-key", action="store_true", help="the server needs no OPENAI_API_KEY")
    group.add_argument("--temperature", type=float, default=0.0, help="of the judge (default 0)")
    group.add_argument(
        "--max-tokens", type=int, default=2048, metavar="N", help="of a reply (default 2048)"
    )
    group.add_argument(
        "--request",
        default="{}",
        metavar="JSON",
        help="further fields of each request; null takes one out, for example "
        '{"max_tokens": null, "max_completion_tokens": 2048}',
    )
    group.add_argument(
        "--parallel", type=int, default=4, metavar="N", help="requests at a time (default 4)"
    )
    group.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="of a silent server (120 s)"
    )
    group.add_argument(
        "--retries", type=int, default=6, metavar="N", help="after failures that pass (default 6)"
    )
    group.add_argument(
        "--retry-wait",
        type=float,
        default=1.0,
        metavar="S",
        help="before the first retry, then twice as long each time (default 1 s)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the waits' jitter (default 0)")
    group.add_argument("--price-in", type=float, metavar="P", help="of a million prompt tokens")
    group.add_argument("--price-out", type=float, metavar="P", help="of a million reply tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, 1 while ratings are missing, or 2 after an error in one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    missing: list[int] = []
    status = run(lambda: missing.append(judge_folders(args, words)))
    return status or int(missing[0] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
