"""How a question is answered: the prompt of every turn, its seed, and the record of it."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from eagle_fsd.acceptance import AcceptanceRule, Exact, add_rule_arguments, rule_from_args
from eagle_fsd.chat import check_stops, encode_prompt
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.device import synchronize
from eagle_fsd.divergence import unknown_name
from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.stats import GenerationStats
from evaluation.questions import Question

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

    def check(self, questions: Sequence[Question]) -> None:
        """Refuses what the target's chat template cannot say, before anything is answered.

        Raises:
            ValueError: for a system message or several turns without a chat template, or a system
                message that the template refuses or drops.
        """
        if self._config.template is not None:
            return
        tokenizer, system = self._decoder.tokenizer, self._config.system
        if not getattr(tokenizer, "chat_template", None):
            needs = "--system" if system is not None else "a second turn"
            if system is not None or any(len(question.turns) > 1 for question in questions):
                raise ValueError(
                    f"the target has no chat template, which {needs} needs; name one of FastChat's "
                    "with --template NAME"
                )
        elif system is not None:
            _check_system(system, tokenizer)

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


def _check_system(system: str, tokenizer: Any) -> None:
    user = {"role": "user", "content": "?"}
    both = [[{"role": "system", "content": system}, user], [user]]
    try:
        with_it, without = (
            tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False)
            for each in both
        )
    except TemplateError as error:
        raise ValueError(
            f"the target's chat template refuses a system message ({error}); leave out --system or "
            "name one of FastChat's with --template NAME"
        ) from error
    if with_it == without or system.strip() not in with_it:
        raise ValueError(
            "the target's chat template drops system messages; leave out --system or name one of "
            "FastChat's with --template NAME"
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
