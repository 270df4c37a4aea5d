import json
import sys
import tracemalloc
import types
from pathlib import Path

import pytest

from train import conversations
from train.conversations import (
    Conversation,
    Exclusion,
    Message,
    Tally,
    clean,
    is_mostly_ascii,
    read_rows,
)

QUESTION_FOLDER = Path(__file__).parents[3] / "shared" / "data"
GOOD = [("human", "hi"), ("gpt", "hello")]
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def sharegpt(*turns, **extra):
    return {"id": "x", "conversations": [{"from": f, "value": v} for f, v in turns], **extra}


def cleaned(*rows, **options):
    tally = Tally()
    return list(clean(rows, tally, **options)), tally


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


# Reading


def test_whole_array_is_read_in_order(tmp_path):
    rows = [sharegpt(("human", f"q{i}"), ("gpt", f"a{i}")) for i in range(5)]
    tally = Tally()
    assert list(read_rows(write(tmp_path / "a.json", json.dumps(rows, indent=2)), tally)) == rows
    assert not tally.faults


def test_every_cut_of_an_array_gives_the_whole_items_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "_CHUNK", 7)
    rows = [sharegpt(("human", 'q\\"}],é\n'), ("gpt", f"a{i}"), n=-1.5e3) for i in range(3)]
    items = [json.dumps(row, indent=1) for row in rows]
    text = "[\n" + ",\n".join(items) + "\n]"
    ends = [text.index(item) + len(item) for item in items]
    for cut in range(1, len(text)):
        tally = Tally()
        found = list(read_rows(write(tmp_path / "cut.json", text[:cut]), tally))
        assert found == rows[: sum(end <= cut for end in ends)]
        assert tally.faults == {"file cut off or broken": 1}


def test_array_reading_holds_an_item_and_not_the_file(tmp_path):
    row = sharegpt(("human", "q" * 5000), ("gpt", "a" * 5000))
    path = write(tmp_path / "a.json", "[" + ",".join([json.dumps(row)] * 2000) + "]")
    assert Path(path).stat().st_size > 19e6
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path, Tally())) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6  # a chunk of 1 MB as bytes, text, buffer and their joins


def test_broken_array_stops_there_with_its_place_in_the_log(tmp_path, caplog):
    text = json.dumps([sharegpt(*GOOD)])[:-1] + ', {"id": nope}, ' + " " * 100 + "{}]"
    tally = Tally()
    assert len(list(read_rows(write(tmp_path / "a.json", text), tally))) == 1
    assert tally.faults == {"file cut off or broken": 1}
    assert f"breaks at character {text.index('nope')}" in caplog.text


def test_arrays_one_behind_the_other_are_all_read(tmp_path, monkeypatch):
    rows = [sharegpt(("human", f"q{i}"), ("gpt", "a")) for i in range(4)]
    text = json.dumps(rows[:2]) + "\n\ufeff" + json.dumps(rows[2:], indent=1) + "\n[]"
    path = write(tmp_path / "a.json", text)
    for chunk in (1, 7, 2**20):
        monkeypatch.setattr(conversations, "_CHUNK", chunk)
        tally = Tally()
        assert list(read_rows(path, tally)) == rows
        assert not tally.faults


def test_what_stands_outside_of_an_array_is_counted(tmp_path):
    rows = [sharegpt(*GOOD)] * 2
    tally = Tally()
    text = json.dumps(rows) + "\n" + json.dumps(sharegpt(*GOOD))
    assert list(read_rows(write(tmp_path / "a.json", text), tally)) == rows
    assert tally.faults == {"item outside of an array": 1}


