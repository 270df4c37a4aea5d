"""Commands: `python -m eagle_fsd generate|compare|calibrate|demo|inspect|fetch`.

python -m eagle_fsd generate --target demo --draft-head demo --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from eagle_fsd.acceptance import add_rule_arguments, rule_from_args
from eagle_fsd.calibrate import calibrate, grids, make_folder, read_prompts, save
from eagle_fsd.checkpoint import (
    check_fit,
    describe_head,
    load_head,
    load_target_config,
    locate_head,
)
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import GenerationResult, SpeculativeDecoder, Step
from eagle_fsd.default_target import ensure_default_target
from eagle_fsd.demo import server
from eagle_fsd.errors import UnsupportedModelError
from eagle_fsd.target import FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; a user's error is one line on stderr and status 2."""
    args = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = args.command
    return run(lambda: command(args))


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = Parser(prog="python -m eagle_fsd", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="answer one prompt; the text streams as it is made"
    )
    add_model_arguments(generate)
    _add_request_arguments(generate)
    add_rule_arguments(generate)
    generate.add_argument(
        "--plain", action="store_true", help="plain decoding, without a draft tree"
    )
    generate.add_argument(
        "--json", action="store_true", help="print the result and its figures as one JSON object"
    )
    generate.set_defaults(command=_generate)

    compare = commands.add_parser(
        "compare", help="answer one prompt with plain decoding and with the tree"
    )
    add_model_arguments(compare)
    _add_request_arguments(compare)
    add_rule_arguments(compare)
    compare.add_argument(
        "--json", action="store_true", help="print both results as one JSON object"
    )
    compare.set_defaults(command=_compare)

    _add_calibrate(commands)

    demo = commands.add_parser("demo", help="a chat page that shows the trade")
    server.add_arguments(demo)
    demo.set_defaults(command=server.serve)

    inspect = commands.add_parser(
        "inspect", help="say what a draft head is, and whether it fits a target"
    )
    inspect.add_argument("head", help="demo, a hub id or a folder")
    inspect.add_argument("--target", help="demo, a hub id, a folder or a .gguf file")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(command=_inspect)

    fetch = commands.add_parser(
        "fetch", help="fetch and convert the default target, when it is not there yet"
    )
    fetch.set_defaults(command=_fetch)
    return parser


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate", help="predict speed and cost of rules on one's own prompts, and pick a knob"
    )
    add_model_arguments(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument("--prompts", required=True, help="FastChat questions, JSON lines or text")
    group.add_argument("--limit", type=int, help="prompts read at most")
    group.add_argument("--rule", default="fuzzy", help="one or several, by commas (default fuzzy)")
    group.add_argument("--divergence", default="", help="of rules that have one; several by commas")
    group.add_argument(
        "--knobs", default="", help="numbers separated by commas, instead of the grid"
    )
    group.add_argument("--max-new-tokens", type=int, default=128)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--output", required=True, help="folder for calibration.json and .png")
    wishes = parser.add_argument_group("wish (one of these picks a knob)")
    wish = wishes.add_mutually_exclusive_group()
    wish.add_argument("--max-kl-per-token", type=float, metavar="NATS", help="when sampling")
    wish.add_argument("--max-regret-per-token", type=float, metavar="NATS", help="at temperature 0")
    wish.add_argument("--acceptance-gain", metavar="PERCENT", help="for example 20%%")
    SamplingConfig.add_arguments(parser)
    parser.set_defaults(command=_calibrate)


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("request")
    group.add_argument(
        "--prompt", required=True, help="one user message, or - to read it from standard input"
    )
    group.add_argument("--system", help="system message")
    group.add_argument("--max-new-tokens", type=int, default=256)
    group.add_argument(
        "--stop", action="append", default=[], help="stop string; may be given several times"
    )
    group.add_argument("--seed", type=int, default=0)
    SamplingConfig.add_arguments(parser)


def _request_options(args: argparse.Namespace) -> dict[str, Any]:
    sampling = dataclasses.asdict(SamplingConfig.from_args(args))
    return sampling | {"max_new_tokens": args.max_new_tokens, "stop": args.stop, "seed": args.seed}


def _messages(args: argparse.Namespace) -> list[dict[str, str]]:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": prompt}]


def _generate(args: argparse.Namespace) -> None:
    rule = rule_from_args(args)
    messages, options = _messages(args), _request_options(args)
    if not args.plain:
        require_drafter(args)
    decoder = load_decoder(args)
    if args.plain:
        result = decoder.plain(messages, rule=rule, **options)
        if not args.json:
            _write(result.text)
    else:
        result = _stream(decoder, messages, show=not args.json, rule=rule, **options)
    if args.json:
        _print_json(_as_json(result))
    else:
        _write(f"\n\n{_summary(result)}\n")


def _stream(
    decoder: SpeculativeDecoder, messages: Any, *, show: bool, **options: Any
) -> GenerationResult:
    step: Step | None = None
    for step in decoder.stream(messages, **options):
        if show:
            _write(step.text)
    assert step is not None
    assert step.result is not None
    return step.result


def _compare(args: argparse.Namespace) -> None:
    rule = rule_from_args(args)
    messages, options = _messages(args), _request_options(args)
    require_drafter(args)
    decoder = load_decoder(args)
    warm_up = {"max_new_tokens": min(8, args.max_new_tokens)}
    # With its tree given, a decoder drafts even where it knows plain decoding to be faster.
    drafting = options | {"rule": rule, "tree": decoder.tree}
    decoder.plain(messages, **options | warm_up)
    decoder.generate(messages, **drafting | warm_up)
    if args.json:
        plain = decoder.plain(messages, **options)
        tree = decoder.generate(messages, **drafting)
        ratio = tree.stats.tokens_per_second / plain.stats.tokens_per_second
        _print_json({"plain": _as_json(plain), "tree": _as_json(tree), "ratio": ratio})
        return
    _write("--- plain decoding\n")
    plain = decoder.plain(messages, **options)
    _write(f"{plain.text}\n\n{_summary(plain)}\n\n--- EAGLE-2, {rule.spec}\n")
    tree = _stream(decoder, messages, show=True, **drafting)
    ratio = tree.stats.tokens_per_second / plain.stats.tokens_per_second
    same = "identical" if tree.token_ids == plain.token_ids else "different"
    _write(
        f"\n\n{_summary(tree)}\n\nthe two texts are {same}; EAGLE-2 / plain tokens per second: "
        f"{ratio:.2f}\n"
    )


def _calibrate(args: argparse.Namespace) -> None:
    sampling = SamplingConfig.from_args(args)
    gain = _share(args.acceptance_gain) if args.acceptance_gain is not None else None
    if sampling.is_greedy and args.max_kl_per_token is not None:
        raise ValueError(
            "--max-kl-per-token needs a temperature above 0; use --max-regret-per-token"
        )
    if not sampling.is_greedy and args.max_regret_per_token is not None:
        raise ValueError("--max-regret-per-token needs temperature 0; use --max-kl-per-token")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be >= 1, got {args.limit}")
    knobs = [_number("--knobs", knob) for knob in _split(args.knobs)]
    divergences = _split(args.divergence)
    rules = grids(_split(args.rule), divergences, knobs)
    require_drafter(args)
    bound = args.max_regret_per_token if sampling.is_greedy else args.max_kl_per_token
    if bound is not None and not bound >= 0.0:
        raise ValueError(f"the wish for a cost per token must be >= 0 nats, got {bound}")
    prompts = read_prompts(args.prompts)[: args.limit]
    decoder = load_decoder(args)
    make_folder(args.output)  # before the work, not after it
    options = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
    calibration = calibrate(decoder, prompts, rules, dataclasses.asdict(sampling) | options)
    _write(f"{calibration.table()}\n\n")
    chosen = None
    if gain is not None:
        chosen = calibration.for_gain(gain)
    elif bound is not None:
        chosen = calibration.within_cost(bound)
    try:
        text, picture = save(calibration, args.output)
        _write(f"written: {text}, {picture}\n")
    finally:  # a full disk does not take the answer away
        if chosen is not None:
            _write(f"--rule {chosen.rule}\n")
    if chosen is None and (gain, bound) != (None, None):
        raise ValueError("no knob of the grid meets the wish; ask for less, or give --knobs")


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{flag} takes numbers, got {text!r}") from None


def _share(text: str) -> float:
    """A share written as 20% or as 0.2."""
    number = _number("--acceptance-gain", text.removesuffix("%"))
    share = number / 100 if text.endswith("%") else number
    if not 0.0 <= share < math.inf:
        raise ValueError(f"--acceptance-gain must be >= 0, such as 20%, got {text!r}")
    return share


def _inspect(args: argparse.Namespace) -> None:
    folder = locate_head(args.head)
    head = load_head(folder)
    facts = describe_head(head, folder)
    if args.target:
        config = load_target_config(args.target)
        if config.model_type not in FAMILIES:
            raise UnsupportedModelError(
                f"target {args.target!r} is of family {config.model_type!r}; supported families "
                f"are {', '.join(sorted(FAMILIES))}"
            )
        check_fit(head.config, config, config.vocab_size)
        facts["fits"] = args.target
    if args.json:
        _print_json(facts)
    else:
        width = max(map(len, facts))
        _write(
            "".join(
                f"{name:<{width}}  {value}\n" for name, value in facts.items() if value is not None
            )
        )


def _fetch(_: argparse.Namespace) -> None:
    _write(f"{ensure_default_target()}\n")


def _summary(result: GenerationResult) -> str:
    """One line of figures."""
    stats = result.stats
    parts = [f"{stats.num_tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.acceptance_length is not None:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
    if stats.num_rescued:
        parts.append(f"{stats.num_rescued} rescued")
    if stats.kl_spent is not None:
        parts.append(f"KL spent {stats.kl_spent:.3f} nats")
    if stats.regret_spent is not None:
        parts.append(f"regret spent {stats.regret_spent:.3f} nats")
    parts += [f"rule {stats.rule}", f"tree {stats.tree}", f"stopped by {result.finish_reason}"]
    return f"[{', '.join(parts)}]"


def _as_json(result: GenerationResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def _print_json(value: dict[str, Any]) -> None:
    _write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
