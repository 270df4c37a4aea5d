"""Targets that are offloaded, adapted, quantised or sharded give the ids of the whole model.

Run under torchrun with a folder, this file is one process of the tensor-parallel test.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor
from transformers import GgufConfig, TorchAoConfig

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.checkpoint import save_head
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.errors import UnsupportedModelError
from eagle_fsd.files import write_json
from eagle_fsd.target import ADAPTERS, TargetModel
from tests.eagle_fsd.test_checkpoint import write_gguf
from tests.parity import TIE, top2_gap
from tests.stubs import (
    FAMILY_CONFIGS,
    VOCABULARY,
    PathDrafter,
    greedy_reference,
    random_prompt,
    tiny_head,
    tiny_model,
)
from tests.train.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 6
SHARDED_PROMPTS = {"llama": 100} | dict.fromkeys(
    ("qwen2", "gemma3_text", "granite", "qwen3_moe"), 1
)
SAMPLED = {"temperature": 1.0, "seed": 3, "max_new_tokens": 8}


def prompts_of(number: int) -> list[Tensor]:
    rng = random.Random(11)
    return [random_prompt(rng, 1, 12) for _ in range(number)]


PROMPTS = prompts_of(100)


@pytest.fixture(scope="module")
def whole() -> tuple[Any, list[list[int]]]:
    """A model in one piece, and its own ids."""
    model = tiny_model()
    return model, [greedy_reference(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(whole: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, saved with a head."""
    path = tmp_path_factory.mktemp("whole")
    save(whole[0], path)
    return path


def save(model: Any, path: Path) -> None:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    save_head(tiny_head(model), path / "head")


def load(path: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        path, draft_head=path / "head", dtype=torch.float32, tree="8,3,3", **options
    )


def with_head(target: TargetModel) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, HeadDrafter(tiny_head(target.model), target), tree="8,3,3")


def assert_same_ids(ids: list[int], expected: list[int], model: Any, prompt: Tensor) -> None:
    """Equal, or at the first difference the model's best two logits are a tie."""
    if ids == expected:
        return
    assert len(ids) == len(expected)
    place = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b)
    before = torch.tensor([expected[:place]], dtype=torch.int64)
    gap = top2_gap(model, torch.cat([prompt, before], dim=1))
    print(f"token {place}, top-2 gap {gap:.2e}")
    assert gap < TIE


def check_parity(decoder: SpeculativeDecoder, model: Any, expected: list[list[int]]) -> None:
    """Drafts with the decoder's head and, every other prompt, with a tree that holds the answer."""
    for number, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=False)):
        drafter: Any = decoder.drafter
        if number % 2:
            drafter = PathDrafter(answer, prompt.shape[1], is_right=True, seed=number)
        result = SpeculativeDecoder(decoder.target, drafter).generate(
            prompt, tree="8,3,3", max_new_tokens=NEW_TOKENS
        )
        assert_same_ids(result.token_ids, answer, model, prompt)


# device maps and offloading

LAST_ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
FIRST_ON_DISK = LAST_ON_DISK | {
    "model.embed_tokens": "disk",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize(
    ("options", "num_absent"),
    [
        ({"device_map": "auto"}, 0),
        ({"device_map": LAST_ON_DISK}, 10),
        ({"device_map": FIRST_ON_DISK}, 10),
        ({"device_map": "auto", "max_memory": {"cpu": 40_000}}, 21),
    ],
)
def test_an_offloaded_target_gives_the_ids_of_the_whole(
    options: dict[str, Any], num_absent: int, whole: Any, folder: Path, tmp_path: Path
) -> None:
    decoder = load(folder, offload_folder=tmp_path, **options)
    parameters = decoder.target.model.parameters()
    assert sum(parameter.device.type == "meta" for parameter in parameters) == num_absent
    assert decoder.target.device == decoder.target.output_device == torch.device("cpu")
    check_parity(decoder, *whole)


def test_a_target_in_memory_with_an_accelerator_before_it(whole: Any) -> None:
    """The hooks of a target whose layers are sent to the device that computes, one at a time."""
    model = tiny_model()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    check_parity(with_head(TargetModel(model)), *whole)


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "gpt_oss"])
def test_other_families_offloaded(family: str) -> None:
    whole, model = tiny_model(family), tiny_model(family)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    expected = [greedy_reference(whole, prompt, NEW_TOKENS) for prompt in PROMPTS[:6]]
    check_parity(with_head(TargetModel(model)), whole, expected)


