"""A saved head has the files, names, shapes and fields that other engines read.

Each expectation names the file it was read from: EAGLE is github.com/SafeAILab/EAGLE, vLLM
github.com/vllm-project/vllm, SGLang github.com/sgl-project/sglang.
"""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eagle_fsd.checkpoint import DEMO_HEAD, load_head, save_head
from eagle_fsd.draft_head import DraftHead, DraftHeadConfig
from eagle_fsd.draft_vocab import VOCAB_FILE
from train.vocab import write_vocab

REPOSITORY = Path(__file__).parents[2]
H, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, V = 32, 64, 4, 2, 8, 128


def head(**changes):
    fields = {
        "hidden_size": H,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": V,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DraftHead(DraftHeadConfig(**fields | changes))


def saved(folder, **changes):
    """A head as a run saves it, draft vocabulary included."""
    extras = {"draft_vocab_size": 16, "training": {"step": 1}}
    save_head(head(**changes), folder, extras)
    write_vocab(folder / VOCAB_FILE, {"token_ids": list(range(16)), "size": 16})
    return folder


def shapes(folder):
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def config(folder):
    return json.loads((folder / "config.json").read_text())


# EAGLE, eagle/model/cnets1.py: Model, LlamaDecoderLayer (index 0 has no input_layernorm),
# LlamaAttention, LlamaMLP. `fc` reads 2H and has a bias unless config.json says "bias": false
# (eagle/model/ea_model.py); q, k and v have one if "qkv_bias" is true.
def eagle_parameters(bias=False, qkv_bias=False):
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj.weight": (query, H),
        "self_attn.k_proj.weight": (key, H),
        "self_attn.v_proj.weight": (key, H),
        "self_attn.o_proj.weight": (H, query),
        "mlp.gate_proj.weight": (INTERMEDIATE, H),
        "mlp.up_proj.weight": (INTERMEDIATE, H),
        "mlp.down_proj.weight": (H, INTERMEDIATE),
        "post_attention_layernorm.weight": (H,),
    }
    if qkv_bias:
        layer |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (key,),
            "self_attn.v_proj.bias": (key,),
        }
    own = {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    # Filled from the target's own files (load_emb=True) before the head's are read.
    own |= {"embed_tokens.weight": (V, H)}
    return own | {f"layers.0.{name}": shape for name, shape in layer.items()}


# vLLM, vllm/model_executor/models/llama_eagle.py: EagleLlamaForCausalLM puts "model." before every
# name, LlamaModel has `fc` without bias, loads q, k, v and gate, up into one parameter each, shares
# the target's embeddings, and fails on a name that it does not have.
VLLM_STACKS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
VLLM_STACKS |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
VLLM_PARAMETERS = {
    "model.fc.weight": (H, 2 * H),
    "model.layers.0.self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, H),
    "model.layers.0.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
    "model.layers.0.mlp.gate_up_proj.weight": (2 * INTERMEDIATE, H),
    "model.layers.0.mlp.down_proj.weight": (H, INTERMEDIATE),
    "model.layers.0.post_attention_layernorm.weight": (H,),
}

# SGLang, python/sglang/srt/models/llama_eagle.py: LlamaForCausalLMEagle does the same, but its `fc`
# always has a bias, which keeps its random first value if the head brings none.
SGLANG_PARAMETERS = VLLM_PARAMETERS | {"model.fc.bias": (H,)}


def stacked(found):
    """Names and shapes after vLLM's and SGLang's renaming and stacking."""
    result = {}
    for name, shape in found.items():
        for part, whole in VLLM_STACKS.items():
            name = name.replace(f".{part}.", f".{whole}.")
        rows, *rest = shape
        before = result.get(f"model.{name}", (0,))[0]
        result[f"model.{name}"] = (before + rows, *rest)
    return result


@pytest.mark.parametrize("biases", [{}, {"bias": True}, {"qkv_bias": True}])
def test_tensors_are_those_of_eagles_own_module(tmp_path, biases):
    expected = eagle_parameters(**biases)
    del expected["embed_tokens.weight"]
    assert shapes(saved(tmp_path / "head", **biases)) == expected


def test_own_embeddings_have_eagles_name(tmp_path):
    assert shapes(saved(tmp_path / "head", own_embeddings=True)) == eagle_parameters()


def test_tensors_fill_vllms_parameters(tmp_path):
    assert stacked(shapes(saved(tmp_path / "head"))) == VLLM_PARAMETERS


def test_tensors_fill_sglangs_parameters_once_a_bias_of_zeros_is_added(tmp_path):
    """What docs/training.md tells to do for SGLang; the head stays the same function."""
    folder = saved(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.bias"] = torch.zeros(H, dtype=tensors["fc.weight"].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert stacked(shapes(folder)) == SGLANG_PARAMETERS


def test_config_has_the_fields_that_the_engines_read(tmp_path):
    raw = config(saved(tmp_path / "head"))
    # EAGLE, eagle/model/configs.py (EConfig) and ea_model.py ("bias").
    expected = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bias": False,
    }
    # vLLM, vllm/transformers_utils/configs/eagle.py: "Eagle" is put before the architecture, so
    # that EagleLlamaForCausalLM is found; vllm/model_executor/models/llama.py: "bias" is that of
    # the attention and "qkv_bias" overrides it for q, k and v; head_dim may differ from H / heads.
    expected |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    expected |= {"qkv_bias": False, "head_dim": HEAD_DIM, "torch_dtype": "float32"}
    assert {name: raw.get(name, "missing") for name in expected} == expected
    # SGLang, python/sglang/srt/models/llama_eagle.py, sizes lm_head by hot_vocab_size; a
    # draft_vocab_size at the top is EAGLE-3's in all three. Ours are under one key of our own.
    assert not {"hot_vocab_size", "draft_vocab_size", "truncated_vocab_size"} & raw.keys()
    assert raw["eagle_fsd"]["draft_vocab_size"] == 16


def test_transformers_reads_the_config_as_a_llama(tmp_path):
    """vLLM and SGLang take it from there."""
    read = AutoConfig.from_pretrained(saved(tmp_path / "head"))
    assert read.model_type == "llama"
    assert (read.hidden_size, read.num_hidden_layers, read.vocab_size) == (H, 1, V)
    assert read.rope_parameters["rope_theta"] == 5e5
    assert (read.bias, read.qkv_bias) == (False, False)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scaled_rope_has_the_form_that_eagle_takes(tmp_path, kind):
    """EAGLE, eagle/model/configs.py: two fields, "type" and a float "factor" above 1."""
    rope = {"rope_type": kind, "rope_theta": 5e5, "factor": 2}
    folder = saved(tmp_path / "head", rope_parameters=rope)
    scaling = config(folder)["rope_scaling"]
    assert scaling == {"type": kind, "factor": 2.0}
    assert isinstance(scaling["factor"], float)
    assert load_head(folder).config.rope_parameters == rope
    read = AutoConfig.from_pretrained(folder).rope_parameters
    assert {name: read[name] for name in rope} == rope


def test_engines_find_one_file_of_weights(tmp_path):
    """vLLM and SGLang glob *.safetensors, then *.bin and *.pt, and read all that they find."""
    folder = saved(tmp_path / "head")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        VOCAB_FILE,
    }
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}


def test_the_packaged_heads_model_card_is_in_the_way_of_nothing(tmp_path):
    assert (DEMO_HEAD / "README.md").is_file()
    assert load_head("demo").config.hidden_size == 576
    folder = saved(tmp_path / "head")
    shutil.copy(DEMO_HEAD / "README.md", folder)
    save_head(load_head(folder), folder)
    assert load_head(folder).config == head().config
    assert (folder / "README.md").is_file()


def test_the_package_carries_the_packaged_head_and_its_model_card():
    """What setuptools is told to ship holds every file of the head."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    package = REPOSITORY / "eagle_fsd"
    patterns = settings["tool"]["setuptools"]["package-data"]["eagle_fsd"]
    shipped = {path for pattern in patterns for path in package.glob(f"{pattern}/*")}
    for name in ("README.md", "config.json", "model.safetensors"):
        assert DEMO_HEAD / name in shipped
