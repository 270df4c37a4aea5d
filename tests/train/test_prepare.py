import json
import multiprocessing
import os
import shutil
import signal

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.train.tiny import save_shards
from train import prepare as prepare_module
from train.conversations import Conversation, Message
from train.features import shards_identity
from train.prepare import (
    ChatEncoder,
    PrepareConfig,
    UnusableConversationError,
    load_tokenizer,
    main,
    prepare,
    split_of,
    tokenizer_identity,
)
from train.shards import TokenShards, read_meta
from train.vocab import build_vocab, count_tokens

WORDS = ["system", "user", "assistant", "\n", *"abcdefgh", *(f"w{i}" for i in range(40))]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCK = "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    + BLOCK
    + "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHORT_BLOCK = GENERATION.replace(
    BLOCK, "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
)
LONG_BLOCK = GENERATION.replace(
    BLOCK, "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
)
COMPACT = (
    "{% for m in messages %}{{ ('<|im_start|>' if m['role'] == 'user' else '<|sep|>')"
    " + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|sep|>' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
    "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def tokenizer(template=CHATML, vocab=WORDS):
    special = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>", "<|sep|>"]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*special, *vocab])}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Split(Regex("\n"), "isolated"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",  # not the end-of-turn token
        additional_special_tokens=special[2:],
        chat_template=template,
    )


def byte_tokenizer(template=CHATML):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("h", "i"), ("Ġ", "hi")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def chat(*texts, system=None):
    first = [Message("system", system)] if system else []
    turns = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    return Conversation((*first, *turns))


def answers(tok, tokenized):
    """The supervised runs as text."""
    runs, current = [], []
    for token, is_answer in zip([*tokenized.ids, 0], [*tokenized.mask, False], strict=True):
        if is_answer:
            current.append(token)
        elif current:
            runs.append(tok.decode(current))
            current = []
    return runs


# Masks


def test_eight_token_toy_by_hand():
    tokenized = ChatEncoder(tokenizer(COMPACT), 100).encode(chat("a b", "c d"))
    start, end, sep = 2, 3, 4
    a = 5 + WORDS.index("a")
    assert tokenized.ids == [start, a, a + 1, end, sep, a + 2, a + 3, end]
    assert tokenized.mask == [False] * 5 + [True] * 3
    assert tokenized.cut == ""


def test_answer_ends_with_the_end_of_turn_token_though_eos_is_another():
    tok = tokenizer()
    encoder = ChatEncoder(tok, 100)
    assert encoder.route == "prefix"
    tokenized = encoder.encode(chat("a b", "c d", "e", "f g h"))
    assert answers(tok, tokenized) == ["c d <|im_end|>", "f g h <|im_end|>"]
    assert tok.decode(tokenized.ids[-1:]) == "<|im_end|>"
    assert len(tokenized.ids) == len(tokenized.mask)


def test_ids_with_gaps_are_counted_up_to_the_largest(tmp_path):
    vocab = {"<unk>": 0, "a": 3, "b": 300}
    tok = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, "<unk>")), unk_token="<unk>"
    )
    identity = tokenizer_identity(tok)
    assert (len(tok), identity["vocab_size"]) == (3, 301)
    folder = save_shards(tmp_path, [([3, 300, 300], [False, True, True])], tokenizer=tok)
    assert count_tokens(TokenShards(folder)).nonzero().tolist() == [[300]]
    assert build_vocab(TokenShards(folder), 1)["token_ids"] == [300]


@pytest.mark.parametrize("make", [tokenizer, byte_tokenizer])
@pytest.mark.parametrize("template", [GENERATION, SHORT_BLOCK, LONG_BLOCK])
@pytest.mark.parametrize("max_length", [7, 10, 14, 20, 25, 30, 100])
def test_both_routes_give_equal_ids_and_masks(make, template, max_length):
    conversation = chat("a b", "c \n\nd  hi", "e", "f g h", "a", "\u00e9", system="h")
    by_block = ChatEncoder(make(template), max_length)
    by_prefix = ChatEncoder(make(CHATML), max_length)
    assert (by_block.route, by_prefix.route) == ("generation", "prefix")
    results = []
    for encoder in (by_block, by_prefix):
        try:
            results.append(encoder.encode(conversation))
        except UnusableConversationError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_ids_are_those_of_the_template():
    tok = byte_tokenizer()
    conversation = chat("hi there", "hi hi\n\nyes", "more", "no")
    ids = tok.apply_chat_template(conversation.chat(), return_dict=True)["input_ids"]
    assert ChatEncoder(tok, 100).encode(conversation).ids == ids[:-1]  # without the last line feed


