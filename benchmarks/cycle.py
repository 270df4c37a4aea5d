"""What a cycle costs, by context length: overhead, and growth against plain decoding.

    python -m benchmarks.cycle --target demo --draft-head demo --dtype float32 --tree 16,4,4 \
        --contexts 128,256,1024,4096

Behind a random prompt of each length, one after the other: a plain step, the target's pass over the
tree and the head's steps, each timed alone; then live cycles of exact decoding. Overhead is what a
live cycle takes beyond its pass and its steps. Memory is what the process (or the device) held at
most so far.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import comb, median_seconds, models_of
from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.device import peak_memory_bytes
from eagle_fsd.files import write_json
from eagle_fsd.tuning import setting_of

CYCLES = 16


@dataclass(frozen=True)
class CycleCosts:
    """Seconds behind one context.

    Attributes:
        context: tokens before.
        plain_s: a plain step, alone.
        pass_s: the target's pass over the tree, alone.
        draft_s: the head's steps, alone.
        live_s: a cycle of exact decoding.
        memory_bytes: the most held so far.
    """

    context: int
    plain_s: float
    pass_s: float
    draft_s: float
    live_s: float
    memory_bytes: int

    @property
    def overhead(self) -> float:
        """Share of the live cycle that is neither pass nor steps."""
        return 1.0 - (self.pass_s + self.draft_s) / self.live_s


def measure(decoder: SpeculativeDecoder, tree: TreeConfig, context: int, seed: int) -> CycleCosts:
    """Times one context length, with a tree of the same size alone and live."""
    target, drafter = models_of(decoder)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, target.vocabulary_size, (1, context), generator=generator)
    live_s = _live(decoder, tree, prompt)
    target.start(context + tree.num_draft_tokens + 1)
    features = target.prefill(prompt[0].to(target.output_device)).features
    drafter.start(context + 100)
    drafter.commit(prompt[0].to(features.device), features)

    def score(size: int) -> None:
        target.score(comb(size))
        target.truncate(context)

    def draft() -> None:  # every cycle has a few rows to rewrite from true features first
        drafter.propose(1, tree)
        drafter.commit(prompt[0, :2].to(features.device), features[:2])

    alone = median_seconds(
        {
            "plain": lambda: score(1),
            "pass": lambda: score(tree.num_draft_tokens + 1),
            "draft": draft,
        },
        target,
    )
    memory = peak_memory_bytes(target.output_device)
    return CycleCosts(context, alone["plain"], alone["pass"], alone["draft"], live_s, memory)


def growth(costs: Sequence[CycleCosts]) -> float:
    """(Last cycle / first cycle) / (last plain step / first plain step)."""
    first, last = costs[0], costs[-1]
    return (last.live_s / first.live_s) / (last.plain_s / first.plain_s)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = Parser(prog="python -m benchmarks.cycle", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--contexts", default="128,256,1024,2048,4096", help="tokens, by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument("--output", metavar="FILE", help="JSON file for all figures")
    args = parser.parse_args(argv)
    return run(lambda: _report(args))


def _report(args: argparse.Namespace) -> None:
    require_drafter(args)
    contexts = [int(part) for part in args.contexts.split(",") if part.strip().isdecimal()]
    if not contexts or min(contexts) < 1 or len(contexts) != len(args.contexts.split(",")):
        raise ValueError(f"--contexts takes whole numbers >= 1 by commas, got {args.contexts!r}")
    decoder = load_decoder(args)
    target, drafter = models_of(decoder)
    tree = decoder.tree
    print(f"{setting_of(target, drafter)}, tree {tree}")
    print(f"{'context':>8}{'plain':>9}{'pass':>9}{'draft':>9}{'cycle':>9}{'overhead':>10}{'MB':>7}")
    costs = []
    for context in contexts:
        cost = measure(decoder, tree, context, args.seed)
        costs.append(cost)
        times = (cost.plain_s, cost.pass_s, cost.draft_s, cost.live_s)
        shown = "".join(f"{1e3 * seconds:>9.1f}" for seconds in times)
        memory = cost.memory_bytes / 1e6
        print(f"{context:>8}{shown}{cost.overhead:>10.1%}{memory:>7.0f}", flush=True)
    print(
        f"\n(cycle at {contexts[-1]} / at {contexts[0]}) / (plain at {contexts[-1]} / at "
        f"{contexts[0]}): {growth(costs):.2f}"
    )
    if args.output:
        rows: list[dict[str, Any]] = [asdict(cost) | {"overhead": cost.overhead} for cost in costs]
        write_json(
            Path(args.output),
            {"setting": setting_of(target, drafter), "tree": str(tree), "contexts": rows},
        )


def _live(decoder: SpeculativeDecoder, tree: TreeConfig, prompt: Tensor) -> float:
    """Median seconds of a cycle with the whole tree, from step to step; the first one warms up."""
    seconds = []
    new_tokens = (CYCLES + 1) * (tree.depth + 1)
    start = time.perf_counter()
    for step in decoder.stream(prompt, tree=tree, max_new_tokens=new_tokens, profile=True):
        now = time.perf_counter()
        if step.stats is not None and step.stats.num_draft_tokens == tree.num_draft_tokens:
            seconds.append(now - start)
        if len(seconds) > CYCLES:
            break
        start = time.perf_counter()
    if not seconds:
        raise ValueError(
            f"no whole cycle behind {prompt.shape[1]} tokens: the answer stopped at once; "
            "choose another --seed"
        )
    return statistics.median(seconds[1:] or seconds)


if __name__ == "__main__":
    raise SystemExit(main())
