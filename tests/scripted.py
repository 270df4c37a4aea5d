"""A target that says what it is told to, and a byte-level tokenizer to read it with."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle_fsd.config import TreeConfig
from eagle_fsd.decoder import GenerationResult, SpeculativeDecoder, Step
from eagle_fsd.target import TargetOutput
from eagle_fsd.turnstile import Turnstile
from tests.stubs import PathDrafter
from tree import DraftTree

# Ids 0 to 255 are the bytes themselves, so `list(text.encode())` spells any text.
AB, ABC, HALF_EMOJI, EOS, END, THINK = 256, 257, 258, 259, 260, 261
NUM_TOKENS = 262
PROMPT = torch.tensor([[80, 81, 82]])
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(chat_template: str | None = TEMPLATE, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE: bytes, "ab", "abc", half an emoji, two special tokens, one that shows."""
    letters = bytes_to_unicode()
    first, second = letters[0xF0], letters[0x9F]  # every emoji of the main block begins with these
    merges = [("a", "b"), ("ab", "c"), (first, second)]
    vocabulary = {letter: byte for byte, letter in letters.items()}
    vocabulary |= {left + right: AB + number for number, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<|end|>"], eos_token="<eos>"
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    for name, value in options.items():
        setattr(tokenizer, name, value)
    tokenizer.chat_template = chat_template
    return tokenizer


class ScriptTarget:
    """Emits a fixed continuation, whatever the prompt.

    Args:
        script: the tokens that follow the prompt; behind them, token 0 for ever.
        stop_ids: as a generation config would name them.
        max_positions: the longest sequence.
    """

    output_device = torch.device("cpu")
    vocabulary_size = NUM_TOKENS + 10

    def __init__(
        self, script: list[int], stop_ids: frozenset[int] = frozenset(), max_positions: int = 1000
    ) -> None:
        self.script = script
        self.stop_ids = stop_ids
        self.max_positions = max_positions
        self.turnstile = Turnstile()
        self._tree: DraftTree | None = None
        self._num_rows = self._num_prompt = 0

    def start(self, capacity: int) -> None:
        self._num_rows = 0

    def prefill(self, input_ids: Tensor) -> TargetOutput:
        self._num_rows = self._num_prompt = input_ids.numel()
        return TargetOutput(self._logits([self._num_rows]), torch.zeros(self._num_rows, 1))

    def score(self, tree: DraftTree) -> TargetOutput:
        self._tree = tree
        # A node at position t is followed by the token of position t + 1.
        logits = self._logits([self._num_rows + depth + 1 for depth in tree.depths.tolist()])
        return TargetOutput(logits, torch.zeros(tree.num_nodes, 1))

    def commit(self, path: list[int]) -> None:
        assert self._tree is not None
        assert self._tree.depths[torch.tensor(path)].tolist() == list(range(len(path)))
        self._num_rows += len(path)

    def _logits(self, positions: list[int]) -> Tensor:
        places = [position - self._num_prompt for position in positions]
        tokens = [self.script[place] if place < len(self.script) else 0 for place in places]
        return torch.nn.functional.one_hot(torch.tensor(tokens), self.vocabulary_size).float()


def scripted(
    script: list[int],
    tokenizer: Any | None = None,
    *,
    tree: str = "6,6,1",
    is_right: bool = True,
    **options: Any,
) -> SpeculativeDecoder:
    """A decoder whose answer is `script`, drafted by an oracle (or by one that is always wrong)."""
    drafter = PathDrafter(script, PROMPT.shape[1], is_right=is_right)
    target = ScriptTarget(script, **options)
    return SpeculativeDecoder(target, drafter, tokenizer, TreeConfig.parse(tree))


def run(decoder: SpeculativeDecoder, **options: Any) -> tuple[list[Step], GenerationResult]:
    """All steps and the result; what was streamed must be the result, token by token."""
    steps = list(decoder.stream(PROMPT, **options))
    result = steps[-1].result
    assert result is not None
    assert all(step.result is None for step in steps[:-1])
    tokens = [token for step in steps for token in step.tokens]
    assert [token.id for token in tokens] == result.token_ids
    assert "".join(token.text for token in tokens) == result.text
    assert "".join(step.text for step in steps) == result.text
    stats = result.stats
    assert len(result.token_ids) == stats.num_tokens
    origins = (stats.num_accepted, stats.num_rescued, stats.num_recovered, stats.num_bonus)
    assert sum(origins) == stats.num_tokens
    assert stats.num_cycles == len(steps) - 1
    assert sum(stats.accepted_by_depth) == stats.num_accepted + stats.num_rescued
    return steps, result
