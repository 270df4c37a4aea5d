"""Ways of decoding timed side by side, in one run, on the same questions.

python -m evaluation.speed --target demo --draft-head demo --dtype float32 \
    --arms hf,plain,exact,fuzzy:0.3:js --task mt_bench --limit 4 --max-new-tokens 64 --output speed

Every arm (see `evaluation.arms`) gets the same ids of the first turn (later turns would depend on
an arm's own answer), the same stops, limit and sampling law, and is timed from ids to ids with the
device waited for. All arms answer one question before the next one comes, each time another arm
first. A question is a line of speed.jsonl as soon as it is measured, so that the same command goes
on with the others after a kill or with a larger --limit; from these lines comes speed.json, written
anew after every question.

On an accelerator the decoder waits for the device after each phase of a cycle, which makes the
seconds by phase right and our arms a little slower; --no-phases leaves both out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle_fsd.acceptance import AcceptanceRule
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.device import peak_memory_bytes
from eagle_fsd.files import write_json
from evaluation.answers import AUTO, RunFolder, digest, settings_agree
from evaluation.arms import (
    DRAFT_MODEL,
    HF,
    HF_LOOKUP,
    Arm,
    Request,
    answer,
    arm_spec,
    build_arms,
    loaded_target,
    parse_arms,
    question_seed,
    rotated,
    stop_ids,
)
from evaluation.environment import environment
from evaluation.lines import LineFile
from evaluation.prompts import first_turns
from evaluation.questions import Question, add_selection_arguments, select
from evaluation.settings import model_digests, model_settings
from evaluation.speed_report import Measurement, arm_figures, baseline_of, table
from evaluation.tasks import load_questions, stand_in_note

REPORT_FILE = "speed.json"
MEASURED_FILE = "speed.jsonl"
WARM_UP_TOKENS = 8
# Of an environment, what seconds depend on; versions and the commit are noted only.
_TIMING = ("machine", "attention", "packed_weights", "compiled")


@dataclass(frozen=True)
class Prompt:
    """A question that fits the context.

    Attributes:
        question_id: the question.
        request: what every arm gets.
    """

    question_id: int | str
    request: Request


class MeasurementFile:
    """The lines of a run: one of each session, with its machine, and one of each question.

    Args:
        folder: of the run.

    Raises:
        ValueError: for a malformed line, by its number, a question that comes twice, or a report
            without the lines that it was made of.
    """

    def __init__(self, folder: Path) -> None:
        self.report_path = folder / REPORT_FILE
        self.settings: dict[str, Any] | None = None
        self.environments: list[dict[str, Any]] = []
        self.measured: dict[int | str, Measurement] = {}
        self._file = LineFile(folder / MEASURED_FILE)
        for number, line in enumerate(self._file.read(), start=1):
            try:
                self._add(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self._file.path}, line {number}: {error}; mend it or name another folder"
                ) from error
        if self.settings is None and self.report_path.exists():
            raise ValueError(
                f"{self.report_path} is there without its {MEASURED_FILE}; name another folder"
            )

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuses to go on with other settings.

        Raises:
            ValueError: naming the first one that differs.
        """
        found = self.settings or {}
        for name, wanted in json.loads(json.dumps(settings)).items():
            if name == "arms" and _specs(found.get(name, [])) == _specs(wanted):
                continue
            if not settings_agree(name, found.get(name), wanted):
                raise ValueError(
                    f"{self.report_path} was measured with {name} {found.get(name)!r}, this run "
                    f"has {wanted!r}; name another folder"
                )

    def begin(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Begins a session.

        Args:
            settings: of the models that were loaded.
            facts: the environment; seconds of another machine, or of weights that are packed or
                compiled otherwise, do not belong beside those here.

        Raises:
            ValueError: when the settings or the machine are others.
        """
        if self.settings is not None:
            self.check(settings)
        for earlier in self.environments:
            # An older file does not have all of them.
            for name in (name for name in _TIMING if name in earlier):
                if earlier[name] != facts[name]:
                    raise ValueError(
                        f"{self.report_path} was measured with {name} {earlier[name]!r}, here it "
                        f"is {facts[name]!r}; name another folder"
                    )
        if facts not in self.environments:
            fields = {"settings": settings, "environment": facts}
            self._file.append(json.dumps(fields).encode("ascii"))
            self._add(fields)

    def append(self, measurement: Measurement) -> None:
        """Adds a question; it is on the disk afterwards."""
        self._file.append(measurement.to_line())
        self.measured[measurement.question_id] = measurement

    def _add(self, fields: dict[str, Any]) -> None:
        if "settings" in fields:
            self.settings = dict(fields["settings"])
            self.environments.append(dict(fields["environment"]))
            return
        measurement = Measurement.from_fields(fields)
        arms = [] if self.settings is None else self.settings["arms"]
        if sorted(measurement.answers) != sorted(arms):
            raise ValueError(
                f"has arms {sorted(measurement.answers)}, the run {sorted(arms)}; remove the line"
            )
        if measurement.question_id in self.measured:
            raise ValueError(f"question_id {measurement.question_id!r} comes twice")
        self.measured[measurement.question_id] = measurement


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; a user's error is one line on stderr and status 2."""
    args = build_parser().parse_args(argv)
    return run(lambda: _speed(args))


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m evaluation.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--arms",
        required=True,
        metavar="LIST",
        help="by commas: hf, hf-lookup, plain, exact, a rule such as fuzzy:0.3:js, draft-model "
        "(exact with --draft-model, beside --draft-head)",
    )
    group.add_argument("--task", help="name of a question set, or a FastChat question file")
    group.add_argument("--questions", metavar="FILE", help="FastChat questions for the task")
    group.add_argument("--max-new-tokens", type=int, default=256)
    group.add_argument("--seed", type=int, default=0, help="of sampling and of the intervals")
    group.add_argument(
        "--no-phases",
        action="store_true",
        help="leave out seconds by phase, which cost some speed on an accelerator",
    )
    group.add_argument("--output", required=True, metavar="DIR", help=f"folder for {REPORT_FILE}")
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_model_arguments(parser)
    SamplingConfig.add_arguments(parser)
    add_selection_arguments(parser)
    return parser