def test_a_draft_vocabulary_reads_an_offloaded_lm_head(whole: Any) -> None:
    model = tiny_model()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    target = TargetModel(model)
    token_ids = torch.arange(0, VOCABULARY, 3)
    weight, _ = target.output_rows(token_ids)
    torch.testing.assert_close(weight, whole[0].lm_head.weight[token_ids])
    drafter = HeadDrafter(tiny_head(model), target, token_ids)
    check_parity(SpeculativeDecoder(target, drafter), whole[0], whole[1][:20])


# adapters


def adapter_configs() -> dict[str, Callable[[], Any]]:
    import peft

    layers = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "down_proj"]}
    head = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "lm_head"]}
    return {
        "LORA": lambda: peft.LoraConfig(**layers),
        "LORA of lm_head": lambda: peft.LoraConfig(**head),
        "LORA and lm_head": lambda: peft.LoraConfig(**layers, modules_to_save=["lm_head"]),
        "ADALORA": lambda: peft.AdaLoraConfig(**layers, total_step=9, tinit=1, tfinal=1),
        "IA3": lambda: peft.IA3Config(**layers, feedforward_modules=["down_proj"]),
        "LOHA": lambda: peft.LoHaConfig(**layers),
        "LOKR": lambda: peft.LoKrConfig(**layers),
        "OFT": lambda: peft.OFTConfig(**layers, oft_block_size=4),
        "VERA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "aLoRA": lambda: peft.LoraConfig(**layers, alora_invocation_tokens=[3, 4]),
    }


def adapted(kind: str) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), adapter_configs()[kind]()).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@pytest.mark.parametrize("kind", [*ADAPTERS, "LORA of lm_head", "LORA and lm_head"])
def test_a_target_with_an_adapter_gives_the_ids_of_both(kind: str, whole: Any) -> None:
    model = adapted(kind)
    prompts = PROMPTS if kind == "LORA" else PROMPTS[:6]
    expected = [
        model.generate(input_ids=prompt, do_sample=False, max_new_tokens=NEW_TOKENS)[
            0, prompt.shape[1] :
        ].tolist()
        for prompt in prompts
    ]
    assert expected != whole[1][: len(prompts)]  # the adapter does something
    decoder = SpeculativeDecoder.from_pretrained(model)
    assert isinstance(decoder.target, TargetModel)
    check_parity(with_head(decoder.target), model, expected)
    check_parity(with_head(TargetModel(model.get_base_model())), model, expected[:2])
    weight, _ = decoder.target.output_rows(torch.arange(9))
    features = torch.ones(1, decoder.target.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(features @ weight.T, decoder.target.logits(features)[:, :9])


@pytest.mark.parametrize("kind", ["prompt", "prefix", "aLoRA"])
def test_an_adapter_that_does_more_than_change_weights_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="supported are ADALORA"):
        SpeculativeDecoder.from_pretrained(adapted(kind))


# quantised targets


