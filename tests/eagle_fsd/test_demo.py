"""The chat page without a browser: settings, strings, the queue, sessions, and how it starts."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from eagle_fsd.__main__ import main
from eagle_fsd.acceptance import build_rule
from eagle_fsd.chat import encode_prompt
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.demo import worker as worker_module
from eagle_fsd.demo.answer import Answer, Lens, Rescue, ShownToken, ShownTree, nothing_spent
from eagle_fsd.demo.render import (
    Turn,
    comparison_html,
    error_text,
    figures_text,
    rescue_text,
    tokens_html,
    turns_html,
    waiting_text,
)
from eagle_fsd.demo.server import AUTH, check_chat, free_port, read_login
from eagle_fsd.demo.session import Session, Sessions, ending_text
from eagle_fsd.demo.settings import MAX_SLIDER, RULE_NAMES, Settings, offered, written_rule
from eagle_fsd.demo.tree_view import tree_html, tree_svg
from eagle_fsd.demo.worker import Job, Request, Worker, num_forgotten
from eagle_fsd.divergence import DIVERGENCES
from tests.scripted import EOS, THINK, byte_tokenizer, scripted
from tests.stubs import TableDrafter, TableTarget
from tree import DraftTree

RESCUE = Rescue("<b>", 0.5, 0.25, 0.75, 0.125, "js")
LONG_S = 20.0  # nothing here takes a second; a hang fails instead of blocking the suite


def spelled(text: str) -> list[int]:
    return list(text.encode())


# settings


@pytest.mark.parametrize("name", RULE_NAMES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_slider_goes_from_exact_to_rescuing_everywhere(name, divergence):
    assert written_rule(name, divergence, 0) == "exact"
    written = [written_rule(name, divergence, place) for place in range(1, MAX_SLIDER + 1)]
    rules = [build_rule(rule) for rule in written]
    assert not any(rule.is_lossless for rule in rules)
    knobs = [float(rule.split(":")[1]) for rule in written]
    assert knobs == sorted(knobs, reverse=name == "lenience")
    assert len(set(knobs)) == MAX_SLIDER
    assert knobs[-1] == (1e-6 if name == "lenience" else math.inf)


def test_settings_come_in_the_order_of_the_page():
    values = (50, "fuzzy", "tv", 0.5, 0.9, " 8, 3, 3", 32, "be brief")
    settings = Settings.from_page(*values)
    assert settings == Settings(50, "fuzzy", "tv", 0.5, 0.9, "8,3,3", 32, "be brief")
    assert settings.rule == "fuzzy:0.5:tv"
    assert settings.sampling == {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 32}
    assert Settings.from_page(0, "fuzzy", "js", 0, 1, None, 8.0, None).tree == "auto"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: None}, "the slider must be a number, got None"),
        ({0: 101}, "the slider goes from 0 to 100, got 101"),
        ({1: "typical"}, "unknown rule 'typical'"),
        ({2: "jss"}, "unknown divergence 'jss'"),
        ({3: "hot"}, "temperature must be a number"),
        ({4: 0}, "top_p must be in"),
        ({5: "big"}, "tree must be auto or N,DEPTH,K"),
        ({6: 0}, "the longest answer must be >= 1 token, got 0"),
        ({6: 1.5}, "the longest answer must be a whole number, got 1.5"),
        ({6: math.nan}, "the longest answer must be a whole number, got nan"),
        ({6: True}, "the longest answer must be a number"),
    ],
    ids=str,
)
def test_bad_settings_are_one_sentence(change, words):
    values = [1, "fuzzy", "js", 0.0, 1.0, "auto", 16, ""]
    for place, value in change.items():
        values[place] = value
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Settings.from_page(*values)


def test_the_page_offers_what_the_drafter_can_serve():
    rules, divergences = offered(tables())
    assert rules == list(RULE_NAMES)
    assert divergences[0] == "js"
    assert set(divergences) == set(DIVERGENCES)
    reduced = tables()
    reduced.drafter.has_reduced_vocabulary = True
    assert set(offered(reduced)[1]) == {"js", "tv", "kl_draft_target"}
    rules, divergences = offered(scripted([65]))
    assert (rules, divergences) == ([name for name in RULE_NAMES if name != "fuzzy"], [])


# strings


@pytest.mark.parametrize(
    "text", ["<think>", "a<b && c>d", "</span><script>alert(1)</script>", "```py\n*x*```", "${7*7}"]
)
@pytest.mark.parametrize("origin", ["accepted", "rescued", "recovered", "bonus"])
def test_markup_in_a_token_is_text(text, origin):
    rescue = Rescue(text, 0.5, 0.5, 0.5, 0.0, "js") if origin == "rescued" else None
    for is_coloured in (True, False):
        html = tokens_html([ShownToken(text, origin, rescue)], is_coloured=is_coloured)
        element = ElementTree.fromstring(f"<p>{html}</p>")
        shown = element[0].text if is_coloured else element.text
        assert shown == text
        assert all(child.tag == "span" for child in element.iter() if child is not element)


def test_only_rescued_tokens_take_the_focus_and_tell_why():
    tokens = [ShownToken("a", "accepted"), ShownToken("b", "rescued", RESCUE)]
    root = ElementTree.fromstring(f"<p>{tokens_html(tokens, is_coloured=True)}</p>")
    assert [span.get("class") for span in root] == ["tok accepted", "tok rescued"]
    assert [span.get("tabindex") for span in root] == [None, "0"]
    assert root[1][0].text == rescue_text(RESCUE)
    assert rescue_text(RESCUE) == (
        "the target's own choice: <b> with p = 0.5; this token: p = 0.25, draft q = 0.75; "
        "js here: 0.125 nats"
    )
    assert rescue_text(Rescue(" \n", 0.5, 0.25, None, None, "js")) == (
        "the target's own choice: \u2423\u21b5 with p = 0.5; this token: p = 0.25"
    )


def test_parts_of_a_character_are_shown_with_the_rest_of_it():
    tokens = [
        ShownToken("", "accepted"),
        ShownToken("", "rescued", RESCUE),
        ShownToken("\N{GRINNING FACE}", "accepted"),
        ShownToken("!", "bonus"),
        ShownToken("", "bonus"),
    ]
    root = ElementTree.fromstring(f"<p>{tokens_html(tokens, is_coloured=True)}</p>")
    assert [(span.text, span.get("class")) for span in root] == [
        ("\N{GRINNING FACE}", "tok rescued"),
        ("!", "tok bonus"),
    ]


def test_figures_say_what_was_spent_only_where_something_can_be():
    tokens = (ShownToken("a", "bonus"), *[ShownToken("b", "rescued", RESCUE)] * 3)
    answer = Answer(tokens, num_cycles=2, seconds=2.0, rule="fuzzy:0.3:js", nats=0.5)
    assert figures_text(answer) == (
        "2.0 tokens/s · acceptance length 1.50 · 75% rescued · 0.50 nats of regret spent · "
        "4 tokens in 2.0 s · rule fuzzy:0.3:js"
    )
    sampled = Answer(tokens, 2, 2.0, 0.5, is_greedy=False, rule="fuzzy:0.3:js", seed=7)
    assert "0.50 nats of KL spent" in figures_text(sampled)
    assert figures_text(sampled).endswith("seed 7")
    assert figures_text(Answer(tokens, 2, 2.0, rule="plain")) == (
        "2.0 tokens/s · 4 tokens in 2.0 s · rule plain"
    )


def test_turns_that_are_no_longer_sent_are_set_apart():
    turns = [Turn(f"<{n}>", Answer((ShownToken(str(n), "bonus"),))) for n in range(3)]
    html = turns_html(turns, 2, is_coloured=True)
    assert html.count("message forgotten") == 2
    assert html.index("&lt;1&gt;") < html.index("the oldest 2 turns above") < html.index("&lt;2")
    assert "context limit" not in turns_html(turns, 0, is_coloured=True)
    ended = Turn("m", Answer(finish_reason="context"))
    assert "end of the target" in turns_html([ended], 0, is_coloured=True)


def test_a_comparison_says_how_much_faster_and_whether_the_text_is_the_same():
    plain = Answer((ShownToken("a", "bonus"),) * 2, seconds=2.0, rule="plain", finish_reason="stop")
    tree = Answer((ShownToken("aa", "accepted"),), seconds=0.5, rule="exact", finish_reason="stop")
    html = comparison_html("<hi>", plain, tree, is_coloured=True)
    assert "2.00 x the tokens per second of plain decoding; the two texts are identical" in html
    assert "&lt;hi&gt;" in html
    assert "2.00 s" in html
    assert "0.50 s" in html
    assert "tokens per second" not in comparison_html("hi", plain, None, is_coloured=True)


def test_waiting_and_errors_are_plain_sentences():
    assert waiting_text(0) == ""
    assert waiting_text(1) == "waiting: 1 request before this one"
    assert waiting_text(3) == "waiting: 3 requests before this one"
    for error in (torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("can't alloc 9 bytes")):
        assert error_text(error).startswith("out of memory; ")
    assert error_text(ValueError("a\n b")) == "a b"
    assert error_text(KeyError("k")) == "unexpected error: KeyError 'k'"


# the tree


def small_tree() -> DraftTree:
    return DraftTree(
        token_ids=torch.tensor([5, 6, 7, 8, 9]),
        parents=torch.tensor([-1, 0, 0, 1, 1]),
        depths=torch.tensor([0, 1, 1, 2, 2]),
        scores=torch.tensor([0.0, math.log(0.5), math.log(0.25), math.log(0.2), math.log(0.1)]),
    )


def test_a_tree_is_drawn_with_texts_probabilities_and_the_path():
    svg = ElementTree.fromstring(tree_svg(small_tree(), ["<r>", "a", "b c", "\n", "long" * 9], [1]))
    space = "{http://www.w3.org/2000/svg}"
    nodes = svg.findall(f"{space}g")
    words = [[part.text or "" for part in node.findall(f"{space}text")] for node in nodes]
    assert words == [
        ["<r>", ""],
        ["a", "0.5"],
        ["b\u2423c", "0.25"],
        ["\u21b5", "0.4"],
        ["longlon\u2026", "0.2"],
    ]
    assert [node.get("class") for node in nodes] == ["taken", "taken", None, None, None]
    edges = svg.findall(f"{space}path")
    assert [edge.get("class") for edge in edges] == ["taken", None, None, None]
    assert svg.get("aria-label") == "draft tree of 4 tokens, 1 of them taken"
    places = [node.get("transform") for node in nodes]
    assert len(set(places)) == len(places)
    titles = [node.findtext(f"{space}title") for node in nodes]
    assert titles[3] == "\u21b5: path probability 0.2"
    with pytest.raises(ValueError, match="a tree of 5 nodes needs as many texts, got 1"):
        tree_svg(small_tree(), ["a"], [])


def test_nodes_of_a_column_never_overlap():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        parents, depths = [-1], [0]
        for depth in range(1, 5):
            level = [row for row, d in enumerate(depths) if d == depth - 1]
            picks = torch.randint(len(level), (6,), generator=generator).sort().values.tolist()
            parents += [level[pick] for pick in picks]
            depths += [depth] * 6
        tree = DraftTree(
            torch.arange(len(parents)),
            torch.tensor(parents),
            torch.tensor(depths),
            torch.zeros(len(parents)),
        )
        svg = ElementTree.fromstring(tree_svg(tree, ["x"] * len(parents), []))
        seen: dict[str, list[float]] = {}
        for node in svg.findall("{http://www.w3.org/2000/svg}g"):
            left, top = node.get("transform")[len("translate(") : -1].split()
            seen.setdefault(left, []).append(float(top))
        for tops in seen.values():
            tops.sort()
            assert all(b - a > 20 for a, b in itertools.pairwise(tops))


def test_there_is_a_place_holder_before_the_first_tree():
    assert "<svg" not in tree_html(None)


# what is told about an answer


def tables(seed: int = 0, size: int = 12) -> SpeculativeDecoder:
    """A decoder whose laws can be looked up; the drafter is unlike the target."""
    generator = torch.Generator().manual_seed(seed)
    target = TableTarget(2 * torch.randn(size, size, size, generator=generator))
    draft = torch.log_softmax(torch.randn(size, size, generator=generator), dim=-1)
    return SpeculativeDecoder(target, TableDrafter(draft), None, TreeConfig(6, 3, 3))


class _Letters:
    def decode(self, ids, **_):
        return "".join(chr(65 + token) for token in ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rescue_tells_the_laws_of_its_own_node(temperature):
    decoder, rule = tables(), build_rule("fuzzy:inf:js")
    lens = Lens(_Letters())
    text, num_rescued = [0, 1], 0
    answer = Answer(nats=nothing_spent(rule), is_greedy=temperature == 0.0)
    prompt = torch.tensor([text])
    options = {"rule": rule, "temperature": temperature, "max_new_tokens": 60, "seed": 3}
    for step in decoder.stream(prompt, observer=lens, **options):
        rescues = lens.rescues(step)
        answer = answer.after(step, rescues, 0.5)
        for token, rescue in zip(step.tokens, rescues, strict=True):
            assert (rescue is not None) == (token.origin == "rescued")
            if rescue is not None:
                num_rescued += 1
                law = torch.softmax(decoder.target.table[text[-2], text[-1]], dim=-1)
                assert rescue.choice == chr(65 + token.exact_id)
                assert rescue.choice_prob == pytest.approx(float(law[token.exact_id]), rel=1e-5)
                assert rescue.token_prob == pytest.approx(float(law[token.id]), rel=1e-5)
                draft = decoder.drafter._log_probs[text[-1]]
                assert rescue.draft_prob == pytest.approx(math.exp(draft[token.id]), rel=1e-5)
                expected = float(DIVERGENCES["js"](law.log(), draft))
                assert rescue.divergence == pytest.approx(expected, rel=1e-4)
            text.append(token.id)
    assert num_rescued > 5
    assert step.result is not None
    stats = step.result.stats
    assert len(answer.tokens) == stats.num_tokens
    assert answer.acceptance_length == stats.acceptance_length
    assert answer.share_rescued == stats.num_rescued / stats.num_tokens
    assert answer.nats == pytest.approx((stats.kl_spent or 0.0) + (stats.regret_spent or 0.0))
    assert answer.finish_reason == "length"
    assert answer.seconds == 0.5 * (stats.num_cycles + 1)


# the queue


class Gate:
    """Lets a decoder's passes through one by one, or all."""

    def __init__(self, decoder: SpeculativeDecoder, error: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.error = error
        self.num_passes = 0
        self._score = decoder.target.score
        decoder.target.score = self

    def __call__(self, tree: DraftTree):
        self.num_passes += 1
        self.reached.set()
        assert self.opened.wait(LONG_S)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self._score(tree)


@pytest.fixture
def decoder():
    decoder = scripted(
        [*spelled("Hello "), THINK, *spelled("a<b \N{GRINNING FACE}"), EOS],
        byte_tokenizer(),
        tree="2,2,1",
        stop_ids=frozenset([EOS]),
    )
    messages = [{"role": "user", "content": "hi"}]  # the message that the drafter is right about
    length = encode_prompt(messages, decoder.tokenizer, decoder.target.vocabulary_size).numel()
    decoder.drafter._num_prompt = length
    return decoder


@pytest.fixture
def worker(decoder):
    worker = Worker(decoder)
    yield worker
    worker.close()


def request(message: str = "hi", **changes) -> Request:
    return Request.new(message, (), Settings(**changes), is_comparison=False)


def test_an_answer_comes_with_origins_tree_and_ending(worker):
    job = worker.submit(request())
    assert job.wait(LONG_S)
    (answer,) = job.look()
    assert answer.text == "Hello <think>a<b \N{GRINNING FACE}"
    assert (answer.finish_reason, job.error) == ("stop", None)
    assert {token.origin for token in answer.tokens} == {"accepted", "bonus"}
    assert answer.tree is not None
    assert len(answer.tree.texts) == answer.tree.tree.num_nodes
    assert worker.num_jobs == 0


def test_a_comparison_answers_twice_with_the_same_text(worker):
    asked = Request.new("hi", (), Settings(), is_comparison=True)
    job = worker.submit(asked)
    assert job.wait(LONG_S)
    plain, tree = job.look()
    assert plain.text == tree.text
    assert (plain.rule, tree.rule) == ("plain", "exact")
    assert plain.num_cycles > tree.num_cycles


def test_jobs_are_served_in_their_order_one_at_a_time(decoder, worker):
    gate = Gate(decoder)
    jobs = [worker.submit(request(str(number))) for number in range(4)]
    assert gate.reached.wait(LONG_S)
    assert [worker.num_before(job) for job in jobs] == [0, 1, 2, 3]
    assert not any(job.answers for job in jobs[1:])
    jobs[1].stop()
    assert jobs[1].is_done  # it does not wait for its turn to be ended
    assert [worker.num_before(job) for job in jobs] == [0, 0, 1, 2]
    gate.opened.set()
    assert all(job.wait(LONG_S) for job in jobs)
    assert [bool(job.answers) for job in jobs] == [True, False, True, True]


def test_stop_ends_the_generation_and_frees_the_decoder(decoder, worker):
    gate = Gate(decoder)
    job = worker.submit(request())
    assert gate.reached.wait(LONG_S)
    job.stop()
    gate.opened.set()
    assert job.wait(LONG_S)
    (answer,) = job.look()
    assert answer.text == "Hell"[: len(answer.text)]
    assert answer.finish_reason is None
    assert gate.num_passes == 1
    assert decoder.generate("hi").text  # its own thread would wait for ever for an open stream


def test_a_job_that_nobody_looks_at_is_ended(decoder):
    worker = Worker(decoder, patience_s=0.05)
    gate = Gate(decoder)
    job = worker.submit(request())
    assert gate.reached.wait(LONG_S)
    threading.Event().wait(0.1)
    gate.opened.set()
    assert job.wait(LONG_S)
    assert gate.num_passes == 1
    assert ending_text(job) == "ended early: the page that asked was gone for a while"
    worker.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory; clear the chat"),
        (RuntimeError("the device is gone"), "the device is gone"),
        (KeyError("bug"), "unexpected error: KeyError"),
    ],
)
def test_an_error_ends_its_own_request_only(decoder, worker, error, words):
    gate = Gate(decoder, error)
    gate.opened.set()
    session = Session()
    job = session.ask(worker, "hi", Settings())
    assert job.wait(LONG_S)
    session.settle(job)
    assert session.turns[0].note.startswith(words)
    again = session.retry(worker, Settings())
    assert again.wait(LONG_S)
    session.settle(again)
    assert [(turn.message, turn.note) for turn in session.turns] == [("hi", "")]
    assert session.turns[0].answer.finish_reason == "stop"


