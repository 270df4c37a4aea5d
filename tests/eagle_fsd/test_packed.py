"""Packed weights against the layers that they stand for, and against a model's changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.packed import (
    PackedLinear,
    PackedTwin,
    PackedWeight,
    copied_bytes,
    is_packable,
    packed_product,
)
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import gains_by_packing
from tests.stubs import greedy_reference, random_prompt, tiny_head, tiny_model
from tests.train.tiny import tiny_tokenizer

NEW_TOKENS = 24


def has_packed_layers(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


@given(
    rows=st.integers(1, 70),
    inner=st.integers(1, 80),
    outer=st.integers(1, 80),
    has_bias=st.booleans(),
    is_half=st.booleans(),
    is_strided=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_it_equals_the_written_out_product(
    rows: int, inner: int, outer: int, has_bias: bool, is_half: bool, is_strided: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if is_half else torch.float32
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    bias = torch.randn(outer, generator=generator).to(dtype) if has_bias else None
    given_rows = torch.randn(2, rows, inner, generator=generator).to(dtype)
    if is_strided:
        given_rows = given_rows.transpose(1, 2).contiguous().transpose(1, 2)
    expected = given_rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    product = PackedWeight(weight, bias)(given_rows)
    assert product.dtype == dtype
    scale = given_rows.double().abs() @ weight.double().abs().T + 1.0
    assert float(((product - expected).abs() / scale).max()) < (1e-2 if is_half else 1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe", "phi3"])
def test_the_twin_computes_the_same_and_the_model_stays_as_it_is(family: str) -> None:
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    twin = PackedTwin(model).model
    assert twin is not model
    assert has_packed_layers(twin)
    assert not has_packed_layers(model)
    tokens = random_prompt(random.Random(0))
    with torch.inference_mode():
        torch.testing.assert_close(twin(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert {id(each) for each in twin.parameters()} == {id(each) for each in model.parameters()}


def test_training_goes_on_through_the_model_itself() -> None:
    target = TargetModel(tiny_model(), packs_weights=True)
    features = torch.randn(3, target.hidden_size, requires_grad=True)
    target.logits(features).sum().backward()
    assert features.grad is not None
    assert bool((features.grad != 0).any())


def edit_a_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight.mul_(-1.5)


def edit_data(model: nn.Module) -> None:
    """As peft does when it merges an adapter: PyTorch's version counter stays."""
    weight = model.get_submodule("model.layers.0.self_attn.o_proj").weight
    assert isinstance(weight, nn.Parameter)
    weight.data += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def replace_a_module(model: nn.Module) -> None:
    other = tiny_model(seed=5)
    model.get_submodule("model").layers[0] = other.model.layers[0]


def add_a_hook(model: nn.Module) -> None:
    def halve(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output / 2

    model.get_submodule("model.layers.1.mlp").register_forward_hook(halve)


def load_other_weights(model: nn.Module) -> None:
    model.load_state_dict(tiny_model(seed=9).state_dict())


@pytest.mark.parametrize(
    "change", [edit_a_weight, edit_data, replace_a_module, add_a_hook, load_other_weights]
)
def test_a_model_that_was_changed_since_is_followed(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model()
    target = TargetModel(model, packs_weights=True)
    decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target), tree="8,3,3")
    prompt = random_prompt(random.Random(1))
    first = greedy_reference(model, prompt, NEW_TOKENS)
    assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids == first
    change(model)
    second = greedy_reference(model, prompt, NEW_TOKENS)
    assert second != first
    assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids == second


def test_a_head_that_was_trained_on_since_is_followed() -> None:
    model = tiny_model()
    packed, plain = (TargetModel(model, packs_weights=packs) for packs in (True, False))
    head = tiny_head(model)
    decoders = [SpeculativeDecoder(t, HeadDrafter(head, t), tree="8,3,3") for t in (packed, plain)]
    prompt = random_prompt(random.Random(2))
    for _ in range(2):
        results = [each.generate(prompt, max_new_tokens=NEW_TOKENS) for each in decoders]
        assert results[0].token_ids == results[1].token_ids
        assert results[0].stats.num_cycles == results[1].stats.num_cycles
        head.load_state_dict(tiny_head(model, seed=8).state_dict())


def test_what_is_no_plain_model_on_a_cpu_is_left_as_it_is() -> None:
    meta = tiny_model().to("meta")
    half = tiny_model().to(torch.float16)
    hooked = tiny_model()
    add_a_hook(hooked)
    replaced = tiny_model()
    replaced.model.layers[0].mlp.forward = lambda hidden: hidden  # as accelerate's hooks do
    for model in (meta, half, hooked, replaced, nn.Identity()):
        assert not is_packable(model)
        assert PackedTwin(model).model is model
    assert is_packable(tiny_model())


def test_auto_packs_what_gains_where_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    size = sum(4 * each.in_features * each.out_features for each in linears)
    assert copied_bytes(model) == size
    for is_faster in (True, False):
        monkeypatch.setattr("eagle_fsd.tuning._kept", lambda *_, answer=is_faster: answer)
        assert gains_by_packing(model) is is_faster
        assert not gains_by_packing(tiny_model().to(torch.float16))
    monkeypatch.setattr("eagle_fsd.tuning._kept", lambda *_: True)
    for available, packs in ((2 * size, True), (2 * size - 1, False)):
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr("eagle_fsd.tuning.psutil.virtual_memory", lambda m=memory: m)
        assert gains_by_packing(model) is packs


def test_a_build_without_the_operation_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = torch.ones(2, 3), torch.ones(4, 3)
    product = packed_product(rows, weight)
    assert product is not None
    assert torch.equal(product(), torch.full((2, 4), 3.0))

    def missing(*_: object) -> Tensor:
        raise RuntimeError("no oneDNN")

    monkeypatch.setattr("eagle_fsd.packed.PackedWeight", missing)
    assert packed_product(rows, weight) is None


@pytest.mark.parametrize("asked", [True, False, "auto"])
def test_packed_weights_are_asked_for_while_loading(asked: bool | str) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        tiny_model(), tokenizer=tiny_tokenizer(), packed_weights=asked
    )
    assert isinstance(decoder.target, TargetModel)
    if asked != "auto":
        assert decoder.target.packs_weights is asked
    prompt = random_prompt(random.Random(3))
    expected = greedy_reference(decoder.target.model, prompt, NEW_TOKENS)
    assert decoder.plain(prompt, max_new_tokens=NEW_TOKENS).token_ids == expected


def test_another_word_than_auto_is_refused() -> None:
    with pytest.raises(ValueError, match="packed_weights must be True, False or auto, got 'yes'"):
        SpeculativeDecoder.from_pretrained(tiny_model(), packed_weights="yes")
