"""Attention side by side: one model's tensors, every implementation."""

from __future__ import annotations

import pytest

from benchmarks.attention import IMPLEMENTATIONS, main, measure, sharing_targets
from tests.stubs import tiny_model


@pytest.mark.parametrize(
    ("family", "names"), [("llama", list(IMPLEMENTATIONS)), ("gemma2", ["eager"])]
)
def test_targets_share_one_models_tensors(family: str, names: list[str]) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    targets = sharing_targets(model)
    assert list(targets) == names
    for name, target in targets.items():
        assert target.model.config._attn_implementation == name
        assert target.model.lm_head.weight is model.lm_head.weight
    assert model.config._attn_implementation == before
    seconds = measure(targets, context=20, size=17, seed=0)
    assert list(seconds) == names
    assert min(seconds.values()) > 0.0


def test_contexts_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "x", "--contexts", "12,a"]) == 2
    assert "--contexts takes whole numbers" in capsys.readouterr().err
