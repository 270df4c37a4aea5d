"""Long randomised parity runs: `python -m tests.soak [--prompts N] [--seed S]`, counts printed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.parity import check_greedy_parity
from tests.stubs import FAMILY_CONFIGS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000, help="for each family")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="printed")
    parser.add_argument("--family", choices=sorted(FAMILY_CONFIGS), help="only this one")
    args = parser.parse_args(argv)
    families = [args.family] if args.family else sorted(FAMILY_CONFIGS)
    num_faults = 0
    print(f"seed {args.seed}")
    for family in families:
        report = check_greedy_parity(family, args.prompts, args.seed)
        num_faults += len(report.faults)
        print(
            f"{family}: {report.num_prompts} prompts, {len(report.faults)} faults, "
            f"{report.num_ties} ties, {report.num_scattered} scattered commits",
            flush=True,
        )
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
