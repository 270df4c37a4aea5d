"""Figures from answers, against values worked out by hand."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest

from evaluation.scoring import (
    Acceptance,
    Agreement,
    LengthRatio,
    common_prefix_share,
    complete_program,
    cost_per_token,
    extract_number,
    is_right,
    mean,
    repetition_rate,
    wilson_interval,
)

F = Fraction

HOSTILE = [
    ("$29.00", F(29)),
    ("1,234", F(1234)),
    ("72, in total", F(72)),
    ("1/2", F(1, 2)),
    ("3 1/2", F(7, 2)),
    ("3 and 1/2 cups", F(7, 2)),
    ("3\u00bd", F(7, 2)),
    ("-5", F(-5)),
    ("\u22125", F(-5)),
    ("-$5", F(-5)),
    ("$-5", F(-5)),
    ("50%", F(50)),
    (r"50\%", F(50)),
    ("**72**", F(72)),
    ("**72.**", F(72)),
    ("72.", F(72)),
    (".5", F(1, 2)),
    ("1,234,567.50.", F(123456750, 100)),
    (r"\boxed{72}", F(72)),
    (r"so $\boxed{\frac{3}{4}}$ of 20", F(3, 4)),
    (r"\boxed{1{,}234 \text{ apples}} in 5 days", F(1234)),
    (r"\boxed{x = 5}", F(5)),
    (r"so the result is -\frac{3}{4}", F(-3, 4)),
    (r"\boxed{-\frac{1}{2}}", F(-1, 2)),
    (r"\boxed{\frac{-1}{2}}", F(-1, 2)),
    (r"$-\frac{3}{4}$", F(-3, 4)),
    (r"3\frac{1}{2}", F(7, 2)),
    (r"-3\frac{1}{2}", F(-7, 2)),
    (r"5-\frac{1}{2}", F(1, 2)),
    (r"\boxed{\frac12}", F(1, 2)),
    (r"-\dfrac1{12}", F(-1, 12)),
    ("x = -\u00bd", F(-1, 2)),
    ("-3\u00bd", F(-7, 2)),
    (r"\boxed{12", F(12)),
    (r"$\$1,000$", F(1000)),
    ("2 + 2 = 4\n#### 4", F(4)),
    ("#### $70,000", F(70000)),
    ("#### The answer is 18.", F(18)),
    ("#### 18\nThen there were 20 more.", F(18)),
    ("#### 18\n#### 20", F(18)),
    ("#### Step 1\nAdd 3 and 4.\n#### Step 2\n#### 7", F(7)),
    ("#### 1. Eggs a day\n16-3-4=9\n\n#### 2. Money\n9*2=18\n\nThe answer is 18.", F(18)),
    ("#### 1. Eggs a day\n9\n#### 2. Money\n9*2=18\n#### 18", F(18)),
    ("#### **1) Eggs**\n16-3-4=9\n#### 2 - Money\n9*2=18", F(18)),
    ("##### 3 Eggs for breakfast\nso 16-3=13", F(13)),
    ("#### 3 eggs are eaten and 4 are baked\nso 16-3-4=9", F(9)),
    ("#### 18 dollars", F(18)),
    ("#### 18 dollars a day\n\nShe sells 9 eggs for 2.", F(18)),
    ("#### 18 dollars\n#### Check\n9 eggs", F(18)),
    ("#### 18. That is what 9 eggs bring", F(18)),
    ("#### 1. Eggs\n9\n#### Answer: 18 dollars\nfor 9 eggs", F(18)),
    ("#### 10 + 8 = 18", F(18)),
    ("The answer is 5. Question: how many are 4 + 5? The answer is 9", F(5)),
    ("#### 5\n\nQuestion: next\n#### 9", F(5)),
    ("It is 5.\n\nQ: And 4 + 5?\nA: 9", F(5)),
    ("It is 5.\nHuman: and 9?", F(5)),
    ("Question: how many?\nAnswer: 6", F(6)),
    ("The answer is 36 + 36 = 72 apples.", F(72)),
    ("The answer is 10 because x=3.", F(10)),
    ("The answer is 18 eggs, or 3 a day. 7 hens lay them", F(18)),
    ("The answer is 5. No, wait: the answer is 6.", F(6)),
    ("Final Answer:\n\n**18** dollars", F(18)),
    ("10-5", F(5)),
    ("He has 5 - 3 = 2 left", F(2)),
    ("- 72", F(72)),
    ("1,2,3", F(3)),
    ("12,34", F(34)),
    ("x2 has no number of its own", None),
    ("1/0", None),
    ("5 apples / 0", F(0)),
    ("about 1/0 of 12", F(12)),
    ("9" * 101, None),
    ("no number", None),
    ("", None),
    ("####", None),
    ("The answer is", None),
    ("\u0663", None),
    ("72\u00a0km", F(72)),
    ("\uff0472", F(72)),
    ("\U0001f600 72 \x00", F(72)),
]


@pytest.mark.parametrize(("answer", "number"), HOSTILE)
def test_the_number_of_a_hostile_answer(answer: str, number: Fraction | None) -> None:
    assert extract_number(answer) == number


UNITS = (
    "9|1,|111,|1 |1/|1.|.| |\n|-|$|$ |#|####1/0|answer is |\\boxed{|\\frac{1}|Question|\nQ|1 1/|*|{"
)


@pytest.mark.parametrize("unit", UNITS.split("|"))
def test_a_long_text_of_anything_is_read_at_once(unit: str) -> None:
    text = unit * (2**18 // len(unit))
    start = time.process_time()
    extract_number(text)
    extract_number(f"{text}x")
    # A quadratic search would take an hour; a linear one is far below this on any machine.
    assert time.process_time() - start < 10


def test_a_megabyte_of_digits_is_no_number_at_once() -> None:
    start = time.process_time()
    assert extract_number("9" * 2**20) is None
    assert time.process_time() - start < 5


def test_an_answer_is_right_when_its_number_is_the_references() -> None:
    reference = "She sells 9 * 2 = <<9*2=18>>18 dollars.\n#### 18"
    for answer in ("$18.00", "18 dollars every day", "#### 18", r"\boxed{18}", "36/2"):
        assert is_right(answer, reference)
    for answer in ("17", "", "18.01", "180", "-18", "#### 17 (not 18)"):
        assert not is_right(answer, reference)
    assert is_right("1234", "#### 1,234")
    with pytest.raises(ValueError, match="no number"):
        is_right("1", "none")


PROMPT = 'import math\n\ndef f(x):\n    """Returns x + 1."""\n'


@pytest.mark.parametrize(
    "answer",
    [
        "    return x + 1\n",
        "\n    return x + 1\n\nprint(f(1))",
        "    y = x\n    return y + 1\n\ndef g(): pass",
        "return x + 1",
        "y = x\n    return y + 1",
        "if x:\n    return x + 1\nreturn 1",
        "Sure:\n```python\ndef f(x):\n    return x + 1\n```\nDone.",
        "```\nimport math\ndef f(x):\n    return math.floor(x) + 1\n```",
        "```python\nprint(1)\n```\nand\n```python\ndef f(x): return x + 1\n```",
        "```python\n    return x + 1\n```",
        "```python\ndef f(x):\n    return x + 1",
        "def f(x):\n    return math.ceil(x) + 1",
        '    """Again."""\n    return x + 1',
        "def f(x):\n    return x + 1\n\nThis function adds one.",
        "Here is the function:\n\nimport math\n\ndef f(x):\n    return math.ceil(x) + 1\n",
        "import the rest yourself:\ndef f(x):\n    return x + 1\n\nIt maps 1 to 2.\nDone, I hope!",
        "Here is the body:\n\n    return x + 1\n",
        "y = x + 1\nreturn y",
        "y = x + 1\nreturn y\n\nThat is the body.",
        "    y = x\n# one more\n    return y + 1\n",
        '    y = """a\nb"""\n    return x + 1\n\nprint(f(1))',
        "```python\nfrom __future__ import annotations\ndef f(x: Missing):\n    return x + 1\n```",
        "1. Code:\n   ```python\n   def f(x):\n       return x + 1\n   ```\n2. Done.",
        "- Code:\n\n      ```python\n      def f(x):\n          return x + 1\n      ```",
        '```python\ndef f(x):\n    """\n    ```\n    """\n    return x + 1\n```',
        "~~~\ndef f(x):\n    return x + 1\n~~~",
        "  y = x\n  return y + 1",
        "\tif x:\n\t\treturn x + 1",
    ],
)
def test_an_answer_becomes_a_program(answer: str) -> None:
    names: dict = {}
    exec(complete_program(PROMPT, answer, "f"), names)
    assert names["f"](1) == 2


