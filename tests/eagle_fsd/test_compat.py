"""EAGLE's samples and loops after one changed import."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_fsd.checkpoint import save_head
from eagle_fsd.compat import EaModel
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.drafter import HeadDrafter, ModelDrafter
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import TreeChoice, setting_of, store_choice
from tests.scripted import byte_tokenizer
from tests.stubs import (
    VOCABULARY,
    greedy_reference,
    head_drafter,
    random_prompt,
    tiny_head,
    tiny_model,
)

PROMPT = torch.tensor([[72, 101, 108, 108, 111]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target with a tokenizer, and its head."""
    root = tmp_path_factory.mktemp("models")
    model = tiny_model(vocab_size=272)
    model.save_pretrained(root / "target")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    tokenizer.save_pretrained(root / "target")
    save_head(tiny_head(model), root / "head")
    return str(root / "target"), str(root / "head")


@pytest.fixture
def model(folders: tuple[str, str]) -> EaModel:
    return load(folders)


def load(folders: tuple[str, str], **options: Any) -> EaModel:
    base, head = folders
    return EaModel.from_pretrained(
        base_model_path=base, ea_model_path=head, device="cpu", **options
    )


def reference(model: EaModel, prompt: Tensor, max_new_tokens: int) -> list[int]:
    return greedy_reference(model.base_model, prompt, max_new_tokens)


# The samples


def test_the_readme_sample_runs(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    base_model_path, ea_model_path = folders
    fastchat_model = pytest.importorskip("fastchat.model", exc_type=ImportError)
    get_conversation_template = fastchat_model.get_conversation_template
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)  # the tests have no GPU

    model = EaModel.from_pretrained(
        base_model_path=base_model_path,
        ea_model_path=ea_model_path,
        torch_dtype=torch.float16,
        low_cpu_mem_usage=True,
        device_map="auto",
        total_token=-1,
    )
    model.eval()
    your_message = "Hello"
    conv = get_conversation_template("vicuna")
    conv.append_message(conv.roles[0], your_message)
    conv.append_message(conv.roles[1], None)
    prompt = conv.get_prompt()
    input_ids = model.tokenizer([prompt]).input_ids
    input_ids = torch.as_tensor(input_ids).cuda()
    output_ids = model.eagenerate(input_ids, temperature=0.5, max_new_tokens=512)
    assert isinstance(output_ids, Tensor)
    output = model.tokenizer.decode(output_ids[0])

    assert model.dtype == torch.float16
    assert output.startswith(prompt)
    assert output_ids.shape == (1, 256)  # the end of the tiny target's context


def test_the_answer_script_s_loop_runs(model: EaModel) -> None:
    """As in EAGLE's own and Spec-Bench's evaluation: several turns, logged."""
    tokenizer = model.get_tokenizer()
    messages: list[dict[str, str]] = []
    for turn in ("why?", "and then?"):
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        input_ids = tokenizer([prompt], add_special_tokens=False).input_ids
        output_ids, new_token, idx = model.eagenerate(
            torch.as_tensor(input_ids), temperature=0.0, max_new_tokens=12, log=True, is_llama3=True
        )
        new = output_ids[0][len(input_ids[0]) :]
        assert int(new_token) == len(new)
        assert 0 <= int(idx) < len(new)
        expected = reference(model, torch.tensor(input_ids), 12)
        turn_end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
        if turn_end in expected:
            expected = expected[: expected.index(turn_end) + 1]
        assert new.tolist() == expected
        output = tokenizer.decode(new, spaces_between_special_tokens=False).strip()
        messages.append({"role": "assistant", "content": output})


def test_the_web_ui_s_loop_runs(model: EaModel) -> None:
    seen = [PROMPT[0].tolist()]
    for output_ids in model.ea_generate(
        PROMPT, temperature=0.0, top_p=0.0, max_new_tokens=20, is_llama3=False
    ):
        ids = output_ids[0].tolist()
        assert ids[: len(seen[-1])] == seen[-1]
        assert len(ids) > len(seen[-1])
        seen.append(ids)
    assert seen[-1][5:] == reference(model, PROMPT, 20)
    assert model.stats is not None
    assert len(seen) == model.stats.num_cycles + 2


# Loading


