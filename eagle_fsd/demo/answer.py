"""One answer as the page shows it: built step by step, every state of it immutable."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from eagle_fsd.acceptance import Exact
from eagle_fsd.decoder import FinishReason, Step
from eagle_fsd.drafter import Draft
from eagle_fsd.verify import Origin, ScoredTree, Verifier
from tree import DraftTree


@dataclass(frozen=True)
class Rescue:
    """What is told about a rescued token.

    Attributes:
        choice: text of the token that the exact step drew there.
        choice_prob: its probability under the target's law, in [0, 1]; at temperature 0 the law at
            temperature 1.
        token_prob: the rescued token's, by the same law.
        draft_prob: the rescued token's under the draft's law at temperature 1; None without one.
        divergence: D(p, q) at that node, in nats (`tv` has no unit); None without a draft law.
        divergence_name: which one.
    """

    choice: str
    choice_prob: float
    token_prob: float
    draft_prob: float | None
    divergence: float | None
    divergence_name: str


@dataclass(frozen=True)
class ShownToken:
    """One token of an answer: its text, its origin, and for a rescued one why."""

    text: str
    origin: Origin
    rescue: Rescue | None = None


@dataclass(frozen=True, eq=False)
class ShownTree:
    """The draft tree of one cycle.

    Attributes:
        tree: N nodes.
        texts: text of each node's token.
        path: rows that were taken, root left out.
    """

    tree: DraftTree
    texts: tuple[str, ...]
    path: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer so far; two of them are equal only if they are the same object.

    Attributes:
        tokens: in order.
        num_cycles: target passes after the prompt's.
        seconds: of decoding; the page's own work is not counted.
        nats: spent so far, KL when sampling and regret at temperature 0; None for an exact rule.
        is_greedy: which of the two `nats` are.
        rule: the rule as the command line takes it, or "plain".
        seed: of the noise.
        tree: of the last cycle.
        finish_reason: None while it grows, and when it was stopped.
    """

    tokens: tuple[ShownToken, ...] = ()
    num_cycles: int = 0
    seconds: float = 0.0
    nats: float | None = None
    is_greedy: bool = True
    rule: str = "exact"
    seed: int = 0
    tree: ShownTree | None = None
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All tokens' texts joined."""
        return "".join(token.text for token in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """0 before the first token."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """(Tokens - 1) / cycles, None with no cycle, as in GenerationStats."""
        return (len(self.tokens) - 1) / self.num_cycles if self.num_cycles else None

    @property
    def share_rescued(self) -> float:
        """Rescued tokens over all, in [0, 1]."""
        rescued = sum(token.origin == "rescued" for token in self.tokens)
        return rescued / len(self.tokens) if self.tokens else 0.0

    def after(self, step: Step, rescues: list[Rescue | None], seconds: float) -> Answer:
        """The answer with one more step, which took `seconds`."""
        shown = (
            ShownToken(token.text, token.origin, rescue)
            for token, rescue in zip(step.tokens, rescues, strict=True)
        )
        nats = None if self.nats is None else self.nats + sum(t.cost for t in step.tokens)
        return replace(
            self,
            tokens=(*self.tokens, *shown),
            num_cycles=self.num_cycles + (step.stats is not None),
            seconds=self.seconds + seconds,
            nats=nats,
            finish_reason=step.result.finish_reason if step.result else None,
        )


class Lens:
    """Looks at each scored tree before it is verified, and tells about its rescued tokens after.

    It is an observer of `SpeculativeDecoder.stream`. Only the last tree is kept.

    Args:
        tokenizer: for the texts.
        divergence: which one to tell when the rule has none of its own.
    """

    def __init__(self, tokenizer: Any, divergence: str = "js") -> None:
        self._tokenizer = tokenizer
        self._divergence = divergence
        self._scored: tuple[Draft, Tensor, Verifier] | None = None

    def __call__(self, draft: Draft, logits: Tensor, verifier: Verifier) -> None:
        """Keeps what the step that is about to come will be made of."""
        self._scored = draft, logits, verifier

    def rescues(self, step: Step) -> list[Rescue | None]:
        """For each token of the step just made: None unless it was rescued."""
        if self._scored is None or all(token.origin != "rescued" for token in step.tokens):
            return [None] * len(step.tokens)
        scored = ScoredTree(*self._scored)
        rows = (0, *step.path)  # token number i was emitted at row i of the path from the root
        return [
            self._explain(scored, rows[number], token.id, token.exact_id)
            if token.origin == "rescued"
            else None
            for number, token in enumerate(step.tokens)
        ]

    def tree(self, step: Step) -> ShownTree | None:
        """The tree of a step; None for the first token and for plain decoding."""
        if step.tree is None or step.tree.num_nodes == 1:
            return None
        return ShownTree(step.tree, tuple(map(self._text, step.tree.token_ids.tolist())), step.path)

    def _explain(
        self, scored: ScoredTree, row: int, token_id: int, exact_id: int | None
    ) -> Rescue | None:
        if exact_id is None:
            return None
        node = scored.node(row)
        law = node.draft_log_probs
        name = getattr(scored.verifier.rule, "divergence", None) or self._divergence
        value = None if law is None else node.divergence(name)
        return Rescue(
            choice=self._text(exact_id),
            choice_prob=float(node.target_probs[exact_id]),
            token_prob=float(node.target_probs[token_id]),
            draft_prob=None if law is None else math.exp(float(law[token_id])),
            divergence=value,
            divergence_name=name,
        )

    def _text(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text


def nothing_spent(rule: Any) -> float | None:
    """The ledger before the first token: None for the exact rule, which has none."""
    return None if isinstance(rule, Exact) else 0.0