def _speed(args: argparse.Namespace) -> None:
    names, sampling = _check(args), SamplingConfig.from_args(args)
    # A question file stands for a task of its own.
    task, all_questions, source = load_questions(
        args.task or args.questions, args.questions if args.task else None
    )
    questions = select(all_questions, args.limit, args.every)
    settings = _settings(args, task.name, all_questions, names, sampling)
    folder = RunFolder(args.output, "speed")
    with folder.locked():
        print(f"questions: {source}", file=sys.stderr)
        file = MeasurementFile(folder.folder)
        if file.settings is not None:
            file.check(settings)
            settings = file.settings
            vars(args).update({name: settings[name] for name in ("dtype", "tree", "draft_vocab")})
            names = parse_arms(",".join(settings["arms"]))  # as they are written in the file
            has_packed = file.environments[0].get("packed_weights")
            if args.packed_weights == AUTO and has_packed is not None:
                args.packed_weights = "on" if has_packed else "off"
        decoder, draft_model_decoder = _load(args, names)
        settings = settings | _resolved(args, decoder)
        is_profiled = not args.no_phases and decoder.target.output_device.type != "cpu"
        arms = build_arms(names, decoder, draft_model_decoder, is_profiled)
        prompts = encode(decoder, questions, sampling, args.max_new_tokens, args.seed)
        file.begin(settings, environment(decoder.target))
        facts = {
            "settings": settings | {"source": source, "limit": args.limit, "every": args.every},
            "source": source,
            "environment": file.environments[0],
            "resumed": file.environments[1:],
            "num_planned": len(prompts),
            "num_left_out": len(questions) - len(prompts),
            "notes": [*_notes(arms, sampling), *stand_in_note(task.name, source)],
        }
        result = _measure_all(file, arms, prompts, facts, args)
    text = json.dumps(result, ensure_ascii=False) if args.json else table(result)
    print(text if args.json else f"{text}\nwritten: {file.report_path}")


def _measure_all(
    file: MeasurementFile,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    facts: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measures what the file does not hold yet; the report, written after every question."""

    def write() -> dict[str, Any]:
        found = (file.measured.get(prompt.question_id) for prompt in prompts)
        measured = [each for each in found if each is not None]
        result = report(arms, measured, seed=args.seed, has_phases=not args.no_phases) | facts
        peak = max(each.peak_memory_bytes for each in measured)
        result["peak_memory"] = {"bytes": peak, "of": _memory_words(arms[0].device)}
        write_json(file.report_path, result)
        return result

    todo = [prompt for prompt in prompts if prompt.question_id not in file.measured]
    if not todo:
        return write()
    warm_up(arms, todo[0].request)
    with tqdm(
        total=len(prompts), initial=len(prompts) - len(todo), desc="measuring", unit="question"
    ) as bar:
        for measurement in measure(arms, todo, len(file.measured)):
            file.append(measurement)
            result = write()
            bar.set_postfix_str(_progress(result))
            bar.update()
    return result


def _check(args: argparse.Namespace) -> dict[str, AcceptanceRule | None]:
    """The arms of the flags, after all that can be refused before anything is loaded."""
    names = parse_arms(args.arms)
    if DRAFT_MODEL in names and args.draft_model is None:
        raise ValueError(f"arm {DRAFT_MODEL!r} needs --draft-model: a small LM, same tokenizer")
    if any(rule is not None for rule in names.values()):
        require_drafter(args)
    if args.task is None and args.questions is None:
        raise ValueError("nothing to answer: give --task, or --questions with a question file")
    for name, low in (("max_new_tokens", 1), ("seed", 0)):
        if getattr(args, name) < low:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be >= {low}, got {getattr(args, name)}")
    return names


def _load(
    args: argparse.Namespace, names: dict[str, AcceptanceRule | None]
) -> tuple[SpeculativeDecoder, SpeculativeDecoder | None]:
    """The decoder of all arms, and that of draft-model on the same weights.

    A head drafts for the rules where there is one, the draft model otherwise.
    """
    needs_drafter = any(rule for name, rule in names.items() if name != DRAFT_MODEL)
    head = args.draft_head if needs_drafter else None
    model = args.draft_model if needs_drafter and head is None else None
    flags = vars(args) | {"draft_head": head, "draft_model": model}
    decoder = load_decoder(argparse.Namespace(**flags))
    if DRAFT_MODEL not in names:
        return decoder, None
    if model is not None:
        return decoder, decoder
    return decoder, SpeculativeDecoder.from_pretrained(
        loaded_target(decoder).model,
        draft_model=args.draft_model,
        tokenizer=decoder.tokenizer,
        tree=decoder.tree,
    )


def encode(
    decoder: SpeculativeDecoder,
    questions: Sequence[Question],
    sampling: SamplingConfig,
    max_new_tokens: int,
    seed: int,
) -> list[Prompt]:
    """The first turns as requests, without those that leave no room for an answer.

    Near the end of the context an answer is limited to the room that is left, in every arm.

    Raises:
        ValueError: a prompt that cannot be encoded, by its question, or no prompt that fits.
    """
    stops, prompts = stop_ids(decoder), []
    for question, ids in first_turns(decoder, questions):
        num_tokens = min(max_new_tokens, decoder.target.max_positions - ids.numel())
        own_seed = question_seed(seed, question.question_id)
        request = Request(ids, num_tokens, stops, sampling, own_seed)
        prompts.append(Prompt(question.question_id, request))
    return prompts


def warm_up(arms: Sequence[Arm], request: Request) -> None:
    """Lets every arm decode a few tokens, which count nowhere."""
    num_tokens = min(WARM_UP_TOKENS, request.max_new_tokens)
    for arm in arms:
        arm.decode(dataclasses.replace(request, max_new_tokens=num_tokens))


def measure(
    arms: Sequence[Arm], prompts: Sequence[Prompt], num_before: int = 0
) -> Iterator[Measurement]:
    """Question by question, all arms in turn, each time another one first.

    Args:
        arms: in the order of the answers.
        prompts: at least one.
        num_before: questions that are measured already, for whose turn it is.

    Raises:
        RuntimeError: an arm failed; says which one, and on which question.
    """
    for place, prompt in enumerate(prompts, start=num_before):
        answers = {}
        for arm in rotated(arms, place):
            try:
                answers[arm.name] = answer(arm, prompt.request)
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(
                    f"arm {arm.name!r} failed on question {prompt.question_id!r}: {error}"
                ) from error
        num_prompt_tokens = prompt.request.input_ids.numel()
        in_order = {arm.name: answers[arm.name] for arm in arms}
        peak = peak_memory_bytes(arms[0].device)
        yield Measurement(prompt.question_id, num_prompt_tokens, in_order, peak)


def report(
    arms: Sequence[Arm], measured: Sequence[Measurement], *, seed: int, has_phases: bool = True
) -> dict[str, Any]:
    """The figures of all arms over the questions so far.

    Returns:
        "baseline", "arms" {name: see `arm_figures`}, "num_questions" and "per_question".
    """
    baseline = baseline_of([arm.name for arm in arms])
    return {
        "baseline": baseline,
        "arms": {
            arm.name: arm_figures(arm, measured, baseline, seed=seed, has_phases=has_phases)
            for arm in arms
        },
        "num_questions": len(measured),
        "per_question": [each.to_dict() for each in measured],
    }


def _specs(names: Iterable[str]) -> list[str]:
    return [arm_spec(name) for name in names]


def _settings(
    args: argparse.Namespace,
    task: str,
    questions: Sequence[Question],
    names: Iterable[str],
    sampling: SamplingConfig,
) -> dict[str, Any]:
    """What decides the figures, as far as the flags tell it."""
    return {
        **model_settings(args),
        "task": task,
        "questions": digest(questions),
        "arms": list(names),
        **dataclasses.asdict(sampling),
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "no_phases": args.no_phases,
    }


def _resolved(args: argparse.Namespace, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """What the models that were loaded add to the settings."""
    target = loaded_target(decoder)
    return {
        "device": str(target.output_device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tree": str(decoder.tree),
        "stop_ids": list(stop_ids(decoder)),
        **model_digests(args),
    }


def _notes(arms: Sequence[Arm], sampling: SamplingConfig) -> list[str]:
    """What a reader of the figures has to know about this run."""
    names = [arm.name for arm in arms if arm.name in (HF, HF_LOOKUP)]
    if names and not sampling.is_greedy:
        return [
            f"{' and '.join(names)} sampled the same law with transformers' own generator, seeded "
            "by question: ids differ from those of plain decoding"
        ]
    return []


def _memory_words(device: torch.device) -> str:
    where = "resident set of the process" if device.type == "cpu" else f"of {device}"
    return f"{where}, all arms together"


def _progress(result: dict[str, Any]) -> str:
    """The ratios so far, for the bar."""
    ratios = {name: figures["ratio"]["median"] for name, figures in result["arms"].items()}
    return ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())


if __name__ == "__main__":
    raise SystemExit(main())