def test_a_full_queue_refuses_in_one_sentence(decoder, worker, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_WAITING", 1)
    gate = Gate(decoder)
    jobs = [worker.submit(request()) for _ in range(2)]
    with pytest.raises(RuntimeError, match="1 requests are waiting already; try again later"):
        worker.submit(request())
    gate.opened.set()
    assert all(job.wait(LONG_S) for job in jobs)


def test_closing_stops_what_runs_and_what_waits(decoder):
    worker = Worker(decoder)
    gate = Gate(decoder)
    jobs = [worker.submit(request()) for _ in range(3)]
    assert gate.reached.wait(LONG_S)
    gate.opened.set()
    worker.close()
    assert all(job.is_done for job in jobs)
    assert worker.num_jobs == 0


def test_half_a_surrogate_pair_is_replaced():
    assert request("a\ud800b").message == "a?b"


def test_answers_that_differ_in_their_trees_can_be_compared():
    trees = [ShownTree(small_tree(), ("x",) * 5, ()) for _ in range(2)]
    first, second = (Answer(tree=tree) for tree in trees)
    assert first != second


# chats


def answered(session: Session, job) -> None:
    assert job.wait(LONG_S)
    session.settle(job)


def test_a_chat_sends_what_came_before_and_leaves_out_what_has_no_answer(worker):
    session = Session()
    answered(session, session.ask(worker, "one", Settings()))
    session.turns.append(Turn("lost", Answer(), "stopped"))
    job = session.ask(worker, "two", Settings(system="be brief"))
    assert [(m["role"], m["content"]) for m in job.request.messages(0)] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "Hello <think>a<b \N{GRINNING FACE}"),
        ("user", "two"),
    ]
    answered(session, job)
    assert [turn.message for turn in session.turns] == ["one", "lost", "two"]


