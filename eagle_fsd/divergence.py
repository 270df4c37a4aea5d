"""Divergences between the target's and the draft's next-token law, in nats.

Every divergence takes `(target_log_probs, draft_log_probs)`, both [..., V] float32 (or float64)
log-probabilities with -inf where a token has probability zero, and returns [...] float64, >= 0.
float64 because a float32 ln 2 lies above ln 2, and because the sums run over a whole vocabulary.

Equal laws give exactly 0. A NaN on either side gives NaN, never a number that a threshold could let
through. A token that only one side can emit gives the true limit: a finite term in `js` and `tv`,
inf in `ag_mean` and in the Kullback-Leibler divergence that looks for it.

Each has a top-k form, written "js@50": the laws are first reduced to the target's 50 most probable
tokens and one bucket for the rest, see `top_k_bucket`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]


def kl_draft_target(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """KL(draft || target) of each row, in nats.

    Args:
        target_log_probs: [..., V] float32, log p.
        draft_log_probs: [..., V] float32, log q.

    Returns:
        [...] float64 in [0, inf]; inf where the draft can emit a token that the target cannot.

    Raises:
        ValueError: the shapes differ.

    Source: Holsman et al. 2025 (arXiv:2502.20704); `kl_div` in the authors' code.
    """
    target, draft = _as_float64(target_log_probs, draft_log_probs)
    return _kl(draft, target)


def kl_target_draft(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """KL(target || draft) of each row, in nats.

    Args:
        target_log_probs: [..., V] float32, log p.
        draft_log_probs: [..., V] float32, log q.

    Returns:
        [...] float64 in [0, inf]; inf where the target can emit a token that the draft cannot, so
        always inf over a reduced draft vocabulary.

    Raises:
        ValueError: the shapes differ.

    Source: Holsman et al. 2025 (arXiv:2502.20704); `kl_div_reversed` in the authors' code.
    """
    target, draft = _as_float64(target_log_probs, draft_log_probs)
    return _kl(target, draft)


def js(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Jensen-Shannon divergence 1/2 KL(p || m) + 1/2 KL(q || m), m = (p + q) / 2, of each row.

    Args:
        target_log_probs: [..., V] float32, log p.
        draft_log_probs: [..., V] float32, log q.

    Returns:
        [...] float64 in [0, ln 2] nats, symmetric; ln 2 for disjoint supports.

    Raises:
        ValueError: the shapes differ.

    Source: Lin 1991, Divergence measures based on the Shannon entropy.
    Differs: from the `js_div` of the 2025 code for arXiv:2502.20704, which is `ag_mean`.
    """
    target, draft = _as_float64(target_log_probs, draft_log_probs)
    gap = _log_ratio(draft, target)
    toward_target = _weighted(target, -_log_mean_ratio(gap)).sum(-1)
    toward_draft = _weighted(draft, -_log_mean_ratio(-gap)).sum(-1)
    return (0.5 * (toward_target + toward_draft)).clamp(0.0, math.log(2.0))


def tv(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Total variation 1/2 sum |p - q| of each row.

    Args:
        target_log_probs: [..., V] float32, log p.
        draft_log_probs: [..., V] float32, log q.

    Returns:
        [...] float64 in [0, 1], symmetric; 1 for disjoint supports.

    Raises:
        ValueError: the shapes differ.
    """
    target, draft = _as_float64(target_log_probs, draft_log_probs)
    return (0.5 * (target.exp() - draft.exp()).abs().sum(-1)).clamp(0.0, 1.0)


def ag_mean(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Arithmetic-geometric mean divergence 1/2 KL(m || p) + 1/2 KL(m || q), m = (p + q) / 2.

    This is what the 2025 code for fuzzy speculative decoding computes under the name `js_div`, so
    the thresholds published for it are on this scale. It is unbounded.

    Args:
        target_log_probs: [..., V] float32, log p.
        draft_log_probs: [..., V] float32, log q.

    Returns:
        [...] float64 in [0, inf] nats, symmetric; inf where one law can emit a token that the other
        cannot, so always inf over a reduced draft vocabulary.

    Raises:
        ValueError: the shapes differ.

    Source: Taneja 1995, arithmetic-geometric mean divergence; the authors' code for
        arXiv:2502.20704.
    """
    target, draft = _as_float64(target_log_probs, draft_log_probs)
    gap = _log_ratio(draft, target)
    log_mean = torch.logaddexp(target, draft) - math.log(2.0)
    arithmetic_over_geometric = 0.5 * gap.abs() + torch.log1p(0.5 * torch.expm1(-gap.abs()))
    return _weighted(log_mean, arithmetic_over_geometric).sum(-1).clamp(min=0.0)


DIVERGENCES: Final[dict[str, Divergence]] = {
    "kl_draft_target": kl_draft_target,
    "kl_target_draft": kl_target_draft,
    "js": js,
    "tv": tv,
    "ag_mean": ag_mean,
}

INFINITE_UNDER_REDUCED_VOCAB: Final = frozenset({"kl_target_draft", "ag_mean"})


def get_divergence(name: str) -> Divergence:
    """Look a divergence up by name.

    Args:
        name: a key of `DIVERGENCES`, or one with "@k", k >= 1, for its top-k form ("js@50").

    Returns:
        A function (target_log_probs [..., V], draft_log_probs [..., V]) -> [...] float64 nats.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is unknown, or k is not a whole number >= 1.
    """
    base, k = _split_name(name)
    full = DIVERGENCES[base]
    return full if k is None else partial(_top_k_form, full, k)


def is_infinite_under_reduced_vocab(name: str) -> bool:
    """Tell whether a divergence is inf by construction when the draft has a reduced vocabulary.

    The full forms always are; the top-k forms are as soon as one of the target's k best tokens lies
    outside the draft vocabulary, and count as well.

    Args:
        name: as `get_divergence` takes it.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is unknown.
    """
    base, _ = _split_name(name)
    return base in INFINITE_UNDER_REDUCED_VOCAB


def top_k_bucket(
    target_log_probs: Tensor, draft_log_probs: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Reduce both laws to the target's k most probable tokens and one bucket for the rest.

    Args:
        target_log_probs: [..., V] float32, log p.
        draft_log_probs: [..., V] float32, log q.
        k: tokens kept, >= 1; a k above V keeps all V and leaves the bucket empty.

    Returns:
        The two reduced laws [..., min(k, V) + 1] float64, the target's best token first, the bucket
        last.

    Raises:
        ValueError: k < 1, or the shapes differ.
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    target, draft = _as_float64(target_log_probs, draft_log_probs)
    top = target.topk(min(k, target.shape[-1]), dim=-1).indices
    return _bucket(target, top), _bucket(draft, top)


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> ValueError:
    """Make the error for a name outside a fixed set, with the set and the nearest name.

    Args:
        kind: what the name names, such as "divergence".
        name: the name that was given.
        allowed: the names that exist.
    """
    names = list(allowed)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"unknown {kind} {name!r}; choose one of {names}{hint}")


def _split_name(name: str) -> tuple[str, int | None]:
    """Split "js@50" into its divergence and k (None for the full form)."""
    if not isinstance(name, str):
        raise TypeError(f"divergence must be a name such as 'js' or 'js@50', got {name!r}")
    base, at, k = name.partition("@")
    if base not in DIVERGENCES:
        raise unknown_name("divergence", name, DIVERGENCES)
    if not at:
        return base, None
    if not (k.isascii() and k.isdigit() and int(k) >= 1):
        raise ValueError(
            f"the top-k form of {base!r} is written '{base}@K' with a whole K >= 1, got {name!r}"
        )
    return base, int(k)


def _top_k_form(full: Divergence, k: int, target_log_probs: Tensor, draft: Tensor) -> Tensor:
    return full(*top_k_bucket(target_log_probs, draft, k))


def _bucket(log_probs: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities of the kept tokens [..., k] and of all others together: [..., k + 1]."""
    others = log_probs.scatter(-1, kept, -math.inf).logsumexp(-1, keepdim=True)  # [..., 1]
    return torch.cat([log_probs.gather(-1, kept), others], dim=-1)


def _as_float64(target_log_probs: Tensor, draft_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    if target_log_probs.shape != draft_log_probs.shape:
        raise ValueError(
            f"target and draft laws must have the same shape, got {list(target_log_probs.shape)} "
            f"and {list(draft_log_probs.shape)}; spread a reduced draft law over the target's "
            "vocabulary with -inf elsewhere"
        )
    return target_log_probs.double(), draft_log_probs.double()


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of float64 log-probabilities."""
    return _weighted(first, _log_ratio(first, second)).sum(-1).clamp(min=0.0)


def _log_ratio(first: Tensor, second: Tensor) -> Tensor:
    """log(first / second); 0 where both are zero, as such a token adds to no divergence."""
    both_zero = (first == -math.inf) & (second == -math.inf)
    return torch.where(both_zero, 0.0, first - second)


def _log_mean_ratio(gap: Tensor) -> Tensor:
    """log(m / a) for m = (a + b) / 2 and gap = log(b / a): exactly 0 at 0, finite for any gap."""
    return gap.clamp(min=0.0) + torch.log1p(0.5 * torch.expm1(-gap.abs()))


def _weighted(log_weight: Tensor, value: Tensor) -> Tensor:
    """exp(log_weight) * value with 0 * inf = 0 for a true zero weight, while NaN stays NaN.

    A weight that is positive but too small for float64 still counts as positive against inf.
    """
    product = torch.where(value.isinf() & (log_weight > -math.inf), value, log_weight.exp() * value)
    return torch.where((log_weight == -math.inf) & ~value.isnan(), 0.0, product)
