"""Packed attention of grouped heads against the plain formula."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.attention import PACKED, packed_attention
from tests.stubs import greedy_reference, random_prompt, tiny_model
from tests.train.tiny import tiny_tokenizer


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float):
    """Head by head, with the softmax written out."""
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].transpose(-1, -2) * scale
        if mask is None:
            length = query.shape[2]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        else:
            scores = scores + mask[:, 0]
        out[:, head] = scores.softmax(-1) @ value[:, head // groups]
    return out.transpose(1, 2)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("has_mask", [True, False])
def test_it_equals_the_plain_formula(groups: int, length: int, has_mask: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    num_keys = 20 if has_mask else length
    query = torch.randn(2, 2 * groups, length, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, num_keys, 8, generator=generator)
    mask = None
    if has_mask:
        is_hidden = torch.rand(1, 1, length, num_keys, generator=generator) < 0.4
        is_hidden[..., 0] = False
        mask = torch.zeros(is_hidden.shape).masked_fill(is_hidden, torch.finfo().min)
    layer = nn.Module()
    layer.num_key_value_groups = groups
    attended, weights = packed_attention(layer, query, key, value, mask, scaling=0.3)
    assert weights is None
    # Another order of the sums than in the formula.
    torch.testing.assert_close(
        attended, reference(query, key, value, mask, 0.3), rtol=1e-5, atol=1e-6
    )


def test_a_target_that_is_loaded_for_a_cpu_uses_it_and_gives_the_same_ids(tmp_path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()

    tokenizer = tiny_tokenizer()
    prompt = random_prompt(random.Random(0))
    expected = greedy_reference(model, prompt, 30)
    for asked, used in ((None, PACKED), ("sdpa", "sdpa"), ("eager", "eager"), (PACKED, PACKED)):
        options = {} if asked is None else {"attn_implementation": asked}
        decoder = SpeculativeDecoder.from_pretrained(tmp_path, tokenizer=tokenizer, **options)
        assert decoder.target.model.config._attn_implementation == used
        assert decoder.plain(prompt, max_new_tokens=30).token_ids == expected