@pytest.mark.parametrize("has_quantised_head", [False, True])
def test_a_target_of_int8_weights_gives_its_own_ids(has_quantised_head: bool, folder: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    kept = [] if has_quantised_head else None  # None keeps lm_head as it is
    decoder = load(
        folder,
        quantization_config=TorchAoConfig(
            quantization.Int8WeightOnlyConfig(version=2), modules_to_not_convert=kept
        ),
    )
    model = decoder.target.model
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert (type(model.lm_head.weight) is not torch.nn.Parameter) == has_quantised_head
    prompts = PROMPTS[:10] if has_quantised_head else PROMPTS
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    check_parity(decoder, model, expected)


@pytest.mark.parametrize("is_dequantized", [True, False])
def test_a_gguf_target_of_q8_blocks_gives_its_own_ids(
    is_dequantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    add_tensor = gguf.GGUFWriter.add_tensor
    kind = gguf.GGMLQuantizationType.Q8_0

    def add_quantized(writer: Any, name: str, values: Any) -> None:
        if values.ndim == 2:
            add_tensor(writer, name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            add_tensor(writer, name, values)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_quantized)
    write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=272))
    decoder = SpeculativeDecoder.from_pretrained(
        tmp_path / "tiny.gguf",
        dtype="float32",
        quantization_config=GgufConfig(dequantize=is_dequantized),
    )
    model = decoder.target.model
    assert isinstance(decoder.target, TargetModel)
    expected = [greedy_reference(model, prompt, NEW_TOKENS) for prompt in PROMPTS[:10]]
    check_parity(with_head(decoder.target), model, expected)


# tensor parallelism


def run_ranks(folder: Path, num_ranks: int) -> list[Any]:
    """Runs this file in several processes; what each of them wrote."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = subprocess.run(
        [*launch, "--nproc-per-node", str(num_ranks), __file__, str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(num_ranks)]


def test_two_tensor_parallel_processes_give_the_ids_of_one(tmp_path: Path) -> None:
    models = {
        family: tiny_model(family, tie_word_embeddings=family == "qwen2")
        for family in SHARDED_PROMPTS
    }
    for family, model in models.items():
        save(model, tmp_path / family)
    ranks = run_ranks(tmp_path, 2)
    assert ranks[0] == ranks[1]
    for family, model in models.items():
        answers = ranks[0]["greedy"][family]
        for prompt, ids in zip(prompts_of(SHARDED_PROMPTS[family]), answers, strict=True):
            assert_same_ids(ids, greedy_reference(model, prompt, NEW_TOKENS), model, prompt)
    decoder = load(tmp_path / "llama")
    for prompt, ids in zip(PROMPTS[:4], ranks[0]["sampled"], strict=True):
        assert ids == decoder.generate(prompt, **SAMPLED).token_ids


def run_rank(folder: Path) -> None:
    """What one process does: the same as every other."""
    greedy = {}
    decoders = {family: load(folder / family, tp_plan="auto") for family in sorted(SHARDED_PROMPTS)}
    for family, decoder in decoders.items():
        assert isinstance(decoder.target, TargetModel)
        assert decoder.target.num_shards == 2
        greedy[family] = [
            decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids
            for prompt in prompts_of(SHARDED_PROMPTS[family])
        ]
    llama = decoders["llama"]
    sampled = [llama.generate(prompt, **SAMPLED).token_ids for prompt in PROMPTS[:4]]
    with pytest.raises(ValueError, match="give a number"):
        llama.generate(PROMPTS[0], seed=None)
    report = {"greedy": greedy, "sampled": sampled}
    write_json(folder / f"rank{os.environ['RANK']}.json", report)
    torch.distributed.destroy_process_group()


# refusals


def test_a_target_that_transformers_places_takes_no_device(folder: Path) -> None:
    for option in ({"tp_plan": "auto"}, {"device_map": "cpu"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} .* exclude each other"):
            load(folder, device="cpu", **option)


def test_one_process_has_the_whole_target(folder: Path) -> None:
    assert load(folder, tp_plan="auto").target.num_shards == 1


@pytest.mark.parametrize("way", ["pp", "fsdp"])
def test_other_ways_of_dividing_a_target_are_refused(way: str) -> None:
    model = tiny_model()
    model.config.distributed_config = SimpleNamespace(**{f"{way}_size": 2})
    with pytest.raises(UnsupportedModelError, match="only tensor parallelism"):
        TargetModel(model)


def test_weights_that_are_nowhere_are_refused() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(FAMILY_CONFIGS["llama"]()).eval()
    with pytest.raises(UnsupportedModelError, match="nothing that loads them"):
        TargetModel(model)


def test_a_module_that_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        SpeculativeDecoder.from_pretrained(torch.nn.Linear(2, 2))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
