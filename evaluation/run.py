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
import base64
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from tqdm import tqdm

from eagle_fsd.acceptance import AcceptanceRule, Exact, add_rule_arguments, rule_from_args
from eagle_fsd.chat import check_stops, encode_prompt
from eagle_fsd.checkpoint import locate_head
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.device import resolve_device, synchronize
from eagle_fsd.divergence import unknown_name
from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.stats import GenerationStats
from eagle_fsd.target import TargetModel
from evaluation.answers import AUTO, RunFolder, digest, safe_model_id
from evaluation.environment import environment
from evaluation.questions import Question, add_selection_arguments, select
from evaluation.tasks import TASKS, load_questions

# Processes that are done wait for the others, who may have hours to go.
_PATIENCE = timedelta(days=30)
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class AnswerConfig:
    """How every question is answered.

    Attributes:
        rule: the acceptance rule; `Exact` for plain decoding.
        sampling: the law.
        is_plain: decode without a draft tree.
        max_new_tokens: of a turn, >= 1.
        num_choices: answers to each question, >= 1; at temperature 0 all are alike.
        seed: every turn's own comes from it, see `turn_seed`.
        template: one of FastChat's conversation templates; None is the target's chat template.
        system: system message.
        stop: strings that end a turn.
    """

    rule: AcceptanceRule
    sampling: SamplingConfig
    is_plain: bool = False
    max_new_tokens: int = 512
    num_choices: int = 1
    seed: int = 0
    template: str | None = None
    system: str | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_choices"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        check_stops(self.stop)
        if self.is_plain and not isinstance(self.rule, Exact):
            raise ValueError(
                f"plain decoding has no tree to relax; leave out rule {self.rule.spec!r} or --plain"
            )
        if self.template is not None:
            self.conversation()

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declares the flags that `from_args` reads."""
        group = parser.add_argument_group("answers")
        add_rule_arguments(parser)
        SamplingConfig.add_arguments(parser)
        group.add_argument(
            "--plain", action="store_true", help="plain decoding; needs no draft head and no tree"
        )
        group.add_argument(
            "--max-new-tokens", type=int, default=512, metavar="N", help="of a turn (default 512)"
        )
        group.add_argument(
            "--num-choices", type=int, default=1, metavar="N", help="answers to each question"
        )
        group.add_argument("--seed", type=int, default=0, help="of all randomness (default 0)")
        group.add_argument(
            "--template", metavar="NAME", help="of FastChat, instead of the target's chat template"
        )
        group.add_argument("--system", help="system message")
        group.add_argument(
            "--stop", action="append", default=[], help="stop string; may be given several times"
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AnswerConfig:
        """The settings of a parsed command line.

        Raises:
            ValueError, TypeError, ImportError: one sentence about what does not fit.
        """
        return cls(
            rule=rule_from_args(args),
            sampling=SamplingConfig.from_args(args),
            is_plain=args.plain,
            max_new_tokens=args.max_new_tokens,
            num_choices=args.num_choices,
            seed=args.seed,
            template=args.template,
            system=args.system,
            stop=tuple(args.stop),
        )

    def conversation(self) -> Any:
        """A new conversation of FastChat by `template`, with the system message.

        Raises:
            ImportError, ValueError: as `conversation_template`; also for a template that makes no
                text or leaves the system message out.
        """
        assert self.template is not None
        conversation = conversation_template(self.template)
        if self.system is not None:
            conversation.set_system_message(self.system)
        try:
            prompt = conversation.get_prompt()
        except ValueError as error:  # those of hosted models, which get messages
            raise ValueError(f"template {self.template!r} makes no text: {error}") from error
        if self.system is not None and self.system not in prompt:
            raise ValueError(
                f"template {self.template!r} has no place for a system message; leave out --system"
            )
        return conversation

    def settings(self) -> dict[str, Any]:
        """What decides the answers, ready for JSON."""
        budget = self.rule.budget
        return {
            "rule": "plain" if self.is_plain else self.rule.spec,
            "budget": str(budget) if budget == math.inf else budget,
            **asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "num_choices": self.num_choices,
            "seed": self.seed,
            "template": self.template,
            "system": self.system,
            "stop": list(self.stop),
        }


def conversation_template(name: str) -> Any:
    """One of FastChat's conversation templates, without messages.

    Raises:
        ImportError: when FastChat is not installed.
        ValueError: for a name that it does not know.
    """
    try:
        from fastchat.conversation import conv_templates, get_conv_template
    except ImportError as error:
        raise ImportError(
            f"--template needs FastChat, which does not import ({error}); install fschat, or leave "
            "it out for the target's own chat template"
        ) from error
    if name not in conv_templates:
        raise unknown_name("template", name, conv_templates)
    return get_conv_template(name)


def turn_seed(seed: int, question_id: int | str, choice: int, turn: int) -> int:
    """The seed of one turn, in [0, 2**63): whatever else is asked, and by whom, it is the same."""
    key = json.dumps([seed, question_id, choice, turn]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") & (2**63 - 1)


class Answerer:
    """Answers questions turn by turn.

    Args:
        decoder: with a drafter, unless decoding is plain.
        config: how.
        model_id: as the answers shall name the model.

    Raises:
        ValueError: when the drafter cannot serve the rule.
    """

    def __init__(self, decoder: SpeculativeDecoder, config: AnswerConfig, model_id: str) -> None:
        decoder.check_rule(config.rule)
        self._decoder = decoder
        self._config = config
        self._model_id = model_id
        self._identity = json.dumps(config.settings() | {"model_id": model_id})
        self._stop = list(config.stop)
        self._stop_ids: tuple[int, ...] = ()
        if config.template is not None:
            conversation = config.conversation()
            self._stop += check_stops(conversation.stop_str)
            self._stop_ids = tuple(conversation.stop_token_ids or ())

    def warm_up(self, question: Question) -> None:
        """A short request, so that the first timed one pays for nothing but itself."""
        with _named(question):
            input_ids = self.encode(question.turns, [])
            half = self._decoder.target.max_positions // 2
            self._decode(input_ids[:half], self._config.seed, _WARM_UP_TOKENS)

    def answer(self, question: Question) -> dict[str, Any]:
        """The answer of FastChat's format, with EAGLE's and our figures of every turn.

        Raises:
            ValueError: naming the question, for messages that the chat template refuses.
            NonFiniteLogitsError: naming the question.
        """
        with _named(question):
            choices = [self._choose(question, index) for index in range(self._config.num_choices)]
        key = f"{self._identity}{json.dumps(question.question_id)}".encode()
        name = base64.urlsafe_b64encode(hashlib.sha256(key).digest()[:16])
        return {
            "question_id": question.question_id,
            "answer_id": name.decode().rstrip("="),
            "model_id": self._model_id,
            "choices": choices,
            "tstamp": time.time(),
        }

    def encode(self, turns: Sequence[str], answers: Sequence[str]) -> Tensor:
        """Ids of a conversation up to the next answer.

        Args:
            turns: the user's, one more than answers at least; later ones are left out.
            answers: to the turns before.

        Returns:
            [P] int64.
        """
        tokenizer = self._decoder.tokenizer
        vocabulary_size = self._decoder.target.vocabulary_size
        if self._config.template is None:
            system = self._config.system
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": turns[0]})
            for answer, turn in zip(answers, turns[1:], strict=False):
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": turn})
            return encode_prompt(messages, tokenizer, vocabulary_size)
        conversation = self._config.conversation()
        for turn, reply in zip(turns, [*answers, None], strict=False):
            conversation.append_message(conversation.roles[0], turn)
            conversation.append_message(conversation.roles[1], reply)
        ids = _encode_text(conversation.get_prompt(), tokenizer)
        return encode_prompt(torch.tensor(ids, dtype=torch.int64), None, vocabulary_size)

    def _choose(self, question: Question, index: int) -> dict[str, Any]:
        """One answer to all turns; every list has an entry a turn."""
        choice: dict[str, Any] = {"index": index, "turns": []}
        for number in range(len(question.turns)):
            input_ids = self.encode(question.turns, choice["turns"])
            seed = turn_seed(self._config.seed, question.question_id, index, number)
            for name, value in self._turn(input_ids, seed).items():
                choice.setdefault(name, []).append(value)
        return choice

    def _turn(self, input_ids: Tensor, seed: int) -> dict[str, Any]:
        """One turn; empty when the prompt leaves no room in the context."""
        if input_ids.numel() >= self._decoder.target.max_positions:
            tree = "plain" if self._config.is_plain else str(self._decoder.tree)
            stats = GenerationStats(
                seed, self._config.rule.spec, tree, num_prompt_tokens=input_ids.numel()
            )
            return _turn_record("", [], "context", 0.0, stats)
        device = self._decoder.target.output_device
        synchronize(device)
        start = time.perf_counter()
        result = self._decode(input_ids, seed, self._config.max_new_tokens)
        synchronize(device)
        seconds = time.perf_counter() - start
        return _turn_record(
            result.text, result.token_ids, result.finish_reason, seconds, result.stats
        )

    def _decode(self, input_ids: Tensor, seed: int, max_new_tokens: int) -> Any:
        config = self._config
        decode = self._decoder.plain if config.is_plain else self._decoder.generate
        return decode(
            input_ids,
            rule=config.rule,
            **asdict(config.sampling),
            max_new_tokens=max_new_tokens,
            stop=self._stop,
            stop_ids=self._stop_ids,
            seed=seed,
            tree=self._decoder.tree,  # left out, exact decoding may do without one
        )


@contextmanager
def _named(question: Question) -> Iterator[None]:
    """Says in an error which question it was."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"question {question.question_id!r}: {error}") from error
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError(f"question {question.question_id!r}: {error}") from error


