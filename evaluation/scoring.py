"""Figures from answers: pure functions of texts, token ids and statistics."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# Its two parts are in braces, or a digit each: \frac12.
_FRACTION = re.compile(
    r"\\[dtc]?frac ?(?:\{ ?(?P<above>-?[0-9]{1,12}) ?\}|(?P<digit_above>[0-9]))"
    r" ?(?:\{ ?(?P<below>[0-9]{1,12}) ?\}|(?P<digit_below>[0-9]))"
)
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_ANSWER_WORDS = re.compile(r"(?:the )?(?:final )?answer(?: is)?[ :=]{0,3}", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer(?: is|:| =)", re.IGNORECASE)
_OPERATOR = re.compile(r" ?[-+*/x\u00d7\u00f7=^]")
# Behind the number of a heading: "1. Eggs per day", "2 - Money", "3 Eggs".
_HEADING = re.compile(r"(?:[.):]| ?[-\u2013\u2014]) {0,4}[^\W\d_]| [A-Z][a-z]")
_WORD = re.compile(r"[^\W\d_]+")
_MOST_UNIT_WORDS = 4  # "18 dollars", "18 eggs per day"
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})")
_STATEMENT = re.compile(r"(?:@|(?:async )?def |class |import \w|from [\w.]+ import )")
_UNINDENTED = re.compile(r"[^\s#]")
_MOST_BEGINS, _MOST_CUTS = 5, 100  # places where code may begin and end that are tried
_MAX_DIGITS = 100
_LONG_ENOUGH = 300  # characters behind a mark in which its number is looked for
_MOST_MARKS = 100  # of one kind that are looked at


def extract_number(text: str) -> Fraction | None:
    r"""The number that a worked answer ends in; None when there is none.

    What follows an invented next question is left out. Then, in this order: the number right
    behind the first `####` that has nothing but a number, else behind the last one that has a unit
    too; the last `\boxed{}`; the last "the answer is", in its sentence the number after the last
    equals sign, else the first one; the last number of all. A heading (`#### 1. Eggs`, with text
    below) is no answer.

    Understood are signs, currencies, thousands (1,234), decimals, fractions (1/2, 3 1/2, ½,
    \frac{1}{2}, \frac12), and Markdown or LaTeX around a number. A percentage is its number: 50%
    is 50. A fraction over zero and a number of more than 100 digits are none. If nothing stands
    before an invented question, the whole text counts.

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

    An answer that defines `entry_point` itself, in a code block or between words, follows the
    prompt, whose imports and helpers it may need. Otherwise it is the function's body, which ends
    at the first line that is not indented where the program is a whole one then.
    """
    code = _code_block(answer, entry_point)
    if _defines(code, entry_point):
        # The prompt may end inside of its function; a docstring alone is a whole one.
        head = next((text for text in (prompt, f"{prompt}\n    pass\n") if _compiles(text)), "")
        futures, code = _split_futures(_without_words(code, entry_point))
        return f"{futures}{head}\n{code}\n"
    bodies = list(_bodies(code))
    candidates = (f"{prompt}{gap}{text}\n" for text in bodies for gap in ("", "\n"))
    return next(filter(_compiles, candidates), f"{prompt}{bodies[0]}\n")


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


def wilson_interval(num_right: float, num_all: int, z: float = 1.96) -> tuple[float, float] | None:
    """Interval of a share, 95% with the default z; None with nothing counted.

    Args:
        num_right: sum of the trials' values, each in 0..1. With values between them their mean
            spreads less than that of a share, so that the interval is rather too wide.
        num_all: trials.
        z: quantile of the normal law.

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
        macro: mean of the questions' own.
    """

    micro: float | None
    macro: float | None

    @classmethod
    def of(cls, questions: Sequence[Sequence[tuple[int, int]]]) -> Acceptance:
        """Over (new tokens, cycles) of every question's turns; those without a cycle count not."""
        lengths = [_tokens_per_cycle(turns) for turns in questions]
        every = [turn for turns in questions for turn in turns]
        return cls(
            micro=_tokens_per_cycle(every),
            macro=mean([length for length in lengths if length is not None]),
        )


def _tokens_per_cycle(turns: Sequence[tuple[int, int]]) -> float | None:
    num_cycles = sum(cycles for _, cycles in turns)
    num_tokens = sum(tokens - 1 for tokens, cycles in turns if cycles)
    return num_tokens / num_cycles if num_cycles else None


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
    text = _FRACTION.sub(_fraction, text)
    return _VULGAR.sub(_vulgar, text)


def _fraction(match: re.Match[str]) -> str:
    above, below = match["above"] or match["digit_above"], match["below"] or match["digit_below"]
    return _apart(match, f"{above}/{below}")


