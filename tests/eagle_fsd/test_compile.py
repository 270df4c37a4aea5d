"""`compile=True`: the same ids from compiled passes and steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from eagle_fsd import SpeculativeDecoder
from eagle_fsd.checkpoint import save_head
from eagle_fsd.target import TargetModel
from tests.stubs import greedy_reference, random_prompt, tiny_head, tiny_model
from tests.train.tiny import tiny_tokenizer

NEW_TOKENS = 24


def compiled_decoder(model: Any, folder: Any) -> SpeculativeDecoder:
    save_head(tiny_head(model), folder)
    return SpeculativeDecoder.from_pretrained(
        model, draft_head=folder, tokenizer=tiny_tokenizer(), tree="8,3,3", compile=True
    )


def test_the_target_and_the_head_are_compiled_and_the_model_is_not_changed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[nn.Module] = []
    calls: list[str] = []

    def fake(module: nn.Module, *, dynamic: bool) -> Any:
        assert dynamic
        made.append(module)

        def forward(*arguments: Any, **named: Any) -> Any:
            calls.append(type(module).__name__)
            return module(*arguments, **named)

        return forward

    monkeypatch.setattr(torch, "compile", fake)
    model = tiny_model()
    decoder = compiled_decoder(model, tmp_path)
    assert isinstance(decoder.target, TargetModel)
    assert decoder.target.is_compiled
    assert not decoder.target.has_packed_weights
    assert [type(module).__name__ for module in made] == ["LlamaModel", "DraftHead"]
    prompt = random_prompt(random.Random(0))
    result = decoder.generate(prompt, max_new_tokens=NEW_TOKENS)
    assert result.token_ids == greedy_reference(model, prompt, NEW_TOKENS)
    assert calls.count("LlamaModel") == result.stats.num_cycles + 1
    assert calls.count("DraftHead") >= result.stats.num_cycles


def test_packing_and_compiling_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="compile and packed_weights exclude each other"):
        SpeculativeDecoder.from_pretrained(tiny_model(), packed_weights=True, compile=True)


def hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: -output)


def replace_the_decoder(model: Any) -> None:
    model.model = tiny_model(seed=4).model


@pytest.mark.parametrize("change", [hook, replace_the_decoder])
def test_what_compiled_code_does_not_look_at_again_is_refused(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    model = tiny_model()
    decoder = SpeculativeDecoder(TargetModel(model, is_compiled=True), None)
    prompt = random_prompt(random.Random(0))
    decoder.plain(prompt, max_new_tokens=2)
    change(model)
    with pytest.raises(ValueError, match="after it was compiled; make a new decoder"):
        decoder.plain(prompt, max_new_tokens=2)
