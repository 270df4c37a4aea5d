"""Arms: the ways of decoding that a speed run puts side by side, all from ids to ids.

    hf           transformers' own generate of the unmodified model, sdpa, dynamic cache
    hf-lookup    the same with its prompt lookup of ten tokens
    plain        our plain decoding
    exact, fuzzy:0.3:js, any rule as it is written for --rule
    draft-model  exact, drafted by a small model instead of a head

Every arm takes the same `Request` and counts the same thing: the ids after the prompt, a stop token
included.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from eagle_fsd.acceptance import RULES, AcceptanceRule, Exact, build_rule
from eagle_fsd.chat import merge_stop_ids
from eagle_fsd.config import SamplingConfig
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.device import synchronize
from eagle_fsd.divergence import unknown_name
from eagle_fsd.stats import GenerationStats
from eagle_fsd.target import TargetModel

HF, HF_LOOKUP, PLAIN, DRAFT_MODEL = "hf", "hf-lookup", "plain", "draft-model"
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Request:
    """What every arm is asked for one question.

    Attributes:
        input_ids: [P] int64, on the CPU.
        max_new_tokens: >= 1; P + max_new_tokens is within the target's context.
        stop_ids: all of the merged list, ascending.
        sampling: the law.
        seed: of this question's randomness, in [0, 2**63).
    """

    input_ids: Tensor
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True)
class Answer:
    """What an arm gave, and how long it took.

    Attributes:
        token_ids: after the prompt, a stop token included.
        seconds: from ids to ids, the device waited for on both ends.
        stats: the decoder's own; None for transformers' arms.
    """

    token_ids: list[int]
    seconds: float
    stats: GenerationStats | None = None

    @property
    def seconds_per_token(self) -> float:
        """Prompt included."""
        return self.seconds / len(self.token_ids)


class Arm(Protocol):
    """One way of decoding."""

    @property
    def name(self) -> str:
        """As given on the command line."""
        ...

    @property
    def is_drafting(self) -> bool:
        """Whether it drafts trees, so that there is an acceptance length."""
        ...

    @property
    def device(self) -> torch.device:
        """What has to be waited for before a clock is read."""
        ...

    @property
    def attention(self) -> str:
        """The target's attention implementation in this arm."""
        ...

    def decode(self, request: Request) -> tuple[list[int], GenerationStats | None]:
        """The ids after the prompt, and the decoder's statistics where there are any."""
        ...


class TransformersArm:
    """`generate` of the unmodified model, with sdpa attention and transformers' dynamic cache.

    One copy of the weights serves all arms. The settings (penalties, static caches, ...) of the
    model's own generation config apply to no arm.

    Args:
        name: of the arm.
        model: a loaded causal LM; not changed. Families without sdpa keep their attention.
        lookup_tokens: of transformers' prompt lookup; None turns it off.
    """

    is_drafting = False

    def __init__(self, name: str, model: PreTrainedModel, lookup_tokens: int | None = None) -> None:
        self.name = name
        self.device = _device(model)
        self._model: Any = twin(model)
        if model._supports_sdpa:
            self._model.set_attn_implementation("sdpa")
        # `generate` fills what a request leaves open from the generation config of its model.
        self._model.generation_config = GenerationConfig()
        self.attention: str = self._model.config._attn_implementation
        self._lookup = {} if lookup_tokens is None else {"prompt_lookup_num_tokens": lookup_tokens}

    def decode(self, request: Request) -> tuple[list[int], GenerationStats | None]:
        prompt = request.input_ids[None].to(self.device)
        config = GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            eos_token_id=list(request.stop_ids) or None,
            **_transformers_sampling(request.sampling),
            **self._lookup,
        )
        # transformers draws from the global generator. That of an accelerator is seeded before each
        # use and read by nothing else, so that only the CPU's has to be put back.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            output = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config
            )
        token_ids: list[int] = output[0, prompt.shape[1] :].tolist()
        return token_ids, None


class DecoderArm:
    """Our decoder, plain or with a rule.

    Args:
        name: of the arm.
        decoder: its tokenizer is not used: text is made in no arm.
        rule: None for plain decoding.
        profile: wait for the device after each phase, which an accelerator needs for right
            `phases_s` and which costs it some speed.

    Raises:
        ValueError: the drafter cannot serve the rule.
    """

    def __init__(
        self,
        name: str,
        decoder: SpeculativeDecoder,
        rule: AcceptanceRule | None,
        profile: bool = False,
    ) -> None:
        if rule is not None:
            decoder.check_rule(rule)
        self.name = name
        self.is_drafting = rule is not None
        self.device: torch.device = decoder.target.output_device
        self.attention: str = loaded_target(decoder).config._attn_implementation
        # With its tree given, a decoder drafts even where it knows plain decoding to be faster.
        self._decoder = SpeculativeDecoder(decoder.target, decoder.drafter, None, decoder.tree)
        self._rule = rule
        self._profile = profile

    def decode(self, request: Request) -> tuple[list[int], GenerationStats | None]:
        decode = self._decoder.plain if self._rule is None else self._decoder.generate
        result = decode(
            request.input_ids,
            rule=self._rule or Exact(),
            max_new_tokens=request.max_new_tokens,
            stop_ids=request.stop_ids,
            seed=request.seed,
            profile=self._profile,
            **asdict(request.sampling),
        )
        return result.token_ids, result.stats