def test_sizes_of_the_tree_are_converted(folders: tuple[str, str]) -> None:
    assert load(folders).decoder.tree == TreeConfig(59, 6, 10)
    assert load(folders, total_token=60, depth=5, top_k=10).decoder.tree == TreeConfig(59, 6, 10)
    assert load(folders, total_token=8, depth=2, top_k=3).decoder.tree == TreeConfig(7, 3, 3)
    assert load(folders, total_token=2, depth=0, top_k=1).decoder.tree == TreeConfig(1, 1, 1)
    assert load(folders, total_token=-1).decoder.tree == TreeConfig.default("cpu")


def test_further_options_go_to_transformers(folders: tuple[str, str]) -> None:
    model = load(folders, attn_implementation="eager", dtype="bfloat16", load_in_8bit=False)
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_eagle3": True}, "EAGLE-3 heads are not supported; pass use_eagle3=False"),
        ({"ea_model_path": None}, "are both needed"),
        ({"threshold": 0.3}, "threshold must be 1.0, got 0.3"),
        ({"torch_dtype": "float32", "dtype": "float32"}, "give one of them"),
        ({"total_token": 1}, "total_token must be >= 2"),
        ({"total_token": -2}, "total_token must be >= 2"),
        ({"depth": -1}, "depth must be >= 0"),
        ({"total_token": "60"}, "total_token must be a whole number, got '60'"),
        ({"depth": None}, "depth must be a whole number, got None"),
        ({"tree": "9,3,3"}, "tree goes by EAGLE's name here; use total_token, depth and top_k"),
        ({"draft_head": "x"}, "draft_head goes by EAGLE's name here; use ea_model_path"),
        ({"draft_model": "x"}, "draft_model goes by EAGLE's name here"),
        ({"target": "x"}, "target goes by EAGLE's name here; use base_model_path"),
        ({"total_token": 60, "depth": 1, "top_k": 3}, "fewer than num_draft_tokens 59"),
        ({"rule": "fuzy:0.3"}, "unknown acceptance rule"),
        ({"load_in_8bit": True}, "BitsAndBytesConfig"),
        ({"ea_model_path": "no/such/folder/at/all"}, "no/such"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    folders: tuple[str, str], options: dict[str, Any], message: str
) -> None:
    call = {"base_model_path": folders[0], "ea_model_path": folders[1]} | options
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        EaModel.from_pretrained(**call)


def test_a_decoder_without_a_head_is_refused() -> None:
    target = TargetModel(tiny_model())
    drafter = ModelDrafter(TargetModel(tiny_model(seed=1)), VOCABULARY)
    for decoder in (SpeculativeDecoder(target), SpeculativeDecoder(target, drafter)):
        with pytest.raises(ValueError, match="needs a decoder with a draft head"):
            EaModel(decoder)


# Decoding


def test_greedy_ids_equal_generate_by_all_four_calls(model: EaModel) -> None:
    rng = random.Random(0)
    for max_new_tokens in (1, 2, 17):
        prompt = random_prompt(rng)
        expected = prompt[0].tolist() + reference(model, prompt, max_new_tokens)
        for call in (model.eagenerate, model.naivegenerate):
            ids, new_token, idx = call(prompt, max_new_tokens=max_new_tokens, log=True)
            assert ids[0].tolist() == expected
            assert new_token == max_new_tokens
            assert model.stats is not None
            is_plain = call == model.naivegenerate
            assert idx == (max_new_tokens - 1 if is_plain else model.stats.num_cycles)
        for stream in (model.ea_generate, model.naive_generate):
            *_, last = stream(prompt, max_new_tokens=max_new_tokens)
            assert last[0].tolist() == expected


def test_the_log_gives_eagle_s_acceptance_length() -> None:
    """EAGLE counts the first token as the root of cycle 0: N tokens, none accepted, N cycles."""
    target = TargetModel(tiny_model())
    model = EaModel(SpeculativeDecoder(target, head_drafter(target), None, TreeConfig(1, 1, 1)))
    for max_new_tokens in (1, 2, 5):
        _, new_token, idx = model.eagenerate(PROMPT, max_new_tokens=max_new_tokens, log=True)
        assert model.stats is not None
        assert model.stats.num_accepted == 0
        assert new_token / (idx + 1) == 1.0
        _, new_token, idx = model.naivegenerate(PROMPT, max_new_tokens=max_new_tokens, log=True)
        assert new_token / (idx + 1) == 1.0


