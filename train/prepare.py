"""Conversations -> token shards, through the chat template of the target's own tokenizer.

    python -m train.prepare --input conversations.json --tokenizer demo --output shards --limit 1000

finishes in well under a minute on a laptop. The stages are generators, read -> clean -> exclude ->
(others, each conversations -> conversations) -> tokenize -> write, so memory does not grow with the
corpus. A rerun on a finished folder does nothing; an unfinished or damaged one is made again.

With `--regenerate` the target answers the conversations anew (see `train.regenerate`). Its answers
are kept in `regenerated.jsonl` beside the shards, and a run that was killed goes on behind them. So
does a rerun with another `--limit-minutes` after one that ended by the clock.
"""

import argparse
import copy
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from jinja2 import TemplateError
from tqdm import tqdm

from eagle_fsd.command import run
from eagle_fsd.default_target import DEMO, ensure_default_target, load_gguf_tokenizer
from eagle_fsd.files import locked, write_json
from train.conversations import (
    Conversation,
    Exclusion,
    Tally,
    UnusableConversationError,
    clean,
    read_rows,
    source_identity,
)
from train.regenerate import REGENERATED_FILE, RegenerateConfig, Regenerator
from train.shards import (
    DEFAULT_SHARD_TOKENS,
    FORMAT_NAME,
    FORMAT_VERSION,
    META_FILE,
    SPLITS,
    ShardWriter,
    TokenShards,
    read_meta,
    token_dtype,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOGGER = logging.getLogger(__name__)

Stage = Callable[[Iterable[Conversation]], Iterable[Conversation]]

UNFINISHED_FILE = "unfinished.json"
LOCK_FILE = ".lock"
LEFT_BEHIND = {UNFINISHED_FILE + ".tmp", LOCK_FILE}  # by a run that was killed at its beginning
FEW_CONVERSATIONS = 1000
NO_PREFIX = "ids are no prefix of the longer chat's"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "eagle"
_NUM_TRIED = 100


@dataclass(frozen=True)
class PrepareConfig:
    """The settings of one preparation; each is a flag of the command.

    Raises:
        ValueError: if a number is out of its range or there is no input.
    """

    input: tuple[str, ...]
    tokenizer: str
    output: str
    exclude: tuple[str, ...] = ()
    max_length: int = 2048
    validation_fraction: float = 0.02
    seed: int = 0
    limit: int | None = None
    limit_tokens: int | None = None
    english_only: bool = False
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    regenerate: RegenerateConfig | None = None

    def __post_init__(self) -> None:
        if not self.input:
            raise ValueError("input must name at least one file or data set, got none")
        if self.max_length < 2:
            raise ValueError(f"max_length must be >= 2 tokens, got {self.max_length}")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ValueError(
                f"validation_fraction must be in [0, 1), got {self.validation_fraction}"
            )
        for name in ("limit", "limit_tokens", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.regenerate is not None and self.limit_tokens is not None:
            raise ValueError(
                "limit_tokens cannot be known before the answers are regenerated; use limit"
            )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--input", nargs="+", required=True, metavar="SOURCE", help="files or data-set ids")
        add("--tokenizer", required=True, help='the target\'s: "demo", folder, id or .gguf file')
        add("--output", required=True, metavar="DIR", help="folder for the shards")
        add("--exclude", nargs="+", default=(), metavar="FILE", help="evaluation questions")
        add("--max-length", type=int, default=cls.max_length, metavar="TOKENS")
        add("--validation-fraction", type=float, default=cls.validation_fraction)
        add("--seed", type=int, default=cls.seed, help="of the split and of regenerated answers")
        add("--limit", type=int, metavar="N", help="stop after N conversations kept")
        add("--limit-tokens", type=int, metavar="N", help="stop once N tokens are kept")
        add("--english-only", action="store_true", help="need 90%% ASCII among the letters")
        add("--shard-tokens", type=int, default=cls.shard_tokens, help="tokens per shard file")
        RegenerateConfig.add_arguments(parser)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        values = {name: getattr(args, name) for name in cls.__dataclass_fields__}
        return cls(
            **{
                **values,
                "input": tuple(args.input),
                "exclude": tuple(args.exclude),
                "regenerate": RegenerateConfig.from_args(args),
            }
        )

    def identity(self) -> dict[str, Any]:
        """What decides the shards' content, but for the tokenizer.

        Files are known by name, size and digest, so that folders may be moved.

        Raises:
            FileNotFoundError: if an input or excluded file is missing.
        """
        values = asdict(self)
        del values["output"], values["tokenizer"]
        values["input"] = [source_identity(source) for source in self.input]
        values["exclude"] = [_file_sha256(path) for path in self.exclude]
        values["regenerate"] = self.regenerate and self.regenerate.identity()
        return values


@dataclass(frozen=True, slots=True)
class Tokenized:
    """ids: [T] token ids. mask: [T] True on answers. cut: why the end is missing, or ""."""

    ids: list[int]
    mask: list[bool]
    cut: str = ""


class ChatEncoder:
    """Conversations -> ids with the answers marked, by the tokenizer's chat template.

    An answer is marked from its first token to its end-of-turn token; template text after that
    token, such as a line feed, is not. Where the template has `{% generation %}` (and the tokenizer
    gives offsets), its blocks are the answers. Otherwise they are found by rendering: messages[:k]
    with the generation prompt against messages[:k + 1], where the ids of each rendering must begin
    with those of the one before, as they do when the target answers.

    Raises:
        ValueError: if the tokenizer has no chat template or the template fails on a plain chat.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
                "take that of a chat model or set its chat_template"
            )
        self.template: str = tokenizer.get_chat_template()
        self.has_generation = bool(_GENERATION.search(self.template)) and tokenizer.is_fast
        self.route = "generation" if self.has_generation else "prefix"
        self._tokenizer = tokenizer
        self.max_length = max_length
        added = tokenizer.added_tokens_decoder
        self._control_tokens = [token.content for token in added.values() if token.special]
        self.end_of_turn, self._num_trailing = self._closing(set(added))

    def encode(self, conversation: Conversation) -> Tokenized:
        """The ids up to the last answer that ends within `max_length`, and the answers' mask.

        If even the first answer does not end there, it is cut inside.

        Raises:
            UnusableConversationError: if the template refuses the chat, the text holds a control
                token, the answers cannot be found, or the prompt alone is over-long.
        """
        chat = conversation.chat()
        with self._refusing(chat):
            ids, spans = (self._generation if self.has_generation else self._prefixes)(chat)
            if conversation.messages[-1].is_cut:
                spans = self._without_end(chat, ids, spans)
        return self._fit(ids, spans)

    def prompt(self, chat: list[dict[str, str]]) -> list[int]:
        """The ids that the target answers after, generation prompt included.

        Raises:
            UnusableConversationError: if the template refuses the chat or the text holds a control
                token.
        """
        with self._refusing(chat):
            return self._render(chat, add_generation_prompt=True)["input_ids"]

    @contextmanager
    def _refusing(self, chat: list[dict[str, str]]) -> Iterator[None]:
        if any(token in each["content"] for each in chat for token in self._control_tokens):
            raise UnusableConversationError("control token in the text")
        try:
            yield
        except TemplateError as error:
            raise UnusableConversationError(f"template refuses it: {error}") from error

    def _without_end(
        self, chat: list[dict[str, str]], ids: list[int], spans: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The spans, the last one without what the template writes after an answer.

        That begins where the ids part from those of the same chat with a longer answer.
        """
        longer = [*chat[:-1], {**chat[-1], "content": f"{chat[-1]['content']} {_PROBE}"}]
        pairs = zip(ids, self._render(longer)["input_ids"], strict=False)
        end = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(ids))
        cut = [(start, min(stop, end)) for start, stop in spans]
        return [(start, stop) for start, stop in cut if start < stop]

    def _fit(self, ids: list[int], spans: list[tuple[int, int]]) -> Tokenized:
        """Nothing follows the last answer that is kept: it could not be learnt from."""
        if not spans:
            raise UnusableConversationError("no supervised tokens")
        whole = [span for span in spans if span[1] <= self.max_length]
        cut = "over-long" if len(whole) < len(spans) else ""
        if not whole:
            start = spans[0][0]
            if start >= self.max_length:
                raise UnusableConversationError("over-long prompt")
            whole, cut = [(start, self.max_length)], "over-long first answer"
        mask = [False] * whole[-1][1]
        for start, end in whole:
            mask[start:end] = [True] * (end - start)
        return Tokenized(ids[: len(mask)], mask, cut)

    def _prefixes(self, chat: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for k in (k for k, message in enumerate(chat) if message["role"] == "assistant"):
            prompt = self._render(chat[:k], add_generation_prompt=True)["input_ids"]
            answer = self._render(chat[: k + 1])["input_ids"]
            end = len(answer) - self._num_trailing
            if prompt[: len(ids)] != ids or answer[: len(prompt)] != prompt or end <= len(prompt):
                raise UnusableConversationError(NO_PREFIX)
            ids = answer[:end]
            spans.append((len(prompt), end))
            if end > self.max_length:
                break
        return ids, spans

    def _generation(self, chat: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
        rendered = self._render(chat, return_assistant_tokens_mask=True)
        ids: list[int] = rendered["input_ids"]
        edges = np.flatnonzero(np.diff([0, *rendered["assistant_masks"], 0])).tolist()
        spans = zip(edges[::2], edges[1::2], strict=True)
        return ids, [self._to_end_of_turn(ids, start, end) for start, end in spans]

    def _to_end_of_turn(self, ids: list[int], start: int, end: int) -> tuple[int, int]:
        """The block of a template may stop short of the end-of-turn token or go on after it."""
        token = self.end_of_turn
        if token is None:
            return start, end
        if ids[end : end + 1] == [token]:
            return start, end + 1
        last = next((i for i in reversed(range(start, end)) if ids[i] == token), end - 1)
        return start, last + 1

    def _closing(self, added: set[int]) -> tuple[int | None, int]:
        """The end-of-turn token and how many tokens the template writes after it.

        It is the last added token after an answer. Without one (None) all that follows the answer
        ends the turn.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = str(self._tokenizer.apply_chat_template(chat, tokenize=False))
        except TemplateError as error:
            raise ValueError(f"the chat template fails on a plain chat: {error}") from error
        if _PROBE not in text:
            raise ValueError(
                "the chat template leaves out the assistant's text; it cannot be learnt"
            )
        closing = text[text.rindex(_PROBE) + len(_PROBE) :]
        ids = self._tokenizer(closing, add_special_tokens=False)["input_ids"]
        last = max((i for i, token in enumerate(ids) if token in added), default=None)
        if last is None:
            LOGGER.warning("the chat template ends an answer with %r, no added token", closing)
            return None, 0
        return ids[last], len(ids) - 1 - last

    def _render(self, chat: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        rendered: Any = self._tokenizer.apply_chat_template(
            chat, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
        )
        return dict(rendered)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of "demo", a .gguf file, a folder or a hub id.

    Raises:
        ValueError: if there is none.
    """
    from transformers import AutoTokenizer

    try:
        if Path(name).suffix == ".gguf":
            return load_gguf_tokenizer(Path(name))
        source = str(ensure_default_target()) if name == DEMO else name
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"cannot load the tokenizer {name!r}: {error}") from error
    except (LookupError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"cannot load the tokenizer {name!r}: its files are damaged ({error!r})"
        ) from error
    return tokenizer


def split_of(conversation: Conversation, seed: int, validation_fraction: float) -> str:
    """The split, "train" or "validation", by a hash of the first user message and the seed.

    The answers do not count: conversations that open alike stay on one side, and so does a
    conversation whose answers are generated anew.
    """
    digest = hashlib.sha256(f"{seed}\n{conversation.opening}".encode()).digest()
    is_held_out = int.from_bytes(digest[:8], "big") < validation_fraction * 2**64
    return "validation" if is_held_out else "train"


def tokenize(
    conversations: Iterable[Conversation], encoder: ChatEncoder, tally: Tally
) -> Iterator[tuple[Conversation, Tokenized]]:
    """The conversations with their ids; those that cannot be used are counted and left out.

    Raises:
        ValueError: if the template fails for more than half of the conversations, judged after the
            first hundred and at the end.
    """
    num_tried = num_failed = 0
    for num_tried, conversation in enumerate(conversations, start=1):
        try:
            tokenized = encoder.encode(conversation)
        except UnusableConversationError as error:
            reason = str(error)
            tally.skipped[reason] += 1
            num_failed += reason == NO_PREFIX or reason.startswith("template")
        else:
            if tokenized.cut:
                tally.cut[tokenized.cut] += 1
            yield conversation, tokenized
        if num_tried == _NUM_TRIED and 2 * num_failed > num_tried:
            _refuse_template(num_failed, num_tried, tally)
    if 2 * num_failed > num_tried:
        _refuse_template(num_failed, num_tried, tally)


def prepare(config: PrepareConfig, stages: Sequence[Stage] = ()) -> dict[str, Any]:
    """Writes the shards of `config` and returns their meta data.

    Args:
        config: the settings.
        stages: applied in order between cleaning and tokenizing.

    Returns:
        The content of `meta.json`. If the folder already holds just these shards, nothing is done.

    Raises:
        FileNotFoundError: if an input or excluded file is missing.
        ValueError: if an input is not readable as conversations, the chat template cannot be used,
            no supervised token is left, or the output folder holds something else.
        OSError: if the machine fails, for example on a full disk.
        RuntimeError: if another preparation is at work in the output folder.
    """
    output = Path(config.output)
    identity = config.identity()
    exclusion = Exclusion.from_files(config.exclude)
    tokenizer = load_tokenizer(config.tokenizer)
    encoder = ChatEncoder(tokenizer, config.max_length)
    identity["tokenizer"] = tokenizer_identity(tokenizer)
    if (finished := _finished(config, identity)) is not None:
        return finished
    output.mkdir(parents=True, exist_ok=True)
    busy = (
        f"another preparation is at work in {str(output)!r}; wait for it or choose another folder"
    )
    with locked(output / LOCK_FILE, busy):
        # Another preparation may have finished in between.
        if (finished := _finished(config, identity)) is not None:
            return finished
        return _make(config, stages, identity, encoder, tokenizer, exclusion)


def _finished(config: PrepareConfig, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The meta data of a folder with which there is nothing to do."""
    output = Path(config.output)
    meta = find_finished(output, identity)
    if meta is None or _may_go_on(config, meta) or not _is_whole(output):
        return None
    print(f"{output} already holds these shards; nothing to do")
    return meta


def _is_whole(output: Path) -> bool:
    """Whether all shards are there that the meta data tell of."""
    try:
        for split in SPLITS:
            TokenShards(output, split)
    except (ValueError, OSError, LookupError, EOFError) as error:
        LOGGER.warning("%s is damaged and is made again: %s", output, error)
        return False
    return True


def _make(
    config: PrepareConfig,
    stages: Sequence[Stage],
    identity: dict[str, Any],
    encoder: ChatEncoder,
    tokenizer: "PreTrainedTokenizerBase",
    exclusion: Exclusion,
) -> dict[str, Any]:
    """Writes the shards into the folder, which is locked, whatever it holds of them."""
    started = time.perf_counter()
    output = Path(config.output)
    if (output / META_FILE).exists():
        write_json(output / UNFINISHED_FILE, identity)
        (output / META_FILE).unlink()
    tally = Tally()
    with _unfinished(output, identity):
        dtype = token_dtype(num_ids(tokenizer))
        writers = {name: ShardWriter(output / name, dtype, config.shard_tokens) for name in SPLITS}
        exclude = partial(exclusion.drop, tally=tally)
        all_stages: list[Stage] = [exclude, *stages]
        if config.regenerate is not None:
            regenerator = Regenerator(
                config.regenerate,
                output / REGENERATED_FILE,
                encoder,
                tokenizer,
                seed=config.seed,
                limit=config.limit,
            )
            # The target may know an evaluation question by heart.
            all_stages += [partial(regenerator.stage, tally=tally), exclude]
        _write(config, all_stages, encoder, writers, tally)
        _check_supervised(writers, tally)
        splits: dict[str, dict[str, Any]] = {
            name: writer.summary() | {"sha256": _content_sha256(output / name)}
            for name, writer in writers.items()
        }
        meta = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "dtype": dtype.name,
            "mask_route": encoder.route,
            "tokenizer": {"name": config.tokenizer, **identity["tokenizer"]},
            "split_seed": config.seed,
            "total_tokens": sum(split["tokens"] for split in splits.values()),
            "supervised_tokens": sum(split["supervised_tokens"] for split in splits.values()),
            "splits": splits,
            "counts": tally.as_dict(),
            "args": asdict(config),
            "identity": identity,
            "seconds": round(time.perf_counter() - started, 1),
        }
        write_json(output / META_FILE, meta)
    return meta


def find_finished(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The meta data if the folder holds the shards of `identity`; None if it may be written.

    Raises:
        ValueError: if the folder holds other shards, an unfinished preparation with other settings,
            or files that are no shards.
    """
    if not output.exists():
        return None
    if not output.is_dir():
        raise ValueError(f"output {str(output)!r} is a file; name a folder")
    meta = read_meta(output) if (output / META_FILE).exists() else None
    unfinished = output / UNFINISHED_FILE
    if meta is not None:
        found = meta["identity"]
    elif unfinished.exists():
        found = read_object(unfinished)
    elif {path.name for path in output.iterdir()} - LEFT_BEHIND:
        raise ValueError(f"output folder {str(output)!r} is not empty and holds no shards")
    else:
        return None
    if differing := sorted(
        key for key in identity if key not in found or not agrees(found[key], identity[key])
    ):
        raise ValueError(
            f"output folder {str(output)!r} holds {'an unfinished' if meta is None else 'a'} "
            f"preparation with other settings ({', '.join(differing)}); choose or clear a folder"
        )
    return meta


def agrees(stored: Any, asked: Any) -> bool:
    """Whether what decided a folder's content is what is asked for.

    What an earlier version did not store, such as the digest of a file, goes with anything.
    """
    if isinstance(stored, dict) and isinstance(asked, dict):
        return all(key in asked and agrees(value, asked[key]) for key, value in stored.items())
    if isinstance(stored, list) and isinstance(asked, list):
        return len(stored) == len(asked) and all(map(agrees, stored, asked))
    return bool(stored == asked)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a shard folder.

    Raises:
        ValueError: if the file holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}; clear the folder") from error
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds no settings; clear the folder")
    return found


def _may_go_on(config: PrepareConfig, finished: dict[str, Any]) -> bool:
    """Whether the clock may have ended this regeneration, and is set otherwise now."""
    if config.regenerate is None:
        return False
    limit = finished["args"]["regenerate"].get("limit_minutes")
    return limit is not None and limit != config.regenerate.limit_minutes


def num_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The largest token id + 1: more than there are tokens where the ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """The vocabulary size and the digests of the chat template and of the tokenizer as a whole."""
    backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        content = json.dumps(tokenizer.get_vocab())
    else:
        backend.no_truncation()  # what the last call asked for stays in a tokenizer
        backend.no_padding()
        content = backend.to_str()
    return {
        "vocab_size": num_ids(tokenizer),
        "chat_template_sha256": (
            _sha256(tokenizer.get_chat_template()) if tokenizer.chat_template else None
        ),
        "tokenizer_sha256": _sha256(content),
    }


def report(meta: dict[str, Any]) -> str:
    """The counts of a preparation as a small table."""
    counts = meta["counts"]
    tally = Tally(counts["read"], counts["kept"])
    for name in ("skipped", "cut", "faults"):
        getattr(tally, name).update(counts[name])
    lines = [tally.table()]
    for name, split in meta["splits"].items():
        lines.append(
            f"{name}: {split['conversations']} conversations, {split['tokens']} tokens, "
            f"{split['supervised_tokens']} supervised, {split['shards']} shards"
        )
    lines.append(f"answers found by: {meta['mask_route']}; {meta['seconds']} s")
    if tally.num_kept < FEW_CONVERSATIONS:
        lines.append(
            f"note: {tally.num_kept} conversations are a trial, too few to train a head on"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m train.prepare", description=__doc__)
    PrepareConfig.add_arguments(parser)
    args = parser.parse_args(argv)
    return run(lambda: print(report(prepare(PrepareConfig.from_args(args)))))


def _write(
    config: PrepareConfig,
    stages: Sequence[Stage],
    encoder: ChatEncoder,
    writers: dict[str, ShardWriter],
    tally: Tally,
) -> None:
    num_bytes = sum(
        Path(source).stat().st_size for source in config.input if Path(source).is_file()
    )
    num_tokens = 0
    with ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        bar = stack.enter_context(
            tqdm(total=num_bytes or None, unit="B", unit_scale=True, disable=None)
        )
        rows = chain.from_iterable(read_rows(each, tally, bar.update) for each in config.input)
        conversations: Iterable[Conversation] = clean(rows, tally, english_only=config.english_only)
        for stage in stages:
            conversations = stage(conversations)
        for conversation, tokenized in islice(
            tokenize(conversations, encoder, tally), config.limit
        ):
            split = split_of(conversation, config.seed, config.validation_fraction)
            writers[split].add(tokenized.ids, tokenized.mask)
            tally.num_kept += 1
            num_tokens += len(tokenized.ids)
            bar.set_postfix(conversations=tally.num_kept, tokens=num_tokens, refresh=False)
            if config.limit_tokens is not None and num_tokens >= config.limit_tokens:
                break


@contextmanager
def _unfinished(output: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Marks the folder as unfinished and empties it of an earlier unfinished run.

    An error leaves nothing behind but answers that were regenerated; a killed run leaves its mark,
    and the next one starts over.
    """
    _remove_shards(output)
    output.mkdir(parents=True, exist_ok=True)
    try:
        write_json(output / UNFINISHED_FILE, identity)
        yield
        (output / UNFINISHED_FILE).unlink()
    except (ValueError, OSError, RuntimeError, ImportError):
        _remove_shards(output)
        if not (output / REGENERATED_FILE).exists():
            for name in (UNFINISHED_FILE, LOCK_FILE):
                (output / name).unlink(missing_ok=True)
            with suppress(OSError):  # a file that is not ours keeps the folder
                output.rmdir()
        raise


def _remove_shards(output: Path) -> None:
    for name in SPLITS:
        if (output / name).exists():
            shutil.rmtree(output / name)


def _check_supervised(writers: dict[str, ShardWriter], tally: Tally) -> None:
    if not any(writer.num_supervised_tokens for writer in writers.values()):
        raise ValueError(f"no supervised token is left; skipped: {tally.reasons()}")
    if not writers["train"].num_supervised_tokens:
        raise ValueError(
            f"all {tally.num_kept} conversations fell into validation; "
            "lower --validation-fraction, change --seed or give more conversations"
        )


def _refuse_template(num_failed: int, num_tried: int, tally: Tally) -> NoReturn:
    raise ValueError(
        f"the chat template cannot be used: answers not found in {num_failed} of {num_tried} "
        f"conversations (skipped: {tally.reasons()}); give a tokenizer whose template keeps "
        "earlier turns unchanged, or add {% generation %} markers to it"
    )


def _content_sha256(folder: Path) -> str:
    """A digest of a split's shards: tokens, masks and where each conversation starts."""
    digests = [_file_sha256(str(path)) for path in sorted(folder.iterdir())]
    return _sha256("".join(digests))


def _file_sha256(path: str) -> str:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path!r} to exclude")
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
