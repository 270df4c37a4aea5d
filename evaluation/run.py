"""Answers questions and keeps them in FastChat's format.

python -m evaluation.run --task gsm8k --limit 4 --target demo --draft-head demo \
    --rule fuzzy:0.3:js --max-new-tokens 128 --output answers

Killed at any moment, the same command goes on where it was; with a larger --limit it asks more.
Several processes or machines on one shared disk: `accelerate launch -m evaluation.run` with the
same flags (on CPUs, where that starts one process, `torchrun --nproc-per-node 2 -m
evaluation.run`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.device import resolve_device
from eagle_fsd.target import TargetModel
from evaluation.answerer import AnswerConfig, Answerer
from evaluation.answers import AUTO, RunFolder, digest, safe_model_id
from evaluation.environment import environment
from evaluation.questions import Question, add_selection_arguments, select
from evaluation.settings import model_digests, model_settings
from evaluation.tasks import TASKS, load_questions

# Processes that are done wait for the others, who may have hours to go.
_PATIENCE = timedelta(days=30)


class Figures:
    """Running totals of answers."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_empty = 0
        self._seconds = 0.0
        self._num_cycle_tokens = 0
        self._num_cycles = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        """Counts all turns of an answer."""
        for choice in answer["choices"]:
            for num_tokens, num_cycles, seconds, reason in zip(
                *(choice[name] for name in ("new_tokens", "idxs", "wall_time", "finish_reasons")),
                strict=True,
            ):
                self.num_tokens += num_tokens
                self.num_empty += reason == "context" and num_tokens == 0
                self._seconds += seconds
                if num_cycles:  # the first token after the prompt is of no cycle
                    self._num_cycle_tokens += num_tokens - 1
                    self._num_cycles += num_cycles

    def rates(self) -> dict[str, str]:
        """Tokens per second and acceptance length over all tokens."""
        length = self._num_cycle_tokens / self._num_cycles if self._num_cycles else None
        return {
            "tokens/s": f"{self.num_tokens / self._seconds:.1f}" if self._seconds else "-",
            "acceptance length": "-" if length is None else f"{length:.2f}",
        }


@dataclass(frozen=True)
class _Plan:
    """What there is to do, the same for all processes.

    Attributes:
        pending: questions without an answer.
        num_done: questions of the selection that have one.
        flags: of the models, those that can be "auto" and are as a resumed run has them.
    """

    pending: list[Question]
    num_done: int
    flags: dict[str, str]


class _Keeper:
    """What the first process alone does: it reads the questions and looks after the folder.

    Args:
        folder: locked.
        args: of the command.
        argv: the command's words.
        settings: what decides the answers, models included.

    Raises:
        ValueError, FileNotFoundError: for questions that cannot be read.
    """

    def __init__(
        self,
        folder: RunFolder,
        args: argparse.Namespace,
        argv: Sequence[str],
        settings: dict[str, Any],
    ) -> None:
        self._folder = folder
        self._args = args
        self._task, self._questions, self._source = load_questions(args.task, args.questions)
        self._chosen = select(self._questions, args.limit, args.every)
        self._order = [question.question_id for question in self._questions]
        self._settings = {
            "task": self._task.name,
            "questions": digest(self._questions),
            **settings,
        }
        self._session: dict[str, Any] = {"argv": list(argv)}
        self._stored: dict[str, Any] | None = None
        self._answered: set[int | str] = set()

    def plan(self) -> _Plan:
        """What there is to do; merges what earlier processes have left.

        Raises:
            ValueError: when the folder holds another run, or something else.
            RuntimeError: when the device of the run is not here.
        """
        # Before a refusal of other questions: a source that was reachable may no longer be.
        print(f"questions: {self._source}", file=sys.stderr)
        self._stored = self._folder.resume(self._settings)
        if self._stored is not None:
            answers = self._folder.merge(self._order)
            self._answered = {answer["question_id"] for answer in answers}
        settings = self._settings if self._stored is None else self._stored["settings"]
        device = self._args.device
        if self._stored is not None and device == AUTO:
            device = self._stored["device"].partition(":")[0]
            try:
                resolve_device(device)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the run was begun on {device!r}: {error}; go on elsewhere with --device"
                ) from error
        pending = [each for each in self._chosen if each.question_id not in self._answered]
        flags = {name: settings[name] or AUTO for name in ("dtype", "tree", "draft_vocab")}
        return _Plan(pending, len(self._chosen) - len(pending), flags | {"device": device})

    def start(self, decoder: SpeculativeDecoder, num_processes: int) -> None:
        """Writes run.json, with what "auto" has come to, and the questions.

        Raises:
            ValueError: when the run was begun with other files of a model.
        """
        target = decoder.target
        assert isinstance(target, TargetModel)
        session = self._session | environment(target) | {"num_processes": num_processes}
        digests = model_digests(self._args)
        if self._stored is None:
            tree = None if self._args.plain else str(decoder.tree)
            self._stored = {
                "task": self._task.name,
                "kind": self._task.kind,
                "source": self._source,
                "model_id": self._folder.model_id,
                "settings": self._settings | {"dtype": session["dtype"], "tree": tree} | digests,
                **session,
                "resumed": [],
            }
        else:
            self._folder.resume(self._settings | digests)  # what was loaded may be another model
            self._stored["settings"] |= digests
            self._stored["resumed"].append(session)
        self._folder.write_run(self._stored)
        asked = self._answered | {question.question_id for question in self._chosen}
        self._folder.write_questions(q for q in self._questions if q.question_id in asked)

    def finish(self) -> str:
        """Merges all parts; the run in one line.

        Raises:
            RuntimeError: when an answer of the selection is missing.
        """
        answers = self._folder.merge(self._order)
        lost = {q.question_id for q in self._chosen} - {each["question_id"] for each in answers}
        if lost:
            raise RuntimeError(
                f"{len(lost)} answers are not in {str(self._folder.folder)!r}; do all processes "
                "write to one shared disk?"
            )
        figures = Figures()
        for answer in answers:
            figures.add(answer)
        parts = [f"{len(answers)} answers", f"{figures.num_tokens} tokens"]
        parts += [f"{name} {value}" for name, value in figures.rates().items()]
        if figures.num_empty:
            parts.append(f"{figures.num_empty} turns empty, their prompts fill the context")
        return f"{', '.join(parts)}\n{self._folder.answer_file}"


