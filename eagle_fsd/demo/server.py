"""Starts the page, and ends it when the process is asked to."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from eagle_fsd.command import add_model_arguments, load_decoder, require_drafter
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.demo.worker import Worker

if TYPE_CHECKING:  # Gradio is an extra
    from eagle_fsd.demo.page import Page

AUTH: Final = "EAGLE_FSD_DEMO_AUTH"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that `serve` reads."""
    add_model_arguments(parser)
    group = parser.add_argument_group("page", f"{AUTH}=user:password asks visitors for both")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (this machine)")
    group.add_argument("--port", type=int, default=7860, help="0 takes a free one")
    group.add_argument(
        "--share", action="store_true", help="also open a public tunnel, by Gradio's servers"
    )


def serve(args: argparse.Namespace) -> None:
    """Serves the page until SIGTERM or Ctrl-C.

    Raises:
        ImportError: Gradio is not installed.
        OSError: the port is taken or the address is not of this machine.
        ValueError: nothing drafts, the target has no tokenizer or no chat template, or the login is
            malformed.
    """
    require_drafter(args)
    login = read_login(os.environ)
    host = args.host.strip().removeprefix("[").removesuffix("]")  # as URLs write IPv6
    port = free_port(host, args.port)
    try:
        from eagle_fsd.demo.page import Page
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the page needs {error.name}; install it with pip install 'eagle-fsd[demo]'"
        ) from error
    decoder = load_decoder(args)
    check_chat(decoder)
    warm_up(decoder)
    drafter = args.draft_head or args.draft_model
    worker = Worker(decoder)
    page = Page(worker, decoder, f"target {args.target}, drafts by {drafter}")
    try:
        for url in open_page(page, (host, port), login, share=args.share):
            sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        _wait_for_signal()
    finally:
        worker.close()
        page.blocks.close(verbose=False)


def check_chat(decoder: SpeculativeDecoder) -> None:
    """Whether its target can chat.

    Raises:
        ValueError: without a tokenizer or without a chat template, which the second message and a
            system prompt need.
    """
    if decoder.tokenizer is None:
        raise ValueError("the page needs text and this target came without a tokenizer")
    if not getattr(decoder.tokenizer, "chat_template", None):
        raise ValueError(
            "the chat page needs a target with a chat template and this one's tokenizer has none; "
            "choose an instruction-tuned target"
        )


def warm_up(decoder: SpeculativeDecoder) -> None:
    """A few tokens both ways, so that the first visitor's figures are not those of a cold start."""
    decoder.plain("Hello", max_new_tokens=4)
    decoder.generate("Hello", max_new_tokens=4, rule="exact")


def read_login(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """User and password that visitors must give, None for no login.

    Raises:
        ValueError: when the variable is not user:password.
    """
    text = environment.get(AUTH, "")
    if not text:
        return None
    user, _, password = text.partition(":")
    user = user.strip()  # as Gradio does with what visitors type
    if not user or not password:
        raise ValueError(f"{AUTH} must be user:password, both of at least one character")
    return user, password


def free_port(host: str, port: int) -> int:
    """The port, once it is known to be free; for 0 a free one.

    Args:
        host: a name or an address of this machine, IPv6 without brackets.
        port: 0 to 65535.

    Raises:
        ValueError: for a number that is no port, or no host.
        OSError: when it is taken, or the address is not of this machine.
    """
    if not host:
        raise ValueError("--host must be an address of this machine, got none")
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be in 0..65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:  # the latter for a name that is none
            raise _refusal(host, port, error) from error
        return int(probe.getsockname()[1])


def _refusal(host: str, port: int, error: Exception) -> OSError:
    """One sentence for an address that cannot be served, with the flag to change."""
    number = getattr(error, "errno", None)
    is_port = number in (errno.EADDRINUSE, errno.EACCES)
    way_out = "choose another --port" if is_port else "--host must be an address of this machine"
    reason = getattr(error, "strerror", None) or str(error)
    return OSError(f"cannot listen on {in_url(host)}:{port}: {reason}; {way_out}")


def in_url(host: str) -> str:
    """The host as a URL has it, and as Gradio takes it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def open_page(
    page: Page, address: tuple[str, int], login: tuple[str, str] | None = None, *, share: bool
) -> list[str]:
    """Begins to serve, in a thread of its own; the page's URLs, the public one last.

    `/health` answers without a login.

    Raises:
        OSError: when the port was taken meanwhile, or the page cannot be reached at the address.
    """
    import httpx
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from eagle_fsd.demo.page import accepted_by, looks

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "requests": page.worker.num_jobs})

    blocks = page.blocks
    extra = looks() | {"ssr_mode": False, "show_api": False, "footer_links": []}
    blocks.queue(default_concurrency_limit=None)
    host, port = address
    try:
        _, *urls = blocks.launch(
            server_name=in_url(host),
            server_port=port,
            auth=login,
            share=share,
            prevent_thread_lock=True,
            quiet=True,
            app_kwargs={"routes": [Route("/health", health)]},
            **accepted_by(blocks.launch, extra),
        )
    except (OSError, httpx.InvalidURL, httpx.TransportError) as error:
        if isinstance(error, OSError):  # Gradio does not say what is the matter
            free_port(host, port)
        raise OSError(
            f"cannot serve the page on {in_url(host)}:{port}: {error}; choose another --host or "
            "--port"
        ) from error
    return [url for url in urls if url]


def _wait_for_signal() -> None:
    asked = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: asked.set())
    asked.wait()