def test_a_second_message_is_refused_while_the_first_is_answered(decoder, worker):
    gate = Gate(decoder)
    session = Session()
    job = session.ask(worker, "one", Settings())
    for again in (session.ask, session.compare):
        with pytest.raises(RuntimeError, match="still being written; stop it first"):
            again(worker, "two", Settings())
    with pytest.raises(RuntimeError, match="still being written; stop it first"):
        session.retry(worker, Settings())
    gate.opened.set()
    answered(session, job)
    with pytest.raises(ValueError, match="write a message first"):
        session.ask(worker, " \n", Settings())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_comes_before_the_page_has_seen_the_end_loses_nothing(decoder, worker, is_stopped):
    session = Session()
    answered(session, session.ask(worker, "one", Settings()))
    for again in (session.retry, lambda *a: session.compare(a[0], "", a[1]), None):
        gate = Gate(decoder)
        job = session.ask(worker, "two", Settings())
        assert gate.reached.wait(LONG_S)
        if is_stopped:
            session.stop()
            with pytest.raises(RuntimeError, match="being stopped; try again in a moment"):
                session.retry(worker, Settings())
        gate.opened.set()
        assert job.wait(LONG_S)
        if again is None:
            with pytest.raises(ValueError, match="write a message first"):
                session.ask(worker, "", Settings())
        else:
            newer = again(worker, Settings())
            assert newer.request.message == "two"
            assert [turn.message for turn in newer.request.turns] == ["one"]
            answered(session, newer)
        session.settle(job)
        assert [turn.message for turn in session.turns] == ["one", "two"]
        session.turns.pop()


