"""Finds the fastest fixed tree of this machine, target, dtype and head, and stores it.

    python -m benchmarks.tree --target demo --draft-head demo --questions questions.jsonl --limit 8

It decodes the questions plainly, drafts *all* candidates at every place of the answers, and so
knows the acceptance length of every tree without decoding again. Passes and head steps are timed
alone; the best trees by these predictions are then decoded live beside plain decoding. What is
stored in the user's cache is what `tree="auto"` takes from then on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.timing import (
    ROUNDS,
    comb,
    median_seconds,
    models_of,
    output_file,
    shared_positions,
)
from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.files import write_json
from eagle_fsd.tuning import TreeChoice, acceptance_length, needed_tokens, setting_of, store_choice
from evaluation.prompts import first_turns
from evaluation.questions import add_selection_arguments, read_questions, select
from tree import DraftTree

DEPTHS = range(1, 8)
TOP_KS = (1, 2, 3, 4, 6, 8, 10)
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 59)
PASS_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_NOTHING_TO_DRAFT = (
    "every answer ends with its first token, before anything is drafted; give other questions"
)


@dataclass(frozen=True)
class Costs:
    """Seconds, each timed alone at one context.

    Attributes:
        passes: by number of nodes, the root included; between two of them a straight line.
        first_steps: by top_k, drafting the root's children.
        further_steps: by top_k, drafting one more level.
        rest: what a live cycle takes beyond its pass and its steps.
    """

    passes: dict[int, float]
    first_steps: dict[int, float]
    further_steps: dict[int, float]
    rest: float = 0.0

    def cycle(self, tree: TreeConfig) -> float:
        """Seconds of a cycle with this tree."""
        sizes = sorted(self.passes)
        one_pass = np.interp(tree.num_draft_tokens + 1, sizes, [self.passes[n] for n in sizes])
        steps = (tree.depth - 1) * self.further_steps[tree.top_k]
        return float(one_pass) + self.first_steps[tree.top_k] + steps + self.rest


@dataclass(frozen=True)
class Prediction:
    """A tree with its acceptance length on the recorded texts and its speed over plain decoding."""

    tree: TreeConfig
    acceptance_length: float
    ratio: float


def trees() -> Iterator[TreeConfig]:
    """All trees that are asked about."""
    for depth, top_k, size in product(DEPTHS, TOP_KS, SIZES):
        if max(depth, top_k) <= size <= top_k + (depth - 1) * top_k**2:
            yield TreeConfig(size, depth, top_k)


def predict(
    costs: Costs, texts: Sequence[dict[tuple[int, int], list[list[int]]]]
) -> list[Prediction]:
    """All trees, fastest first.

    Args:
        costs: of passes and steps.
        texts: for every text, by depth and top_k, `needed_tokens` at each of its places.

    Raises:
        ValueError: no text has a place to draft at.
    """
    if not any(rows for text in texts for rows in text.values()):
        raise ValueError(_NOTHING_TO_DRAFT)
    plain = costs.passes[1]
    found = []
    for tree in trees():
        needed = [text[tree.depth, tree.top_k] for text in texts]
        num_tokens = sum(map(len, needed))
        num_cycles = sum(len(n) / acceptance_length(n, tree.num_draft_tokens) for n in needed)
        length = num_tokens / num_cycles
        found.append(Prediction(tree, length, length * plain / costs.cycle(tree)))
    return sorted(found, key=lambda each: -each.ratio)


def record(
    decoder: SpeculativeDecoder, prompt: Tensor, max_new_tokens: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Plain greedy decoding of one prompt, then all candidates at every place of the answer."""
    target, drafter = models_of(decoder)
    answer = decoder.plain(prompt, max_new_tokens=max_new_tokens).token_ids
    text = [*prompt[0].tolist(), *answer]
    depth, top_k = max(DEPTHS), max(TOP_KS)
    everything = TreeConfig(top_k + (depth - 1) * top_k**2, depth, top_k)
    target.start(len(text))
    features = target.prefill(torch.tensor(text, device=target.output_device)).features
    drafter.start(len(text) + everything.num_draft_tokens)
    needed: dict[tuple[int, int], list[list[int]]] = {key: [] for key in product(DEPTHS, TOP_KS)}
    start = 0
    for place in range(prompt.shape[1], len(text) - 1):
        committed = torch.tensor(text[start:place], device=features.device)
        drafter.commit(committed, features[start:place])
        start = place
        tree = _on_cpu(drafter.propose(text[place], everything).tree)
        for (levels, children), rows in needed.items():
            rows.append(needed_tokens(tree, text[place + 1 :], levels, children))
    return needed


def measure(decoder: SpeculativeDecoder, prompt: Tensor) -> Costs:
    """Times passes and head steps behind a prompt, in turn, so that a drift meets all alike."""
    target, drafter = models_of(decoder)
    num_prompt = prompt.shape[1]
    target.start(num_prompt + max(PASS_SIZES))
    features = target.prefill(prompt[0].to(target.output_device)).features
    drafter.start(num_prompt + 20 * ROUNDS * len(TOP_KS))
    drafter.commit(prompt[0].to(features.device), features)

    def one_pass(size: int) -> None:
        target.score(comb(size))
        target.truncate(num_prompt)

    def draft(depth: int, top_k: int) -> None:
        drafter.propose(1, TreeConfig(top_k, depth, top_k))
        drafter.commit(prompt[0, :1].to(features.device), features[:1])

    passes = median_seconds({size: partial(one_pass, size) for size in PASS_SIZES}, target)
    first = median_seconds({k: partial(draft, 1, k) for k in TOP_KS}, target)
    deep = median_seconds({k: partial(draft, 5, k) for k in TOP_KS}, target)
    further = {k: max(0.0, (deep[k] - first[k]) / 4) for k in TOP_KS}
    return Costs(passes, first, further)


