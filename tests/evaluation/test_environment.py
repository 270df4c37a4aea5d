"""The record of machine and software, and the commit of the code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from eagle_fsd.target import TargetModel
from evaluation.environment import environment, git_commit
from tests.stubs import tiny_model


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_record_names_machine_versions_and_model_and_is_json() -> None:
    record = environment(TargetModel(tiny_model()))
    assert json.loads(json.dumps(record)) == record
    assert record["machine"]["num_threads"] == torch.get_num_threads()
    assert record["machine"]["num_cores"] >= 1
    assert record["machine"]["cpu"]
    assert set(record["versions"]) == {"python", "torch", "transformers", "eagle_fsd"}
    facts = {name: record[name] for name in ("device", "dtype", "attention")}
    assert facts == {"device": "cpu", "dtype": "float32", "attention": "sdpa"}
    assert record["machine"]["accelerator"] is None


def test_without_a_target_its_facts_are_none_under_the_same_names() -> None:
    record = environment()
    assert (record["device"], record["dtype"], record["attention"]) == (None, None, None)


def test_the_commit_is_that_of_a_checkout_and_tells_of_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    assert git_commit(package) is None
    git(tmp_path, "init", "-q")
    (package / "a.py").write_text("1\n")
    assert git_commit(package) is None
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(package) == commit
    (package / "a.py").write_text("2\n")
    assert git_commit(package) == f"{commit}-dirty"
    installed = tmp_path / "site-packages"  # in the checkout, but not part of it
    installed.mkdir()
    (installed / "b.py").write_text("3\n")
    assert git_commit(installed) is None