def test_the_end_of_the_context_is_told(caplog: pytest.LogCaptureFixture) -> None:
    target = TargetModel(tiny_model(max_position_embeddings=20))
    model = EaModel(SpeculativeDecoder(target, head_drafter(target), None, TreeConfig(12, 4, 4)))
    assert model.finish_reason is None
    for call in (model.eagenerate, model.naivegenerate):
        caplog.clear()
        call(PROMPT, max_new_tokens=5)
        assert model.finish_reason == "length"
        assert caplog.messages == []
        call(PROMPT, max_new_tokens=30)
        assert model.finish_reason == "context"
        assert caplog.messages == [
            "the answer ends after 15 tokens, where the target's context of 20 tokens ends"
        ]


def test_sampling_takes_eagle_s_names_and_values(model: EaModel) -> None:
    for seed, ours in enumerate(({}, {"top_p": 0.8}, {"top_k": 20}, {"top_p": 0.9, "top_k": 30})):
        options: dict[str, Any] = dict(ours)
        expected = model.decoder.generate(
            PROMPT, temperature=0.8, seed=seed, max_new_tokens=20, **options
        )
        top_p, top_k = ours.get("top_p", 0.0), float(ours.get("top_k", 0))
        for call in (model.eagenerate, model.naivegenerate):
            ids = call(PROMPT, 0.8, top_p, top_k, 20, seed=seed)
            assert isinstance(ids, Tensor)
            assert ids[0, 5:].tolist() == expected.token_ids


def test_without_a_seed_one_is_drawn_and_reported(model: EaModel) -> None:
    first = model.eagenerate(PROMPT, temperature=1.0, max_new_tokens=20)
    assert model.stats is not None
    seed = model.stats.seed
    second = model.eagenerate(PROMPT, temperature=1.0, max_new_tokens=20)
    assert model.stats.seed != seed
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.equal(first, second)
    again = model.eagenerate(PROMPT, temperature=1.0, max_new_tokens=20, seed=seed)
    assert isinstance(again, Tensor)
    assert torch.equal(again, first)


def test_a_rule_is_the_model_s_or_the_call_s(folders: tuple[str, str]) -> None:
    model = load(folders, rule="fuzzy:0.4:js")
    rules = []
    for rule in (None, "exact", "coverage:1"):
        model.eagenerate(PROMPT, temperature=1.0, max_new_tokens=5, rule=rule)
        assert model.stats is not None
        rules.append(model.stats.rule)
    assert rules == ["fuzzy:0.4:js", "exact", "coverage:1"]
    model.naivegenerate(PROMPT, max_new_tokens=5)  # plain decoding has nothing to relax


def test_a_fuzzy_rule_reaches_verification(model: EaModel) -> None:
    num_rescued = 0
    for seed in range(3):
        model.eagenerate(PROMPT, 1.0, max_new_tokens=20, seed=seed, rule="fuzzy:inf:js")
        assert model.stats is not None
        num_rescued += model.stats.num_rescued
    assert num_rescued > 0


def test_lengths_bound_the_answer_and_the_sequence(model: EaModel) -> None:
    for max_new_tokens, max_length, expected in ((7, 2048, 12), (99, 20, 20), (512, 2048, 256)):
        ids = model.eagenerate(PROMPT, max_new_tokens=max_new_tokens, max_length=max_length)
        assert isinstance(ids, Tensor)
        assert ids.shape == (1, expected)
    with pytest.raises(ValueError, match="max_length 5 leaves no room behind a prompt of 5"):
        model.eagenerate(PROMPT, max_length=5)


