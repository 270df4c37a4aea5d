"""The reduced draft vocabulary: what the head drafts over, and that exact ids do not notice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.checkpoint import save_head
from eagle_fsd.config import TreeConfig
from eagle_fsd.draft_vocab import VOCAB_FILE, DraftLaw, choose_vocab, read_vocab
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from tests.stubs import VOCABULARY, greedy_reference, random_prompt, tiny_head, tiny_model

IDS = torch.tensor(sorted(random.Random(0).sample(range(VOCABULARY), 40)))


def write_vocab(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    vocab: dict[str, object] = {"token_ids": [2, 5, 7, 9], "counts": [3, 8, 3, 1]} | changes
    (folder / VOCAB_FILE).write_text(json.dumps(vocab))
    return folder


def test_full_auto_and_a_number_choose_the_tokens(tmp_path: Path) -> None:
    folder = write_vocab(tmp_path / "head")
    assert choose_vocab(folder, "full") is None
    assert choose_vocab(tmp_path, "auto") is None  # nothing there to choose from
    for choice, ids in (("auto", [2, 5, 7, 9]), (4, [2, 5, 7, 9]), ("1", [5]), (2, [2, 5])):
        chosen = choose_vocab(folder, choice)
        assert chosen is not None
        assert chosen.tolist() == ids


@pytest.mark.parametrize("choice", ["most", "-3", "", 1.5, True, None])
def test_other_choices_are_refused(tmp_path: Path, choice: object) -> None:
    with pytest.raises(ValueError, match="full, auto or a number"):
        choose_vocab(write_vocab(tmp_path / "head"), choice)  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", [0, 5])
def test_a_number_must_be_within_the_file(tmp_path: Path, choice: int) -> None:
    with pytest.raises(ValueError, match=rf"in 1\.\.4, .*got {choice}"):
        choose_vocab(write_vocab(tmp_path / "head"), choice)


def test_a_number_needs_a_file_and_its_counts(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no draft_vocab\.json"):
        choose_vocab(tmp_path, 3)
    (write_vocab(tmp_path / "a") / VOCAB_FILE).write_text('{"token_ids": [1, 2, 3]}')
    with pytest.raises(ValueError, match="no counts"):
        choose_vocab(tmp_path / "a", 2)
    with pytest.raises(ValueError, match="4 token ids but 2 counts"):
        choose_vocab(write_vocab(tmp_path / "b", counts=[1, 2]), "auto")


@pytest.mark.parametrize("number", ["2.0", "true", '"2"', "[2]", "-1", str(2**63), "null", "NaN"])
def test_ids_and_counts_are_whole_numbers_or_the_file_is_none(tmp_path: Path, number: str) -> None:
    for content in (
        f'{{"token_ids": [{number}, 5]}}',
        f'{{"token_ids": [1, 5], "counts": [{number}, 3]}}',
    ):
        (tmp_path / VOCAB_FILE).write_text(content)
        for choice in ("auto", "1"):
            with pytest.raises(ValueError, match=r"is no draft vocabulary: .*whole numbers"):
                choose_vocab(tmp_path, choice)


@pytest.mark.parametrize(
    "content",
    [
        *('{"token_ids": "abc"}', '{"token_ids": {"1": 2}}', '{"token_ids": null}', "3", "[1, 2]"),
        *('{"token_ids": [1, 2], "counts": {"x": 1, "y": 2}}', '{"counts": [1]}', "[" * 100_000),
        *('{"token_ids": [1], "counts": null}', "\ufeff{}"),
    ],
)
def test_a_file_of_another_shape_is_no_draft_vocabulary(tmp_path: Path, content: str) -> None:
    (tmp_path / VOCAB_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="is no draft vocabulary: "):
        read_vocab(tmp_path / VOCAB_FILE)


class Wrapped(nn.Module):
    """An lm_head without plain weights, such as an adapted or a quantised one."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(features)
        return logits


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_restricted_logits_are_columns_of_the_targets_own(
    family: str, has_bias: bool, is_wrapped: bool
) -> None:
    model = tiny_model(family)
    if family == "gemma2":
        model.config.final_logit_softcapping = 5.0
    if has_bias:
        model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    if is_wrapped:
        model.lm_head = Wrapped(model.lm_head)
    target = TargetModel(model)
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    law = DraftLaw(target, IDS)
    # The unit vectors go through the product in another order: a few roundings of fp32.
    torch.testing.assert_close(
        law.logits(features), target.logits(features)[:, IDS], rtol=1e-5, atol=1e-5
    )
    assert law.size == 40


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_rows_follow_a_target_whose_weights_change(is_wrapped: bool) -> None:
    model = tiny_model()
    model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    inner = model.lm_head
    if is_wrapped:
        model.lm_head = Wrapped(inner)
    target = TargetModel(model)
    law = DraftLaw(target, IDS)
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))

    def check(tolerance: float) -> torch.Tensor:
        found = law.logits(features)
        assert found.dtype == target.dtype
        whole = target.logits(features.to(target.dtype))[:, IDS]
        torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)
        return found

    before = check(1e-5)
    inner.load_state_dict({"weight": torch.randn(VOCABULARY, 32), "bias": torch.zeros(VOCABULARY)})
    assert not torch.allclose(check(1e-5), before)
    with torch.no_grad():
        inner.bias.add_(1.0)
    check(1e-5)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model.to(dtype)
        check(0.1 if dtype == torch.bfloat16 else 1e-5)  # bf16 sums in another order
    with torch.inference_mode():  # in which decoding reads them anew
        model.float()
        check(1e-5)
    features.requires_grad_()
    law.logits(features).sum().backward()  # as training does next
    assert features.grad is not None