def _vulgar(match: re.Match[str]) -> str:
    return _apart(match, unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/"))


def _apart(match: re.Match[str], number: str) -> str:
    """The number instead of a match, apart from others beside it, but not from its sign."""
    text, start, end = match.string, match.start(), match.end()
    before = "" if text.endswith("-", 0, start) else " "
    after = " " if text[end : end + 1].isdigit() else ""
    return f"{before}{number}{after}"


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
    """The number behind the first #### with a number alone, else behind the last with a unit."""
    with_unit = None
    for mark in itertools.islice(re.finditer("####", text), _MOST_MARKS):
        rest = text[mark.end() : mark.end() + _LONG_ENOUGH].lstrip("#").lstrip()
        written, _, below = rest.partition("\n")
        line = _ANSWER_WORDS.sub("", written, count=1).lstrip(" ({[\\")
        match = _NUMBER.match(line)
        value = _in_sentence(line) if match else None
        if match is None or value is None:
            continue
        if _ANSWER_WORDS.search(written) or not _WORD.search(line, match.end()):
            return value
        if not (below.strip() and _is_heading(line, match.end())):
            with_unit = value
    return with_unit


def _is_heading(line: str, end: int) -> bool:
    """Whether what follows a number, which ends there, makes its line a heading."""
    num_words = len(_WORD.findall(line, end))
    return _HEADING.match(line, end) is not None or num_words > _MOST_UNIT_WORDS


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
    blocks = list(_blocks(answer))
    if not blocks:
        return answer
    return next((block for block in blocks if _defines(block, entry_point)), blocks[0])


def _blocks(answer: str) -> Iterator[str]:
    """The text of fenced blocks, the last of which may be open, without the fences' indentation."""
    fence: re.Match[str] | None = None
    inside: list[str] = []
    for line in answer.split("\n"):
        match = _FENCE.match(line)
        if fence is None and match:
            fence, inside = match, []
        elif fence is not None and match and _closes(match, fence):
            yield "\n".join(inside)
            fence = None
        elif fence is not None:
            indent = len(fence["indent"])
            inside.append(line[:indent].lstrip() + line[indent:])
    if fence is not None:
        yield "\n".join(inside)


def _closes(match: re.Match[str], fence: re.Match[str]) -> bool:
    """Whether a fence ends the block that another began; one in a docstring stands deeper."""
    is_near = len(match["indent"]) <= len(fence["indent"]) + 3
    return is_near and match["fence"].startswith(fence["fence"])


def _defines(code: str, entry_point: str) -> bool:
    return re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE) is not None


def _without_words(code: str, entry_point: str) -> str:
    """The longest part that is Python, from a line on that begins a program, with the function."""
    lines = code.split("\n")
    begins = [n for n, line in enumerate(lines) if _STATEMENT.match(line)][:_MOST_BEGINS]
    parts = ("\n".join(lines[n:end]) for n in begins for end in reversed(_cuts(lines, n)))
    whole = (p for p in itertools.chain([code], parts) if _defines(p, entry_point) and _compiles(p))
    return next(whole, code)


def _cuts(lines: Sequence[str], begin: int) -> list[int]:
    """Where a text from line `begin` on can end: before an unindented line, or with the last."""
    places = (n for n, line in enumerate(lines) if n > begin and _UNINDENTED.match(line))
    return [*itertools.islice(places, _MOST_CUTS), len(lines)]


def _split_futures(code: str) -> tuple[str, str]:
    """The `from __future__` lines, which must be the first of a program, and the others."""
    lines = code.split("\n")
    futures = [line for line in lines if line.startswith("from __future__ import ")]
    others = [line for line in lines if not line.startswith("from __future__ import ")]
    return "".join(f"{line}\n" for line in futures), "\n".join(others)


def _bodies(code: str) -> Iterator[str]:
    """Readings of a function's body, the likelier first; words around it may be cut off."""
    lines = code.strip("\n").split("\n")
    texts = ["\n".join(lines[:end]) for end in _cuts(lines, 0)]
    if lines[0][:1].strip():  # the prompt's end was taken for its indentation, or it has none
        yield from (textwrap.indent(text, "    ") for text in reversed(texts))
        yield from (f"    {text}" for text in texts)
    yield from texts
    first = next((n for n, line in enumerate(lines) if line[:1].isspace() and line.strip()), 0)
    indented = ["\n".join(lines[first:end]) for end in _cuts(lines, first)]
    yield from indented
    yield from (textwrap.indent(textwrap.dedent(text), "    ") for text in indented)


def _compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
