"""The run folder: nothing is lost or doubled wherever a run is cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.answers import RunFolder, digest, read_answers, read_run, safe_model_id
from evaluation.questions import Question, read_questions

FULL = Path("/dev/full")
SETTINGS = {"rule": "exact", "temperature": 0.0, "dtype": "float32", "stop": ["\n"]}


def answer(identity: int | str, text: str = "ü\u2028") -> dict[str, Any]:
    return {"question_id": identity, "choices": [{"index": 0, "turns": [text]}], "tstamp": 1.5}


def begun(path: Path, **changes: Any) -> RunFolder:
    folder = RunFolder(path, "m")
    path.mkdir(exist_ok=True)
    folder.write_run({"model_id": "m", "settings": SETTINGS} | changes)
    return folder


def ids(answers: list[dict[str, Any]]) -> list[int | str]:
    return [each["question_id"] for each in answers]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_parts_of_all_processes_are_merged_in_the_questions_order(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    for identity, rank in ((3, 0), ("a", 1), (1, 1), (2, 10)):
        folder.append(answer(identity), rank)
    assert set(ids(read_answers(tmp_path))) == {3, "a", 1, 2}
    assert ids(folder.merge([1, 2, 3, "a"])) == [1, 2, 3, "a"]
    assert [path.name for path in (tmp_path / "model_answer").iterdir()] == ["m.jsonl"]
    assert read_answers(tmp_path) == [answer(each) for each in (1, 2, 3, "a")]
    folder.append(answer(0), 0)
    assert ids(folder.merge([0, 1, 2, 3, "a"])) == [0, 1, 2, 3, "a"]
    assert read_run(tmp_path)["settings"] == SETTINGS


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 400), rank=st.integers(0, 1))
def test_a_part_cut_off_anywhere_loses_only_its_last_answer(
    tmp_path_factory: pytest.TempPathFactory, cut: int, rank: int
) -> None:
    folder = begun(tmp_path_factory.mktemp("run"))
    for identity in range(6):
        folder.append(answer(identity), identity % 2)
    part = folder.answer_file.with_name(f"m.jsonl.part-{rank}")
    content = part.read_bytes()
    cut = min(cut, len(content))
    part.write_bytes(content[:cut])
    # A line is whole with its last brace, newline or not.
    num_whole = sum(cut >= end for end in (place - 1 for place in line_ends(content)))
    kept = [rank + 2 * number for number in range(num_whole)] + list(range(1 - rank, 6, 2))
    assert sorted(ids(folder.merge(range(6)))) == sorted(kept)
    assert sorted(ids(read_answers(folder.folder))) == sorted(kept)


def line_ends(content: bytes) -> list[int]:
    return [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]


def test_killed_between_renaming_and_removing_parts_nothing_comes_twice(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    for identity in (1, 2):
        folder.append(answer(identity), 0)
    part = folder.answer_file.with_name("m.jsonl.part-0")
    content = part.read_bytes()
    folder.merge([1, 2])
    part.write_bytes(content)
    (tmp_path / "model_answer" / "m.jsonl.tmp").write_bytes(b"half")
    assert ids(read_answers(tmp_path)) == [1, 2]
    assert ids(folder.merge([1, 2])) == [1, 2]
    assert [path.name for path in (tmp_path / "model_answer").iterdir()] == ["m.jsonl"]


def test_a_damaged_line_that_is_not_the_last_is_named_and_nothing_changed(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.append(answer(1), 0)
    folder.merge([1])
    lines = folder.answer_file.read_bytes()
    for bad, words in ((b'{"question_id": 2, "ch\n', "not valid JSON"), (b"[]\n", "not an answer")):
        folder.answer_file.write_bytes(bad + lines)
        folder.append(answer(3), 0)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=rf"m\.jsonl, line 1: {words}"):
            folder.merge([1])
        assert contents(tmp_path) == before


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.append(answer(1), 0)
    folder.merge([1])
    folder.append(answer(2), 0)
    before = contents(tmp_path)
    part = folder.answer_file.with_name("m.jsonl.part-1")
    part.symlink_to(FULL)
    with pytest.raises(OSError, match=r"^cannot write .*No space left.*goes on from it$"):
        folder.append(answer(3), 1)
    part.unlink()
    temporary = folder.answer_file.with_name("m.jsonl.tmp")
    temporary.symlink_to(FULL)
    with pytest.raises(OSError, match=r"^the disk of .* is full; make room"):
        folder.merge([1, 2])
    assert contents(tmp_path) == before
    assert ids(folder.merge([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rule", "fuzzy:0.3:js", "rule 'exact', asked for is 'fuzzy:0.3:js'"),
        ("temperature", 0.5, "temperature 0.0, asked for is 0.5"),
        ("stop", [], r"stop \['\\n'\], asked for is \[\]"),
        ("new", 1, "new None, asked for is 1"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, name: str, value: object, words: str
) -> None:
    folder = begun(tmp_path)
    with pytest.raises(ValueError, match=words):
        folder.resume(SETTINGS | {name: value})
    del (asked := dict(SETTINGS))["dtype"]
    with pytest.raises(ValueError, match="dtype 'float32', asked for is None"):
        folder.resume(asked)


def test_auto_goes_with_what_is_stored_and_a_model_id_does_not_change(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    record = folder.resume(SETTINGS | {"dtype": "auto", "stop": ("\n",)})
    assert record is not None
    assert record["settings"]["dtype"] == "float32"
    with pytest.raises(ValueError, match="model_id 'm', asked for is 'n'"):
        RunFolder(tmp_path, "n").resume(SETTINGS)


def test_only_what_can_come_to_something_may_be_auto(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "m")
    stored = {"dtype": "float32", "tree": "4,2,2", "draft_vocab": "64", "system": "be kind"}
    folder.write_run({"model_id": "m", "settings": stored | {"target_sha256": None}})
    auto = dict.fromkeys(("dtype", "tree", "draft_vocab"), "auto")
    assert folder.resume(stored | auto | {"target_sha256": "a"}) is not None
    with pytest.raises(ValueError, match="system 'be kind', asked for is 'auto'"):
        folder.resume(stored | {"system": "auto"})
    folder.write_run({"model_id": "m", "settings": stored | {"target_sha256": "a"}})
    assert folder.resume(stored | {"target_sha256": None}) is not None
    with pytest.raises(ValueError, match="target_sha256 'a', asked for is 'b'"):
        folder.resume(stored | {"target_sha256": "b"})


def test_killed_while_its_first_file_is_written_a_run_can_begin_again(tmp_path: Path) -> None:
    (tmp_path / "run.json.tmp").write_text('{"sett')
    folder = RunFolder(tmp_path, "m")
    with folder.locked():
        assert folder.resume(SETTINGS) is None
    assert not (tmp_path / "run.json.tmp").exists()
    (tmp_path / "mine.tmp").write_text("mine")
    with pytest.raises(ValueError, match="holds no run and is not empty"):
        folder.resume(SETTINGS)


def test_a_folder_of_something_else_is_refused_a_new_or_locked_one_is_not(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "absent", "m").resume(SETTINGS) is None
    folder = RunFolder(tmp_path / "deep" / "new", "m")
    with folder.locked():
        assert folder.resume(SETTINGS) is None
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no run and is not empty"):
        RunFolder(tmp_path, "m").resume(SETTINGS)
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "notes.txt", "m")
    with pytest.raises(ValueError, match="output folder is empty"):
        RunFolder("", "m")


def test_a_second_run_is_kept_out(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".lock", is_singleton=False),
        pytest.raises(RuntimeError, match="another run is at work"),
        RunFolder(tmp_path, "m").locked(),
    ):
        pass
    with RunFolder(tmp_path, "m").locked():
        pass


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run in"):
        read_answers(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[]", "not of an evaluation run")):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_run(tmp_path)
    begun(tmp_path)
    assert read_answers(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "..", "a b", "x" * 201, "a\n"])
def test_a_model_id_that_names_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        RunFolder(tmp_path, name)
    RunFolder(tmp_path, safe_model_id(name))


def test_questions_are_kept_whole_and_told_apart(tmp_path: Path) -> None:
    questions = [Question(1, "c", ("ü\n", "\ud83d"), ("r",)), Question("1", "", ("q",))]
    folder = begun(tmp_path)
    folder.write_questions(questions)
    assert read_questions(tmp_path / "questions.jsonl") == questions
    assert digest(questions) == digest(tuple(questions))
    assert digest(questions) != digest(questions[:1]) != digest(questions[1:])
    assert json.loads((tmp_path / "questions.jsonl").read_text().splitlines()[0])["turns"]
