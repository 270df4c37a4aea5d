"""Figures from answers: pure functions of texts, token ids and statistics."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# Every repetition below is bounded or possessive and follows something fixed: the time is linear
# in the text, whatever it is.
_INVENTED = re.compile(
    r"\bQuestion[ *]{0,4}[0-9]{0,4}[ *]{0,4}:"
    r"|(?<=\n)[ *#]{0,6}(?:Problem|Q|Human|User|Assistant)[ *]{0,4}[0-9]{0,4}[ *]{0,4}:"
)
_NUMBER = re.compile(
    r"(?:(?<![A-Za-z0-9_.)\]}])(?P<sign>-))?"
    r"(?:[$€£] ?(?P<sign_after>-)?)?"
    r"(?<![A-Za-z0-9_])"
    r"(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)(?P<decimals>\.[0-9]++)?"
    r"|(?P<bare>\.[0-9]++))"
    r"(?:(?: (?:and )?(?P<mixed>[0-9]{1,9}))? ?/ ?(?P<below>[0-9]{1,9})(?![0-9/]))?"
)
_FRACTION = re.compile(r"\\[dtc]?frac ?\{ ?([0-9]{1,12}) ?\} ?\{ ?([0-9]{1,12}) ?\}")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_ANSWER_WORDS = re.compile(r"(?:the )?(?:final )?answer(?: is)?[ :=]{0,3}", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer(?: is|:| =)", re.IGNORECASE)
_OPERATOR = re.compile(r" ?[-+*/x\u00d7\u00f7=^]")
_MAX_DIGITS = 100
_LONG_ENOUGH = 300  # characters behind a mark in which its number is looked for
_MOST_MARKS = 100  # of one kind that are looked at


def extract_number(text: str) -> Fraction | None:
    r"""The number that a worked answer ends in; None when there is none.

    What follows an invented next question is left out. Then, in this order: the number right
    behind the first `####` that has one; the last `\boxed{}`; the last "the answer is", in its
    sentence the number after the last equals sign, else the first one; the last number of all.

    Understood are signs, currencies, thousands (1,234), decimals, fractions (1/2, 3 1/2, ½,
    \frac{1}{2}), and Markdown or LaTeX around a number. A percentage is its number: 50% is 50. A
    fraction over zero and a number of more than 100 digits are none. If nothing stands before an
    invented question, the whole text counts.

    Source: Cobbe et al. 2021 (arXiv:2110.14168) for the form `#### N`.
    """
    text = _plain(text)
    first_words = len(text) - len(text.lstrip())
    invented = _INVENTED.search(text, first_words + 1)
    pieces = (text[: invented.start()], text) if invented else (text,)
    readings = (_after_hashes, _boxed, _after_answer, _last)
    values = (read(piece) for piece in pieces for read in readings)
    return next((value for value in values if value is not None), None)


def is_right(answer: str, reference: str) -> bool:
    """Whether the answer's number equals the reference's, exactly.

    Raises:
        ValueError: if the reference holds no number.
    """
    wanted = extract_number(reference)
    if wanted is None:
        raise ValueError(f"the reference {reference[-40:]!r} ends in no number")
    return extract_number(answer) == wanted


def complete_program(prompt: str, answer: str, entry_point: str) -> str:
    """The program that an answer to "complete this function" stands for, without its tests.

    An answer that defines `entry_point` itself, in a code block or bare, follows the prompt, whose
    imports and helpers it may need. Otherwise it is the function's body, which ends at the first
    line that is not indented.
    """
    code = _code_block(answer, entry_point)
    if _defines(code, entry_point):
        # The prompt may end inside of its function; a docstring alone is a whole one.
        head = next((text for text in (prompt, f"{prompt}\n    pass\n") if _compiles(text)), "")
        return f"{head}\n{code}\n"
    body = _body(code)
    candidates = [f"{prompt}{gap}{text}\n" for gap in ("", "\n") for text in body]
    return next(filter(_compiles, candidates), candidates[0])


@dataclass(frozen=True)
class Agreement:
    """How far answers are those of another run, by token ids.

    Attributes:
        num_turns: turns compared.
        equal: share of them with all ids equal, 0..1; None with no turn.
        common_prefix: mean of (length of the common beginning / length of the longer one), 0..1.
    """

    num_turns: int
    equal: float | None
    common_prefix: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Agreement:
        """Over pairs of the ids of a turn in both runs."""
        return cls(
            num_turns=len(pairs),
            equal=mean([float(list(ours) == list(theirs)) for ours, theirs in pairs]),
            common_prefix=mean([common_prefix_share(ours, theirs) for ours, theirs in pairs]),
        )


def common_prefix_share(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Length of the common beginning / length of the longer one, 0..1; 1 only for equal ids."""
    longer = max(len(ours), len(theirs))
    pairs = zip(ours, theirs, strict=False)
    common = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return common / longer if longer else 1.0


