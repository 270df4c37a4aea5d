"""Where a request ends: stop ids, stop strings, and the token limit, whatever a block holds."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import TargetModel
from tests.scripted import (
    ABC,
    END,
    EOS,
    PROMPT,
    THINK,
    ScriptTarget,
    byte_tokenizer,
    run,
    scripted,
)
from tests.stubs import (
    PathDrafter,
    TableDrafter,
    TableTarget,
    greedy_reference,
    head_drafter,
    tiny_model,
)

TREES = ("6,6,1", "48,6,3")  # a chain and a tree, both whole and six levels deep
TOKENIZER = byte_tokenizer()
SCRIPT = list(range(10, 60))


def ids_of(text: str) -> list[int]:
    return list(text.encode())


# stop ids


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("offset", range(9))
def test_a_stop_at_every_offset_of_a_block_ends_the_answer_there(tree, is_right, offset):
    decoder = scripted(
        SCRIPT, tree=tree, is_right=is_right, stop_ids=frozenset({SCRIPT[offset], 200})
    )
    steps, result = run(decoder, max_new_tokens=30)
    assert result.token_ids == SCRIPT[: offset + 1]
    assert result.finish_reason == "stop"
    assert result.stats.num_tokens == offset + 1
    assert len(steps[-1].tokens) >= 1


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("offset", range(1, 7))
def test_a_stop_inside_the_first_block_of_a_real_model_ends_the_answer_there(tree, offset):
    target = TargetModel(tiny_model())
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    expected = greedy_reference(target.model, prompt, 12)
    stop = expected[offset]
    assert stop not in expected[:offset]
    drafter = PathDrafter(expected, prompt.shape[1], is_right=True)
    decoder = SpeculativeDecoder(target, drafter, tree=TreeConfig.parse(tree))
    steps = list(decoder.stream(prompt, max_new_tokens=12, stop_ids=[stop]))
    result = steps[-1].result
    assert len(steps) == 2
    assert result.token_ids == expected[: offset + 1]
    assert steps[1].stats.num_emitted == steps[1].stats.num_accepted == offset
    assert result.token_ids == decoder.plain(prompt, max_new_tokens=12, stop_ids=[stop]).token_ids


@pytest.mark.parametrize("source", ["generation config", "tokenizer", "user"])
def test_every_source_of_stop_ids_counts(source):
    decoder = scripted(
        [65, 9, 66],
        byte_tokenizer(eos_token_id=9) if source == "tokenizer" else TOKENIZER,
        stop_ids=frozenset({9, 200} if source == "generation config" else {1}),
    )
    user = [9] if source == "user" else []
    _, result = run(decoder, max_new_tokens=5, stop_ids=user)
    assert result.token_ids == [65, 9]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(("eos", "expected"), [(9, {9}), ([5, 9], {5, 9}), (None, set())])
def test_a_generation_config_names_one_several_or_no_stops(eos, expected):
    model = tiny_model()
    model.generation_config.eos_token_id = eos
    assert TargetModel(model).stop_ids == expected


def test_a_real_model_stops_on_any_id_of_its_generation_config():
    model = tiny_model()
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    expected = greedy_reference(model, prompt, 8)
    target = TargetModel(model)
    decoder = SpeculativeDecoder(target, head_drafter(target), byte_tokenizer(eos_token_id=1))
    model.generation_config.eos_token_id = [1, expected[3]]
    assert decoder.generate(prompt, max_new_tokens=8).token_ids == expected[:4]
    model.generation_config.eos_token_id = [1]
    assert decoder.generate(prompt, max_new_tokens=8).token_ids == expected


def test_one_stop_id_may_be_given_alone():
    _, result = run(scripted(SCRIPT), max_new_tokens=9, stop_ids=12)
    assert result.token_ids == [10, 11, 12]


@pytest.mark.parametrize("bad", [[1.5], ["x"], [None], [True], "x"])
def test_stop_ids_of_another_kind_are_refused(bad):
    with pytest.raises(TypeError, match="stop_ids must be a whole number, got"):
        run(scripted(SCRIPT), stop_ids=bad)


def test_a_negative_stop_id_is_refused():
    with pytest.raises(ValueError, match="stop_ids must be >= 0, got -1"):
        run(scripted(SCRIPT), stop_ids=[-1])


def test_a_stop_id_past_the_vocabulary_never_comes():
    _, result = run(scripted(SCRIPT), max_new_tokens=5, stop_ids=[10**6])
    assert result.token_ids == SCRIPT[:5]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("limit", range(1, 9))
def test_a_stop_beats_the_length_limit_at_the_same_token(tree, limit):
    decoder = scripted(SCRIPT, tree=tree, stop_ids=frozenset({SCRIPT[limit - 1]}))
    _, result = run(decoder, max_new_tokens=limit)
    assert (result.token_ids, result.finish_reason) == (SCRIPT[:limit], "stop")
    decoder = scripted(SCRIPT, tree=tree, stop_ids=frozenset({SCRIPT[limit]}))
    _, result = run(decoder, max_new_tokens=limit)
    assert (result.token_ids, result.finish_reason) == (SCRIPT[:limit], "length")


@pytest.mark.parametrize("seed", range(12))
def test_sampled_answers_stop_where_plain_decoding_stops(seed):
    generator = torch.Generator().manual_seed(seed)
    target = TableTarget(torch.randn(6, 6, 6, generator=generator), frozenset({2}))
    drafter = TableDrafter(torch.randn(6, 6, generator=generator).log_softmax(-1))
    decoder = SpeculativeDecoder(target, drafter, tree=TreeConfig(12, 4, 3))
    prompt = torch.tensor([[0, 1]])
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": 15, "seed": seed}
        result, plain = decoder.generate(prompt, **options), decoder.plain(prompt, **options)
        assert result.token_ids == plain.token_ids
        assert result.finish_reason == plain.finish_reason
        assert 2 not in result.token_ids[:-1]


# the token limit


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 8, 9, 15])
def test_exactly_as_many_tokens_as_asked_for(tree, is_right, limit):
    _, result = run(scripted(SCRIPT, tree=tree, is_right=is_right), max_new_tokens=limit)
    assert result.token_ids == SCRIPT[:limit]
    assert result.finish_reason == "length"
    if is_right:  # no cycle too many: each one takes its six drafts and a bonus token
        assert result.stats.num_cycles == -(-(limit - 1) // 7)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_a_real_model_gives_exactly_as_many_tokens_as_asked_for(limit):
    target = TargetModel(tiny_model())
    prompt = torch.tensor([[3, 1, 4]])
    expected = greedy_reference(target.model, prompt, limit)
    for drafter in (
        head_drafter(target),
        PathDrafter(greedy_reference(target.model, prompt, 30), 3, is_right=True),
    ):
        decoder = SpeculativeDecoder(target, drafter, tree=TreeConfig(48, 6, 3))
        result = decoder.generate(prompt, max_new_tokens=limit)
        assert result.token_ids == expected
        assert result.finish_reason == "length"
    plain = decoder.plain(prompt, max_new_tokens=limit)
    assert (plain.token_ids, plain.finish_reason) == (expected, "length")
    assert plain.stats.num_cycles == limit - 1


@given(
    limit=st.integers(1, 30),
    stop=st.integers(0, 40),
    depth=st.integers(1, 7),
    top_k=st.integers(1, 4),
    is_right=st.booleans(),
    room=st.integers(1, 30),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_earliest_of_stop_length_and_context_ends_every_run(
    limit, stop, depth, top_k, is_right, room
):
    num_nodes = min(20, top_k + (depth - 1) * top_k**2)
    decoder = scripted(
        SCRIPT,
        tree=f"{num_nodes},{depth},{top_k}",
        is_right=is_right,
        stop_ids=frozenset({SCRIPT[stop]}),
        max_positions=PROMPT.shape[1] + room,
    )
    _, result = run(decoder, max_new_tokens=limit)
    length = min(limit, stop + 1, room)
    assert result.token_ids == SCRIPT[:length]
    reason = "stop" if length == stop + 1 else "length" if length == limit else "context"
    assert result.finish_reason == reason
    plain = decoder.plain(PROMPT, max_new_tokens=limit)
    assert (plain.token_ids, plain.finish_reason) == (result.token_ids, reason)


# stop strings


@pytest.mark.parametrize("tree", ["5,5,1", "12,5,2"])
@pytest.mark.parametrize("begin", range(9))
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_stop_string_is_cut_wherever_it_lies_in_a_block(tree, begin, length):
    text = "0123456789ABCDEFGH"
    stop = text[begin : begin + length]
    steps, result = run(scripted(ids_of(text), TOKENIZER, tree=tree), max_new_tokens=18, stop=stop)
    assert result.text == text[:begin]
    assert result.token_ids == ids_of(text[: begin + length])
    assert result.finish_reason == "stop"
    assert not any(char in step.text for step in steps for char in stop)


def test_a_stop_string_inside_one_token_cuts_its_text():
    _, result = run(scripted([*ids_of("x"), ABC, ABC], TOKENIZER), max_new_tokens=3, stop=["b"])
    assert (result.text, result.token_ids) == ("xa", [*ids_of("x"), ABC])


def test_a_stop_string_over_two_tokens_and_two_blocks():
    script = [ABC, *ids_of("d"), ABC, ABC]
    for stop, text, count in (("cd", "ab", 2), ("da", "abc", 3), ("ca", "abcdab", 4)):
        _, result = run(scripted(script, TOKENIZER, tree="1,1,1"), max_new_tokens=4, stop=stop)
        assert (result.text, len(result.token_ids)) == (text, count)


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_of_overlapping_stop_strings_the_one_that_is_complete_first_counts(stops):
    _, result = run(scripted(ids_of("xabc"), TOKENIZER), max_new_tokens=9, stop=stops)
    assert (result.text, result.token_ids) == ("x", ids_of("xab"))


def test_held_back_text_is_shown_when_the_stop_string_does_not_come():
    _, result = run(scripted(ids_of("xaby"), TOKENIZER), max_new_tokens=4, stop="abc")
    assert result.text == "xaby"
    # It does not come either when the limit falls in its middle.
    _, result = run(scripted(ids_of("xabc"), TOKENIZER), max_new_tokens=3, stop="abc")
    assert (result.text, result.finish_reason) == ("xab", "length")


def test_held_back_text_comes_before_a_stop_token():
    _, result = run(scripted([*ids_of("xab"), EOS], TOKENIZER), max_new_tokens=9, stop="abc")
    assert (result.text, result.finish_reason) == ("xab", "stop")


def test_half_a_character_that_the_limit_cuts_can_complete_a_stop_string():
    _, result = run(scripted([*ids_of("x"), 0xE4], TOKENIZER), max_new_tokens=2, stop="\ufffd")
    assert (result.text, result.finish_reason) == ("x", "stop")


def test_the_earliest_of_several_stop_strings_wins():
    for stops in (["7", "3", "99"], ["99", "7", "3"]):
        _, result = run(scripted(ids_of("0123456789"), TOKENIZER), max_new_tokens=10, stop=stops)
        assert result.text == "012"


def test_a_stop_string_in_the_prompt_does_not_count():
    _, result = run(scripted(ids_of("abPQR"), TOKENIZER), max_new_tokens=3, stop=["PQR", "Rab"])
    assert (result.text, result.finish_reason) == ("abP", "length")


def test_a_stop_string_may_be_a_special_token_that_text_never_shows():
    _, result = run(
        scripted([*ids_of("ab"), END, ABC], TOKENIZER), max_new_tokens=9, stop="<|end|>"
    )
    assert (result.text, result.token_ids) == ("ab", [*ids_of("ab"), END])
    assert result.finish_reason == "stop"


def test_a_stop_string_may_be_an_added_token_that_text_shows():
    script = [*ids_of("ab"), THINK, ABC]
    _, result = run(scripted(script, TOKENIZER), max_new_tokens=9, stop=["<think>"])
    assert (result.text, result.token_ids) == ("ab", script[:3])


@pytest.mark.parametrize("stop", ["<|end|>", "<think>"])
def test_a_special_stop_string_that_is_spelled_out_stops_too(stop):
    _, result = run(scripted(ids_of(f"ab{stop}cd"), TOKENIZER), max_new_tokens=30, stop=stop)
    assert (result.text, result.finish_reason) == ("ab", "stop")


def test_stop_strings_beat_the_length_limit_at_the_same_token():
    _, result = run(scripted(ids_of("xyz"), TOKENIZER), max_new_tokens=3, stop="yz")
    assert (result.text, result.finish_reason) == ("x", "stop")


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="need a tokenizer and this target came without one"):
        run(scripted(SCRIPT), stop="x")


def test_plain_decoding_cuts_at_the_same_places():
    rng = random.Random(1)
    for _ in range(60):
        script = [rng.choice([97, 98, 99, ABC, END, THINK, 0xE4]) for _ in range(25)]
        decoder = scripted(
            script,
            TOKENIZER,
            tree=rng.choice(TREES),
            is_right=rng.random() < 0.7,
            stop_ids=frozenset(rng.sample([END, THINK, 0xE4], rng.randint(0, 1))),
        )
        options = {
            "max_new_tokens": rng.randint(1, 25),
            "stop": rng.sample(["ca", "bb", "cabc", "<think>", "<|end|>"], rng.randint(0, 3)),
        }
        _, result = run(decoder, **options)
        plain = decoder.plain(PROMPT, **options)
        assert (plain.text, plain.token_ids, plain.finish_reason) == (
            result.text,
            result.token_ids,
            result.finish_reason,
        )


def test_the_first_token_can_stop():
    steps, result = run(scripted([EOS, 65], TOKENIZER), max_new_tokens=9)
    assert (len(steps), result.token_ids, result.text) == (1, [EOS], "")
    assert result.stats.acceptance_length is None
    assert result.stats.num_bonus == 1


def test_nothing_is_decoded_after_the_stop():
    target = ScriptTarget([10, EOS], frozenset({EOS}))
    passes = []
    score = target.score
    target.score = lambda tree: passes.append(tree) or score(tree)
    decoder = SpeculativeDecoder(target, PathDrafter([10, EOS], 3, is_right=True))
    assert len(decoder.generate(PROMPT, max_new_tokens=50).token_ids) == 2
    assert len(passes) == 1