def test_stopped_text_stays_and_says_so(decoder, worker):
    gate = Gate(decoder)
    session = Session()
    job = session.ask(worker, "one", Settings())
    assert gate.reached.wait(LONG_S)
    session.stop()
    gate.opened.set()
    answered(session, job)
    (turn,) = session.turns
    assert (turn.message, turn.note) == ("one", "stopped")
    assert turn.answer.text


def test_clearing_forgets_what_is_still_being_written(decoder, worker):
    gate = Gate(decoder)
    session = Session()
    job = session.ask(worker, "one", Settings())
    assert gate.reached.wait(LONG_S)
    session.clear()
    gate.opened.set()
    answered(session, job)
    assert session.turns == []
    with pytest.raises(ValueError, match="nothing to retry yet"):
        session.retry(worker, Settings())


def test_compare_without_a_message_takes_the_last_one_and_adds_nothing(worker):
    session = Session()
    answered(session, session.ask(worker, "one", Settings()))
    job = session.compare(worker, "", Settings())
    assert [m["content"] for m in job.request.messages(0)] == ["one"]
    answered(session, job)
    assert len(session.turns) == 1


def test_the_oldest_turns_give_way_at_the_context_limit(worker, decoder):
    decoder.target.max_positions = 150
    session = Session()
    for number in range(6):
        answered(session, session.ask(worker, f"message {number}", Settings(max_new_tokens=30)))
    assert [turn.answer.finish_reason for turn in session.turns] == ["stop"] * 6
    assert 2 <= session.num_forgotten <= 5
    assert "were not sent with the last message" in turns_html(
        session.turns, session.num_forgotten, is_coloured=True
    )
    job = session.ask(worker, "x" * 200, Settings())
    answered(session, job)
    assert "the target's context is 150" in session.turns[-1].note
    assert "shorten the prompt" in session.turns[-1].note
    assert session.num_forgotten == 6  # it was tried without all of them
    session.turns.pop()
    answered(session, session.ask(worker, "short again", Settings(max_new_tokens=20)))
    assert session.turns[-1].answer.finish_reason == "stop"
    assert session.num_forgotten < 6  # with those that fit again