@pytest.mark.parametrize(
    "item",
    [
        '{"n": ' + "7" * 5000 + ', "s": "a\\"]}"}',
        "[" * 100_000 + '"]"' + "]" * 100_000,
        '{"a":' * 100_000 + "{}" + "}" * 100_000,
        "7" * 5000,
    ],
)
@pytest.mark.parametrize("chunk", [4096, 2**20])
def test_item_too_much_to_decode_is_skipped_and_counted(tmp_path, monkeypatch, item, chunk):
    monkeypatch.setattr(conversations, "_CHUNK", chunk)
    good = json.dumps(sharegpt(*GOOD))
    tally = Tally()
    path = write(tmp_path / "a.json", f"[{good}, {item}, {good}]")
    assert list(read_rows(path, tally)) == [sharegpt(*GOOD)] * 2
    assert sum(tally.faults.values()) == 1
    cut = write(tmp_path / "cut.json", f"[{good}, {item[:-1]}")
    tally = Tally()
    assert list(read_rows(cut, tally)) == [sharegpt(*GOOD)]
    assert sum(tally.faults.values()) >= 1


@pytest.mark.parametrize("is_array", [True, False])
def test_text_that_is_not_utf8_is_skipped_and_counted(tmp_path, is_array, caplog):
    rows = [
        sharegpt(("human", text), ("gpt", "a")) for text in ("plain", "caf\u00e9", "na\u00efve")
    ]
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / "latin.json"
    text = "[" + ",".join(texts) + "]" if is_array else "\n".join(texts)
    path.write_bytes(text.encode("latin-1"))
    tally = Tally()
    assert list(read_rows(str(path), tally)) == rows[:1]
    assert tally.faults == {f"malformed {'item' if is_array else 'line'}": 2}
    assert "not UTF-8" in caplog.text
    path.write_bytes(text.encode())
    assert list(read_rows(str(path), Tally())) == rows


def test_malformed_lines_are_skipped_counted_and_named(tmp_path, caplog):
    good = json.dumps({"messages": [{"role": "user", "content": "q"}]})
    path = write(tmp_path / "x.txt", f"{good}\n\n{{oops\n{good}\n[1]\n{good[:-3]}")
    tally = Tally()
    assert len(list(read_rows(path, tally))) == 2
    assert tally.faults == {"malformed line": 3}
    assert [f"line {n} skipped" in caplog.text for n in (1, 2, 3, 4, 5, 6)] == [
        False, False, True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ("hello", "starts with 'h'"),
        ("{no\n{json", "all 2 lines are malformed"),
    ],
)
def test_file_without_json_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        list(read_rows(write(tmp_path / "bad.json", text), Tally()))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*none\.json"):
        list(read_rows(str(tmp_path / "none.json"), Tally()))


def test_byte_order_mark_and_progress(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([sharegpt(*GOOD)]).encode())
    steps = []
    assert len(list(read_rows(str(path), Tally(), steps.append))) == 1
    assert sum(steps) == path.stat().st_size


def test_dataset_id_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(read_rows("someone/some-chats", Tally()))


def stream_from(monkeypatch, splits):
    def load_dataset(name, streaming):
        assert streaming
        return splits

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)


@pytest.mark.parametrize("splits", [["train"], ["test_sft", "train_sft"]])
def test_dataset_rows_come_from_the_training_split(monkeypatch, splits):
    loaded = {name: [sharegpt(("human", name), ("gpt", "a"))] for name in splits}
    stream_from(monkeypatch, loaded)
    (found,) = clean(read_rows("someone/some-chats", Tally()), Tally())
    assert found.opening.startswith("train")


def test_dataset_without_training_split_is_refused(monkeypatch):
    stream_from(monkeypatch, {"test": []})
    with pytest.raises(ValueError, match="no train split"):
        list(read_rows("someone/some-chats", Tally()))


