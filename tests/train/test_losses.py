import pytest
import torch
from torch.nn import functional as F

from eagle_fsd.config import TreeConfig
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from tests.train.tiny import H, V, tiny_head, tiny_model
from train.losses import (
    CPU_ROWS_AT_ONCE,
    Batch,
    LossConfig,
    TargetLaw,
    add_feature_noise,
    batch_loss,
    feature_distance,
    is_drafted,
    ranks,
    soft_cross_entropy,
    training_rows,
    unroll,
)


@pytest.fixture(scope="module")
def target():
    return TargetModel(tiny_model())


@pytest.fixture
def head():
    return tiny_head()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


def make_batch(target, lengths, supervised=None):
    """Rows of conversations with random tokens and the target's true features."""
    parts = []
    for length in lengths:
        ids = torch.randint(0, V, (length + 2,))
        features = target.model.model(input_ids=ids[None]).last_hidden_state[0]
        parts.append((training_rows(ids, torch.ones(length + 2, dtype=torch.bool)), features))
    return Batch(
        token_ids=torch.cat([rows.token_ids for rows, _ in parts]),
        position_ids=torch.cat([rows.position_ids for rows, _ in parts]),
        is_supervised=torch.ones(sum(lengths), dtype=torch.bool)
        if supervised is None
        else torch.tensor(supervised),
        features=torch.cat([features[:-2] for _, features in parts]),
        targets=torch.cat([features[1:-1] for _, features in parts]),
        lengths=lengths,
    )


def loss_of(head, target, batch, config=None, law=None):
    embeddings = target.embed(batch.token_ids)
    return batch_loss(head, embeddings, batch, law or TargetLaw(target), config or LossConfig())


# Which rows learn


def test_eight_token_toy_pairs_and_supervises_by_hand():
    ids = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17])
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.bool)  # the answer: tokens 4 to 6
    rows = training_rows(ids, mask)
    #  row t                       0      1     2     3     4     5
    #  takes token t+1            11     12    13    14    15    16
    #  is compared on token t+2   12     13    14    15    16    17
    assert rows.token_ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert rows.position_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.is_supervised.tolist() == [False, False, True, True, True, False]


def test_eight_token_toy_gives_gradient_to_the_answers_rows_alone(target, head):
    mask = [False, False, True, True, True, False]
    batch = make_batch(target, [6], mask)
    outputs = []
    head.layers[0].mlp.register_forward_hook(lambda *args: outputs.append(args[2]))
    loss = loss_of(head, target, batch)
    (gradient,) = torch.autograd.grad(loss.total, outputs)
    assert (gradient.abs().sum(dim=-1) > 0).tolist() == mask
    assert loss.step_counts.tolist() == [3]


