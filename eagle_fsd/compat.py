"""EAGLE's `EaModel`, so that its samples and loops run after one changed import.

from eagle_fsd.compat import EaModel

model = EaModel.from_pretrained(base_model_path="demo", ea_model_path="demo", total_token=-1)
output_ids = model.eagenerate(input_ids, temperature=0.5, max_new_tokens=512)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.acceptance import AcceptanceRule, build_rule
from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import (
    FinishReason,
    SpeculativeDecoder,
    Step,
    _whole_number,
    warn_of_context_end,
)
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.stats import GenerationStats
from eagle_fsd.target import TargetModel

_LLAMA3_TURN_END = "<|eot_id|>"
_LEAST_TOP_P = 1e-8  # below it EAGLE reads top_p as off

# The decoder's names, and what stands for them in EAGLE's call.
_EAGLE_NAMES = {
    "target": "base_model_path",
    "draft_head": "ea_model_path",
    "draft_model": "ea_model_path, or SpeculativeDecoder for a small model that drafts",
    "tree": "total_token, depth and top_k",
}

Logged = tuple[Tensor, int, int]


class EaModel:
    """A target with its draft head under EAGLE's names, over one `SpeculativeDecoder`.

    Differs: never a token over `max_new_tokens` or behind a stop (EAGLE goes on to the end of the
    cycle); `max_length` bounds the sequence without EAGLE's slack; with top_k and top_p both on,
    top_k cuts first; sampling follows `seed`, not the global generator.

    Args:
        decoder: decodes; its drafter has a draft head.
        rule: the acceptance rule of calls that name none.

    Attributes:
        stats: figures of the last answer, its seed included; None before the first.
        finish_reason: of the last answer: "stop", "length", or "context", the target's longest
            sequence, which is logged too; None before the first.

    Raises:
        ValueError: the decoder has no draft head, or its drafter cannot serve the rule.
    """

    def __init__(self, decoder: SpeculativeDecoder, rule: str | AcceptanceRule = "exact") -> None:
        target, drafter = decoder.target, decoder.drafter
        if not isinstance(drafter, HeadDrafter) or not isinstance(target, TargetModel):
            raise ValueError(
                "EaModel needs a decoder with a draft head; pass draft_head= to "
                "SpeculativeDecoder.from_pretrained"
            )
        self.rule = build_rule(rule)
        decoder.check_rule(self.rule)
        self.decoder = decoder
        self.base_model = target.model
        self.ea_layer: DraftHead = drafter.head
        self.tokenizer = decoder.tokenizer
        self.stats: GenerationStats | None = None
        self.finish_reason: FinishReason | None = None

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - EAGLE's own signature
        cls,
        use_eagle3: bool = False,
        base_model_path: str | Path | None = None,
        ea_model_path: str | Path | None = None,
        total_token: int = 60,
        depth: int = 5,
        top_k: int = 10,
        threshold: float = 1.0,
        torch_dtype: str | torch.dtype | None = None,
        *,
        rule: str | AcceptanceRule = "exact",
        **kwargs: Any,
    ) -> EaModel:
        """Loads a target and a draft head in EAGLE's format.

        Args:
            use_eagle3: must be False.
            base_model_path: the target: "demo", a hub id, a folder or a .gguf file.
            ea_model_path: the draft head: "demo", a hub id or a folder.
            total_token: nodes of the tree, its root included, >= 2; -1 takes the default tree of
                the device, whatever `depth` and `top_k` say.
            depth: draft levels below the first, >= 0.
            top_k: children per expanded node, and expanded nodes per level.
            threshold: EAGLE's, which does nothing there; must be 1.0.
            torch_dtype: the old name of `dtype`.
            rule: the acceptance rule of calls that name none, such as "fuzzy:0.3:js".
            **kwargs: dtype, device, device_map, revision, token, ... as in
                `SpeculativeDecoder.from_pretrained`, which hands the rest to transformers. Its own
                names for what is set above are refused.

        Raises:
            ValueError, TypeError, FileNotFoundError, RuntimeError: one sentence about what does not
                fit.
        """
        if use_eagle3:
            raise ValueError(
                "EAGLE-3 heads are not supported; pass use_eagle3=False with an EAGLE-1 or "
                "EAGLE-2 head"
            )
        if base_model_path is None or ea_model_path is None:
            raise ValueError("base_model_path and ea_model_path are both needed")
        if threshold != 1.0:
            raise ValueError(
                f"threshold must be 1.0, got {threshold!r}: EAGLE never uses it; fuzzy "
                "verification is rule='fuzzy:0.3:js'"
            )
        if torch_dtype is not None:
            if "dtype" in kwargs:
                raise ValueError("torch_dtype is the old name of dtype; give one of them")
            kwargs["dtype"] = torch_dtype
        _drop_old_options(kwargs)
        _refuse_own_names(kwargs)
        tree = _tree_config(total_token, depth, top_k)
        rule = build_rule(rule)
        decoder = SpeculativeDecoder.from_pretrained(
            base_model_path, draft_head=ea_model_path, tree=tree, **kwargs
        )
        return cls(decoder, rule)

    def get_tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self.tokenizer

    @property
    def config(self) -> Any:
        """The target's config."""
        return self.base_model.config

    @property
    def device(self) -> torch.device:
        """Where the target reads token ids."""
        return self._target.device

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype as it is now."""
        return self._target.dtype

    @property
    def training(self) -> bool:
        """Whether the target is in training mode, in which nothing is decoded."""
        return bool(self.base_model.training)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The target's parameters, then the head's."""
        yield from self.base_model.parameters()
        yield from self.ea_layer.parameters()

    def eval(self) -> EaModel:
        """Ends training mode, which a loaded model is not in."""
        self.base_model.eval()
        self.ea_layer.eval()
        return self

    def to(self, *args: Any, **kwargs: Any) -> EaModel:
        """Moves or converts the target, and the head with it; arguments as in torch."""
        move: Any = self.base_model.to
        move(*args, **kwargs)
        drafter = self.decoder.drafter
        assert isinstance(drafter, HeadDrafter)
        before = self.decoder.target
        packs = isinstance(before, TargetModel) and before.packs_weights
        target = TargetModel(self.base_model, packs_weights=packs)
        head = self.ea_layer.to(target.output_device, target.dtype)
        moved = HeadDrafter(head, target, drafter.law.token_ids)
        self.decoder = self.decoder.with_models(target, moved)
        return self

    def eagenerate(  # noqa: PLR0913 - EAGLE's own signature
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        rule: str | AcceptanceRule | None = None,
        seed: int | None = None,
    ) -> Tensor | Logged:
        """Decodes with the draft tree.

        Args:
            input_ids: [1, P] int64.
            temperature: 0 is greedy.
            top_p: nucleus mass; 0.0 and 1.0 are off.
            top_k: tokens kept when sampling, a whole number; 0 is off.
            max_new_tokens: >= 1.
            max_length: most tokens of prompt and answer together.
            log: return counts too.
            is_llama3: stop at <|eot_id|> too, where the tokenizer has it.
            rule: the acceptance rule; None is the model's.
            seed: of sampling; None draws one from the system, which `stats` reports.

        Returns:
            [1, P + new] int64 on the prompt's device; with `log` also the number of new tokens and
            EAGLE's number of the last cycle, counted from 0, so that new / (number + 1) is the
            acceptance length.

        Raises:
            ValueError, TypeError: for values out of range, before anything runs.
        """
        options = self._options(
            input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed
        )
        stream = self.decoder.stream(input_ids, rule=self._rule(rule), **options)
        return self._answer(input_ids, stream, log, is_plain=False)

    def naivegenerate(  # noqa: PLR0913 - EAGLE's own signature
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        seed: int | None = None,
    ) -> Tensor | Logged:
        """Plain decoding; arguments and result as in `eagenerate`, a cycle being one token."""
        options = self._options(
            input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed
        )
        stream = self.decoder.plain_stream(input_ids, **options)
        return self._answer(input_ids, stream, log, is_plain=True)

    def ea_generate(  # noqa: PLR0913 - EAGLE's own signature
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        rule: str | AcceptanceRule | None = None,
        seed: int | None = None,
    ) -> Generator[Tensor, None, None]:
        """Yields the ids so far [1, P + n] after each cycle; arguments as in `eagenerate`.

        Raises:
            ValueError, TypeError: at the call, not at the first reading; also for `log`, which has
                no place in a generator.
        """
        _refuse_log(log, "eagenerate")
        options = self._options(
            input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed
        )
        stream = self.decoder.stream(input_ids, rule=self._rule(rule), **options)
        return self._prefixes(input_ids, stream)

    def naive_generate(  # noqa: PLR0913 - EAGLE's own signature
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        seed: int | None = None,
    ) -> Generator[Tensor, None, None]:
        """Plain decoding, token by token; arguments and result as in `ea_generate`."""
        _refuse_log(log, "naivegenerate")
        options = self._options(
            input_ids, temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed
        )
        stream = self.decoder.plain_stream(input_ids, **options)
        return self._prefixes(input_ids, stream)

    @property
    def _target(self) -> TargetModel:
        target = self.decoder.target
        assert isinstance(target, TargetModel)
        return target

    def _rule(self, rule: str | AcceptanceRule | None) -> AcceptanceRule:
        return self.rule if rule is None else build_rule(rule)

    def _options(  # noqa: PLR0913 - what the four calls share
        self,
        input_ids: Tensor,
        temperature: float,
        top_p: float,
        top_k: float,
        max_new_tokens: int,
        max_length: int,
        is_llama3: bool,
        seed: int | None,
    ) -> dict[str, Any]:
        """The decoder's options for EAGLE's."""
        if not isinstance(input_ids, Tensor):
            raise TypeError(
                "input_ids must be a tensor [1, P], got "
                f"{type(input_ids).__name__}; use torch.as_tensor"
            )
        if input_ids.dim() == 0:
            raise ValueError("input_ids must be a tensor [1, P], got one number; use [[number]]")
        max_new_tokens = _whole_number("max_new_tokens", max_new_tokens, minimum=1)
        max_length = _whole_number("max_length", max_length, minimum=1)
        for name, value in (("top_p", top_p), ("top_k", top_k)):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}; 0 turns it off")
        room = max_length - input_ids.shape[-1]
        if room < 1:
            raise ValueError(
                f"max_length {max_length} leaves no room behind a prompt of "
                f"{input_ids.shape[-1]} tokens; use a larger one"
            )
        if not float(top_k).is_integer():
            raise ValueError(f"top_k must be a whole number, got {top_k!r}; 0 turns it off")
        return {
            "temperature": temperature,
            "top_p": 1.0 if 0.0 <= top_p < _LEAST_TOP_P else top_p,
            "top_k": int(top_k),
            "max_new_tokens": min(max_new_tokens, room),
            "stop_ids": self._llama3_stops() if is_llama3 else (),
            "seed": seed,
        }

    def _llama3_stops(self) -> tuple[int, ...]:
        if self.tokenizer is None:
            return ()
        token_id = self.tokenizer.get_vocab().get(_LLAMA3_TURN_END)
        return () if token_id is None else (token_id,)

    def _answer(
        self, input_ids: Tensor, stream: Generator[Step, None, None], log: bool, is_plain: bool
    ) -> Tensor | Logged:
        output = input_ids
        for output in self._prefixes(input_ids, stream):  # noqa: B007 - the last one is kept
            pass
        stats = self.stats
        assert stats is not None
        if not log:
            return output
        # The first token after the prompt takes no cycle here. In EAGLE's plain loop it takes one,
        # and with a tree it is the root of cycle 0, so that N tokens of which none was accepted
        # take N cycles there and N - 1 here.
        last_cycle = stats.num_tokens - 1 if is_plain else stats.num_cycles
        return output, stats.num_tokens, last_cycle

    def _prefixes(
        self, input_ids: Tensor, stream: Generator[Step, None, None]
    ) -> Generator[Tensor, None, None]:
        """The ids so far after each step."""
        ids = input_ids.reshape(1, -1)
        with closing(stream):
            for step in stream:
                new = [token.id for token in step.tokens]
                ids = torch.cat([ids, ids.new_tensor([new])], dim=1)
                if step.result is not None:
                    self.stats = step.result.stats
                    self.finish_reason = step.result.finish_reason
                    warn_of_context_end(step.result, self._target.max_positions)
                yield ids


