"""The Gradio page: components, and which function answers which event."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any, Final

import gradio as gr

from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.demo.answer import Answer
from eagle_fsd.demo.render import (
    comparison_html,
    error_text,
    figures_html,
    legend_html,
    pending_html,
    status_html,
    turns_html,
    waiting_text,
)
from eagle_fsd.demo.session import Session, Sessions, ending_text
from eagle_fsd.demo.settings import MAX_SLIDER, Settings, offered, written_rule
from eagle_fsd.demo.tree_view import tree_html
from eagle_fsd.demo.worker import Job, Worker

TITLE: Final = "eagle-fsd"
_REFRESH_S: Final = 0.12
_TREES: Final = ("auto", "8,3,3", "16,4,4", "32,5,6", "59,6,10")
EXAMPLES: Final = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Give me three tips for learning a language.",
)
# One value for each output of a request, see `Page._outputs`.
View = tuple[Any, ...]
Start = Callable[[Session], Job]


def accepted_by(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that a function has: Gradio 6 takes some elsewhere than Gradio 5."""
    return {
        name: value
        for name, value in options.items()
        if name in inspect.signature(function).parameters
    }


def looks() -> dict[str, Any]:
    """Style of the page; system fonts only, so that nothing is fetched from elsewhere."""
    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]
    return {
        "theme": gr.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"]),
        "css": files("eagle_fsd.demo").joinpath("page.css").read_text(encoding="utf-8"),
    }


def open_slider(lowest: float, highest: float, value: float, **options: Any) -> gr.Slider:
    """A slider whose number box takes anything, as the page itself does.

    The page moves a number out of range to the nearer end, and an empty box to the lower one, but
    it tells the old number first and nothing after. Gradio would refuse that one, and what follows
    from the slider would stay as it was.
    """
    slider = gr.Slider(lowest, highest, value, **options)
    preprocess = slider.preprocess

    def nearest(number: float | None) -> Any:
        return preprocess(lowest if number is None else min(max(number, lowest), highest))

    # A subclass would be the way, but Gradio writes a stub file beside each one's module.
    slider.preprocess = nearest
    return slider


