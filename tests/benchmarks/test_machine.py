"""The section of one machine: all commands run, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.machine import SECTION, main, section
from tests.benchmarks.models import saved


def arm(median: float, speed: float, length: float | None = None) -> dict[str, Any]:
    ratio = {"median": median, "low": median - 0.1, "high": median + 0.1}
    return {
        "ratio": ratio,
        "tokens_per_second": speed,
        "acceptance_length": length,
        "num_tokens": 1020,  # 1000 after the first ones of 20 answers
        "seconds": 7.0 + 1000 / speed,
        "phases_s": {"prefill": 7.0},
    }


def test_the_section_compares_live_decoding_with_its_parts() -> None:
    speed = {
        "environment": {
            "machine": {"accelerator": None, "cpu": "Chip", "num_threads": 2},
            "dtype": "float32",
            "versions": {"torch": "2.13.0"},
            "git_commit": "abc",
        },
        "settings": {"tree": "8,2,4"},
        "num_questions": 20,
        "arms": {"hf": arm(1.0, 10.0), "plain": arm(1.2, 12.0), "exact": arm(1.8, 18.0, 2.0)},
    }
    short = {"context": 256, "plain_s": 0.1, "pass_s": 0.1, "draft_s": 0.02, "live_s": 0.125}
    long = {"context": 4096, "plain_s": 0.2, "pass_s": 0.3, "draft_s": 0.02, "live_s": 0.375}
    more = {"overhead": 0.04, "memory_bytes": 5e8, "num_cycles": 16}
    rows = [row | more for row in (short, long)]
    text = section(speed, rows)
    assert "| `exact` | 1.80 (1.70 to 1.90) | 18.0 | 2.00 |" in text
    # 2.0 * 0.1 / 0.12 = 1.67 at best, 18 / 12 = 1.5 live
    assert "`exact` over `plain`, without prefill: 1.50, which is 90% of" in text
    assert "= 1.67, each timed alone at 256" in text
    assert "| 4096 | 200.0 | 300.0 | 20.0 | 375.0 | 4.0% | 500 |" in text
    assert "(cycle at 4096 / at 256) / (plain at 4096 / at 256): 1.50." in text  # 3 / 2


def test_all_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    target, head, questions = saved(tmp_path)
    command = [
        *("--target", target, "--draft-head", head, "--questions", questions, "--every", "2"),
        *("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--tune-on", "2"),
        *("--contexts", "8,30", "--output", str(tmp_path / "figures")),
    ]
    assert main(command) == 0
    text = (tmp_path / "figures" / SECTION).read_text()
    assert "| `hf-lookup` |" in text
    assert "3 questions" in text
    tuned = (tmp_path / "figures" / "tune.jsonl").read_text().splitlines()
    assert [json.loads(line)["question_id"] for line in tuned] == [1, 3]  # 0, 2, 4 are timed
    capsys.readouterr()
    monkeypatch.setattr(
        machine, "_call", lambda module, flags: pytest.fail(f"{module} {flags}")
        if module != "evaluation.speed"  # which goes on by itself
        else None
    )  # fmt: skip
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(text)


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", "x", "--draft-head", "y", "--questions", str(tmp_path / "none.jsonl")]
    flags += ["--output", str(tmp_path / "figures")]
    assert main(flags) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert main([*flags, "--every", "1"]) == 2
    assert "the tree is chosen on others" in capsys.readouterr().err