def test_an_answer_without_code_is_no_working_program() -> None:
    for answer in ("", "I cannot help.", "(" * 10000, "\x00", "```", '    """'):
        source = complete_program(PROMPT, answer, "f")
        assert source.startswith(PROMPT)


def test_agreement_counts_equal_turns_and_the_common_beginning() -> None:
    agreement = Agreement.of([([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4], [1, 2, 9]), ([], [])])
    assert agreement == Agreement(3, pytest.approx(2 / 3), pytest.approx((1 + 0.5 + 1) / 3))
    assert Agreement.of([]) == Agreement(0, None, None)
    assert common_prefix_share([1, 2], [1, 2, 3, 4]) == 0.5
    assert common_prefix_share([], [1]) == 0.0


def test_length_ratios_leave_out_what_has_no_length() -> None:
    assert LengthRatio.of([(10, 5), (5, 10)]) == LengthRatio(1.25, 1.0)
    assert LengthRatio.of([(10, 5), (3, 0)]) == LengthRatio(2.0, 2.6)
    assert LengthRatio.of([(3, 0)]) == LengthRatio(None, None)
    assert LengthRatio.of([]) == LengthRatio(None, None)


def test_repetition_is_the_share_of_ngrams_seen_before() -> None:
    assert repetition_rate([1, 2, 3, 4, 5]) == 0.0
    assert repetition_rate([7] * 13) == pytest.approx(0.9)  # 10 4-grams, one of them new
    assert repetition_rate([1, 2, 1, 2, 1], size=2) == 0.5
    assert repetition_rate([1, 2, 3]) is None
    with pytest.raises(ValueError, match="size must be >= 1"):
        repetition_rate([1], size=0)


def test_wilson_interval_is_that_of_the_book() -> None:
    low, high = wilson_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0
    assert wilson_interval(0, 0) is None
    low, high = wilson_interval(0.5, 1)  # of one question, half of its answers
    assert low < 0.1
    assert high > 0.9
    with pytest.raises(ValueError, match="num_right"):
        wilson_interval(2, 1)


def test_acceptance_length_leaves_out_the_token_of_the_prompt() -> None:
    assert Acceptance.of([[(5, 4)]]) == Acceptance(1.0, 1.0)  # nothing accepted
    assert Acceptance.of([[(13, 4)], [(2, 1)]]) == Acceptance(13 / 5, 2.0)
    assert Acceptance.of([[(1, 0), (0, 0)], []]) == Acceptance(None, None)


def test_the_macro_acceptance_length_is_a_mean_over_questions_not_turns() -> None:
    two_turns, one = [(13, 4), (3, 2), (1, 0)], [(5, 1)]
    assert Acceptance.of([two_turns, one]) == Acceptance(18 / 7, (14 / 6 + 4.0) / 2)


def test_cost_per_token_is_of_the_turns_with_a_ledger() -> None:
    stats = [
        {"kl_spent": 1.0, "num_tokens": 10},
        {"kl_spent": None, "num_tokens": 90},
        {"kl_spent": 2.0, "num_tokens": 5},
    ]
    assert cost_per_token(stats, "kl_spent") == pytest.approx(0.2)
    assert cost_per_token([*stats, {"kl_spent": "inf", "num_tokens": 1}], "kl_spent") == math.inf
    assert cost_per_token(stats[1:2], "kl_spent") is None
    assert mean([]) is None
