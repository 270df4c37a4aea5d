"""The judge: FastChat's prompts and files, and patience with a server that is none too good."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.answers import RunFolder
from evaluation.judge import Judging, Prices, main
from evaluation.judge_client import (
    JudgeClient,
    JudgeConfig,
    RequestError,
    StoppedError,
    _retry_after_s,
)
from evaluation.judge_file import JudgmentFile
from evaluation.judge_prompts import (
    MALFORMED,
    Match,
    build_matches,
    read_judge_prompts,
    read_rating,
    read_references,
)
from evaluation.questions import Question, read_questions

pytest.importorskip("openai")

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"
KEY = "sk-test-0123456789"
FOLDER = Path("data", "mt_bench", "model_judgment")


# A server that speaks the protocol, well or badly


def completion(text: str | None, reason: str = "stop", usage: Any = (10, 5)) -> bytes:
    record: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": reason,
            }
        ],
    }
    if usage is not None:
        record["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True))
    return json.dumps(record).encode()


GOOD = completion("Well done. Rating: [[7]]")


def failure(status: int, message: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return status, headers, json.dumps({"error": {"message": message}}).encode()


def always(answer: Any) -> Callable[[dict[str, Any], int], Any]:
    return lambda _request, _times: answer


class Server(ThreadingHTTPServer):
    """Answers by `script(request, number of times this very prompt was asked before)`.

    A script gives a body for status 200, or status, headers and body, "cut" for half a body,
    "trickle" for blanks without end, or seconds to be silent for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Callable[[dict[str, Any], int], Any] = always(GOOD)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        self.num_open = self.most_open = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        return [request["messages"][1]["content"] for request in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            times = server.prompts.count(request["messages"][1]["content"])
            server.requests.append(request)
            server.headers.append(self.headers)
            server.times.append(time.monotonic())
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        try:
            answer = server.script(request, times)
            if self.path != "/v1/chat/completions":
                answer = failure(404, "no such path")
            if isinstance(answer, float):
                time.sleep(answer)
                answer = GOOD
            is_cut = answer == "cut"
            status, headers, body = (
                ((200, {}, GOOD) if isinstance(answer, str) else (200, {}, answer))
                if not isinstance(answer, tuple)
                else answer
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if answer == "trickle":
                self.end_headers()
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.02)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        finally:
            with server.lock:
                server.num_open -= 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


# Runs, prompts and references of their formats

QUESTIONS = [
    Question(81, "writing", ("Write {this}.", "Again, q81.")),
    Question(101, "reasoning", ("Who is it?", "And who is she?")),
    Question(111, "math", ("1 + 1?", "2 + 2?")),
    Question("one", "stem", ("Only one turn.",)),
]
NUM_RATINGS = 7
TEMPLATES = {
    "single-v1": "Rate {answer}\nto {question}",
    "single-math-v1": "Rate {answer}\nto {question}\nknowing {ref_answer_1}",
    "single-v1-multi-turn": "{question_1}|{answer_1}|{question_2}|{answer_2}",
    "single-math-v1-multi-turn": (
        "{ref_answer_1}|{ref_answer_2}|{question_1}|{answer_1}|{question_2}|{answer_2}"
    ),
}


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompt_record(name: str, template: str, **changes: Any) -> dict[str, Any]:
    record = {
        "name": name,
        "type": "single",
        "system_prompt": f"You judge. ({name})",
        "prompt_template": template,
        "category": "general",
        "output_format": "[[rating]]",
    }
    return record | changes


def write_prompts(path: Path) -> Path:
    pair = prompt_record("pair-v2", "{question}{answer_a}{answer_b}", output_format="[[A]]")
    records = [pair, *(prompt_record(name, text) for name, text in TEMPLATES.items())]
    return write_lines(path, records)


def write_references(path: Path) -> Path:
    records = [
        {"question_id": q.question_id, "choices": [{"index": 0, "turns": ["ref 1", "ref 2"]}]}
        for q in QUESTIONS[1:3]
    ]
    return write_lines(path, records)


def answer_turns(model: str, question: Question) -> list[str]:
    turns = enumerate(question.turns, start=1)
    return [f"{model} on {question.question_id} {turn} {{x}} \u2028ü" for turn, _ in turns]


def write_run(
    folder: Path, model: str, questions: list[Question] = QUESTIONS, num_answers: int | None = None
) -> Path:
    run = RunFolder(folder, model)
    folder.mkdir(parents=True)
    run.write_run({"model_id": model, "task": "mt_bench", "kind": "chat", "settings": {}})
    run.write_questions(questions)
    for question in questions[:num_answers]:
        choices = [{"index": 0, "turns": answer_turns(model, question)}]
        run.append({"question_id": question.question_id, "choices": choices}, 0)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    write_prompts(tmp_path / "prompts.jsonl")
    write_references(tmp_path / "references.jsonl")
    return [str(write_run(tmp_path / name, name)) for name in ("exact", "fuzzy")]


def flags(tmp_path: Path, url: str, *more: str) -> list[str]:
    return [
        *("--judge", "org/judge", "--base-url", url, "--output", str(tmp_path / "ratings")),
        *("--judge-prompts", str(tmp_path / "prompts.jsonl")),
        *("--references", str(tmp_path / "references.jsonl")),
        *("--retry-wait", "0.01", "--timeout", "20", *more),
    ]


def ratings(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "ratings" / FOLDER / "org-judge_single.jsonl"
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def keys(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(record["question_id"], record["model"], record["turn"]) for record in records]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


# Prompts and ratings


def test_categories_and_turns_choose_the_prompt(tmp_path: Path) -> None:
    prompts = read_judge_prompts(write_prompts(tmp_path / "p.jsonl"))
    references = read_references(write_references(tmp_path / "r.jsonl"))
    assert set(prompts) == set(TEMPLATES)
    found = {}
    for question in QUESTIONS:
        answers = {model: answer_turns(model, question) for model in ("a", "b")}
        for match in build_matches(question, answers, prompts, references):
            found[match.key] = (match.prompt_name, match.user_prompt, match.system)
    assert len(found) == 2 * NUM_RATINGS
    one, two = "{x} \u2028ü", "You judge. "
    assert found[81, "a", 1] == (
        "single-v1",
        f"Rate a on 81 1 {one}\nto Write {{this}}.",
        f"{two}(single-v1)",
    )
    assert found[81, "b", 2][:2] == (
        "single-v1-multi-turn",
        f"Write {{this}}.|b on 81 1 {one}|Again, q81.|b on 81 2 {one}",
    )
    assert found[101, "a", 1][:2] == (
        "single-math-v1",
        f"Rate a on 101 1 {one}\nto Who is it?\nknowing ref 1",
    )
    assert found[111, "a", 2][:2] == (
        "single-math-v1-multi-turn",
        f"ref 1|ref 2|1 + 1?|a on 111 1 {one}|2 + 2?|a on 111 2 {one}",
    )
    assert ("one", "a", 2) not in found


@pytest.mark.parametrize(
    ("judgment", "rating"),
    [
        ("Rating: [[5]]", 5),
        ("[[7.5]] but earlier [[3]]", 7.5),
        ("see [1], rating [[10]]", 10),
        ("Rating: [6]", 6),
        ("[[8.]]", 8.0),
        ("Rating: 5", MALFORMED),
        ("[[five]] [[]] [[ 5 ]]", MALFORMED),
        ("[[-3]]", MALFORMED),
        ("", MALFORMED),
        ("[[" + "9" * 5000 + "]]", MALFORMED),
    ],
)
def test_the_first_rating_counts(judgment: str, rating: float) -> None:
    assert read_rating(judgment) == rating


@pytest.fixture
def fastchat_common(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("fastchat")
    for name in ("openai", "anthropic"):  # what its judge calls
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return pytest.importorskip("fastchat.llm_judge.common")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets of FastChat's format are not beside it")
def test_messages_and_scores_are_fastchats_own(
    fastchat_common: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    texts = ["Rating: [[7]]", "[[2.5]]", "so [3]", "none", "[[]] [4.0]", "[1, 2] [[9]]"]

    def chat(model: str, conversation: Any, **options: Any) -> str:
        asked.append((conversation.to_openai_api_messages(), options))
        return texts[len(asked) % len(texts)]

    monkeypatch.setattr(fastchat_common, "chat_completion_openai", chat)
    prompts = read_judge_prompts(SHARED / "judge_prompts.jsonl")
    references = read_references(SHARED / "mt_bench_reference_gpt-4.jsonl")
    theirs = fastchat_common.load_judge_prompts(str(SHARED / "judge_prompts.jsonl"))
    num_matches = 0
    for question in read_questions(SHARED / "mt_bench.jsonl"):
        answer = answer_turns("m", question)
        for match in build_matches(question, {"m": answer}, prompts, references):
            reference = references.get(question.question_id)
            is_based = question.category in fastchat_common.NEED_REF_CATS
            assert ("math" in match.prompt_name) == is_based
            score, user_prompt, judgment = fastchat_common.run_judge_single(
                {"turns": question.turns},
                {"choices": [{"turns": answer}]},
                fastchat_common.Judge("gpt-4", theirs[match.prompt_name]),
                {"choices": [{"turns": reference}]} if is_based else None,
                multi_turn=match.turn == 2,
            )
            body = JudgeConfig("gpt-4", "http://x/v1").body(match.system, match.user_prompt)
            messages, options = asked[-1]
            assert body == {"model": "gpt-4", "messages": messages} | options
            assert user_prompt == match.user_prompt
            assert score == read_rating(judgment)
            num_matches += 1
    assert num_matches == 160


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_template": "{question}"}, "must have the places ['answer', 'question'], has"),
        ({"prompt_template": "{question}{answer}{answer.__class__}"}, "must have the places"),
        ({"prompt_template": "{question"}, "is no template"),
        ({"prompt_template": 3}, "has texts system_prompt and prompt_template"),
        ({"output_format": "[[A]]"}, "output_format must be '[[rating]]', got '[[A]]'"),
    ],
)
def test_a_prompt_that_would_judge_nothing_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    text = TEMPLATES["single-v1"]
    record = prompt_record("single-v1", text) | changes
    path = write_lines(tmp_path / "p.jsonl", [prompt_record("pair-v2", "{x}"), record])
    with pytest.raises(ValueError, match="line 2: ") as raised:
        read_judge_prompts(path)
    assert words in str(raised.value)


def test_files_that_are_something_else_are_named(tmp_path: Path) -> None:
    for read in (read_judge_prompts, read_references):
        with pytest.raises(FileNotFoundError, match="no file of"):
            read(tmp_path / "none")
        for content, words in (
            (b"\n", "holds no"),
            (b"{", "line 1: not valid JSON"),
            (b"[1]\n", "line 1: not a JSON object"),
            (b"\xff", "not UTF-8"),
        ):
            (tmp_path / "f").write_bytes(content)
            with pytest.raises(ValueError, match=words):
                read(tmp_path / "f")
    for record in ({}, {"question_id": 1, "choices": []}, {"question_id": 1, "choices": [3]}):
        with pytest.raises(ValueError, match="line 1: not an answer"):
            read_references(write_lines(tmp_path / "f", [record]))


# The file


def test_ratings_have_fastchats_format_and_show_result_prints_them(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: dict[str, Any], times: int) -> Any:
        prompt = request["messages"][1]["content"]
        if "on one" in prompt:
            return completion("I cannot rate that.")
        return completion(f"[[{8 if 'exact on' in prompt else 5.5}]]")

    server.script = script
    arguments = [*folders, *flags(tmp_path, server.url)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    path = tmp_path / "ratings" / FOLDER / "org-judge_single.jsonl"
    assert shown == [
        "14 of 14 ratings, 2 malformed",
        "this run: 140 tokens in, 70 out",
        str(path),
    ]
    records = ratings(tmp_path)
    assert len(set(keys(records))) == 14
    for record in records:
        assert record.keys() >= {
            *("question_id", "model", "judge", "user_prompt", "judgment", "score", "turn"),
            "tstamp",
        }
        assert record["judge"][0] == "org/judge"
        assert record["judge"][1] in TEMPLATES
        expected = 8 if record["model"] == "exact" else 5.5
        assert record["score"] == (MALFORMED if record["question_id"] == "one" else expected)
        assert record["user_prompt"] in server.prompts
        assert abs(record["tstamp"] - time.time()) < 600
    assert {request["temperature"] for request in server.requests} == {0}
    assert {request["max_tokens"] for request in server.requests} == {2048}
    notes = path.with_suffix(".run.json").read_text()
    assert json.loads(notes)["settings"]["judge"] == "org/judge"

    pytest.importorskip("fastchat")
    pytest.importorskip("pandas")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fastchat.llm_judge.show_result"),
            *("--mode", "single", "--input-file", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    tables = done.stdout.split("##########")
    for table in (tables[2], tables[4]):  # turns
        assert [line.split() for line in table.strip().splitlines()[-2:]] == [
            ["exact", *table.strip().splitlines()[-2].split()[1:-1], "8.0"],
            ["fuzzy", *table.strip().splitlines()[-1].split()[1:-1], "5.5"],
        ]
    assert [line.split() for line in tables[6].strip().splitlines()[-2:]] == [
        ["exact", "8.0"],
        ["fuzzy", "5.5"],
    ]


def test_a_finished_run_asks_nothing_and_needs_no_key(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*folders, *flags(tmp_path, server.url)]
    assert main([*arguments, "--limit", "2"]) == 0
    assert len(server.requests) == 8
    assert main([folders[0], *flags(tmp_path, server.url)]) == 0
    assert len(server.requests) == 11
    assert main(arguments) == 0
    assert len(server.requests) == len(set(server.prompts)) == 14
    monkeypatch.delenv("OPENAI_API_KEY")
    capsys.readouterr()
    assert main([*arguments, "--price-in", "2", "--price-out", "1000"]) == 0
    assert len(server.requests) == 14
    assert capsys.readouterr().out.splitlines()[:3] == [
        "14 of 14 ratings, 0 malformed",
        "this run: 0 tokens in, 0 out, cost 0.0000",
        "all ratings: 140 tokens in, 70 out, cost 0.0703",
    ]


def test_a_finished_run_of_other_settings_is_refused_too(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*folders, *flags(tmp_path, server.url)]
    assert main(arguments) == 0
    notes = tmp_path / "ratings" / FOLDER / "org-judge_single.run.json"
    before = notes.read_bytes()
    for more, words in (
        (("--temperature", "1"), "was begun with temperature 0.0, asked for is 1.0"),
        (("--request", '{"top_p": 0.5}'), "was begun with request {}, asked for is {'top_p': 0.5}"),
    ):
        assert words in refused([*arguments, *more], capsys)
    assert notes.read_bytes() == before


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"settings": [], "resumed": []}', "{"])
def test_spoilt_notes_are_named(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
) -> None:
    notes = tmp_path / "ratings" / FOLDER / "org-judge_single.run.json"
    notes.parent.mkdir(parents=True)
    notes.write_text(content)
    error = refused([*folders, *flags(tmp_path, server.url)], capsys)
    assert f"{notes} does not say how the ratings were asked for" in error
    assert not server.requests
    assert notes.read_text() == content


@pytest.mark.parametrize("changes", [{"choices": []}, {"choices": None}, {"choices": [{}]}])
def test_an_incomplete_answer_is_named_by_its_line(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
) -> None:
    path = Path(folders[1]) / "model_answer" / "fuzzy.jsonl.part-0"
    first, second, *others = path.read_text().splitlines()
    spoilt = json.dumps(json.loads(second) | changes)
    path.write_text("\n".join([first, spoilt, *others]) + "\n")
    error = refused([*folders, *flags(tmp_path, server.url)], capsys)
    assert f"{path}, line 2: the answer's " in error
    assert not server.requests


def test_prices_and_uncounted_replies() -> None:
    records = [
        {"usage": {"prompt_tokens": 1_500_000, "completion_tokens": 200_000}},
        {"usage": {"prompt_tokens": None, "completion_tokens": None}},
        {},
    ]
    text = "1,500,000 tokens in, 200,000 out"
    assert Prices().describe(records) == f"{text} (2 replies not counted)"
    assert Prices(10, 30).describe(records[:1]) == f"{text}, cost 21.0000"
    for prices in ((1, None), (-1, 1), (1, float("nan"))):
        with pytest.raises(ValueError, match="price"):
            Prices(*prices)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evaluation.judge", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell ignores Ctrl-C, and so do its children: the tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(server: Server, process: subprocess.Popen[str], num_requests: int) -> None:
    while len(server.requests) < num_requests:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)


@pytest.mark.slow
def test_a_killed_run_goes_on_without_asking_twice(
    server: Server, folders: list[str], tmp_path: Path
) -> None:
    server.script = always(0.05)
    arguments = [*folders, *flags(tmp_path, server.url, "--parallel", "2")]
    process = start(*arguments)
    wait_for(server, process, random.Random().randrange(4, 12))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = ratings(tmp_path)
    assert 2 <= len(kept) < 14
    path = tmp_path / "ratings" / FOLDER / "org-judge_single.jsonl"
    with path.open("a") as stream:
        stream.write('{"question_id": 81, "model": "exa')
    num_before = len(server.requests)
    assert main(arguments) == 0
    assert ratings(tmp_path)[: len(kept)] == kept
    assert len(set(keys(ratings(tmp_path)))) == len(ratings(tmp_path)) == 14
    again = server.prompts[num_before:]
    assert len(again) == 14 - len(kept)
    assert not set(again) & {record["user_prompt"] for record in kept}
    # Replies that were under way when it was killed are all that is asked twice.
    assert sum(times - 1 for times in Counter(server.prompts).values()) <= 2


@pytest.mark.slow
def test_a_second_ctrl_c_gives_up_what_is_under_way(
    server: Server, folders: list[str], tmp_path: Path
) -> None:
    server.script = always(60.0)
    arguments = [*folders, *flags(tmp_path, server.url, "--parallel", "3", "--timeout", "100")]
    process = start(*arguments)
    wait_for(server, process, 3)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_a_second_ctrl_c_right_behind_the_words_gives_up_as_well(tmp_path: Path) -> None:
    started, abandoned, given_up = threading.Event(), threading.Event(), []

    class Client:
        num_stops = 0

        def ask(self, *_: str) -> None:
            started.set()
            given_up.append(abandoned.wait(5))
            raise StoppedError

        def stop(self) -> None:
            self.num_stops += 1
            if self.num_stops == 1:
                raise KeyboardInterrupt

        abandon = staticmethod(abandoned.set)

    class Interrupted(Judging):
        def _collect(self, *_: Any) -> None:
            assert started.wait(5)
            raise KeyboardInterrupt

    match = Match("q", "m", 1, "single-v1", "system", "prompt")
    judging = Interrupted(Client(), JudgmentFile(tmp_path, "judge"), "judge")
    with pytest.raises(KeyboardInterrupt):
        judging.run([match], 1)
    assert given_up == [True]


@pytest.mark.slow
def test_after_ctrl_c_replies_under_way_are_kept(
    server: Server, folders: list[str], tmp_path: Path
) -> None:
    server.script = always(0.5)
    arguments = [*folders, *flags(tmp_path, server.url, "--parallel", "3")]
    process = start(*arguments)
    wait_for(server, process, 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert len(server.requests) == 3
    assert len(ratings(tmp_path)) == 3
    server.script = always(GOOD)
    assert main(arguments) == 0
    assert len(server.requests) == len(set(server.prompts)) == 14


def rating(number: int) -> dict[str, Any]:
    return {
        "question_id": number,
        "model": "m",
        "judge": ["j", "single-v1"],
        "user_prompt": "ü\u2028",
        "judgment": "[[1]]",
        "score": 1,
        "turn": 1,
    }


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 700))
def test_a_file_cut_off_anywhere_loses_only_its_last_rating(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    file = JudgmentFile(tmp_path_factory.mktemp("out"), "j")
    with file.locked():
        for number in range(4):
            file.append(rating(number))
        content = file.path.read_bytes()
        file.path.write_bytes(content[:cut])
        num_whole = content[:cut].count(b"\n")
        assert list(file.read().values()) == [rating(number) for number in range(num_whole)]
        file.append(rating(9))
        assert [key[0] for key in file.read()] == [*range(num_whole), 9]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JudgmentFile(tmp_path, "j")
    with file.locked():
        file.append(rating(0))

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                file.append(rating(1))
        file.append(rating(2))
        assert [key[0] for key in file.read()] == [0, 2]
        with pytest.raises(RuntimeError, match="another run writes to"), file.locked():
            pass


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{\n", "line 2: not valid JSON; mend or remove it"),
        (b"[]\n", "line 2: not a rating"),
        (json.dumps(rating(1) | {"score": None}).encode() + b"\n", "line 2: not a rating"),
        (
            json.dumps(rating(1) | {"judge": ["k", "p"]}).encode() + b"\n",
            r"line 2: a rating of judge \['k'\], not of 'j'",
        ),
    ],
)
def test_a_line_that_is_no_rating_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    file = JudgmentFile(tmp_path, "j")
    with file.locked():
        file.append(rating(0))
        content = file.path.read_bytes() + line
        file.path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            file.read()
        assert file.path.read_bytes() == content


# A server that fails


def test_failures_that_pass_are_tried_again(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    troubles: list[Any] = [
        failure(429, "slow down", Retry_After="0.05"),
        failure(429, "slow down", Retry_After=formatdate(time.time() - 5, usegmt=True)),
        failure(429, "slow down", Retry_After="soon"),
        failure(500, "oops"),
        (503, {}, b"<html>bad gateway</html>"),
        1.5,  # longer than --timeout
        "cut",
        b"",
        b'{"choices": [{"message": {"content": "[[5',
        b'{"choices": []}',
        b'{"error": {"message": "overloaded"}}',
        b"[]",
        b"[" * 200_000,
        (500, {}, b"[" * 200_000),
        b'{"choices": [{"message": {"content": [1]}}]}',
        (200, {"Content_Type": "text/html"}, b"<html>welcome</html>"),
    ]
    left, lock = list(troubles), threading.Lock()

    def script(request: dict[str, Any], times: int) -> Any:
        with lock:
            return left.pop() if left and times <= 1 else GOOD

    server.script = script
    arguments = [*folders, *flags(tmp_path, server.url), "--timeout", "1"]
    assert main(arguments) == 0
    assert not left
    assert len(set(keys(ratings(tmp_path)))) == len(ratings(tmp_path)) == 14
    assert {record["score"] for record in ratings(tmp_path)} == {7}
    assert len(server.requests) == 14 + len(troubles)
    assert "0 malformed" in capsys.readouterr().out


def test_a_reply_that_trickles_in_without_end_is_given_up(server: Server) -> None:
    server.script = always("trickle")
    judge = client(server, timeout_s=0.2, num_retries=1)
    before = time.monotonic()
    with pytest.raises(RequestError, match=r"no whole answer within 1 s \(2 tries\)"):
        judge.ask("s", "u", "n")
    assert 2 <= time.monotonic() - before < 20
    assert len(server.requests) == 2


def test_a_prompt_that_is_no_unicode_is_one_failed_request(server: Server) -> None:
    with pytest.raises(RequestError, match=r"the request is no Unicode text: .* surrogates"):
        client(server).ask("s", "\ud800", "n")
    assert not server.requests


def test_counts_that_no_reply_can_have_are_none(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = always(completion("[[7]]", usage=(10**320, 2**53)))
    arguments = [folders[0], *flags(tmp_path, server.url, "--price-in", "1", "--price-out", "1")]
    assert main(arguments) == 0
    assert "(7 replies not counted)" in capsys.readouterr().out
    assert {record["usage"]["prompt_tokens"] for record in ratings(tmp_path)} == {None}
    assert main(arguments) == 0


def test_a_request_that_fails_for_good_is_told_and_asked_again_by_the_next_run(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: dict[str, Any], times: int) -> Any:
        prompt = request["messages"][1]["content"]
        if prompt.startswith("Rate exact on 81 1"):
            return failure(400, "too long for the context")
        return failure(500, "oops") if "Rate fuzzy on one" in prompt else GOOD

    server.script = script
    arguments = [*folders, *flags(tmp_path, server.url, "--retries", "2")]
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == "12 of 14 ratings, 0 malformed"
    assert "2 failed; the same command asks for them again" in output.out
    told = [line for line in output.err.splitlines() if line.startswith("question ")]
    first, second = sorted(told)
    assert first.startswith("question 'one', turn 1, fuzzy: the server answered 500: ")
    assert first.endswith("(3 tries)")
    assert second.startswith("question 81, turn 1, exact: the server answered 400: ")
    assert "too long for the context" in second
    assert len(server.requests) == 12 + 1 + 3
    kept = ratings(tmp_path)
    server.script = always(GOOD)
    assert main(arguments) == 0
    assert ratings(tmp_path)[:12] == kept
    assert set(keys(ratings(tmp_path)[12:])) == {(81, "exact", 1), ("one", "fuzzy", 1)}


def test_malformed_ratings_are_kept_counted_and_asked_again_on_demand(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = completion("It is good, so I would", reason="length", usage=None)
    odd = {
        "Rate exact on 81 1": cut,
        "Rate fuzzy on 81 1": completion(None),
        "Rate exact on one": completion("[[11]]"),
    }

    def script(request: dict[str, Any], times: int) -> Any:
        prompt = request["messages"][1]["content"]
        found = [reply for start, reply in odd.items() if prompt.startswith(start)]
        return found[0] if found else GOOD

    server.script = script
    arguments = [*folders, *flags(tmp_path, server.url)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "14 of 14 ratings, 2 malformed (1 of replies cut at --max-tokens), 1 outside 1 to 10",
        "this run: 130 tokens in, 65 out (1 replies not counted)",
    ]
    assert main(arguments) == 0
    assert len(server.requests) == 14
    server.script = always(GOOD)
    assert main([*arguments, "--redo-malformed"]) == 0
    assert len(server.requests) == 16
    assert set(keys(ratings(tmp_path)[14:])) == {(81, "exact", 1), (81, "fuzzy", 1)}
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("14 of 14 ratings, 0 malformed, 1 outside")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_an_unreachable_server_ends_the_run_and_keeps_what_there_is(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*folders, *flags(tmp_path, server.url, "--limit", "1")]) == 0
    kept = ratings(tmp_path)
    url = f"http://127.0.0.1:{free_port()}/v1"
    error = refused([*folders, *flags(tmp_path, url, "--retries", "1")], capsys)
    assert f"no server answers at {url}: " in error
    assert "(2 tries); all ratings so far are kept" in error
    assert ratings(tmp_path) == kept


@pytest.mark.parametrize(
    "answer",
    [
        failure(401, f"Incorrect API key provided: {KEY}."),
        failure(403, "no"),
        failure(404, "The model `org/judge` does not exist"),
        (429, {}, b'{"error": {"message": "pay first", "code": "insufficient_quota"}}'),
    ],
)
def test_a_refusal_of_everything_is_told_once_without_the_key(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    answer: Any,
) -> None:
    server.script = always(answer)
    assert main([*folders, *flags(tmp_path, server.url, "--parallel", "2")]) == 2
    output = capsys.readouterr()
    assert f"error: the server answered {answer[0]}: " in output.err
    assert KEY not in output.err + output.out
    assert len(server.requests) <= 4  # none is tried twice, few begin before the first is told


def test_the_key_goes_to_the_server_and_nowhere_else(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([folders[0], *flags(tmp_path, server.url)]) == 0
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert main([folders[1], *flags(tmp_path, server.url, "--no-key")]) == 0
    assert [headers["Authorization"] for headers in server.headers[7:]] == [None] * 7
    output = capsys.readouterr()
    assert KEY not in output.out + output.err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()


def test_no_more_requests_at_a_time_than_allowed(
    server: Server, folders: list[str], tmp_path: Path
) -> None:
    server.script = always(0.1)
    assert main([*folders, *flags(tmp_path, server.url, "--parallel", "3")]) == 0
    assert server.most_open == 3


def test_further_fields_of_a_request(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = '{"max_tokens": null, "max_completion_tokens": 99, "temperature": null}'
    arguments = [folders[0], *flags(tmp_path, server.url, "--request", fields)]
    assert main(arguments) == 0
    for request in server.requests:
        assert request.keys() == {"model", "messages", "max_completion_tokens"}
        assert request["max_completion_tokens"] == 99
    for wrong in (
        *("{", "[]", '{"model": "x"}', '{"x": NaN}', '{"x": 1e999}', '{"x": "\\ud800"}'),
        "[" * 100_000,
    ):
        error = refused([folders[0], *flags(tmp_path, server.url, "--request", wrong)], capsys)
        assert "--request" in error
    assert len(server.requests) == 7


def client(server: Server, **changes: Any) -> JudgeClient:
    return JudgeClient(JudgeConfig("j", server.url, **({"retry_wait_s": 0.01} | changes)), None)


def test_retry_after_is_waited_for(server: Server) -> None:
    wait = failure(429, "slow down", Retry_After="0.6")
    server.script = lambda _, times: GOOD if times else wait
    assert client(server).ask("s", "u", "n").text == "Well done. Rating: [[7]]"
    assert server.times[1] - server.times[0] >= 0.6
    server.script = always(failure(429, "slow down", Retry_After="3600"))
    with pytest.raises(RequestError, match="it asks to wait for 3600 s"):
        client(server).ask("s", "other", "n")
    assert len(server.requests) == 3


def test_waits_double_and_come_from_the_seed(server: Server) -> None:
    waits = [
        [one._wait_s(tries, 0.0, random.Random("0 n")) for tries in range(1, 12)]
        for one in (client(server, retry_wait_s=1.0), client(server, retry_wait_s=1.0))
    ]
    assert waits[0] == waits[1]
    for tries, wait in enumerate(waits[0]):
        longest = min(2.0**tries, 60.0)
        assert longest / 2 <= wait <= longest


def test_retry_after_headers() -> None:
    assert _retry_after_s(None) == _retry_after_s("soon") == _retry_after_s("-3") == 0
    assert _retry_after_s("nan") == _retry_after_s("inf") == 0
    assert _retry_after_s("2.5") == 2.5
    for zone in (True, False):
        header = formatdate(time.time() + 30, usegmt=zone)
        assert 27 < _retry_after_s(header) < 31


def test_a_stopped_client_waits_no_longer(server: Server) -> None:
    server.script = always(failure(500, "oops"))
    judge = client(server, retry_wait_s=50.0)
    threading.Timer(0.3, judge.stop).start()
    before = time.monotonic()
    with pytest.raises(StoppedError):
        judge.ask("s", "u", "n")
    assert time.monotonic() - before < 10
    with pytest.raises(StoppedError):
        judge.ask("s", "u", "n")
    assert len(server.requests) == 1


# What does not fit


def test_a_missing_key(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*folders, *flags(tmp_path, server.url)]
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY is not set; " in refused(arguments, capsys)
    for key in (" \n", "sk-1 2", "sk-\u00fc"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        error = refused(arguments, capsys)
        assert "OPENAI_API_KEY" in error
        assert "sk-" not in error
    assert not server.requests


def test_a_missing_package(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    error = refused([*folders, *flags(tmp_path, server.url)], capsys)
    assert "install eagle-fsd[judge]" in error


def test_runs_that_do_not_go_together(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*QUESTIONS[:3], Question("one", "stem", ("Another one.",))]
    (tmp_path / "empty").mkdir()
    cases = {
        "no run in": tmp_path / "empty",
        "no run in '": tmp_path / "absent",
        "has answers to 2 of 4 questions; finish the run first": write_run(
            tmp_path / "part", "part", num_answers=2
        ),
        "differ in 1 questions, the first is 'one'": write_run(tmp_path / "b", "b", other),
        "differ in 1 questions, the first is 111": write_run(
            tmp_path / "c", "c", [*QUESTIONS[:2], QUESTIONS[3]]
        ),
        "both have model id 'exact'": write_run(tmp_path / "d", "exact"),
    }
    for words, folder in cases.items():
        error = refused([*folders, str(folder), *flags(tmp_path, server.url)], capsys)
        assert words in error
    assert not server.requests


def test_an_output_of_something_else_is_not_mixed_with(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*folders, *flags(tmp_path, server.url)]
    assert main(arguments) == 0
    kept = ratings(tmp_path)
    other = write_run(tmp_path / "x", "x", [Question(81, "writing", ("Another.", "Again, q81."))])
    error = refused([str(other), *flags(tmp_path, server.url)], capsys)
    assert "a rating of question 81, turn 1, which these runs do not have" in error
    fewer = write_run(tmp_path / "y", "y", QUESTIONS[:3])
    error = refused([str(fewer), *flags(tmp_path, server.url)], capsys)
    assert "a rating of question 'one', turn 1, which these runs do not have" in error
    more = write_run(tmp_path / "z", "z", [*QUESTIONS, Question(160, "stem", ("More?",))])
    error = refused([str(more), *flags(tmp_path, server.url, "--max-tokens", "9")], capsys)
    assert "was begun with max_tokens 2048, asked for is 9" in error
    assert main([str(more), *flags(tmp_path, server.url)]) == 0
    changed = write_run(tmp_path / "again" / "exact", "exact")
    answers = changed / "model_answer" / "exact.jsonl.part-0"
    answers.write_text(answers.read_text().replace("exact on 101 2", "exactly"))
    error = refused([str(changed), *flags(tmp_path, server.url)], capsys)
    assert "another answer of 'exact' to question 101, turn 2, or of another prompt" in error
    assert ratings(tmp_path)[:14] == kept
    lock = tmp_path / "ratings" / FOLDER / "org-judge_single.lock"
    with FileLock(lock):
        assert "another run writes to" in refused(arguments, capsys)


def test_prompts_and_references_that_are_missing(
    server: Server, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*folders, *flags(tmp_path, server.url)]
    place = arguments.index("--references")
    error = refused(arguments[:place] + arguments[place + 2 :], capsys)
    assert "question 101 of category 'reasoning' needs a reference answer to turn 1" in error
    references = tmp_path / "references.jsonl"
    references.write_text(references.read_text().replace(', "ref 2"', ""))
    assert "question 101 of category 'reasoning' needs a reference answer to turn 2" in refused(
        arguments, capsys
    )
    single = prompt_record("single-v1", TEMPLATES["single-v1"])
    write_lines(tmp_path / "prompts.jsonl", [single])
    assert "question 81 needs prompt 'single-v1-multi-turn'" in refused(arguments, capsys)
    assert not server.requests


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--base-url", "localhost:8000"), "must look like http://localhost:8000/v1"),
        (("--base-url", "http://me:secret@h/v1"), "must not hold a name or a password"),
        (("--parallel", "0"), "--parallel must be >= 1, got 0"),
        (("--timeout", "0"), "timeout_s must be > 0"),
        (("--retries", "-1"), "num_retries must be >= 0, got -1"),
        (("--retry-wait", "nan"), "retry_wait_s must be > 0"),
        (("--max-tokens", "0"), "max_tokens must be >= 1, got 0"),
        (("--temperature", "-1"), "temperature must be finite and >= 0"),
        (("--price-in", "1"), "--price-in and --price-out go together"),
        (("--judge", " "), "the judge's name is empty"),
        (("--limit", "0"), "--limit must be >= 1, got 0"),
    ],
)
def test_flags_out_of_range(
    server: Server,
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, str],
    words: str,
) -> None:
    error = refused([*folders, *flags(tmp_path, server.url, *more)], capsys)
    assert words in error
    assert "secret" not in error
    assert not server.requests


def test_help() -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
