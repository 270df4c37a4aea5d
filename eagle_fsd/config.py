"""Settings as frozen, validated dataclasses. Each one declares its own command-line flags, once."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

# Beyond this temperature every law is uniform, and float32 runs out.
MAX_TEMPERATURE = 1e6
# Below this temperature the target's law is a point mass for every practical purpose, and logits /
# temperature overflow.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class TreeConfig:
    """Size of the draft tree.

    Attributes:
        num_draft_tokens: nodes kept below the root, >= 1 (EAGLE's total_token counts the root too).
        depth: draft levels below the root, >= 1 (EAGLE's depth leaves out the first).
        top_k: children per expanded node and expanded nodes per level, >= 1; 1 makes a chain.
    """

    num_draft_tokens: int = 16
    depth: int = 4
    top_k: int = 4

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "depth", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.num_draft_tokens > self.num_candidates:
            raise ValueError(
                f"depth {self.depth} with top_k {self.top_k} drafts {self.num_candidates} "
                "candidates, fewer than "
                f"num_draft_tokens {self.num_draft_tokens}; use at most {self.num_candidates} or a "
                "larger depth or top_k"
            )

    @property
    def num_candidates(self) -> int:
        """Nodes drafted before reranking: top_k in level 1, top_k squared in each further one."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @classmethod
    def default(cls, device_type: str) -> TreeConfig:
        """EAGLE-2's own size, or a small tree on a CPU, where every node of a pass is dear."""
        return cls(8, 3, 4) if device_type == "cpu" else cls(59, 6, 10)

    @classmethod
    def parse(cls, text: str) -> TreeConfig | None:
        """Reads "N,DEPTH,K"; "auto" gives None, the device's default.

        Raises:
            ValueError: when the text is neither, or makes no tree.
        """
        if text == "auto":
            return None
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != 3:
            raise ValueError(f"tree must be auto or N,DEPTH,K (for example 16,4,4), got {text!r}")
        return cls(*sizes)

    def limited(self, depth: int) -> TreeConfig | None:
        """The same tree with at most `depth` levels, or None when no level is left."""
        if depth >= self.depth:
            return self
        if depth < 1:
            return None
        candidates = self.top_k + (depth - 1) * self.top_k**2
        return TreeConfig(min(self.num_draft_tokens, candidates), depth, self.top_k)

    def __str__(self) -> str:
        return f"{self.num_draft_tokens},{self.depth},{self.top_k}"


@dataclass(frozen=True)
class SamplingConfig:
    """The law that the target is decoded with.

    The warpers apply in the order of the fields, as transformers applies them.

    Attributes:
        temperature: in [0, 1e6]; 0 (and anything below 1e-5) takes the most probable token.
        top_k: keep the k most probable tokens, ties with the k-th included; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p; in (0, 1], 1 keeps all.
        min_p: keep tokens with at least min_p times the highest probability; in [0, 1], 0 keeps
            all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
            raise TypeError(f"top_k must be a whole number, got {self.top_k!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(
                f"temperature must be finite and >= 0, got {self.temperature}; 0 is greedy"
            )
        if self.temperature > MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be <= {MAX_TEMPERATURE:g}, where every law is uniform, got "
                f"{self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}; 0 turns it off")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 turns it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0 turns it off")

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is the argmax."""
        return self.temperature < MIN_TEMPERATURE

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds --temperature, --top-p, --top-k and --min-p."""
        group = parser.add_argument_group("sampling")
        group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
        group.add_argument("--top-p", type=float, default=1.0, help="nucleus mass in (0, 1]")
        group.add_argument("--top-k", type=int, default=0, help="tokens kept, 0 for all")
        group.add_argument(
            "--min-p", type=float, default=0.0, help="share of the best token's probability"
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> SamplingConfig:
        """The settings of a parsed command line."""
        return cls(args.temperature, args.top_k, args.top_p, args.min_p)