def _turn_record(
    text: str, token_ids: list[int], finish_reason: str, seconds: float, stats: GenerationStats
) -> dict[str, Any]:
    return {
        "turns": text,
        "idxs": stats.num_cycles,
        "new_tokens": len(token_ids),
        "wall_time": seconds,
        "finish_reasons": finish_reason,
        "token_ids": token_ids,
        "stats": stats.to_dict(),
    }


def _encode_text(text: str, tokenizer: Any) -> list[int]:
    """Ids of a rendered template: begun as the tokenizer begins texts, but once."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = tokenizer(text)["input_ids"][:1]
    is_begun = ids[:1] == first or first != [tokenizer.bos_token_id]
    return ids if is_begun else [*first, *ids]


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
        name = self._task.name
        self._settings = {
            "task": name if name in TASKS else _place(name),
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
        """Writes run.json, with what "auto" has come to, and the questions."""
        target = decoder.target
        assert isinstance(target, TargetModel)
        session = self._session | environment(target) | {"num_processes": num_processes}
        if self._stored is None:
            tree = None if self._args.plain else str(decoder.tree)
            self._stored = {
                "task": self._task.name,
                "kind": self._task.kind,
                "source": self._source,
                "model_id": self._folder.model_id,
                "settings": self._settings | {"dtype": session["dtype"], "tree": tree},
                **session,
                "resumed": [],
            }
        else:
            self._stored = self._stored | {"resumed": [*self._stored["resumed"], session]}
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
    settings = _model_settings(args) | config.settings()
    name = f"{Path(args.target).name}-{settings['rule']}"
    if settings["budget"] is not None:
        name += f"-budget-{settings['budget']}"
    folder = RunFolder(args.output, args.model_id or safe_model_id(name))
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
            if keeper:
                keeper.start(decoder, state.num_processes)
            state.wait_for_everyone()  # no answer before run.json
            _answer_share(answerer, plan, folder, state)
        state.wait_for_everyone()
        if keeper:
            print(keeper.finish())
    state.destroy_process_group()


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


def _model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags of the models say, in a form that does not depend on how they are written.

    Raises:
        ValueError, FileNotFoundError: for a tree or a draft head that is none.
    """
    dtype = getattr(torch, args.dtype, None)
    is_known = isinstance(dtype, torch.dtype)  # "half" is float16
    tree = TreeConfig.parse(args.tree)
    return {
        "target": _place(args.target),
        "revision": args.revision,
        "draft_head": _place(args.draft_head),
        "draft_head_sha256": None if args.draft_head is None else _head_digest(args.draft_head),
        "draft_vocab": args.draft_vocab,
        "draft_model": _place(args.draft_model),
        "dtype": str(dtype).removeprefix("torch.") if is_known else args.dtype,
        "attn_implementation": args.attn_implementation,
        "tree": None if args.plain else str(tree or AUTO),
    }


def _place(name: str | None) -> str | None:
    """A path in full, anything else as it is."""
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name


def _head_digest(head: str) -> str:
    """16 digits that tell a head from what it is after further training."""
    whole = hashlib.sha256()
    for path in sorted(locate_head(head).iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin"):
            with path.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:16]


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