def test_is_llama3_stops_at_the_turn_s_end(model: EaModel) -> None:
    free = reference(model, PROMPT, 20)
    vocabulary = model.tokenizer.get_vocab()
    model.tokenizer.get_vocab = lambda: vocabulary | {"<|eot_id|>": free[6]}
    for call in (model.eagenerate, model.naivegenerate):
        ids = call(PROMPT, max_new_tokens=20, is_llama3=True)
        assert isinstance(ids, Tensor)
        assert ids[0, 5:].tolist() == free[: free.index(free[6]) + 1]
        ids = call(PROMPT, max_new_tokens=20)
        assert isinstance(ids, Tensor)
        assert ids[0, 5:].tolist() == free
    model.tokenizer.get_vocab = dict  # a tokenizer without the token
    ids = model.eagenerate(PROMPT, max_new_tokens=20, is_llama3=True)
    assert isinstance(ids, Tensor)
    assert ids.shape == (1, 25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, "one prompt at a time"),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"top_p": -0.5}, "top_p must be in"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"input_ids": torch.tensor(5)}, r"input_ids must be a tensor \[1, P\], got one number"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_p": None}, "top_p must be a number, got None; 0 turns it off"),
        ({"top_p": "0.5"}, "top_p must be a number, got '0.5'"),
        ({"top_k": None}, "top_k must be a number, got None; 0 turns it off"),
        ({"top_k": "x"}, "top_k must be a number, got 'x'"),
        ({"top_k": "5"}, "top_k must be a number, got '5'"),
        ({"top_k": True}, "top_k must be a number, got True"),
        ({"top_k": float("nan")}, "top_k must be a whole number, got nan"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number, got '5'"),
        ({"max_length": 20.5}, "max_length must be a whole number, got 20.5"),
        ({"max_length": None}, "max_length must be a whole number, got None"),
        ({"seed": "one"}, "seed must be a whole number"),
    ],
)
def test_what_cannot_be_decoded_is_refused_at_the_call(
    model: EaModel, options: dict[str, Any], message: str
) -> None:
    call = {"input_ids": PROMPT} | options
    for decode in (model.eagenerate, model.naivegenerate, model.ea_generate, model.naive_generate):
        with pytest.raises((ValueError, TypeError), match=message):
            decode(**call)
    assert model.stats is None


def test_a_generator_has_no_log_and_can_be_left(model: EaModel) -> None:
    for decode in (model.ea_generate, model.naive_generate):
        with pytest.raises(ValueError, match="a generator returns no counts"):
            decode(PROMPT, log=True)
        for _ in decode(PROMPT, max_new_tokens=20):
            break
        model.eagenerate(PROMPT, max_new_tokens=2)  # the turn is free again


# A model as users handle it


def test_it_is_handled_like_a_model(model: EaModel) -> None:
    assert model.eval() is model
    assert not model.training
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert model.config is model.base_model.config
    assert model.get_tokenizer() is model.tokenizer
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == sum(
        parameter.numel()
        for part in (model.base_model, model.ea_layer)
        for parameter in part.parameters()
    )


def test_it_can_be_converted(model: EaModel) -> None:
    expected = model.eagenerate(PROMPT, max_new_tokens=12)
    assert model.to(torch.float64) is model
    assert model.dtype == model.ea_layer.fc.weight.dtype == torch.float64
    assert model.decoder.tree == TreeConfig(59, 6, 10)
    ids = model.eagenerate(PROMPT, max_new_tokens=12)
    assert isinstance(ids, Tensor)
    assert ids[0, 5:].tolist() == reference(model, PROMPT, 12)
    model.to("cpu", torch.float32)
    back = model.eagenerate(PROMPT, max_new_tokens=12)
    assert isinstance(back, Tensor)
    assert isinstance(expected, Tensor)
    assert torch.equal(back, expected)


def test_an_automatic_tree_is_looked_up_for_what_the_model_became(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    for dtype, tree, ratio in (("float32", (9, 3, 3), 0.5), ("float64", (6, 3, 2), 1.5)):
        decoder = load(folders, dtype=dtype).decoder
        assert isinstance(decoder.target, TargetModel)
        assert isinstance(decoder.drafter, HeadDrafter)
        setting = setting_of(decoder.target, decoder.drafter)
        store_choice(setting, TreeChoice(TreeConfig(*tree), ratio))

    def tree_of(model: EaModel) -> str:
        model.eagenerate(PROMPT, max_new_tokens=8)
        assert model.stats is not None
        return model.stats.tree

    model = load(folders, total_token=-1)
    assert tree_of(model) == "plain"
    assert tree_of(model.to("cpu")) == "plain"
    assert tree_of(model.to(torch.float64)) == "6,3,2"
    assert tree_of(model.to(torch.float32)) == "plain"
    given = load(folders, total_token=10, depth=2, top_k=3)
    assert tree_of(given) == tree_of(given.to(torch.float64)) == "9,3,3"