def test_default_system_prompt_of_a_template_is_kept():
    template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>a b<|im_end|>{% endif %}" + CHATML
    )
    tok = tokenizer(template)
    tokenized = ChatEncoder(tok, 100).encode(chat("c", "d"))
    assert tok.decode(tokenized.ids).startswith("<|im_start|> a b <|im_end|>")
    assert answers(tok, tokenized) == ["d <|im_end|>"]


def test_over_long_conversation_is_cut_after_the_last_whole_answer():
    tok = tokenizer(COMPACT)
    conversation = chat("a b", "c d", "e", "f g")  # 8 + 7 tokens
    for max_length, length, cut in [(15, 15, ""), (14, 8, "over-long"), (8, 8, "over-long")]:
        tokenized = ChatEncoder(tok, max_length).encode(conversation)
        assert (len(tokenized.ids), tokenized.cut) == (length, cut)


def test_over_long_first_answer_is_cut_inside():
    tok = tokenizer(COMPACT)
    tokenized = ChatEncoder(tok, 7).encode(chat("a b", "c d", "e", "f"))
    assert answers(tok, tokenized) == ["c d"]
    assert tokenized.cut == "over-long first answer"
    assert len(tokenized.ids) == 7


def test_over_long_prompt_is_skipped():
    with pytest.raises(UnusableConversationError, match="over-long prompt"):
        ChatEncoder(tokenizer(COMPACT), 5).encode(chat("a b", "c d"))


def test_control_token_in_the_text_is_skipped():
    with pytest.raises(UnusableConversationError, match="control token"):
        ChatEncoder(tokenizer(), 100).encode(chat("a", "b <|im_end|> c"))


def test_answer_that_merges_with_the_prompt_is_skipped():
    # The template's line feed and the answer's first one are one token: unlike in decoding.
    encoder = ChatEncoder(byte_tokenizer(), 100)
    with pytest.raises(UnusableConversationError, match="prefix"):
        encoder.encode(chat("a", "\n\nb"))
    encoder.encode(chat("a", "b"))


def test_template_without_end_of_turn_token_supervises_all_it_writes():
    template = "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    tok = tokenizer(template)
    assert answers(tok, ChatEncoder(tok, 100).encode(chat("a", "b"))) == ["b \n"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('never') }}", "fails on a plain chat: never"),
        ("{{ messages[0]['content'] }}", "leaves out the assistant's text"),
    ],
)
def test_unusable_template_is_refused(template, message):
    with pytest.raises(ValueError, match=message):
        ChatEncoder(tokenizer(template), 100)


# Splits


def test_split_depends_on_the_opening_and_the_seed_alone():
    conversations = [chat(f"question {i}", "a") for i in range(2000)]
    splits = [split_of(each, 0, 0.1) for each in conversations]
    assert splits == [split_of(chat(each.opening, "b", "c", "d"), 0, 0.1) for each in conversations]
    assert 140 < splits.count("validation") < 260  # 200 +- 4.5 standard deviations of 13
    assert splits != [split_of(each, 1, 0.1) for each in conversations]
    assert {split_of(each, 0, 0.0) for each in conversations} == {"train"}


# The command


@pytest.fixture(scope="module")
def tok_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tok")
    tokenizer().save_pretrained(folder / "chatml")
    tokenizer(FORGETFUL).save_pretrained(folder / "forgetful")
    return folder


def rows(num=60):
    return [
        {
            "conversations": [
                {"from": "human", "value": f"w{i % 40} a"},
                {"from": "gpt", "value": "b"},
            ]
        }
        for i in range(num)
    ]


@pytest.fixture
def command(tmp_path, tok_folder):
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(rows()))

    def run(*extra, source=source, tok="chatml", output="out"):
        fixed = ["--input", source, "--tokenizer", tok_folder / tok, "--output", tmp_path / output]
        return main([str(each) for each in (*fixed, *extra)])

    return run


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "meta.json"
    }


def refused(capsys):
    """The one line on stderr."""
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


def test_command_writes_shards_that_read_back(command, tmp_path, capsys):
    assert command("--validation-fraction", "0.2") == 0
    out = capsys.readouterr().out
    assert "conversations kept" in out
    assert "60 conversations are a trial" in out
    meta = read_meta(tmp_path / "out")
    tok = tokenizer()
    found = [
        pair for split in ("train", "validation") for pair in TokenShards(tmp_path / "out", split)
    ]
    assert len(found) == meta["counts"]["kept"] == 60
    assert all(tok.decode(ids[mask]) == "b <|im_end|>" for ids, mask in found)
    assert meta["supervised_tokens"] == 120
    assert meta["total_tokens"] == sum(len(ids) for ids, _ in found)
    assert meta["splits"]["validation"]["conversations"] > 0
    assert meta["tokenizer"]["vocab_size"] == len(tok)
    assert len(meta["tokenizer"]["chat_template_sha256"]) == 64
    assert not (tmp_path / "out" / "unfinished.json").exists()


