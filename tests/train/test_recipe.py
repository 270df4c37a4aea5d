import json
import lzma
import random
import zipfile
from pathlib import Path

import gguf
import pytest
import transformers

from eagle_fsd.checkpoint import load_head
from tests.eagle_fsd.test_checkpoint import write_gguf
from tests.scripted import TEMPLATE, byte_tokenizer
from tests.stubs import tiny_model
from train import prepare as prepare_module
from train import recipe
from train.recipe import MANIFEST_FILE, Pace, PackConfig, main, pack
from train.shards import TokenShards, read_meta

WORDS = ["the", "river", "ran", "to", "a", "wide", "quiet", "sea", "no", "ship", "was", "seen"]
SECRET = " ".join(f"secret{i}" for i in range(13))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model(vocab_size=272)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target_file(tmp_path_factory):
    """The same target as a .gguf file that carries its chat template."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        add_tokens = gguf.GGUFWriter.add_token_list

        def add_more(self, tokens):
            self.add_chat_template(TEMPLATE)
            # transformers would add this token behind the others, out of the target's range.
            add_tokens(self, [*tokens[:-1], "<|endoftext|>"])

        patch.setattr(gguf.GGUFWriter, "add_token_list", add_more)
        write_gguf(path, tiny_model(vocab_size=272))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """30 conversations, one with an evaluation question, one over-long; and that question."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=4)) + f" {i}" for i in range(28)]
    texts += [SECRET, "ab " * 200]
    rows = [
        {
            "conversations": [
                {"from": "human", "value": text},
                {"from": "gpt", "value": f"original {' '.join(rng.choices(WORDS, k=4))}"},
            ]
        }
        for text in texts
    ]
    conversations, questions = folder / "conversations.json", folder / "questions.jsonl"
    conversations.write_text(json.dumps(rows))
    questions.write_text(json.dumps({"question_id": 1, "turns": [SECRET]}) + "\n")
    return str(conversations), str(questions)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A pace for a target of two layers, and a cache of one's own."""
    pace = Pace(8, 400, 4, 2, 1, has_cached_features=True)
    monkeypatch.setattr(Pace, "of", lambda _: pace)
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))


def head_flags(output, *more):
    small = "--draft-vocab 100 --unroll 2 --epochs 2 --device cpu --output"
    return [*small.split(), str(output), *more]


def recipe_flags(target, data, output, *more):
    given = ["--conversations", data[0], "--exclude", data[1], "--target", target]
    minutes = ["--minutes-regenerate", "5", "--minutes-fit", "5"]
    return [*given, *minutes, *head_flags(output, *more)]


def texts(shards):
    tokenizer = byte_tokenizer()
    return [
        tokenizer.decode(ids)
        for split in ("train", "validation")
        for ids, _ in TokenShards(shards, split)
    ]


def test_one_command_goes_from_conversations_to_a_head(target, data, tmp_path, capsys):
    flags = recipe_flags(target, data, tmp_path / "out")
    assert main(flags) == 0
    shown = capsys.readouterr().out
    (best,) = (tmp_path / "out").glob("run-*/best")
    assert f"best head: {best}" in shown
    assert load_head(best).config.hidden_size == 32
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["head"] == str(best)
    assert record["draft_vocab_size"] == 100
    assert record["data"]["own"]["counts"]["skipped"]["evaluation question"] == 1
    own = texts(tmp_path / "out" / "own")
    assert len(own) == 28
    assert not any("original" in text or "secret" in text for text in own)

    # Again: everything is there, and stays.
    before = (best / "model.safetensors").read_bytes()
    assert main(flags) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (best / "model.safetensors").read_bytes() == before


def test_new_data_make_a_new_run_beside_the_old_one(target, data, tmp_path):
    flags = recipe_flags(target, data, tmp_path)
    assert main([*flags, "--minutes-regenerate", "1e-9"]) == 0
    assert main(flags) == 0
    assert len(list(tmp_path.glob("run-*/best"))) == 2
    assert len(texts(tmp_path / "own")) == 28


def test_original_answers_are_mixed_in(target, data, tmp_path):
    flags = recipe_flags(target, data, tmp_path, "--mix-original", "--limit", "20")
    assert main(flags) == 0
    found = texts(tmp_path / "mixed")
    assert len(found) == 40
    assert sum("original" in text for text in found) == 20


def test_more_answers_are_mixed_in(target, data, tmp_path):
    flags = recipe_flags(target, data, tmp_path, "--mix-original", "--limit", "20")
    assert main([*flags, "--minutes-regenerate", "1e-9"]) == 0
    assert len(texts(tmp_path / "mixed")) == 21
    assert main(flags) == 0
    assert len(texts(tmp_path / "mixed")) == 40
    assert len(list(tmp_path.glob("run-*/best"))) == 2


