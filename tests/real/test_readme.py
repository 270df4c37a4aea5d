"""The README is true: its example and its commands run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.target, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(package: str) -> list[str]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(f"python -m {package}")]


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_example_prints_an_answer(tmp_path: Path) -> None:
    assert "sky" in run(["-c", blocks("python")[0]], tmp_path)


def test_the_other_examples_import(tmp_path: Path) -> None:
    for example in blocks("python")[1:]:
        assert run(["-c", f"{example}\nprint('imported')"], tmp_path) == "imported\n"


@pytest.mark.parametrize("command", commands("eagle_fsd"), ids=lambda command: command.split()[3])
def test_every_command_runs_as_written(command: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Why is the sky blue?\nHow do I boil an egg?\n")
    assert run(shlex.split(command)[1:], tmp_path)


def test_the_evaluation_commands_run_one_after_the_other(tmp_path: Path) -> None:
    script = "".join(block for block in blocks("sh") if "python -m evaluation.run" in block)
    assert script.count("python -m ") == 5
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "report" / "report.html").is_file()