def test_as_few_turns_as_possible_are_left_out():
    lengths = [50, 40, 30, 5]
    assert [num_forgotten(lengths.__getitem__, 3, limit) for limit in (50, 49, 30, 4)] == [
        *(0, 1, 2, 3)
    ]
    assert num_forgotten(lengths.__getitem__, 0, 1) == 0


@pytest.mark.parametrize("guess", [0, 1, 40, 99, 100, 300])
@pytest.mark.parametrize("right", [0, 1, 41, 99, 100])
def test_the_chat_is_tokenized_a_few_times_only(guess, right):
    asked = []

    def length(number: int) -> int:
        asked.append(number)
        return 100 - number

    assert num_forgotten(length, 100, 100 - right, guess) == right
    assert len(asked) == len(set(asked)) <= (2 if guess == right else 9)
    assert all(0 <= number < 100 for number in asked)


def test_a_stop_ends_the_search_for_what_fits(decoder, worker, monkeypatch):
    asked = []

    def encode(messages, *_):
        asked.append(len(messages))
        job.stop()
        return torch.zeros(10**6)

    monkeypatch.setattr(worker_module, "encode_prompt", encode)
    turns = [Turn("m", Answer((ShownToken("a", "bonus"),)))] * 300
    gate = Gate(decoder)
    job = Job(Request.new("hi", turns, Settings(), is_comparison=False))
    worker._run(job)
    assert asked == [601]
    assert gate.num_passes == 0
    assert job.num_forgotten is None