def test_row_t_is_compared_with_the_law_of_token_t_plus_2(target, head):
    ids = torch.randint(0, V, (8,))
    outputs = target.model(input_ids=ids[None], output_hidden_states=True)
    features = target.model.model(input_ids=ids[None]).last_hidden_state[0]
    rows = training_rows(ids, torch.ones(8, dtype=torch.bool))
    predicted = unroll(head, target.embed(rows.token_ids), features[:-2], rows.position_ids, [6], 1)
    losses = soft_cross_entropy(predicted, features[1:-1], TargetLaw(target))[0]
    law_of_token_2_on = outputs.logits[0, 1:-1].softmax(-1)
    expected = -(law_of_token_2_on * target.logits(predicted[0]).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_conversation_too_short_for_a_row_has_none(length):
    rows = training_rows(torch.zeros(length).long(), torch.ones(length).bool())
    assert [len(rows.token_ids), len(rows.position_ids), len(rows.is_supervised)] == [0, 0, 0]


def test_ids_and_mask_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length, got 3 and 2"):
        training_rows(torch.zeros(3).long(), torch.ones(2).bool())


# The unrolled forward


@pytest.mark.parametrize("num_prompt", [1, 2, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_unrolled_steps_are_what_the_decoder_drafts_at_each_depth(target, num_prompt, bias):
    depth, head = 4, tiny_head(bias=bias)
    prefix = torch.randint(0, V, (num_prompt,))
    features = target.model.model(input_ids=prefix[None]).last_hidden_state[0]
    drafter = HeadDrafter(head, target)
    drafter.start(64)
    drafter.commit(prefix, features)
    draft = drafter.propose(root_token_id=7, config=TreeConfig(depth, depth, 1))  # a chain
    ids = torch.cat([prefix, draft.tree.token_ids])
    # Features behind the prompt must not be looked at by steps that were drafted from it.
    padded = torch.cat([features, torch.randn(depth + 1, H)])
    length = num_prompt + depth - 1
    with torch.no_grad():
        predicted = unroll(
            head,
            target.embed(ids[1 : length + 1]),
            padded[:length],
            torch.arange(length),
            [length],
            depth,
        )
    for step in range(depth):
        law = target.logits(predicted[step, num_prompt - 1 + step]).log_softmax(-1)
        torch.testing.assert_close(law, draft.log_probs[step], rtol=1e-4, atol=1e-4)


def test_unrolled_steps_equal_one_by_one_decoding_at_every_position(target, head):
    """Slow reference: for each prefix, rows are fed one at a time as the decoder feeds them."""
    length, depth = 7, 3
    batch = make_batch(target, [length])
    embeddings = target.embed(batch.token_ids)
    with torch.no_grad():
        predicted = unroll(head, embeddings, batch.features, batch.position_ids, [length], depth)
        for num_true in range(1, length + 1):
            inputs = batch.features[:num_true]
            for step in range(min(depth, length - num_true + 1)):
                stop = num_true + step
                rows = head(embeddings[None, :stop], inputs[None], torch.arange(stop)[None], None)[
                    0
                ]
                expected, found = rows[-1], predicted[step, stop - 1]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
                inputs = torch.cat([inputs, expected[None]])


@pytest.mark.parametrize("num_steps", [1, 3])
def test_packed_conversations_do_not_see_each_other(target, head, num_steps):
    lengths = [5, 1, 2, 9]
    batch = make_batch(target, lengths)
    embeddings = target.embed(batch.token_ids)
    with torch.no_grad():
        packed = unroll(head, embeddings, batch.features, batch.position_ids, lengths, num_steps)
        start = 0
        drafted = is_drafted(lengths, num_steps, torch.device("cpu"))
        for length in lengths:
            rows = slice(start, start + length)
            alone = unroll(
                head, embeddings[rows], batch.features[rows], torch.arange(length), [length],
                num_steps,
            )  # fmt: skip
            counts = drafted[:, rows]
            torch.testing.assert_close(packed[:, rows][counts], alone[counts])
            start += length


def test_rows_without_drafted_ancestors_are_told():
    assert is_drafted([3, 1], 3, torch.device("cpu")).int().tolist() == [
        [1, 1, 1, 1],
        [0, 1, 1, 0],
        [0, 0, 1, 0],
    ]


def test_the_gradient_flows_through_the_heads_own_features(target, head):
    batch = make_batch(target, [6])
    last = [False] * 5 + [True]
    batch = Batch(**(vars(batch) | {"is_supervised": torch.tensor(last)}))
    outputs = []
    head.layers[0].mlp.register_forward_hook(lambda *args: outputs.append(args[2]))
    loss = loss_of(head, target, batch, LossConfig(num_steps=2))
    first, second = torch.autograd.grad(loss.total, outputs)
    assert (second.abs().sum(-1) > 0).tolist() == last
    assert (first.abs().sum(-1) > 0).tolist() == [False] * 4 + [True, True]


# The loss


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("num_tokens", [None, 17])
def test_cross_entropy_and_gradient_equal_the_plain_formula(target, cap, num_tokens, monkeypatch):
    ids = None if num_tokens is None else torch.randperm(V)[:num_tokens].sort().values
    monkeypatch.setattr(target, "_cap", lambda x: x if cap is None else torch.tanh(x / cap) * cap)
    law = TargetLaw(target, ids)
    num_rows = CPU_ROWS_AT_ONCE + 3
    predicted = torch.randn(2, num_rows, H, requires_grad=True)
    targets = torch.randn(num_rows, H)
    weights = torch.rand(2, num_rows)
    losses = soft_cross_entropy(predicted, targets, law)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), predicted)
    probs = law.logits(targets).softmax(-1)
    plain = -(probs * law.logits(predicted).log_softmax(-1)).sum(-1)
    (expected,) = torch.autograd.grad((plain * weights).sum(), predicted)
    torch.testing.assert_close(losses, plain)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_law_over_a_draft_vocabulary_is_the_restricted_one(target):
    ids = torch.tensor([3, 50, 99])
    features = torch.randn(5, H)
    law = TargetLaw(target, ids)
    whole = target.logits(features)
    torch.testing.assert_close(law.logits(features), whole[:, ids])
    best = whole.argmax(-1)
    expected = [ids.tolist().index(b) if b in ids.tolist() else -1 for b in best.tolist()]
    assert law.best(features).tolist() == expected
    assert law.size == 3


def test_a_perfect_head_has_the_entropy_as_its_loss_and_no_gradient(target):
    features = torch.randn(1, 4, H, requires_grad=True)
    losses = soft_cross_entropy(features, features[0].detach(), TargetLaw(target))
    probs = target.logits(features[0]).softmax(-1)
    torch.testing.assert_close(losses[0], torch.distributions.Categorical(probs).entropy())
    (gradient,) = torch.autograd.grad(losses.sum(), features)
    assert gradient.abs().max() < 1e-6  # rounding of fp32 softmax


def test_a_batch_without_supervised_rows_has_zero_loss_and_no_nan(target, head):
    batch = make_batch(target, [4, 3], [False] * 7)
    loss = loss_of(head, target, batch, LossConfig(num_steps=2, smooth_l1=0.1))
    loss.total.backward()
    assert loss.total == 0
    assert loss.step_counts.tolist() == [0, 0]
    assert loss.segment_sums.tolist() == [0, 0]
    for parameter in head.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def test_nan_features_spoil_their_own_conversation_alone(target, head):
    batch = make_batch(target, [4, 5, 3])
    batch.features[5] = torch.nan
    sums = loss_of(head, target, batch).segment_sums
    assert sums.isfinite().tolist() == [True, False, True]


def test_sums_of_a_batch_add_up(target, head):
    batch = make_batch(target, [4, 5], [True] * 3 + [False] * 3 + [True] * 3)
    config = LossConfig(num_steps=2, decay=0.5, smooth_l1=0.3)
    loss = loss_of(head, target, batch, config)
    torch.testing.assert_close(loss.segment_sums.sum(), loss.total.detach())
    assert loss.step_counts.tolist() == [6, 5]
    assert config.weights() == pytest.approx([2 / 3, 1 / 3])
    plain = loss_of(head, target, batch, LossConfig(num_steps=2, decay=0.5))
    torch.testing.assert_close(
        plain.total.detach(), (plain.step_sums * torch.tensor([2 / 3, 1 / 3])).sum()
    )
    assert loss.total > plain.total


def test_feature_distance_is_the_mean_smooth_l1():
    predicted, targets = torch.randn(2, 3, H), torch.randn(3, H)
    expected = F.smooth_l1_loss(predicted[1, 2], targets[2])
    torch.testing.assert_close(feature_distance(predicted, targets)[1, 2], expected)


def test_noise_is_seeded_bounded_and_smaller_on_longer_conversations():
    zeros = torch.zeros(256, H)
    noise = add_feature_noise(zeros, 0.2, seed=3)
    assert torch.equal(noise, add_feature_noise(zeros, 0.2, seed=3))
    assert not torch.equal(noise, add_feature_noise(zeros, 0.2, seed=4))
    assert 0.19 < noise.abs().max() <= 0.2  # 0.2 / 2 * 512 / 256
    assert abs(noise.mean()) < 0.01


def test_rank_counts_better_tokens_and_a_missing_token_ranks_last():
    scores = torch.tensor([[1.0, 3.0, 2.0]] * 3)
    found = ranks(scores, torch.tensor([1, 0, -1])).tolist()
    assert found == [0, 2, 2**63 - 1]  # a missing token is no hit, however few tokens there are


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "unroll must be >= 1 step, got 0"),
        ({"decay": 0.0}, "unroll_decay must be > 0, got 0.0"),
        ({"smooth_l1": -1.0}, "smooth_l1 must be >= 0, got -1.0"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**changes)


def test_ids_outside_the_targets_vocabulary_are_refused(target):
    with pytest.raises(ValueError, match=r"ids 3\.\.128, the target has 128 tokens"):
        TargetLaw(target, torch.tensor([3, V]))
