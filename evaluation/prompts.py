"""First turns as ids, for the commands that ask nothing else of a question."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagle_fsd.chat import encode_prompt
from eagle_fsd.decoder import SpeculativeDecoder
from evaluation.questions import Question


def first_turns(
    decoder: SpeculativeDecoder, questions: Sequence[Question], num_new_tokens: int = 1
) -> list[tuple[Question, Tensor]]:
    """The questions whose first turn leaves room for an answer, each with its ids [P].

    Args:
        decoder: its tokenizer, and its target's context.
        questions: in the order of the result, which leaves out those that are too long.
        num_new_tokens: of an answer that the context must have room for, >= 1.

    Raises:
        ValueError: a turn that cannot be encoded, by its question, or no turn that fits.
    """
    target, fitting = decoder.target, []
    for question in questions:
        try:
            ids = encode_prompt(question.turns[0], decoder.tokenizer, target.vocabulary_size)
        except ValueError as error:
            raise ValueError(f"question {question.question_id!r}: {error}") from error
        if ids.numel() + num_new_tokens <= target.max_positions:
            fitting.append((question, ids))
    if not fitting:
        raise ValueError(
            f"none of {len(questions)} prompts and an answer of {num_new_tokens} tokens fits the "
            f"target's context of {target.max_positions} tokens; give shorter questions"
        )
    return fitting
