"""Requests: their options, their randomness, and one at a time."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from eagle_fsd import Exact, Fuzzy, SpeculativeDecoder, TreeConfig
from eagle_fsd.target import TargetModel
from tests.scripted import PROMPT, byte_tokenizer, run, scripted
from tests.stubs import PathDrafter, RecordingTarget, greedy_reference, head_drafter, tiny_model

TOKENIZER = byte_tokenizer()
TREE = TreeConfig(12, 4, 3)
SCRIPT = list(range(40, 90))
WAIT_S = 60  # only a hang takes that long


@pytest.fixture
def decoder():
    target = TargetModel(tiny_model(vocab_size=272))
    return SpeculativeDecoder(target, head_drafter(target), TOKENIZER, TREE)


def ids(decoder: SpeculativeDecoder, **options) -> list[int]:
    return decoder.generate(PROMPT, max_new_tokens=25, **options).token_ids


# seeds


def test_the_same_seed_gives_the_same_ids_and_another_seed_others(decoder):
    first = ids(decoder, temperature=1.0, seed=5)
    ids(decoder, temperature=1.0, seed=6)
    assert ids(decoder, temperature=1.0, seed=5) == first
    assert len({tuple(ids(decoder, temperature=1.0, seed=seed)) for seed in range(8)}) == 8


def test_the_seed_has_a_fixed_default(decoder):
    assert ids(decoder, temperature=1.0) == ids(decoder, temperature=1.0, seed=0)


def test_greedy_ids_do_not_depend_on_the_seed(decoder):
    assert ids(decoder, seed=1) == ids(decoder, seed=2)


def test_a_seed_that_is_drawn_is_reported_and_gives_the_same_answer_again(decoder):
    options = {"temperature": 1.0, "max_new_tokens": 25}
    first = decoder.generate(PROMPT, seed=None, **options)
    second = decoder.generate(PROMPT, seed=None, **options)
    assert first.stats.seed != second.stats.seed
    assert first.token_ids != second.token_ids
    again = decoder.generate(PROMPT, seed=first.stats.seed, **options)
    assert again.token_ids == first.token_ids
    assert decoder.plain(PROMPT, seed=first.stats.seed, **options).token_ids == first.token_ids


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 10**30])
def test_any_whole_number_is_a_seed(decoder, seed):
    assert decoder.generate(PROMPT, seed=seed, max_new_tokens=2).stats.seed == seed


def test_no_global_generator_is_touched(decoder):
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)

    def states() -> tuple:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

    before = states()
    for options in ({"temperature": 1.0}, {"temperature": 0.7, "rule": Fuzzy(0.5), "seed": None}):
        ids(decoder, **options)
    decoder.plain(PROMPT, temperature=1.0, max_new_tokens=5)
    assert states() == before


def test_global_seeds_change_nothing(decoder):
    torch.manual_seed(1)
    first = ids(decoder, temperature=1.0)
    torch.manual_seed(2)
    assert ids(decoder, temperature=1.0) == first


# options


@pytest.mark.parametrize(
    "option",
    [
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "do_sample",
        "num_beams",
        "typical_p",
        "logits_processor",
        "max_length",
        "eos_token_id",
        "streamer",
        "max_tokens",
    ],
)
def test_options_that_nothing_reads_are_refused(decoder, option):
    for call in (decoder.stream, decoder.generate, decoder.plain):
        with pytest.raises(TypeError, match=rf"unsupported options \['{option}'\]; supported are"):
            call(PROMPT, **{option: 1})


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be >= 1, got 0"),
        ({"max_new_tokens": -3}, ValueError, "max_new_tokens must be >= 1, got -3"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be a whole number, got 1.5"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens must be a whole number, got None"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be a whole number, got True"),
        ({"temperature": -0.1}, ValueError, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": float("inf")}, ValueError, "temperature must be finite"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, ValueError, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_k": -1}, ValueError, "top_k must be >= 0, got -1"),
        ({"top_k": 1.0}, TypeError, "top_k must be a whole number, got 1.0"),
        ({"min_p": 1.5}, ValueError, r"min_p must be in \[0, 1\], got 1.5"),
        ({"seed": 1.0}, TypeError, "seed must be a whole number, got 1.0"),
        ({"seed": "x"}, TypeError, "seed must be a whole number, got 'x'"),
        ({"tree": "4,4"}, ValueError, "tree must be auto or N,DEPTH,K"),
        ({"tree": "9,2,2"}, ValueError, "fewer than num_draft_tokens 9"),
        ({"tree": (4, 4, 1)}, TypeError, "tree must be a TreeConfig"),
        ({"rule": "fuzy"}, ValueError, "unknown acceptance rule 'fuzy'"),
        ({"rule": 3}, TypeError, "rule must be a rule object"),
        ({"rule": Fuzzy}, TypeError, "rule must be a rule object"),
        ({"rule": "fuzzy", "threshold": -1.0}, ValueError, "threshold"),
        ({"rule": "fuzzy", "threshold": 0.3, "divergence": "kl"}, ValueError, "'kl'"),
        ({"threshold": 0.3}, ValueError, "rule 'exact' has no knob 'threshold'"),
        ({"rule": Exact(), "threshold": 0.3}, ValueError, "built already"),
        ({"stop": 3}, TypeError, "stop must be text"),
    ],
)
def test_bad_options_are_named_before_anything_runs(options, kind, words):
    target = RecordingTarget(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), TOKENIZER)
    with pytest.raises(kind, match=words):
        decoder.stream(PROMPT, **options)
    assert target.num_rows == 0


def test_plain_decoding_has_no_rule_to_relax(decoder):
    for rule in (Fuzzy(0.3), "coverage:0.5"):
        with pytest.raises(ValueError, match="plain decoding has no tree to relax; leave out rule"):
            decoder.plain(PROMPT, rule=rule)
    assert decoder.plain(PROMPT, rule="exact", max_new_tokens=3).stats.rule == "exact"


def test_a_rule_that_needs_the_drafts_law_is_refused_without_one():
    with pytest.raises(ValueError, match="this drafter has none"):
        scripted(SCRIPT).generate(PROMPT, rule="fuzzy", threshold=0.3)


def test_without_a_drafter_there_is_plain_decoding_only():
    decoder = SpeculativeDecoder(TargetModel(tiny_model()))
    with pytest.raises(ValueError, match=r"has no drafter; pass draft_head= .* or call plain\(\)"):
        decoder.generate(PROMPT)
    assert len(decoder.plain(PROMPT, max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("tree", ["8,3,3", "auto", TreeConfig(5, 5, 1), None])
def test_a_request_may_bring_its_own_tree(decoder, tree):
    expected = {"8,3,3": "8,3,3", "auto": "12,4,3", None: "12,4,3"}.get(tree, "5,5,1")
    assert decoder.generate(PROMPT, tree=tree, max_new_tokens=2).stats.tree == expected


@pytest.mark.parametrize("tree", ["8,3,3", "auto", TreeConfig(5, 5, 1), None])
def test_a_decoder_reads_a_tree_as_from_pretrained_does(tree):
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), None, tree)
    automatic = str(TreeConfig.default("cpu"))
    expected = {"8,3,3": "8,3,3", "auto": automatic, None: automatic}.get(tree, "5,5,1")
    assert str(decoder.tree) == expected
    loaded = SpeculativeDecoder.from_pretrained(target.model, tree=tree)
    assert loaded.tree == decoder.tree


@pytest.mark.parametrize(
    ("tree", "kind", "words"),
    [
        ((9, 3, 3), TypeError, "tree must be a TreeConfig, 'N,DEPTH,K' or 'auto', got"),
        (16, TypeError, "tree must be a TreeConfig, 'N,DEPTH,K' or 'auto', got 16"),
        ("9,3", ValueError, "tree must be auto or N,DEPTH,K"),
    ],
)
def test_a_decoder_refuses_what_is_no_tree(tree, kind, words):
    with pytest.raises(kind, match=words):
        SpeculativeDecoder(TargetModel(tiny_model()), None, None, tree)


def test_a_rule_comes_as_an_object_a_name_or_written(decoder):
    ways = (
        {"rule": Fuzzy(threshold=0.3, divergence="js")},
        {"rule": "fuzzy", "threshold": 0.3, "divergence": "js"},
        {"rule": "fuzzy:0.3:js"},
    )
    results = [decoder.generate(PROMPT, max_new_tokens=8, **way) for way in ways]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert {result.stats.rule for result in results} == {Fuzzy(0.3, "js").spec}


def test_profiling_changes_no_token(decoder):
    assert ids(decoder, profile=True) == ids(decoder)


# prompts


def test_a_prompt_comes_as_text_messages_or_ids(decoder):
    messages = [{"role": "user", "content": "hi"}]
    raw = torch.tensor([TOKENIZER("user:hi<|end|>assistant:")["input_ids"]])
    results = [decoder.generate(prompt, max_new_tokens=9) for prompt in ("hi", messages, raw)]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert {result.stats.num_prompt_tokens for result in results} == {raw.numel()}


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("", ValueError, "the prompt is empty"),
        ([], ValueError, "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, "the prompt is empty"),
        (["Hello", "Goodbye"], ValueError, "one prompt at a time: got a list of 2 texts"),
        (torch.ones(2, 4, dtype=torch.int64), ValueError, "one prompt at a time"),
        (torch.tensor([[272]]), ValueError, r"must be in \[0, 272\), got 272"),
        (torch.tensor([[-1]]), ValueError, "got -1"),
        (torch.tensor([[0.5]]), TypeError, "int64, got torch.float32"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(decoder, prompt, kind, words):
    for call in (decoder.stream, decoder.generate, decoder.plain):
        with pytest.raises(kind, match=words):
            call(prompt)
    assert decoder.target.num_rows == 0


def test_without_a_tokenizer_there_are_ids_only():
    _, result = run(scripted(SCRIPT), max_new_tokens=8)
    assert result.token_ids == SCRIPT[:8]
    assert result.text == ""
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        scripted(SCRIPT).generate("hi")


def test_a_vocabulary_with_more_rows_than_the_tokenizer_has_tokens_streams():
    _, result = run(scripted([65, 270, 66], TOKENIZER), max_new_tokens=3)
    assert (result.token_ids, result.text) == ([65, 270, 66], "AB")


def test_the_prompt_tensor_is_not_changed(decoder):
    prompt = PROMPT.clone()
    decoder.generate(prompt, max_new_tokens=5)
    assert torch.equal(prompt, PROMPT)


def test_an_open_stream_leaves_gradients_on_for_others(decoder):
    stream = decoder.stream(PROMPT, max_new_tokens=5)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    stream.close()


def test_nothing_is_planted_on_the_model():
    model = tiny_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    config = model.config.to_dict()
    target = TargetModel(model)
    SpeculativeDecoder(target, head_drafter(target)).generate(PROMPT, max_new_tokens=8)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config


# one request at a time


def test_a_second_thread_waits_and_both_answers_are_right():
    target = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    prompts = [torch.tensor([[number, 2 * number, 3]]) for number in range(1, 7)]
    expected = [greedy_reference(target.model, prompt, 20) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(decoder.generate, p, max_new_tokens=20) for p in prompts]
        assert [future.result(WAIT_S).token_ids for future in futures] == expected


def test_a_second_thread_waits_until_the_first_stream_is_read():
    decoder = scripted(SCRIPT)
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    next(stream)
    started, answers = threading.Event(), []

    def second() -> None:
        started.set()
        answers.append(decoder.generate(PROMPT, max_new_tokens=30).token_ids)

    thread = threading.Thread(target=second)
    thread.start()
    assert started.wait(WAIT_S)
    thread.join(0.1)
    assert not answers
    assert list(stream)[-1].result.token_ids == SCRIPT[:30]
    thread.join(WAIT_S)
    assert answers == [SCRIPT[:30]]


def test_a_stream_may_be_read_by_several_threads_in_turn():
    # As web servers do: each step on whatever worker is free.
    decoder = scripted(SCRIPT)
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    steps = []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool in [one, other] * 20:
            step = pool.submit(next, stream, None).result(WAIT_S)
            if step is None:
                break
            steps.append(step)
    assert steps[-1].result.token_ids == SCRIPT[:30]
    assert decoder.generate(PROMPT, max_new_tokens=3).token_ids == SCRIPT[:3]


def test_a_stream_that_is_closed_early_frees_the_decoder():
    decoder = scripted(SCRIPT)
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    next(stream)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert decoder.generate(PROMPT, max_new_tokens=9).token_ids == SCRIPT[:9]


def test_a_stream_that_is_dropped_frees_the_decoder():
    decoder = scripted(SCRIPT)
    for _ in decoder.stream(PROMPT, max_new_tokens=30):
        break
    assert decoder.generate(PROMPT, max_new_tokens=9).token_ids == SCRIPT[:9]


def test_a_stream_that_was_never_read_holds_nothing():
    decoder = scripted(SCRIPT)
    waiting = decoder.stream(PROMPT, max_new_tokens=9)
    assert decoder.generate(PROMPT, max_new_tokens=9).token_ids == SCRIPT[:9]
    assert list(waiting)[-1].result.token_ids == SCRIPT[:9]


def test_a_second_request_of_the_same_thread_raises_instead_of_hanging():
    decoder = scripted(SCRIPT)
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    next(stream)
    with pytest.raises(
        RuntimeError, match=r"still open in this thread; read it to its end or clos"
    ):
        decoder.generate(PROMPT, max_new_tokens=3)
    assert list(stream)[-1].result.token_ids == SCRIPT[:30]
    assert decoder.plain(PROMPT, max_new_tokens=3).token_ids == SCRIPT[:3]


@pytest.mark.parametrize("place", ["prefill", "score", "commit"])
def test_an_error_in_the_middle_frees_the_decoder(place):
    target = TargetModel(tiny_model())
    expected = greedy_reference(target.model, PROMPT, 12)
    decoder = SpeculativeDecoder(target, head_drafter(target), tree=TREE)
    working = getattr(target, place)

    def fail(*_args: object) -> None:
        raise MemoryError("out of memory")

    setattr(target, place, fail)
    with pytest.raises(MemoryError):
        decoder.generate(PROMPT, max_new_tokens=12)
    setattr(target, place, working)
    assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == expected


def test_an_error_of_the_drafter_frees_the_decoder():
    decoder = scripted(SCRIPT)
    decoder.drafter.propose = None
    with pytest.raises(TypeError):
        decoder.generate(PROMPT, max_new_tokens=12)
    assert decoder.plain(PROMPT, max_new_tokens=4).token_ids == SCRIPT[:4]


def test_an_error_of_the_reader_frees_the_decoder():
    decoder = scripted(SCRIPT)

    def read() -> None:
        for _ in decoder.stream(PROMPT, max_new_tokens=30):
            raise KeyError("the reader failed")

    with pytest.raises(KeyError):
        read()
    assert decoder.generate(PROMPT, max_new_tokens=4).token_ids == SCRIPT[:4]


def test_two_decoders_do_not_wait_for_each_other():
    first, second = scripted(SCRIPT), scripted(SCRIPT)
    stream = first.stream(PROMPT, max_new_tokens=30)
    next(stream)
    assert second.generate(PROMPT, max_new_tokens=4).token_ids == SCRIPT[:4]
    stream.close()


def test_steps_say_what_was_scored_and_taken():
    target = TargetModel(tiny_model())
    expected = greedy_reference(target.model, PROMPT, 12)
    decoder = SpeculativeDecoder(target, PathDrafter(expected, 3, is_right=True), tree=TREE)
    steps = list(decoder.stream(PROMPT, max_new_tokens=12, tree="30,4,3", stop_ids=[expected[3]]))
    assert (steps[0].tree, steps[0].path, steps[0].stats) == (None, (), None)
    step = steps[1]
    assert step.tree.token_ids[0] == expected[0]
    assert step.tree.token_ids[list(step.path)].tolist() == [token.id for token in step.tokens]
    assert [token.exact_id for token in step.tokens] == expected[1:4]
    assert all(token.cost == 0.0 for token in step.tokens)


def test_a_path_that_is_cut_by_a_stop_string_ends_with_its_last_token():
    steps, _ = run(scripted(SCRIPT, TOKENIZER), max_new_tokens=12, stop=chr(SCRIPT[3]))
    assert len(steps[1].tokens) == len(steps[1].path) == 3