def test_sessions_do_not_mix_and_the_longest_unused_goes_first(decoder, worker):
    gate = Gate(decoder)
    sessions = Sessions(limit=2)
    first, second = sessions.get("a"), sessions.get("b")
    assert first is not second
    assert sessions.get("a") is first
    job = second.ask(worker, "hi", Settings())
    sessions.get("c")
    assert job.is_stopped
    assert sessions.get("a") is first
    assert sessions.get("b") is not second
    gate.opened.set()


def test_leaving_stops_and_coming_back_finds_the_chat(decoder, worker):
    gate = Gate(decoder)
    sessions = Sessions()
    session = sessions.get("a")
    session.turns.append(Turn("hi", Answer()))
    job = session.ask(worker, "again", Settings())
    sessions.leave("a")
    sessions.leave("nobody")
    assert job.is_stopped
    assert sessions.get("a") is session
    gate.opened.set()


# the page


VISITOR = SimpleNamespace(session_hash="a")
INPUTS = (0, "fuzzy", "js", 0, 1, "auto", 64, "")
NAMES = ("transcript", "live", "status", "figures", "tree", "comparison", "message")


def shown(view) -> dict[str, str]:
    """What a view changes."""
    named = zip(NAMES, view, strict=True)
    return {name: value for name, value in named if isinstance(value, str)}


@pytest.fixture
def page(decoder, worker):
    from eagle_fsd.demo.page import Page

    return Page(worker, decoder, "tiny")


def test_a_cleared_answer_leaves_nothing_on_the_page(decoder, page):
    gate = Gate(decoder)

    async def visit() -> None:
        views = page._on_send(VISITOR, "one", *INPUTS)
        await anext(views)
        assert "one" in shown(await anext(views))["live"]
        cleared = shown(page._on_clear(VISITOR))
        last = [shown(view) async for view in views][-1]  # arrives after what came before it
        assert last == {name: text for name, text in cleared.items() if name != "message"}
        assert (last["live"], last["comparison"]) == ("", "")

    asyncio.run(visit())
    gate.opened.set()


def test_a_replaced_answer_shows_what_replaced_it(decoder, page):
    gate = Gate(decoder)
    session = page._sessions.get("a")

    async def visit() -> None:
        views = page._on_send(VISITOR, "one", *INPUTS)
        await anext(views)
        await anext(views)
        gate.opened.set()
        assert session.job.wait(LONG_S)
        gate.opened.clear()
        retried = page._on_retry(VISITOR, *INPUTS)
        await anext(retried)  # before the page has seen the end of the first one
        (last,) = [shown(view) async for view in views]
        assert "one" in last["live"]
        assert last["status"].count("writing") == 1
        gate.opened.set()
        ended = [shown(view) async for view in retried][-1]
        assert ended["live"] == ""
        assert ended["transcript"].count("</b>one") == 1

    asyncio.run(visit())
    assert [turn.message for turn in session.turns] == ["one"]


def test_a_refusal_stays_until_there_is_news(decoder, page):
    gate = Gate(decoder)

    async def visit() -> None:
        views = page._on_send(VISITOR, "one", *INPUTS)
        await anext(views)
        assert "writing" in shown(await anext(views))["status"]
        for refused in (
            page._on_send(VISITOR, "two", *INPUTS),
            page._on_retry(VISITOR, *INPUTS),
            page._on_compare(VISITOR, "two", *INPUTS),
        ):
            (view,) = [shown(view) async for view in refused]
            assert view.keys() == {"status"}  # what was typed stays
        page._sessions.get("a").is_coloured = False
        assert "status" not in shown(await anext(views))
        gate.opened.set()
        assert "status" in [shown(view) async for view in views][-1]

    asyncio.run(visit())


def test_a_second_request_reaches_the_page(page):
    modes = {event.api_name: event.trigger_mode for event in page.blocks.fns.values()}
    assert [modes[name] for name in ("send", "retry", "compare")] == ["multiple"] * 3
    assert modes["rule"] == "always_last"


