import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_fsd.chat import (
    Detokenizer,
    StopStrings,
    check_stops,
    encode_prompt,
    merge_stop_ids,
    special_token_id,
)
from tests.scripted import ABC, EOS, HALF_EMOJI, NUM_TOKENS, THINK, byte_tokenizer, run, scripted

TOKENIZER = byte_tokenizer()
REPLACEMENT = "\ufffd"


def pieces(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


def whole(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# prompts


def test_text_is_one_user_message_in_the_chat_template():
    ids = encode_prompt("hi", TOKENIZER, NUM_TOKENS)
    assert ids.dtype == torch.int64
    assert ids.dim() == 1
    assert TOKENIZER.decode(ids) == "user:hi<|end|>assistant:"
    assert (
        ids.tolist()
        == encode_prompt([{"role": "user", "content": "hi"}], TOKENIZER, NUM_TOKENS).tolist()
    )


def test_system_and_earlier_turns_are_rendered_in_order():
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    text = TOKENIZER.decode(encode_prompt(messages, TOKENIZER, NUM_TOKENS))
    assert text == ("system:be brief<|end|>user:1<|end|>assistant:2<|end|>user:3<|end|>assistant:")


def test_a_chat_of_thirty_turns_is_one_prompt():
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": f"turn {turn}"} for turn in range(31)
    ]
    text = TOKENIZER.decode(encode_prompt(messages, TOKENIZER, NUM_TOKENS))
    assert all(f"turn {turn}<|end|>" in text for turn in range(31))


def test_text_is_encoded_as_it_is_without_a_chat_template():
    tokenizer = byte_tokenizer(chat_template=None)
    assert encode_prompt("hi", tokenizer, NUM_TOKENS).tolist() == list(b"hi")


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_raw_ids_pass_as_one_row(shape, dtype):
    ids = encode_prompt(torch.arange(5, dtype=dtype).reshape(shape), None, 5)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("", ValueError, "the prompt is empty"),
        ([], ValueError, "the prompt is empty"),
        ([{"role": "user", "content": ""}], ValueError, "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, "the prompt is empty"),
        (["Hello", "Goodbye"], ValueError, "one prompt at a time: got a list of 2 texts"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"shape \[2, 3\], want \[1, P\]"),
        (
            torch.zeros(1, 1, 3, dtype=torch.int64),
            ValueError,
            r"\[1, P\] or \[P\], got \[1, 1, 3\]",
        ),
        (torch.tensor(3), ValueError, r"\[1, P\] or \[P\], got \[\]"),
        (torch.tensor([[1.0, 2.0]]), TypeError, "int64, got torch.float32"),
        (torch.tensor([[True]]), TypeError, "int64, got torch.bool"),
        (torch.tensor([[1, -1]]), ValueError, r"in \[0, 262\), got -1"),
        (torch.tensor([[1, 262]]), ValueError, r"in \[0, 262\), got 262"),
        (b"hi", TypeError, "got bytes"),
        (7, TypeError, "got int"),
        (None, TypeError, "got NoneType"),
        ([1, 2, 3], TypeError, 'message 0 must have "role" and "content", got 1'),
        ([{"role": "user"}], TypeError, 'must have "role" and "content"'),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "must be text, got list"),
    ],
)
def test_bad_prompts_are_named(prompt, kind, words):
    with pytest.raises(kind, match=words):
        encode_prompt(prompt, TOKENIZER, NUM_TOKENS)


def test_text_without_a_tokenizer_says_the_way_out():
    with pytest.raises(ValueError, match=r"pass tokenizer= or raw input_ids \[1, P\]"):
        encode_prompt("hi", None, NUM_TOKENS)


def test_messages_need_a_chat_template():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(messages, byte_tokenizer(chat_template=None), NUM_TOKENS)


def test_messages_that_the_template_refuses_are_a_value_error():
    template = "{{ raise_exception('system role not supported') }}"
    with pytest.raises(ValueError, match="system role not supported"):
        encode_prompt("hi", byte_tokenizer(template), NUM_TOKENS)


