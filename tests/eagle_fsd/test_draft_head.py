from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle_fsd.cache import PreallocatedLayer
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.draft_head import DraftHead, DraftHeadConfig
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from tests.stubs import head_drafter, random_prompt, tiny_head, tiny_model

# fp32 sums of a few hundred terms of size 1, in another order
ROUNDING = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"bias": True, "qkv_bias": True},
    "own embeddings": {"own_embeddings": True},
    "ungrouped": {"num_key_value_heads": 4},
    "other width": {"intermediate_size": 48, "head_dim": 16, "hidden_act": "gelu"},
}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def inputs(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings, features = torch.randn(2, 1, length, 32, generator=generator)
    return embeddings, features, torch.arange(length)[None]


def reference(head: DraftHead, embeddings: Tensor, features: Tensor) -> Tensor:
    """The head written out for one sequence, row by row and head by head."""
    config = head.config
    weights = head.state_dict()
    hidden = torch.cat([embeddings, features], dim=-1) @ weights["fc.weight"].T
    hidden = hidden + weights.get("fc.bias", torch.zeros(()))
    length = hidden.shape[0]
    heads: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        states = hidden @ weights[f"layers.0.self_attn.{name}_proj.weight"].T
        states = states + weights.get(f"layers.0.self_attn.{name}_proj.bias", torch.zeros(()))
        heads[name] = states.view(length, -1, config.head_dim)
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    rates = torch.tensor([theta ** (-2 * i / config.head_dim) for i in range(half)])
    angles = torch.arange(length)[:, None] * rates  # [T, head_dim / 2]
    for name in ("q", "k"):
        first, second = heads[name][..., :half], heads[name][..., half:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        heads[name] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    group = config.num_attention_heads // config.num_key_value_heads
    attended = torch.zeros(length, config.num_attention_heads, config.head_dim)
    for t in range(length):
        for h in range(config.num_attention_heads):
            keys, values = heads["k"][: t + 1, h // group], heads["v"][: t + 1, h // group]
            scores = (keys @ heads["q"][t, h]) / config.head_dim**0.5
            attended[t, h] = scores.softmax(dim=0) @ values
    hidden = hidden + attended.flatten(1) @ weights["layers.0.self_attn.o_proj.weight"].T
    scale = (hidden.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    normed = hidden * scale * weights["layers.0.post_attention_layernorm.weight"]
    act = torch.nn.functional.silu if config.hidden_act == "silu" else torch.nn.functional.gelu
    gate = act(normed @ weights["layers.0.mlp.gate_proj.weight"].T)
    up = normed @ weights["layers.0.mlp.up_proj.weight"].T
    return hidden + (gate * up) @ weights["layers.0.mlp.down_proj.weight"].T


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_is_the_layer_that_the_paper_describes(variant):
    head = tiny_head(tiny_model(), **VARIANTS[variant])
    embeddings, features, positions = inputs(11)
    expected = reference(head, embeddings[0], features[0])
    torch.testing.assert_close(
        head(embeddings, features, positions)[0], expected, rtol=ROUNDING, atol=ROUNDING
    )


def test_the_embedding_comes_before_the_feature_in_fc():
    head = tiny_head(tiny_model())
    embeddings, features, positions = inputs(4)
    head.fc.weight[:, :32] = 0
    changed = head(embeddings + 1, features, positions)
    assert torch.equal(changed, head(embeddings, features, positions))
    assert not torch.equal(changed, head(embeddings, features + 1, positions))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (4, 5), (1, 7, 1), (6, 1, 1, 1)])
def test_reading_in_pieces_equals_one_full_pass(variant, sizes):
    head = tiny_head(tiny_model(), **VARIANTS[variant])
    embeddings, features, positions = inputs(9)
    full = head(embeddings, features, positions)
    cache, start, pieces = PreallocatedLayer(2), 0, []
    for size in sizes:
        rows = slice(start, start + size)
        mask = torch.ones(size, start + size, dtype=torch.bool).tril(start)
        pieces.append(
            head(
                embeddings[:, rows],
                features[:, rows],
                positions[:, rows],
                mask if start else None,
                cache,
            )
        )
        start += size
    assert cache.num_rows == 9
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=ROUNDING, atol=ROUNDING)


def test_no_row_sees_a_later_one():
    head = tiny_head(tiny_model())
    embeddings, features, positions = inputs(8)
    before = head(embeddings, features, positions)
    embeddings[:, 5:] += 1
    after = head(embeddings, features, positions)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_batch_is_its_rows():
    head = tiny_head(tiny_model())
    pairs = [inputs(6, seed) for seed in (0, 1)]
    both = head(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
    for row, pair in enumerate(pairs):
        torch.testing.assert_close(both[row], head(*pair)[0], rtol=ROUNDING, atol=ROUNDING)


# configuration


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3", "mistral", "mixtral"])
def test_the_usual_head_has_its_targets_shape(family):
    config = tiny_model(family).config
    head = DraftHeadConfig.for_target(config)
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ):
        assert getattr(head, name) == getattr(config, name)
    assert head.bias is head.qkv_bias is head.own_embeddings is False
    assert head.rope_parameters["rope_theta"] > 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_theta": 12345.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        LLAMA3,
        {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_theta": 10000.0,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.1, 2.2, 2.3],
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_the_head_turns_by_the_same_angles_as_its_target(parameters):
    model = tiny_model(rope_parameters=parameters)
    head = tiny_head(model)
    states, positions = torch.zeros(1, 60, 32), torch.arange(60)[None]
    expected = model.model.rotary_emb(states, positions)
    assert all(map(torch.equal, head.rotary(states, positions), expected))
    plain = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4))
    assert not torch.allclose(plain(states, positions)[0], expected[0])


