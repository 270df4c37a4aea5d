"""The command that answers questions: wherever it is cut off, and by however many, all is one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eagle_fsd.acceptance import Exact
from eagle_fsd.checkpoint import save_head
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import TargetModel
from evaluation import run, settings
from evaluation.answerer import AnswerConfig, Answerer, turn_seed
from evaluation.answers import read_answers, read_run
from evaluation.questions import Question, read_questions
from evaluation.run import main
from tests.train.tiny import tiny_head, tiny_model

REPOSITORY = Path(__file__).parents[2]
CONTEXT = 256
MARKS = ("<s>", "<system>", "<user>", "<assistant>", "<end>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w122, a few marks, and a beginning of text that every text gets."""
    words = [*MARKS, *(f"w{number}" for number in range(128 - len(MARKS)))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="w0", model_max_length=CONTEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def models_(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny target and its head."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model().save_pretrained(folder / "target")
    word_tokenizer().save_pretrained(folder / "target")
    save_head(tiny_head(), folder / "head")
    return str(folder / "target"), str(folder / "head")


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(TargetModel(tiny_model()), tokenizer=word_tokenizer())


def words(rng: random.Random, number: int) -> str:
    return " ".join(f"w{rng.randrange(120)}" for _ in range(number))


def write_questions(
    folder: Path, number: int, *, is_shuffled: bool = False, longest: int = 6
) -> Path:
    """`number` questions of one or two turns, the same for every call."""
    rng = random.Random(0)
    records = [
        {
            "question_id": number if number % 3 else f"q{number}",
            "category": "c",
            "turns": [words(rng, rng.randint(1, longest)) for _ in range(1 + number % 2)],
            "reference": ["r"],
        }
        for number in range(number)
    ]
    if is_shuffled:
        rng.shuffle(records)
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def flags(models_: tuple[str, str], questions: Path, output: Path, *more: str) -> list[str]:
    target, head = models_
    return [
        *("--task", str(questions), "--target", target, "--draft-head", head),
        *("--tree", "4,2,2", "--dtype", "float32", "--device", "cpu"),
        *("--max-new-tokens", "5", "--output", str(output), *more),
    ]


def essence(folder: Path) -> dict[int | str, list[Any]]:
    """All of the answers but times, by question; each question once."""
    answers = read_answers(folder)
    kept = ("index", "turns", "idxs", "new_tokens", "finish_reasons", "token_ids")
    found = {
        answer["question_id"]: [
            answer["answer_id"],
            *([choice[name] for name in kept] for choice in answer["choices"]),
            *([stats["seed"] for stats in choice["stats"]] for choice in answer["choices"]),
        ]
        for answer in answers
    }
    assert len(found) == len(answers)
    return found


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


# The format


def test_answers_have_fastchats_keys_and_our_figures(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_questions(tmp_path, 4)
    more = ["--rule", "fuzzy:0.3:js", "--num-choices", "2", "--temperature", "1"]
    assert main(flags(models_, questions, tmp_path / "run", *more)) == 0
    file = tmp_path / "run" / "model_answer" / "target-fuzzy-0.3-js.jsonl"
    shown = capsys.readouterr().out.strip().splitlines()
    assert shown[-1] == str(file)
    assert shown[-2].startswith("4 answers, ")
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert [answer["question_id"] for answer in answers] == ["q0", 1, 2, "q3"]
    assert read_questions(tmp_path / "run" / "questions.jsonl") == read_questions(questions)
    for answer, question in zip(answers, read_questions(questions), strict=True):
        assert answer.keys() == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
        assert len(answer["answer_id"]) == 22
        assert answer["model_id"] == "target-fuzzy-0.3-js"
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            assert {len(value) for key, value in choice.items() if key != "index"} == {
                len(question.turns)
            }
            assert all(isinstance(turn, str) for turn in choice["turns"])
            counts = [len(ids) for ids in choice["token_ids"]]
            assert counts == choice["new_tokens"] == [s["num_tokens"] for s in choice["stats"]]
            assert choice["idxs"] == [s["num_cycles"] for s in choice["stats"]]
            assert all(seconds > 0 for seconds in choice["wall_time"])
    assert len({answer["answer_id"] for answer in answers}) == 4
    record = read_run(tmp_path / "run")
    assert record["task"] == str(questions)
    assert record["settings"]["rule"] == "fuzzy:0.3:js"
    assert record.keys() >= {"argv", "versions", "git_commit", "device", "kind", "source"}


def test_fastchat_reads_the_answers(
    models_: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastchat")
    for name in ("openai", "anthropic"):  # what its judge calls, no part of reading
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    common = pytest.importorskip("fastchat.llm_judge.common")
    arguments = flags(models_, write_questions(tmp_path, 3), tmp_path / "run", "--model-id", "m")
    assert main(arguments) == 0
    answers = common.load_model_answers(str(tmp_path / "run" / "model_answer"))
    assert answers.keys() == {"m"}
    assert answers["m"].keys() == {"q0", 1, 2}


# Cut off and gone on with


@pytest.mark.parametrize("seed", range(2))
def test_interrupted_anywhere_a_run_goes_on_to_the_same_answers(
    models_: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, questions = random.Random(seed), write_questions(tmp_path, 80)
    more = ["--temperature", "1", "--rule", "coverage:0.5", "--max-new-tokens", "2"]
    arguments = flags(models_, questions, tmp_path / "run", *more)
    whole = flags(models_, questions, tmp_path / "whole", *more)
    assert main(whole) == 0

    append, num_left = run.RunFolder.append, 0

    def interrupted(self: Any, answer: Any, rank: int) -> None:
        nonlocal num_left
        if num_left == 0:
            raise KeyboardInterrupt
        num_left -= 1
        append(self, answer, rank)

    with monkeypatch.context() as patch:
        patch.setattr(run.RunFolder, "append", interrupted)
        for _ in range(3):
            num_left = rng.randrange(26)
            assert main(arguments) == 130
            part = tmp_path / "run" / "model_answer" / "target-coverage-0.5.jsonl.part-0"
            part.parent.mkdir(exist_ok=True)
            with part.open("a") as stream:
                stream.write('{"question_id": 79, "answer_id": "x", "choi')
    assert main(arguments) == 0
    assert list(essence(tmp_path / "run")) == [q.question_id for q in read_questions(questions)]
    assert essence(tmp_path / "run") == essence(tmp_path / "whole")


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def num_lines(folder: Path) -> int:
    files = folder.glob("model_answer/*")
    return sum(path.read_bytes().count(b"\n") for path in files)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_all_answers_once(models_: tuple[str, str], tmp_path: Path) -> None:
    questions, rng = write_questions(tmp_path, 80), random.Random()
    arguments = flags(models_, questions, tmp_path / "run", "--max-new-tokens", "10")
    process = command("evaluation.run", *arguments)
    num_before = rng.randrange(1, 60)
    while num_lines(tmp_path / "run") < num_before:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert num_lines(tmp_path / "run") < 80
    (part,) = (tmp_path / "run" / "model_answer").glob("*.part-0")
    with part.open("a") as stream:
        stream.write('{"question_id": 79, "cho')
    assert main(arguments) == 0
    assert len(essence(tmp_path / "run")) == 80
    assert main(flags(models_, questions, tmp_path / "whole", "--max-new-tokens", "10")) == 0
    assert essence(tmp_path / "run") == essence(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(models_: tuple[str, str], tmp_path: Path) -> None:
    questions = write_questions(tmp_path, 15)
    more = ["--temperature", "1", "--rule", "fuzzy:0.3:js"]
    assert main(flags(models_, questions, tmp_path / "one", *more)) == 0
    begun = flags(models_, questions, tmp_path / "two", *more, "--limit", "2")
    assert main(begun) == 0  # what is there already is not asked again
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = flags(models_, questions, tmp_path / "two", *more)
    process = command(*launch, "-m", "evaluation.run", *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("15 answers") == 1
    files = [path.name for path in (tmp_path / "two" / "model_answer").iterdir()]
    assert files == ["target-fuzzy-0.3-js.jsonl"]
    assert essence(tmp_path / "two") == essence(tmp_path / "one")
    assert list(essence(tmp_path / "two")) == list(essence(tmp_path / "one"))
    assert read_run(tmp_path / "two")["resumed"][0]["num_processes"] == 2
    process = command(*launch, "-m", "evaluation.run", *arguments, "--seed", "1")
    output, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    refusals = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert [line.partition(" holds ")[2] for line in refusals] == [
        "a run with seed 0, asked for is 1; give its settings or name another --output"
    ]


def test_a_larger_limit_goes_on_and_a_finished_run_loads_nothing(
    models_: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = write_questions(tmp_path, 6)
    for more, num in ((["--limit", "2"], 2), (["--every", "5"], 3), ([], 6), (["--limit", "1"], 6)):
        if num == 6 and more:
            monkeypatch.setattr(run, "load_decoder", None)
        assert main(flags(models_, questions, tmp_path / "run", *more)) == 0
        asked = read_questions(tmp_path / "run" / "questions.jsonl")
        assert [question.question_id for question in asked] == list(essence(tmp_path / "run"))
        assert len(asked) == num
    assert list(essence(tmp_path / "run")) == ["q0", 1, 2, "q3", 4, 5]


def test_neither_order_nor_selection_changes_sampled_answers(
    models_: tuple[str, str], tmp_path: Path
) -> None:
    more = ["--temperature", "1", "--num-choices", "2"]
    ordered = write_questions(tmp_path, 9)
    assert main(flags(models_, ordered, tmp_path / "one", *more)) == 0
    assert main(flags(models_, ordered, tmp_path / "part", *more, "--every", "4")) == 0
    shuffled = write_questions(tmp_path, 9, is_shuffled=True)
    assert main(flags(models_, shuffled, tmp_path / "two", *more)) == 0
    one, two, part = (texts(tmp_path / name) for name in ("one", "two", "part"))
    assert one == two
    assert list(one) != list(two)
    assert part == {key: one[key] for key in part}
    assert main(flags(models_, ordered, tmp_path / "other", *more, "--seed", "1")) == 0
    assert texts(tmp_path / "other") != one
    assert any(first != second for first, second in one.values())


def texts(folder: Path) -> dict[int | str, list[list[str]]]:
    return {
        answer["question_id"]: [choice["turns"] for choice in answer["choices"]]
        for answer in read_answers(folder)
    }


def test_a_turns_seed_depends_on_all_it_is_made_of() -> None:
    seeds = [
        turn_seed(seed, identity, choice, turn)
        for seed in (0, 1)
        for identity in (1, "1", 11)
        for choice in (0, 1)
        for turn in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


# Settings


def test_what_auto_came_to_is_kept_and_used_again(
    models_: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = write_questions(tmp_path, 4)
    auto = ["--tree", "auto", "--dtype", "auto", "--device", "auto", "--limit"]
    assert main(flags(models_, questions, tmp_path / "run", *auto, "1")) == 0
    stored = read_run(tmp_path / "run")["settings"]
    assert stored["dtype"] == "float32"
    tree = stored["tree"]
    assert tree != "auto"
    loaded = []

    def load(args: Any) -> Any:
        loaded.append((args.tree, args.dtype, args.device))
        return load_decoder(args)

    load_decoder = run.load_decoder
    monkeypatch.setattr(run, "load_decoder", load)
    assert main(flags(models_, questions, tmp_path / "run", *auto, "2")) == 0
    device = read_run(tmp_path / "run")["device"]
    assert loaded == [(tree, "float32", device.partition(":")[0])]
    written = ["--tree", tree, "--dtype", "float", "--device", "cpu", "--limit", "3"]
    assert main(flags(models_, questions, tmp_path / "run", *written)) == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rule", "fuzzy:0.3:js"], "rule 'exact', asked for is 'fuzzy:0.3:js'"),
        (["--plain"], "rule 'exact', asked for is 'plain'"),
        (["--temperature", "0.5"], "temperature 0.0, asked for is 0.5"),
        (["--tree", "3,2,2"], "tree '4,2,2', asked for is '3,2,2'"),
        (["--dtype", "bfloat16"], "dtype 'float32', asked for is 'bfloat16'"),
        (["--seed", "1"], "seed 0, asked for is 1"),
        (["--max-new-tokens", "6"], "max_new_tokens 5, asked for is 6"),
        (["--model-id", "m"], "model_id 'target-exact', asked for is 'm'"),
        (["--draft-vocab", "full"], "draft_vocab 'auto', asked for is 'full'"),
        (["--system", "w1"], "system None, asked for is 'w1'"),
        (["--stop", "w1"], "stop [], asked for is ['w1']"),
    ],
)
def test_a_folder_with_other_settings_is_refused(
    finished: list[str], capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    folder = Path(finished[finished.index("--output") + 1])
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    error = refused([*finished, *more], capsys)
    if more != ["--plain"]:
        assert words in error
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before


@pytest.fixture(scope="module")
def finished(
    models_: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("finished")
    arguments = flags(models_, write_questions(folder, 2), folder / "run")
    assert main(arguments) == 0
    return arguments


def test_changed_questions_or_a_retrained_head_are_another_run(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    save_head(tiny_head(), head)
    questions = write_questions(tmp_path, 2)
    arguments = flags((models_[0], str(head)), questions, tmp_path / "run")
    assert main(arguments) == 0
    write_questions(tmp_path, 3)
    assert "holds a run with questions '" in refused(arguments, capsys)
    write_questions(tmp_path, 2)
    save_head(tiny_head(seed=5), head)
    assert "holds a run with draft_head_sha256 '" in refused(arguments, capsys)


def test_a_target_that_was_replaced_in_its_place_is_another_run(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(models_[0], tmp_path / "target")
    arguments = flags((str(target), models_[1]), write_questions(tmp_path, 2), tmp_path / "run")
    assert main([*arguments, "--limit", "1"]) == 0
    shutil.rmtree(target)
    shutil.copytree(models_[0], target)  # the same files again
    assert main(arguments) == 0
    tiny_model(seed=7).save_pretrained(target)
    assert "holds a run with target_sha256 '" in refused(arguments, capsys)


def test_a_model_that_was_not_here_at_first_is_noted_when_it_is_loaded(
    models_: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = flags(models_, write_questions(tmp_path, 2), tmp_path / "run")
    digests = settings.model_digests
    with monkeypatch.context() as patch:
        absent = {"target_sha256": None, "draft_model_sha256": None}
        patch.setattr(settings, "model_digests", lambda _: absent)
        assert main([*arguments, "--limit", "1"]) == 0
    found = read_run(tmp_path / "run")["settings"]["target_sha256"]
    assert found == digests(run.build_parser().parse_args(arguments))["target_sha256"] is not None
    assert main(arguments) == 0


def test_a_link_to_a_target_names_the_model_that_it_leads_to(
    models_: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(models_[0])
    questions = write_questions(tmp_path, 1)
    assert main(flags((str(tmp_path / "link"), models_[1]), questions, tmp_path / "run")) == 0
    assert main(flags(models_, questions, tmp_path / "run")) == 0
    assert read_run(tmp_path / "run")["model_id"] == "target-exact"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--limit", "0"], "--limit must be >= 1, got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be >= 1, got 0"),
        (["--num-choices", "0"], "num_choices must be >= 1, got 0"),
        (["--rule", "fuzzzy"], "unknown acceptance rule 'fuzzzy'"),
        (["--plain", "--rule", "fuzzy:0.3:js"], "plain decoding has no tree to relax"),
        (["--stop", ""], "a stop string must not be empty"),
        (["--model-id", "a/b"], "model id 'a/b' cannot name a file"),
        (["--tree", "many"], "tree must be auto or N,DEPTH,K"),
        (["--draft-head", "./absent"], "absent"),
        (["--task", "./absent.jsonl"], "absent"),
    ],
)
def test_wrong_flags_are_one_sentence(
    models_: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: str,
) -> None:
    arguments = flags(models_, write_questions(tmp_path, 1), tmp_path / "run", *more)
    assert words in refused(arguments, capsys)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_malformed_question_is_named_by_its_line(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_questions(tmp_path, 2)
    with questions.open("a") as stream:
        stream.write('{"question_id": 9, "turns": [3]}\n')
    assert "set.jsonl, line 3: " in refused(flags(models_, questions, tmp_path / "run"), capsys)


def test_without_a_drafter_only_plain_decoding_runs(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(models_, write_questions(tmp_path, 3), tmp_path / "run")
    place = arguments.index("--draft-head")
    del arguments[place : place + 2]
    assert "nothing drafts" in refused(arguments, capsys)
    assert main([*arguments, "--plain"]) == 0
    exact = flags(models_, write_questions(tmp_path, 3), tmp_path / "exact")
    assert main(exact) == 0
    assert texts(tmp_path / "run") == texts(tmp_path / "exact")
    (choice, *_), *_ = (answer["choices"] for answer in read_answers(tmp_path / "run"))
    assert choice["stats"][0]["tree"] == "plain"


# Prompts


def test_a_prompt_that_fills_the_context_is_an_empty_answer_and_the_run_goes_on(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, path = random.Random(0), tmp_path / "set.jsonl"
    turns = [[words(rng, CONTEXT)], [words(rng, 3), words(rng, CONTEXT)], [words(rng, 3)]]
    records = [{"question_id": number, "turns": each} for number, each in enumerate(turns)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(flags(models_, path, tmp_path / "run")) == 0
    assert "2 turns empty" in capsys.readouterr().out
    long, second, short = (answer["choices"][0] for answer in read_answers(tmp_path / "run"))
    assert (long["turns"], long["finish_reasons"], long["token_ids"]) == ([""], ["context"], [[]])
    assert long["stats"][0]["num_prompt_tokens"] > CONTEXT
    assert second["finish_reasons"] == ["length", "context"]
    assert second["new_tokens"] == [5, 0]
    assert short["new_tokens"] == [5]


def config(**changes: Any) -> AnswerConfig:
    plain = {"rule": Exact(), "sampling": SamplingConfig(), "is_plain": True}
    return AnswerConfig(**(plain | {"max_new_tokens": 4} | changes))


def test_several_turns_are_the_chat_templates_conversation(decoder: SpeculativeDecoder) -> None:
    asked: list[list[int]] = []
    plain = decoder.plain

    def noted(input_ids: torch.Tensor, **options: Any) -> Any:
        asked.append(input_ids.tolist())
        return plain(input_ids, **options)

    decoder.plain = noted  # type: ignore[method-assign, assignment]
    question = Question(1, "", ("w1 w2", "w3", "w4 w5"))
    answer = Answerer(decoder, config(system="w9"), "m").answer(question)
    messages: list[dict[str, str]] = [{"role": "system", "content": "w9"}]
    for turn, text, ids in zip(question.turns, answer["choices"][0]["turns"], asked, strict=True):
        messages.append({"role": "user", "content": turn})
        assert ids == decoder.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert text
        messages.append({"role": "assistant", "content": text})


def test_messages_that_the_chat_template_refuses_are_named_by_their_question(
    decoder: SpeculativeDecoder,
) -> None:
    decoder.tokenizer.chat_template = "{{ raise_exception('no system') }}"
    answerer, question = Answerer(decoder, config(), "m"), Question("x", "", ("w1",))
    for ask in (answerer.answer, answerer.warm_up):
        with pytest.raises(ValueError, match="question 'x': the target's chat template refuses"):
            ask(question)


@pytest.mark.parametrize(
    ("template", "turns", "system", "words"),
    [
        (
            None,
            ("w1", "w2"),
            None,
            "no chat template, which a second turn needs; .*--template NAME",
        ),
        (None, ("w1",), "w9", "no chat template, which --system needs; .*--template NAME"),
        (
            "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }} {% endfor %}",
            ("w1",),
            "w9",
            "drops system messages; leave out --system",
        ),
        (
            "{% if messages[1:] %}be kind {% endif %}{{ messages[-1]['content'] }}",
            ("w1",),
            "w9",
            "drops",
        ),
        ("{{ raise_exception('none here') }}", ("w1",), "w9", r"refuses a system .*none here"),
        (None, ("w1",), None, None),
        (CHAT_TEMPLATE, ("w1", "w2"), " w9 ", None),
        ("{{ messages[0]['content'] | trim }} {{ messages[-1]['content'] }}", ("w1",), " w9", None),
    ],
)
def test_what_the_chat_template_cannot_say_is_refused_before_anything_is_answered(
    decoder: SpeculativeDecoder,
    template: str | None,
    turns: tuple[str, ...],
    system: str | None,
    words: str | None,
) -> None:
    decoder.tokenizer.chat_template = template
    answerer = Answerer(decoder, config(system=system), "m")
    questions = [Question(1, "", ("w1",)), Question(2, "", turns)]
    if words is None:
        answerer.check(questions)
        return
    with pytest.raises(ValueError, match=words):
        answerer.check(questions)


def test_a_system_message_that_would_be_dropped_leaves_no_run(
    models_: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(models_[0], tmp_path / "target")
    (target / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    models = (str(target), models_[1])
    arguments = flags(models, write_questions(tmp_path, 2), tmp_path / "run", "--system", "w9")
    assert "drops system messages" in refused(arguments, capsys)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_fastchat_template_is_tokenised_with_one_beginning_and_its_stops_hold(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = pytest.importorskip("fastchat.conversation")
    for name, system, stop_ids in (
        ("bare", "{system_message}", None),
        ("begun", "<s> {system_message}", None),
        ("stops", "{system_message}", list(range(5, 128))),
    ):
        template = conversation.Conversation(
            name=name,
            system_template=system,
            system_message="w7",
            roles=("<user>", "<assistant>"),
            sep_style=conversation.SeparatorStyle.ADD_NEW_LINE_SINGLE,
            sep=" <end>\n",
            stop_str=None if stop_ids else "w",
            stop_token_ids=stop_ids,
        )
        monkeypatch.setitem(conversation.conv_templates, name, template)
    expected = "<s> w7 <end> <user> w1 <end> <assistant> w2 <end> <user> w3 <end> <assistant>"
    ids = decoder.tokenizer.convert_tokens_to_ids(expected.split())
    for name in ("bare", "begun"):
        answerer = Answerer(decoder, config(template=name), "m")
        assert answerer.encode(["w1", "w3"], ["w2"]).tolist() == ids
        choice = answerer.answer(Question(1, "", ("w1",)))["choices"][0]
        assert (choice["turns"], choice["finish_reasons"]) == ([""], ["stop"])
    answerer = Answerer(decoder, config(template="bare", system="w8"), "m")
    assert answerer.encode(["w1"], []).tolist()[:2] == [0, ids[1] + 1]
    choice = Answerer(decoder, config(template="stops"), "m").answer(Question(1, "", ("w1",)))
    assert choice["choices"][0]["finish_reasons"] == ["stop"]
    assert choice["choices"][0]["new_tokens"] == [1]


def test_a_template_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = pytest.importorskip("fastchat.conversation")
    deaf = conversation.Conversation(name="deaf", system_template="fixed")
    monkeypatch.setitem(conversation.conv_templates, "deaf", deaf)
    with pytest.raises(ValueError, match=r"unknown template 'vicuna'.*vicuna_v1\.1"):
        config(template="vicuna")
    with pytest.raises(ValueError, match="template 'chatgpt' makes no text"):
        config(template="chatgpt")
    with pytest.raises(ValueError, match="no place for a system message"):
        config(template="deaf", system="w1")


def test_without_fastchat_a_template_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastchat.conversation", None)
    with pytest.raises(ImportError, match="install fschat"):
        config(template="vicuna_v1.1")