def test_without_minutes_to_regenerate_the_original_answers_are_learnt(target, data, tmp_path):
    assert main([*recipe_flags(target, data, tmp_path), "--minutes-regenerate", "0"]) == 0
    assert not (tmp_path / "own").exists()
    assert all("original" in text for text in texts(tmp_path / "mixed"))


def test_the_clock_ends_the_answers_and_more_time_goes_on(target, data, tmp_path, capsys):
    folder = tmp_path / "own"

    def prepare(minutes):
        common = f"--regenerate --max-prompt-tokens 128 --max-new-tokens 8 --max-length 256 \
            --device cpu --batch-size 2 --tokenizer {target} --output {folder}"
        command = ["--input", data[0], *common.split(), "--limit-minutes", str(minutes)]
        return prepare_module.main(command)

    assert prepare(1e-9) == 0
    answers = (folder / "regenerated.jsonl").read_text()
    assert answers.count("\n") == 1  # what was begun is finished
    assert prepare(1e-9) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert prepare(5) == 0
    more = (folder / "regenerated.jsonl").read_text()
    assert more.startswith(answers)
    assert more.count("\n") == 28 + 1
    assert read_meta(folder)["splits"]["train"]["conversations"] > 20


def test_parts_travel_and_train_elsewhere(target_file, data, tmp_path, monkeypatch, capsys):
    parts, output = tmp_path / "parts", tmp_path / "out"
    num_bytes = Path(target_file).stat().st_size
    monkeypatch.setattr(recipe.pack, "__defaults__", (num_bytes // 2 + 1,))
    flags = ["--conversations", data[0], "--exclude", data[1], "--target", target_file]
    assert main(["pack", *flags, "--output", str(parts)]) == 0
    names = {path.name for path in parts.iterdir()}
    assert names == {MANIFEST_FILE, "target.gguf.0", "target.gguf.1", "data.zip.0"}
    assert all(path.stat().st_size <= num_bytes // 2 + 1 for path in parts.iterdir())

    assert main(["run", "--parts", str(parts), "--minutes", "5", *head_flags(output)]) == 0
    assert f"best head: {output / 'best'}" in capsys.readouterr().out
    head = load_head(output / "best")
    assert head.config.vocab_size == 272
    assert json.loads((output / "record.json").read_text())["training"]["step"] > 0
    found = {path.name for path in output.iterdir()}
    assert {"best", "metrics.jsonl", "record.json", "answers.jsonl.xz"} <= found
    assert sum(path.is_file() for path in output.rglob("*")) <= 8
    with lzma.open(output / "answers.jsonl.xz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    assert len(rows) == 28
    assert all(set(row["messages"][1]) == {"role", "content", "finish_reason"} for row in rows)
    assert not any("secret" in json.dumps(row) for row in rows)

    before = (output / "best" / "model.safetensors").read_bytes()
    assert main(["run", "--parts", str(parts), "--minutes", "5", *head_flags(output)]) == 0
    assert (output / "best" / "model.safetensors").read_bytes() == before


def test_as_many_turns_travel_as_will_be_answered(target_file, tmp_path):
    chat = [("human", "one"), ("gpt", "a"), ("human", "two"), ("gpt", "b"), ("human", "three")]
    turns = [{"from": role, "value": text} for role, text in [*chat, ("gpt", "c")]]
    conversations = tmp_path / "conversations.json"
    conversations.write_text(json.dumps([{"conversations": turns}]))
    for num_turns in (1, 2, 5):
        parts = tmp_path / str(num_turns)
        assert pack(PackConfig((str(conversations),), str(parts), target_file, turns=num_turns))
        with zipfile.ZipFile(parts / "data.zip.0") as archive:
            messages = json.loads(archive.read("conversations.jsonl"))["messages"]
        expected = ["one", "-", "two", "-", "three", "-"][: 2 * num_turns]
        assert [each["content"] for each in messages] == expected


def test_a_folder_stands_in_for_the_packed_target(target, target_file, data, tmp_path):
    pack(PackConfig((data[0],), str(tmp_path / "parts"), target_file, mix_original=True))
    (tmp_path / "parts" / "target.gguf.0").unlink()
    flags = ["run", "--parts", str(tmp_path / "parts"), "--target", target, "--minutes", "5"]
    flags += [*head_flags(tmp_path / "out"), "--work", str(tmp_path / "work"), "--mix-original"]
    assert main(flags) == 0
    found = texts(tmp_path / "work" / "mixed")
    assert sum("original" in text for text in found) >= 28


def one_line(capsys, flags, message):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_bad_parts_are_one_line(target, target_file, data, tmp_path, capsys):
    parts = tmp_path / "parts"
    flags = ["run", "--parts", str(parts), *head_flags(tmp_path / "out")]
    one_line(capsys, flags, "train.recipe pack")
    pack(PackConfig((data[0],), str(parts), target_file))
    one_line(capsys, [*flags, "--mix-original"], "pack them with --mix-original")
    whole = (parts / "data.zip.0").read_bytes()
    (parts / "data.zip.0").write_bytes(whole[:-1] + b"x")
    one_line(capsys, [*flags, "--target", target, "--work", str(tmp_path / "w")], "SHA-256")
    (parts / "data.zip.0").unlink()
    one_line(capsys, [*flags, "--target", target, "--work", str(tmp_path / "w")], "no part")
    (parts / MANIFEST_FILE).write_text('{"format": 0}')
    one_line(capsys, flags, "pack again")
    one_line(
        capsys,
        ["pack", "--conversations", data[0], "--target", target, "--output", str(parts)],
        "run --target",
    )


@pytest.mark.parametrize("content", ["[]", "{", "null", '{"format": ["eagle_fsd parts", 1]}'])
def test_damaged_manifest_is_one_line(tmp_path, capsys, content):
    (tmp_path / MANIFEST_FILE).write_text(content)
    flags = ["run", "--parts", str(tmp_path), *head_flags(tmp_path / "out")]
    one_line(capsys, flags, "pack again")


def test_failed_pack_leaves_the_parts_and_a_whole_one_replaces_them(
    target_file, data, tmp_path, capsys
):
    parts = tmp_path / "parts"
    flags = ["pack", "--target", target_file, "--output", str(parts), "--conversations"]
    one_line(capsys, [*flags, "nothing.json"], "no file")
    assert not parts.exists()
    assert main([*flags, data[0]]) == 0
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    one_line(capsys, [*flags, "nothing.json"], "no file")
    one_line(capsys, [*flags, data[0], "--exclude", "nothing.jsonl"], "nothing.jsonl")
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == before
    # Without its manifest, as a failure left it before, and with the parts of a larger one.
    (parts / MANIFEST_FILE).unlink()
    (parts / "data.zip.7").write_bytes(b"x")
    assert main([*flags, data[0]]) == 0
    assert {path.name for path in parts.iterdir()} == set(before)
    (parts / "target.gguf").write_text("mine")
    one_line(capsys, [*flags, data[0]], "'target.gguf', which is no part")


def test_work_of_other_parts_is_refused_and_without_a_note_made_again(
    target, target_file, data, tmp_path, capsys
):
    other = tmp_path / "other.json"
    other.write_text(Path(data[0]).read_text().replace("river", "brook"))
    work = tmp_path / "work"
    for name, source in (("a", data[0]), ("b", str(other))):
        pack(PackConfig((source,), str(tmp_path / name), target_file))

    def flags(name):
        run = ["run", "--parts", str(tmp_path / name), "--target", target, "--minutes", "5"]
        return [*run, *head_flags(tmp_path / "out" / name), "--work", str(work)]

    assert main(flags("a")) == 0
    capsys.readouterr()
    one_line(capsys, flags("b"), "made from other parts")
    (work / "parts.sha256").unlink()
    (work / "data" / "conversations.jsonl").write_text("{}")
    one_line(capsys, flags("a"), "nobody knows what it is of; give another --work")
    assert (work / "data" / "conversations.jsonl").read_text() == "{}"  # it may be the user's


def test_head_of_another_run_is_not_written_over(target_file, data, tmp_path, capsys):
    output = tmp_path / "out"
    (output / "best").mkdir(parents=True)
    pack(PackConfig((data[0],), str(tmp_path / "parts"), target_file))
    flags = ["run", "--parts", str(tmp_path / "parts"), *head_flags(output)]
    one_line(capsys, flags, "not of this command")
    assert [path.name for path in output.iterdir()] == ["best"]


def test_target_of_another_family_is_refused_at_once(data, tmp_path, capsys):
    transformers.MambaConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    flags = recipe_flags(str(tmp_path / "mamba"), data, tmp_path / "out")
    one_line(capsys, flags, "family 'mamba'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--draft-vocab", "16384"], "1..272"),
        (["--draft-vocab", "nothing.json"], "no draft vocabulary"),
        (["--init", "demo"], "does not fit the target"),
        (["--init", "./nothing"], "no draft head"),
        (["--epochs", "0"], "epochs must be > 0"),
        (["--minutes-fit", "0"], "minutes_fit"),
        (["--turns", "0"], "turns must be >= 1"),
        (["--limit", "0"], "limit must be >= 1"),
        (["--conversations", "nothing.json"], "no file"),
    ],
)
def test_bad_settings_are_one_line_before_anything_is_made(
    target, data, tmp_path, capsys, change, message
):
    one_line(capsys, [*recipe_flags(target, data, tmp_path / "out"), *change], message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [[], ["pack"], ["run"]])
def test_commands_answer_help(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    assert " ".join(["usage: python -m train.recipe", *command]) in capsys.readouterr().out
