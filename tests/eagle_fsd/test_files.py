"""Files appear whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from eagle_fsd.files import whole_file, write_json, write_text


def write_half_and_fail(path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text("half")
        (path.parent / "absent").read_text()


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, {"a": "ü", "b": [1.5]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü", "b": [1.5]}
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, math.nan)
    with pytest.raises(FileNotFoundError):
        write_half_and_fail(path)
    assert path.read_bytes() == before
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["figures.json"]