@pytest.mark.parametrize(
    ("typed", "rule"),
    [(150, "fuzzy:inf:js"), (-5, "exact"), (None, "exact"), (0.5, "fuzzy:0.003466:js")],
)
def test_the_rule_line_is_that_of_the_number_which_the_page_ends_at(page, typed, rule):
    from eagle_fsd.demo.page import _rule_line

    position = page._position.preprocess(typed)
    assert f"rule: {rule}<" in _rule_line(position, "fuzzy", "js")
    assert Settings.from_page(position, *INPUTS[1:]).rule == rule
    assert page._temperature.preprocess(typed) == min(max(typed or 0, 0), 2)


# starting


def test_a_login_is_read_from_the_environment():
    assert read_login({}) is None
    assert read_login({AUTH: "me:a:b"}) == ("me", "a:b")
    assert read_login({AUTH: " me : a"}) == ("me", " a")  # Gradio strips what visitors type
    for text in ("me", ":x", "me:", "  :x"):
        with pytest.raises(ValueError, match=f"{AUTH} must be user:password"):
            read_login({AUTH: text})


def test_an_occupied_port_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ["demo", "--target", "none", "--draft-head", "none", "--port", str(port)]
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
        assert error.endswith("; choose another --port\n")
        assert error.count("\n") == 1
    assert free_port("127.0.0.1", 0) > 0
    with pytest.raises(ValueError, match="port must be in"):
        free_port("127.0.0.1", 70000)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "nothing drafts"),
        (["--draft-head", "./none", "--port", "0"], "no target at"),
        (["--draft-head", "x", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--draft-head", "x", "--host", "192.0.2.1"], "--host must be an address of this machine"),
        (["--draft-head", "x", "--host", "http://127.0.0.1"], "--host must be an address"),
        (["--draft-head", "x", "--host", "a" * 64 + ".b"], "--host must be an address"),
        (
            ["--draft-head", "x", "--host", ""],
            "--host must be an address of this machine, got none",
        ),
        (["--draft-head", "x", "--host", "[2001:db8::1]"], "cannot listen on [2001:db8::1]:7860"),
    ],
)
def test_a_wrong_start_is_one_line(capsys, flags, words):
    assert main(["demo", "--target", "./none", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_without_gradio_the_page_names_its_extra(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "eagle_fsd.demo.page", None)
    argv = ["demo", "--target", "./none", "--draft-head", "x", "--port", "0"]
    assert main(argv) == 2
    assert "pip install 'eagle-fsd[demo]'" in capsys.readouterr().err


def test_a_target_without_a_chat_template_is_refused():
    check_chat(scripted([65], byte_tokenizer()))
    with pytest.raises(ValueError, match="needs a target with a chat template"):
        check_chat(scripted([65], byte_tokenizer(None)))
    with pytest.raises(ValueError, match="without a tokenizer"):
        check_chat(scripted([65]))


@pytest.mark.parametrize("host", ["::1", "::"])
def test_the_page_can_listen_on_ipv6(page, host):
    from eagle_fsd.demo.server import open_page

    try:
        port = free_port(host, 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    (url,) = open_page(page, (host, port), share=False)
    try:
        assert url == f"http://[{host}]:{port}/"
        with urllib.request.urlopen(f"http://[::1]:{port}/health", timeout=LONG_S) as response:
            assert response.status == 200
    finally:
        page.blocks.close(verbose=False)


def test_a_port_that_is_taken_at_the_last_moment_is_one_sentence(page):
    from eagle_fsd.demo.server import open_page

    port = free_port("127.0.0.1", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(OSError, match=r"cannot listen on .* choose another --port"):
            open_page(page, ("127.0.0.1", port), share=False)
    page.blocks.close(verbose=False)


def test_a_host_that_no_url_can_hold_is_one_sentence(page, monkeypatch):
    import httpx

    from eagle_fsd.demo.server import open_page

    def launch(**_):
        raise httpx.InvalidURL("Invalid port: ':1'")

    monkeypatch.setattr(page.blocks, "launch", launch)
    with pytest.raises(OSError, match=r"cannot serve .*Invalid port.* another --host or --port"):
        open_page(page, ("127.0.0.1", 1), share=False)


def test_health_needs_no_login_and_the_page_does(page):
    from eagle_fsd.demo.server import open_page

    address = "127.0.0.1", free_port("127.0.0.1", 0)
    (url,) = open_page(page, address, ("me", "secret"), share=False)
    try:
        with urllib.request.urlopen(f"{url}health", timeout=LONG_S) as response:
            assert json.load(response) == {"status": "ok", "requests": 0}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}config", timeout=LONG_S)
    finally:
        page.blocks.close(verbose=False)