def test_a_head_for_rope_by_layer_type_takes_the_full_layers():
    config = tiny_model().config
    full, sliding = {"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e4}
    config.rope_parameters = {"full_attention": full, "sliding_attention": sliding}
    assert DraftHeadConfig.for_target(config).rope_parameters == full


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size of a draft head must be a whole number >= 1, got 0"),
        ({"vocab_size": -5}, "vocab_size of a draft head must be a whole number >= 1, got -5"),
        ({"head_dim": 8.0}, "head_dim of a draft head must be a whole number >= 1, got 8.0"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads, got 3 and 4"),
        ({"num_key_value_heads": 8}, "must divide num_attention_heads, got 8 and 4"),
        ({"hidden_act": "sulu"}, "unknown hidden_act 'sulu'"),
    ],
)
def test_shapes_that_make_no_head_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        DraftHeadConfig.for_target(tiny_model().config, **changes)


# the drafter


class RecordingHead(DraftHead):
    """Notes what it is asked."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__(config)
        self.calls: list[tuple[Tensor, Tensor, list[int]]] = []

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        position_ids: Tensor,
        mask: Tensor | None = None,
        cache: PreallocatedLayer | None = None,
    ) -> Tensor:
        self.calls.append((embeddings[0], features[0], position_ids[0].tolist()))
        return super().forward(embeddings, features, position_ids, mask, cache)


def recording_drafter(target: TargetModel) -> tuple[RecordingHead, HeadDrafter]:
    head = RecordingHead(DraftHeadConfig.for_target(target.config))
    head.load_state_dict(tiny_head(target.model).state_dict())
    return head, HeadDrafter(head.eval(), target)


def test_feature_t_is_paired_with_token_t_plus_1_at_position_t():
    target = TargetModel(tiny_model())
    head, drafter = recording_drafter(target)
    prompt = torch.tensor([7, 3, 9, 1, 5])
    target.start(20)
    features = target.prefill(prompt).features
    drafter.start(20)
    drafter.commit(prompt, features)
    draft = drafter.propose(42, TreeConfig(4, 2, 2))
    embeddings, read, positions = head.calls[0]
    assert torch.equal(read, features)
    assert torch.equal(embeddings, target.embed(torch.tensor([3, 9, 1, 5, 42])))
    assert positions == [0, 1, 2, 3, 4]
    # Level 2: the root's children, each with the feature predicted for the root, at position n.
    children = draft.tree.token_ids[draft.tree.depths == 1]
    embeddings, read, positions = head.calls[1]
    assert torch.equal(embeddings, target.embed(children))
    assert torch.equal(read[0], read[1])
    assert positions == [5, 5]
    assert drafter.num_rows == 5


@torch.inference_mode()
def test_features_are_what_lm_head_reads():
    target = TargetModel(tiny_model("gemma2"))
    target.start(20)
    prompt = torch.tensor([7, 3, 9, 1, 5])
    output = target.prefill(prompt)
    assert output.features.shape == (5, 32)
    expected = target.model(prompt[None]).logits[0]
    torch.testing.assert_close(
        target.logits(output.features), expected, rtol=ROUNDING, atol=ROUNDING
    )


@pytest.mark.parametrize("own", [False, True])
def test_embeddings_are_the_targets_unless_the_head_has_its_own(own):
    target = TargetModel(tiny_model())
    drafter = head_drafter(target, own_embeddings=own)

    def best() -> list[int]:
        drafter.start(20)
        drafter.commit(torch.tensor([1, 2, 3]), torch.ones(3, 32))
        return drafter.propose(5, TreeConfig(8, 3, 3)).tree.token_ids.tolist()

    before = best()
    target.model.get_input_embeddings().weight.data.mul_(-3.0)
    assert (best() == before) == own


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_after_commits_the_drafter_is_as_if_fed_true_features_afresh(family):
    target = TargetModel(tiny_model(family))
    drafter = head_drafter(target)
    proposals = []
    propose = drafter.propose

    def noting(root: int, config: TreeConfig):
        draft = propose(root, config)
        proposals.append((root, config, draft, drafter.num_rows))
        return draft

    drafter.propose = noting
    prompt = random_prompt(random.Random(3), 20, 20)
    decoder = SpeculativeDecoder(target, drafter, tree=TreeConfig(12, 4, 3))
    result = decoder.generate(prompt, max_new_tokens=25, rule="fuzzy:inf:js")
    assert result.stats.num_rescued > 0
    text = [*prompt[0].tolist(), *result.token_ids]
    features = target.model.model(torch.tensor([text])).last_hidden_state[0].detach()
    assert len(proposals) > 3
    for root, config, draft, num_rows in proposals:
        # Rows of the head are exactly the committed tokens before the root.
        assert text[num_rows] == root
        fresh = head_drafter(target)
        fresh.start(len(text) + 20)
        fresh.commit(torch.tensor(text[:num_rows]), features[:num_rows])
        again = fresh.propose(root, config)
        assert torch.equal(again.tree.token_ids, draft.tree.token_ids)
        assert torch.equal(again.tree.parents, draft.tree.parents)
        torch.testing.assert_close(
            again.log_probs, draft.log_probs, rtol=ROUNDING, atol=10 * ROUNDING
        )


def test_draft_laws_are_those_of_a_sequential_pass_along_each_branch():
    target = TargetModel(tiny_model())
    drafter = head_drafter(target)
    prompt = torch.tensor([7, 3, 9, 1, 5])
    target.start(20)
    features = target.prefill(prompt).features
    drafter.start(20)
    drafter.commit(prompt, features)
    draft = drafter.propose(42, TreeConfig(30, 4, 3))
    draft.tree.check()
    for row in range(draft.tree.num_nodes):
        if draft.law_rows[row] < 0:
            continue
        branch, node = [], row
        while node >= 0:
            branch.insert(0, int(draft.tree.token_ids[node]))
            node = int(draft.tree.parents[node])
        # Each predicted feature is fed back, one token at a time, with no tree and no cache.
        known, tokens = features, prompt.tolist()[1:]
        for token in branch:
            tokens.append(token)
            embeddings = target.embed(torch.tensor(tokens))
            predicted = drafter.head(embeddings[None], known[None], torch.arange(len(tokens))[None])
            known = torch.cat([known, predicted[0, -1:]])
        law = target.logits(known[-1]).log_softmax(dim=-1)
        torch.testing.assert_close(
            draft.log_probs[draft.law_rows[row]], law, rtol=ROUNDING, atol=10 * ROUNDING
        )


def test_scores_are_cumulative_log_probabilities():
    target = TargetModel(tiny_model())
    drafter = head_drafter(target)
    drafter.start(20)
    drafter.commit(torch.tensor([1, 2, 3]), torch.ones(3, 32))
    draft = drafter.propose(5, TreeConfig(20, 3, 4))
    tree = draft.tree
    for row in range(1, tree.num_nodes):
        parent = int(tree.parents[row])
        law = draft.log_probs[draft.law_rows[parent]]
        expected = tree.scores[parent] + law[tree.token_ids[row]]
        torch.testing.assert_close(tree.scores[row], expected)


def test_a_drafter_keeps_nothing_from_one_request_to_the_next():
    target = TargetModel(tiny_model())
    drafter = head_drafter(target)
    proposals = []
    for start in (1, 50, 1):
        drafter.start(30)
        tokens = torch.arange(start, start + 4)
        drafter.commit(tokens, target.embed(tokens).detach())
        proposals.append(drafter.propose(5, TreeConfig(8, 3, 3)).tree.token_ids.tolist())
    assert proposals[0] == proposals[2] != proposals[1]


def test_more_children_than_tokens_are_all_tokens():
    target = TargetModel(tiny_model(vocab_size=6))
    drafter = head_drafter(target)
    drafter.start(20)
    drafter.commit(torch.tensor([1]), torch.ones(1, 32))
    draft = drafter.propose(5, TreeConfig(10, 1, 10))
    assert sorted(draft.tree.token_ids[1:].tolist()) == list(range(6))
