import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers

from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.target import TargetModel
from tests.stubs import ATTENTION, greedy_reference, tiny_model
from tests.train.test_prepare import CHATML, GENERATION, answers, chat, refused, rows, tokenizer
from train.conversations import Conversation, Message, Tally, clean
from train.prepare import ChatEncoder, main
from train.regenerate import (
    BatchSampler,
    RegenerateConfig,
    Regenerator,
    Request,
    drop_half_line,
)
from train.shards import TokenShards, read_meta

ROOT = Path(__file__).parents[2]
STOP = 3


def sample(model, requests, batch_size):
    """All requests, drawn; in the order in which they finished."""
    waiting = iter(requests)
    sampler = BatchSampler(TargetModel(model), batch_size, 100, frozenset({STOP}))
    return list(sampler.run(lambda: next(waiting, None)))


def ragged(num, temperature=0.0, seed=0):
    rng = random.Random(seed)
    return [
        Request(
            prompt_ids=[rng.randrange(128) for _ in range(rng.randint(1, 40))],
            temperature=temperature,
            max_new_tokens=rng.randint(1, 50),
            noise_key=str(i),
        )
        for i in range(num)
    ]


# Sampling


@pytest.mark.parametrize(
    ("family", "attention"), [(name, each) for name, kinds in ATTENTION.items() for each in kinds]
)
def test_greedy_answers_of_refilled_ragged_batches_equal_generate(family, attention):
    model = tiny_model(family, attention)
    requests = ragged(19)
    finished = sample(model, requests, batch_size=4)
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        expected = greedy_reference(model, prompt, request.max_new_tokens)
        if STOP in expected:
            expected = expected[: expected.index(STOP) + 1]
        assert request.token_ids == expected
        assert request.has_stopped == (expected[-1] == STOP)


@pytest.mark.parametrize("batch_size", [1, 2, 40])
def test_drawn_tokens_do_not_depend_on_the_batch(batch_size):
    model = tiny_model()
    expected, found = ragged(19, temperature=1.0), ragged(19, temperature=1.0)
    sample(model, expected, batch_size=5)
    sample(model, found, batch_size)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_draws_follow_the_law_at_their_temperature():
    logits = torch.tensor([1.0, 0.0, -1.0, -torch.inf, 2.0, 0.5])
    model = tiny_model()
    sampler = BatchSampler(TargetModel(model), 1, 1, frozenset())
    for temperature in (0.7, 1.0):
        requests = [Request([0], temperature, 1, f"{temperature} {i}") for i in range(20000)]
        sampler._draw(requests, logits.expand(len(requests), -1))
        counts = Counter(request.token_ids[0] for request in requests)
        found = torch.tensor([counts[i] for i in range(len(logits))]) / len(requests)
        law = (logits / temperature).softmax(-1)
        # five standard deviations of a share of 20,000 draws
        assert ((found - law).abs() <= 5 * (law * (1 - law) / 20000).sqrt()).all()
        assert counts[3] == 0


def test_not_finite_logits_are_an_error():
    model = tiny_model()
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="--dtype float32"):
        sample(model, ragged(2), batch_size=2)


# The stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with a tokenizer whose words it writes, now and then an end of turn."""
    path = tmp_path_factory.mktemp("target")
    tok = tokenizer()
    tiny_model(vocab_size=len(tok)).save_pretrained(path)
    tok.save_pretrained(path)
    return path