@dataclass(frozen=True)
class LengthRatio:
    """Tokens of this run / tokens of another; None where the other has none.

    Attributes:
        mean: mean of the ratios of the turns whose other answer is not empty.
        of_sums: ratio of the sums over all turns.
    """

    mean: float | None
    of_sums: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> LengthRatio:
        """Over pairs of the token counts of a turn in both runs."""
        ours, theirs = (sum(counts) for counts in zip(*pairs, strict=True)) if pairs else (0, 0)
        return cls(mean([a / b for a, b in pairs if b]), ours / theirs if theirs else None)


def repetition_rate(token_ids: Sequence[int], size: int = 4) -> float | None:
    """Share of the n-grams that occurred before in the same text, 0..1; None without any.

    Args:
        token_ids: of one answer.
        size: n, >= 1.
    """
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
    grams = [tuple(token_ids[at : at + size]) for at in range(len(token_ids) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else None


def wilson_interval(num_right: int, num_all: int, z: float = 1.96) -> tuple[float, float] | None:
    """Interval of a share, 95% with the default z; None with nothing counted.

    Source: Wilson 1927 (doi:10.1080/01621459.1927.10502953).

    Raises:
        ValueError: if more are right than there are.
    """
    if not 0 <= num_right <= num_all:
        raise ValueError(f"num_right must be between 0 and {num_all}, got {num_right}")
    if num_all == 0:
        return None
    share, spread = num_right / num_all, z * z / num_all
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / num_all + spread / (4 * num_all))
    low, high = ((middle + side * half) / (1 + spread) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Acceptance:
    """Tokens per cycle, (new tokens - 1) / cycles; None with no cycle.

    Attributes:
        micro: over all turns together, so that long answers count more.
        macro: mean of the turns' own.
    """

    micro: float | None
    macro: float | None

    @classmethod
    def of(cls, turns: Sequence[tuple[int, int]]) -> Acceptance:
        """Over (new tokens, cycles) of the turns; those without a cycle are left out."""
        turns = [(tokens, cycles) for tokens, cycles in turns if cycles]
        all_cycles = sum(cycles for _, cycles in turns)
        emitted = sum(tokens - 1 for tokens, _ in turns)
        return cls(
            micro=emitted / all_cycles if all_cycles else None,
            macro=mean([(tokens - 1) / cycles for tokens, cycles in turns]),
        )


def cost_per_token(stats: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Nats per new token; None where no turn has a ledger of that name.

    Args:
        stats: `GenerationStats.to_dict()` of each turn.
        name: "kl_spent" or "regret_spent"; infinity is written "inf" there.
    """
    spent = [(float(turn[name]), turn["num_tokens"]) for turn in stats if turn[name] is not None]
    num_tokens = sum(tokens for _, tokens in spent)
    return sum(cost for cost, _ in spent) / num_tokens if num_tokens else None


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def _plain(text: str) -> str:
    """The text with Markdown, LaTeX and special characters around numbers taken away."""
    for old, new in (
        ("\u2212", "-"),
        ("\u00a0", " "),
        ("\u202f", " "),
        ("\u2009", " "),
        ("\uff0c", ","),
        ("**", ""),
        ("__", ""),
        ("`", ""),
        ("{,}", ","),
        ("\\,", ""),
        ("\\!", ""),
        ("\\$", "$"),
        ("\\%", "%"),
    ):
        text = text.replace(old, new)
    text = _FRACTION.sub(r" \1/\2", text)
    return _VULGAR.sub(_vulgar, text)


def _vulgar(match: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/")


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match of _NUMBER; None when it is over zero or too long."""
    if match.end() - match.start() > _MAX_DIGITS:
        return None
    digits = match["bare"] or match["whole"].replace(",", "") + (match["decimals"] or "")
    value = Fraction(f"0{digits}")
    if match["below"]:
        below = int(match["below"])
        if below == 0:
            return None
        value = value + Fraction(int(match["mixed"]), below) if match["mixed"] else value / below
    return -value if match["sign"] or match["sign_after"] else value


def _first_value(matches: Iterable[re.Match[str]]) -> Fraction | None:
    return next((value for match in matches if (value := _value(match)) is not None), None)


def _last(text: str) -> Fraction | None:
    return _first_value(reversed(list(_NUMBER.finditer(text))))


def _after_hashes(text: str) -> Fraction | None:
    """The number right behind the first #### that has one: a heading in Markdown has words."""
    for mark in itertools.islice(re.finditer("####", text), _MOST_MARKS):
        rest = text[mark.end() : mark.end() + _LONG_ENOUGH].lstrip("#").lstrip()
        rest = _ANSWER_WORDS.sub("", rest.partition("\n")[0], count=1)
        match = _NUMBER.match(rest.lstrip(" ({[\\"))
        if match and (value := _value(match)) is not None:
            return value
    return None


def _boxed(text: str) -> Fraction | None:
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    inside, depth = [], 1
    for character in text[at + len("\\boxed{") :][:_LONG_ENOUGH]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            break
        inside.append(character)
    return _in_sentence("".join(inside))


def _after_answer(text: str) -> Fraction | None:
    """The number of the last sentence that says "answer is" and holds one."""
    marks = list(_ANSWER_IS.finditer(text))[-_MOST_MARKS:]
    for mark in reversed(marks):
        rest = text[mark.end() : mark.end() + _LONG_ENOUGH].lstrip(" :\n")
        end = _SENTENCE_END.search(rest)
        value = _in_sentence(rest[: end.start()] if end else rest)
        if value is not None:
            return value
    return None


def _in_sentence(text: str) -> Fraction | None:
    """The number it begins with, else what the last equals sign leads to, else the first one."""
    text = text.lstrip(" ({[\\")
    match = _NUMBER.match(text)
    if match and not _OPERATOR.match(text, match.end()) and (value := _value(match)) is not None:
        return value
    return _first_value(_NUMBER.finditer(text.rpartition("=")[2]))


def _code_block(answer: str, entry_point: str) -> str:
    """The fenced block that defines the function, else the first one, else the whole answer."""
    pieces = re.split(r"^ {0,3}```", answer, flags=re.MULTILINE)
    blocks = [piece.partition("\n")[2] for piece in pieces[1::2]]
    if not blocks:
        return answer
    return next((block for block in blocks if _defines(block, entry_point)), blocks[0])


def _defines(code: str, entry_point: str) -> bool:
    return re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE) is not None


def _body(code: str) -> list[str]:
    """Readings of a function's body: as it is, its first line indented, all of it indented."""
    lines = code.strip("\n").split("\n")
    end = next((n for n, line in enumerate(lines) if n and line[:1].strip()), len(lines))
    body = "\n".join(lines[:end])
    return [body, f"    {body}", "\n".join(f"    {line}" for line in lines)]


def _compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
