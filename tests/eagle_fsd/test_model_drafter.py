"""A small language model as drafter: parity, its cache, its laws, vocabularies, short contexts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_fsd.checkpoint import save_head
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder, Step
from eagle_fsd.drafter import Draft, ModelDrafter
from eagle_fsd.target import TargetModel
from tests.scripted import byte_tokenizer
from tests.stubs import VOCABULARY, greedy_reference, random_prompt, tiny_head, tiny_model

FAMILIES = ("llama", "qwen2", "gemma2", "mistral")  # all but llama with windows of 16
CHAIN = "5,5,1"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
)


class WatchedDrafter(ModelDrafter):
    """Keeps the drafts."""

    def __init__(self, model: TargetModel, vocabulary_size: int) -> None:
        super().__init__(model, vocabulary_size)
        self.drafts: list[Draft] = []

    def propose(self, root_token_id: int, config: TreeConfig) -> Draft:
        draft = super().propose(root_token_id, config)
        draft.tree.check()
        self.drafts.append(draft)
        return draft


def pair(
    family: str = "llama", draft_seed: int = 1, draft: Any = None, **changes: Any
) -> SpeculativeDecoder:
    """A tiny target and a tiny draft model; seed 0 is the target's own weights."""
    target = TargetModel(tiny_model(family))
    small = draft if draft is not None else tiny_model(family, seed=draft_seed, **changes)
    drafter = WatchedDrafter(TargetModel(small), target.vocabulary_size)
    return SpeculativeDecoder(target, drafter)


def model_of(decoder: SpeculativeDecoder) -> Any:
    assert isinstance(decoder.target, TargetModel)
    return decoder.target.model