def test_a_tokenizer_with_more_tokens_than_the_target_is_refused():
    with pytest.raises(ValueError, match=r"got 260; is it another model's tokenizer"):
        encode_prompt("hi", TOKENIZER, 256)


# ids to text


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_streamed_text_never_shows_half_a_character(text):
    ids = TOKENIZER(text)["input_ids"] if "<" not in text else list(text.encode())
    streamed = pieces(ids)
    assert "".join(streamed) == text
    assert all(REPLACEMENT not in piece for piece in streamed) or REPLACEMENT in text


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_pieces_joined_are_the_decoding_of_all_ids(ids):
    assert "".join(pieces(ids)) == whole(ids)


def test_each_piece_comes_as_soon_as_its_character_is_whole():
    ids = [*"é".encode(), ord("a"), *"😀".encode()]
    assert pieces(ids) == ["", "é", "a", "", "", "", "😀", ""]


def test_chinese_comes_character_by_character():
    assert [piece for piece in pieces(list("你好".encode())) if piece] == ["你", "好"]


def test_bytes_that_never_become_a_character_are_flushed():
    assert pieces([ord("a"), 0xE4, 0xBD]) == ["a", "", "", REPLACEMENT]


def test_special_tokens_show_nothing_and_disturb_nothing():
    assert pieces([EOS, HALF_EMOJI, EOS, 0x98, 0x80, EOS]) == ["", "", "", "", "😀", "", ""]


def test_leading_spaces_of_sentencepiece_words_are_kept():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁the", "▁sky", "s", "▁"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    detokenizer = Detokenizer(tokenizer)
    ids = [1, 2, 3, 4, 1]
    streamed = [*(detokenizer.add(token) for token in ids), detokenizer.flush()]
    assert "".join(streamed) == tokenizer.decode(ids) == "the skys  the"


