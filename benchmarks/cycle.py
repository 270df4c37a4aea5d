"""What a cycle costs, by context length: overhead, and growth against plain decoding.

    python -m benchmarks.cycle --target demo --draft-head demo --dtype float32 --tree 16,4,4 \
        --contexts 128,256,1024,4096

Behind a random prompt of each length, one after the other: a plain step, the target's pass over the
tree and the head's steps, each timed alone; then live cycles of exact decoding. Overhead is what a
live cycle takes beyond its pass and its steps, whose median is of the cycles counted beside it.
Memory is what the process (or the device) held at most so far. With --output every row is in the
file as soon as it is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.timing import (
    comb,
    median_seconds,
    models_of,
    output_file,
    read_contexts,
    shared_positions,
)
from eagle_fsd import SpeculativeDecoder, TreeConfig
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, require_drafter, run
from eagle_fsd.device import peak_memory_bytes
from eagle_fsd.files import write_json
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import setting_of

CYCLES = 16
FEWEST_CYCLES = 5  # of a median


@dataclass(frozen=True)
class CycleCosts:
    """Seconds behind one context.

    Attributes:
        context: tokens before.
        plain_s: a plain step, alone.
        pass_s: the target's pass over the tree, alone.
        draft_s: the head's steps, alone.
        live_s: a cycle of exact decoding, the median of num_cycles.
        num_cycles: that were timed live.
        memory_bytes: the most held so far.
    """

    context: int
    plain_s: float
    pass_s: float
    draft_s: float
    live_s: float
    num_cycles: int
    memory_bytes: int

    @property
    def overhead(self) -> float:
        """Share of the live cycle that is neither pass nor steps."""
        return 1.0 - (self.pass_s + self.draft_s) / self.live_s


def random_prompt(target: TargetModel, context: int, seed: int) -> Tensor:
    """[1, context] int64 ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, target.vocabulary_size, (1, context), generator=generator)


def measure(decoder: SpeculativeDecoder, tree: TreeConfig, context: int, seed: int) -> CycleCosts:
    """Times one context length, with a tree of the same size alone and live.

    Raises:
        ValueError: the context leaves no room for the tree and the cycles, or the answer stopped
            after too few of them.
    """
    target, drafter = models_of(decoder)
    prompt = random_prompt(target, context, seed)
    live = _live(decoder, tree, prompt)
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
    return CycleCosts(
        context,
        plain_s=alone["plain"],
        pass_s=alone["pass"],
        draft_s=alone["draft"],
        live_s=statistics.median(live),
        num_cycles=len(live),
        memory_bytes=memory,
    )


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
    contexts = read_contexts(args.contexts)
    output = output_file(args.output)
    decoder = load_decoder(args)
    target, drafter = models_of(decoder)
    tree, setting = decoder.tree, setting_of(target, drafter)
    _check_room(max(contexts), tree, shared_positions(target, drafter))
    print(f"{setting}, tree {tree}")
    heads = ("plain", "pass", "draft", "cycle", "cycles")
    print(f"{'context':>8}{''.join(f'{head:>9}' for head in heads)}{'overhead':>10}{'MB':>7}")
    costs: list[CycleCosts] = []
    for context in contexts:
        cost = measure(decoder, tree, context, args.seed)
        costs.append(cost)
        times = (cost.plain_s, cost.pass_s, cost.draft_s, cost.live_s)
        shown = "".join(f"{1e3 * seconds:>9.1f}" for seconds in times)
        memory = cost.memory_bytes / 1e6
        shown += f"{cost.num_cycles:>9}{cost.overhead:>10.1%}{memory:>7.0f}"
        print(f"{context:>8}{shown}", flush=True)
        if output:
            rows = [asdict(each) | {"overhead": each.overhead} for each in costs]
            write_json(output, {"setting": setting, "tree": str(tree), "contexts": rows})
    print(
        f"\n(cycle at {contexts[-1]} / at {contexts[0]}) / (plain at {contexts[-1]} / at "
        f"{contexts[0]}): {growth(costs):.2f}"
    )


def _live_tokens(tree: TreeConfig) -> int:
    """What an answer needs at most, for all cycles and the one that warms up."""
    return (CYCLES + 1) * (tree.depth + 1)


def _check_room(context: int, tree: TreeConfig, max_positions: int) -> None:
    room = max_positions - tree.num_draft_tokens - 1 - _live_tokens(tree)
    if context > room:
        raise ValueError(
            f"--contexts must be <= {room}, which leaves room for tree {tree} and {CYCLES} cycles "
            f"within {max_positions} positions, got {context}"
        )


def _live(decoder: SpeculativeDecoder, tree: TreeConfig, prompt: Tensor) -> list[float]:
    """Seconds of cycles with the whole tree, from step to step; a first one warms up."""
    seconds = []
    new_tokens = _live_tokens(tree)
    start = time.perf_counter()
    for step in decoder.stream(prompt, tree=tree, max_new_tokens=new_tokens, profile=True):
        now = time.perf_counter()
        if step.stats is not None and step.stats.num_draft_tokens == tree.num_draft_tokens:
            seconds.append(now - start)
        if len(seconds) > CYCLES:
            break
        start = time.perf_counter()
    if len(seconds) <= FEWEST_CYCLES:
        raise ValueError(
            f"{len(seconds)} whole cycles behind {prompt.shape[1]} tokens, where a median needs "
            f"{FEWEST_CYCLES} and one to warm up: the answer stopped early; choose another --seed"
        )
    return seconds[1:]


if __name__ == "__main__":
    raise SystemExit(main())
