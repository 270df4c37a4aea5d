"""Regenerated answers: the target's own in the place of those that a data set brought.

A draft head learns to predict one target, and does it best on text that this target writes itself.
`regenerate` is a stage of `python -m train.prepare --regenerate`. It keeps a conversation's system
and user turns and lets the target answer them, many conversations at once: every row of a batch
has its own place in a preallocated cache, and a row that is finished makes room for the next
prompt. Each finished conversation is one line of a JSON lines file, so that a run that was killed
goes on after its last line; the file is also a data set that `train.prepare --input` reads.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle_fsd.chat import merge_stop_ids
from eagle_fsd.checkpoint import files_sha256, load_target, model_files
from eagle_fsd.device import resolve_device, supports_float64
from eagle_fsd.errors import NonFiniteLogitsError
from eagle_fsd.sampling import finite_rows
from eagle_fsd.target import FAMILIES, TargetModel
from eagle_fsd.tuning import prefers_bfloat16
from train.conversations import Conversation, Message, Tally, UnusableConversationError, clean

REGENERATED_FILE = "regenerated.jsonl"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_TEXTS = ("config.json", "generation_config.json")  # of a target, beside its weights
# Conversations that are sorted by length together, so that the rows of a batch are about equally
# long. A constant: the order of the file must not depend on the batch size.
_WINDOW = 1024
_PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class RegenerateConfig:
    """How answers are regenerated; each is a flag of `train.prepare`.

    Raises:
        ValueError: if a value is out of its range.
    """

    target: str
    turns: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    batch_size: int = 48
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    limit_minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "max_new_tokens", "max_prompt_tokens", "batch_size", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be >= 1, got {value}")
        if self.limit_minutes is not None and not 0.0 < self.limit_minutes < math.inf:
            raise ValueError(f"--limit-minutes must be > 0, got {self.limit_minutes}")
        if not self.temperatures or not all(0.0 <= each < 100.0 for each in self.temperatures):
            raise ValueError(
                f"--temperatures must be numbers in [0, 100), got {list(self.temperatures)}"
            )
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"--dtype must be one of {['auto', *DTYPES]}, got {self.dtype!r}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("regeneration of the answers by the target")
        group.add_argument("--regenerate", action="store_true", help="replace the answers")

        def add(name: str, text: str, **options: Any) -> None:
            default = getattr(cls, name, None)
            shown = ",".join(f"{x:g}" for x in default) if isinstance(default, tuple) else default
            help_text = text if default is None else f"{text} (default {shown})"
            group.add_argument(_flag(name), help=help_text, **options)

        add("target", "demo, folder, id or .gguf file (default: that of --tokenizer)")
        add("turns", "user turns that are kept and answered", type=int, metavar="N")
        add(
            "temperatures", "one for each conversation, by its hash", type=_numbers, metavar="T,..."
        )
        add("max_new_tokens", "longest answer", type=int, metavar="N")
        add("max_prompt_tokens", "skip longer prompts", type=int, metavar="N")
        add("batch_size", "conversations at once", type=int, metavar="N")
        add("dtype", "bfloat16 where it is fast, else float32", choices=["auto", *DTYPES])
        add("device", "where the target runs")
        add("num_threads", "CPU threads", type=int, metavar="N")
        add("limit_minutes", "ask nothing new after so long in one run", type=float, metavar="M")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self | None:
        """None without `--regenerate`.

        Raises:
            ValueError: if a flag of the regeneration is given without `--regenerate`.
        """
        names = {name: _flag(name).removeprefix("--").replace("-", "_") for name in _names(cls)}
        values = {name: getattr(args, key) for name, key in names.items()}
        given = {name: value for name, value in values.items() if value is not None}
        if args.regenerate:
            return cls(**{"target": args.tokenizer, **given})
        if given:
            raise ValueError(f"{_flag(next(iter(given)))} does nothing without --regenerate")
        return None

    def identity(self) -> dict[str, Any]:
        """What decides the answers, up to the rounding of logits."""
        kept = ("turns", "max_new_tokens", "max_prompt_tokens", "dtype")
        return {
            "target": Path(self.target).name,
            "target_sha256": _target_sha256(self.target),
            "temperatures": list(self.temperatures),
            **{name: getattr(self, name) for name in kept},
        }


class PromptEncoder(Protocol):
    """What regeneration asks of `train.prepare.ChatEncoder`."""

    end_of_turn: int | None
    """The token that ends an answer in the chat template, None without one."""
    max_length: int
    """Tokens of a conversation that are learnt from."""

    def prompt(self, chat: list[dict[str, str]]) -> list[int]:
        """The ids that the target answers after; raises UnusableConversationError."""
        ...


@dataclass
class Request:
    """One answer to draw. The sampler appends to `token_ids` in place.

    Attributes:
        prompt_ids: [P] what is answered, P >= 1.
        temperature: 0 takes the most probable token.
        max_new_tokens: the answer's limit.
        noise_key: with the token's number, all that decides its noise.
        token_ids: [T] the answer, a stop id at its end included.
        has_stopped: whether a stop id ended it.
    """

    prompt_ids: list[int]
    temperature: float
    max_new_tokens: int
    noise_key: str
    token_ids: list[int] = field(default_factory=list)
    has_stopped: bool = False

    @property
    def is_finished(self) -> bool:
        return self.has_stopped or len(self.token_ids) >= self.max_new_tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    def uniform(self) -> float:
        """The next token's noise in [0, 1): a hash, so that no batch can change it."""
        key = f"{self.noise_key}\n{len(self.token_ids)}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