def test_saved_dataset_folder_is_loaded_from_disk(monkeypatch, tmp_path):
    write(tmp_path / "dataset_info.json", "{}")
    fake = types.SimpleNamespace(load_from_disk=lambda name: [{"from": name}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_rows(str(tmp_path), Tally())) == [{"from": str(tmp_path)}]


# Cleaning


@pytest.mark.parametrize("key", ["conversations", "messages", "conversation"])
@pytest.mark.parametrize("names", [("from", "value"), ("role", "content")])
def test_all_spellings_give_one_conversation(key, names):
    role, content = names
    turns = [{role: "system", content: " be kind "}, {role: "user", content: "q"}]
    (found,), tally = cleaned({key: [*turns, {role: "assistant", content: "a\n"}]})
    expected = (Message("system", "be kind"), Message("user", "q"), Message("assistant", "a"))
    assert found == Conversation(expected)
    assert not tally.skipped
    assert not tally.cut


def test_turns_stored_by_column_are_read():
    (found,), _ = cleaned({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}})
    assert [each.content for each in found.messages] == ["q", "a"]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no assistant turn"),
        ([("human", "q")], "no assistant turn"),
        ([("system", "s")], "no assistant turn"),
        ([("gpt", "a"), ("human", "q")], "assistant first"),
        ([("system", "s"), ("gpt", "a")], "assistant first"),
        ([("human", " \n"), ("gpt", "a")], "empty turn"),
        ([("human", "q"), ("gpt", "")], "empty turn"),
        ([("human", "q"), ("human", "r"), ("gpt", "a")], "two user turns in a row"),
        ([("robot", "q"), ("gpt", "a")], "unknown role"),
        ([("human", 3), ("gpt", "a")], "turn without text"),
        ([("human", "q"), ("system", "s"), ("gpt", "a")], "system turn not first"),
    ],
)
def test_row_with_a_fault_before_any_answer_is_skipped(turns, reason):
    found, tally = cleaned(sharegpt(*turns))
    assert found == []
    assert tally.skipped == {reason: 1}
    assert tally.num_read == 1


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("human", "r")], "last turn unanswered"),
        ([("gpt", "b")], "two assistant turns in a row"),
        ([("human", "r"), ("human", "s"), ("gpt", "b")], "two user turns in a row"),
        ([("human", "r"), ("gpt", "")], "empty turn"),
        ([("tool", "r"), ("gpt", "b")], "unknown role"),
    ],
)
def test_row_with_a_later_fault_is_cut_before_it(turns, reason):
    (found,), tally = cleaned(sharegpt(*GOOD, *turns))
    assert [each.content for each in found.messages] == ["hi", "hello"]
    assert tally.cut == {reason: 1}
    assert not tally.skipped


@pytest.mark.parametrize("row", [{}, {"messages": "text"}, {"messages": [1]}, {"messages": None}])
def test_row_without_turns_is_skipped(row):
    found, tally = cleaned(row)
    assert found == []
    assert tally.skipped.total() == 1


def test_lone_surrogate_becomes_the_replacement_character():
    (found,), _ = cleaned(sharegpt(("human", "a\ud83d"), ("gpt", "b")))
    assert found.opening == "a\ufffd"


def test_english_only_needs_nine_letters_in_ten():
    row = sharegpt(("human", "abcdefghi é 1 €"), ("gpt", "?"))
    assert is_mostly_ascii(["abcdefghi é 1 €"])
    assert not is_mostly_ascii(["abcdefgh é"])
    assert is_mostly_ascii(["123"])
    assert len(cleaned(row, english_only=True)[0]) == 1
    other = sharegpt(("human", "привет"), ("gpt", "hello"))
    assert cleaned(other, english_only=True)[1].skipped == {"not English": 1}
    assert len(cleaned(other)[0]) == 1


def test_table_shows_every_reason():
    tally = Tally(5, 2)
    tally.skipped["empty turn"] = 3
    tally.cut["over-long"] = 1
    tally.faults["malformed line"] = 4
    table = tally.table()
    for part in ("read", "skipped: empty turn", "cut: over-long", "fault: malformed line", "kept"):
        assert part in table
    assert tally.reasons() == "malformed line: 4, empty turn: 3"


# Evaluation questions


def questions(tmp_path, *rows):
    path = tmp_path / "questions.jsonl"
    return Exclusion.from_files([write(path, "\n".join(map(json.dumps, rows)))])


def test_thirteen_shared_words_in_a_row_match_and_twelve_do_not():
    exclusion = Exclusion()
    exclusion.add(LONG)
    words = LONG.split()
    assert exclusion.matches("Well: " + ", ".join(words[1:]).upper() + "!")
    assert not exclusion.matches(" ".join(words[:12]) + " x " + " ".join(words[12:]))


def test_short_question_matches_as_a_whole_from_eight_words_on(tmp_path):
    eight, seven = " ".join(LONG.split()[:8]), "who was the king of old france"
    exclusion = questions(tmp_path, {"turns": [eight + "?", seven]})
    assert exclusion.matches(f"tell me, {eight} or not")
    assert not exclusion.matches(" ".join(LONG.split()[:7]))
    assert not exclusion.matches(seven)


def test_second_turns_references_and_choices_are_excluded(tmp_path):
    texts = [" ".join(f"{word}{n}" for word in LONG.split()) for n in range(4)]
    exclusion = questions(
        tmp_path,
        {"turns": ["hi", texts[0]], "reference": [texts[1]]},
        {"choices": [{"index": 0, "turns": [texts[2]]}]},
        {"turns": ["def f(x):\n    " + texts[3]]},
    )
    assert all(exclusion.matches(text) for text in texts)


def test_scripts_without_spaces_are_compared_by_characters(tmp_path):
    chinese = "\u6cb3\u6d41\u4e3a\u4ec0\u4e48\u603b\u662f\u6d41\u5411"
    chinese += "\u5927\u6d77\u800c\u4e0d\u662f\u9ad8\u5c71"
    thai = "\u0e17\u0e33\u0e44\u0e21\u0e41\u0e21\u0e48\u0e19\u0e49\u0e33\u0e44\u0e2b\u0e25"
    exclusion = questions(tmp_path, {"turns": [chinese]}, {"turns": [thai]})
    assert exclusion.matches("\u8bf7\u95ee" + chinese[2:15] + "\u5417")
    assert not exclusion.matches(chinese[:12] + "\u5417" + chinese[13:])
    assert exclusion.matches("x " + thai + " y")
    assert not exclusion.matches(chinese[:7] + " " + thai[:7])


def test_question_file_may_hold_any_separator_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "questions.jsonl"
    text = LONG.replace(" ", "\u2028", 1)
    rows = [{"turns": [text]}, {"choices": ["A", "B", 3, {"turns": [LONG[::-1]]}]}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    exclusion = Exclusion.from_files([path])
    assert exclusion.matches(LONG)
    assert exclusion.matches(LONG[::-1])


def test_question_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b'{"turns": ["caf\xe9"]}\n')
    with pytest.raises(ValueError, match="not UTF-8"):
        Exclusion.from_files([path])


def test_drop_looks_at_every_message_and_counts():
    exclusion = Exclusion()
    exclusion.add(LONG)
    kept = Conversation((Message("user", "q"), Message("assistant", "a")))
    dropped = Conversation((Message("user", "q"), Message("assistant", LONG)))
    tally = Tally()
    assert list(exclusion.drop([dropped, kept], tally)) == [kept]
    assert tally.skipped == {"evaluation question": 1}


@pytest.mark.parametrize("text", ["", "{}\n", "nonsense"])
def test_file_without_questions_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"questions\.jsonl"):
        Exclusion.from_files([write(tmp_path / "questions.jsonl", text)])


@pytest.mark.skipif(not QUESTION_FOLDER.is_dir(), reason="the question files are not here")
def test_no_shipped_question_of_eight_words_gets_through():
    paths = sorted(QUESTION_FOLDER.glob("*.jsonl"))
    exclusion = Exclusion.from_files(paths)
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    turns = [turn for row in rows for turn in row.get("turns", ())]
    long_enough = [turn for turn in turns if len(conversations._words(turn)) >= 8]
    assert len(long_enough) > 400
    chats = [Conversation((Message("user", t), Message("assistant", "a"))) for t in long_enough]
    assert list(exclusion.drop(chats, Tally())) == []
