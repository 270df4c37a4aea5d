"""Files of lines: nothing is lost or doubled wherever a run is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.lines import LineFile

FULL = Path("/dev/full")


def test_what_a_kill_left_of_a_last_line_is_cut_off(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    assert file.read() == []
    file.append(b"one")
    file.append(b"two")
    content = file.path.read_bytes()
    for cut in range(len(content) + 1):
        file.path.write_bytes(content[:cut])
        whole = file.read()
        assert whole == [b"one", b"two"][: content[:cut].count(b"\n")]
        file.append(b"three")
        assert file.read() == [*whole, b"three"]


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "lines").symlink_to(FULL)
    with pytest.raises(OSError, match=r"cannot write .*lines: No space left.*goes on from it"):
        LineFile(tmp_path / "lines").append(b"one")


def test_a_line_behind_half_a_line_takes_its_place(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    lines.append(b"first")
    with lines.path.open("ab") as stream:
        stream.write(b"hal")
    lines.append(b"second")
    assert lines.path.read_bytes() == b"first\nsecond\n"
