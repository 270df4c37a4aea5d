"""Arms: what their list may hold, and that all of them do the same work."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from eagle_fsd.acceptance import Exact, Fuzzy
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import TargetModel
from evaluation import arms as arms_module
from evaluation.arms import (
    Request,
    TransformersArm,
    answer,
    arm_spec,
    build_arms,
    parse_arms,
    question_seed,
    rotated,
    stop_ids,
)
from tests.stubs import head_drafter, random_prompt, tiny_model

ALL = "hf,hf-lookup,plain,exact"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = TargetModel(tiny_model())
    return SpeculativeDecoder(target, head_drafter(target), None, TreeConfig(8, 3, 3))


def request_of(seed: int = 0, num_tokens: int = 24, **changes: Any) -> Request:
    prompt = random_prompt(random.Random(seed), low=8, high=20)[0]
    return dataclasses.replace(Request(prompt, num_tokens, (), SamplingConfig(), seed), **changes)


# The list


def test_a_list_keeps_names_as_given_and_their_order() -> None:
    arms = parse_arms("hf, exact,fuzzy:0.20:js,plain,draft-model")
    assert list(arms) == ["hf", "exact", "fuzzy:0.20:js", "plain", "draft-model"]
    assert arms["hf"] is arms["plain"] is None
    assert arms["fuzzy:0.20:js"] == Fuzzy(threshold=0.2, divergence="js")
    assert arms["exact"] == arms["draft-model"] == Exact()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names separated by commas"),
        ("hf,,plain", "names separated by commas"),
        ("hf_lookup", "unknown arm 'hf_lookup'.*did you mean 'hf-lookup'"),
        ("fuzy:0.3", "unknown arm 'fuzy:0.3'"),
        ("hf:2", "unknown arm 'hf:2'"),
        ("fuzzy", "needs threshold"),
        ("fuzzy:0.3:jss", "unknown divergence 'jss'"),
        ("hf,plain,hf", "arm 'hf' comes twice"),
        ("fuzzy:0.3,fuzzy:0.30:js", "'fuzzy:0.30:js' comes twice; it is the same as 'fuzzy:0.3'"),
    ],
)
def test_a_list_that_names_no_arms_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_arms(text)


def test_an_arm_of_a_rule_has_one_written_form() -> None:
    names = ("fuzzy:0.30:js", "exact", "hf", "draft-model", "unheard-of")
    assert [arm_spec(name) for name in names] == ["fuzzy:0.3:js", *names[1:]]


def test_exact_and_draft_model_are_two_arms() -> None:
    assert list(parse_arms("exact,draft-model")) == ["exact", "draft-model"]


def test_each_arm_is_first_equally_often() -> None:
    arms: Any = ["a", "b", "c"]
    firsts = [rotated(arms, place)[0] for place in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(rotated(arms, place)) == arms for place in range(6))


def test_a_question_has_one_seed_wherever_it_stands() -> None:
    seeds = {question_seed(seed, name) for seed in (0, 1) for name in (81, "81", 82)}
    assert len(seeds) == 6
    assert question_seed(0, 81) in seeds
    assert all(0 <= seed < 2**63 for seed in seeds)


# The same work


@pytest.mark.parametrize("seed", range(4))
def test_all_arms_without_relaxation_give_the_same_ids_in_fp32(
    decoder: SpeculativeDecoder, seed: int
) -> None:
    request = request_of(seed)
    answers = [answer(arm, request) for arm in build_arms(parse_arms(ALL), decoder)]
    for each in answers:
        assert each.token_ids == answers[0].token_ids
        assert len(each.token_ids) == request.max_new_tokens
        assert each.seconds > 0.0
        assert each.seconds_per_token == each.seconds / request.max_new_tokens
    assert [each.stats is None for each in answers] == [True, True, False, False]


def test_a_stop_in_the_middle_ends_every_arm_at_the_same_token(decoder: SpeculativeDecoder) -> None:
    arms, request = build_arms(parse_arms(ALL), decoder), request_of(1)
    ids = answer(arms[0], request).token_ids
    stop = ids[len(ids) // 2]
    expected = ids[: ids.index(stop) + 1]
    never = next(token for token in range(128) if token not in ids)
    for arm in arms:
        stopped = dataclasses.replace(request, stop_ids=tuple(sorted((stop, never))))
        assert answer(arm, stopped).token_ids == expected, arm.name


def test_stops_are_those_of_the_generation_config_and_the_tokenizer() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [9, 4]
    tokenizer: Any = type("Tokenizer", (), {"eos_token_id": 7})()
    assert stop_ids(SpeculativeDecoder(TargetModel(model), None, tokenizer)) == (4, 7, 9)


def test_settings_of_the_models_generation_config_apply_to_no_arm_and_stay_as_they_are() -> None:
    request, plain = request_of(2), SpeculativeDecoder(TargetModel(tiny_model()))
    expected = plain.plain(request.input_ids, max_new_tokens=24).token_ids
    model = tiny_model()
    model.generation_config = GenerationConfig(
        repetition_penalty=3.0,
        suppress_tokens=expected[:3],
        cache_implementation="static",
        max_length=30,
        eos_token_id=expected[5],
        do_sample=True,
        temperature=5.0,
    )
    before = model.generation_config.to_dict()
    assert TransformersArm("hf", model).decode(request) == (expected, None)
    assert model.generation_config.to_dict() == before
    decoder = SpeculativeDecoder(TargetModel(model))
    assert stop_ids(decoder) == (expected[5],)


@pytest.mark.parametrize(
    ("family", "attention", "expected"), [("llama", "eager", "sdpa"), ("gemma2", "eager", "eager")]
)
def test_transformers_is_measured_with_sdpa_on_the_targets_own_weights(
    family: str, attention: str, expected: str
) -> None:
    model, request = tiny_model(family, attention), request_of(2)
    arm = TransformersArm("hf", model)
    assert (arm.attention, model.config._attn_implementation) == (expected, attention)
    before = arm.decode(request)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    assert arm.decode(request) != before  # the weights are shared


def test_a_rule_that_the_drafter_cannot_serve_is_refused_before_anything_runs() -> None:
    decoder = SpeculativeDecoder(TargetModel(tiny_model()))
    with pytest.raises(ValueError, match="this drafter has none"):
        build_arms(parse_arms("fuzzy:0.3:js"), decoder)


# Sampling


def test_transformers_samples_by_the_questions_seed_and_leaves_the_global_generator_alone() -> None:
    arm, request = TransformersArm("hf", tiny_model()), request_of(sampling=SamplingConfig(1.0))
    before = torch.random.get_rng_state()
    one, two = arm.decode(request), arm.decode(request)
    assert one == two
    assert arm.decode(dataclasses.replace(request, seed=1)) != one
    assert torch.equal(torch.random.get_rng_state(), before)


def test_transformers_samples_our_law_and_not_its_default_of_fifty_tokens() -> None:
    arm = TransformersArm("hf", tiny_model())
    flat = request_of(num_tokens=1, sampling=SamplingConfig(1e4))
    seeds = [dataclasses.replace(flat, seed=seed) for seed in range(150)]
    assert len({arm.decode(each)[0][0] for each in seeds}) > 60
    greedy = arm.decode(request_of(3))
    for law in (SamplingConfig(1.0, top_k=1), SamplingConfig(1.0, top_p=1e-6)):
        assert arm.decode(request_of(3, sampling=law)) == greedy
    assert arm.decode(request_of(3, sampling=SamplingConfig(1.0, min_p=1.0))) == greedy


# The clock


def test_the_device_is_waited_for_before_both_clock_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Clock:
        def perf_counter(self) -> float:
            events.append("clock")
            return float(len(events))

    class Stub:
        name, attention = "stub", "none"
        is_drafting, device = False, torch.device("cpu")

        def decode(self, request: Request) -> tuple[list[int], None]:
            events.append("decode")
            return [1, 2], None

    monkeypatch.setattr(arms_module, "synchronize", lambda _: events.append("wait"))
    monkeypatch.setattr(arms_module, "time", Clock())
    measured = answer(Stub(), request_of())
    assert events == ["wait", "clock", "decode", "wait", "clock"]
    assert measured.seconds_per_token == 1.5