def answer_questions(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """The command, in each of its processes.

    Raises:
        ValueError, TypeError, FileNotFoundError, RuntimeError, ImportError: one sentence about what
            does not fit.
        OSError: if the machine fails, for example on a full disk.
    """
    config = AnswerConfig.from_args(args)
    if config.is_plain:
        args = _changed(args, draft_head=None, draft_model=None, draft_vocab=AUTO)
    else:
        require_drafter(args)
    settings = model_settings(args) | config.settings()
    if config.is_plain:
        settings["tree"] = None
    folder = RunFolder(args.output, args.model_id or _default_model_id(settings))
    state = _processes(args.device)
    with ExitStack() as stack:
        keeper = None
        plans: list[_Plan | None] = [None]
        try:
            if state.is_main_process:
                stack.enter_context(folder.locked())
                keeper = _Keeper(folder, args, argv, settings)
                plans[0] = keeper.plan()
        finally:
            # The others take its word: they could see another state of the folder.
            broadcast_object_list(plans)
        plan = plans[0]
        if plan is None:  # the first process says why
            return
        if plan.pending:
            device = _own_device(plan.flags["device"], state)
            decoder = load_decoder(_changed(args, **(plan.flags | {"device": device})))
            # What "auto" comes to can differ between machines.
            decoder.tree = broadcast_object_list([decoder.tree])[0]
            answerer = Answerer(decoder, config, folder.model_id)
            answerer.check(plan.pending)
            if keeper:
                keeper.start(decoder, state.num_processes)
            state.wait_for_everyone()  # no answer before run.json
            _answer_share(answerer, plan, folder, state)
        state.wait_for_everyone()
        if keeper:
            print(keeper.finish())
    state.destroy_process_group()


def _default_model_id(settings: Mapping[str, Any]) -> str:
    """Target and rule."""
    name = f"{Path(settings['target']).name}-{settings['rule']}"
    if settings["budget"] is not None:
        name += f"-budget-{settings['budget']}"
    return safe_model_id(name)


def _processes(device: str) -> PartialState:
    """This process among all that were launched.

    Raises:
        ValueError: when several would share one numbered device.
    """
    state = PartialState(cpu=device == "cpu", timeout=_PATIENCE)
    if state.num_processes > 1 and ":" in device:
        raise ValueError(
            f"each of {state.num_processes} processes takes a device of its own, got device "
            f"{device!r}; name its kind only"
        )
    return state


def _answer_share(answerer: Answerer, plan: _Plan, folder: RunFolder, state: PartialState) -> None:
    """Answers this process's questions, each on the disk before the next."""
    share = plan.pending[state.process_index :: state.num_processes]
    if not share:
        return
    answerer.warm_up(share[0])
    figures = Figures()
    is_alone = state.num_processes == 1
    initial = plan.num_done if is_alone else 0
    with tqdm(
        total=initial + len(share),
        initial=initial,
        unit="question",
        desc="answering" if is_alone else f"answering (process 1 of {state.num_processes})",
        disable=not state.is_main_process,
    ) as bar:
        for question in share:
            answer = answerer.answer(question)
            folder.append(answer, state.process_index)
            figures.add(answer)
            bar.set_postfix(figures.rates(), refresh=False)
            bar.update()


def _own_device(device: str, state: PartialState) -> str:
    """The device of this process, among several one of its own where the kind has more."""
    if state.num_processes == 1:
        return device
    resolved = resolve_device(device)
    return str(state.device if resolved.type == state.device.type else resolved)


def _changed(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**(vars(args) | changes))


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m evaluation.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("questions and answers")
    group.add_argument(
        "--task", required=True, help=f"{', '.join(TASKS)}, or a file of questions (JSON lines)"
    )
    group.add_argument("--questions", metavar="FILE", help="the task's questions from this file")
    group.add_argument("--output", required=True, help="folder of the run, new or to go on with")
    group.add_argument("--model-id", metavar="ID", help="name of the answers (target and rule)")
    add_selection_arguments(parser)
    add_model_arguments(parser)
    AnswerConfig.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    return run(lambda: answer_questions(args, words))


if __name__ == "__main__":
    raise SystemExit(main())
