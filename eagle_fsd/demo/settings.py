"""What a visitor can set on the page, and what it means for a request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from eagle_fsd.acceptance import build_rule
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.divergence import DIVERGENCES

MAX_SLIDER: Final = 100


def _odds(share: float) -> float:
    """0 to inf, 1 in the middle: for knobs without an upper end."""
    return math.inf if share == 1.0 else share / (1.0 - share)


_KNOBS: Final[dict[str, Callable[[float], float]]] = {
    "coverage": _odds,
    "regret": lambda share: 4.0 * _odds(share),
    "lenience": lambda share: max(1.0 - share, 1e-6),  # the domain ends short of 0
    "cactus": _odds,
}
# From 0 to the largest value that the divergence takes; from there on every node is rescued.
_BOUNDED: Final = {"js": math.log(2.0), "tv": 1.0}
RULE_NAMES: Final = ("fuzzy", *_KNOBS)


def written_rule(name: str, divergence: str, position: float) -> str:
    """The rule that a place of the slider stands for, as the command line takes it.

    Args:
        name: one of `RULE_NAMES`.
        divergence: a name that `get_divergence` takes; only "fuzzy" reads it.
        position: 0 (exactly the target: "exact") to `MAX_SLIDER` (as fast as it goes).

    Raises:
        ValueError: for a position or a rule that the page does not have.
    """
    if not 0 <= position <= MAX_SLIDER:
        raise ValueError(f"the slider goes from 0 to {MAX_SLIDER}, got {position}")
    if name not in RULE_NAMES:
        raise ValueError(f"unknown rule {name!r}; choose one of {list(RULE_NAMES)}")
    if position == 0:
        return "exact"
    share = position / MAX_SLIDER
    if name != "fuzzy":
        return f"{name}:{_KNOBS[name](share):.4g}"
    largest = _BOUNDED.get(divergence)
    threshold = math.inf if share == 1.0 else largest * share if largest else 4.0 * _odds(share)
    return f"fuzzy:{threshold:.4g}:{divergence}"


@dataclass(frozen=True)
class Settings:
    """One message's settings, checked when they are made.

    Attributes:
        position: of the slider, 0 to `MAX_SLIDER`.
        rule_name: one of `RULE_NAMES`.
        divergence: for "fuzzy".
        temperature: 0 is greedy.
        top_p: in (0, 1].
        tree: "auto" or "N,DEPTH,K".
        max_new_tokens: >= 1.
        system: the system prompt; empty for none.
    """

    position: float = 0
    rule_name: str = "fuzzy"
    divergence: str = "js"
    temperature: float = 0.0
    top_p: float = 1.0
    tree: str = "auto"
    max_new_tokens: int = 256
    system: str = ""

    def __post_init__(self) -> None:
        build_rule(self.rule)
        SamplingConfig(temperature=self.temperature, top_p=self.top_p)
        TreeConfig.parse(self.tree)
        if self.max_new_tokens < 1:
            raise ValueError(f"the longest answer must be >= 1 token, got {self.max_new_tokens}")

    @classmethod
    def from_page(cls, *values: Any) -> Settings:
        """The settings that the page's inputs hold, in the order of the fields.

        Raises:
            ValueError: for a value out of its range, or an input that was left empty.
        """
        position, rule_name, divergence, temperature, top_p, tree, max_new_tokens, system = values
        numbers = {
            "the slider": position,
            "temperature": temperature,
            "top-p": top_p,
            "the longest answer": max_new_tokens,
        }
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not float(max_new_tokens).is_integer():
            raise ValueError(f"the longest answer must be a whole number, got {max_new_tokens}")
        return cls(
            position,
            str(rule_name),
            str(divergence),
            temperature,
            top_p,
            str(tree or "auto").replace(" ", ""),
            int(max_new_tokens),
            str(system or ""),
        )

    @property
    def rule(self) -> str:
        """The rule in its written form."""
        return written_rule(self.rule_name, self.divergence, self.position)

    @property
    def is_greedy(self) -> bool:
        """Whether the target's law is a point mass."""
        return SamplingConfig(temperature=self.temperature).is_greedy

    @property
    def sampling(self) -> dict[str, Any]:
        """What plain decoding and the tree share, as options of the decoder."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
        }


def offered(decoder: SpeculativeDecoder) -> tuple[list[str], list[str]]:
    """The rules and the divergences that this decoder's drafter can serve, in the page's order."""

    def is_served(name: str, divergence: str = "js") -> bool:
        try:
            decoder.check_rule(build_rule(written_rule(name, divergence, MAX_SLIDER / 2)))
        except ValueError:
            return False
        return True

    divergences = [name for name in ("js", *DIVERGENCES) if is_served("fuzzy", name)]
    return [name for name in RULE_NAMES if is_served(name)], list(dict.fromkeys(divergences))
