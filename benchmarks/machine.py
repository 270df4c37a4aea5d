"""All figures of one machine, for one dtype: the section that docs/performance.md has of it.

    python -m benchmarks.machine --target demo --draft-head demo --dtype float32 \
        --questions mt_bench.jsonl --every 4 --max-new-tokens 128 --output figures

It runs, one after the other and each on its own: benchmarks.tree on other questions of the file
(which stores the best tree), evaluation.speed with transformers' generate and prompt lookup beside
our arms, and benchmarks.cycle. What is there already is not measured again, so a killed run goes
on. With --device cuda this takes a few minutes of GPU time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.cycle import CycleCosts, growth
from eagle_fsd.command import Parser, add_model_arguments, require_drafter, run
from eagle_fsd.config import TreeConfig
from eagle_fsd.files import write_text
from evaluation.questions import read_questions, select

FIRST_ARMS = "hf,hf-lookup,plain,exact"
SECTION = "section.md"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = Parser(prog="python -m benchmarks.machine", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--questions", required=True, help="a FastChat question file")
    parser.add_argument("--every", type=int, default=4, metavar="K", help="every K-th is timed")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--contexts", default="128,256,1024,4096", help="tokens, by commas")
    parser.add_argument("--tune-on", type=int, default=6, help="other questions, for the tree")
    parser.add_argument("--arms", default="", help=f"beside {FIRST_ARMS}, by commas")
    parser.add_argument("--output", required=True, metavar="DIR")
    args = parser.parse_args(argv)
    return run(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> None:
    require_drafter(args)
    if args.every < 2 or args.tune_on < 1:
        raise ValueError("--every must be >= 2 and --tune-on >= 1: the tree is chosen on others")
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    questions = read_questions(args.questions)
    timed = {each.question_id for each in select(questions, None, args.every)}
    others = [each for each in questions if each.question_id not in timed]
    others = others[:: max(1, len(others) // args.tune_on)][: args.tune_on]
    lines = [json.dumps({"question_id": q.question_id, "turns": list(q.turns)}) for q in others]
    write_text(folder / "tune.jsonl", "\n".join(lines) + "\n")
    models = _model_flags(args)
    tree = folder / "tree.json"
    if args.tree == "auto" and not _is_done(tree, "live"):
        chosen = ["--questions", str(folder / "tune.jsonl"), "--max-new-tokens", "64"]
        _call("benchmarks.tree", [*models, *chosen, "--output", str(tree)])
    arms = ",".join(filter(None, (FIRST_ARMS, args.arms)))
    timing = ["--task", "mt_bench", "--questions", args.questions, "--every", str(args.every)]
    timing += ["--max-new-tokens", str(args.max_new_tokens), "--arms", arms]
    _call("evaluation.speed", [*models, *timing, "--output", str(folder / "speed")])
    speed = json.loads((folder / "speed" / "speed.json").read_text(encoding="utf-8"))
    fixed = [*models, "--tree", speed["settings"]["tree"]]
    cycle = folder / "cycle.json"
    if not _is_done(cycle, "contexts", len(args.contexts.split(","))):
        wanted = ["--contexts", args.contexts, "--output", str(cycle)]
        _call("benchmarks.cycle", [*fixed, *wanted])
    costs = json.loads(cycle.read_text(encoding="utf-8"))
    text = section(speed, costs["contexts"])
    write_text(folder / SECTION, text)
    print(text)


def section(speed: dict[str, Any], costs: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown.

    Args:
        speed: speed.json, with hf, plain and exact among its arms.
        costs: rows of benchmarks.cycle, by growing context.
    """
    environment, arms = speed["environment"], speed["arms"]
    machine, settings = environment["machine"], speed["settings"]
    place = machine["accelerator"] or f"{machine['cpu']}, {machine['num_threads']} threads"
    tree = TreeConfig.parse(settings["tree"])
    assert tree is not None
    lines = [
        f"{place}; {environment['dtype']}, tree {tree}, {speed['num_questions']} questions, "
        f"torch {environment['versions']['torch']}, commit {environment['git_commit']}.",
        "",
        "| arm | speed over `hf` (interval) | tokens/s | acceptance length |",
        "|---|---|---|---|",
    ]
    for name, arm in arms.items():
        ratio = arm["ratio"]
        length = arm["acceptance_length"]
        lines.append(
            f"| `{name}` | {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) "
            f"| {arm['tokens_per_second']:.1f} | {'-' if length is None else f'{length:.2f}'} |"
        )
    exact, plain = arms["exact"], arms["plain"]
    live = _decoding_rate(exact, speed["num_questions"])
    live /= _decoding_rate(plain, speed["num_questions"])
    nearest = min(costs, key=lambda row: abs(row["context"] - 256))
    ideal = exact["acceptance_length"] * nearest["plain_s"]
    ideal /= nearest["pass_s"] + nearest["draft_s"]
    lines += [
        "",
        f"`exact` over `plain`, without prefill: {live:.2f}, which is {live / ideal:.0%} of "
        f"acceptance length x t_plain / (t_pass + t_draft) = {ideal:.2f}, each timed alone at "
        f"{nearest['context']} tokens.",
        "",
        "| context | plain step, ms | pass, ms | draft, ms | cycle, ms | overhead | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in costs:
        times = " | ".join(
            f"{1e3 * row[name]:.1f}" for name in ("plain_s", "pass_s", "draft_s", "live_s")
        )
        lines.append(
            f"| {row['context']} | {times} | {row['overhead']:.1%} "
            f"| {row['memory_bytes'] / 1e6:.0f} |"
        )
    first, last = nearest, costs[-1]
    lines += [
        "",
        f"(cycle at {last['context']} / at {first['context']}) / (plain at {last['context']} / at "
        f"{first['context']}): {growth([_costs(first), _costs(last)]):.2f}.",
    ]
    return "\n".join(lines) + "\n"


def _costs(row: dict[str, Any]) -> CycleCosts:
    return CycleCosts(**{field.name: row[field.name] for field in fields(CycleCosts)})


def _decoding_rate(arm: dict[str, Any], num_questions: int) -> float:
    """Tokens per second after the prefill, which gives the first token of each answer."""
    rate: float = (arm["num_tokens"] - num_questions) / (
        arm["seconds"] - arm["phases_s"]["prefill"]
    )
    return rate


def _model_flags(args: argparse.Namespace) -> list[str]:
    """The flags of the models again, for another command."""
    names = ("target", "draft_head", "draft_model", "draft_vocab", "dtype", "device", "revision")
    names += ("attn_implementation", "packed_weights", "tree")
    values = {name: getattr(args, name) for name in names}
    flags = [
        word
        for name, value in values.items()
        if value is not None and (name, value) != ("tree", "auto")
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return [*flags, "--compile"] if args.compile else flags


def _is_done(path: Path, key: str, count: int = 1) -> bool:
    return (
        path.is_file() and len(json.loads(path.read_text(encoding="utf-8")).get(key, ())) >= count
    )


def _call(module: str, flags: Sequence[str]) -> None:
    """Another command in a process of its own, which leaves nothing behind in memory.

    Raises:
        RuntimeError: it failed; it has said why.
    """
    print(f"python -m {module} {' '.join(flags)}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, "-m", module, *flags], check=False).returncode:
        raise RuntimeError(f"python -m {module} failed; what is measured so far is kept")


if __name__ == "__main__":
    raise SystemExit(main())
