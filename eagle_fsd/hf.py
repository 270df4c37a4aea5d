"""Speculative decoding behind `model.generate`: `custom_generate`, and the 2025 code's own call.

    decoder = SpeculativeDecoder.from_pretrained(model, draft_head="...")
    ids = model.generate(**inputs, max_new_tokens=99, custom_generate=custom_generate(decoder))
    ids = fsd_generate(model, **inputs, assistant_model=small, fsd_div_threshold=0.4)

What a request asks for is honoured or refused in one sentence before anything runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from eagle_fsd.acceptance import AcceptanceRule, Exact, Fuzzy, Fuzzy2025, build_rule
from eagle_fsd.chat import check_stops, merge_stop_ids, special_token_id
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import (
    FinishReason,
    GenerationResult,
    SpeculativeDecoder,
    Step,
    _Request,
    _Session,
    _tree_config,
    warn_of_context_end,
)
from eagle_fsd.divergence import DIVERGENCES, get_divergence, unknown_name
from eagle_fsd.stats import GenerationStats

# Warpers in the order in which `law_log_probs` applies them, with the setting that each holds.
_WARPERS: Final = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# What `generate` hands on that needs nothing from us.
_HARMLESS_INPUTS: Final = frozenset({"use_cache", "logits_to_keep"})
_UNSUPPORTED_OUTPUTS: Final = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)

FSD_DIVERGENCES: Final = MappingProxyType(
    {
        "kl_div": "kl_draft_target",
        "kl_div_reversed": "kl_target_draft",
        "js_div": "ag_mean",  # what the 2025 code computes under that name
        "tv_div": "tv",
        "top_k_kl_div": "kl_draft_target@50",
        "top_k_js_div": "ag_mean@50",
        "top_k_tv_div": "tv@50",
    }
)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `model.generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: [1, P + new] int64, prompt and answer.
        stats: counts, times, the ledger and the seed.
        finish_reason: "stop", "length", or "context": the target's longest sequence.
    """

    stats: GenerationStats | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, eq=False)
