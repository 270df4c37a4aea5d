"""What the commands share: their exit statuses, and the flags that name and load the models."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import NoReturn

from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import ATTENTION_IMPLEMENTATIONS

USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ImportError)


class Parser(argparse.ArgumentParser):
    """Tells a wrong flag in one line, as any other error of the user's."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def run(work: Callable[[], object]) -> int:
    """Runs a command's work: its exit status, a user's error in one line on stderr.

    Args:
        work: the command, its flags bound.

    Returns:
        0, 2 after a user's error, 130 after Ctrl-C.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        work()
    except USER_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"error: {message}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that `load_decoder` reads."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", required=True, help="demo, a hub id, a folder or a .gguf file")
    group.add_argument("--draft-head", help="demo, a hub id or a folder in EAGLE's format")
    group.add_argument("--draft-model", help="instead of a head: a small LM, same tokenizer")
    group.add_argument(
        "--draft-vocab", default="auto", help="tokens the head drafts over: full, auto or a number"
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    group.add_argument(
        "--tree", default="auto", help="auto or N,DEPTH,K: draft tokens, levels, children"
    )
    group.add_argument("--revision", help="of a hub id")
    group.add_argument(
        "--attn-implementation", choices=ATTENTION_IMPLEMENTATIONS, help="attention of the target"
    )
    group.add_argument(
        "--packed-weights",
        choices=("auto", "on", "off"),
        default="auto",
        help="on a CPU: faster products, for the memory of the weights again (default auto)",
    )
    group.add_argument(
        "--compile", action="store_true", help="torch.compile, minutes of it before the first token"
    )


def require_drafter(args: argparse.Namespace) -> None:
    """Refuses flags that name nothing that drafts.

    Raises:
        ValueError: without --draft-head and --draft-model.
    """
    if args.draft_head is None and args.draft_model is None:
        raise ValueError(
            "nothing drafts: give --draft-head or --draft-model, or use generate --plain"
        )


def load_decoder(args: argparse.Namespace) -> SpeculativeDecoder:
    """The decoder that the flags of `add_model_arguments` name.

    Raises:
        ValueError, TypeError, FileNotFoundError, RuntimeError: as
            `SpeculativeDecoder.from_pretrained`.
    """
    options = {"revision": args.revision, "attn_implementation": args.attn_implementation}
    return SpeculativeDecoder.from_pretrained(
        args.target,
        draft_head=args.draft_head,
        draft_model=args.draft_model,
        draft_vocab=args.draft_vocab,
        dtype=args.dtype,
        device=args.device,
        tree=args.tree,
        packed_weights={"on": True, "off": False}.get(args.packed_weights, "auto"),
        compile=args.compile,
        **{name: value for name, value in options.items() if value is not None},
    )