def _drop_old_options(kwargs: dict[str, Any]) -> None:
    """Takes out what EAGLE's scripts pass and transformers 5 no longer knows."""
    kwargs.pop("low_cpu_mem_usage", None)  # it always loads that way
    for name in ("load_in_8bit", "load_in_4bit"):
        if kwargs.pop(name, False):
            raise ValueError(
                f"{name} is gone from transformers 5; pass "
                f"quantization_config=BitsAndBytesConfig({name}=True)"
            )


def _refuse_own_names(kwargs: dict[str, Any]) -> None:
    """Refuses the decoder's names for what has EAGLE's name here."""
    for name, eagle_s in _EAGLE_NAMES.items():
        if name in kwargs:
            raise ValueError(f"{name} goes by EAGLE's name here; use {eagle_s}")


def _refuse_log(log: bool, sibling: str) -> None:
    if log:
        raise ValueError(f"a generator returns no counts; call {sibling} with log=True")


def _tree_config(total_token: int, depth: int, top_k: int) -> TreeConfig | None:
    """EAGLE's sizes as ours: it counts the root, and leaves out the first level."""
    total_token, depth = _whole_number("total_token", total_token), _whole_number("depth", depth)
    if total_token == -1:
        return None
    if total_token < 2:
        raise ValueError(
            f"total_token must be >= 2, root and one draft token, or -1 for auto; got {total_token}"
        )
    if depth < 0:
        raise ValueError(f"depth must be >= 0 levels below the first, got {depth}")
    return TreeConfig(total_token - 1, depth + 1, top_k)