def conversations(num=40, turns=1):
    rng = random.Random(1)
    words = [f"w{i}" for i in range(40)]
    return [
        chat(*(" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(2 * turns)))
        for _ in range(num)
    ]


def regenerator(folder, path, *, seed=0, limit=None, **changes):
    settings = {"max_new_tokens": 12, "max_prompt_tokens": 40, "batch_size": 4}
    settings |= {"dtype": "float32", "device": "cpu"} | changes
    tok = tokenizer()
    config = RegenerateConfig(str(folder), **settings)
    return Regenerator(config, path, ChatEncoder(tok, 100), tok, seed, limit)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_conversation_is_answered_once(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    given = conversations()
    tally = Tally()
    found = list(regenerator(folder, path).stage(given, tally))
    openings = [each["messages"][0]["content"] for each in lines(path)]
    assert sorted(openings) == sorted(each.opening for each in given)
    assert len({each["id"] for each in lines(path)}) == len(given)
    assert len(found) + tally.skipped.total() == len(given)
    lengths = [len(each.split()) for each in openings]
    assert lengths == sorted(lengths, reverse=True)


def test_line_tells_how_the_answer_came_about(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    list(regenerator(folder, path).stage(conversations(), Tally()))
    tok = tokenizer()
    reasons = Counter()
    for line in lines(path):
        assert set(line) == {"id", "temperature", "messages"}
        answer = line["messages"][1]
        ids, reason = answer["token_ids"], answer["finish_reason"]
        reasons[reason] += 1
        stopped = ids[-1] in (tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>"))
        assert reason == ("stop" if stopped else "length")
        assert stopped or len(ids) == 12
        assert tok.decode(ids[:-1] if stopped else ids) == answer["content"]
    assert set(reasons) == {"stop", "length"}


def test_same_file_for_every_batch_size_and_after_every_stop(folder, tmp_path):
    whole = tmp_path / "whole.jsonl"
    expected = list(regenerator(folder, whole, turns=2).stage(conversations(turns=3), Tally()))
    for batch_size in (1, 50):
        path = tmp_path / f"{batch_size}.jsonl"
        again = regenerator(folder, path, turns=2, batch_size=batch_size)
        assert list(again.stage(conversations(turns=3), Tally())) == expected
        assert path.read_bytes() == whole.read_bytes()
    path = tmp_path / "stopped.jsonl"
    for num in (1, 7, 20):
        stage = regenerator(folder, path, turns=2).stage(conversations(turns=3), Tally())
        list(islice(stage, num))
        stage.close()
        assert whole.read_bytes().startswith(path.read_bytes())
        assert path.stat().st_size < whole.stat().st_size
    assert list(regenerator(folder, path, turns=2).stage(conversations(turns=3), Tally())) == (
        expected
    )
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.37, 0.9, 0.9999])
def test_half_written_line_is_made_again(folder, tmp_path, share):
    path = tmp_path / "a.jsonl"
    expected = list(regenerator(folder, path).stage(conversations(), Tally()))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert list(regenerator(folder, path).stage(conversations(), Tally())) == expected
    assert path.read_bytes() == content


@pytest.mark.parametrize("length", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 200_000])
def test_half_line_of_any_length_is_dropped(tmp_path, length):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n{}\n" + b"x" * length)
    drop_half_line(path)
    assert path.read_bytes() == b"{}\n{}\n"
    path.write_bytes(b"x" * length)
    drop_half_line(path)
    assert path.read_bytes() == b""


def test_finished_file_needs_no_target(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    expected = list(regenerator(folder, path).stage(conversations(), Tally()))
    again = regenerator(tmp_path / "nowhere", path)
    assert list(again.stage(conversations(), Tally())) == expected


def test_file_of_other_conversations_is_refused(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    list(regenerator(folder, path).stage(conversations(), Tally()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"line 1 of .* answers another conversation"):
        list(regenerator(folder, path).stage([chat("a b", "c")], Tally()))
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"\0" * 40, b"{}", b"[]", b'{"id": "caf\xe9", "messages": []}'])
def test_damaged_line_of_the_file_is_named(folder, tmp_path, damage):
    path = tmp_path / "a.jsonl"
    list(regenerator(folder, path).stage(conversations(), Tally()))
    content = path.read_bytes().split(b"\n")
    content[2] = damage
    path.write_bytes(b"\n".join(content))
    with pytest.raises(ValueError, match=r"line 3 of .*a\.jsonl' is damaged"):
        list(regenerator(folder, path).stage(conversations(), Tally()))


def test_temperature_is_chosen_by_conversation_and_seed(folder, tmp_path):
    def temperatures(name, given, seed):
        path = tmp_path / name
        list(regenerator(folder, path, seed=seed, max_new_tokens=1).stage(given, Tally()))
        return {line["messages"][0]["content"]: line["temperature"] for line in lines(path)}

    given = conversations(60)
    first = temperatures("a", given, seed=0)
    assert set(first.values()) == {0.0, 0.7, 1.0}
    assert temperatures("b", given[::-1], seed=0) == first
    assert temperatures("c", given, seed=1) != first


def test_greedy_second_turn_is_answered_on_top_of_the_first_answer(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    given = [
        Conversation((Message("system", f"w{i}"), *each.messages))
        for i, each in enumerate(conversations(turns=3))
    ]
    list(regenerator(folder, path, turns=2, temperatures=(0.0,)).stage(given, Tally()))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tok = tokenizer()
    num_second = 0
    for line in lines(path):
        messages = line["messages"]
        assert [each["role"] for each in messages[:2]] == ["system", "user"]
        num_answers = sum(each["role"] == "assistant" for each in messages)
        first = messages[2]
        is_open = first["finish_reason"] == "stop" and first["content"].strip()
        assert num_answers == 1 or is_open
        if num_answers == 1:
            continue
        num_second += 1
        history = [
            {"role": each["role"], "content": each["content"].strip()} for each in messages[:-1]
        ]
        prompt = tok.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        ids = messages[-1]["token_ids"]
        assert greedy_reference(model, torch.tensor([prompt]), 12)[: len(ids)] == ids
    assert num_second > 0


def test_prompts_that_cannot_be_used_are_counted(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    given = [
        chat("w1", "a"),
        chat("w1", "b"),
        chat("a <|im_end|>", "b"),
        chat("w2 " * 60, "b"),
        *conversations(5),
    ]
    tally = Tally()
    list(regenerator(folder, path, limit=4).stage(iter(given), tally))
    assert len(lines(path)) == 4
    expected = {"same prompt as an earlier one", "control token in the text", "over-long prompt"}
    assert expected <= set(tally.skipped)


# Answers that were cut off


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_cut_answer_does_not_teach_its_end(template):
    tok = tokenizer(template)
    encoder = ChatEncoder(tok, 100)
    cut = Conversation((*chat("a", "b", "c").messages, Message("assistant", "d e", is_cut=True)))
    tokenized = encoder.encode(cut)
    assert answers(tok, tokenized) == ["b <|im_end|>", "d e"]
    whole = encoder.encode(chat("a", "b", "c", "d e"))
    assert tokenized.ids == whole.ids[:-1]
    assert tokenized.mask == whole.mask[:-1]


def test_cut_answer_without_an_end_of_turn_token():
    template = "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    tok = tokenizer(template)
    cut = Conversation((Message("user", "a"), Message("assistant", "b", is_cut=True)))
    assert answers(tok, ChatEncoder(tok, 100).encode(cut)) == ["b"]


def test_cut_answers_are_read_from_a_file_and_end_the_conversation():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[1]["finish_reason"] = "length"
    tally = Tally()
    (found,) = clean([{"messages": messages}], tally)
    assert found.messages == (Message("user", "a"), Message("assistant", "b", is_cut=True))
    assert tally.cut == {"turn after an answer that was cut off": 1}


# The command


@pytest.fixture
def command(folder, tmp_path):
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(rows(40)))

    def arguments(*extra, source=source, output="out", target=folder):
        fixed = ["--input", source, "--tokenizer", target, "--output", tmp_path / output]
        return [str(each) for each in (*fixed, *extra)]

    return arguments


FLAGS = ("--regenerate", "--max-new-tokens", "12", "--batch-size", "4", "--dtype", "float32")
FLAGS = (*FLAGS, "--device", "cpu", "--max-prompt-tokens", "40", "--validation-fraction", "0.2")


def contents(path):
    return {each.relative_to(path): each.read_bytes() for each in path.rglob("*.bin")}


def test_command_trains_on_the_targets_answers(command, tmp_path, capsys):
    assert main(command(*FLAGS)) == 0
    assert "tokens/s" in capsys.readouterr().err
    output = tmp_path / "out"
    meta = read_meta(output)
    assert meta["args"]["regenerate"]["max_new_tokens"] == 12
    assert meta["identity"]["regenerate"]["temperatures"] == [0.0, 0.7, 1.0]
    assert len(lines(output / "regenerated.jsonl")) == 40
    counts = meta["counts"]
    assert counts["read"] == 40 == counts["kept"] + sum(counts["skipped"].values())
    tok = tokenizer()
    end = tok.convert_tokens_to_ids("<|im_end|>")
    expected = Counter()
    for line in lines(output / "regenerated.jsonl"):
        answer = line["messages"][-1]
        ids = answer["token_ids"]
        text = ids[:-1] if answer["finish_reason"] == "stop" else ids
        stripped = tok(answer["content"].strip())["input_ids"]
        if stripped and not set(text) & set(tok.all_special_ids):
            expected[*stripped, *([end] if len(text) < len(ids) else [])] += 1
    found = Counter(
        tuple(ids[mask].tolist())
        for split in ("train", "validation")
        for ids, mask in TokenShards(output, split)
    )
    assert found == expected
    assert main(command(*FLAGS)) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_regenerated_file_is_a_data_set(command, tmp_path):
    assert main(command(*FLAGS)) == 0
    flags = ("--validation-fraction", "0.2")
    again = command(*flags, source=tmp_path / "out" / "regenerated.jsonl", output="again")
    assert main(again) == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_other_settings_are_refused_and_answers_kept(command, tmp_path, capsys):
    assert main(command(*FLAGS)) == 0
    before = (tmp_path / "out" / "regenerated.jsonl").read_bytes()
    assert main(command(*FLAGS, "--temperatures", "0.5")) == 2
    assert "other settings (regenerate)" in refused(capsys)
    assert main(command()) == 2
    assert "other settings" in refused(capsys)
    assert (tmp_path / "out" / "regenerated.jsonl").read_bytes() == before


def test_another_target_in_its_place_is_refused(command, folder, tmp_path, capsys):
    targets = [tmp_path / each / "target" for each in ("one", "two", "three")]
    for seed, path in zip((0, 1, 0), targets, strict=True):
        torch.manual_seed(seed)
        tok = tokenizer()
        transformers.LlamaForCausalLM(tiny_model(vocab_size=len(tok)).config).save_pretrained(path)
        tok.save_pretrained(path)
    assert main(command(*FLAGS, target=targets[0])) == 0
    assert main(command(*FLAGS, target=targets[1])) == 2
    assert "other settings (regenerate)" in refused(capsys)
    assert main(command(*FLAGS, target=targets[2])) == 0  # moved
    assert "nothing to do" in capsys.readouterr().out
    # What an earlier version did not store is not held against a folder.
    output = tmp_path / "out"
    identity = read_meta(output)["identity"]
    del identity["regenerate"]["target_sha256"]
    (output / "unfinished.json").write_text(json.dumps(identity))
    (output / "meta.json").unlink()
    assert main(command(*FLAGS, target=targets[0])) == 0


def test_failure_keeps_the_answers_for_the_next_run(command, tmp_path, capsys, monkeypatch):
    assert main(command(*FLAGS, output="whole")) == 0

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("train.shards._to_disk", full)
        patch.setattr("train.prepare.write_json", lambda path, _: path.write_text("{}"))
        assert main(command(*FLAGS)) == 2
    assert "No space left" in refused(capsys)
    kept = tmp_path / "out" / "regenerated.jsonl"
    assert kept.read_bytes() == (tmp_path / "whole" / "regenerated.jsonl").read_bytes()


@pytest.mark.slow
def test_killed_command_goes_on_behind_its_last_answer(command, tmp_path):
    source = tmp_path / "many.json"
    turns = [("human", "w1 w2"), ("gpt", "b")]
    many = [
        {
            "conversations": [
                {"from": who, "value": f"{text} w{i % 40} w{i // 40}"} for who, text in turns
            ]
        }
        for i in range(400)
    ]
    source.write_text(json.dumps(many))
    arguments = command(*FLAGS, source=source)
    answered = tmp_path / "out" / "regenerated.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for num_bytes in (1, 30_000):
        process = subprocess.Popen(
            [sys.executable, "-m", "train.prepare", *arguments],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None:
            if answered.exists() and answered.stat().st_size >= num_bytes:
                process.kill()
            time.sleep(0.005)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out" / "meta.json").exists()
    assert main(arguments) == 0
    assert main(command(*FLAGS, source=source, output="whole")) == 0
    assert answered.read_bytes() == (tmp_path / "whole" / "regenerated.jsonl").read_bytes()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperatures", "0.5"], "--temperatures does nothing without --regenerate"),
        (["--regenerate-turns", "2"], "--regenerate-turns does nothing without --regenerate"),
        ([*FLAGS, "--batch-size", "0"], "--batch-size must be >= 1, got 0"),
        ([*FLAGS, "--regenerate-turns", "0"], "--regenerate-turns must be >= 1, got 0"),
        ([*FLAGS, "--temperatures=-1"], "--temperatures must be numbers in [0, 100), got [-1.0]"),
        ([*FLAGS, "--limit-tokens", "9"], "limit_tokens cannot be known before"),
        ([*FLAGS, "--max-prompt-tokens", "256"], "below the target's context of 256 tokens"),
        ([*FLAGS, "--target", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_bad_settings_are_one_line(command, tmp_path, capsys, flags, message):
    assert main(command(*flags)) == 2
    assert message in refused(capsys)
    assert not (tmp_path / "out").exists()


def test_targets_that_do_not_fit_are_one_line(command, tmp_path, capsys):
    small = tmp_path / "small"
    tiny_model(vocab_size=20).save_pretrained(small)
    tokenizer().save_pretrained(small)
    assert main(command(*FLAGS, target=small)) == 2
    assert "the tokenizer has" in refused(capsys)
    foreign = tmp_path / "foreign"
    config = transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(foreign)
    tokenizer().save_pretrained(foreign)
    assert main(command(*FLAGS, target=foreign)) == 2
    assert "is not a family" in refused(capsys)
    assert not (tmp_path / "out").exists()