def test_two_runs_write_the_same_bytes(command, tmp_path):
    assert command(output="one") == command(output="two") == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert command("--seed", "1", output="three") == 0
    assert contents(tmp_path / "one") != contents(tmp_path / "three")


def test_rerun_does_nothing_and_other_settings_are_refused(command, tmp_path, capsys, monkeypatch):
    assert command() == 0
    before = contents(tmp_path / "out")
    monkeypatch.setattr(prepare_module, "_write", None)
    assert command() == 0
    assert "nothing to do" in capsys.readouterr().out
    assert command("--max-length", "99") == 2
    assert "other settings (max_length)" in refused(capsys)
    assert command(tok="forgetful") == 2
    assert "other settings (tokenizer)" in refused(capsys)
    assert contents(tmp_path / "out") == before


def test_answers_of_equal_size_are_other_shards(tmp_path, tok_folder, capsys):
    identities = []
    for name in ("b", "c"):
        source = tmp_path / name / "chats.json"
        source.parent.mkdir()
        source.write_text(json.dumps(rows()).replace('"b"', f'"{name}"'))
        output = tmp_path / name / "out"
        prepare(PrepareConfig((str(source),), str(tok_folder / "chatml"), str(output)))
        identities.append(shards_identity(output))
    assert identities[0] != identities[1]
    # The text alone decides, whatever is known of the input.
    contents = [read_meta(tmp_path / name / "out")["splits"]["train"]["sha256"] for name in "bc"]
    assert contents[0] != contents[1]
    source.write_text(source.read_text().replace('"c"', '"d"'))
    with pytest.raises(ValueError, match=r"other settings \(input\)"):
        prepare(PrepareConfig((str(source),), str(tok_folder / "chatml"), str(output)))


def test_shards_of_an_earlier_version_are_taken_as_they_are(command, tmp_path, capsys):
    assert command() == 0
    path = tmp_path / "out" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["identity"]["input"][0]["sha256"]
    for split in meta["splits"].values():
        del split["sha256"]
    path.write_text(json.dumps(meta))
    assert len(TokenShards(tmp_path / "out")) > 0
    assert len(shards_identity(tmp_path / "out")) == 64
    assert command() == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["lost", "cut", "empty"])
def test_damaged_shards_are_made_again(command, tmp_path, capsys, damage):
    assert command() == 0
    before = contents(tmp_path / "out")
    path = (
        tmp_path / "out" / "train" / ("index-00000.npy" if damage == "empty" else "mask-00000.bin")
    )
    content = path.read_bytes()
    path.unlink()
    if damage != "lost":
        path.write_bytes(content[:-1] if damage == "cut" else b"")
    assert command() == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert contents(tmp_path / "out") == before


def test_second_preparation_is_kept_out_of_a_folder(tok_folder, tmp_path):
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(rows()))
    config = PrepareConfig((str(source),), str(tok_folder / "chatml"), str(tmp_path / "out"))

    def again(conversations):
        with pytest.raises(RuntimeError, match="another preparation is at work"):
            prepare(config)
        return conversations

    meta = prepare(config, [again])
    assert sum(len(TokenShards(config.output, split)) for split in meta["splits"]) == 60


def test_damaged_tokenizer_is_one_line(command, tok_folder, capsys):
    folder = tok_folder / "damaged"
    shutil.copytree(tok_folder / "chatml", folder)
    for content in ("{}", "[]", "nothing", ""):
        (folder / "tokenizer.json").write_text(content)
        assert command(tok="damaged") == 2
        assert "cannot load the tokenizer" in refused(capsys)


def test_foreign_folder_is_left_alone(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert command() == 2
    assert "not empty and holds no shards" in refused(capsys)
    assert command(output="chats.json") == 2
    assert "is a file" in refused(capsys)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "x"


def test_killed_run_leaves_no_meta_and_the_next_one_is_whole(tok_folder, tmp_path, capsys):
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(rows()))
    settings = {
        "input": (str(source),),
        "tokenizer": str(tok_folder / "chatml"),
        "shard_tokens": 30,
    }
    config = PrepareConfig(output=str(tmp_path / "out"), **settings)

    def killer(conversations):
        for number, conversation in enumerate(conversations):
            if number == 31:
                os.kill(os.getpid(), signal.SIGKILL)
            yield conversation

    child = multiprocessing.get_context("fork").Process(target=prepare, args=(config, [killer]))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "out" / "train" / "tokens-00000.bin").exists()
    with pytest.raises(FileNotFoundError):
        TokenShards(tmp_path / "out")
    with pytest.raises(ValueError, match="unfinished preparation with other settings"):
        prepare(PrepareConfig(output=config.output, **{**settings, "seed": 5}))
    prepare(config)
    prepare(PrepareConfig(output=str(tmp_path / "other"), **settings))
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_stage_goes_between_cleaning_and_tokenizing(tok_folder, tmp_path):
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(rows()))
    output = str(tmp_path / "out")
    config = PrepareConfig((str(source),), str(tok_folder / "chatml"), output)

    def shout(conversations):
        return (chat(each.opening, "c d") for each in conversations)

    prepare(config, [shout])
    tok = tokenizer()
    assert {tok.decode(ids[mask]) for ids, mask in TokenShards(output)} == {"c d <|im_end|>"}