def next_law(model: Any, text: list[int]) -> Tensor:
    """[V] log-probabilities by the model's own full forward."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([text])).logits[0, -1]
    return logits.float().log_softmax(-1)


def full_cycles(steps: list[Step], depth: int) -> list[Step]:
    """Cycles whose tree was not cut by the token limit."""
    return [s for s in steps if s.tree is not None and int(s.tree.depths.max()) == depth]


@pytest.mark.parametrize("draft_seed", [0, 1], ids=["same weights", "other weights"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_with_exact_equals_generate(family: str, draft_seed: int) -> None:
    rng = random.Random(family)
    decoder = pair(family, draft_seed)
    for length in (3, 14, 30):  # before, across and behind the window
        prompt = random_prompt(rng, length, length)
        expected = greedy_reference(model_of(decoder), prompt, 24)
        steps = list(decoder.stream(prompt, tree=CHAIN, max_new_tokens=24))
        assert [token.id for step in steps for token in step.tokens] == expected
        if draft_seed == 0:  # everything is accepted
            for step in full_cycles(steps, 5):
                assert [token.origin for token in step.tokens] == ["accepted"] * 5 + ["bonus"]
            assert len(full_cycles(steps, 5)) == 3


@pytest.mark.parametrize("tree", ["8,3,3", "16,4,4", "30,3,10"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_a_tree_with_exact_equals_generate(family: str, tree: str) -> None:
    rng = random.Random(tree)
    for draft_seed in (0, 1):
        decoder = pair(family, draft_seed)
        prompt = random_prompt(rng, 5, 25)
        steps = list(decoder.stream(prompt, tree=tree, max_new_tokens=24))
        ids = [token.id for step in steps for token in step.tokens]
        assert ids == greedy_reference(model_of(decoder), prompt, 24)
        if draft_seed == 0:  # an inner node's best child is in the tree: every cycle meets a leaf
            assert {step.tokens[-1].origin for step in steps} == {"bonus"}
            assert len(steps) < 12


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("tree", [CHAIN, "8,3,3"])
def test_exact_ids_equal_plain_ids_at_every_temperature(family: str, tree: str) -> None:
    decoder = pair(family)
    rng = random.Random(3)
    for seed, options in enumerate(SETTINGS):
        prompt = random_prompt(rng, 5, 30)
        plain = decoder.plain(prompt, seed=seed, max_new_tokens=20, **options)
        drafted = decoder.generate(prompt, seed=seed, max_new_tokens=20, tree=tree, **options)
        assert drafted.token_ids == plain.token_ids


def test_with_the_target_as_draft_a_small_threshold_accepts_every_chain() -> None:
    decoder = pair(draft_seed=0)
    num_rescued = 0
    for seed in range(4):
        steps = list(
            decoder.stream(
                random_prompt(random.Random(seed)),
                tree=CHAIN,
                rule="fuzzy:1e-3:js",
                temperature=1.0,
                seed=seed,
                max_new_tokens=25,
            )
        )
        for step in full_cycles(steps, 5):
            assert len(step.tokens) == 6
        num_rescued += sum(token.origin == "rescued" for step in steps for token in step.tokens)
    assert num_rescued > 5


@pytest.mark.parametrize("rule", ["exact", "fuzzy:inf:js"])
@pytest.mark.parametrize("tree", [CHAIN, "8,3,3", "4,4,1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_laws_are_those_of_a_fresh_read_after_every_commit(
    family: str, tree: str, rule: str
) -> None:
    """At the root and along the first branch, whatever was accepted before."""
    decoder = pair(family)
    drafter = decoder.drafter
    assert isinstance(drafter, WatchedDrafter)
    small = drafter._model.model
    prompt = random_prompt(random.Random(tree), 12, 12)
    text = prompt[0].tolist()
    number = 0
    for step in decoder.stream(prompt, tree=tree, rule=rule, temperature=1.0, max_new_tokens=18):
        if step.tree is not None and step.tree.num_nodes > 1:
            draft = drafter.drafts[number]
            number += 1
            assert draft.log_probs is not None
            parents, tokens = draft.tree.parents.tolist(), draft.tree.token_ids.tolist()
            for row in {0, 1, max(r for r in range(len(tokens)) if draft.law_rows[r] >= 0)}:
                law_row = int(draft.law_rows[row])
                if law_row < 0:
                    continue
                path: list[int] = []
                above = row
                while above > 0:
                    path.insert(0, tokens[above])
                    above = parents[above]
                law = draft.log_probs[law_row]
                torch.testing.assert_close(
                    law, next_law(small, text + path), rtol=0, atol=2e-4
                )  # two fp32 passes of different shapes
        text += [token.id for token in step.tokens]
    assert number == len(drafter.drafts) > 1


def test_a_request_leaves_nothing_to_the_next() -> None:
    decoder = pair()
    prompts = [random_prompt(random.Random(seed), 5, 30) for seed in range(3)]
    options: dict[str, Any] = {"tree": "8,3,3", "temperature": 1.0, "max_new_tokens": 15}
    alone = [pair().generate(prompt, rule="fuzzy:0.3:js", **options) for prompt in prompts]
    for prompt, expected in zip(prompts, alone, strict=True):
        stream = decoder.stream(prompts[0], **options)
        next(stream)
        next(stream)
        stream.close()  # broken off after a draft
        result = decoder.generate(prompt, rule="fuzzy:0.3:js", **options)
        assert result.token_ids == expected.token_ids
        assert result.stats.kl_spent == expected.stats.kl_spent


# Vocabularies


@pytest.mark.parametrize("rows", [VOCABULARY + 8, VOCABULARY - 8])
def test_other_padding_rows_change_nothing_about_exact_ids(rows: int) -> None:
    """The text may hold padding rows that the smaller model lacks."""
    rng = random.Random(rows)
    decoder = pair(draft=tiny_model(seed=1, vocab_size=rows))
    drafter = decoder.drafter
    assert isinstance(drafter, WatchedDrafter)
    assert drafter.has_reduced_vocabulary == (rows < VOCABULARY)
    met = 0
    for seed in range(3):
        prompt = torch.cat([random_prompt(rng), torch.tensor([[VOCABULARY - 1]])], dim=1)
        for options in SETTINGS[::2]:
            plain = decoder.plain(prompt, seed=seed, max_new_tokens=15, **options)
            result = decoder.generate(prompt, seed=seed, max_new_tokens=15, tree="8,3,3", **options)
            assert result.token_ids == plain.token_ids
            met += sum(token >= VOCABULARY - 8 for token in result.token_ids)
    assert met > 0
    for draft in drafter.drafts:
        assert draft.log_probs is not None
        assert draft.log_probs.shape[-1] == VOCABULARY
        assert torch.allclose(draft.log_probs.exp().sum(-1), torch.tensor(1.0), atol=1e-5)
        if rows < VOCABULARY:
            assert (draft.log_probs[:, rows:] == -torch.inf).all()
        assert (draft.tree.token_ids[1:] < min(rows, VOCABULARY)).all()


def test_a_draft_model_with_fewer_rows_refuses_divergences_that_are_always_infinite() -> None:
    prompt = torch.tensor([[1, 2, 3]])
    fewer = pair(draft=tiny_model(seed=1, vocab_size=VOCABULARY - 8))
    more = pair(draft=tiny_model(seed=1, vocab_size=VOCABULARY + 8))
    for name in ("kl_target_draft", "ag_mean"):
        with pytest.raises(ValueError, match=f"'{name}' is infinite .* fewer rows than"):
            fewer.generate(prompt, rule=f"fuzzy:0.3:{name}")
        more.generate(prompt, rule=f"fuzzy:0.3:{name}", tree=CHAIN, max_new_tokens=4)
    for name in ("js", "tv", "kl_draft_target"):
        fewer.generate(prompt, rule=f"fuzzy:0.3:{name}", tree=CHAIN, max_new_tokens=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with 262 tokens in 272 and 280 rows, and one with a token more."""
    root = tmp_path_factory.mktemp("models")
    for name, rows in (("272", 272), ("280", 280), ("other", 272)):
        tiny_model(vocab_size=rows, seed=len(name)).save_pretrained(root / name)
        tokenizer = byte_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["<more>"])
        tokenizer.save_pretrained(root / name)
    save_head(tiny_head(tiny_model(vocab_size=272)), root / "head")
    return root


