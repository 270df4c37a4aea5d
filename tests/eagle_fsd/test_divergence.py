"""Divergences against hand-computed values, a scalar reference, and the limits at zeros."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import kl_div

from eagle_fsd.divergence import (
    DIVERGENCES,
    INFINITE_UNDER_REDUCED_VOCAB,
    get_divergence,
    is_infinite_under_reduced_vocab,
    top_k_bucket,
)
from tests.eagle_fsd import rule_reference as reference

LN2 = math.log(2.0)
FORMS = [*DIVERGENCES, *(f"{name}@3" for name in DIVERGENCES)]
SYMMETRIC = ("js", "tv", "ag_mean")

weights = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=8
).filter(lambda pairs: all(sum(column) > 0 for column in zip(*pairs, strict=True)))


def law(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float32).log()


def value(name: str, target: Tensor, draft: Tensor) -> float:
    return get_divergence(name)(target, draft).item()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl_draft_target", 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        ("kl_target_draft", 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)),
        ("tv", 0.25),
        (
            "js",  # the mean of (1/2, 1/2) and (1/4, 3/4) is (3/8, 5/8)
            0.25 * (math.log(4 / 3) + math.log(4 / 5))
            + 0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)),
        ),
        (
            "ag_mean",
            0.5 * (0.375 * math.log(3 / 4) + 0.625 * math.log(5 / 4))
            + 0.5 * (0.375 * math.log(3 / 2) + 0.625 * math.log(5 / 6)),
        ),
    ],
)
def test_two_token_laws_give_the_values_computed_by_hand(name: str, expected: float) -> None:
    assert value(name, law(0.5, 0.5), law(0.25, 0.75)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", FORMS)
def test_equal_laws_give_exactly_zero(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 30.0, 1e4):
        logits = scale * torch.randn(5, 300, generator=generator)
        logits[:, 7] = -math.inf
        log_probs = logits.log_softmax(-1)
        assert get_divergence(name)(log_probs, log_probs.clone()).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl_draft_target", math.inf),
        ("kl_target_draft", math.inf),
        ("js", LN2),
        ("tv", 1.0),
        ("ag_mean", math.inf),
    ],
)
def test_disjoint_supports_give_the_limit(name: str, expected: float) -> None:
    target, draft = law(0.5, 0.5, 0.0, 0.0), law(0.0, 0.0, 0.25, 0.75)
    assert value(name, target, draft) == pytest.approx(expected, abs=1e-7)
    assert value(f"{name}@2", target, draft) == pytest.approx(expected, abs=1e-7)


def test_a_zero_on_one_side_matters_to_the_divergence_that_looks_there() -> None:
    wide, narrow = law(0.5, 0.25, 0.25), law(0.5, 0.5, 0.0)
    assert value("kl_draft_target", wide, narrow) == pytest.approx(0.5 * LN2, abs=1e-7)
    assert value("kl_target_draft", wide, narrow) == math.inf
    assert value("kl_draft_target", narrow, wide) == math.inf
    assert value("kl_target_draft", narrow, wide) == pytest.approx(0.5 * LN2, abs=1e-7)
    assert value("ag_mean", wide, narrow) == math.inf
    assert value("tv", wide, narrow) == pytest.approx(0.25, abs=1e-7)
    assert 0.0 < value("js", wide, narrow) < LN2


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights, st.sampled_from(FORMS))
def test_any_pair_of_laws_matches_the_scalar_reference(
    pairs: list[tuple[int, int]], name: str
) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    # a tiny slope breaks ties, whose order in a top k is free
    columns[0] = columns[0] * (1.0 + 1e-6 * torch.arange(len(pairs)))
    target, draft = (column / column.sum() for column in columns)
    expected = reference.divergence(name, target.tolist(), draft.tolist())
    measured = value(name, target.log(), draft.log())
    assert measured == pytest.approx(expected, abs=1e-12)
    base = name.partition("@")[0]
    assert 0.0 <= measured <= {"js": LN2, "tv": 1.0}.get(base, math.inf)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights, st.sampled_from(SYMMETRIC))
def test_symmetric_divergences_are_symmetric(pairs: list[tuple[int, int]], name: str) -> None:
    target, draft = (
        (torch.tensor(column, dtype=torch.float64) / sum(column)).log()
        for column in zip(*pairs, strict=True)
    )
    assert value(name, target, draft) == pytest.approx(value(name, draft, target), abs=1e-15)


def test_the_two_kl_directions_differ() -> None:
    target, draft = law(0.9, 0.1), law(0.5, 0.5)
    assert (
        abs(value("kl_draft_target", target, draft) - value("kl_target_draft", target, draft)) > 0.1
    )


def test_ag_mean_equals_the_formula_of_the_2025_code() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 6, 200, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    m = 0.5 * (p + q)
    published = 0.5 * kl_div(p.log(), m, reduction="none").sum(-1)
    published += 0.5 * kl_div(q.log(), m, reduction="none").sum(-1)
    torch.testing.assert_close(DIVERGENCES["ag_mean"](p.log(), q.log()), published)
    assert not torch.allclose(DIVERGENCES["js"](p.log(), q.log()), published, rtol=0.05)


def test_each_kl_equals_the_call_it_is_named_after_in_the_2025_code() -> None:
    generator = torch.Generator().manual_seed(2)
    p, q = torch.randn(2, 4, 50, generator=generator, dtype=torch.float64).softmax(-1)
    draft_target = kl_div(p.log(), q, reduction="none").sum(-1)
    target_draft = kl_div(q.log(), p, reduction="none").sum(-1)
    torch.testing.assert_close(DIVERGENCES["kl_draft_target"](p.log(), q.log()), draft_target)
    torch.testing.assert_close(DIVERGENCES["kl_target_draft"](p.log(), q.log()), target_draft)


@pytest.mark.parametrize("name", FORMS)
def test_float32_logits_of_any_scale_stay_close_to_float64(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-2, 1.0, 100.0, 1e4):
        logits = scale * torch.randn(2, 4, 500, generator=generator)
        single = logits.log_softmax(-1)
        double = logits.double().log_softmax(-1)
        measured, expected = get_divergence(name)(*single), get_divergence(name)(*double)
        assert not measured.isnan().any()
        # log-probabilities near `scale` carry float32's 6e-8 of it, twice
        torch.testing.assert_close(measured, expected, rtol=1e-6, atol=1e-6 * max(1.0, scale / 10))


@pytest.mark.parametrize("name", FORMS)
def test_large_logits_with_forbidden_tokens_never_give_nan(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = 1e4 * torch.randn(2, 50, 40, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -math.inf
    measured = get_divergence(name)(*logits.log_softmax(-1))
    assert not measured.isnan().any()
    assert (measured >= 0).all()


def test_a_law_too_small_for_float64_still_counts_against_a_zero() -> None:
    draft = torch.tensor([0.0, -1e4])  # e^-10000 is positive
    target = torch.tensor([0.0, -math.inf])
    assert value("kl_draft_target", target, draft) == math.inf
    assert value("kl_target_draft", target, draft) == 0.0
    assert value("js", target, draft) == 0.0


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("other", [0.25, 0.0])
def test_nan_in_gives_nan_out(name: str, side: int, other: float) -> None:
    laws = [law(0.25, 0.25, 0.25, 0.25, other), law(0.25, 0.25, 0.25, 0.25, other)]
    laws[side][4] = math.nan
    assert math.isnan(value(name, *laws))


def test_rows_are_independent_and_batch_shapes_are_kept() -> None:
    generator = torch.Generator().manual_seed(5)
    p, q = torch.randn(2, 3, 4, 20, generator=generator).log_softmax(-1)
    q[1, 2, 0] = math.nan
    for name in FORMS:
        measured = get_divergence(name)(p, q)
        assert measured.shape == (3, 4)
        assert measured.dtype == torch.float64
        assert measured.isnan().sum() == 1
        assert measured[0, 1].item() == value(name, p[0, 1], q[0, 1])


def test_the_top_k_form_keeps_the_target_s_best_and_pools_the_rest() -> None:
    target, draft = top_k_bucket(law(0.1, 0.5, 0.3, 0.1), law(0.4, 0.2, 0.1, 0.3), k=2)
    torch.testing.assert_close(target.exp().float(), torch.tensor([0.5, 0.3, 0.2]))
    torch.testing.assert_close(draft.exp().float(), torch.tensor([0.2, 0.1, 0.7]))


def test_a_k_over_the_vocabulary_gives_the_full_value() -> None:
    target, draft = law(0.5, 0.3, 0.2), law(0.2, 0.2, 0.6)
    assert top_k_bucket(target, draft, k=50)[0].shape == (4,)
    for name in DIVERGENCES:
        assert value(f"{name}@50", target, draft) == pytest.approx(value(name, target, draft))


def test_pooling_never_raises_a_divergence() -> None:
    generator = torch.Generator().manual_seed(6)
    p, q = torch.randn(2, 30, 60, generator=generator).mul(2).log_softmax(-1)
    for name in DIVERGENCES:
        full = get_divergence(name)(p, q)
        for k in (1, 5, 59):
            assert (get_divergence(f"{name}@{k}")(p, q) <= full + 1e-6).all()


def test_divergences_infinite_over_a_reduced_draft_vocabulary_are_named() -> None:
    target, draft = law(0.4, 0.3, 0.3), law(0.5, 0.5, 0.0)
    infinite = {name for name in DIVERGENCES if value(name, target, draft) == math.inf}
    assert infinite == INFINITE_UNDER_REDUCED_VOCAB
    assert is_infinite_under_reduced_vocab("ag_mean@50")
    assert not is_infinite_under_reduced_vocab("js@50")


def test_an_unknown_divergence_names_the_allowed_ones_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'kl_target_drft'.*\['kl_draft_target'.*'kl_target_draft'\?"
    ):
        get_divergence("kl_target_drft")
    with pytest.raises(ValueError, match="unknown divergence 'zzz'"):
        get_divergence("zzz")
    with pytest.raises(TypeError, match="divergence must be a name"):
        get_divergence(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["js@", "js@0", "js@-1", "js@1.5", "js@x", "js@5@5"])
def test_a_top_k_form_needs_a_whole_k(name: str) -> None:
    with pytest.raises(ValueError, match=r"'js@K' with a whole K >= 1"):
        get_divergence(name)


def test_laws_of_different_sizes_are_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        DIVERGENCES["js"](law(0.4, 0.3, 0.3), law(0.5, 0.5))
    with pytest.raises(ValueError, match="k must be >= 1, got 0"):
        top_k_bucket(law(0.5, 0.5), law(0.5, 0.5), 0)
