"""Packed weights against the layers that they stand for, and against a model's changes."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.device import available_bytes
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.packed import (
    PackedLayers,
    PackedWeight,
    copied_bytes,
    packable_layers,
    packed_product,
)
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import gains_by_packing
from tests.stubs import greedy_reference, random_prompt, tiny_head, tiny_model
from tests.train.tiny import tiny_tokenizer

NEW_TOKENS = 24


def planted(model: nn.Module) -> list[str]:
    """Modules that have a forward of their own at the moment."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


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
    scale = scale if bias is None else scale + bias.double().abs()
    assert float(((product - expected).abs() / scale).max()) < (1e-2 if is_half else 1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe", "phi3"])
def test_packed_layers_compute_the_same_and_leave_the_model_as_it_is(family: str) -> None:
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    layers = PackedLayers(model)
    tokens = random_prompt(random.Random(0))
    with torch.inference_mode():
        expected = model(tokens).logits
        with layers.computing():
            assert len(planted(model)) == layers.num_layers > 0
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert planted(model) == []
        assert torch.equal(model(tokens).logits, expected)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_a_pass_that_fails_leaves_the_model_as_it_is() -> None:
    model = tiny_model()
    layers = PackedLayers(model)

    def fail() -> None:
        with torch.inference_mode(), layers.computing():
            assert planted(model)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert planted(model) == []


def test_several_decoders_in_threads_share_one_model() -> None:
    model = tiny_model()
    prompts = [random_prompt(random.Random(seed)) for seed in range(3)]
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]

    def decode(prompt: Tensor) -> list[list[int]]:
        target = TargetModel(model, packs_weights=True)
        decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target), tree="8,3,3")
        return [decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for _ in range(8)]

    with ThreadPoolExecutor(3) as pool:
        for ids, wanted in zip(pool.map(decode, prompts), expected, strict=True):
            assert ids == [wanted] * 8
    assert planted(model) == []


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


def edit_a_row(model: nn.Module) -> None:
    lm_head = model.get_submodule("lm_head").weight
    with torch.no_grad():
        lm_head[::3] = lm_head.flip(0)[::3]


def edit_columns(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight[:, 1:] *= -1


def replace_parameters(model: nn.Module) -> None:
    attention = model.get_submodule("model.layers.0.self_attn")
    changed = attention.get_submodule("o_proj").weight.detach().clone()
    changed[:, 1:] *= -1
    attention.get_submodule("o_proj").weight = nn.Parameter(changed)
    norm = model.get_submodule("model.norm")
    norm.weight = nn.Parameter(torch.linspace(0.5, 2.0, norm.weight.numel()))


def replace_a_buffer(model: nn.Module) -> None:
    rotary = model.get_submodule("model.rotary_emb")
    rotary.inv_freq = rotary.inv_freq * 0.1


def replace_a_forward(model: nn.Module) -> None:
    mlp = model.get_submodule("model.layers.0.mlp")
    before = mlp.forward
    mlp.forward = lambda hidden: -before(hidden)


def set_an_attribute(model: nn.Module) -> None:
    model.get_submodule("model.layers.1.self_attn").scaling *= 3


def hook_by_accelerate(model: nn.Module) -> None:
    class Negative(accelerate.hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return -output

    accelerate.hooks.add_hook_to_module(model.get_submodule("model.layers.0.mlp"), Negative())


def hook_a_layer(model: nn.Module) -> None:
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    linear.register_forward_hook(lambda _module, _inputs, output: -output)


def convert(model: nn.Module) -> None:
    model.to(torch.float64)


CHANGES = [
    *(edit_a_weight, edit_data, edit_a_row, edit_columns, replace_a_module, replace_parameters),
    *(replace_a_buffer, replace_a_forward, set_an_attribute, add_a_hook, hook_a_layer),
    *(hook_by_accelerate, load_other_weights, convert),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_since_is_followed(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model()
    target = TargetModel(model, packs_weights=True)
    decoder = SpeculativeDecoder(target, HeadDrafter(tiny_head(model), target), tree="8,3,3")
    prompt = random_prompt(random.Random(1))
    first = greedy_reference(model, prompt, NEW_TOKENS)
    assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids == first
    change(model)
    second = greedy_reference(model, prompt, NEW_TOKENS)
    assert second != first or change is convert
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


def test_what_is_no_plain_layer_on_a_cpu_is_left_as_it_is() -> None:
    meta, half, split = tiny_model().to("meta"), tiny_model().to(torch.float16), tiny_model()
    accelerate.cpu_offload(split)
    with torch.inference_mode():
        uncounted = tiny_model()
    for model in (
        meta,
        half,
        split,
        uncounted,
        tiny_model(intermediate_size=0).model.layers[0].mlp,
    ):
        assert packable_layers(model) == []
        assert PackedLayers(model).num_layers == 0
    replaced = tiny_model()
    linear = replaced.model.layers[0].mlp.up_proj
    linear.forward = lambda rows: rows @ linear.weight.T  # as accelerate's hooks do
    assert len(packable_layers(replaced)) == len(packable_layers(tiny_model())) - 1


def hook_by_identity(model: Any) -> None:
    """Steering that looks at the module it is called for."""
    factors = {layer.mlp: factor for layer, factor in zip(model.model.layers, (1, -1), strict=True)}
    for mlp in factors:
        mlp.register_forward_hook(lambda module, _inputs, output: output * factors[module])


def class_that_looks_at_its_layers(model: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear
            linear.alpha = 0.7

        def forward(self, rows: Tensor) -> Tensor:
            factor = self.linear.alpha if isinstance(self.linear, nn.Linear) else -1.0
            return factor * self.linear(rows)

    model.model.layers[0].self_attn.o_proj = Scaled(model.model.layers[0].self_attn.o_proj)


def class_with_slots(model: Any) -> None:
    class Slotted(nn.Module):
        __slots__ = ("factor",)

        def forward(self, rows: Tensor) -> Tensor:
            return self.factor * rows

    slotted = Slotted()
    slotted.factor = -1.0
    model.model.layers[1].mlp.act_fn = slotted


@pytest.mark.parametrize(
    "change", [hook_by_identity, class_that_looks_at_its_layers, class_with_slots]
)
def test_modules_and_hooks_of_any_kind_meet_the_model_itself(
    change: Callable[[Any], None],
) -> None:
    model = tiny_model()
    model.guard, model.feed = threading.Lock(), iter(())
    change(model)
    decoder = SpeculativeDecoder(TargetModel(model, packs_weights=True), None)
    prompt = random_prompt(random.Random(6))
    expected = greedy_reference(model, prompt, NEW_TOKENS)
    assert decoder.plain(prompt, max_new_tokens=NEW_TOKENS).token_ids == expected


def test_a_hook_on_all_modules_is_heard() -> None:
    model = tiny_model()
    decoder = SpeculativeDecoder(TargetModel(model, packs_weights=True), None)
    prompt = random_prompt(random.Random(7))

    def negate(module: nn.Module, _inputs: object, output: Any) -> Any:
        return -output if isinstance(module, nn.Linear) and module.out_features == 64 else output

    handle = torch.nn.modules.module.register_module_forward_hook(negate)
    try:
        expected = greedy_reference(model, prompt, NEW_TOKENS)
        assert decoder.plain(prompt, max_new_tokens=NEW_TOKENS).token_ids == expected
    finally:
        handle.remove()


def test_state_that_a_pass_leaves_is_the_models_own() -> None:
    """Dynamic RoPE keeps its longest length and its frequencies in two places."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = tiny_model(rope_parameters=rope, max_position_embeddings=64)
    long, short = (torch.arange(n)[None] % 128 for n in (90, 20))
    expected = greedy_reference(model, long, 4)
    decoder = SpeculativeDecoder(TargetModel(model, packs_weights=True), None)
    decoder.plain(short, max_new_tokens=4)
    assert greedy_reference(model, long, 4) == expected


def test_what_did_not_change_is_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    layers = PackedLayers(model)
    packed: list[Tensor] = []

    class Counted(PackedWeight):
        def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
            packed.append(weight)
            super().__init__(weight, bias)

    monkeypatch.setattr("eagle_fsd.packed.PackedWeight", Counted)
    layers.refresh()
    assert packed == []
    edit_a_weight(model)
    layers.refresh()
    assert [id(each) for each in packed] == [id(model.model.layers[1].mlp.up_proj.weight)]


def test_autocast_converts_as_it_does_without_packing() -> None:
    model = tiny_model()
    prompt = random_prompt(random.Random(4))
    ids = []
    for packs in (False, True):
        decoder = SpeculativeDecoder(TargetModel(model, packs_weights=packs), None)
        with torch.autocast("cpu"):
            ids.append(decoder.plain(prompt, max_new_tokens=NEW_TOKENS).token_ids)
    assert ids[0] == ids[1]


def test_auto_packs_what_gains_where_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    size = sum(4 * each.in_features * each.out_features for each in linears)
    assert copied_bytes(packable_layers(model)) == size
    for is_faster in (True, False):
        monkeypatch.setattr("eagle_fsd.tuning._kept", lambda *_, answer=is_faster: answer)
        assert gains_by_packing(model) is is_faster
        assert not gains_by_packing(tiny_model().to(torch.float16))
    monkeypatch.setattr("eagle_fsd.tuning._kept", lambda *_: True)
    for available, packs in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr("eagle_fsd.tuning.available_bytes", lambda each=available: each)
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
        assert decoder.target.packs_weights is decoder.target.has_packed_weights is asked
    prompt = random_prompt(random.Random(3))
    expected = greedy_reference(decoder.target.model, prompt, NEW_TOKENS)
    assert decoder.plain(prompt, max_new_tokens=NEW_TOKENS).token_ids == expected


def test_another_word_than_auto_is_refused() -> None:
    with pytest.raises(ValueError, match="packed_weights must be True, False or auto, got 'yes'"):
        SpeculativeDecoder.from_pretrained(tiny_model(), packed_weights="yes")


def test_a_container_leaves_what_its_group_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_fsd.device._GROUP", tmp_path)
    machine = available_bytes()
    assert machine > 0
    (tmp_path / "memory.current").write_text("700\n")
    for limit, left in (("1000", 300), ("600", 0), ("max", None)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_bytes() == left if left is not None else available_bytes() > 1000