def answer(arm: Arm, request: Request) -> Answer:
    """Lets an arm decode one request, with the clock running."""
    synchronize(arm.device)
    start = time.perf_counter()
    token_ids, stats = arm.decode(request)
    synchronize(arm.device)
    return Answer(token_ids, time.perf_counter() - start, stats)


def parse_arms(text: str) -> dict[str, AcceptanceRule | None]:
    """Reads a list of arms, their names separated by commas.

    Returns:
        In the given order, each name with the rule that it decodes by: None for hf, hf-lookup and
        plain.

    Raises:
        ValueError: no arm, an unknown one, one that comes twice (in whatever writing), or a rule
            whose knobs are wrong.
    """
    arms: dict[str, AcceptanceRule | None] = {}
    for name in (part.strip() for part in text.split(",")):
        if not name:
            raise ValueError(f"--arms takes names separated by commas, got {text!r}")
        rule = _rule_of(name)
        for other, other_rule in arms.items():
            is_same_rule = rule is not None and DRAFT_MODEL not in (name, other)
            if name == other or (is_same_rule and rule == other_rule):
                raise ValueError(f"arm {name!r} comes twice; it is the same as {other!r}")
        arms[name] = rule
    return arms


def arm_spec(name: str) -> str:
    """An arm by its rule's written form, so that fuzzy:0.30:js is fuzzy:0.3:js.

    What is no rule, such as hf and draft-model, stays as it is.
    """
    if name.partition(":")[0] not in RULES:
        return name
    return build_rule(name).spec


def _rule_of(name: str) -> AcceptanceRule | None:
    if name in (HF, HF_LOOKUP, PLAIN):
        return None
    if name == DRAFT_MODEL:
        return Exact()
    if name.partition(":")[0] not in RULES:
        raise unknown_name("arm", name, [HF, HF_LOOKUP, PLAIN, DRAFT_MODEL, *RULES])
    return build_rule(name)


def build_arms(
    arms: dict[str, AcceptanceRule | None],
    decoder: SpeculativeDecoder,
    draft_model_decoder: SpeculativeDecoder | None = None,
    profile: bool = False,
) -> list[Arm]:
    """Makes the arms that `parse_arms` read.

    Args:
        arms: names and rules.
        decoder: of all arms but draft-model; transformers' arms use its target's model.
        draft_model_decoder: of draft-model.
        profile: see DecoderArm.

    Raises:
        ValueError: as DecoderArm.
    """
    built: list[Arm] = []
    for name, rule in arms.items():
        if name in (HF, HF_LOOKUP):
            lookup_tokens = LOOKUP_TOKENS if name == HF_LOOKUP else None
            built.append(TransformersArm(name, loaded_target(decoder).model, lookup_tokens))
        else:
            its_decoder = draft_model_decoder if name == DRAFT_MODEL else decoder
            assert its_decoder is not None
            built.append(DecoderArm(name, its_decoder, rule, profile))
    return built


def loaded_target(decoder: SpeculativeDecoder) -> TargetModel:
    """The decoder's target with its transformers model.

    Raises:
        TypeError: it is of another kind.
    """
    if not isinstance(decoder.target, TargetModel):
        raise TypeError(f"target must be a TargetModel, got {type(decoder.target).__name__}")
    return decoder.target


def stop_ids(decoder: SpeculativeDecoder) -> tuple[int, ...]:
    """The stops that hold in every arm: the generation config's and the tokenizer's, ascending."""
    eos = getattr(decoder.tokenizer, "eos_token_id", None)
    return tuple(sorted(merge_stop_ids(decoder.target.stop_ids, eos)))


def question_seed(seed: int, question_id: int | str) -> int:
    """A question's own seed in [0, 2**63), the same wherever the question stands in a run."""
    text = json.dumps([seed, question_id])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rotated(arms: Sequence[Arm], place: int) -> list[Arm]:
    """The arms from another first one on, so that drift of the machine favours none."""
    first = place % len(arms)
    return [*arms[first:], *arms[:first]]


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules again on the same weights, with configs of their own."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _device(model: PreTrainedModel) -> torch.device:
    """Where the model reads ids."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.device


def _transformers_sampling(sampling: SamplingConfig) -> dict[str, Any]:
    """The same law in transformers' words, which have no temperature 0 and keep 50 tokens."""
    if sampling.is_greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }
