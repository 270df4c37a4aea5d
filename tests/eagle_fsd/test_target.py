"""One pass over a tree gives what one pass a path gives; rows are kept and dropped rightly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from eagle_fsd.attention import PACKED
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.errors import UnsupportedModelError
from eagle_fsd.target import TargetModel
from tests.stubs import (
    ATTENTION,
    FAMILY_CONFIGS,
    VOCABULARY,
    PathDrafter,
    greedy_reference,
    tiny_model,
)
from tree import DraftTree

CASES = [
    (family, attention) for family in sorted(FAMILY_CONFIGS) for attention in ATTENTION[family]
]
# Two fp32 passes of other shapes round differently, by about 1e-6 of the logits' size here.
CLOSE = 1e-4


def random_tree(rng: random.Random, nodes: int, root: int) -> DraftTree:
    """Parents anywhere before their children, depths ascending, siblings distinct."""
    parents, depths = [-1], [0]
    for _ in range(nodes - 1):
        parent = rng.randrange(len(parents))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    order = sorted(range(nodes), key=lambda row: depths[row])
    place = {row: new for new, row in enumerate(order)}
    tokens = rng.sample(range(VOCABULARY), nodes)
    tokens[0] = root
    return DraftTree(
        token_ids=torch.tensor(tokens),
        parents=torch.tensor([-1 if parents[row] < 0 else place[parents[row]] for row in order]),
        depths=torch.tensor([depths[row] for row in order]),
        scores=torch.zeros(nodes),
    )


def path_to(tree: DraftTree, row: int) -> list[int]:
    """Rows from the root to `row`."""
    rows = [row]
    while tree.parents[rows[0]] >= 0:
        rows.insert(0, int(tree.parents[rows[0]]))
    return rows


def sequential_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    """[V] logits that follow the tokens, from one pass of the unmodified model without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


def assert_tree_equals_sequential(
    target: TargetModel, tree: DraftTree, prefix: list[int], logits: Tensor
) -> None:
    tokens = tree.token_ids.tolist()
    for depth in set(tree.depths.tolist()):  # paths of one length make one batch
        rows = [row for row in range(tree.num_nodes) if tree.depths[row] == depth]
        texts = [prefix + [tokens[r] for r in path_to(tree, row)] for row in rows]
        with torch.inference_mode():
            expected = target.model(torch.tensor(texts), use_cache=False).logits[:, -1]
        torch.testing.assert_close(logits[rows], expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_tree_logits_equal_sequential_logits_before_and_after_commits(
    family: str, attention: str
) -> None:
    rng = random.Random(3)
    target = TargetModel(tiny_model(family, attention), prefill_chunk=7)
    prefix = [rng.randrange(VOCABULARY) for _ in range(19)]  # past the window of 16
    target.start(capacity=4)  # far too small: the cache must grow
    output = target.prefill(torch.tensor(prefix))
    torch.testing.assert_close(
        output.logits[0], sequential_logits(target.model, prefix), rtol=0, atol=CLOSE
    )
    scattered = 0
    for _ in range(4):
        tree = random_tree(rng, 12, root=rng.randrange(VOCABULARY))
        output = target.score(tree)
        assert_tree_equals_sequential(target, tree, prefix, output.logits)
        with torch.inference_mode():
            torch.testing.assert_close(target.logits(output.features), output.logits)
        path = path_to(tree, rng.choice([row for row in range(12) if tree.depths[row] >= 2]))
        scattered += path != list(range(len(path)))
        target.commit(path)
        prefix += tree.token_ids[torch.tensor(path)].tolist()
        assert target.num_rows == len(prefix)
    assert scattered > 0


@pytest.mark.parametrize(
    "family",
    ["mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"],
)
def test_families_with_windows_are_right_without_them(family: str) -> None:
    window = 0 if family == "qwen2_moe" else None  # what their configs make of it
    model = tiny_model(
        family,
        PACKED,
        use_sliding_window=False,
        sliding_window=window,
        layer_types=["full_attention"] * 2,
    )
    target = TargetModel(model)
    prefix = [token % VOCABULARY for token in range(30)]
    target.start(64)
    target.prefill(torch.tensor(prefix))
    tree = random_tree(random.Random(5), 12, root=3)
    assert_tree_equals_sequential(target, tree, prefix, target.score(tree).logits)


def test_logits_are_scaled_where_the_family_scales_them() -> None:
    target = TargetModel(tiny_model("granite"))
    scores = torch.tensor([[4.0, -8.0]])
    assert torch.equal(target.cap(scores), scores / 4)
    assert torch.equal(TargetModel(tiny_model()).cap(scores), scores)


def test_longrope_ends_the_context_where_its_angles_would_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    target = TargetModel(model)
    assert target.max_positions == 64
    prompt = torch.arange(40)[None]
    expected = greedy_reference(model, prompt, 24)
    drafter = PathDrafter(expected, 40, is_right=True)
    result = SpeculativeDecoder(target, drafter).generate(prompt, tree="8,3,3", max_new_tokens=100)
    assert result.finish_reason == "context"
    assert result.token_ids == expected


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_node_does_not_see_its_sibling(family: str, attention: str) -> None:
    target = TargetModel(tiny_model(family, attention))
    prefix = torch.arange(20) % VOCABULARY
    tree = DraftTree(
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([-1, 0, 0, 1]),
        torch.tensor([0, 1, 1, 2]),
        torch.zeros(4),
    )
    changed = DraftTree(torch.tensor([5, 6, 99, 8]), tree.parents, tree.depths, tree.scores)
    outputs = []
    for candidate in (tree, changed):
        target.start(64)
        target.prefill(prefix)
        outputs.append(target.score(candidate).logits)
    others = [0, 1, 3]  # close, not equal: experts batch their tokens
    torch.testing.assert_close(outputs[0][others], outputs[1][others], rtol=0, atol=CLOSE)
    assert not torch.allclose(outputs[0][2], outputs[1][2], atol=0.1)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_features_are_what_lm_head_reads(family: str, attention: str) -> None:
    target = TargetModel(tiny_model(family, attention))
    read: list[Tensor] = []
    hook = target.model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, inputs: read.append(inputs[0])
    )
    try:
        with torch.inference_mode():
            target.model(torch.arange(10)[None])
    finally:
        hook.remove()
    target.start(16)
    features = target.prefill(torch.arange(10)).features
    torch.testing.assert_close(features, read[0][0], rtol=0, atol=CLOSE)


