"""`model.generate(custom_generate=...)` and the 2025 call: honoured, or refused before it runs."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import kl_div

from eagle_fsd.acceptance import Exact, Fuzzy, Fuzzy2025
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.divergence import get_divergence
from eagle_fsd.drafter import ModelDrafter
from eagle_fsd.hf import (
    FSD_DIVERGENCES,
    SpeculativeOutput,
    _fsd_rule,
    _RequestDecoder,
    custom_generate,
    fsd_generate,
)
from eagle_fsd.target import TargetModel
from eagle_fsd.tuning import TreeChoice, setting_of, store_choice
from tests.eagle_fsd.rule_reference import divergence
from tests.laws import chi_square_p, slow_law, tables
from tests.scripted import byte_tokenizer
from tests.stubs import (
    VOCABULARY,
    TableDrafter,
    TableTarget,
    head_drafter,
    random_prompt,
    tiny_model,
)

TREE = "12,4,4"
PROMPT = torch.tensor([[4, 8, 15, 16, 23]])
SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02,
}  # fmt: skip


def head_decoder(family: str = "llama", tokenizer: Any = None, **changes: Any) -> Any:
    target = TargetModel(tiny_model(family, **changes))
    decoder = SpeculativeDecoder(target, head_drafter(target), tokenizer, TreeConfig.parse(TREE))
    return decoder, target.model


class Watcher:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        assert not self.has_ended
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


# Honoured


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_greedy_ids_equal_those_of_generate(family: str) -> None:
    decoder, model = head_decoder(family)
    generate = custom_generate(decoder)
    rng = random.Random(family)
    for length in ({"max_new_tokens": 1}, {"max_new_tokens": 24}, {"max_length": 80}):
        prompt = random_prompt(rng)
        expected = model.generate(prompt, **length)
        assert torch.equal(model.generate(prompt, custom_generate=generate, **length), expected)


@pytest.mark.parametrize("rule", ["exact", Fuzzy(0.3), "fuzzy:0.3:js"])
def test_sampling_options_reach_the_decoder(rule: Any) -> None:
    decoder, model = head_decoder()
    options = {key: value for key, value in SAMPLED.items() if key != "do_sample"}
    for seed in range(4):
        expected = decoder.generate(PROMPT, rule=rule, seed=seed, max_new_tokens=20, **options)
        for in_factory in (True, False):
            seeds = [{"seed": seed}, {}]
            generate = custom_generate(decoder, rule, **seeds[not in_factory])
            output = model.generate(
                PROMPT,
                custom_generate=generate,
                max_new_tokens=20,
                return_dict_in_generate=True,
                **SAMPLED,
                **seeds[in_factory],
            )
            assert isinstance(output, SpeculativeOutput)
            assert output.sequences[0].tolist() == PROMPT[0].tolist() + expected.token_ids
            assert output.stats is not None
            assert output.stats.seed == seed
            assert output.stats.rule == expected.stats.rule
            assert output.stats.kl_spent == expected.stats.kl_spent


def test_knobs_of_a_named_rule_and_a_tree_are_taken() -> None:
    decoder, model = head_decoder()
    generate = custom_generate(decoder, "fuzzy", threshold=0.2, divergence="tv", tree="3,3,1")
    output = model.generate(
        PROMPT, custom_generate=generate, max_new_tokens=6, return_dict_in_generate=True
    )
    assert (output.stats.rule, output.stats.tree) == ("fuzzy:0.2:tv", "3,3,1")


def test_torch_s_seed_repeats_a_run_and_two_calls_differ() -> None:
    decoder, model = head_decoder()
    generate = custom_generate(decoder)

    def run() -> list[list[int]]:
        torch.manual_seed(7)
        calls = (
            model.generate(PROMPT, custom_generate=generate, max_new_tokens=12, do_sample=True)
            for _ in range(2)
        )
        return [ids[0].tolist() for ids in calls]

    with torch.random.fork_rng():
        first, second = run(), run()
        assert first == second
        assert first[0] != first[1]
        state = torch.get_rng_state()
        model.generate(PROMPT, custom_generate=generate, max_new_tokens=3)
        model.generate(PROMPT, custom_generate=generate, max_new_tokens=3, do_sample=True, seed=1)
        assert torch.equal(torch.get_rng_state(), state)


def test_eos_ids_are_those_of_the_request_and_no_others() -> None:
    tokenizer = byte_tokenizer()
    decoder, model = head_decoder(tokenizer=tokenizer, vocab_size=272)
    generate = custom_generate(decoder)
    free = model.generate(PROMPT, max_new_tokens=16)[0, 5:].tolist()
    for place in range(1, 16):
        eos = [free[place], 270]
        expected = model.generate(PROMPT, max_new_tokens=16, eos_token_id=eos, pad_token_id=0)
        ids = model.generate(
            PROMPT, max_new_tokens=16, eos_token_id=eos, pad_token_id=0, custom_generate=generate
        )
        assert torch.equal(ids, expected)
        assert ids[0, -1] == free[place]
    # neither the tokenizer's nor the target's own config stops what the request lets run
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[3])
    assert decoder.generate(PROMPT, max_new_tokens=16).token_ids == free[: free.index(free[3]) + 1]
    ids = model.generate(PROMPT, max_new_tokens=16, custom_generate=generate)
    assert ids[0, 5:].tolist() == free


def test_stop_strings_end_the_answer_with_the_token_that_completes_them() -> None:
    tokenizer = byte_tokenizer()
    decoder, model = head_decoder(tokenizer=tokenizer, vocab_size=272)
    generate = custom_generate(decoder)
    tried = 0
    for seed in range(8):
        prompt = random_prompt(random.Random(seed), 3, 9)
        free = model.generate(prompt, max_new_tokens=24)[0, prompt.shape[1] :].tolist()
        letters = [token for token in free if 33 <= token < 127]
        if not letters:
            continue
        stop = tokenizer.decode([letters[-1]])
        ids = model.generate(prompt, max_new_tokens=24, stop=stop, custom_generate=generate)
        new = ids[0, prompt.shape[1] :].tolist()
        assert new == free[: len(new)]
        assert stop in tokenizer.decode([new[-1]])
        assert all(stop not in tokenizer.decode([token]) for token in new[:-1])
        criterion = transformers.StopStringCriteria(tokenizer, [stop])
        same = model.generate(
            prompt, max_new_tokens=24, stopping_criteria=[criterion], custom_generate=generate
        )
        assert torch.equal(same, ids)
        tried += 1
    assert tried > 2


def test_a_streamer_gets_the_prompt_then_every_step_then_the_end() -> None:
    decoder, model = head_decoder()
    streamer = Watcher()
    ids = model.generate(
        PROMPT, max_new_tokens=15, streamer=streamer, custom_generate=custom_generate(decoder)
    )
    steps = list(decoder.stream(PROMPT, max_new_tokens=15))
    assert streamer.pieces[0] == PROMPT[0].tolist()
    assert streamer.pieces[1:] == [[token.id for token in step.tokens] for step in steps]
    assert sum(streamer.pieces, []) == ids[0].tolist()  # noqa: RUF017 - a handful of lists
    assert streamer.has_ended


def test_a_streamer_reaches_a_callable_inside_another() -> None:
    decoder, model = head_decoder()
    generate = custom_generate(decoder)

    def outer(*args: Any, **kwargs: Any) -> Any:
        return (lambda: generate(*args, **kwargs))()

    streamer = Watcher()
    ids = model.generate(PROMPT, max_new_tokens=9, streamer=streamer, custom_generate=outer)
    assert sum(streamer.pieces, []) == ids[0].tolist()  # noqa: RUF017 - a handful of lists
    assert streamer.has_ended
    with pytest.raises(ValueError, match="would draft twice"):
        model.generate(
            PROMPT, max_new_tokens=4, assistant_model=tiny_model(seed=1), custom_generate=outer
        )


def test_a_streamer_of_another_model_s_generate_is_left_alone() -> None:
    decoder, model = head_decoder()
    other = tiny_model(seed=3)
    answer = []

    def outer(_: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        answer.append(
            model.generate(PROMPT, max_new_tokens=9, custom_generate=custom_generate(decoder))
        )
        return input_ids

    streamer = Watcher()
    other.generate(PROMPT, max_new_tokens=9, streamer=streamer, custom_generate=outer)
    assert answer[0].shape == (1, 14)
    assert streamer.pieces == [PROMPT[0].tolist()]


def test_the_end_of_the_context_is_told(caplog: pytest.LogCaptureFixture) -> None:
    decoder, model = head_decoder(max_position_embeddings=20)
    call: dict[str, Any] = {
        "custom_generate": custom_generate(decoder), "return_dict_in_generate": True,
    }  # fmt: skip
    for max_new_tokens, reason in ((9, "length"), (99, "context")):
        output = model.generate(PROMPT, max_new_tokens=max_new_tokens, **call)
        assert output.finish_reason == output["finish_reason"] == reason
        assert caplog.messages == (
            ["the answer ends after 15 tokens, where the target's context of 20 tokens ends"]
            if reason == "context"
            else []
        )
    eos = int(output.sequences[0, 8])
    stopped = model.generate(PROMPT, max_new_tokens=9, eos_token_id=eos, pad_token_id=0, **call)
    assert stopped.finish_reason == "stop"


def test_an_automatic_tree_is_the_decoder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    target = TargetModel(tiny_model())
    drafter = head_drafter(target)
    for ratio, exact in ((0.5, "plain"), (1.5, "9,3,3")):
        store_choice(setting_of(target, drafter), TreeChoice(TreeConfig(9, 3, 3), ratio))
        for given, rule, tree in (
            (None, "exact", exact),
            (None, "fuzzy:0.3:js", "9,3,3"),
            ("6,3,2", "exact", "6,3,2"),
        ):
            decoder = SpeculativeDecoder(target, drafter, None, given)
            store_choice(setting_of(target, drafter), TreeChoice(TreeConfig(4, 4, 1), 2.0))
            output = target.model.generate(
                PROMPT,
                max_new_tokens=6,
                custom_generate=custom_generate(decoder, rule),
                return_dict_in_generate=True,
            )
            assert output.stats.tree == tree
            assert decoder.generate(PROMPT, rule=rule, max_new_tokens=6).stats.tree == tree
            store_choice(setting_of(target, drafter), TreeChoice(TreeConfig(9, 3, 3), ratio))


def test_a_text_streamer_of_transformers_prints_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = byte_tokenizer()
    decoder, model = head_decoder(tokenizer=tokenizer, vocab_size=272)
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    ids = model.generate(
        PROMPT, max_new_tokens=9, streamer=streamer, custom_generate=custom_generate(decoder)
    )
    assert capsys.readouterr().out == tokenizer.decode(ids[0, 5:]) + "\n"


def test_a_mask_of_ones_and_other_integers_are_fine() -> None:
    decoder, model = head_decoder()
    expected = model.generate(PROMPT, max_new_tokens=8)
    ids = model.generate(
        input_ids=PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=8,
        renormalize_logits=True,
        use_cache=False,
        custom_generate=custom_generate(decoder),
    )
    assert torch.equal(ids, expected)


# Refused


class AddOne(transformers.LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + 1


class Never(transformers.StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(1, dtype=torch.bool)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams 2"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences 2"),
    ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor is not supported"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    ({"min_new_tokens": 3, "eos_token_id": 5, "pad_token_id": 0}, "MinLength"),
    ({"bad_words_ids": [[5]]}, "NoBadWords"),
    ({"sequence_bias": [[[5], 1.0]]}, "SequenceBias"),
    ({"suppress_tokens": [5]}, "SuppressTokens"),
    ({"remove_invalid_values": True}, "InfNanRemove"),
    ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
    ({"do_sample": True, "epsilon_cutoff": 0.1}, "EpsilonLogitsWarper"),
    ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "PrefixConstrained"),
    ({"logits_processor": [AddOne()]}, "AddOne is not supported here"),
    ({"logits_processor": [transformers.TopKLogitsWarper(5)]}, "TopKLogitsWarper is not supported"),
    (
        {"logits_processor": [transformers.TopPLogitsWarper(0.5)], "do_sample": True},
        "TopKLogitsWarper is not supported at this place",  # top-k of the config would come second
    ),
    (
        {
            "logits_processor": [transformers.TopPLogitsWarper(0.5, min_tokens_to_keep=3)],
            "do_sample": True,
            "top_k": 0,
        },
        "TopPLogitsWarper is not supported",
    ),
    ({"stopping_criteria": [Never()]}, "Never is not supported"),
    ({"max_time": 1.0}, "max_time is not supported: the clock"),
    ({"prompt_lookup_num_tokens": 3}, "generation mode 'assisted_generation'"),
    ({"penalty_alpha": 0.5, "top_k": 4}, "generation mode 'contrastive_search'"),
    ({"return_dict_in_generate": True, "output_scores": True}, r"\['output_scores'\]"),
    ({"output_hidden_states": True}, r"\['output_hidden_states'\]"),
    ({"cache_implementation": "static"}, "cache_implementation 'static'"),
    ({"cache": transformers.DynamicCache()}, "a cache of one's own"),
    ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, "one prompt at a time"),
    ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "masked tokens"),
    ({"position_ids": torch.tensor([[1, 2, 3, 4, 5]])}, "position_ids other than"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds cannot"),
    ({"do_sample": True, "temperature": 2e6}, "temperature must be <= "),
    ({"seed": 1.5}, "seed must be a whole number"),
    ({"stop": "x"}, "stop strings need a tokenizer"),
    ({"input_ids": torch.tensor([[VOCABULARY]])}, "input_ids must be in"),
    ({"input_ids": torch.ones(1, 256, dtype=torch.int64)}, "context is 256"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_honoured_is_refused_before_anything_runs(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, model = head_decoder()
    monkeypatch.setattr(decoder.target, "start", lambda *_: pytest.fail("it has started"))
    call = {"input_ids": PROMPT, "max_new_tokens": 4} | options
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        model.generate(custom_generate=custom_generate(decoder), **call)
    assert "\n" not in str(caught.value)


def test_an_assistant_beside_it_is_refused() -> None:
    decoder, model = head_decoder()
    with pytest.raises(ValueError, match="would draft twice"):
        model.generate(
            PROMPT,
            max_new_tokens=4,
            assistant_model=tiny_model(seed=1),
            custom_generate=custom_generate(decoder),
        )


def test_another_model_is_refused() -> None:
    decoder, _ = head_decoder()
    with pytest.raises(ValueError, match="was given another LlamaForCausalLM"):
        tiny_model(seed=3).generate(PROMPT, custom_generate=custom_generate(decoder))


def test_rules_and_decoders_are_checked_where_the_callable_is_made() -> None:
    decoder, _ = head_decoder()
    with pytest.raises(ValueError, match="unknown acceptance rule 'fuzy'"):
        custom_generate(decoder, "fuzy")
    with pytest.raises(ValueError, match="has no knob 'bound'"):
        custom_generate(decoder, "fuzzy:0.3", bound=1.0)
    with pytest.raises(ValueError, match="this decoder has no drafter"):
        custom_generate(SpeculativeDecoder(decoder.target))
    with pytest.raises(ValueError, match="tree must be auto or N,DEPTH,K"):
        custom_generate(decoder, tree="many")
    with pytest.raises(TypeError, match=r"tree must be a TreeConfig, .*got \(9, 3, 3\)"):
        custom_generate(decoder, tree=(9, 3, 3))  # type: ignore[arg-type]


# The 2025 call


def published(p: Tensor, q: Tensor, div_type: str) -> Tensor:
    """The divergences as the published code writes them, [V] probabilities -> []."""
    if div_type.startswith("top_k_"):
        top, places = p.topk(50)
        others = torch.ones_like(p, dtype=torch.bool).scatter_(0, places, False)
        p, q = (
            torch.cat([top, p[others].sum()[None]]),
            torch.cat([q[places], q[others].sum()[None]]),
        )
        div_type = div_type.removeprefix("top_k_")
    m = 0.5 * (p + q)
    return {
        "kl_div": lambda: kl_div(p.log(), q, reduction="none").sum(-1),
        "kl_div_reversed": lambda: kl_div(q.log(), p, reduction="none").sum(-1),
        "js_div": lambda: (
            0.5 * kl_div(p.log(), m, reduction="none").sum(-1)
            + 0.5 * kl_div(q.log(), m, reduction="none").sum(-1)
        ),
        "tv_div": lambda: 0.5 * (p - q).abs().sum(-1),
    }[div_type]()


def published_greedy(
    model: Any, small: Any, prompt: Tensor, threshold: float, div_type: str, length: int, chain: int
) -> tuple[list[int], int]:
    """The published loop with an argmax for its draw: ids, and tokens taken against the argmax."""

    def law(of: Any, text: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = of(torch.tensor([text])).logits[0, -1]
        return logits.double().softmax(-1)

    text, num_fuzzy = prompt[0].tolist(), 0
    end = len(text) + length
    while len(text) < end:
        drafted = list(text)
        for _ in range(min(chain, end - len(text) - 1)):
            drafted.append(int(law(small, drafted).argmax()))
        for token in drafted[len(text) :]:
            p = law(model, text)
            if published(p, law(small, text), div_type) > threshold:
                break
            num_fuzzy += token != int(p.argmax())
            text.append(token)
        text.append(int(law(model, text).argmax()))
    return text, num_fuzzy


@pytest.mark.parametrize(
    ("div_type", "threshold", "num_prompts", "chain"),
    [
        ("js_div", 0.5, 30, 5),
        ("kl_div", 0.8, 10, 3),
        ("tv_div", 0.4, 10, 2),
        ("top_k_js_div", 0.45, 10, 2),
    ],
)
def test_greedy_ids_equal_the_published_loop_s(
    div_type: str, threshold: float, num_prompts: int, chain: int
) -> None:
    model, small = tiny_model(), tiny_model(initializer_range=0.2)
    for parameter, other in zip(model.parameters(), small.parameters(), strict=True):
        generator = torch.Generator().manual_seed(parameter.numel())
        noise = torch.randn(parameter.shape, generator=generator)
        other.data = parameter.data + 0.05 * noise  # near enough that both outcomes occur
    rng = random.Random(div_type)
    num_fuzzy = 0
    for number in range(num_prompts):
        prompt = random_prompt(rng, 1, 12) if number else torch.tensor([[5]])
        expected, fuzzy = published_greedy(model, small, prompt, threshold, div_type, 12, chain)
        ids = fsd_generate(
            model,
            input_ids=prompt,
            assistant_model=small,
            fsd_div_threshold=threshold,
            fsd_div_type=div_type,
            max_new_tokens=12,
            **({} if chain == 5 else {"num_assistant_tokens": chain}),
        )
        assert isinstance(ids, Tensor)
        assert ids[0].tolist() == expected
        num_fuzzy += fuzzy
    assert num_fuzzy >= num_prompts // 6  # tokens that exact verification refuses


def published_law(
    logits: Tensor, draft: Tensor, prompt: list[int], threshold: float, length: int
) -> dict[tuple[int, ...], float]:
    """P of each answer of the published loop on tables, chains of two, temperature 0.8."""
    config, raw = SamplingConfig(temperature=0.8), SamplingConfig(temperature=1.0)
    laws: Counter[tuple[int, ...]] = Counter()

    def cycle(text: list[int], probability: float) -> None:
        done = len(text) - len(prompt)
        if done == length:
            laws[tuple(text[len(prompt) :])] += probability  # type: ignore[assignment]
            return
        text = list(text)
        for _ in range(min(2, length - done - 1)):
            q = draft[text[-1]].exp().tolist()
            p = slow_law(logits[text[-2], text[-1]], raw)
            if divergence("ag_mean", p, q) > threshold:
                break
            text.append(max(range(len(q)), key=q.__getitem__))
        for token, chance in enumerate(slow_law(logits[text[-2], text[-1]], config)):
            cycle([*text, token], probability * chance)

    cycle(prompt, 1.0)
    return dict(laws)


def test_sampled_answers_follow_the_published_law() -> None:
    logits, draft = tables(4, size=4)
    prompt = [3, 1, 2]
    law = published_law(logits, draft, prompt, 0.25, 4)
    assert sum(law.values()) == pytest.approx(1.0)
    assert 10 < len(law) < 4**4  # some tokens are taken, some are drawn
    base = SpeculativeDecoder(TableTarget(logits), TableDrafter(draft), tree=TreeConfig(2, 2, 1))
    decoder = _RequestDecoder(base, reads_text=False, starts_in_prompt=True)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(1000):
        result = decoder.generate(
            torch.tensor([prompt]),
            rule="fuzzy_2025:0.25:ag_mean:chain",
            temperature=0.8,
            seed=seed,
            max_new_tokens=4,
        )
        seen[tuple(result.token_ids)] += 1
    assert set(seen) <= set(law)
    assert chi_square_p(seen, law) > 1e-3


@pytest.mark.parametrize("div_type", FSD_DIVERGENCES)
def test_each_published_divergence_is_the_one_of_that_name(div_type: str) -> None:
    generator = torch.Generator().manual_seed(5)
    p, q = torch.randn(2, 90, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    ours = get_divergence(FSD_DIVERGENCES[div_type])(p.log(), q.log())
    torch.testing.assert_close(ours, published(p, q, div_type))


@pytest.mark.parametrize(
    ("div_type", "value"),
    [  # p = (3/4, 1/4), q = (1/2, 1/2), by hand in nats
        ("kl_div", 0.5 * math.log(4 / 3)),
        ("kl_div_reversed", 0.75 * math.log(3 / 2) - 0.25 * math.log(2)),
        ("js_div", 5 / 16 * math.log(25 / 24) + 3 / 16 * math.log(9 / 8)),  # m = (5/8, 3/8)
        ("tv_div", 0.25),
    ],
)
def test_divergences_have_their_hand_values(div_type: str, value: float) -> None:
    p, q = torch.tensor([0.75, 0.25]).double(), torch.tensor([0.5, 0.5]).double()
    assert float(get_divergence(FSD_DIVERGENCES[div_type])(p.log(), q.log())) == pytest.approx(
        value, rel=1e-12
    )


def test_rules_of_the_call() -> None:
    assert _fsd_rule(None, "js_div", "2025", None) == Exact()
    assert _fsd_rule(0.4, "js_div", "2025", None) == Fuzzy2025(0.4, "ag_mean", chain=True)
    assert _fsd_rule(0.4, "kl_div", "rescue", 2.0) == Fuzzy(0.4, "kl_draft_target", budget=2.0)
    assert _fsd_rule(0.4, "js", "rescue", None) == Fuzzy(0.4, "js")


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_rescue_order_and_no_threshold_are_the_decoder_s_own(options: dict[str, Any]) -> None:
    model, small = tiny_model(), tiny_model(seed=1)
    drafter = ModelDrafter(TargetModel(small), VOCABULARY)
    decoder = SpeculativeDecoder(TargetModel(model), drafter)
    own = {key: value for key, value in options.items() if key != "do_sample"}
    for threshold, rule in ((None, "exact"), (0.9, "fuzzy:0.9:ag_mean")):
        expected = decoder.generate(PROMPT, rule=rule, tree="4,4,1", max_new_tokens=15, **own)
        ids = fsd_generate(
            model,
            PROMPT,
            assistant_model=small,
            fsd_div_threshold=threshold,
            order="rescue",
            num_assistant_tokens=4,
            seed=0,
            max_new_tokens=15,
            **options,
        )
        assert isinstance(ids, Tensor)
        assert ids[0, 5:].tolist() == expected.token_ids


def test_the_call_takes_a_tokenizer_s_output_streams_and_stops() -> None:
    tokenizer = byte_tokenizer()
    model, small = tiny_model(vocab_size=272), tiny_model(vocab_size=280, seed=1)
    inputs = tokenizer("hello", return_tensors="pt")
    options: dict[str, Any] = {
        "assistant_model": small, "fsd_div_threshold": 0.4, "fsd_div_type": "js_div",
        "tokenizer": tokenizer,
    }  # fmt: skip
    streamer = Watcher()
    ids = fsd_generate(model, **inputs, **options, max_new_tokens=25, streamer=streamer)
    assert isinstance(ids, Tensor)
    assert sum(streamer.pieces, []) == ids[0].tolist()  # noqa: RUF017 - a handful of lists
    letters = [token for token in ids[0, 5:].tolist() if 33 <= token < 127]
    stop = tokenizer.decode([letters[-1]])
    cut = fsd_generate(model, **inputs, **options, max_new_tokens=25, stop_strings=stop)
    assert isinstance(cut, Tensor)
    assert cut[0].tolist() == ids[0, : cut.shape[1]].tolist()
    assert stop in tokenizer.decode(cut[0, -1:])


@pytest.mark.parametrize("threshold", [None, 0.0])
def test_acceptance_length_counts_the_tokens_of_cycles(threshold: float | None) -> None:
    """In the published order no token comes before the first cycle."""
    model, small = tiny_model(), tiny_model(seed=1)
    call: dict[str, Any] = {"max_new_tokens": 4, "return_dict_in_generate": True}
    for order in ("2025", "rescue"):
        output = fsd_generate(
            model,
            PROMPT,
            assistant_model=small,
            fsd_div_threshold=threshold,
            order=order,
            **call,
        )
        assert isinstance(output, SpeculativeOutput)
        assert output.stats is not None
        assert output.stats.num_accepted == 0
        assert output.stats.acceptance_length == 1.0
        is_published = order == "2025" and threshold is not None
        assert output.stats.num_tokens_before_cycles == int(not is_published)
    alike = fsd_generate(
        model, PROMPT, assistant_model=model, fsd_div_threshold=9.0, **call | {"max_new_tokens": 6}
    )
    assert isinstance(alike, SpeculativeOutput)
    assert alike.stats is not None
    assert alike.stats.acceptance_length == 6 / alike.stats.num_cycles
    assert alike.stats.to_dict()["num_tokens_before_cycles"] == 0


def test_a_small_model_with_fewer_rows_names_what_it_can_be_compared_by() -> None:
    tokenizer = byte_tokenizer()
    model, small = tiny_model(vocab_size=280), tiny_model(vocab_size=272, seed=1)
    call: dict[str, Any] = {
        "assistant_model": small, "tokenizer": tokenizer, "fsd_div_threshold": 0.4,
        "max_new_tokens": 5,
    }  # fmt: skip
    for div_type in ("js_div", "kl_div_reversed", "top_k_js_div"):
        with pytest.raises(ValueError, match="fewer rows than the target; use js, tv or") as caught:
            fsd_generate(model, PROMPT, fsd_div_type=div_type, **call)
        assert str(caught.value).startswith(f"fsd_div_type '{div_type}'")
        assert str(caught.value).endswith("(fsd_div_type 'js', 'tv_div' or 'kl_div')")
        assert "draft_vocab" not in str(caught.value)
    for div_type in ("js", "tv_div", "kl_div"):
        ids = fsd_generate(model, PROMPT, fsd_div_type=div_type, **call)
        assert isinstance(ids, Tensor)
        assert ids.shape == (1, 10)


def test_a_stop_at_the_prompt_s_end_stops_nothing() -> None:
    model, small = tiny_model(), tiny_model(seed=1)
    options: dict[str, Any] = {"assistant_model": small, "fsd_div_threshold": 1.0}
    free = fsd_generate(model, PROMPT, **options, max_new_tokens=8)
    ids = fsd_generate(
        model, PROMPT, **options, max_new_tokens=8, eos_token_id=int(PROMPT[0, -1]), pad_token_id=0
    )
    assert isinstance(free, Tensor)
    assert isinstance(ids, Tensor)
    assert PROMPT[0, -1] not in free[0, 5:]
    assert torch.equal(ids, free)


def test_the_call_takes_a_stop_and_keeps_to_the_context() -> None:
    model = tiny_model(max_position_embeddings=40)
    small = tiny_model(max_position_embeddings=40)
    free = fsd_generate(
        model, PROMPT, assistant_model=small, fsd_div_threshold=1.0, max_new_tokens=20
    )
    assert isinstance(free, Tensor)
    eos = int(free[0, 9])
    ids = fsd_generate(
        model, PROMPT, assistant_model=small, fsd_div_threshold=1.0, max_new_tokens=20,
        eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    assert isinstance(ids, Tensor)
    assert ids[0].tolist() == free[0, : ids.shape[1]].tolist()
    assert ids.shape[1] <= 10
    assert ids[0, -1] == eos
    full = fsd_generate(
        model, PROMPT, assistant_model=small, fsd_div_threshold=1.0, max_new_tokens=99
    )
    assert isinstance(full, Tensor)
    assert full.shape[1] == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsd_div_type": "js_dv"}, "unknown fsd_div_type 'js_dv'.*did you mean 'js_div'"),
        ({"fsd_div_type": "top_p_js_div"}, "unknown fsd_div_type"),
        ({"order": "2026"}, "unknown order"),
        ({"fsd_div_threshold": -1.0}, "threshold must be >= 0"),
        ({"fsd_div_threshold": None, "budget": 1.0}, "give fsd_div_threshold too"),
        ({"num_assistant_tokens": 0}, "must be >= 1"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "must be 'constant'"),
        ({"fsd_div_logit_processor": ["temperature"]}, "fsd_div_logit_processor"),
        ({"fsd_tracking": True}, "fsd_tracking"),
        ({"num_beams": 3}, "num_beams 3"),
        ({"assistant_model": tiny_model(vocab_size=100)}, "not the target's"),
        ({"inputs": torch.ones(2, 3, dtype=torch.int64)}, "one prompt at a time"),
    ],
)
def test_what_the_call_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    call = {"inputs": PROMPT, "assistant_model": tiny_model(seed=1), "fsd_div_threshold": 0.4}
    with pytest.raises((ValueError, TypeError), match=message):
        fsd_generate(tiny_model(), **(call | options))