class Page:
    """Builds the page around one decoder.

    Args:
        worker: runs the requests.
        decoder: what it can serve is what the page offers.
        name: what the page says it runs on.

    Attributes:
        worker: runs the requests.
        blocks: what Gradio serves.
    """

    def __init__(self, worker: Worker, decoder: SpeculativeDecoder, name: str) -> None:
        self.worker = worker
        self._sessions = Sessions()
        self.blocks = gr.Blocks(
            title=TITLE,
            analytics_enabled=False,
            fill_width=True,
            **accepted_by(gr.Blocks.__init__, looks()),
        )
        with self.blocks:
            gr.HTML(f"<h1>{TITLE}</h1>{status_html(name)}")
            with gr.Row():
                with gr.Column(scale=3, min_width=320):
                    self._build_chat()
                with gr.Column(scale=1, min_width=280):
                    self._build_settings(*offered(decoder))
            self._connect()

    def _build_chat(self) -> None:
        # The outer column scrolls and starts at its end, so that new text stays in view.
        with gr.Column(elem_id="chat"), gr.Column():
            self._transcript = gr.HTML(turns_html([], 0, is_coloured=True), elem_id="transcript")
            self._live = gr.HTML("", elem_id="live")
        self._figures = gr.HTML(figures_html(Answer()), elem_id="figures")
        self._status = gr.HTML(status_html(""), elem_id="status")
        self._message = gr.Textbox(
            label="Message",
            placeholder="Enter sends, Shift+Enter makes a new line",
            lines=1,
            max_lines=8,
            elem_id="message",
        )
        with gr.Row(elem_id="buttons"):
            self._send = gr.Button("Send", variant="primary", min_width=80, elem_id="send")
            self._stop = gr.Button("Stop", variant="stop", min_width=80, elem_id="stop")
            self._retry = gr.Button("Retry", min_width=80, elem_id="retry")
            self._clear = gr.Button("Clear", min_width=80, elem_id="clear")
            self._compare = gr.Button("Compare", min_width=80, elem_id="compare")
        gr.Examples([[text] for text in EXAMPLES], [self._message], label="Examples")
        self._comparison = gr.HTML("", elem_id="comparison")
        self._tree = gr.HTML(tree_html(None), elem_id="tree")

    def _build_settings(self, rules: list[str], divergences: list[str]) -> None:
        self._position = open_slider(
            0,
            MAX_SLIDER,
            0,
            step=1,
            label="0: exactly the target, 100: as fast as it goes",
            elem_id="slider",
        )
        self._rule_line = gr.HTML(status_html("rule: exact"), elem_id="rule")
        self._is_coloured = gr.Checkbox(True, label="colour tokens by origin", elem_id="colours")
        gr.HTML(legend_html())
        defaults = Settings()
        with gr.Accordion("Settings, from the next message on", open=True):
            self._rule = gr.Dropdown(rules, value=rules[0], label="rule")
            self._divergence = gr.Dropdown(
                divergences or [defaults.divergence],
                value=(divergences or [defaults.divergence])[0],
                label="divergence (fuzzy)",
            )
            self._temperature = open_slider(
                0, 2, defaults.temperature, step=0.05, label="temperature"
            )
            self._top_p = open_slider(0.05, 1, defaults.top_p, step=0.05, label="top-p")
            self._size = gr.Dropdown(
                list(_TREES),
                value=defaults.tree,
                allow_custom_value=True,
                label="tree: auto or tokens,depth,children",
            )
            self._longest = gr.Number(
                defaults.max_new_tokens,
                precision=0,
                minimum=1,
                label="longest answer, tokens",
                elem_id="longest",
            )
            self._system = gr.Textbox(label="system prompt", lines=2, elem_id="system")

    @property
    def _inputs(self) -> list[Any]:
        """What `Settings.from_page` reads."""
        return [
            self._position,
            self._rule,
            self._divergence,
            self._temperature,
            self._top_p,
            self._size,
            self._longest,
            self._system,
        ]

    @property
    def _outputs(self) -> list[Any]:
        """What a request changes."""
        return [
            self._transcript,
            self._live,
            self._status,
            self._figures,
            self._tree,
            self._comparison,
            self._message,
        ]

    def _connect(self) -> None:
        quiet = {"show_progress": "hidden"}
        request: dict[str, Any] = {
            "outputs": self._outputs,
            "concurrency_limit": None,
            "trigger_mode": "multiple",  # a second one is refused in words, not swallowed
            **quiet,
        }
        sent = [self._message, *self._inputs]
        gr.on(
            [self._message.submit, self._send.click],
            self._on_send,
            sent,
            api_name="send",
            **request,
        )
        self._retry.click(self._on_retry, self._inputs, api_name="retry", **request)
        self._compare.click(self._on_compare, sent, api_name="compare", **request)
        self._stop.click(self._on_stop, None, self._status, api_name="stop", **quiet)
        self._clear.click(self._on_clear, None, self._outputs, api_name="clear", **quiet)
        self._is_coloured.change(
            self._on_colours, self._is_coloured, self._transcript, api_name="colours", **quiet
        )
        gr.on(
            [
                self._position.change,
                self._position.release,
                self._rule.change,
                self._divergence.change,
            ],
            _rule_line,
            [self._position, self._rule, self._divergence],
            self._rule_line,
            api_name="rule",
            trigger_mode="always_last",  # never the line of a place that was left
            **quiet,
        )
        self.blocks.unload(self._on_leave)

    def _session(self, request: gr.Request) -> Session:
        return self._sessions.get(str(request.session_hash))

    async def _on_send(
        self, request: gr.Request, message: str | None, *settings: Any
    ) -> AsyncIterator[View]:
        def start(session: Session) -> Job:
            return session.ask(self.worker, message or "", Settings.from_page(*settings))

        async for view in self._follow(request, start, takes_message=True):
            yield view

    async def _on_retry(self, request: gr.Request, *settings: Any) -> AsyncIterator[View]:
        def start(session: Session) -> Job:
            return session.retry(self.worker, Settings.from_page(*settings))

        async for view in self._follow(request, start):
            yield view

    async def _on_compare(
        self, request: gr.Request, message: str | None, *settings: Any
    ) -> AsyncIterator[View]:
        def start(session: Session) -> Job:
            return session.compare(self.worker, message or "", Settings.from_page(*settings))

        async for view in self._follow(request, start):
            yield view

    async def _follow(
        self, request: gr.Request, start: Start, *, takes_message: bool = False
    ) -> AsyncIterator[View]:
        """Starts a job and shows it until it is done; if the page goes away, so does the job."""
        session = self._session(request)
        try:
            job = start(session)
        except (ValueError, TypeError, RuntimeError) as error:
            yield self._view(status=status_html(error_text(error), is_problem=True))
            return
        try:
            if takes_message:
                yield self._view(message="", transcript=self._turns(session))
            seen: tuple[object, ...] = ()
            status = ""
            while not job.is_done and session.last is job:
                now = (job.look(), self._writing_text(job), session.is_coloured)
                if now != seen:
                    # The same status again would wipe the refusal of another request.
                    is_new = now[1] != status
                    seen, status = now, now[1]
                    yield self._progress(session, job, status if is_new else None)
                await asyncio.sleep(_REFRESH_S)
            session.settle(job)
            yield self._ending(session, job)
        finally:
            job.stop()
            session.settle(job)

    def _writing_text(self, job: Job) -> str:
        return waiting_text(self.worker.num_before(job)) or "writing; Stop ends it"

    def _progress(self, session: Session, job: Job, status: str | None) -> View:
        """A job on its way; the status stays as it is for None."""
        answers, is_coloured = job.look(), session.is_coloured
        answer = answers[-1] if answers else Answer()
        shown: dict[str, Any] = {"figures": figures_html(answer), "live": ""}
        if status is not None:
            shown["status"] = status_html(status)
        if answer.tree is not None:
            shown["tree"] = tree_html(answer.tree)
        if job.request.is_comparison:
            shown["comparison"] = self._compared(session, job)
        else:
            message = job.request.message
            shown["live"] = pending_html(message, answer, is_coloured=is_coloured)
        return self._view(**shown, transcript=self._turns(session))

    def _ending(self, session: Session, job: Job) -> View:
        """The page when a job is done with: its end, unless the chat has gone on without it.

        A view made before that may arrive after what the chat went on with, so what is the case by
        now is shown once more.
        """
        if session.last is None:
            return self._cleared(session)
        if session.last is not job:
            newer = session.job
            return (
                self._view()
                if newer is None
                else self._progress(session, newer, self._writing_text(newer))
            )
        answer = job.answers[-1] if job.answers else Answer()
        note = ending_text(job)
        shown: dict[str, Any] = {"status": status_html(note, is_problem=job.error is not None)}
        if answer.tokens:
            shown["figures"] = figures_html(answer)
        if answer.tree is not None:
            shown["tree"] = tree_html(answer.tree)
        if job.request.is_comparison:
            shown["comparison"] = self._compared(session, job)
        else:
            shown |= {"live": "", "transcript": self._turns(session)}
        return self._view(**shown)

    def _compared(self, session: Session, job: Job) -> str:
        plain, tree = (*job.answers, None, None)[:2]
        return comparison_html(
            job.request.message,
            plain or Answer(rule="plain"),
            tree,
            is_coloured=session.is_coloured,
        )

    def _turns(self, session: Session) -> str:
        return turns_html(session.turns, session.num_forgotten, is_coloured=session.is_coloured)

    def _view(self, **shown: Any) -> View:
        """One value for each output; what is not named stays as it is."""
        names = ("transcript", "live", "status", "figures", "tree", "comparison", "message")
        return tuple(shown.get(name, gr.update()) for name in names)

    def _on_stop(self, request: gr.Request) -> str:
        session = self._session(request)
        session.stop()
        return status_html("stopped" if session.job else "nothing is being written")

    def _on_clear(self, request: gr.Request) -> View:
        session = self._session(request)
        session.clear()
        return self._cleared(session, message="")

    def _cleared(self, session: Session, **shown: Any) -> View:
        return self._view(
            transcript=self._turns(session),
            live="",
            status=status_html(""),
            figures=figures_html(Answer()),
            tree=tree_html(None),
            comparison="",
            **shown,
        )

    def _on_colours(self, is_coloured: bool, request: gr.Request) -> str:
        session = self._session(request)
        session.is_coloured = is_coloured
        return self._turns(session)

    def _on_leave(self, request: gr.Request) -> None:
        self._sessions.leave(str(request.session_hash))


def _rule_line(position: float, rule: str, divergence: str) -> str:
    return status_html(f"rule: {written_rule(rule, divergence, position)}")
