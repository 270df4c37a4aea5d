"""Our decoder as a model of lm-eval. Importing this module registers it as `eagle_fsd`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any

import lm_eval.models  # noqa: F401 - lm-eval registers its own models only where it has none yet
import torch
from jinja2 import TemplateError
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor
from tqdm import tqdm

from eagle_fsd.acceptance import Exact, build_rule
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.target import TargetModel

logger = logging.getLogger(__name__)

# A task's names for the longest answer, the first one counts.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_p", "top_k", "min_p")
# Settings that we do not have, with the value that turns each off.
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}

# What lm-eval passes on as the device where there is no --device.
_LM_EVALS_DEVICE = "cuda:0"

Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("eagle_fsd")
class EagleFsdLM(TemplateLM):  # type: ignore[misc]
    """Answers by speculative decoding with one rule; log-likelihoods by the target.

    Prompts become ids as lm-eval's own `hf` model makes them, so that scores can be compared. One
    request is decoded at a time.

    Args:
        target: as `SpeculativeDecoder.from_pretrained` takes it.
        draft_head, draft_model, draft_vocab, dtype, device, revision, attn_implementation: too.
        tree: "auto" or "N:DEPTH:K"; commas are fine outside of --model_args.
        rule: a name or a written form.
        threshold, divergence, budget: knobs of a rule that is given by name.
        plain: decode without a draft tree; needs nothing that drafts.
        max_length: prompt and answer together; None is the target's context.
        max_gen_toks: of an answer where a task says nothing.
        add_bos_token: None does as the tokenizer does.
        seed: of all randomness.
        batch_size, max_batch_size: lm-eval always gives them; only 1 and "auto" are possible.

    Raises:
        ValueError, TypeError, FileNotFoundError, RuntimeError: one sentence about what does not
            fit.
    """

    def __init__(  # noqa: PLR0913 - the keys of --model_args
        self,
        target: str,
        draft_head: str | None = None,
        draft_model: str | None = None,
        draft_vocab: str | int = "auto",
        tree: str = "auto",
        rule: str = "exact",
        threshold: float | None = None,
        divergence: str | None = None,
        budget: float | None = None,
        plain: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        revision: str | None = None,
        attn_implementation: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        _check("a text", str, target=target, tree=tree, rule=rule, dtype=dtype, device=device)
        _check("a text", str | None, draft_head=draft_head, draft_model=draft_model)
        _check("a text", str | None, divergence=divergence, revision=revision)
        _check("a text", str | None, attn_implementation=attn_implementation)
        _check("a number", int | float | None, threshold=threshold, budget=budget)
        _check("true or false", bool, plain=plain)
        _check("true or false", bool | None, add_bos_token=add_bos_token)
        _check("a whole number", int, max_gen_toks=max_gen_toks, seed=seed)
        _check("a whole number", int | None, max_length=max_length)
        if max_gen_toks < 1:
            raise ValueError(f"max_gen_toks must be >= 1, got {max_gen_toks}")
        for name, size in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
            if size is not None and str(size) not in ("1", "auto"):
                raise ValueError(f"{name} must be 1, one request at a time, got {size!r}")
        if not plain and draft_head is None and draft_model is None:
            raise ValueError("nothing drafts: give draft_head or draft_model, or plain=true")
        knobs = {"threshold": threshold, "divergence": divergence, "budget": budget}
        self._rule = build_rule(rule, **{k: v for k, v in knobs.items() if v is not None})
        if plain and not isinstance(self._rule, Exact):
            raise ValueError(f"plain decoding has no tree to relax; leave out rule {rule!r}")
        options = {"revision": revision, "attn_implementation": attn_implementation}
        self._decoder = SpeculativeDecoder.from_pretrained(
            target,
            draft_head=None if plain else draft_head,
            draft_model=None if plain else draft_model,
            draft_vocab="auto" if plain else draft_vocab,
            dtype=dtype,
            device=device,
            tree=tree.replace(":", ","),
            **{name: value for name, value in options.items() if value is not None},
        )
        self._decoder.check_rule(self._rule)
        assert isinstance(self._decoder.target, TargetModel)
        self._target = self._decoder.target
        self.tokenizer: Any = self._decoder.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"target {target!r} came without a tokenizer, which tasks need")
        self._max_length = self._checked_length(max_length)
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._is_plain = plain
        self._seed = seed
        self._name = str(target)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> EagleFsdLM:
        """As `create_from_arg_obj`, of --model_args as they are written."""
        return cls.create_from_arg_obj(
            utils.simple_parse_args_string(arg_string), additional_config
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> EagleFsdLM:
        """The model of --model_args, which win over lm-eval's own flags.

        Args:
            arg_dict: --model_args.
            additional_config: lm-eval's --device and --batch_size; its default device, which
                cannot be told from one that is asked for, is our "auto".
        """
        flags = {name: v for name, v in (additional_config or {}).items() if v is not None}
        if flags.get("device") == _LM_EVALS_DEVICE:
            flags["device"] = "auto"
        return cls(**(flags | arg_dict))

    def _checked_length(self, max_length: int | None) -> int:
        longest = self._target.max_positions
        if max_length is None:
            return longest
        if not 2 <= max_length <= longest:
            raise ValueError(f"max_length must be in 2..{longest}, got {max_length}")
        return max_length

    @property
    def max_length(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Of an answer where a task says nothing."""
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text."""
        return self._special_id("eos_token_id")

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows: its beginning, or else the end of another."""
        bos: int | None = self.tokenizer.bos_token_id
        return self._special_id("eos_token_id") if bos is None else bos

    def _special_id(self, name: str) -> int:
        token_id = getattr(self.tokenizer, name)
        if token_id is None:
            raise ValueError(f"the tokenizer of {self._name!r} has no {name}, which this needs")
        return int(token_id)

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's caches of rendered prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results beside --model_args."""
        return {
            "model_dtype": str(self._target.dtype),
            "model_num_parameters": self._target.model.num_parameters(),
            "eagle_fsd_rule": "plain" if self._is_plain else self._rule.spec,
            "eagle_fsd_tree": None if self._is_plain else str(self._decoder.tree),
        }

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; its system message is left out where the template has none.

        Args:
            chat_history: messages with "role" and "content".
            add_generation_prompt: end with the beginning of an answer; else the last message goes
                on.
        """
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            text = self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            logger.warning("the chat template takes no system message; it is left out")
            text = self.tokenizer.apply_chat_template(rest, **options)
        return str(text)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, begun as the tokenizer begins texts, but once.

        Args:
            string: the text.
            add_special_tokens: None decides by the text and `add_bos_token`.
            **kwargs: for the tokenizer.
        """
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            is_begun = bos is not None and string.startswith(bos)
            add_special_tokens = False if is_begun else self._add_bos_token
        if add_special_tokens is not None:
            kwargs["add_special_tokens"] = add_special_tokens
        return list(self.tokenizer.encode(string, **kwargs))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """One answer a request, without the stop string that ended it.

        Args:
            requests: instances with (context, settings) arguments.
            disable_tqdm: show no bar.

        Raises:
            ValueError: for settings that we do not have, and would not leave unsaid.
        """
        answers, num_tokens, num_cycles, seen = [], 0, 0, Counter[str]()
        for request in tqdm(requests, desc="answers", disable=disable_tqdm):
            context, gen_kwargs = request.args
            options = generation_options(gen_kwargs, self._max_gen_toks)
            # A request that is repeated gets another answer, the same in whatever company.
            key = json.dumps([context, gen_kwargs], default=str)
            options["seed"] = _request_seed(self._seed, key, seen[key])
            seen[key] += 1
            result = self._decode(self._prompt(context, options["max_new_tokens"]), options)
            num_tokens += result.stats.num_tokens
            num_cycles += result.stats.num_cycles
            answers.append(result.text)
            self.cache_hook.add_partial("generate_until", request.args, result.text)
        logger.info("%d tokens in %d passes of the target", num_tokens, num_cycles + len(requests))
        return answers

    def _decode(self, input_ids: Tensor, options: Mapping[str, Any]) -> Any:
        decode = self._decoder.plain if self._is_plain else self._decoder.generate
        return decode(input_ids, rule=self._rule, **options)

    def _prompt(self, context: str, max_new_tokens: int) -> Tensor:
        """[1, P] int64, of a long context the end."""
        room = self._max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"answers of {max_new_tokens} tokens leave no room for a prompt in a context of "
                f"{self._max_length}; lower max_gen_toks"
            )
        ids = self.tok_encode(context)
        if len(ids) > room:
            logger.warning("a prompt of %d tokens is cut to its last %d", len(ids), room)
        return torch.tensor([ids[-room:]], dtype=torch.int64)

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, in nats, and whether greedy decoding gives it.

        The target reads a context once for all its continuations.

        Args:
            requests: (text pair or None, ids of the context, ids of the continuation).
            disable_tqdm: show no bar.
        """
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda place: requests[place][1])
        read: list[int] | None = None
        first = torch.empty(0)
        with self._target.turnstile.enter(), self._target.turnstile.running():
            for place in tqdm(order, desc="log-likelihoods", disable=disable_tqdm):
                texts, context, continuation = requests[place]
                if continuation:
                    context = self._cut(context, continuation)
                    if context != read:
                        self._target.start(self._max_length)
                        first = self._target.prefill(_ids(context)).logits
                        read = context
                    answers[place] = self._score(first, len(context), continuation)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[place])
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> list[int]:
        """Of a long context the end that the continuation leaves room for."""
        room = self._max_length + 1 - len(continuation)  # its last token is not read
        if not context or room < 1:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens after {len(context)} has no context "
                f"within {self._max_length} tokens"
            )
        if len(context) > room:
            logger.warning("a context of %d tokens is cut to its last %d", len(context), room)
        return context[-room:]

    @torch.inference_mode()
    def _score(self, first: Tensor, num_rows: int, continuation: list[int]) -> tuple[float, bool]:
        """Scores a continuation behind the first `num_rows` rows of the cache.

        Args:
            first: [1, V] logits of its first token.
            num_rows: of its context.
            continuation: one id at least.
        """
        self._target.truncate(num_rows)
        rows = [first]
        if len(continuation) > 1:
            features = self._target.prefill(_ids(continuation[:-1])).features
            rows.append(self._target.logits(features))
        logits = torch.cat(rows).float()
        ids = torch.tensor(continuation, device=logits.device)
        log_probs = logits.log_softmax(-1).gather(1, ids[:, None])
        return float(log_probs.sum()), bool((logits.argmax(-1) == ids).all())

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in nats; a long one in windows of `max_length`.

        Args:
            requests: instances with (text,) arguments.
            disable_tqdm: show no bar.
        """
        totals = []
        for request in tqdm(requests, desc="texts", disable=disable_tqdm):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            totals.append(sum(score for score, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals


def _check(words: str, kind: type | UnionType, **values: Any) -> None:
    """Refuses what lm-eval reads --model_args as: the text "no", 1.0 for 1, a number for a name."""
    for name, value in values.items():
        is_stray = isinstance(value, bool) and kind not in (bool, bool | None)
        if is_stray or not isinstance(value, kind):
            hint = "; put it in quotes" if words == "a text" else ""
            raise TypeError(f"{name} must be {words}, got {value!r}{hint}")


def generation_options(gen_kwargs: Mapping[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """A task's generation settings in the decoder's words.

    As in lm-eval, the temperature is 0 with do_sample false, and without either; with do_sample
    true and no temperature it is 1, as in transformers. Nothing is filled in from the model's own
    generation config.

    Args:
        gen_kwargs: until, do_sample, temperature, top_p, top_k, min_p, and max_gen_toks or one of
            its other names.
        max_gen_toks: where there is none of these.

    Raises:
        ValueError, TypeError: for other settings, unless they change nothing, and values out of
            range.
    """
    rest = {name: value for name, value in gen_kwargs.items() if value is not None}
    until = rest.pop("until", [])
    limits = [rest.pop(name) for name in _MAX_TOKENS if name in rest]
    is_sampling = rest.pop("do_sample", None)
    temperature = float(rest.pop("temperature", 1.0 if is_sampling else 0.0))
    options: dict[str, Any] = {
        "stop": [text for text in ([until] if isinstance(until, str) else until) if text],
        "max_new_tokens": int(limits[0] if limits else max_gen_toks),
        "temperature": 0.0 if is_sampling is False else temperature,
        **{name: rest.pop(name) for name in _SAMPLING if name in rest},
    }
    unknown = {name: v for name, v in rest.items() if name not in _NEUTRAL or v != _NEUTRAL[name]}
    if unknown:
        known = ["until", "do_sample", "temperature", *_SAMPLING, *_MAX_TOKENS]
        raise ValueError(
            f"unsupported generation settings {unknown}; leave them out, supported are {known}"
        )
    SamplingConfig(
        **{name: options[name] for name in ("temperature", *_SAMPLING) if name in options}
    )
    return options


def _request_seed(seed: int, key: str, num_before: int) -> int:
    """The seed of one request, in [0, 2**63)."""
    text = json.dumps([seed, key, num_before])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _ids(token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)