@given(st.text(alphabet="aé你😀\n ", min_size=1, max_size=20), st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_characters_split_over_accepted_blocks_are_streamed_whole(text, depth, is_right):
    script = [*text.encode(), EOS]
    decoder = scripted(script, TOKENIZER, tree=f"{depth},{depth},1", is_right=is_right)
    steps, result = run(decoder, max_new_tokens=100)
    assert result.text == text
    assert result.token_ids == script
    assert not any(REPLACEMENT in step.text for step in steps)


def test_an_emoji_over_two_blocks_comes_with_its_last_byte():
    script = [*"ab😀!".encode(), EOS]
    steps, result = run(scripted(script, TOKENIZER, tree="2,2,1"), max_new_tokens=20)
    # Blocks of tokens: a | b F0 9F | 98 80 ! | <eos>
    assert [step.text for step in steps] == ["a", "b", "😀!", ""]
    assert result.text == "ab😀!"


def test_bytes_cut_by_the_token_limit_are_shown_at_the_end():
    script = [*"a😀".encode()]
    _, result = run(scripted(script, TOKENIZER), max_new_tokens=3)
    assert result.text == f"a{REPLACEMENT}"
    assert result.finish_reason == "length"


# stop strings


def cut(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


def feed(text: str, stops: list[str], sizes: list[int]) -> tuple[list[str], bool]:
    """Feeds `text` in pieces of the given sizes; returns what was shown, and whether it stopped."""
    finder, shown, start = StopStrings(stops), [], 0
    for size in [*sizes, len(text)]:
        piece, has_stopped = finder.add(text[start : start + size])
        start += size
        shown.append(piece)
        if has_stopped:
            return shown, True
    return [*shown, finder.flush()], False


@given(
    st.text(alphabet="abc", max_size=20),
    st.text(alphabet="abc", min_size=1, max_size=4),
    st.lists(st.integers(0, 4), max_size=12),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_one_stop_string_cuts_at_the_same_place_however_text_comes(text, stop, sizes):
    shown, has_stopped = feed(text, [stop], sizes)
    assert "".join(shown) == cut(text, [stop])
    assert has_stopped == (stop in text)


@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_of_several_stop_strings_the_one_completed_first_cuts(text, stops):
    shown, has_stopped = feed(text, stops, [1] * len(text))
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    assert has_stopped == bool(ends)
    if not ends:
        assert "".join(shown) == text
        return
    first = min(end for end, _ in ends)
    begin = min(end - len(stop) for end, stop in ends if end == first)
    assert "".join(shown) == text[:begin]


def test_a_longer_stop_string_waits_no_shorter_one():
    assert feed("xabc", ["ab", "abc"], [1, 1, 1, 1]) == (["x", "", ""], True)
    assert feed("xabd", ["abc", "bdd"], [1, 1, 1, 1]) == (["x", "", "", "a", "", "bd"], False)


def test_text_that_may_become_a_stop_string_is_held_back_and_then_shown():
    finder = StopStrings(["\n\nUser:"])
    assert finder.add("a\n") == ("a", False)
    assert finder.add("\nUse") == ("", False)
    assert finder.add("d") == ("\n\nUsed", False)
    assert finder.flush() == ""


def test_overlapping_beginnings_are_found():
    assert feed("aaab", ["aab"], [1, 1, 1, 1]) == (["", "", "a", ""], True)


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ([], ()), ("x", ("x",)), (["x", "y"], ("x", "y"))]
)
def test_stop_strings_come_one_or_several(stop, strings):
    assert check_stops(stop) == strings


@pytest.mark.parametrize(
    ("stop", "kind", "words"),
    [
        ("", ValueError, "must not be empty"),
        (["a", ""], ValueError, "must not be empty"),
        ([5], TypeError, "got 5; token ids go to stop_ids"),
        (5, TypeError, "got 5; token ids go to stop_ids"),
        (b"x", TypeError, "must be text or a list of texts"),
    ],
)
def test_bad_stop_strings_are_named(stop, kind, words):
    with pytest.raises(kind, match=words):
        check_stops(stop)


def test_special_tokens_are_found_by_their_writing():
    assert special_token_id("<eos>", TOKENIZER) == EOS
    assert special_token_id("<think>", TOKENIZER) == THINK
    assert special_token_id("abc", TOKENIZER) is None
    assert special_token_id("nothing", TOKENIZER) is None
    assert TOKENIZER.convert_tokens_to_ids("abc") == ABC


def test_stop_ids_of_every_source_and_form_are_merged():
    assert merge_stop_ids(1, [2, 3], None, (3, 4), {5}) == frozenset({1, 2, 3, 4, 5})
    assert merge_stop_ids() == frozenset()
    assert merge_stop_ids(None, 0) == frozenset({0})


def test_random_texts_with_random_stops_are_cut_alike_by_tree_and_plain_decoding():
    rng = random.Random(0)
    for _ in range(40):
        text = "".join(rng.choices("abc😀", k=20))
        stops = ["".join(rng.choices("abc😀", k=rng.randint(1, 3))) for _ in range(2)]
        decoder = scripted(
            TOKENIZER(text)["input_ids"] + [EOS], TOKENIZER, tree=rng.choice(["5,5,1", "12,4,3"])
        )
        _, result = run(decoder, max_new_tokens=60, stop=stops)
        plain = decoder.plain(torch.tensor([[80, 81, 82]]), max_new_tokens=60, stop=stops)
        assert (result.text, result.token_ids) == (plain.text, plain.token_ids)
        assert not any(stop in result.text for stop in stops)
        assert text.startswith(result.text)


def test_text_that_is_not_utf8_is_refused() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="not UTF-8"):
        encode_prompt("a\udcff", tokenizer, len(tokenizer))


def test_lone_bytes_are_not_held_back_for_ever() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    lone = tokenizer("é")["input_ids"][0]
    pieces = [detokenizer.add(lone) for _ in range(40)]
    assert any(pieces)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode([lone] * 40)
