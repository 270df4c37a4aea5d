from __future__ import annotations

import json
import logging
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle_fsd import SpeculativeDecoder, UnsupportedModelError, checkpoint
from eagle_fsd.checkpoint import (
    CONFIG,
    DEMO_HEAD,
    OLD_WEIGHTS,
    WEIGHTS,
    check_fit,
    describe_head,
    load_head,
    load_target,
    load_target_config,
    locate_head,
    save_head,
)
from eagle_fsd.default_target import convert_gguf, default_target_gguf, ensure_default_target
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.target import TargetModel
from tests.scripted import PROMPT, byte_tokenizer
from tests.stubs import greedy_reference, tiny_head, tiny_model

OLD_SCALING = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {name: value for name, value in OLD_SCALING.items() if name != "type"}
LLAMA3 |= {"rope_type": "llama3"}
FILES = {CONFIG, WEIGHTS}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test here may reach for the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """A head with a bias, as most of EAGLE's own have."""
    head = tiny_head(tiny_model(), bias=True)
    path = tmp_path / "head"
    save_head(head, path)
    return path


@pytest.fixture
def target_folder(tmp_path):
    path = tmp_path / "target"
    tiny_model(vocab_size=272).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def change_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    raw = json.loads((folder / CONFIG).read_text()) | changes
    for name in drop:
        del raw[name]
    (folder / CONFIG).write_text(json.dumps(raw))


