"""One pass of the target by context length, tree size and attention, side by side.

    python -m benchmarks.attention --target demo --dtype float32 --contexts 128,1024,4096

One copy of the weights serves all implementations, which take turns, so that a drift of the machine
meets them alike. 1 node is a plain step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.timing import comb, median_seconds, read_contexts
from eagle_fsd.attention import PACKED
from eagle_fsd.command import Parser, add_model_arguments, load_decoder, run
from eagle_fsd.target import TargetModel
from evaluation.arms import twin

IMPLEMENTATIONS = ("eager", "sdpa", PACKED)
SIZES = (1, 17, 60)


def sharing_targets(
    model: PreTrainedModel, *, packs_weights: bool = False
) -> dict[str, TargetModel]:
    """A target for each attention, all over the tensors of one model, which stays as it is."""
    targets = {}
    for name in IMPLEMENTATIONS:
        if name != "eager" and not model._supports_sdpa:
            continue
        copied = twin(model)
        copied.set_attn_implementation(name)
        targets[name] = TargetModel(copied, packs_weights=packs_weights)
    return targets


def measure(
    targets: dict[str, TargetModel], context: int, size: int, seed: int
) -> dict[str, float]:
    """Median seconds of a pass of `size` nodes behind `context` random tokens, by attention."""
    first = next(iter(targets.values()))
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, first.vocabulary_size, (context,), generator=generator)
    for target in targets.values():
        target.start(context + size)
        target.prefill(prompt.to(target.output_device))

    def score(target: TargetModel) -> None:
        target.score(comb(size))
        target.truncate(context)

    calls = {name: partial(score, target) for name, target in targets.items()}
    return median_seconds(calls, first)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = Parser(prog="python -m benchmarks.attention", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--contexts", default="128,1024,4096", help="tokens, by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    args = parser.parse_args(argv)
    return run(lambda: _report(args))


def _report(args: argparse.Namespace) -> None:
    contexts = read_contexts(args.contexts)
    decoder = load_decoder(args)
    assert isinstance(decoder.target, TargetModel)
    room = decoder.target.max_positions - max(SIZES)
    if max(contexts) > room:
        raise ValueError(f"--contexts must be at most {room} for this target, got {max(contexts)}")
    targets = sharing_targets(decoder.target.model, packs_weights=decoder.target.packs_weights)
    print(f"{'context':>8}{'nodes':>7}" + "".join(f"{name:>13}" for name in targets) + "   ms")
    for context in contexts:
        for size in SIZES:
            seconds = measure(targets, context, size, args.seed)
            shown = "".join(f"{1e3 * each:>13.1f}" for each in seconds.values())
            print(f"{context:>8}{size:>7}{shown}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
