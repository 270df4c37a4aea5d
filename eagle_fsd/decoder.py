"""Speculative decoding: `stream` is the loop, `generate` collects it, `plain` has no tree."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_fsd.acceptance import RULES, AcceptanceRule, Exact, build_rule
from eagle_fsd.attention import PACKED
from eagle_fsd.chat import (
    Detokenizer,
    Prompt,
    StopStrings,
    check_stops,
    encode_prompt,
    merge_stop_ids,
    special_token_id,
)
from eagle_fsd.checkpoint import check_fit, load_head, load_target, locate_head
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.device import resolve_device, synchronize
from eagle_fsd.divergence import is_infinite_under_reduced_vocab
from eagle_fsd.draft_vocab import AUTO, choose_vocab
from eagle_fsd.drafter import Draft, Drafter, HeadDrafter, ModelDrafter
from eagle_fsd.sampling import SeededNoise
from eagle_fsd.stats import GenerationStats, StepStats
from eagle_fsd.target import Target, TargetModel
from eagle_fsd.tuning import (
    TreeChoice,
    gains_by_packing,
    load_choice,
    prefers_bfloat16,
    setting_of,
)
from eagle_fsd.verify import EmittedToken, Origin, Verdict, Verifier
from tree import DraftTree

logger = logging.getLogger(__name__)

# Options by which transformers places a target itself.
_PLACING_OPTIONS = ("device_map", "tp_plan", "tp_size", "distributed_config")
# Room made at once for an answer; a cache that gets longer than that doubles.
_RESERVED_TOKENS = 4096

FinishReason = Literal["stop", "length", "context"]
Observer = Callable[[Draft, Tensor, Verifier], None]


class GenerateOptions(TypedDict, total=False):
    """Options of `stream`, `generate` and `plain`; all are optional.

    Attributes:
        rule: an AcceptanceRule, or its name or written form ("fuzzy", "fuzzy:0.3:js"); default
            "exact".
        threshold, divergence, on, budget: knobs of a rule that is given by name; so are the other
            rules' knobs (bound, alpha, ...), see acceptance.py.
        temperature, top_p, top_k, min_p: see SamplingConfig.
        max_new_tokens: >= 1, default 256.
        stop: one stop string or several; the text ends before it, the ids with the token that
            completed it.
        stop_ids: one or several further token ids that end the request, beside those of the
            generation config and the tokenizer.
        seed: of all randomness; None draws one, which the statistics report. Default 0.
        tree: a TreeConfig for this request, or "N,DEPTH,K" or "auto".
        observer: called with each scored tree, its logits [N, V] and the verifier, before the tree
            is verified; for recording. With one there are trees even where plain decoding was
            measured to be faster.
        profile: wait for the device after each phase, so that `phases_s` is right on a GPU
            (slower).
    """

    rule: str | AcceptanceRule
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop: str | Sequence[str] | None
    stop_ids: int | Sequence[int]
    seed: int | None
    tree: TreeConfig | str | None
    observer: Observer | None
    profile: bool
    threshold: float
    divergence: str
    on: str
    budget: float | None


@dataclass(frozen=True)
class Token:
    """One token of the answer.

    Attributes:
        id: the token.
        text: what it made readable; may be empty, may complete an earlier token's character.
        origin: accepted, rescued, recovered or bonus.
        cost: nats charged to the ledger for it.
        exact_id: what the exact step drew in its place.
    """

    id: int
    text: str
    origin: Origin
    cost: float
    exact_id: int | None


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    Attributes:
        text: the answer without special tokens, cut before a stop string.
        token_ids: the answer's ids; a stop token is the last of them.
        finish_reason: "stop" (token or string), "length" (max_new_tokens), or "context" (the
            model's longest sequence).
        stats: counts, times and the ledger.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(frozen=True)
class Step:
    """What one cycle added.

    Attributes:
        tokens: the new tokens.
        text: their text joined.
        stats: the cycle's figures; None for the first token after the prompt.
        tree: the tree that was scored, None for the first token.
        path: its rows that were taken, root left out.
        result: on the last step only.
    """

    tokens: list[Token]
    text: str
    stats: StepStats | None = None
    tree: DraftTree | None = None
    path: tuple[int, ...] = ()
    result: GenerationResult | None = None


@dataclass(frozen=True)
class _Request:
    """A validated request."""

    input_ids: Tensor
    verifier: Verifier
    tree: TreeConfig | None
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    seed: int
    observer: Observer | None
    profile: bool


class SpeculativeDecoder:
    """Decodes one request at a time on its target; another thread's request waits for the first.

    Args:
        target: the target.
        drafter: proposes trees; None leaves only `plain`.
        tokenizer: for text and stop strings; None leaves only ids.
        tree: a TreeConfig or "N,DEPTH,K"; None and "auto" are the one that `python -m
            benchmarks.tree` found to be the fastest here, or else the device's default.

    Raises:
        TypeError, ValueError: for something that is no target, or no tree.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        tokenizer: Any | None = None,
        tree: TreeConfig | str | None = None,
    ) -> None:
        if isinstance(target, nn.Module):
            raise TypeError(
                "target must be a TargetModel; wrap the model, TargetModel(model), or give it to "
                "SpeculativeDecoder.from_pretrained"
            )
        if isinstance(drafter, ModelDrafter) and drafter.model is target:
            raise ValueError("target and draft model share one cache; wrap the model once for each")
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.tree = tree

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - the public call, all but the target by keyword
        cls,
        target: str | Path | nn.Module,
        *,
        draft_head: str | Path | None = None,
        draft_model: str | Path | nn.Module | None = None,
        draft_vocab: str | int = "auto",
        tokenizer: Any | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        tree: TreeConfig | str | None = None,
        packed_weights: bool | str = "auto",
        compile: bool = False,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Loads a target and what drafts for it.

        Args:
            target: "demo", a hub id, a folder, a .gguf file, or a loaded transformers model, with
                adapters or without.
            draft_head: "demo", a hub id or a folder in EAGLE's format.
            draft_model: instead of a head, a small causal LM of the same tokenizer: a hub id, a
                folder, a .gguf file, or a loaded model.
            draft_vocab: what the head drafts over: "full", "auto" (its draft_vocab.json where it
                has one), or a number U, the most frequent tokens of that file.
            tokenizer: a loaded tokenizer instead of the target's own.
            dtype: "auto" (the checkpoint's, but on a CPU half precision becomes bfloat16 where
                the processor is faster with it, else float32), "float32", "bfloat16", "float16" or
                a torch dtype.
            device: "auto", "cpu", "cuda", "cuda:N" or "mps"; leave it at "auto" with `device_map`
                and `tp_plan`.
            tree: TreeConfig, "N,DEPTH,K" or "auto".
            packed_weights: whether a CPU multiplies by weights laid out for few rows, which takes
                the memory of the linear layers again; "auto" where it is faster and the memory is
                there. It has no effect on other devices, nor on quantised, offloaded or adapted
                models.
            compile: compute the target's passes and the head's steps with `torch.compile`, which
                takes minutes at first and a compiler on the machine; weights are not packed then.
            **options: revision, token, device_map, tp_plan, quantization_config,
                attn_implementation, ... for transformers.

        Raises:
            ValueError, TypeError, FileNotFoundError, RuntimeError: one sentence about what does not
                fit.
        """
        tree = _tree_config(tree)
        _check_ways(packed_weights, compile)
        if draft_head is not None and draft_model is not None:
            raise ValueError("draft_head and draft_model exclude each other; give one of them")
        if draft_head is None and draft_vocab != AUTO:
            raise ValueError("draft_vocab is what a draft head drafts over; give draft_head too")
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise TypeError(f"tokenizer must be a loaded tokenizer, got {tokenizer!r}")
        if isinstance(target, nn.Module):
            if options or dtype != "auto" or device != "auto":
                raise ValueError(
                    "dtype, device and loading options do not apply to a loaded model; convert or "
                    "move it first"
                )
            model: nn.Module = target
        else:
            model, tokenizer = _load(target, dtype, device, options | {"tokenizer": tokenizer})
        target_model = _target_model(model, packed_weights, compile)
        drafter: Drafter | None = None
        if draft_model is not None:
            drafter = _model_drafter(draft_model, target_model, tokenizer, packed_weights)
        if draft_head is not None:
            drafter = _head_drafter(draft_head, draft_vocab, target_model, options.get("token"))
        return cls(target_model, drafter, tokenizer, tree)

    def with_models(self, target: Target, drafter: Drafter | None) -> SpeculativeDecoder:
        """A decoder over other models, or moved ones, with this one's tokenizer and tree.

        A tree that was given is kept; "auto" is looked up for the new models.
        """
        return SpeculativeDecoder(target, drafter, self.tokenizer, self._given_tree)

    @property
    def tree(self) -> TreeConfig:
        """Size of the tree. It can be set to what the constructor takes."""
        return self._tree

    @tree.setter
    def tree(self, tree: TreeConfig | str | None) -> None:
        self._given_tree = _tree_config(tree)
        choice = None if self._given_tree else self._stored_choice()
        automatic = choice.tree if choice else TreeConfig.default(self.target.output_device.type)
        self._tree = self._given_tree or automatic
        self._is_plain_faster = choice is not None and choice.ratio <= 1.0

    def _stored_choice(self) -> TreeChoice | None:
        """What was measured for these models on this machine."""
        target, drafter = self.target, self.drafter
        if not isinstance(target, TargetModel) or not isinstance(drafter, HeadDrafter):
            return None
        if target.num_shards > 1:  # each machine has its own file, and all processes one tree
            return None
        return load_choice(setting_of(target, drafter))

    def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Step, None, None]:
        """Decodes step by step. Close the generator, or read it to its end, to free the decoder.

        Args:
            prompt: one user message, a list of chat messages, or raw input_ids [1, P].
            **options: see GenerateOptions.

        Raises:
            ValueError, TypeError: for options that are out of range, unknown or do not go together,
                before anything runs.
        """
        if self.drafter is None:
            raise ValueError(
                "this decoder has no drafter; pass draft_head= to from_pretrained, or call plain()"
            )
        return self._run(self._prepare(prompt, dict(options), is_plain=False))

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """`stream`, read to its end."""
        return _collect(self.stream(prompt, **options))

    def plain(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """Plain decoding of the same request: the oracle of exact ids, the base of a speed-up.

        Raises:
            ValueError: also for a relaxed rule, which has nothing to relax here.
        """
        return _collect(self.plain_stream(prompt, **options))

    def plain_stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Step, None, None]:
        """`plain`, step by step."""
        return self._run(self._prepare(prompt, dict(options), is_plain=True))

    def check_rule(self, rule: AcceptanceRule) -> None:
        """Refuses a rule that the drafter cannot serve.

        Raises:
            ValueError: the rule needs the draft's law and there is none, or its divergence is
                infinite by construction.
        """
        if rule.needs_draft_probs and not (self.drafter and self.drafter.has_draft_probs):
            raise ValueError(
                f"rule {rule.spec!r} compares with the draft's law and this drafter has none"
            )
        divergence = getattr(rule, "divergence", None)
        if (
            self.drafter is not None
            and self.drafter.has_reduced_vocabulary
            and isinstance(divergence, str)
            and is_infinite_under_reduced_vocab(divergence)
        ):
            is_small_model = isinstance(self.drafter, ModelDrafter)
            raise ValueError(
                f"divergence {divergence!r} is infinite wherever the draft's law is zero, and "
                + (
                    "the small model has fewer rows than the target; use js, tv or kl_draft_target"
                    if is_small_model
                    else "this drafter's vocabulary is reduced; use js, tv, kl_draft_target or "
                    "draft_vocab full"
                )
            )

    def _prepare(self, prompt: Prompt, options: dict[str, Any], *, is_plain: bool) -> _Request:
        """Checks everything about a request before anything runs."""
        rule = _pop_rule(options)
        if is_plain and not isinstance(rule, Exact):
            raise ValueError(
                f"plain decoding has no tree to relax; leave out rule, got {rule.spec!r}"
            )
        self.check_rule(rule)
        sampling = SamplingConfig(
            **{f.name: options.pop(f.name) for f in fields(SamplingConfig) if f.name in options}
        )
        max_new_tokens = _whole_number(
            "max_new_tokens", options.pop("max_new_tokens", 256), minimum=1
        )
        seed = options.pop("seed", 0)
        seed = self._drawn_seed() if seed is None else _whole_number("seed", seed)
        observer, profile = options.pop("observer", None), bool(options.pop("profile", False))
        if observer is not None and not callable(observer):
            raise TypeError(f"observer must be callable, got {observer!r}")
        tree = _tree_config(options.pop("tree", None)) or self._auto_tree(rule, observer)
        stop_strings, stop_ids = self._stops(options.pop("stop", None), options.pop("stop_ids", ()))
        if options:
            raise TypeError(
                f"unsupported options {sorted(options)}; supported are "
                f"{sorted(GenerateOptions.__annotations__)}"
            )
        input_ids = encode_prompt(prompt, self.tokenizer, self.target.vocabulary_size)
        limit = self.target.max_positions
        if input_ids.numel() >= limit:
            raise ValueError(
                f"the prompt has {input_ids.numel()} tokens and the target's context is {limit}, "
                "which leaves no room for an answer; shorten the prompt"
            )
        noise = SeededNoise(seed, self.target.vocabulary_size, self.target.output_device)
        verifier = Verifier(rule, sampling, noise, stop_ids)
        return _Request(
            input_ids,
            verifier,
            None if is_plain else tree,
            max_new_tokens,
            stop_strings,
            seed,
            observer,
            profile,
        )

    def _drawn_seed(self) -> int:
        if getattr(self.target, "num_shards", 1) > 1:
            raise ValueError(
                "seed None draws another seed in each process of a tensor-parallel target; give a "
                "number"
            )
        return secrets.randbits(63)

    def _auto_tree(self, rule: AcceptanceRule, observer: Observer | None) -> TreeConfig | None:
        """None where exact decoding was measured to be slower with any tree than without.

        An observer is there for the trees, however slow.
        """
        is_plain = self._is_plain_faster and isinstance(rule, Exact) and observer is None
        return None if is_plain else self.tree

    def _stops(self, stop: Any, user_ids: Any) -> tuple[tuple[str, ...], frozenset[int]]:
        """Stop strings, and all stop ids: generation config, tokenizer and user."""
        strings = check_stops(stop)
        if strings and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer and this target came without one; use stop_ids"
            )
        user = user_ids if isinstance(user_ids, Iterable) else (user_ids,)
        extra = [_whole_number("stop_ids", token, minimum=0) for token in user]
        # A special token's text is never shown, so its id stops too; its writing stops whatever
        # tokens spell it.
        special = (special_token_id(string, self.tokenizer) for string in strings)
        extra += [token for token in special if token is not None]
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return strings, merge_stop_ids(self.target.stop_ids, eos, extra)

    def _run(self, request: _Request) -> Generator[Step, None, None]:
        with self.target.turnstile.enter():
            steps = self._session(request).steps()
            while True:
                with self.target.turnstile.running():
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def _session(self, request: _Request) -> _Session:
        return _Session(self, request)


class _Session:
    """One request in progress."""

    def __init__(self, decoder: SpeculativeDecoder, request: _Request) -> None:
        self._request = request
        self._target = decoder.target
        self._drafter = decoder.drafter if request.tree is not None else None
        self._tree = request.tree
        self._emitter = _Emitter(request, decoder.tokenizer, decoder.target.max_positions)
        self._num_prompt = request.input_ids.numel()
        rule, sampling = request.verifier.rule, request.verifier.sampling
        is_relaxed = not isinstance(rule, Exact)
        self.stats = GenerationStats(
            seed=request.seed,
            rule=rule.spec,
            tree="plain" if self._tree is None else str(self._tree),
            num_prompt_tokens=self._num_prompt,
            kl_spent=0.0 if is_relaxed and not sampling.is_greedy else None,
            regret_spent=0.0 if is_relaxed and sampling.is_greedy else None,
        )
        self._clock = _PhaseClock(self._target.output_device, request.profile)

    def steps(self) -> Iterator[Step]:
        """The loop of the design: propose, score, verify, commit."""
        start = time.perf_counter()
        token = self._prefill()
        step = self._finish_step([EmittedToken(token, "bonus", 0.0, token)], None)
        self.stats.prefill_s = time.perf_counter() - start
        self.stats.wall_s = self.stats.prefill_s
        yield step
        root = step.tokens[-1].id
        while step.result is None:
            start = time.perf_counter()
            step = self._cycle(root)
            root = step.tokens[-1].id
            self.stats.wall_s += time.perf_counter() - start
            yield step

    def _prefill(self) -> int:
        request = self._request
        capacity = (
            self._num_prompt
            + min(request.max_new_tokens, _RESERVED_TOKENS)
            + (self._tree.num_draft_tokens + 1 if self._tree else 1)
        )
        self._target.start(capacity)
        input_ids = request.input_ids.to(self._target.output_device)
        output = self._target.prefill(input_ids)
        if self._drafter is not None:
            self._drafter.start(capacity)
            self._drafter.commit(input_ids, output.features)
        return request.verifier.draw(output.logits[-1], 0)

    def _cycle(self, root: int) -> Step:
        clock = self._clock
        clock.start()
        draft = self._propose(root)
        clock.stop("draft")
        output = self._target.score(draft.tree)
        clock.stop("target")
        if self._request.observer is not None:
            self._request.observer(draft, output.logits, self._request.verifier)
            clock.start_phase()
        verdict = self._request.verifier.verify(
            draft, output.logits, self._emitter.num_tokens, self._spent
        )
        clock.stop("verify")
        path = verdict.path
        rows = [0, *path]
        self._target.commit(rows)
        if self._drafter is not None:
            kept = torch.tensor(rows, device=output.features.device)
            self._drafter.commit(draft.tree.token_ids.to(kept.device)[kept], output.features[kept])
        clock.stop("commit")
        return self._finish_step(verdict.tokens, (draft, verdict))

    @property
    def _spent(self) -> float:
        return (self.stats.kl_spent or 0.0) + (self.stats.regret_spent or 0.0)

    def _propose(self, root: int) -> Draft:
        """The largest tree that fits the token budget, the target's context and the drafter's."""
        num_tokens = self._num_prompt + self._emitter.num_tokens
        if self._drafter is not None and self._tree is not None:
            rooms = [self._request.max_new_tokens - self._emitter.num_tokens - 1]
            rooms.append(self._target.max_positions - num_tokens - 1)
            if self._drafter.max_positions is not None:
                rooms.append(self._drafter.max_positions - num_tokens)
            tree = self._tree.limited(min(rooms))
            if tree is not None:
                return self._drafter.propose(root, tree)
        lone = DraftTree.root_only(root, self._target.output_device)
        return Draft(lone, None, torch.full_like(lone.parents, -1))

    def _finish_step(self, tokens: list[EmittedToken], cycle: tuple[Draft, Verdict] | None) -> Step:
        """Cuts at the first stop or limit, counts what is left, and builds the step."""
        emitted = self._emitter.emit(tokens)
        stats = self.stats
        stats.num_tokens = self._emitter.num_tokens
        for token in emitted:
            stats.num_accepted += token.origin == "accepted"
            stats.num_rescued += token.origin == "rescued"
            stats.num_recovered += token.origin == "recovered"
            stats.num_bonus += token.origin == "bonus"
            if stats.kl_spent is not None:
                stats.kl_spent += token.cost
            if stats.regret_spent is not None:
                stats.regret_spent += token.cost
        step_stats = None
        if cycle is not None:
            step_stats = _step_stats(cycle[0], emitted, self._clock.phases_s)
            stats.add_step(step_stats)
        reason = self._emitter.finish_reason
        result = None
        if reason is not None:
            result = GenerationResult(self._emitter.text, self._emitter.token_ids, reason, stats)
        return Step(
            tokens=emitted,
            text="".join(token.text for token in emitted),
            stats=step_stats,
            tree=cycle[0].tree if cycle else None,
            path=tuple(cycle[1].path[: len(emitted)]) if cycle else (),
            result=result,
        )


class _Emitter:
    """Every token passes here, in order: the one place where ids, text and counts are cut."""

    def __init__(self, request: _Request, tokenizer: Any | None, max_positions: int) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stop_strings = StopStrings(request.stop_strings)
        self._stop_ids = request.verifier.stop_ids
        self._max_new_tokens = request.max_new_tokens
        self._room = max_positions - request.input_ids.numel()
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def emit(self, tokens: list[EmittedToken]) -> list[Token]:
        """The tokens up to the first stop or limit; a stop beats the limit at the same token."""
        emitted: list[Token] = []
        for token in tokens:
            self.token_ids.append(token.id)
            text, has_stopped = self._read(token.id)
            if has_stopped or token.id in self._stop_ids:
                self.finish_reason = "stop"
            elif self.num_tokens == self._max_new_tokens:
                self.finish_reason = "length"
            elif self.num_tokens == self._room:
                self.finish_reason = "context"
            if self.finish_reason is not None and not has_stopped:
                text += self._flush()
            self.text += text
            emitted.append(Token(token.id, text, token.origin, token.cost, token.exact_id))
            if self.finish_reason is not None:
                break
        return emitted

    def _read(self, token_id: int) -> tuple[str, bool]:
        if self._detokenizer is None:
            return "", False
        return self._stop_strings.add(self._detokenizer.add(token_id))

    def _flush(self) -> str:
        """What was held back at the end; it can still complete a stop string."""
        if self._detokenizer is None:
            return ""
        text, has_stopped = self._stop_strings.add(self._detokenizer.flush())
        if has_stopped:
            self.finish_reason = "stop"
            return text
        return text + self._stop_strings.flush()


class _PhaseClock:
    """Seconds by phase of one cycle."""

    def __init__(self, device: torch.device, profile: bool) -> None:
        self._device = device
        self._profile = profile
        self._last = 0.0
        self.phases_s: dict[str, float] = {}

    def start(self) -> None:
        self.phases_s = {}
        self._last = self._now()

    def start_phase(self) -> None:
        """Leaves out what has happened since the last phase."""
        self._last = self._now()

    def stop(self, phase: str) -> None:
        now = self._now()
        self.phases_s[phase] = now - self._last
        self._last = now

    def _now(self) -> float:
        if self._profile:
            synchronize(self._device)
        return time.perf_counter()


def _step_stats(draft: Draft, emitted: list[Token], phases_s: dict[str, float]) -> StepStats:
    num_accepted = sum(token.origin in ("accepted", "rescued") for token in emitted)
    last = emitted[-1].origin
    return StepStats(
        num_draft_tokens=draft.tree.num_nodes - 1,
        num_accepted=num_accepted,
        num_rescued=sum(token.origin == "rescued" for token in emitted),
        num_emitted=len(emitted),
        num_tried=num_accepted + (last == "recovered"),
        phases_s=phases_s,
    )


def warn_of_context_end(result: GenerationResult, limit: int) -> None:
    """Logs that the target's context cut an answer, for callers whose result is the ids alone.

    Args:
        result: of the request.
        limit: the longest sequence of its target.
    """
    if result.finish_reason == "context":
        logger.warning(
            "the answer ends after %d tokens, where the target's context of %d tokens ends",
            len(result.token_ids),
            limit,
        )


def _collect(steps: Iterator[Step]) -> GenerationResult:
    result = None
    for step in steps:
        result = step.result
    assert result is not None
    return result


def _pop_rule(options: dict[str, Any]) -> AcceptanceRule:
    """Takes the rule and its knobs out of the options."""
    rule = options.pop("rule", "exact")
    knob_names = {f.name for kind in RULES.values() for f in fields(kind)}
    knobs = {name: options.pop(name) for name in sorted(knob_names & options.keys())}
    return build_rule(rule, **{name: knob for name, knob in knobs.items() if knob is not None})


def _tree_config(tree: TreeConfig | str | None) -> TreeConfig | None:
    if tree is None or isinstance(tree, TreeConfig):
        return tree
    if isinstance(tree, str):
        return TreeConfig.parse(tree)
    raise TypeError(f"tree must be a TreeConfig, 'N,DEPTH,K' or 'auto', got {tree!r}")


def _whole_number(name: str, value: Any, minimum: float = -math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    return value


def _head_drafter(
    draft_head: str | Path, draft_vocab: str | int, target: TargetModel, token: Any
) -> HeadDrafter:
    folder = locate_head(draft_head, token=token)
    head = load_head(folder)
    check_fit(head.config, target.config, target.vocabulary_size)
    vocabulary = choose_vocab(folder, draft_vocab)
    return HeadDrafter(head.to(target.output_device, target.dtype), target, vocabulary)


def _check_ways(packed_weights: Any, is_compiled: bool) -> None:
    if packed_weights not in (True, False, AUTO):
        raise ValueError(f"packed_weights must be True, False or auto, got {packed_weights!r}")
    if is_compiled and packed_weights is True:
        raise ValueError("compile and packed_weights exclude each other; give one of them")


def _target_model(
    model: nn.Module, packed_weights: bool | str, is_compiled: bool = False
) -> TargetModel:
    if is_compiled:
        return TargetModel(model, is_compiled=True)
    packs = gains_by_packing(model) if packed_weights == AUTO else bool(packed_weights)
    return TargetModel(model, packs_weights=packs)


def _model_drafter(
    draft_model: str | Path | nn.Module,
    target: TargetModel,
    tokenizer: Any | None,
    packed_weights: bool | str,
) -> ModelDrafter:
    """A small model beside the target, in its dtype; another tokenizer is refused."""
    own_tokenizer = None
    if isinstance(draft_model, nn.Module):
        model: nn.Module = draft_model
    else:
        model, own_tokenizer = load_target(draft_model, "draft model", dtype=target.dtype)
        model = model.to(target.output_device)  # type: ignore[arg-type]
    small = _target_model(model, packed_weights)
    sizes = target.vocabulary_size, small.vocabulary_size
    if tokenizer is not None and own_tokenizer is not None:
        sizes = len(tokenizer), len(own_tokenizer)
        is_same = tokenizer.get_vocab() == own_tokenizer.get_vocab()
    elif tokenizer is not None:  # a loaded model: all that can be known is whether its rows do
        is_same = min(sizes) >= len(tokenizer)
    else:
        is_same = sizes[0] == sizes[1]
    if not is_same:
        raise ValueError(
            f"the draft model's tokenizer is not the target's: {sizes[1]} tokens in the draft "
            f"model and {sizes[0]} in the target; use a draft model of the same family"
        )
    return ModelDrafter(small, target.vocabulary_size)


def _load(
    target: str | Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, Any]:
    """Loads a target where and as it was asked for."""
    if dtype != "auto":
        resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if resolved not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ValueError(f"unknown dtype {dtype!r}; use auto, float32, bfloat16 or float16")
        dtype = resolved
    for name in _PLACING_OPTIONS:
        if options.get(name) is not None and device != "auto":
            raise ValueError(
                f"device {str(device)!r} and {name} {options[name]!r} exclude each other"
            )
    where = resolve_device(device)
    model, tokenizer = load_target(target, dtype=dtype, **options)
    if options.get("device_map") is not None or (model.tp_size or 1) > 1:
        return model, tokenizer
    if where.type == "cpu":
        _suit_cpu(model, dtype, options)
    is_there = model.device.type == where.type and where.index in (None, model.device.index)
    if not is_there:  # some quantisers load to a device of their own and refuse to be moved
        model.to(where)  # type: ignore[arg-type]
    return model, tokenizer


def _suit_cpu(model: PreTrainedModel, dtype: str | torch.dtype, options: dict[str, Any]) -> None:
    """What is faster on a CPU, in the place of what was left open."""
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    if dtype == "auto" and is_half and not getattr(model, "is_quantized", False):
        model.to(torch.bfloat16 if prefers_bfloat16() else torch.float32)  # type: ignore[arg-type]
    is_free = options.get("attn_implementation") is None
    if is_free and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(PACKED)  # docs/performance.md: never slower