@pytest.mark.parametrize(("target", "draft"), [("272", "280"), ("280", "272"), ("272", "272")])
def test_the_same_tokenizer_with_other_padding_is_fine(
    folders: Path, target: str, draft: str
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        folders / target, draft_model=folders / draft, device="cpu", tree=CHAIN
    )
    result = decoder.generate("why?", max_new_tokens=12)
    assert result.token_ids == decoder.plain("why?", max_new_tokens=12).token_ids
    assert result.stats.num_cycles > 0


def test_another_tokenizer_is_refused_with_both_sizes(folders: Path) -> None:
    with pytest.raises(ValueError, match="263 tokens in the draft model and 262 in the target"):
        SpeculativeDecoder.from_pretrained(
            folders / "272", draft_model=folders / "other", device="cpu"
        )
    with pytest.raises(ValueError, match="130 tokens in the draft model and 128 in the target"):
        SpeculativeDecoder.from_pretrained(
            tiny_model(), draft_model=tiny_model(seed=1, vocab_size=130)
        )


def test_a_head_and_a_draft_model_exclude_each_other(folders: Path) -> None:
    with pytest.raises(ValueError, match="draft_head and draft_model exclude each other"):
        SpeculativeDecoder.from_pretrained(
            folders / "272",
            draft_head=folders / "head",
            draft_model=folders / "272",
            device="cpu",
        )


def test_loaded_models_draft_for_each_other() -> None:
    model = tiny_model()
    decoder = SpeculativeDecoder.from_pretrained(model, draft_model=model, tree=CHAIN)
    prompt = torch.tensor([[4, 8, 15]])
    result = decoder.generate(prompt, max_new_tokens=19)
    assert result.token_ids == greedy_reference(model, prompt, 19)
    assert result.stats.acceptance_length == 6.0


# Contexts and sizes


@pytest.mark.parametrize("num_prompt", [10, 37, 40, 60])
def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches(num_prompt: int) -> None:
    decoder = pair(max_position_embeddings=40)
    prompt = random_prompt(random.Random(num_prompt), num_prompt, num_prompt)
    steps = list(decoder.stream(prompt, tree=CHAIN, max_new_tokens=40))
    ids = [token.id for step in steps for token in step.tokens]
    assert ids == greedy_reference(model_of(decoder), prompt, 40)
    num_tokens = num_prompt
    for step in steps:
        if step.tree is not None:
            depth = int(step.tree.depths.max())
            room = 40 - num_tokens
            assert depth == max(0, min(5, room, num_prompt + 40 - num_tokens - 1))
        num_tokens += len(step.tokens)


def test_a_wide_tree_grows_past_the_capacity_that_was_reserved() -> None:
    """Levels of ten nodes are read for a tree of two."""
    decoder = pair()
    prompt = torch.tensor([[4, 8, 15]])
    result = decoder.generate(prompt, tree="2,4,10", max_new_tokens=8)
    assert result.token_ids == greedy_reference(model_of(decoder), prompt, 8)


def test_a_target_does_not_draft_for_itself_in_one_cache() -> None:
    model = tiny_model()
    target = TargetModel(model)
    with pytest.raises(ValueError, match="share one cache; wrap the model once for each"):
        SpeculativeDecoder(target, ModelDrafter(target, target.vocabulary_size))
    SpeculativeDecoder(target, ModelDrafter(TargetModel(model), target.vocabulary_size))
