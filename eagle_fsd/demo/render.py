"""Strings for the page: every text of a model or a visitor is escaped here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import torch

from eagle_fsd.decoder import FinishReason
from eagle_fsd.demo.answer import Answer, Rescue, ShownToken
from eagle_fsd.verify import Origin

ORIGINS: Final[dict[Origin, str]] = {
    "accepted": "drafted, and what the target would have said",
    "rescued": "drafted, close enough to what the target would have said",
    "recovered": "the target's own, where no draft was right",
    "bonus": "the target's own, behind a draft that was all right",
}
_FINISHES: Final[dict[FinishReason, str]] = {
    "stop": "",
    "length": "the answer reached the longest length that was asked for",
    "context": "the answer reached the end of the target's context",
}


@dataclass(frozen=True)
class Turn:
    """One message and its answer.

    Attributes:
        message: the visitor's.
        answer: complete, stopped or cut off by an error.
        note: what to know about how it ended; empty for nothing.
    """

    message: str
    answer: Answer
    note: str = ""


def token_text(text: str) -> str:
    """A token's text with its white space visible, for places where it stands alone."""
    shown = text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5")
    return shown or "(part of a character)"


def tokens_html(tokens: Iterable[ShownToken], *, is_coloured: bool) -> str:
    """The text of an answer, each token in the colour of its origin.

    Args:
        tokens: in order. A token without text of its own (part of a character, or held back) goes
            with the next one that has some.
        is_coloured: False gives the escaped text alone.
    """
    if not is_coloured:
        return escape("".join(token.text for token in tokens))
    return "".join(map(_token_html, _with_text(tokens)))


def _with_text(tokens: Iterable[ShownToken]) -> Iterator[ShownToken]:
    """Tokens joined until they have text; a rescued one among them gives the origin."""
    held: ShownToken | None = None
    for token in tokens:
        first = held if held is not None and held.rescue is not None else token
        held = ShownToken(token.text, first.origin, first.rescue)
        if token.text:
            yield held
            held = None


def _token_html(token: ShownToken) -> str:
    text = escape(token.text)
    if token.rescue is None:
        return f'<span class="tok {token.origin}">{text}</span>'
    tip = escape(rescue_text(token.rescue))
    return (
        f'<span class="tok rescued" tabindex="0" role="note" aria-label="{text}: {tip}">{text}'
        f'<span class="tip" role="tooltip">{tip}</span></span>'
    )


def rescue_text(rescue: Rescue) -> str:
    """One sentence: the target's own choice, the probabilities, the divergence."""
    parts = [
        f"the target's own choice: {token_text(rescue.choice)} with p = {rescue.choice_prob:.3g}",
        f"this token: p = {rescue.token_prob:.3g}",
    ]
    if rescue.draft_prob is not None:
        parts[-1] += f", draft q = {rescue.draft_prob:.3g}"
    if rescue.divergence is not None:
        unit = "" if rescue.divergence_name.startswith("tv") else " nats"
        parts.append(f"{rescue.divergence_name} here: {rescue.divergence:.3g}{unit}")
    return "; ".join(parts)


def figures_text(answer: Answer) -> str:
    """One line: tokens/s, acceptance length, share rescued, nats spent."""
    parts = [f"{answer.tokens_per_second:.1f} tokens/s"]
    if answer.acceptance_length is not None and answer.rule != "plain":
        parts.append(f"acceptance length {answer.acceptance_length:.2f}")
        parts.append(f"{100 * answer.share_rescued:.0f}% rescued")
    if answer.nats is not None:
        kind = "regret" if answer.is_greedy else "KL"
        parts.append(f"{answer.nats:.2f} nats of {kind} spent")
    parts += [f"{len(answer.tokens)} tokens in {answer.seconds:.1f} s", f"rule {answer.rule}"]
    if not answer.is_greedy:
        parts.append(f"seed {answer.seed}")
    return " · ".join(parts)


def figures_html(answer: Answer) -> str:
    """The line of figures; a place holder before the first token."""
    text = figures_text(answer) if answer.tokens else "Figures of the last answer appear here."
    return f'<p class="figures">{escape(text)}</p>'


def status_html(text: str, *, is_problem: bool = False) -> str:
    """The line under the chat; read out by screen readers when it changes."""
    kind = " problem" if is_problem else ""
    return f'<p class="status{kind}" role="status" aria-live="polite">{escape(text)}</p>'


def legend_html() -> str:
    """What the colours mean."""
    items = "".join(
        f'<li><span class="tok {origin}">{origin}</span> {escape(meaning)}</li>'
        for origin, meaning in ORIGINS.items()
    )
    return f'<ul class="legend">{items}</ul>'