class BatchLayer(CacheLayerMixin):
    """Keys and values [B, heads, capacity, head_dim] of one layer; slot = position, row by row."""

    is_sliding = False

    def __init__(self, place: "Place", batch_size: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self._shape = (batch_size, capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch_size, capacity = self._shape
        # Zeros: what is masked is multiplied by 0, which does not mend a NaN.
        self.keys, self.values = (
            states.new_zeros((batch_size, states.shape[1], capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes new prompts, or one token a row at its own position; returns what it may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        place = self._place
        length = key_states.shape[2]
        if place.positions is None:
            self.keys[place.rows, :, :length] = key_states
            self.values[place.rows, :, :length] = value_states
            return key_states, value_states
        self.keys[place.rows, :, place.positions] = key_states[:, :, 0]
        self.values[place.rows, :, place.positions] = value_states[:, :, 0]
        num_rows = key_states.shape[0]
        return (
            self.keys[:num_rows, :, : place.num_keys],
            self.values[:num_rows, :, : place.num_keys],
        )

    def move(self, source: int, goal: int, length: int) -> None:
        """Copies the first `length` slots of a row onto another."""
        for states in (self.keys, self.values):
            assert states is not None
            states[goal, :, :length] = states[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._place.num_keys or query_length, 0

    def get_seq_length(self) -> int:
        return self._place.num_keys

    def get_max_length(self) -> int:
        return self._shape[1]


@dataclass
class Place:
    """Where the next pass writes.

    Attributes:
        rows: [R] int64, the batch rows of the pass, 0..R - 1 for single tokens.
        positions: [R] int64 slots of single tokens, or None: prompts, from slot 0 on.
        num_keys: slots that single tokens look at.
    """

    rows: Tensor
    positions: Tensor | None = None
    num_keys: int = 0


class BatchCache(Cache):
    """One `BatchLayer` a layer; `place` is set before every pass."""

    layers: list[BatchLayer]  # type: ignore[assignment]

    def __init__(self, num_layers: int, batch_size: int, capacity: int) -> None:
        self.place = Place(torch.zeros(0, dtype=torch.int64))
        super().__init__([BatchLayer(self.place, batch_size, capacity) for _ in range(num_layers)])

    def at(self, rows: Tensor, positions: Tensor | None = None, num_keys: int = 0) -> Self:
        """This cache, writing there from now on."""
        self.place.rows, self.place.positions, self.place.num_keys = rows, positions, num_keys
        return self

    def move(self, source: int, goal: int, length: int) -> None:
        """Copies the first `length` slots of a row onto another, in every layer."""
        for layer in self.layers:
            layer.move(source, goal, length)


class BatchSampler:
    """Draws answers of a target, `batch_size` at a time, over a preallocated cache.

    Args:
        target: the model, proven by `TargetModel` to be of a kind that is decoded right.
        batch_size: rows.
        capacity: slots a row: the longest prompt and its answer.
        stop_ids: tokens that end an answer.
    """

    def __init__(
        self, target: TargetModel, batch_size: int, capacity: int, stop_ids: frozenset[int]
    ) -> None:
        self._target = target
        self._backbone: Any = target.model.get_decoder()
        self._stop_ids = stop_ids
        self._batch_size = batch_size
        self._cache = BatchCache(target.config.num_hidden_layers, batch_size, capacity)
        self.num_tokens = 0

    def run(self, pull: Callable[[], Request | None]) -> Iterator[Request]:
        """Finished requests, soonest first, until `pull` gives None and no row is left.

        Args:
            pull: gives the next request; called again after None as long as rows are left.

        Raises:
            NonFiniteLogitsError: if the target's logits are not finite.
        """
        active: list[Request] = []
        while True:
            # One pass for a few new prompts costs little more than for one.
            num_free = self._batch_size - len(active)
            is_due = num_free >= max(1, self._batch_size // 16) or not active
            new = self._admit(pull, num_free) if is_due else []
            active += new
            if not active:
                return
            if new:
                self._draw(new, self._prefill(new, len(active) - len(new)))
            else:
                self._draw(active, self._step(active))
            yield from self._finished(active)

    def _admit(self, pull: Callable[[], Request | None], num_free: int) -> list[Request]:
        new: list[Request] = []
        longest = 0
        while len(new) < num_free and (len(new) + 1) * longest <= _PREFILL_TOKENS:
            request = pull()
            if request is None:
                break
            new.append(request)
            longest = max(longest, request.length)
        return new

    def _finished(self, active: list[Request]) -> Iterator[Request]:
        """Takes finished rows out; the last row moves into the gap, so that rows stay dense."""
        for row in reversed(range(len(active))):
            request = active[row]
            if not request.is_finished:
                continue
            last = active.pop()
            if last is not request:
                active[row] = last
                self._move(len(active), row, last.length)
            yield request

    @torch.inference_mode()
    def _move(self, source: int, goal: int, length: int) -> None:
        self._cache.move(source, goal, length)

    @torch.inference_mode()
    def _prefill(self, new: Sequence[Request], first_row: int) -> Tensor:
        """Prompts, padded on the right, into the rows from `first_row` on -> logits [R, V]."""
        lengths = [len(request.prompt_ids) for request in new]
        ids = torch.zeros(len(new), max(lengths), dtype=torch.int64)
        for row, request in enumerate(new):
            ids[row, : lengths[row]] = torch.tensor(request.prompt_ids)
        rows = torch.arange(first_row, first_row + len(new), device=self._target.device)
        positions = torch.arange(max(lengths), device=self._target.device)[None]
        features = self._forward(ids, positions, max(lengths), self._cache.at(rows))
        # A prompt sees no padding: that lies behind it, and answers are written over it.
        last = torch.tensor(lengths, device=features.device) - 1
        return self._target.logits(features[torch.arange(len(new), device=last.device), last])

    @torch.inference_mode()
    def _step(self, active: Sequence[Request]) -> Tensor:
        """The last token of every row -> logits [R, V]."""
        ids = torch.tensor([[request.token_ids[-1]] for request in active])
        num_keys = max(request.length for request in active)
        positions = torch.tensor([request.length - 1 for request in active]).to(self._target.device)
        rows = torch.arange(len(active), device=self._target.device)
        cache = self._cache.at(rows, positions, num_keys)
        features = self._forward(ids, positions[:, None], num_keys, cache)
        return self._target.logits(features[:, 0])

    def _forward(self, ids: Tensor, positions: Tensor, num_keys: int, cache: BatchCache) -> Tensor:
        """[R, T] ids at positions [R or 1, T] -> features [R, T, H]."""
        outputs = self._backbone(
            input_ids=ids.to(self._target.device),
            attention_mask=self._masks(positions, num_keys),
            position_ids=positions,
            cache=cache,
            use_cache=True,
        )
        features: Tensor = outputs.last_hidden_state
        return features.to(self._target.output_device)

    def _masks(self, positions: Tensor, num_keys: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [R or 1, 1, T, num_keys] in the form that this family's forward takes."""
        config = self._target.config
        distance = positions[:, None, :, None] - torch.arange(num_keys, device=positions.device)
        window = getattr(config, "sliding_window", None)

        def additive(is_hidden: Tensor) -> Tensor:
            dtype = self._target.dtype
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)

        full = additive(distance < 0)
        sliding = additive((distance < 0) | (distance >= window)) if window else full
        if FAMILIES[config.model_type] == "tensor":
            # Llama has no window whatever its config says; the others apply theirs to all layers.
            return full if config.model_type == "llama" else sliding
        masks = {"full_attention": full, "sliding_attention": sliding}
        return {kind: masks[kind] for kind in set(config.layer_types)}

    @torch.inference_mode()
    def _draw(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Appends one token to every request: the inverse of its law at the request's noise.

        Args:
            requests: R of them.
            logits: [R, V] any float dtype.
        """
        logits = logits.float()
        if not bool(finite_rows(logits).all()):
            raise NonFiniteLogitsError(
                "the target's logits are not finite while answers are regenerated; "
                "choose --dtype float32"
            )
        tokens = logits.argmax(dim=-1)
        rows = [row for row, request in enumerate(requests) if request.temperature > 0.0]
        if rows:
            drawn = [requests[row] for row in rows]
            dtype = torch.float64 if supports_float64(logits.device) else torch.float32
            temperatures = logits.new_tensor([request.temperature for request in drawn])
            uniforms = torch.tensor([request.uniform() for request in drawn], dtype=dtype)
            laws = (logits[rows] / temperatures[:, None]).softmax(dim=-1)
            mass = laws.to(dtype).cumsum(dim=-1)
            wanted = uniforms.to(mass.device)[:, None] * mass[:, -1:]
            # The first token whose mass exceeds what is wanted: never one of probability 0.
            found = torch.searchsorted(mass, wanted, right=True)[:, 0]
            tokens[rows] = found.clamp(max=logits.shape[-1] - 1)
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.token_ids.append(token)
            request.has_stopped = token in self._stop_ids
        self.num_tokens += len(requests)


@dataclass
class Job:
    """A conversation whose answers are being made. `messages` and `pending` grow and shrink."""

    id: str
    temperature: float
    pending: deque[Message]
    prompt_ids: list[int]
    number: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)

    def chat(self) -> list[dict[str, str]]:
        """The messages as `apply_chat_template` takes them."""
        keys = ("role", "content")
        return [{key: each[key].strip() for key in keys} for each in self.messages]

    def ask(self) -> None:
        """Moves the pending turns up to the next user turn into the messages."""
        is_asked = False
        while not is_asked:
            message = self.pending.popleft()
            self.messages.append({"role": message.role, "content": message.content})
            is_asked = message.role == "user"

    def line(self) -> str:
        """The finished conversation as one line of JSON."""
        row = {"id": self.id, "temperature": self.temperature, "messages": self.messages}
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


class Regenerator:
    """The stage that replaces answers; see `stage`.

    Args:
        config: the settings.
        path: the JSON lines file, gone on with if it is there.
        encoder: renders prompts.
        tokenizer: of the target.
        seed: of the temperatures and the noise.
        limit: conversations at most.
    """

    def __init__(
        self,
        config: RegenerateConfig,
        path: Path,
        encoder: PromptEncoder,
        tokenizer: Any,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        self._config = config
        self._path = path
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._seed = seed
        self._limit = limit

    def stage(self, conversations: Iterable[Conversation], tally: Tally) -> Iterator[Conversation]:
        """The conversations with the target's answers, in the order of the file.

        That order is the input's, but sorted by length within windows of 1,024 conversations; it
        does not depend on the batch size or on how often the run was killed. Conversations without
        a usable prompt, and those that ask the same as an earlier one, are counted and left out.
        After `limit_minutes` the conversations under way are finished and the stage ends as if the
        input had ended there; the next run goes on behind them.

        Raises:
            ValueError: if the file holds answers to other conversations, the target cannot be
                loaded or its vocabulary does not fit the tokenizer.
            UnsupportedModelError: if the target is of a kind that is not proven to be decoded
                right.
            OSError: if the machine fails, for example on a full disk.
        """
        jobs = self._jobs(conversations, tally)
        num_done = 0
        if self._path.exists():
            drop_half_line(self._path)
            with self._path.open(encoding="utf-8", errors="surrogateescape") as stream:
                for num_done, line in enumerate(stream, start=1):
                    yield from _conversations(self._check(line, num_done, jobs), tally)
        for line in self._answer(jobs, num_done):
            yield from _conversations(json.loads(line), tally)

    def _check(self, line: str, number: int, jobs: Iterator[Job]) -> dict[str, Any]:
        job = next(jobs, None)
        try:
            row: Any = json.loads(line.encode())  # which refuses what was not UTF-8
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not {"id", "messages"} <= row.keys():
            raise ValueError(
                f"line {number} of {str(self._path)!r} is damaged; remove it and those behind it, "
                "which are then answered again"
            )
        if job is None or row["id"] != job.id:
            raise ValueError(
                f"line {number} of {str(self._path)!r} answers another conversation than the "
                "input's; choose another output folder"
            )
        return row

    def _jobs(self, conversations: Iterable[Conversation], tally: Tally) -> Iterator[Job]:
        usable = islice(self._usable(conversations, tally), self._limit)
        while window := list(islice(usable, _WINDOW)):
            yield from sorted(window, key=lambda job: len(job.prompt_ids), reverse=True)

    def _usable(self, conversations: Iterable[Conversation], tally: Tally) -> Iterator[Job]:
        seen: set[str] = set()
        for conversation in conversations:
            try:
                job = self._job(conversation)
                if job.id in seen:
                    raise UnusableConversationError("same prompt as an earlier one")
            except UnusableConversationError as error:
                tally.skipped[str(error)] += 1
            else:
                seen.add(job.id)
                yield job

    def _job(self, conversation: Conversation) -> Job:
        turns = [each for each in conversation.messages if each.role != "assistant"]
        num_kept = self._config.turns + (turns[0].role == "system")
        kept = deque(turns[:num_kept])
        identity = hashlib.sha256(json.dumps([[m.role, m.content] for m in kept]).encode())
        name = identity.hexdigest()[:16]
        temperatures = self._config.temperatures
        choice = hashlib.sha256(f"temperature\n{self._seed}\n{name}".encode()).digest()
        temperature = temperatures[int.from_bytes(choice[:8], "big") % len(temperatures)]
        job = Job(name, temperature, kept, [])
        job.ask()
        job.prompt_ids = self._prompt(job)
        return job

    def _prompt(self, job: Job) -> list[int]:
        prompt_ids = self._encoder.prompt(job.chat())
        if len(prompt_ids) > min(self._config.max_prompt_tokens, self._encoder.max_length - 1):
            raise UnusableConversationError("over-long prompt")
        return prompt_ids

    def _answer(self, jobs: Iterator[Job], num_done: int) -> Iterator[str]:
        """Writes the lines of all jobs that are left, and gives them when they are written."""
        first = next(jobs, None)
        if first is None:
            return
        jobs = self._in_time(jobs)
        target = self._load()
        limit = min(self._encoder.max_length, target.max_positions)
        capacity = min(limit, self._config.max_prompt_tokens + self._config.max_new_tokens)
        stops = merge_stop_ids(
            target.stop_ids, self._tokenizer.eos_token_id, self._encoder.end_of_turn
        )
        sampler = BatchSampler(target, self._config.batch_size, capacity, stops)
        with ExitStack() as stack:
            stream = stack.enter_context(self._path.open("a", encoding="utf-8"))
            bar = stack.enter_context(_bar(self._limit, num_done))
            queue = _Queue(first, jobs)
            for job in self._run(sampler, queue, capacity, bar):
                line = job.line()
                stream.write(line)
                stream.flush()
                yield line

    def _in_time(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The jobs that are begun before the limit, counted from now."""
        minutes = self._config.limit_minutes
        if minutes is None:
            return jobs
        end = time.monotonic() + 60 * minutes
        return takewhile(lambda _: time.monotonic() < end, jobs)

    def _run(
        self, sampler: BatchSampler, queue: "_Queue", capacity: int, bar: Any
    ) -> Iterator[Job]:
        """Finished jobs, in the order of the queue."""
        running: dict[int, Job] = {}

        def pull() -> Request | None:
            job = queue.pull()
            if job is None:
                return None
            room = capacity - len(job.prompt_ids)
            turn = sum(each["role"] == "assistant" for each in job.messages)
            request = Request(
                job.prompt_ids,
                job.temperature,
                min(self._config.max_new_tokens, room),
                f"{self._seed}\n{job.id}\n{turn}",
            )
            running[id(request)] = job
            return request

        finished: dict[int, Job] = {}
        next_number = 0
        started = time.perf_counter()
        for request in sampler.run(pull):
            job = running.pop(id(request))
            self._add_answer(job, request)
            if self._goes_on(job, request, capacity):
                queue.push(job)
                continue
            finished[job.number] = job
            speed = sampler.num_tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
            bar.update()
            while next_number in finished:
                yield finished.pop(next_number)
                next_number += 1

    def _add_answer(self, job: Job, request: Request) -> None:
        ids = request.token_ids[:-1] if request.has_stopped else request.token_ids
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if not request.has_stopped:
            text = text.rstrip("\ufffd")  # the first bytes of a character that did not end
        job.messages.append(
            {
                "role": "assistant",
                "content": text,
                "finish_reason": "stop" if request.has_stopped else "length",
                "token_ids": request.token_ids,
            }
        )

    def _goes_on(self, job: Job, request: Request, capacity: int) -> bool:
        """Asks the next turn, unless there is none or the answer cannot be followed."""
        if not job.pending or not request.has_stopped or not job.messages[-1]["content"].strip():
            return False
        num_messages = len(job.messages)
        try:
            job.ask()
            job.prompt_ids = self._prompt(job)
        except UnusableConversationError:
            del job.messages[num_messages:]
            return False
        return len(job.prompt_ids) < capacity

    def _load(self) -> TargetModel:
        config = self._config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = resolve_device(config.device)
        dtype = _fast_dtype(device) if config.dtype == "auto" else DTYPES[config.dtype]
        model, _ = load_target(config.target, dtype=dtype)
        model = model.to(device).eval()  # type: ignore[arg-type]
        target = TargetModel(model)
        if len(self._tokenizer) > target.vocabulary_size:
            raise ValueError(
                f"the tokenizer has {len(self._tokenizer)} tokens, the target {config.target!r} "
                f"only {target.vocabulary_size}; give the target's own tokenizer"
            )
        if config.max_prompt_tokens >= target.max_positions:
            raise ValueError(
                f"--max-prompt-tokens must be below the target's context of "
                f"{target.max_positions} tokens, got {config.max_prompt_tokens}"
            )
        return target


class _Queue:
    """Jobs in order; a conversation that goes on comes before new ones."""

    def __init__(self, first: Job, jobs: Iterator[Job]) -> None:
        self._first: Job | None = first
        self._jobs = jobs
        self._again: deque[Job] = deque()
        self._num_new = 0

    def push(self, job: Job) -> None:
        self._again.append(job)

    def pull(self) -> Job | None:
        if self._again:
            return self._again.popleft()
        job, self._first = self._first or next(self._jobs, None), None
        if job is not None:
            job.number = self._num_new
            self._num_new += 1
        return job


def _target_sha256(name: str) -> str:
    """A digest that tells a target from another one in its place, without reading all of it.

    What is not in a file or folder of its own, "demo" and hub ids, is known by its name.
    """
    place = Path(name).expanduser()
    if not place.exists():
        return hashlib.sha256(name.encode()).hexdigest()
    return files_sha256(model_files(place, _TEXTS), _TEXTS)


def drop_half_line(path: Path) -> None:
    """Cuts a file behind its last line feed: what follows was being written in a killed run."""
    with path.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 2**16)
            stream.seek(start)
            at = stream.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        stream.truncate(end)


def _conversations(row: dict[str, Any], tally: Tally) -> Iterator[Conversation]:
    """A line as `train.prepare --input` would read it; the row itself was counted before."""
    counts = Tally()
    yield from clean([row], counts)
    tally.skipped.update(counts.skipped)
    tally.cut.update(counts.cut)


def _fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, but for CPUs that would emulate it."""
    return torch.bfloat16 if device.type != "cpu" or prefers_bfloat16() else torch.float32


def _bar(total: int | None, num_done: int) -> Any:
    interval = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total, initial=num_done, unit="conv", desc="regenerating", mininterval=interval
    )


def _flag(name: str) -> str:
    """The flag of a field; "turns" alone would not say of what."""
    return "--regenerate-turns" if name == "turns" else "--" + name.replace("_", "-")


def _names(config: type[RegenerateConfig]) -> list[str]:
    return list(config.__dataclass_fields__)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))