def test_limits_stop_early(command, tmp_path):
    assert command("--limit", "7", output="few") == 0
    counts = read_meta(tmp_path / "few")["counts"]
    assert (counts["kept"], counts["read"]) == (7, 7)
    assert command("--limit-tokens", "31", output="tokens") == 0
    assert 31 <= read_meta(tmp_path / "tokens")["total_tokens"] < 31 + 15


def test_excluded_conversations_are_counted(command, tmp_path):
    shared = " ".join(f"w{i}" for i in range(13))
    source = tmp_path / "more.jsonl"
    bad = {"messages": [{"role": "user", "content": shared}, {"role": "assistant", "content": "b"}]}
    source.write_text("\n".join(json.dumps(row) for row in [bad, *rows(5)]))
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "turns": ["So " + shared.upper() + "?"]}))
    assert command("--exclude", questions, source=source) == 0
    counts = read_meta(tmp_path / "out")["counts"]
    assert counts["skipped"] == {"evaluation question": 1}
    assert counts["kept"] == 5


def test_truncated_input_is_reported(command, tmp_path, capsys):
    source = tmp_path / "cut.json"
    source.write_text(json.dumps(rows())[:-30])
    assert command(source=source) == 0
    counts = read_meta(tmp_path / "out")["counts"]
    assert (counts["read"], counts["faults"]) == (59, {"file cut off or broken": 1})
    assert "file cut off or broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("not json", "starts with 'n'"),
        ("[]", "no supervised token is left; skipped: nothing was read"),
        ('[{"conversations": [{"from": "gpt", "value": "a"}]}]', "skipped: assistant first: 1"),
    ],
)
def test_unusable_input_is_one_line_and_leaves_nothing(command, tmp_path, capsys, text, message):
    source = tmp_path / "bad.json"
    source.write_text(text)
    assert command(source=source) == 2
    assert message in refused(capsys)
    assert not (tmp_path / "out").exists()


def test_missing_files_are_one_line(command, tmp_path, capsys):
    assert command(source=tmp_path / "none.json") == 2
    assert "none.json" in refused(capsys)
    assert command("--exclude", tmp_path / "no.jsonl") == 2
    assert "no.jsonl" in refused(capsys)
    assert not (tmp_path / "out").exists()


def test_missing_tokenizer_is_one_line(command, tmp_path, capsys):
    assert command(tok="absent") == 2
    assert "cannot load the tokenizer" in refused(capsys)
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path / "absent.gguf"))


def test_template_that_forgets_answers_is_an_error_that_says_so(command, tmp_path, capsys):
    source = tmp_path / "two.json"
    turns = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    row = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    source.write_text(json.dumps([row] * 150))
    assert command(source=source, tok="forgetful") == 2
    assert "chat template cannot be used: answers not found in 100 of 100" in refused(capsys)
    source.write_text(json.dumps([row, *rows(4)]))
    assert command(source=source, tok="forgetful") == 0


def test_all_in_validation_is_an_error(command, tmp_path, capsys):
    source = tmp_path / "one.json"
    source.write_text(json.dumps(rows(1)))
    assert command("--validation-fraction", "0.9999999", source=source) == 2
    assert "fell into validation" in refused(capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-length", "1"], "max_length must be >= 2 tokens, got 1"),
        (["--validation-fraction", "1"], "validation_fraction must be in [0, 1), got 1.0"),
        (["--limit", "0"], "limit must be >= 1, got 0"),
    ],
)
def test_number_out_of_range_is_refused(command, capsys, flags, message):
    assert command(*flags) == 2
    assert message in refused(capsys)


@pytest.mark.parametrize(
    "function", ["shards._to_disk", "shards.np.save", "shards.ShardWriter.add", "prepare.asdict"]
)
def test_failure_of_the_machine_is_one_line_and_leaves_nothing(
    command, tmp_path, capsys, monkeypatch, function
):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"train.{function}", full)
        assert command() == 2
    assert "No space left" in refused(capsys)
    assert not (tmp_path / "out").exists()
    assert command() == 0