def live(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tensor],
    candidates: Sequence[TreeConfig],
    max_new_tokens: int,
) -> dict[str, tuple[float, float]]:
    """Tokens per second over plain decoding's, and acceptance length, of each tree.

    Raises:
        ValueError: every answer ended with the prompt's own pass.
    """
    seconds = dict.fromkeys(["plain", *map(str, candidates)], 0.0)
    counts = {name: [0, 0] for name in seconds}  # tokens after the first, cycles
    for number, prompt in enumerate(tqdm(prompts, desc="decoding live", unit="prompt")):
        names = list(seconds)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
            if name == "plain":
                stats = decoder.plain(prompt, **options).stats
            else:
                stats = decoder.generate(prompt, tree=name, **options).stats
            seconds[name] += stats.wall_s - stats.prefill_s
            counts[name][0] += stats.num_tokens - 1
            counts[name][1] += stats.num_cycles
    if not all(cycles for _, cycles in counts.values()):
        raise ValueError(_NOTHING_TO_DRAFT)
    return {
        name: (seconds["plain"] / seconds[name], tokens / cycles)
        for name, (tokens, cycles) in counts.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = Parser(prog="python -m benchmarks.tree", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--questions", required=True, help="a FastChat question file")
    add_selection_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--check", type=int, default=3, help="best trees that are decoded live")
    parser.add_argument("--output", metavar="FILE", help="JSON file for all figures")
    parser.add_argument("--dry-run", action="store_true", help="store nothing in the user's cache")
    args = parser.parse_args(argv)
    return run(lambda: _tune(args))


def _tune(args: argparse.Namespace) -> None:
    require_drafter(args)
    if args.tree != "auto":
        raise ValueError(f"--tree is what this command chooses, got {args.tree!r}; leave it out")
    if args.check < 1 or args.max_new_tokens < 8:
        raise ValueError("--check must be >= 1 and --max-new-tokens >= 8")
    output = output_file(args.output)
    questions = select(read_questions(args.questions), args.limit, args.every)
    decoder = load_decoder(args)
    target, drafter = models_of(decoder)
    setting = setting_of(target, drafter)
    room = max(args.max_new_tokens, *PASS_SIZES)
    room += target.max_positions - shared_positions(target, drafter)
    prompts = [ids[None] for _, ids in first_turns(decoder, questions, room)]
    if len(prompts) < len(questions):
        print(f"{len(questions) - len(prompts)} questions left out: too long for the context")
    bar = tqdm(prompts, desc="recording", unit="prompt")
    texts = [record(decoder, prompt, args.max_new_tokens) for prompt in bar]
    typical = sorted(prompts, key=lambda prompt: prompt.shape[1])[len(prompts) // 2]
    costs = measure(decoder, typical)
    predictions = predict(costs, texts)
    if output:
        write_json(output, _as_json(setting, costs, predictions, {}))
    candidates = [each.tree for each in predictions[: args.check]]
    candidates += [tree for tree in (TreeConfig.default(target.device.type),)
                   if tree not in candidates]  # fmt: skip
    ratios = live(decoder, prompts, candidates, args.max_new_tokens)
    best = max(candidates, key=lambda tree: ratios[str(tree)][0])
    choice = TreeChoice(best, round(ratios[str(best)][0], 3))
    print(_table(costs, predictions, ratios))
    word = "faster" if choice.ratio > 1.0 else "slower, so that auto decodes plainly"
    print(f"\nbest: --tree {best}, {choice.ratio:.2f} times plain decoding ({word})\n{setting}")
    if output:
        write_json(output, _as_json(setting, costs, predictions, ratios))
    if not args.dry_run:
        print(f"stored in {store_choice(setting, choice)}")


def _on_cpu(tree: DraftTree) -> DraftTree:
    return DraftTree(tree.token_ids.cpu(), tree.parents.cpu(), tree.depths.cpu(), tree.scores.cpu())


def _table(
    costs: Costs, predictions: Sequence[Prediction], ratios: dict[str, tuple[float, float]]
) -> str:
    milliseconds = {n: f"{1e3 * s:.1f}" for n, s in costs.passes.items()}
    steps = {k: f"{1e3 * s:.1f}" for k, s in costs.further_steps.items()}
    lines = [
        "pass, ms by nodes:  " + "  ".join(f"{n}: {ms}" for n, ms in milliseconds.items()),
        "head step, ms by k: " + "  ".join(f"{k}: {ms}" for k, ms in steps.items()),
        "",
        f"{'tree':<12}{'length':>8}{'predicted':>11}{'live':>7}{'length':>8}",
    ]
    shown = [each for each in predictions if str(each.tree) in ratios]
    for each in shown:
        ratio, length = ratios[str(each.tree)]
        lines.append(
            f"{each.tree!s:<12}{each.acceptance_length:>8.2f}{each.ratio:>11.2f}"
            f"{ratio:>7.2f}{length:>8.2f}"
        )
    return "\n".join(lines)


def _as_json(
    setting: str,
    costs: Costs,
    predictions: Sequence[Prediction],
    ratios: dict[str, tuple[float, float]],
) -> dict[str, Any]:
    return {
        "setting": setting,
        "pass_s": costs.passes,
        "first_step_s": costs.first_steps,
        "further_step_s": costs.further_steps,
        "predictions": [
            {
                "tree": str(each.tree),
                "acceptance_length": round(each.acceptance_length, 4),
                "ratio": round(each.ratio, 4),
            }
            for each in predictions
            if math.isfinite(each.ratio)
        ],
        "live": {name: {"ratio": r, "acceptance_length": a} for name, (r, a) in ratios.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
