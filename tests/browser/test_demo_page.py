"""The chat page in a real browser, served by a real process.

The target says a known text, whatever came before, so that every answer can be told in advance: the
next token is a function of the last one, and the template ends with the first letter of the
message. A random head drafts, which is nearly always wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from eagle_fsd.checkpoint import save_head
from tests.scripted import THINK, byte_tokenizer
from tests.stubs import tiny_head, tiny_model

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
LONG_MS = 20_000  # a hang fails instead of blocking the suite; nothing here takes a second or two

# Every token comes once; after the last one the text starts again.
CYCLE = "a<b>&\N{GRINNING FACE}\u00e9`*#\ncdefg "
TOKENS = [THINK, *CYCLE.encode()]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}{{ messages[-1]['content'][0] }}{% endif %}"
)


def answer_to(message: str, num_tokens: int) -> str:
    """What the target says."""
    first = TOKENS.index(ord(message[0])) + 1
    spoken = list(itertools.islice(itertools.cycle(TOKENS), first, first + num_tokens))
    data = b"".join(b"<think>" if token == THINK else bytes([token]) for token in spoken)
    return data.decode(errors="replace")  # the last character may be cut in two


def successor_model():
    """A target in which each token is followed by the next one of the cycle."""
    size = 272
    model = tiny_model(
        vocab_size=size, hidden_size=size, num_hidden_layers=6, max_position_embeddings=2048
    )
    following = dict(zip(TOKENS, [*TOKENS[1:], TOKENS[0]], strict=True))
    table = torch.zeros(size, size)
    for token in range(size):
        table[following.get(token, TOKENS[0]), token] = 0.4  # leaves others a few percent
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(table)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    model = successor_model()
    model.save_pretrained(folder / "target")
    byte_tokenizer(TEMPLATE).save_pretrained(folder / "target")
    save_head(tiny_head(model), folder / "head")
    return folder


@pytest.fixture(scope="module")
def url(models):
    """The address of a running page; the process must end cleanly when it is asked to."""
    argv = ["demo", "--target", models / "target", "--draft-head", models / "head"]
    argv += ["--dtype", "float32", "--tree", "4,2,2", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_fsd", *map(str, argv)],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        pytest.fail(process.communicate()[1])
    yield address
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "Error" not in errors


class Tab:
    """One browser tab with the page, its console watched."""

    def __init__(self, browser, url: str, **options) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LONG_MS)
        self.problems: list[str] = []
        # Gradio 5 asks for this one and does without.
        self.context.route("**/iframeResizer*.js", lambda route: route.fulfill(body=""))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._listen)
        self.page.on("request", self._check_address)
        self._url = url
        self.page.goto(url)
        self.message = self.page.get_by_label("Message")
        self.message.wait_for()

    def _listen(self, line) -> None:
        if line.type == "error":
            self.problems.append(line.text)

    def _check_address(self, request) -> None:
        own = (self._url, "data:", "blob:")
        if not request.url.startswith(own) and "iframeResizer" not in request.url:
            self.problems.append(f"asks for {request.url}")

    def longest(self, num_tokens: int) -> None:
        self.page.get_by_label("longest answer, tokens").fill(str(num_tokens))

    def slide(self, position: int | str) -> None:
        self.page.locator("#slider input[type=number]").fill(str(position))
        self.page.keyboard.press("Tab")

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def send(self, text: str) -> None:
        self.message.fill(text)
        self.message.press("Enter")

    def wait(self, condition: str) -> None:
        self.page.wait_for_function(condition)

    def wait_for_answers(self, count: int) -> None:
        self.wait(f"document.querySelectorAll('#transcript .answer').length === {count}")

    def wait_for_text(self, selector: str, text: str) -> None:
        self.page.locator(selector).get_by_text(text).first.wait_for()

    def live_text(self) -> str:
        return self.page.evaluate("document.querySelector('#live .text')?.textContent ?? ''")

    def wait_for_live(self, length: int) -> None:
        self.wait(f"document.querySelector('#live .text')?.textContent.length > {length}")

    def answers(self) -> list[str]:
        """Texts of all answers, tooltips left out."""
        return self.page.evaluate(
            """[...document.querySelectorAll('#transcript .answer .text')].map(text => {
                const copy = text.cloneNode(true);
                copy.querySelectorAll('.tip').forEach(tip => tip.remove());
                return copy.textContent;
            })"""
        )

    def messages(self) -> list[str]:
        return self.page.evaluate(
            """[...document.querySelectorAll('#transcript .message')].map(
                message => message.lastChild.textContent)"""
        )


@pytest.fixture
def open_tab(browser, url):
    tabs: list[Tab] = []

    def open_one(**options) -> Tab:
        tabs.append(Tab(browser, url, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.context.close()
    assert [tab.problems for tab in tabs] == [[] for _ in tabs]


def test_two_messages_are_answered_as_they_are_written(open_tab):
    tab = open_tab()
    tab.longest(300)
    tab.send("a first")
    seen = [""]
    deadline = time.monotonic() + LONG_MS / 1000
    while len(tab.answers()) < 1 and time.monotonic() < deadline:
        seen.append(tab.live_text())
    grown = [text for text in dict.fromkeys(seen) if text]
    whole = answer_to("a first", 300)
    assert len(grown) >= 3
    # Whole characters, and markup as it was written, at every moment.
    assert all(whole.startswith(text) for text in grown)
    assert tab.answers() == [whole]
    tab.longest(20)
    tab.send("b second <i>")
    tab.wait_for_answers(2)
    assert tab.answers() == [whole, answer_to("b", 20)]
    assert tab.messages() == ["a first", "b second <i>"]
    assert tab.message.input_value() == ""
    figures = tab.page.locator("#figures").inner_text()
    assert re.match(r"[\d.]+ tokens/s · acceptance length 1\.\d\d · 0% rescued · 20 tok", figures)
    assert tab.page.locator("#tree svg g").count() > 1
    assert tab.page.locator("#tree svg g.taken").count() >= 1
    assert tab.page.locator("#transcript .tok.bonus").count() >= 2
    assert tab.page.locator("#transcript .tok.recovered").count() > 2


def test_stop_keeps_the_text_and_the_next_message_is_answered(open_tab):
    tab = open_tab()
    tab.longest(1500)
    tab.send("a long one")
    tab.wait_for_live(20)
    tab.press("Stop")
    tab.wait_for_answers(1)
    (stopped,) = tab.answers()
    assert 20 < len(stopped) < 1000
    assert answer_to("a", 1500).startswith(stopped)
    tab.wait_for_text("#transcript", "stopped")
    tab.longest(10)
    tab.send("c next")
    tab.wait_for_answers(2)
    assert tab.answers() == [stopped, answer_to("c", 10)]
    tab.longest(12)
    tab.press("Retry")
    last = "[...document.querySelectorAll('#transcript .answer .text')].at(-1)?.textContent"
    tab.wait(f"{last} === {json.dumps(answer_to('c', 12))}")
    assert tab.messages() == ["a long one", "c next"]
    tab.press("Clear")
    tab.wait_for_answers(0)
    tab.send(" ")
    tab.wait_for_text("#status", "write a message first")


def test_two_sessions_take_turns_and_do_not_mix(open_tab):
    first, second = open_tab(), open_tab()
    first.longest(1500)
    first.send("a mine")
    first.wait_for_live(5)
    second.longest(15)
    second.send("d yours")
    second.wait_for_text("#status", "waiting: 1 request before this one")
    assert second.answers() == []
    second.press("Stop")
    second.wait_for_answers(1)  # at once, not in its turn
    assert second.answers() == [""]
    assert first.answers() == []
    second.press("Retry")
    second.wait_for_text("#status", "waiting: 1 request before this one")
    first.press("Stop")
    first.wait_for_answers(1)
    second.wait_for_answers(1)
    assert second.answers() == [answer_to("d", 15)]
    assert (first.messages(), second.messages()) == (["a mine"], ["d yours"])
    first.longest(15)
    first.send("e mine too")
    second.send("f yours too")
    first.wait_for_answers(2)
    second.wait_for_answers(2)
    assert first.answers()[1:] == [answer_to("e", 15)]
    assert second.answers()[1:] == [answer_to("f", 15)]


def test_closing_the_tab_frees_the_target(open_tab):
    leaver, other = open_tab(), open_tab()
    leaver.longest(1900)
    began = time.monotonic()
    leaver.send("a")
    leaver.wait_for_live(100)
    whole_s = (time.monotonic() - began) * 1900 / 100  # at most: it went on growing meanwhile
    other.longest(5)
    other.send("b")
    other.wait_for_text("#status", "waiting: 1 request before this one")
    leaver.page.close()
    left = time.monotonic()
    other.wait_for_answers(1)
    assert time.monotonic() - left < whole_s / 3
    leaver.problems.clear()  # its connection was cut


def test_the_slider_rescues_and_a_rescued_token_tells_why(open_tab):
    tab = open_tab()
    tab.longest(30)
    tab.slide(100)
    tab.wait_for_text("#rule", "rule: fuzzy:inf:js")
    tab.send("a")
    tab.wait_for_answers(1)
    rescued = tab.page.locator("#transcript .tok.rescued")
    tip = rescued.first.locator(".tip")
    assert not tip.is_visible()
    rescued.first.hover()
    assert re.fullmatch(
        r"the target's own choice: b with p = 0\.\d+; this token: p = [\d.e-]+, "
        r"draft q = [\d.e-]+; js here: 0\.\d+ nats",
        tip.inner_text(),
    )
    tab.page.mouse.move(0, 0)
    rescued.last.focus()
    rescued.last.locator(".tip").wait_for()
    assert "% rescued" in tab.page.locator("#figures").inner_text()
    assert "nats of regret spent" in tab.page.locator("#figures").inner_text()
    (text,) = tab.answers()
    tab.page.get_by_label("colour tokens by origin").uncheck()
    tab.wait("!document.querySelector('#transcript .tok')")
    assert tab.answers() == [text]
    tab.slide(0)
    tab.wait_for_text("#rule", "rule: exact")
    tab.send("a")
    tab.wait_for_answers(2)
    assert tab.answers()[1] == answer_to("a", 30)
    assert text != tab.answers()[1]


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_the_tip_of_a_rescued_token_is_never_cut_off(open_tab, width):
    tab = open_tab(viewport={"width": width, "height": 800})
    tab.longest(6)
    tab.slide(100)
    tab.wait_for_text("#rule", "rule: fuzzy:inf:js")
    tab.send("a")
    tab.wait_for_answers(1)
    for token in tab.page.locator("#transcript .tok.rescued").all():
        token.focus()
        token.locator(".tip").wait_for()
        # Seen at all four corners: inside the window, and nothing lies over it or cuts it.
        corners = token.locator(".tip").evaluate(
            """tip => {
                const {left, right, top, bottom} = tip.getBoundingClientRect();
                return [[left + 6, top + 6], [right - 6, top + 6], [left + 6, bottom - 6],
                        [right - 6, bottom - 6]].map(([x, y]) =>
                    document.elementFromPoint(x, y) === tip);
            }"""
        )
        assert corners == [True] * 4


def test_a_number_that_the_slider_does_not_have_is_told_as_what_it_becomes(open_tab):
    tab = open_tab()
    tab.longest(6)
    for typed, number, rule in (
        ("150", "100", "rule: fuzzy:inf:js"),
        ("", "0", "rule: exact"),
        ("50", "50", "rule: fuzzy:0.3466:js"),
        ("-5", "0", "rule: exact"),
    ):
        tab.slide(typed)
        tab.wait_for_text("#rule", rule)
        tab.page.wait_for_function(
            "number => document.querySelector('#slider input[type=number]').value === number",
            arg=number,
        )
        tab.send("a")
        tab.wait_for_answers(1)
        tab.wait_for_text("#figures", rule.replace(":", "", 1))
        assert tab.page.locator("#rule").inner_text() == rule
        tab.press("Clear")
        tab.wait_for_answers(0)


def test_what_is_pressed_while_an_answer_is_written_is_refused_in_words(open_tab):
    tab = open_tab()
    tab.longest(1900)
    tab.send("a")
    tab.wait_for_live(5)
    for name in ("Send", "Retry", "Compare"):
        tab.message.fill("b")
        tab.press(name)
        tab.wait_for_text("#status", "an answer is still being written; stop it first")
        length = len(tab.live_text())
        tab.wait_for_live(length + 20)
        assert "stop it first" in tab.page.locator("#status").inner_text()
        assert tab.message.input_value() == "b"
    tab.press("Clear")
    tab.wait_for_answers(0)
    tab.page.wait_for_timeout(500)  # what was on its way has arrived
    assert tab.live_text() == ""
    assert tab.page.locator("#status").inner_text().strip() == ""
    tab.longest(5)
    tab.send("c")
    tab.wait_for_answers(1)
    assert tab.answers() == [answer_to("c", 5)]


def test_compare_shows_both_side_by_side(open_tab):
    tab = open_tab()
    tab.longest(25)
    tab.message.fill("a")
    tab.press("Compare")
    tab.wait_for_text("#comparison", "the two texts are identical")
    columns = tab.page.locator("#comparison section")
    assert columns.locator("h3").all_inner_texts() == ["plain decoding", "draft tree, exact"]
    assert all(re.fullmatch(r"\d+\.\d\d s", t) for t in columns.locator(".time").all_inner_texts())
    texts = [column.text_content() for column in columns.locator(".text").all()]
    assert texts == [answer_to("a", 25)] * 2
    left, right = (column.bounding_box() for column in columns.all())
    assert left["x"] + left["width"] <= right["x"]
    assert tab.answers() == []
    assert tab.message.input_value() == "a"


def test_a_chat_goes_on_past_the_context_limit(open_tab):
    tab = open_tab()
    tab.longest(8)
    for count in range(1, 4):
        tab.send("a" * 900)
        tab.wait_for_answers(count)
    assert tab.answers() == [answer_to("a", 8)] * 3
    tab.wait_for_text("#transcript", "reached the target's context limit")
    tab.send("a" * 2100)
    tab.wait_for_text("#transcript", "the target's context is 2048")
    tab.send("b")
    tab.wait_for_answers(5)
    assert tab.answers()[-1] == answer_to("b", 8)


def test_a_phone_and_the_keyboard_alone_are_enough(open_tab):
    tab = open_tab(viewport={"width": 390, "height": 800})

    def tab_to(test: str) -> None:
        for _ in range(60):
            if tab.page.evaluate(f"(element => {test})(document.activeElement)"):
                return
            tab.page.keyboard.press("Tab")
        pytest.fail(f"the keyboard does not reach {test}")

    tab_to("element.matches('#message textarea')")
    tab.page.keyboard.type("a by keyboard")
    tab_to("element.closest('#slider')")
    tab.page.keyboard.press("ArrowUp")  # the same in its number and in the slider itself
    tab.wait_for_text("#rule", "rule: fuzzy:0.006931:js")
    tab_to("element.matches('#longest input')")
    tab.page.keyboard.press("Control+a")
    tab.page.keyboard.type("1500")
    tab_to("element.id === 'send' || element.closest('#send')")
    tab.page.keyboard.press("Enter")
    tab.wait_for_live(5)
    tab_to("element.id === 'stop' || element.closest('#stop')")
    tab.page.keyboard.press("Enter")
    tab.wait_for_answers(1)
    assert len(tab.answers()[0]) < 1000
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("Send", "Stop", "Retry", "Clear", "Compare"):
        box = tab.page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_twenty_requests_of_five_clients_are_answered_in_order_and_apart(url):
    from gradio_client import Client

    sent = {letter: [f"{letter} number {n}" for n in range(4)] for letter in "acdeg"}
    shown: dict[str, str] = {}

    def chat(letter: str) -> None:
        client = Client(url, verbose=False)
        settings = (0, "fuzzy", "js", 0, 1, "auto", 12, "")
        for message in sent[letter]:
            shown[letter] = client.predict(message, *settings, api_name="/send")[0]

    threads = [threading.Thread(target=chat, args=(letter,)) for letter in sent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for letter, messages in sent.items():
        html = shown[letter] if isinstance(shown[letter], str) else shown[letter]["value"]
        assert re.findall(r"You</b>(.*?)</div>", html) == messages
        answers = re.findall(r'<div class="text">(.*?)</div>', html, flags=re.DOTALL)
        texts = [re.sub(r"<[^>]+>", "", answer) for answer in answers]
        escaped = answer_to(letter, 12).replace("&", "&amp;")
        assert texts == [escaped.replace("<", "&lt;").replace(">", "&gt;")] * 4
    with urllib.request.urlopen(f"{url}health", timeout=10) as response:
        assert json.load(response) == {"status": "ok", "requests": 0}