def change_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Adds, replaces and drops tensors; two underlines in a keyword stand for a dot."""
    tensors = load_file(folder / WEIGHTS) | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    for name in drop:
        del tensors[name]
    save_file(tensors, folder / WEIGHTS)


def as_bin(folder: Path) -> Path:
    path = folder / OLD_WEIGHTS
    torch.save(load_file(folder / WEIGHTS), path)
    (folder / WEIGHTS).unlink()
    return path


def outputs(head: DraftHead) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    embeddings, features = torch.randn(2, 1, 9, 32, generator=generator)
    dtype = head.fc.weight.dtype
    return head(embeddings.to(dtype), features.to(dtype), torch.arange(9)[None])


# there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True},
        {"qkv_bias": True},
        {"own_embeddings": True},
        {"bias": True, "qkv_bias": True, "own_embeddings": True, "num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
        {"rope_parameters": {"rope_theta": 5e5} | LLAMA3},
    ],
)
def test_a_saved_head_is_loaded_as_it_was(tmp_path, changes, dtype):
    head = tiny_head(tiny_model(), **changes).to(dtype)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert loaded.config == head.config
    assert loaded.fc.weight.dtype == dtype
    assert torch.equal(outputs(loaded), outputs(head))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_head_gives_the_same_draft_after_saving_and_loading(tmp_path):
    model = tiny_model()
    target = TargetModel(model)
    head = tiny_head(model)
    save_head(head, tmp_path / "head")
    laws = []
    for drafting in (head, load_head(tmp_path / "head")):
        laws.append(target.logits(outputs(drafting)))
    assert torch.equal(*laws)


def test_what_is_written_is_eagles_format(tmp_path):
    model = tiny_model()
    save_head(tiny_head(model), tmp_path / "head", extras={"num_tokens": 5})
    assert {path.name for path in (tmp_path / "head").iterdir()} == FILES
    raw = json.loads((tmp_path / "head" / CONFIG).read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert raw["model_type"] == "llama"
    assert raw["bias"] is False
    assert raw["num_hidden_layers"] == 1
    assert raw["rope_theta"] == 10000.0
    assert raw["rope_scaling"] is None
    assert raw["torch_dtype"] == "float32"
    assert raw["eagle_fsd"] == {"num_tokens": 5}
    assert "rope_parameters" not in raw
    tensors = load_file(tmp_path / "head" / WEIGHTS)
    attention = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert tensors.keys() == attention | mlp | {
        "fc.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    assert tensors["fc.weight"].shape == (32, 64)


def test_scaled_rope_is_written_at_the_top_level(tmp_path):
    rope = {"rope_theta": 5e5} | LLAMA3
    save_head(tiny_head(tiny_model(), rope_parameters=rope), tmp_path / "head")
    raw = json.loads((tmp_path / "head" / CONFIG).read_text())
    assert raw["rope_theta"] == 5e5
    assert raw["rope_scaling"]["rope_type"] == "llama3"
    assert raw["rope_scaling"]["factor"] == 8.0
    # transformers itself reads the same angles from the file.
    config = LlamaConfig.from_pretrained(tmp_path / "head")
    states, positions = torch.zeros(1, 50, 32), torch.arange(50)[None]
    theirs = LlamaRotaryEmbedding(config)(states, positions)
    assert all(map(torch.equal, load_head(tmp_path / "head").rotary(states, positions), theirs))


def test_a_saved_head_holds_nothing_of_its_target(tmp_path):
    head = tiny_head(tiny_model(vocab_size=5000))
    save_head(head, tmp_path / "head")
    size = sum(parameter.numel() for parameter in head.parameters()) * 4
    assert (tmp_path / "head" / WEIGHTS).stat().st_size < size + 4096 < 5000 * 32 * 4


def test_a_head_is_replaced_where_one_lies(tmp_path):
    first, second = tiny_head(tiny_model(), seed=1, bias=True), tiny_head(tiny_model(), seed=2)
    save_head(first, tmp_path / "head")
    as_bin(tmp_path / "head")
    save_head(second, tmp_path / "head")
    assert {path.name for path in (tmp_path / "head").iterdir()} == FILES
    assert torch.equal(outputs(load_head(tmp_path / "head")), outputs(second))
    assert stat.S_IMODE((tmp_path / "head").stat().st_mode) & 0o055 == 0o055


def test_a_folder_that_is_no_head_is_not_written_into(tmp_path, target_folder):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"x")
    for place in (tmp_path / "photos", target_folder):
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        with pytest.raises(ValueError, match="not a draft head; choose another or empty it"):
            save_head(tiny_head(tiny_model()), place)
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_an_empty_folder_and_missing_parents_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a" / "b" / "head"):
        save_head(tiny_head(tiny_model()), place)
        assert {path.name for path in place.iterdir()} == FILES


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_save_that_is_interrupted_leaves_nothing_half_made(tmp_path, monkeypatch, exists, error):
    place = tmp_path / "head"
    if exists:
        save_head(tiny_head(tiny_model(), seed=1), place)
    before = {path.name: path.read_bytes() for path in place.glob("*")}

    def half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise error("no more")

    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises(error):
        save_head(tiny_head(tiny_model(), seed=2), place)
    assert {path.name: path.read_bytes() for path in place.glob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == (["head"] if exists else [])


# old files


def test_a_pickled_checkpoint_is_read(folder):
    expected = outputs(load_head(folder))
    as_bin(folder)
    assert torch.equal(outputs(load_head(folder)), expected)


def test_safetensors_are_preferred_to_a_pickle(folder):
    expected = outputs(load_head(folder))
    (folder / OLD_WEIGHTS).write_bytes(b"never read")
    assert torch.equal(outputs(load_head(folder)), expected)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_code_in_a_pickle_is_not_run(folder, tmp_path, writer):
    path = as_bin(folder)
    if writer == "torch":
        torch.save({"fc.weight": Bomb(tmp_path / "boom")}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    with pytest.raises(ValueError, match="corrupted or cut off") as caught:
        load_head(folder)
    assert not (tmp_path / "boom").exists()
    assert "\n" not in str(caught.value)


def test_derived_buffers_of_old_checkpoints_are_left_out(folder):
    expected = outputs(load_head(folder))
    change_tensors(folder, layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert "layers.0.self_attn.rotary_emb.inv_freq" in load_file(folder / WEIGHTS)
    assert torch.equal(outputs(load_head(folder)), expected)


ROPE_FORMS = {
    "transformers 4": {"rope_theta": 5e5, "rope_scaling": OLD_SCALING},
    "transformers 4, later": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "both names": {"rope_theta": 5e5, "rope_scaling": OLD_SCALING | LLAMA3},
    "transformers 5": {"rope_parameters": {"rope_theta": 5e5} | LLAMA3},
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_rope_is_read_in_every_form(folder, form):
    change_config(folder, drop=("rope_theta", "rope_scaling"))
    change_config(folder, **ROPE_FORMS[form])
    rope = {"rope_theta": 5e5} | LLAMA3
    model = tiny_model(rope_parameters=rope)
    head = load_head(folder)
    states, positions = torch.zeros(1, 50, 32), torch.arange(50)[None]
    expected = model.model.rotary_emb(states, positions)
    assert all(map(torch.equal, head.rotary(states, positions), expected))
    check_fit(head.config, model.config, 128)


def test_rope_that_nobody_mentions_is_llamas(folder):
    change_config(folder, drop=("rope_theta", "rope_scaling"))
    rope = load_head(folder).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("flag", "has_bias", "words"),
    [
        (None, True, None),
        (True, True, None),
        (False, False, None),
        (None, False, r"missing tensors \['fc.bias'\].*or leaves out, which means.*\"bias\": true"),
        (True, False, r"missing tensors \['fc.bias'\]"),
        (False, True, r"unexpected \['fc.bias'\]; its config says \"bias\": false"),
    ],
)
def test_the_bias_flag_and_the_bias_agree(folder, flag, has_bias, words):
    change_config(folder, drop=("bias",))
    if flag is not None:
        change_config(folder, bias=flag)
    if not has_bias:
        change_tensors(folder, drop=("fc.bias",))
    if words is None:
        assert load_head(folder).config.bias == has_bias
    else:
        with pytest.raises(ValueError, match=words):
            load_head(folder)


def test_qkv_biases_are_found_without_a_flag(tmp_path):
    head = tiny_head(tiny_model("qwen2"), qkv_bias=True)
    save_head(head, tmp_path / "head")
    change_config(tmp_path / "head", drop=("qkv_bias",))
    loaded = load_head(tmp_path / "head")
    assert loaded.config.qkv_bias
    assert torch.equal(outputs(loaded), outputs(head))


# heads that are refused


def test_missing_and_unexpected_tensors_are_listed(folder):
    weight = "layers.0.mlp.up_proj.weight"
    change_tensors(folder, drop=(weight,), lm_head__weight=torch.zeros(128, 32))
    with pytest.raises(ValueError, match="does not match its config") as caught:
        load_head(folder)
    assert f"missing tensors ['{weight}']" in str(caught.value)
    assert "unexpected ['lm_head.weight']" in str(caught.value)


def test_a_wrong_shape_names_both(folder):
    change_config(folder, intermediate_size=65)
    with pytest.raises(ValueError, match=r"up_proj.weight is \[64, 32\]|asks for \[65, 32\]"):
        load_head(folder)
    change_config(folder, intermediate_size=64, hidden_size=16, head_dim=8)
    with pytest.raises(
        ValueError, match=r"fc.weight is \[32, 64\], its config asks for \[16, 32\]"
    ):
        load_head(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_that_are_cut_off_are_named(folder, kind, share):
    path = folder / WEIGHTS if kind == "safetensors" else as_bin(folder)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=f"corrupted or cut off: .*{path.name}") as caught:
        load_head(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"garbage", b"\x80\x04N.", b"PK\x03\x04zip", b"{}", bytes(range(256)), b"\x00" * 64]
)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_of_another_kind_are_named(folder, kind, data):
    path = folder / WEIGHTS if kind == "safetensors" else as_bin(folder)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"corrupted or cut off|must hold named tensors"):
        load_head(folder)


@pytest.mark.parametrize(
    "value", [[torch.zeros(1)], {}, {"fc.weight": 3}, {0: torch.zeros(1)}, torch.zeros(3)]
)
def test_a_pickle_without_named_tensors_is_refused(folder, value):
    torch.save(value, as_bin(folder))
    with pytest.raises(ValueError, match="must hold named tensors"):
        load_head(folder)


def test_quantised_weights_are_refused(folder):
    tensors = load_file(folder / WEIGHTS)
    save_file({name: value.to(torch.int8) for name, value in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="int8"):
        load_head(folder)


@pytest.mark.parametrize("text", ["", "{", "not json", '{"a": 1', "\udc80"])
def test_a_config_that_is_no_json_is_named(folder, text):
    (folder / CONFIG).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"{CONFIG} is not valid JSON"):
        load_head(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_a_config_that_is_no_object_is_named(folder, text):
    (folder / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=f"{CONFIG} must hold one JSON object"):
        load_head(folder)


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
def test_a_config_without_a_field_names_it(folder, name):
    change_config(folder, drop=(name,))
    with pytest.raises(ValueError, match=f"{CONFIG} lacks '{name}', which a draft head needs"):
        load_head(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"hidden_size": "wide"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"hidden_act": "sulu"},
        {"vocab_size": [1]},
        {"rms_norm_eps": "small"},
        {"rope_scaling": "llama3"},
        {"rope_scaling": {"type": "wave", "factor": 2.0}},
        {"rope_scaling": {"type": "llama3"}},
        {"rope_theta": "big"},
        {"rope_parameters": [1, 2]},
    ],
    ids=str,
)
def test_a_config_with_a_bad_value_is_one_clear_line(folder, changes):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=r"draft head|config\.json") as caught:
        load_head(folder)
    assert "\n" not in str(caught.value)


def eagle3_by_layer(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    save_file(renamed, folder / WEIGHTS)


def eagle3_by_vocabulary(folder: Path) -> None:
    change_tensors(folder, d2t=torch.zeros(64, dtype=torch.int64))


def eagle3_by_fc(folder: Path) -> None:
    change_tensors(folder, fc__weight=torch.zeros(32, 96))


def eagle3_without_llama_fields(folder: Path) -> None:
    eagle3_by_layer(folder)
    change_config(folder, drop=("vocab_size",))


@pytest.mark.parametrize(
    "make", [eagle3_by_layer, eagle3_by_vocabulary, eagle3_by_fc, eagle3_without_llama_fields]
)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_eagle3_heads_are_refused_by_that_name(folder, make, kind):
    make(folder)
    if kind == "bin":
        as_bin(folder)
    with pytest.raises(ValueError, match=r"is an EAGLE-3 head; only EAGLE and EAGLE-2 heads"):
        load_head(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "hidden size is 32 in the head and 64 in the target"),
        ({"vocab_size": 130}, "vocabulary is 128 in the head and 130 in the target"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta is 10000.0 in the head and 500000.0 in the target",
        ),
    ],
)
def test_a_head_for_another_target_names_both_numbers(folder, changes, words):
    model = tiny_model(**changes)
    with pytest.raises(ValueError, match=words):
        SpeculativeDecoder.from_pretrained(model, draft_head=folder)


def test_another_kind_of_rope_is_warned_of(folder, caplog):
    config = tiny_model(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ).config
    with caplog.at_level(logging.WARNING):
        check_fit(load_head(folder).config, config, 128)
    assert "the draft head has RoPE 'default' and the target 'linear'" in caplog.text


def test_a_folder_without_its_files_says_which(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"neither {WEIGHTS} nor {OLD_WEIGHTS}"):
        load_head(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {CONFIG}"):
        load_head(folder)


@pytest.mark.parametrize("place", ["./nothing", "/nothing/here", "~/nothing-here", "a/b/c"])
def test_a_path_that_is_not_there_is_named(place):
    with pytest.raises(FileNotFoundError, match=r"no draft head at|has no config\.json"):
        load_head(place)
    with pytest.raises(FileNotFoundError, match=r"no target at|has no config\.json"):
        load_target(place)


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(ValueError, match="the draft head is empty"):
        load_head("")
    with pytest.raises(ValueError, match="the target is empty"):
        load_target("")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "abc"},
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"quantization_config": 5},
        {"max_position_embeddings": None},
    ],
    ids=str,
)
def test_a_damaged_target_config_is_one_sentence(tmp_path, changes):
    tiny_model().save_pretrained(tmp_path)
    config = tmp_path / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ValueError, match="cannot load target"):
        load_target(tmp_path, tokenizer=object())


def test_a_target_that_is_more_than_its_config_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = tmp_path / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="tensors are not in the model that its config describes"):
        load_target(tmp_path, tokenizer=object())


def test_a_damaged_generation_config_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not a JSON object"):
        load_target(tmp_path, tokenizer=object())


def test_a_revision_of_a_local_folder_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="applies to hub ids"):
        load_target(tmp_path, tokenizer=object(), revision="main")


def test_flash_attention_is_refused_before_loading(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="takes no tree mask"):
        load_target(tmp_path, attn_implementation="flash_attention_2")


def test_a_given_tokenizer_stands_in_for_the_targets_own(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tokenizer = object()
    assert load_target(tmp_path, tokenizer=tokenizer)[1] is tokenizer
    with pytest.raises(ValueError, match="cannot load target"):
        load_target(tmp_path)


def test_a_file_is_no_head_folder(folder):
    with pytest.raises(ValueError, match=r"a draft head is a folder with config\.json"):
        load_head(folder / WEIGHTS)


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "not a hub id!", "a..b/c"])
def test_hub_ids_that_cannot_be_had_are_one_line(name):
    for load in (load_head, load_target, load_target_config):
        with pytest.raises(ValueError, match=r"draft head|target") as caught:
            load(name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_hub_head_is_downloaded_without_what_it_does_not_need(folder, monkeypatch):
    calls = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(folder)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    load_head("someone/head", revision="main", token="secret")
    name, options = calls[0]
    assert name == "someone/head"
    assert (options["revision"], options["token"]) == ("main", "secret")
    assert set(options["allow_patterns"]) == {CONFIG, WEIGHTS, OLD_WEIGHTS, "draft_vocab.json"}


def test_the_packaged_head_loads():
    head = load_head("demo")
    assert locate_head("demo") == DEMO_HEAD
    assert (head.config.hidden_size, head.config.vocab_size) == (576, 49152)
    assert head.fc.weight.dtype == torch.bfloat16


def test_describe_head_says_what_it_is(tmp_path):
    head = tiny_head(tiny_model())
    save_head(head, tmp_path / "head", extras={"steps": 3})
    facts = describe_head(head, tmp_path / "head")
    assert facts["parameters"] == sum(parameter.numel() for parameter in head.parameters())
    assert (facts["format"], facts["dtype"], facts["hidden_size"]) == ("EAGLE", "float32", 32)
    assert facts["eagle_fsd"] == {"steps": 3}


# targets


@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_single_file_sharded_and_tied_targets_decode_alike(tmp_path, size, is_tied):
    model = tiny_model(vocab_size=272, tie_word_embeddings=is_tied)
    if is_tied:
        model.tie_weights()
    model.save_pretrained(tmp_path / "target", max_shard_size=size)
    byte_tokenizer().save_pretrained(tmp_path / "target")
    shards = list((tmp_path / "target").glob("*.safetensors"))
    assert (len(shards) > 1) == (size == "20KB")
    head = tiny_head(model)
    save_head(head, tmp_path / "head")
    decoder = SpeculativeDecoder.from_pretrained(
        tmp_path / "target", draft_head=str(tmp_path / "head"), tree="8,3,3"
    )
    expected = greedy_reference(model, PROMPT, 15)
    result = decoder.generate(PROMPT, max_new_tokens=15, stop_ids=())
    assert result.token_ids == expected
    assert decoder.tokenizer.eos_token == "<eos>"
    loaded = SpeculativeDecoder.from_pretrained(
        model, draft_head=tmp_path / "head", tokenizer=byte_tokenizer()
    )
    assert loaded.generate(PROMPT, max_new_tokens=15).token_ids == expected
    assert loaded.generate("hi", max_new_tokens=4).token_ids == (
        decoder.generate("hi", max_new_tokens=4).token_ids
    )


@pytest.mark.parametrize(
    ("written", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, torch.float16, torch.float16),
    ],
)
def test_targets_load_in_their_own_dtype_or_the_asked_one(tmp_path, written, asked, expected):
    tiny_model(vocab_size=272).to(written).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    decoder = SpeculativeDecoder.from_pretrained(tmp_path, dtype=asked, device="cpu")
    assert decoder.target.dtype == expected
    assert len(decoder.plain("hi", max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("dtype", ["float31", "int8", "bool", "", "Tensor", torch.int64, 16])
def test_dtypes_that_make_no_model_are_refused(target_folder, dtype):
    with pytest.raises(
        ValueError, match=r"unknown dtype .*; use auto, float32, bfloat16 or float16"
    ):
        SpeculativeDecoder.from_pretrained(target_folder, dtype=dtype)


def test_a_device_that_is_not_there_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="device 'cuda' requested but torch sees 0"):
        SpeculativeDecoder.from_pretrained("nobody/nothing", device="cuda")


def test_a_tree_that_is_none_is_refused_before_loading():
    with pytest.raises(ValueError, match="tree must be auto or N,DEPTH,K"):
        SpeculativeDecoder.from_pretrained("nobody/nothing", tree="big")


def test_device_and_device_map_exclude_each_other(target_folder):
    with pytest.raises(ValueError, match="device 'cpu' and device_map 'auto' exclude each other"):
        SpeculativeDecoder.from_pretrained(target_folder, device="cpu", device_map="auto")


def test_loading_options_do_not_apply_to_a_loaded_model():
    for options in ({"dtype": "float32"}, {"device": "cpu"}, {"revision": "main"}):
        with pytest.raises(ValueError, match="do not apply to a loaded model"):
            SpeculativeDecoder.from_pretrained(tiny_model(), **options)


@pytest.mark.parametrize("target", [None, 3, torch.nn.Linear(2, 2), ["demo"]])
def test_targets_of_another_kind_are_refused(target):
    with pytest.raises(TypeError, match=r"target must be .*a loaded transformers"):
        SpeculativeDecoder.from_pretrained(target)


def test_device_maps_split_a_target(target_folder):
    pytest.importorskip("accelerate")
    decoder = SpeculativeDecoder.from_pretrained(target_folder, device_map={"": "cpu"})
    model = tiny_model(vocab_size=272)
    assert decoder.plain(PROMPT, max_new_tokens=8).token_ids == greedy_reference(model, PROMPT, 8)


def one_line(load: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load()
    assert "\n" not in str(caught.value)


def test_a_damaged_target_is_one_line(target_folder):
    weights = target_folder / WEIGHTS
    data = weights.read_bytes()
    for share in (0.0, 0.5, 0.99):
        weights.write_bytes(data[: int(len(data) * share)])
        one_line(lambda: load_target(target_folder), "cannot load target")
    weights.unlink()
    one_line(lambda: load_target(target_folder), "cannot load target")


def test_a_missing_shard_is_one_line(tmp_path):
    tiny_model(vocab_size=272).save_pretrained(tmp_path, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(tmp_path)
    min(tmp_path.glob("*.safetensors")).unlink()
    one_line(lambda: load_target(tmp_path), "cannot load target")


def test_a_target_that_lacks_a_tensor_is_not_filled_with_noise(target_folder):
    change_tensors(target_folder, drop=("model.layers.1.mlp.up_proj.weight",))
    one_line(lambda: load_target(target_folder), "1 tensors are missing, .*up_proj.weight")


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "nobody-knows"}'])
def test_a_target_config_that_says_nothing_is_one_line(target_folder, text):
    (target_folder / CONFIG).write_text(text)
    one_line(lambda: load_target(target_folder), "cannot load target")
    one_line(lambda: load_target_config(target_folder), "cannot read the config of target")


def test_a_folder_without_a_config_is_no_target(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"a target is a transformers folder or a \.gguf file"
    ):
        load_target(tmp_path)


def test_a_target_without_a_tokenizer_is_one_line(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    one_line(lambda: load_target(tmp_path), "cannot load target")


def test_an_encoder_decoder_is_one_line(tmp_path):
    T5Config(num_layers=1, d_model=8, d_ff=8, num_heads=1).save_pretrained(tmp_path)
    one_line(lambda: load_target(tmp_path), "cannot load target")


def test_flash_attention_is_refused(target_folder):
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa' or 'eager'"):
        SpeculativeDecoder.from_pretrained(model)


# .gguf targets


def test_gguf_files_that_are_none_are_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no GGUF file at .*model\.gguf"):
        load_target(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"not a GGUF file")
    one_line(lambda: load_target(tmp_path / "model.gguf"), "cannot load target")
    one_line(lambda: load_target_config(tmp_path / "model.gguf"), "cannot read the config")


def write_gguf(path: Path, model: Any) -> None:
    """A Llama with a byte tokenizer in llama.cpp's format, which pairs the rows of q and k."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = byte_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens += [f"<unused{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if name.endswith(f"{kind}_proj.weight"):
                rows = value.reshape(heads, 2, config.head_dim // 2, -1)
                value = rows.transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_target_decodes_as_the_model_that_it_was_written_from(tmp_path):
    model = tiny_model(vocab_size=272)
    write_gguf(tmp_path / "tiny.gguf", model)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted", progress=False)
    save_head(tiny_head(model), tmp_path / "head")
    expected = greedy_reference(model, PROMPT, 15)
    for target in (tmp_path / "tiny.gguf", str(tmp_path / "tiny.gguf"), tmp_path / "converted"):
        decoder = SpeculativeDecoder.from_pretrained(
            target, draft_head=tmp_path / "head", dtype="float32"
        )
        assert type(decoder.target.model.lm_head) is torch.nn.Linear
        assert decoder.generate(PROMPT, max_new_tokens=15).token_ids == expected
        assert decoder.tokenizer("abc 😀")["input_ids"] == byte_tokenizer()("abc 😀")["input_ids"]
        assert decoder.target.vocabulary_size == 272
        check_fit(load_head(tmp_path / "head").config, load_target_config(target), 272)


@pytest.mark.target
@pytest.mark.slow
def test_the_default_targets_gguf_and_its_converted_folder_are_one_model():
    decoders = [
        SpeculativeDecoder.from_pretrained(place, dtype="float32", draft_head="demo")
        for place in (ensure_default_target(), default_target_gguf())
    ]
    text = "<|im_start|>user\nWhy is 2024 + 1 a prime? 你好 😀<|im_end|>"
    prompts = [decoder.tokenizer(text)["input_ids"] for decoder in decoders]
    assert prompts[0] == prompts[1]
    results = [decoder.generate("Name three rivers.", max_new_tokens=24) for decoder in decoders]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].text == results[1].text


def test_a_full_disk_while_a_head_is_written_is_an_os_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write a head to .*No space left on device"):
        save_head(tiny_head(tiny_model()), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []
