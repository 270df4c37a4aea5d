"""Settings of models: what tells a model from another one in its place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from evaluation.settings import full_name, model_digest

MIB = 2**20


def folder_of(path: Path, **changes: bytes) -> Path:
    """A folder like a model's: a large file of weights, a small one, texts."""
    contents = {
        "config.json": b"{}",
        "tokenizer.json": b"[]",
        "README.md": b"words",
        "model-1.safetensors": b"a" * 3 * MIB,
        "model-2.safetensors": b"b",
    } | changes
    path.mkdir(parents=True)
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return path


def test_a_copy_has_the_digest_of_the_original(tmp_path: Path) -> None:
    original = folder_of(tmp_path / "a")
    copied = shutil.copytree(original, tmp_path / "b", copy_function=shutil.copyfile)
    os.utime(copied / "model-1.safetensors", (1, 1))
    (copied / "README.md").write_bytes(b"others")
    (copied / "pytorch_model.bin").write_bytes(b"not loaded")
    assert model_digest(str(copied)) == model_digest(str(original))
    assert len(model_digest(str(original)) or "") == 16


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{ }"),
        ("tokenizer.json", b"{}"),
        ("chat_template.jinja", b"new"),
        ("model-1.safetensors", b"c" + b"a" * (3 * MIB - 1)),
        ("model-1.safetensors", b"a" * (3 * MIB - 1) + b"c"),
        ("model-1.safetensors", b"a" * 4 * MIB),
        ("model-2.safetensors", b"c"),
        ("model-3.safetensors", b""),
    ],
)
def test_other_files_have_another_digest(tmp_path: Path, name: str, content: bytes) -> None:
    original = model_digest(str(folder_of(tmp_path / "a")))
    changed: dict[str, Any] = {name: content}
    assert model_digest(str(folder_of(tmp_path / "b", **changed))) != original


def test_a_model_of_the_hub_is_the_snapshot_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_digest("owner/name") is None
    place = tmp_path / "models--owner--name"
    snapshot = folder_of(place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    assert model_digest("owner/name") == model_digest(str(snapshot)) is not None
    assert model_digest("owner/name", "v2") is None


def test_what_is_not_here_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    for model in (None, "demo", "./absent", "/absent/model.gguf", "a/b/c"):
        assert model_digest(model) is None
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert model_digest(str(tmp_path / "m.gguf")) is not None


def test_a_path_is_told_in_full_and_a_name_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "demo").mkdir()
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in ("model", "./model", "link", "~/model"):
        assert full_name(written) == str((tmp_path / "model").resolve())
    assert [full_name(name) for name in (None, "demo", "owner/name")] == [
        None,
        "demo",
        "owner/name",
    ]
