"""What a request did, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

PHASES = ("draft", "target", "verify", "commit")


@dataclass(frozen=True)
class StepStats:
    """One cycle.

    Attributes:
        num_draft_tokens: nodes below the root.
        num_accepted: emitted tokens that were nodes of the tree, rescued ones included.
        num_rescued: those of them that the exact draw was not.
        num_emitted: tokens of this cycle after cutting at a stop.
        num_tried: levels at which a child could have been taken: num_accepted, or one more.
        phases_s: seconds by phase (draft, target, verify, commit).
    """

    num_draft_tokens: int
    num_accepted: int
    num_rescued: int
    num_emitted: int
    num_tried: int
    phases_s: dict[str, float]


@dataclass
class GenerationStats:
    """One request; filled as it runs.

    Attributes:
        seed: of the noise, reported also when it was drawn from the system.
        rule: the acceptance rule as it is written on the command line.
        tree: "N,DEPTH,K", or "plain".
        num_prompt_tokens: P.
        num_tokens: new tokens, a stop token included.
        num_tokens_before_cycles: those of them that the prompt's own pass drew, before the first
            cycle: 1, or 0 where the first tree hangs below the prompt's last token.
        num_cycles: target passes after the prompt's.
        num_accepted: emitted tokens that the exact draw found among the children.
        num_rescued: emitted tokens that the relaxed rule went on with.
        num_recovered: draws that were no child and ended their cycle.
        num_bonus: draws at a leaf, the first token after the prompt included.
        kl_spent: nats of KL from the target's law so far (sampling with a relaxed rule), else None.
        regret_spent: nats of regret along the text (temperature 0 with a relaxed rule), else None.
        prefill_s: seconds for the prompt.
        wall_s: seconds of work, prompt included; time that the reader of a stream takes is not
            counted.
        phases_s: seconds by phase over all cycles.
    """

    seed: int
    rule: str
    tree: str
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_tokens_before_cycles: int = 1
    num_cycles: int = 0
    num_accepted: int = 0
    num_rescued: int = 0
    num_recovered: int = 0
    num_bonus: int = 0
    kl_spent: float | None = None
    regret_spent: float | None = None
    prefill_s: float = 0.0
    wall_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tried_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def add_step(self, step: StepStats) -> None:
        """Counts one cycle."""
        self.num_cycles += 1
        for phase, seconds in step.phases_s.items():
            self.phases_s[phase] += seconds
        for counts, reached in (
            (self.tried_by_depth, step.num_tried),
            (self.accepted_by_depth, step.num_accepted),
        ):
            counts.extend([0] * (step.num_tried - len(counts)))
            for depth in range(reached):
                counts[depth] += 1

    @property
    def acceptance_length(self) -> float | None:
        """New tokens of cycles / cycles; 1.0 with nothing accepted, None with no cycle."""
        if not self.num_cycles:
            return None
        return (self.num_tokens - self.num_tokens_before_cycles) / self.num_cycles

    @property
    def acceptance_by_depth(self) -> list[float]:
        """At each depth, accepted or rescued / tried, among the cycles that got that far."""
        return [
            accepted / tried
            for accepted, tried in zip(self.accepted_by_depth, self.tried_by_depth, strict=True)
            if tried
        ]

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all seconds of work, prompt included."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures, ready for JSON, which has no infinity: "inf" then."""
        return {
            "seed": self.seed,
            "rule": self.rule,
            "tree": self.tree,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "num_tokens_before_cycles": self.num_tokens_before_cycles,
            "num_cycles": self.num_cycles,
            "num_accepted": self.num_accepted,
            "num_rescued": self.num_rescued,
            "num_recovered": self.num_recovered,
            "num_bonus": self.num_bonus,
            "kl_spent": _json_number(self.kl_spent),
            "regret_spent": _json_number(self.regret_spent),
            "acceptance_length": self.acceptance_length,
            "acceptance_by_depth": self.acceptance_by_depth,
            "tokens_per_second": self.tokens_per_second,
            "prefill_s": self.prefill_s,
            "wall_s": self.wall_s,
            "phases_s": self.phases_s,
        }


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
