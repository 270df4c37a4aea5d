"""What the folders promise each other: imports, devices, randomness, and commands that answer."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "tree": {"tree"},
    "eagle_fsd": {"tree", "eagle_fsd"},
    "train": {"tree", "eagle_fsd", "train"},
    "evaluation": {"tree", "eagle_fsd", "evaluation"},
    "benchmarks": {"tree", "eagle_fsd", "evaluation", "benchmarks"},
}
OURS = {"tree", "eagle_fsd", "train", "evaluation", "benchmarks", "tests"}
COMMANDS = [
    "eagle_fsd",
    "train.prepare",
    "train.features",
    "train.fit",
    "train.vocab",
    "train.recipe",
    "evaluation.run",
    "evaluation.score",
    "evaluation.speed",
    "evaluation.replay",
    "evaluation.judge",
    "evaluation.report",
    "benchmarks.tree",
    "benchmarks.cycle",
    "benchmarks.attention",
]


def modules(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of everything a module imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    for path, tree in modules(package):
        assert imported(tree) & OURS <= ALLOWED[package], path


def test_tree_needs_torch_only() -> None:
    for path, tree in modules("tree"):
        assert imported(tree) <= {"__future__", "dataclasses", "torch", "tree"}, path


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_only_device_py_reaches_for_an_accelerator(package: str) -> None:
    for path, tree in modules(package):
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert path.name == "device.py" or not used & {"cuda", "mps", "xpu"}, path


@pytest.mark.parametrize("package", ["tree", "eagle_fsd"])
def test_randomness_comes_from_passed_generators(package: str) -> None:
    unseeded = {"manual_seed", "rand", "randn", "randint", "randperm", "multinomial", "bernoulli"}
    for path, tree in modules(package):
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & unseeded, path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{command}.__main__" if command == "eagle_fsd" else command
    with pytest.raises(SystemExit) as done:
        importlib.import_module(name).main(["--help"])
    assert done.value.code == 0
    captured = capsys.readouterr()
    assert "usage:" in captured.out
    assert not captured.err


def test_a_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "train.vocab", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert "usage:" in done.stdout