def turns_html(turns: Sequence[Turn], num_forgotten: int, *, is_coloured: bool) -> str:
    """The chat so far.

    Args:
        turns: oldest first.
        num_forgotten: turns at the beginning that the last message went without.
        is_coloured: whether tokens show their origin.
    """
    parts = []
    for number, turn in enumerate(turns):
        if number == num_forgotten and number:
            parts.append(f'<p class="divider">{escape(forgotten_text(num_forgotten))}</p>')
        is_forgotten = number < num_forgotten
        parts.append(_message_html(turn.message, is_forgotten))
        parts.append(answer_html(turn.answer, turn.note, is_coloured=is_coloured))
    if not turns:
        parts.append('<p class="status">Write a message, or take one of the examples.</p>')
    return f'<div class="turns">{"".join(parts)}</div>'


def forgotten_text(num_forgotten: int) -> str:
    """What the page says after trimming."""
    turns = "turn" if num_forgotten == 1 else f"{num_forgotten} turns"
    return (
        f"the chat reached the target's context limit: the oldest {turns} above "
        f"{'was' if num_forgotten == 1 else 'were'} not sent with the last message"
    )


def pending_html(message: str, answer: Answer, *, is_coloured: bool) -> str:
    """The message that is being answered, and what there is of the answer."""
    return f'<div class="turns">{_message_html(message)}{_bubble(answer, is_coloured)}</div>'


def answer_html(answer: Answer, note: str, *, is_coloured: bool) -> str:
    """A finished answer and how it ended."""
    ending = note or (_FINISHES[answer.finish_reason] if answer.finish_reason else "")
    shown_note = f'<p class="note">{escape(ending)}</p>' if ending else ""
    return _bubble(answer, is_coloured) + shown_note


def _message_html(message: str, is_forgotten: bool = False) -> str:
    kind = " forgotten" if is_forgotten else ""
    return f'<div class="message{kind}"><b class="who">You</b>{escape(message)}</div>'


def _bubble(answer: Answer, is_coloured: bool) -> str:
    text = tokens_html(answer.tokens, is_coloured=is_coloured)
    return f'<div class="answer"><b class="who">Target</b><div class="text">{text}</div></div>'


def comparison_html(message: str, plain: Answer, tree: Answer | None, *, is_coloured: bool) -> str:
    """Plain decoding and the current setting side by side.

    Args:
        message: that both answer.
        plain: plain decoding.
        tree: the current setting; None before it has begun.
        is_coloured: whether the tree's tokens show their origin.
    """
    columns = _column("plain decoding", plain, is_coloured=False)
    if tree is not None:
        columns += _column(f"draft tree, {tree.rule}", tree, is_coloured=is_coloured)
    return (
        f'<div class="comparison"><p class="status">{escape(message)}</p>'
        f'<div class="columns">{columns}</div>'
        f'<p class="figures">{escape(comparison_text(plain, tree))}</p></div>'
    )


def comparison_text(plain: Answer, tree: Answer | None) -> str:
    """How much faster, and whether the text is the same; empty until both are complete."""
    if tree is None or plain.finish_reason is None or tree.finish_reason is None:
        return ""
    ratio = tree.tokens_per_second / plain.tokens_per_second
    same = "the two texts are identical" if plain.text == tree.text else "the two texts differ"
    return f"{ratio:.2f} x the tokens per second of plain decoding; {same}"


def _column(title: str, answer: Answer, *, is_coloured: bool) -> str:
    text = tokens_html(answer.tokens, is_coloured=is_coloured)
    return (
        f'<section><h3>{escape(title)}</h3><p class="time">{answer.seconds:.2f} s</p>'
        f'<div class="answer"><div class="text">{text}</div></div>'
        f'<p class="figures">{escape(figures_text(answer))}</p></section>'
    )


def waiting_text(num_before: int) -> str:
    """Where a request stands in the queue; empty when it is its turn."""
    if num_before == 0:
        return ""
    return f"waiting: {num_before} request{'s' if num_before > 1 else ''} before this one"


def error_text(error: BaseException) -> str:
    """One sentence for what went wrong."""
    message = " ".join(str(error).split())
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or (isinstance(error, RuntimeError) and "alloc" in message):
        return "out of memory; clear the chat, shorten the answer or choose a smaller tree"
    if isinstance(error, ValueError | TypeError | RuntimeError) and message:
        return message
    return f"unexpected error: {type(error).__name__} {message}".rstrip()


def probability_text(log_prob: float) -> str:
    """A probability from its logarithm, short."""
    return f"{math.exp(log_prob):.2g}"
