import argparse
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_fsd.config import MIN_TEMPERATURE, SamplingConfig, TreeConfig
from eagle_fsd.device import peak_memory_bytes, resolve_device, supports_float64, synchronize

# trees


@pytest.mark.parametrize(
    ("config", "num_candidates"),
    [
        (TreeConfig(1, 1, 1), 1),
        (TreeConfig(6, 6, 1), 6),
        (TreeConfig(3, 1, 3), 3),
        (TreeConfig(16, 4, 4), 52),
        (TreeConfig(59, 6, 10), 510),
    ],
)
def test_candidates_are_counted_level_by_level(config, num_candidates):
    assert config.num_candidates == num_candidates


@pytest.mark.parametrize("name", ["num_draft_tokens", "depth", "top_k"])
def test_tree_sizes_are_whole_numbers_of_at_least_one(name):
    sizes = {"num_draft_tokens": 4, "depth": 4, "top_k": 4}
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got {bad}"):
            TreeConfig(**(sizes | {name: bad}))
    for bad in (1.0, "4", None, True):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, got {bad!r}"):
            TreeConfig(**(sizes | {name: bad}))


@pytest.mark.parametrize(("sizes", "most"), [((7, 6, 1), 6), ((4, 1, 3), 3), ((53, 4, 4), 52)])
def test_sizes_that_make_no_tree_name_what_would(sizes, most):
    with pytest.raises(ValueError, match=f"use at most {most} or a larger depth or top_k"):
        TreeConfig(*sizes)


def test_trees_are_frozen():
    with pytest.raises(FrozenInstanceError):
        TreeConfig().depth = 3


@given(depth=st.integers(1, 8), top_k=st.integers(1, 10), data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_written_tree_is_read_back(depth, top_k, data):
    most = top_k + (depth - 1) * top_k**2
    config = TreeConfig(data.draw(st.integers(1, most)), depth, top_k)
    assert TreeConfig.parse(str(config)) == config


@given(depth=st.integers(1, 8), top_k=st.integers(1, 6), room=st.integers(-2, 10), data=st.data())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_a_limited_tree_is_the_same_one_with_fewer_levels(depth, top_k, room, data):
    most = top_k + (depth - 1) * top_k**2
    config = TreeConfig(data.draw(st.integers(1, most)), depth, top_k)
    limited = config.limited(room)
    if room < 1:
        assert limited is None
    elif room >= depth:
        assert limited == config
    else:
        assert (limited.depth, limited.top_k) == (room, top_k)
        assert limited.num_draft_tokens == min(config.num_draft_tokens, limited.num_candidates)


@pytest.mark.parametrize("text", ["", "4", "4,4", "4,4,4,4", "a,b,c", "4;4;4", "4.0,4,4", "AUTO"])
def test_trees_that_cannot_be_read_show_an_example(text):
    with pytest.raises(ValueError, match=r"tree must be auto or N,DEPTH,K \(for example 16,4,4\)"):
        TreeConfig.parse(text)


def test_defaults_follow_the_device():
    assert TreeConfig.parse("auto") is None
    assert TreeConfig.default("cpu") == TreeConfig(8, 3, 4)
    assert TreeConfig.default("cuda") == TreeConfig.default("mps") == TreeConfig(59, 6, 10)


# sampling


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1e-9, "temperature must be finite and >= 0, got -1e-09; 0 is greedy"),
        ("temperature", float("nan"), "temperature must be finite"),
        ("temperature", float("inf"), "temperature must be finite"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0; 1 turns it off"),
        ("top_p", -0.5, "top_p must be in"),
        ("top_p", 1.0001, "top_p must be in"),
        ("top_p", float("nan"), "top_p must be in"),
        ("min_p", -0.1, r"min_p must be in \[0, 1\], got -0.1; 0 turns it off"),
        ("min_p", 1.1, "min_p must be in"),
        ("min_p", float("nan"), "min_p must be in"),
        ("top_k", -1, "top_k must be >= 0, got -1; 0 turns it off"),
    ],
)
def test_sampling_out_of_range_is_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        SamplingConfig(**{field: value})


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k"])
@pytest.mark.parametrize("value", ["1", None, True, [1]])
def test_sampling_of_another_kind_is_named(field, value):
    with pytest.raises(TypeError, match=f"{field} must be a (whole )?number, got"):
        SamplingConfig(**{field: value})


def test_the_edges_of_every_range_are_allowed():
    assert SamplingConfig(temperature=0, top_k=0, top_p=1, min_p=0).is_greedy
    assert not SamplingConfig(temperature=1e6, top_k=10**9, top_p=1e-9, min_p=1.0).is_greedy


@pytest.mark.parametrize(
    ("temperature", "is_greedy"),
    [(0.0, True), (0, True), (9e-6, True), (MIN_TEMPERATURE, False), (0.01, False), (1.0, False)],
)
def test_a_temperature_that_would_overflow_is_greedy(temperature, is_greedy):
    assert SamplingConfig(temperature).is_greedy == is_greedy


def test_each_flag_reaches_its_field():
    parser = argparse.ArgumentParser()
    SamplingConfig.add_arguments(parser)
    assert SamplingConfig.from_args(parser.parse_args([])) == SamplingConfig()
    flags = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1"]
    assert SamplingConfig.from_args(parser.parse_args(flags)) == SamplingConfig(0.5, 7, 0.9, 0.1)


# devices


def test_auto_finds_a_device_that_is_there():
    device = resolve_device()
    assert torch.zeros(2, device=device).sum() == 0
    synchronize(device)
    assert peak_memory_bytes(device) >= 0
    assert supports_float64(torch.device("cpu"))
    assert not supports_float64(torch.device("mps"))


def test_a_device_may_be_a_torch_device():
    assert resolve_device(torch.device("cpu")) == resolve_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_says_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(RuntimeError, match="'cuda:1' requested but torch sees 1 CUDA devices; use"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="'cuda' requested but torch sees 0 CUDA devices; use"):
        resolve_device("cuda")
    with pytest.raises(RuntimeError, match="'mps' requested but torch sees none; use cpu or auto"):
        resolve_device("mps")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "tpu", "meta", "xpu", "CPU", None, 1.5])
def test_devices_that_nobody_knows_are_refused(name):
    with pytest.raises(ValueError, match=r"device .*use auto, cpu, cuda, cuda:N or mps"):
        resolve_device(name)
