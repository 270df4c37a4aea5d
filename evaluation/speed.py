"""Ways of decoding timed side by side, in one run, on the same questions.

python -m evaluation.speed --target demo --draft-head demo --dtype float32 \
    --arms hf,plain,exact,fuzzy:0.3:js --task mt_bench --limit 4 --max-new-tokens 64 --output speed

Every arm (see `evaluation.arms`) gets the same ids of the first turn (later turns would depend on
an arm's own answer), the same stops, limit and sampling law, and is timed from ids to ids with the
device waited for. All arms answer one question before the next one comes, each time another arm
first. speed.json is written anew after every question, so that a run that is killed leaves the
figures so far.

On an accelerator the decoder waits for the device after each phase of a cycle, which makes the
seconds by phase right and our arms a little slower; --no-phases leaves both out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.acceptance import AcceptanceRule
from eagle_fsd.calibrate import make_folder
from eagle_fsd.chat import encode_prompt
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.device import peak_memory_bytes
from eagle_fsd.files import write_json
from evaluation.arms import (
    DRAFT_MODEL,
    HF,
    HF_LOOKUP,
    Arm,
    Request,
    answer,
    build_arms,
    loaded_target,
    parse_arms,
    question_seed,
    rotated,
    stop_ids,
)
from evaluation.environment import environment
from evaluation.questions import Question, add_selection_arguments, select
from evaluation.speed_report import Measurement, arm_figures, baseline_of, table
from evaluation.tasks import load_questions

REPORT_FILE = "speed.json"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """A question that fits the context.

    Attributes:
        question_id: the question.
        request: what every arm gets.
    """

    question_id: int | str
    request: Request


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
    task, questions, source = load_questions(
        args.task or args.questions, args.questions if args.task else None
    )
    questions = select(questions, args.limit, args.every)
    path = make_folder(args.output) / REPORT_FILE
    decoder, draft_model_decoder = _load(args, names)
    settings = _settings(args, task.name, source, decoder)
    _refuse_other_settings(path, settings)
    is_profiled = not args.no_phases and decoder.target.output_device.type != "cpu"
    arms = build_arms(names, decoder, draft_model_decoder, is_profiled)
    prompts = encode(decoder, questions, sampling, args.max_new_tokens, args.seed)
    facts: dict[str, Any] = {
        "environment": environment(decoder.target),
        "settings": settings,
        "num_planned": len(prompts),
        "num_left_out": len(questions) - len(prompts),
        "notes": _notes(arms, sampling),
    }
    warm_up(arms, prompts[0].request)
    measured: list[Measurement] = []
    result: dict[str, Any] = {}
    with tqdm(total=len(prompts), desc="measuring", unit="question") as bar:
        for measurement in measure(arms, prompts):
            measured.append(measurement)
            result = report(arms, measured, seed=args.seed, has_phases=not args.no_phases) | facts
            result["peak_memory"] = _peak_memory(decoder)
            write_json(path, result)
            bar.set_postfix_str(_progress(result))
            bar.update()
    text = json.dumps(result, ensure_ascii=False) if args.json else table(result)
    print(text if args.json else f"{text}\nwritten: {path}")


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
    target, prompts, stops = decoder.target, [], stop_ids(decoder)
    for question in questions:
        try:
            ids = encode_prompt(question.turns[0], decoder.tokenizer, target.vocabulary_size)
        except ValueError as error:
            raise ValueError(f"question {question.question_id!r}: {error}") from error
        room = target.max_positions - ids.numel()
        if room > 0:
            own_seed = question_seed(seed, question.question_id)
            request = Request(ids, min(max_new_tokens, room), stops, sampling, own_seed)
            prompts.append(Prompt(question.question_id, request))
    if not prompts:
        raise ValueError(
            f"none of {len(questions)} prompts fits the target's context of {target.max_positions} "
            "tokens; give shorter questions"
        )
    return prompts


def warm_up(arms: Sequence[Arm], request: Request) -> None:
    """Lets every arm decode a few tokens, which count nowhere."""
    num_tokens = min(WARM_UP_TOKENS, request.max_new_tokens)
    for arm in arms:
        arm.decode(dataclasses.replace(request, max_new_tokens=num_tokens))


def measure(arms: Sequence[Arm], prompts: Sequence[Prompt]) -> Iterator[Measurement]:
    """Question by question, all arms in turn, each time another one first.

    Raises:
        RuntimeError: an arm failed; says which one, and on which question.
    """
    for place, prompt in enumerate(prompts):
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
        yield Measurement(prompt.question_id, num_prompt_tokens, in_order)


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


def _settings(
    args: argparse.Namespace, task: str, source: str, decoder: SpeculativeDecoder
) -> dict[str, Any]:
    """What makes two runs comparable, with what "auto" became."""
    left_out = ("task", "questions", "output", "json", "device", "dtype", "tree")
    flags = {name: value for name, value in vars(args).items() if name not in left_out}
    target = loaded_target(decoder)
    return flags | {
        "task": task,
        "source": source,
        "device": str(target.output_device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tree": str(decoder.tree),
        "stop_ids": list(stop_ids(decoder)),
    }


def _refuse_other_settings(path: Path, settings: dict[str, Any]) -> None:
    """A report of the same settings is measured anew; another one's figures are not thrown away."""
    if not path.is_file():
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))["settings"]
        differing = [name for name in old | settings if old.get(name) != settings.get(name)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no report of this command; name another folder") from error
    if differing:
        name = differing[0]
        raise ValueError(
            f"{path} was measured with {name} {old.get(name)!r}, this run has "
            f"{settings.get(name)!r}; name another folder"
        )


def _notes(arms: Sequence[Arm], sampling: SamplingConfig) -> list[str]:
    """What a reader of the figures has to know about this run."""
    names = [arm.name for arm in arms if arm.name in (HF, HF_LOOKUP)]
    if names and not sampling.is_greedy:
        return [
            f"{' and '.join(names)} sampled the same law with transformers' own generator, seeded "
            "by question: ids differ from those of plain decoding"
        ]
    return []


def _peak_memory(decoder: SpeculativeDecoder) -> dict[str, Any]:
    device = decoder.target.output_device
    where = "resident set of the process" if device.type == "cpu" else f"of {device}"
    return {"bytes": peak_memory_bytes(device), "of": f"{where}, all arms together"}


def _progress(result: dict[str, Any]) -> str:
    """The ratios so far, for the bar."""
    ratios = {name: figures["ratio"]["median"] for name, figures in result["arms"].items()}
    return ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())


if __name__ == "__main__":
    raise SystemExit(main())