class CustomGenerate:
    """The decoding loop that `model.generate(custom_generate=...)` calls; see `custom_generate`.

    Attributes:
        decoder: decodes; its target's model is the only one that this can be given to.
        rule: the acceptance rule.
        tree: size of the draft tree, None for the decoder's.
        seed: of sampling; None takes the next number of torch's global generator.
        starts_in_prompt: the first tree hangs below the prompt's last token, as in the 2025 code;
            otherwise the target draws one token first.
    """

    decoder: SpeculativeDecoder
    rule: AcceptanceRule
    tree: TreeConfig | None = None
    seed: int | None = None
    starts_in_prompt: bool = False

    def __call__(  # noqa: PLR0913 - the arguments that `generate` passes
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        """Decodes what `model.generate` has prepared.

        Args:
            model: the decoder's own target.
            input_ids: [1, P] int64.
            logits_processor: temperature, top-k, top-p and min-p, in that order, when sampling.
            stopping_criteria: of length, end-of-sequence ids and stop strings.
            generation_config: prepared.
            streamer: gets the new ids step by step; the prompt was put by `generate`.
            seed: for this request.
            stop: one stop string or several, for this request.
            **model_kwargs: what else `generate` prepared; refused where it would change the answer.

        Returns:
            [1, P + new] int64 on the prompt's device, or a `SpeculativeOutput`. An answer that the
            target's context cuts is logged as a warning.

        Raises:
            ValueError, TypeError: for anything that cannot be honoured, before anything runs.
        """
        kept_back, assistant_model = _kept_back_by_generate(model)
        streamer = kept_back if streamer is None else streamer
        _refuse_settings(generation_config, assistant_model)
        self._refuse_inputs(model, input_ids, model_kwargs)
        sampling = _read_warpers(logits_processor, bool(generation_config.do_sample))
        stops = _read_criteria(stopping_criteria, input_ids.shape[1])
        strings = (*stops.strings, *check_stops(stop))
        if strings and self.decoder.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer and the decoder came without one; make it with "
                "tokenizer=, or use eos_token_id"
            )
        decoder = _RequestDecoder(self.decoder, bool(strings), self.starts_in_prompt)
        stream = decoder.stream(
            input_ids,
            rule=self.rule,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_new_tokens=stops.max_new_tokens,
            stop=strings or None,
            stop_ids=tuple(stops.ids),
            seed=self._resolve_seed(seed, sampling),
            tree=self.tree,
        )
        with closing(stream):
            result = _drain(stream, streamer)
        warn_of_context_end(result, decoder.target.max_positions)
        answer = torch.tensor([result.token_ids], dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat([input_ids, answer], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return SpeculativeOutput(
            sequences=sequences,  # type: ignore[arg-type]
            stats=result.stats,
            finish_reason=result.finish_reason,
        )

    def _resolve_seed(self, seed: int | None, sampling: SamplingConfig) -> int:
        chosen = self.seed if seed is None else seed
        if chosen is not None:
            return chosen
        if sampling.is_greedy:
            return 0
        number = torch.empty((), dtype=torch.int64)
        return int(number.random_(generator=torch.default_generator))

    def _refuse_inputs(self, model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        if model is not getattr(self.decoder.target, "model", None):
            raise ValueError(
                f"this custom_generate decodes its own target and was given another "
                f"{type(model).__name__}; make a decoder for that model"
            )
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise ValueError(
                f"one prompt at a time: got input_ids of shape {list(input_ids.shape)}, want "
                "[1, P]; call once for each"
            )
        if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
            raise ValueError("inputs_embeds cannot be drafted from; pass input_ids [1, P]")
        given = {key: value for key, value in model_kwargs.items() if value is not None}
        mask = given.pop("attention_mask", None)
        if mask is not None and bool((mask == 0).any()):
            raise ValueError("a prompt with masked tokens is not supported; pass it unpadded")
        positions = given.pop("position_ids", None)
        if positions is not None:
            expected = torch.arange(input_ids.shape[1])
            if not torch.equal(positions.reshape(-1).cpu(), expected):
                raise ValueError("position_ids other than 0, 1, 2, ... are not supported")
        cache = given.pop("cache", None)
        if cache is not None and (
            getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0
        ):
            raise ValueError("a cache of one's own is not supported; leave out past_key_values")
        unknown = sorted(
            key
            for key, value in given.items()
            if key not in _HARMLESS_INPUTS and value is not False
        )
        if unknown:
            raise ValueError(f"model inputs {unknown} are not supported; leave them out")


def custom_generate(
    decoder: SpeculativeDecoder,
    rule: str | AcceptanceRule = "exact",
    *,
    tree: TreeConfig | str | None = None,
    seed: int | None = None,
    **knobs: Any,
) -> CustomGenerate:
    """Makes the callable for `model.generate(..., custom_generate=...)`.

    Honoured: the generation config's lengths, eos ids, `do_sample` with temperature, top-k, top-p
    and min-p, `streamer`, `return_dict_in_generate`, and the further keywords `seed=` and `stop=`
    of `generate`. `model.generate` stops at the config's eos ids alone, and so does this.

    transformers 5.24 loses `tokenizer=` on the way to a callable, so that `stop_strings=` ends in
    its own error: use `stop=`, or a `StopStringCriteria`. Stop strings are looked for in the answer
    only, where transformers' criterion can also match one that begins in the prompt.

    Sampling follows the decoder's seeded noise. Without a seed each call takes one number from
    torch's global CPU generator, so that `torch.manual_seed` repeats a run; greedy calls take none.

    Args:
        decoder: a decoder with a drafter, whose target is the model that `generate` is called on.
        rule: a rule object, a name or the written form ("fuzzy:0.3:js").
        tree: size of the draft tree, a TreeConfig or "N,DEPTH,K"; None or "auto" is the decoder's.
        seed: of every request; None as above.
        **knobs: of a rule that is given by name (threshold, divergence, budget, ...).

    Raises:
        ValueError, TypeError: the rule or the tree is none, or the drafter cannot serve the rule.
    """
    if decoder.drafter is None:
        raise ValueError(
            "this decoder has no drafter; pass draft_head= or draft_model= to from_pretrained"
        )
    built = build_rule(rule, **knobs)
    decoder.check_rule(built)
    return CustomGenerate(decoder, built, _tree_config(tree), seed)


def fsd_generate(  # noqa: PLR0913 - the published call's own keywords
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    assistant_model: PreTrainedModel,
    fsd_div_threshold: float | None = None,
    fsd_div_type: str = "js_div",
    order: str = "2025",
    budget: float | None = None,
    num_assistant_tokens: int = 5,
    num_assistant_tokens_schedule: str = "constant",
    tokenizer: Any | None = None,
    seed: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **options: Any,
) -> Tensor | SpeculativeOutput:
    """The 2025 code's `model.generate(..., assistant_model=, fsd_div_threshold=, fsd_div_type=)`.

    The assistant drafts a greedy chain from the prompt on; its tokens are taken while the two raw
    laws are within the threshold, the next token is drawn from the target, and a new chain begins.

    Args:
        model: the target.
        inputs: [1, P] int64, or `input_ids=` among the options.
        assistant_model: a small model of the same tokenizer.
        fsd_div_threshold: T >= 0; None is exact verification, as in the published call.
        fsd_div_type: a key of FSD_DIVERGENCES, or a divergence of this package ("js", "tv@50").
            Thresholds published for "js_div" are on the scale of `ag_mean`, which that is.
        order: "2025" takes a draft token without a draw, as published; "rescue" draws first and
            relaxes only what the draw refused (rule `fuzzy`), which deviates less at the same T.
        budget: nats that the request may spend, or None.
        num_assistant_tokens: length of the chain, >= 1; the published code fixes 5.
        num_assistant_tokens_schedule: "constant".
        tokenizer: of both models, for stop strings and for models with other padding rows.
        seed: of sampling; None takes a number of torch's global generator.
        stop_strings: one or several; needs `tokenizer`.
        **options: of `model.generate`, under the same conditions as in `custom_generate`.

    Returns:
        [1, P + new] int64, or a `SpeculativeOutput`.

    Raises:
        ValueError, TypeError: for anything that cannot be honoured, before anything runs.

    Source: Holsman et al. 2025 (arXiv:2502.20704) and the authors' code.
    Differs: without `do_sample` the target's token is its argmax, where the published code still
        draws at temperature 1 (do_sample=True, temperature=1.0, top_k=0 here). Unknown options are
        refused and nothing is printed or left on the models.
    """
    rule = _fsd_rule(fsd_div_threshold, fsd_div_type, order, budget)
    if num_assistant_tokens_schedule != "constant":
        raise ValueError(
            "num_assistant_tokens_schedule must be 'constant', got "
            f"{num_assistant_tokens_schedule!r}; the chain keeps its length"
        )
    foreign = sorted(
        name
        for name in ("assistant_tokenizer", "fsd_div_logit_processor", "fsd_tracking")
        if options.pop(name, None)
    )
    if foreign:
        raise ValueError(f"{foreign} are not supported; leave them out")
    tree = TreeConfig(num_assistant_tokens, num_assistant_tokens, 1)
    decoder = SpeculativeDecoder.from_pretrained(
        model, draft_model=assistant_model, tokenizer=tokenizer, tree=tree
    )
    try:
        decoder.check_rule(rule)
    except ValueError as error:  # which names divergences as the rest of the package does
        raise ValueError(
            f"fsd_div_type {fsd_div_type!r}: {error} (fsd_div_type 'js', 'tv_div' or 'kl_div')"
        ) from error
    generate = CustomGenerate(decoder, rule, tree, seed, isinstance(rule, Fuzzy2025))
    if stop_strings is not None:
        options["stop"] = stop_strings
    call: Any = model.generate
    output: Tensor | SpeculativeOutput = call(inputs, custom_generate=generate, **options)
    return output


class _RequestDecoder(SpeculativeDecoder):
    """A decoder that stops where the request says and nowhere else, as `model.generate` does."""

    def __init__(
        self, decoder: SpeculativeDecoder, reads_text: bool, starts_in_prompt: bool
    ) -> None:
        tokenizer = decoder.tokenizer if reads_text else None
        super().__init__(decoder.target, decoder.drafter, tokenizer, decoder.tree)
        self._is_plain_faster = decoder._is_plain_faster  # its choice, not one that is given
        self._starts_in_prompt = starts_in_prompt

    def _stops(self, stop: Any, user_ids: Any) -> tuple[tuple[str, ...], frozenset[int]]:
        strings = check_stops(stop)
        special = [special_token_id(string, self.tokenizer) for string in strings]
        return strings, merge_stop_ids(list(user_ids), special)

    def _session(self, request: _Request) -> _Session:
        return (_PromptSession if self._starts_in_prompt else _Session)(self, request)


class _PromptSession(_Session):
    """A request whose first tree hangs below the prompt's last token: all tokens are of cycles."""

    def steps(self) -> Iterator[Step]:
        start = time.perf_counter()
        self.stats.num_tokens_before_cycles = 0
        root = self._read_prompt()
        self.stats.prefill_s = self.stats.wall_s = time.perf_counter() - start
        result = None
        while result is None:
            start = time.perf_counter()
            step = self._cycle(root)
            root, result = step.tokens[-1].id, step.result
            self.stats.wall_s += time.perf_counter() - start
            yield step

    def _read_prompt(self) -> int:
        """Reads all but the last token, which is returned as the first root."""
        assert self._drafter is not None
        assert self._tree is not None
        input_ids = self._request.input_ids.to(self._target.output_device)
        capacity = input_ids.numel() + self._tree.num_draft_tokens
        self._target.start(capacity)
        self._drafter.start(capacity)
        before = input_ids[:-1]
        if before.numel():
            self._drafter.commit(before, self._target.prefill(before).features)
        return int(input_ids[-1])


@dataclass(frozen=True)
class _Stops:
    """Where a request ends."""

    max_new_tokens: int
    ids: frozenset[int]
    strings: tuple[str, ...]


def _kept_back_by_generate(model: Any) -> tuple[Any, Any]:
    """`streamer` and `assistant_model` of the model's `generate` that led here, else None twice.

    transformers 5.24 puts the prompt to the streamer but hands neither argument on to a callable:
    without this look at the calling frames, a user's wrapper among them or not, they would be
    dropped in silence.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_generate = (
            frame.f_code.co_name == "generate"
            and frame.f_globals.get("__name__") == GenerationMixin.__module__
        )
        if is_generate and frame.f_locals.get("self") is model:
            return frame.f_locals.get("streamer"), frame.f_locals.get("assistant_model")
        frame = frame.f_back
    return None, None


def _refuse_settings(config: GenerationConfig, assistant_model: Any) -> None:
    """Refuses what is asked for by the generation config alone."""
    if assistant_model is not None:
        raise ValueError(
            "assistant_model beside custom_generate would draft twice; leave it out, or give the "
            "decoder a draft_model"
        )
    if int(config.num_beams or 1) > 1 or int(config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"num_beams {config.num_beams} and num_return_sequences {config.num_return_sequences} "
            "are not supported; a request has one beam and one answer"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation mode {str(mode.value)!r} is not supported; use greedy decoding or sampling"
        )
    outputs = [name for name in _UNSUPPORTED_OUTPUTS if getattr(config, name, None)]
    if outputs:
        raise ValueError(f"{outputs} are not supported, a tree has no such row per token")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation {config.cache_implementation!r} is not supported; the decoder "
            "has its own cache"
        )


def _read_warpers(processors: Iterable[Any], do_sample: bool) -> SamplingConfig:
    """The law that a list of logits processors makes."""
    settings: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    order = [*_WARPERS.values(), "end"]
    place = 0
    for processor in processors:
        if type(processor) is LogitNormalization:
            continue  # leaves every law as it is
        name = _WARPERS.get(type(processor))
        is_plain = (
            getattr(processor, "filter_value", -torch.inf) == -torch.inf
            and getattr(processor, "min_tokens_to_keep", 1) == 1
        )
        if name is None or not is_plain or not do_sample or name not in order[place:]:
            raise ValueError(
                f"logits processor {type(processor).__name__} is not supported "
                f"{'at this place' if name is not None and do_sample else 'here'}; supported are "
                "temperature, top-k, top-p and min-p, in this order, with do_sample=True"
            )
        settings[name] = getattr(processor, name)
        place = order.index(name) + 1
    return SamplingConfig(**settings)


def _read_criteria(criteria: Iterable[Any], num_prompt: int) -> _Stops:
    """Where a list of stopping criteria ends a request."""
    lengths: list[int] = []
    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            ids |= merge_stop_ids(criterion.eos_token_id)
        elif type(criterion) is StopStringCriteria:
            strings += tuple(criterion.stop_strings)
        elif type(criterion) is MaxTimeCriteria:
            raise ValueError(
                "max_time is not supported: the clock is never read inside a request; use "
                "max_new_tokens, or stop reading a stream"
            )
        else:
            raise ValueError(
                f"stopping criterion {type(criterion).__name__} is not supported; supported are "
                "the length, eos_token_id and stop strings"
            )
    if not lengths or min(lengths) <= num_prompt:
        raise ValueError(
            f"max_length {min(lengths, default=None)} leaves no room behind a prompt of "
            f"{num_prompt} tokens; use max_new_tokens"
        )
    return _Stops(min(lengths) - num_prompt, ids, strings)


def _drain(stream: Iterator[Step], streamer: BaseStreamer | None) -> GenerationResult:
    """Reads a stream to its end, handing each step's ids on as it comes."""
    result = None
    for step in stream:
        result = step.result
        if streamer is not None:
            streamer.put(torch.tensor([token.id for token in step.tokens]))
    assert result is not None
    if streamer is not None:
        streamer.end()
    return result


def _fsd_rule(
    threshold: float | None, div_type: str, order: str, budget: float | None
) -> AcceptanceRule:
    """The rule of the published call, or ours with the same knobs."""
    if order not in ("2025", "rescue"):
        raise unknown_name("order", order, ("2025", "rescue"))
    if div_type not in FSD_DIVERGENCES and str(div_type).partition("@")[0] not in DIVERGENCES:
        raise unknown_name("fsd_div_type", str(div_type), (*FSD_DIVERGENCES, *DIVERGENCES))
    divergence = FSD_DIVERGENCES.get(div_type, div_type)
    get_divergence(divergence)
    if threshold is None:
        if budget is not None:
            raise ValueError("budget limits a relaxed rule; give fsd_div_threshold too")
        return Exact()
    if order == "rescue":
        return Fuzzy(threshold, divergence, budget=budget)
    return Fuzzy2025(threshold, divergence, chain=True, budget=budget)
