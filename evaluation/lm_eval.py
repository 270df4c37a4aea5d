"""Runs lm-eval's tasks on our decoder: its own command line, with one model more, `eagle_fsd`.

python -m evaluation.lm_eval --model eagle_fsd --tasks gsm8k --limit 4 \
    --model_args target=demo,draft_head=demo,rule=fuzzy:0.3:js

Answers are decoded with the rule, log-likelihoods are the target's own. --model_args takes

    target                     demo, a hub id, a folder or a .gguf file
    draft_head, draft_model    what drafts (not needed with plain=true)
    draft_vocab, tree          as of evaluation.run; a tree is written with colons, tree=16:4:4
    rule, threshold, divergence, budget, plain=true
    dtype, revision, attn_implementation
    device                     auto (default), cpu, cuda, cuda:N or mps; wins over --device, of
                               which lm-eval's own default cuda:0 counts as auto
    max_length                 longest prompt and answer together, below the target's own
    max_gen_toks               of an answer where the task says nothing (default 256)
    add_bos_token              whether prompts begin with it (default as the tokenizer does)
    seed                       of all randomness (default 0)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eagle_fsd.command import run

_HELP = (["-h"], ["--help"])


def evaluate(argv: Sequence[str]) -> None:
    """lm-eval's command with `eagle_fsd` among its models.

    Args:
        argv: lm-eval's words.

    Raises:
        ImportError: when lm-eval is not installed.
        ValueError, TypeError, RuntimeError, OSError: as the model and the tasks.
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        from evaluation import lm_eval_model  # noqa: F401 - importing it registers the model
    except ImportError as error:
        raise ImportError(
            f"this needs the lm-eval package, which does not import ({error}); install "
            "eagle-fsd[lm-eval]"
        ) from error
    with _words(["run", *argv] if list(argv) in _HELP else argv):
        cli_evaluate()


@contextmanager
def _words(argv: Sequence[str]) -> Iterator[None]:
    """Lets lm-eval, which reads nothing else, find `argv` in `sys.argv`."""
    kept = sys.argv
    sys.argv = ["lm-eval", *argv]
    try:
        yield
    finally:
        sys.argv = kept


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in _HELP:
        print(__doc__)
    return run(lambda: evaluate(words))


if __name__ == "__main__":
    raise SystemExit(main())