def test_a_request_leaves_nothing_behind() -> None:
    """A long, a short, then the first prompt again: the third logits are the first's."""
    target = TargetModel(tiny_model())
    long, short = torch.arange(100) % VOCABULARY, torch.tensor([3, 1, 4])
    results = []
    for prompt in (long, short, long):
        target.start(prompt.numel() + 8)
        results.append(target.prefill(prompt).logits)
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(
        results[1][0], sequential_logits(target.model, [3, 1, 4]), rtol=0, atol=CLOSE
    )


def test_a_model_converted_after_loading_is_followed() -> None:
    model = tiny_model().to(torch.bfloat16)
    target = TargetModel(model)
    target.start(16)
    assert target.prefill(torch.arange(5)).logits.dtype == torch.bfloat16
    model.float()
    target.start(16)
    assert target.dtype == torch.float32
    logits = target.prefill(torch.arange(5)).logits[0]
    torch.testing.assert_close(logits, sequential_logits(model, list(range(5))), rtol=0, atol=CLOSE)


def test_the_target_is_not_changed() -> None:
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(vars(model)) | {f"model.{name}" for name in vars(model.model)}
    target = TargetModel(model)
    target.start(32)
    target.prefill(torch.arange(9))
    target.score(random_tree(random.Random(0), 6, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(vars(model)) | {f"model.{name}" for name in vars(model.model)} == attributes


def test_a_model_changed_since_it_was_looked_at_is_refused() -> None:
    target = TargetModel(tiny_model())
    target.model.train()
    with pytest.raises(ValueError, match=r"call model\.eval"):
        target.start(8)
    target.model.eval()
    target.start(8)
    target.model.set_output_embeddings(torch.nn.Linear(32, VOCABULARY, bias=False))
    with pytest.raises(ValueError, match="lm_head was replaced"):
        target.start(8)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("repetition_penalty", 1.3), ("suppress_tokens", [4]), ("num_beams", 3), ("min_length", 9)],
)
def test_settings_of_the_generation_config_that_are_not_applied_are_named(
    setting: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    TargetModel(model)
    assert not caplog.records
    setattr(model.generation_config, setting, value)
    TargetModel(model)
    assert f"{setting}={value!r}" in caplog.text


@pytest.mark.parametrize(
    ("eos", "expected"),
    [(None, set()), (3, {3}), ([3, 5], {3, 5}), (-1, set()), (torch.tensor([4]), {4})],
)
def test_stop_ids_of_every_written_form_are_understood(eos: object, expected: set[int]) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = eos
    assert TargetModel(model).stop_ids == expected


@pytest.mark.parametrize("eos", ["abc", [[1]], 1.0, True])
def test_stop_ids_that_are_no_numbers_are_refused(eos: object) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = eos
    with pytest.raises(TypeError, match="whole numbers"):
        _ = TargetModel(model).stop_ids


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: transformers.T5ForConditionalGeneration(_tiny_t5()), "encoder-decoder"),
        (lambda: transformers.MambaForCausalLM(_tiny_mamba()), "state-space"),
        (lambda: transformers.GPT2LMHeadModel(_tiny_gpt2()), "not a family"),
        (lambda: transformers.LlamaModel(FAMILY_CONFIGS["llama"]()), "no lm_head"),
        (lambda: tiny_model().train(), r"call model\.eval"),
        (lambda: _as_family(tiny_model("gemma3_text"), "gemma3"), "reads images"),
        (lambda: tiny_model("gemma3_text", use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_what_is_not_proven_is_refused_with_what_is(make: object, reason: str) -> None:
    model = make().eval() if reason != r"call model\.eval" else make()  # type: ignore[operator]
    with pytest.raises(ValueError, match=reason):
        TargetModel(model)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_tree_mask_is_refused(attention: str) -> None:
    model = tiny_model()
    model.config._attn_implementation = attention
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa' or 'eager'"):
        TargetModel(model)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_kernel_that_leaves_out_what_eager_adds_is_refused(family: str) -> None:
    model = tiny_model(family)
    model.config._attn_implementation = PACKED
    with pytest.raises(UnsupportedModelError, match="attn_implementation='eager'"):
        TargetModel(model)


def test_unknown_layer_types_are_refused() -> None:
    model = tiny_model("qwen2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        TargetModel(model)


def test_something_between_lm_head_and_logits_is_refused() -> None:
    class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.5
            return output

    with pytest.raises(UnsupportedModelError, match="between lm_head and its logits"):
        TargetModel(Scaled(FAMILY_CONFIGS["llama"]()).eval())


def _as_family(model: transformers.PreTrainedModel, family: str) -> transformers.PreTrainedModel:
    model.config.model_type = family
    return model


def _tiny_t5() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )


def _tiny_mamba() -> transformers.MambaConfig:
    return transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4
    )


def _tiny_gpt2() -> transformers.GPT2Config:
    return transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)


def to_flex_attention(model: Any) -> None:
    model.set_attn_implementation("flex_attention")


def shrink(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY - 28)


def enlarge(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY + 32)


def hook_the_logits(model: Any) -> None:
    def negate(_module: nn.Module, _inputs: object, output: Any) -> Any:
        output["logits"] = -output["logits"]
        return output

    model.register_forward_hook(negate)


def add_a_layer(model: Any) -> None:
    layer = tiny_model(seed=3).model.layers[1]
    layer.self_attn.layer_idx = 2
    model.model.layers.append(layer)
    model.config.num_hidden_layers = 3


def cap_the_logits(model: Any) -> None:
    model.config.final_logit_softcapping = 2.0


def invoke_an_adapter(model: Any) -> None:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4]
    )
    peft.get_peft_model(model, config)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (to_flex_attention, "attention 'flex_attention' takes no tree mask"),
        (shrink, "embeddings were resized; make a new decoder"),
        (enlarge, "embeddings were resized; make a new decoder"),
        (hook_the_logits, "forward was changed; make a new decoder"),
        (add_a_layer, "configuration was changed; make a new decoder"),
        (cap_the_logits, "configuration was changed; make a new decoder"),
        (invoke_an_adapter, "adapter 'default' of kind LORA"),
    ],
)
def test_a_change_that_would_be_decoded_wrongly_is_refused_at_the_next_request(
    change: Callable[[Any], None], message: str, packs: bool
) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.tie_weights()
    decoder = SpeculativeDecoder(TargetModel(model, packs_weights=packs), None)
    prompt = torch.tensor([[1, 2, 110]])
    before = decoder.plain(prompt, max_new_tokens=4)
    assert before.token_ids == greedy_reference(model, prompt, 4)
    change(model)
    for temperature in (0.0, 1.0):
        with pytest.raises((ValueError, UnsupportedModelError), match=message):
            decoder.plain(prompt, max_new_tokens=4, temperature=temperature)


def test_activations_quantised_over_all_tokens_of_a_pass_are_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(tiny_model(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match="scale depends on all tokens of a pass"):
        TargetModel(model)