def test_rows_are_read_once_for_weights_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    target = TargetModel(model)
    decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target, IDS))
    monkeypatch.setattr(target, "output_rows", lambda *_: pytest.fail("read again"))
    decoder.generate(random_prompt(random.Random(0)), max_new_tokens=12)


def test_a_reduced_drafter_decodes_a_target_that_was_converted_after_loading() -> None:
    model = tiny_model().to(torch.bfloat16)
    target = TargetModel(model)
    decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target, IDS))
    model.float()
    prompt = random_prompt(random.Random(0))
    ids = decoder.generate(prompt, max_new_tokens=12).token_ids
    assert ids == greedy_reference(model, prompt, 12)


def test_a_reduced_draft_has_its_law_within_the_vocabulary_and_zero_outside() -> None:
    target = TargetModel(tiny_model())
    drafters = [HeadDrafter(tiny_head(target.model), target, ids) for ids in (IDS, None)]
    drafts = []
    for drafter in drafters:
        drafter.start(20)
        drafter.commit(torch.tensor([1, 2, 3]), torch.ones(3, 32))
        drafts.append(drafter.propose(5, TreeConfig(20, 3, 4)))
    reduced, full = drafts
    reduced.tree.check()
    assert set(reduced.tree.token_ids[1:].tolist()) <= set(IDS.tolist())
    law, whole = reduced.law(0, VOCABULARY), full.law(0, VOCABULARY)
    assert law is not None
    assert whole is not None
    torch.testing.assert_close(law[IDS], whole[IDS].log_softmax(-1))
    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    outside[IDS] = False
    assert law[outside].tolist() == [-torch.inf] * int(outside.sum())
    assert [drafter.has_reduced_vocabulary for drafter in drafters] == [True, False]


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_ids_do_not_depend_on_the_draft_vocabulary(size: int, temperature: float) -> None:
    model = tiny_model()
    target = TargetModel(model)
    decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target, IDS[:size]))
    rng = random.Random(size)
    for _ in range(8):
        prompt = random_prompt(rng)
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        ids = decoder.generate(prompt, tree="8,3,4", **options).token_ids
        if temperature == 0.0:
            assert ids == greedy_reference(model, prompt, 24)
        assert ids == decoder.plain(prompt, **options).token_ids


def test_rules_that_are_infinite_over_a_reduced_vocabulary_are_refused() -> None:
    model = tiny_model()
    target = TargetModel(model)
    decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target, IDS))
    prompt = random_prompt(random.Random(1))
    for divergence in ("kl_target_draft", "ag_mean"):
        with pytest.raises(ValueError, match="draft_vocab full"):
            decoder.generate(prompt, rule=f"fuzzy:1:{divergence}")
    for divergence in ("js", "tv", "kl_draft_target"):
        result = decoder.generate(prompt, rule=f"fuzzy:inf:{divergence}", max_new_tokens=20)
        assert result.stats.num_rescued > 0


def test_from_pretrained_uses_the_heads_file_unless_told_otherwise(tmp_path: Path) -> None:
    model = tiny_model()
    save_head(tiny_head(model), tmp_path / "head")
    write_vocab(tmp_path / "head")
    for choice, is_reduced in ((None, True), ("auto", True), ("full", False), (2, True)):
        options = {} if choice is None else {"draft_vocab": choice}
        decoder = SpeculativeDecoder.from_pretrained(model, draft_head=tmp_path / "head", **options)
        assert decoder.drafter is not None
        assert decoder.drafter.has_reduced_vocabulary is is_reduced
    with pytest.raises(ValueError, match="give draft_head too"):
        SpeculativeDecoder.from_pretrained(model, draft_vocab="full")


def test_ids_that_the_target_lacks_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    save_head(tiny_head(model), tmp_path / "head")
    write_vocab(tmp_path / "head", token_ids=[2, 5, 7, VOCABULARY])
    with pytest.raises(ValueError, match=r"ids 2\.\.128, the target has 128 tokens"):
        SpeculativeDecoder.from_pretrained(model, draft_head=tmp_path / "head")
