"""Trains a draft head for a target, from conversations to the head, in one command.

    python -m train.recipe --conversations conversations.json --target demo --output out \
        --exclude mt_bench.jsonl --minutes-regenerate 60 --minutes-fit 75

The target answers the conversations anew, the answers become token shards (with the original
answers beside them by --mix-original), and a head is fitted to them. Each stage is that of
`train.prepare`, `train.features` and `train.fit`; the same command again goes on where the last one
ended.

Two more commands split this for a machine that is lent for minutes and reaches no network:

    python -m train.recipe pack --conversations conversations.json --exclude mt_bench.jsonl \
        --output parts
    python -m train.recipe run --parts parts --output out --minutes 10

`pack` writes what has to travel in files of at most 50 MB: the target's .gguf file, and the cleaned
conversations with the questions to exclude. `run` puts them together there and trains.
"""

import argparse
import hashlib
import json
import lzma
import math
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

from eagle_fsd.checkpoint import CONFIG, check_fit, load_head, load_target_config
from eagle_fsd.command import run
from eagle_fsd.default_target import (
    DEMO,
    GGUF_NAME,
    GGUF_SHA256,
    cache_dir,
    convert_gguf,
    default_target_gguf,
)
from eagle_fsd.device import resolve_device
from eagle_fsd.draft_vocab import read_vocab
from eagle_fsd.errors import UnsupportedModelError
from eagle_fsd.files import write_json, write_text
from eagle_fsd.target import FAMILIES
from train.conversations import (
    Conversation,
    Exclusion,
    Tally,
    UnusableConversationError,
    clean,
    read_rows,
)
from train.features import FeaturesConfig, compute_features, shards_identity
from train.fit import fit
from train.fit_config import DEVICES, FitConfig
from train.prepare import (
    UNFINISHED_FILE,
    ChatEncoder,
    PrepareConfig,
    agrees,
    load_tokenizer,
    prepare,
    read_object,
    report,
)
from train.regenerate import REGENERATED_FILE, RegenerateConfig
from train.run_folder import CURVE_FILE, METRICS_FILE
from train.shards import META_FILE

OWN, MIXED, FEATURES, RUN = "own", "mixed", "features", "run"
RECORD_FILE = "record.json"
ANSWERS_FILE = "answers.jsonl.xz"

MANIFEST_FILE = "manifest.json"
FORMAT = ["eagle_fsd parts", 1]
TARGET_FILE, DATA_FILE = "target.gguf", "data.zip"
CONVERSATIONS_FILE = "conversations.jsonl"
PART_BYTES = 50_000_000
PARTS_DIGEST_FILE = "parts.sha256"
STAGED = "new.tmp"
_PART = re.compile(
    rf"({re.escape(TARGET_FILE)}|{re.escape(DATA_FILE)})\.(\d+(\.tmp)?|tmp)|"
    rf"{re.escape(MANIFEST_FILE)}(\.tmp)?|{re.escape(STAGED)}"
)

LONGEST_PROMPT, LONGEST = 512, 2048
# Of the minutes of `run`: the share in which the target answers, and what is left at the end for
# the last look at the head and for writing it.
ANSWERING_SHARE = 0.4
RESERVE_S, RESERVE_SHARE = 45.0, 0.1


@dataclass(frozen=True)
class Pace:
    """Settings that follow from the device; each is a field of another configuration.

    Attributes:
        batch_size: conversations that are answered at once.
        batch_tokens, eval_every, log_every, live_prompts: of the fit.
        has_cached_features: whether features are written to disk once. A CPU computes them slower
            than it reads them, a GPU faster.
    """

    batch_size: int
    batch_tokens: int
    eval_every: int
    log_every: int
    live_prompts: int
    has_cached_features: bool

    @classmethod
    def of(cls, device: str) -> Self:
        """What suits "auto" or "cpu" on this machine.

        The CPU's settings are measured ones; the GPU's are reckoned for 80 GB or more of memory and
        a target under 1B parameters.
        """
        if resolve_device(device).type == "cpu":
            return cls(48, 4096, 200, 10, 8, has_cached_features=True)
        return cls(512, 65536, 300, 20, 4, has_cached_features=False)


@dataclass(frozen=True)
class HeadConfig:
    """What kind of head is trained, and how; shared by the recipe and its `run` command.

    Raises:
        ValueError: if a value is out of its range.
    """

    output: str
    mix_original: bool = False
    init: str | None = None
    draft_vocab: str = "16384"
    unroll: int = 3
    epochs: float = 12.0
    batch_size: int | None = None
    batch_tokens: int | None = None
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {DEVICES}, got {self.device!r}")
        for name in ("unroll", "batch_size", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not 0.0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be > 0, got {self.epochs}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        def add(name: str, text: str, **options: Any) -> None:
            default = getattr(cls, name.removeprefix("--").replace("-", "_"), None)
            shown = text if default is None else f"{text} (default {default})"
            parser.add_argument(name, default=default, help=shown, **options)

        parser.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
        parser.add_argument(
            "--mix-original", action="store_true", help="train on the original answers as well"
        )
        add("--init", "head to start from: demo, a folder or a hub id", metavar="HEAD")
        add("--draft-vocab", "full, a file of train.vocab, or a number of tokens", metavar="U")
        add("--unroll", "steps in which the head is fed its own features", type=int, metavar="K")
        add("--epochs", "most passes over the data", type=float, metavar="N")
        add("--batch-size", "answers at once (default 48, or 512 on a GPU)", type=int, metavar="N")
        add("--batch-tokens", "rows of a fitted batch (default 4096, or 65536 on a GPU)", type=int,
            metavar="N")  # fmt: skip
        add("--seed", "of answers, split, first weights and order", type=int)
        add("--device", "auto or cpu", choices=DEVICES)

    def head_settings(self) -> dict[str, Any]:
        """The fields of `HeadConfig` alone."""
        return {field.name: getattr(self, field.name) for field in fields(HeadConfig)}


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(HeadConfig):
    """The settings of `python -m train.recipe`; each is a flag.

    Raises:
        ValueError: if a value is out of its range.
    """

    conversations: tuple[str, ...]
    target: str = DEMO
    exclude: tuple[str, ...] = ()
    turns: int = 1
    limit: int | None = None
    minutes_regenerate: float = 60.0
    minutes_fit: float = 75.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("minutes_regenerate", "minutes_fit"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf or (name == "minutes_fit" and not value):
                raise ValueError(f"{name} must be positive minutes, got {value}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--conversations", nargs="+", required=True, metavar="SOURCE", help="files or ids")
        add("--target", default=cls.target, help="demo, a folder, an id or a .gguf file")
        add("--exclude", nargs="+", default=(), metavar="FILE", help="evaluation questions")
        add("--turns", type=int, default=cls.turns, metavar="N",
            help="user turns that are kept and answered (default %(default)s)")  # fmt: skip
        add("--limit", type=int, metavar="N", help="most conversations that are taken")
        add("--minutes-regenerate", type=float, default=cls.minutes_regenerate, metavar="M",
            help="of answering; 0 keeps the original answers (default %(default)s)")  # fmt: skip
        add("--minutes-fit", type=float, default=cls.minutes_fit, metavar="M",
            help="of fitting (default %(default)s)")  # fmt: skip
        super().add_arguments(parser)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**_flag_values(cls, args))


def _flag_values(config: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a configuration by its fields; lists of files become tuples."""
    values = {field.name: getattr(args, field.name) for field in fields(config)}
    return values | {name: tuple(values[name]) for name in ("conversations", "exclude")}


def run_recipe(
    config: RecipeConfig, minutes_fit: Callable[[], float] | None = None
) -> dict[str, Any]:
    """Trains a head, going on behind what `config.output` holds.

    Args:
        config: the settings.
        minutes_fit: asked once the data are there, instead of `config.minutes_fit`.

    Returns:
        The record, which is also in `record.json`: where the best head is, what it was trained on,
        and its figures.

    Raises:
        FileNotFoundError, ValueError, TypeError: one sentence about what does not fit.
        OSError, RuntimeError: if the machine fails.
    """
    _check_head(config)
    output, pace = Path(config.output), Pace.of(config.device)
    data = {}
    if config.minutes_regenerate:
        shards, data["own"] = _answers(config, pace)
    if config.mix_original or not config.minutes_regenerate:
        shards, data["all"] = _mixed(config)
    # New data make a new run, beside the one before.
    digest = shards_identity(shards)[:8]
    run, features = output / f"{RUN}-{digest}", None
    if pace.has_cached_features:
        features = str(output / f"{FEATURES}-{digest}")
        compute_features(FeaturesConfig(shards, config.target, features, device=config.device))
    minutes = minutes_fit() if minutes_fit else config.minutes_fit
    fit(
        FitConfig(
            shards=shards,
            target=config.target,
            output=str(run),
            features=features,
            init=config.init,
            draft_vocab=config.draft_vocab,
            unroll=config.unroll,
            epochs=config.epochs,
            limit_minutes=minutes,
            batch_tokens=config.batch_tokens or pace.batch_tokens,
            eval_every=pace.eval_every,
            log_every=pace.log_every,
            live_prompts=pace.live_prompts,
            device=config.device,
            seed=config.seed,
            resume=True,
        )
    )
    head = run / "best"
    extras = json.loads((head / CONFIG).read_text(encoding="utf-8"))["eagle_fsd"]
    record = {"head": str(head), "settings": asdict(config), "data": data, **extras}
    write_json(output / RECORD_FILE, record)
    return record


def _check_head(config: RecipeConfig) -> None:
    """Refuses at once what would not be seen before the answers are made."""
    shape = _target_config(config.target)
    choice = config.draft_vocab
    if choice.isdigit():
        if not 1 <= int(choice) <= shape.vocab_size:
            raise ValueError(
                f"--draft-vocab must be full, a file or 1..{shape.vocab_size}, got {choice}"
            )
    elif choice != "full":
        read_vocab(choice)
    if config.init is not None:
        check_fit(load_head(config.init).config, shape, shape.vocab_size)


def _answers(config: RecipeConfig, pace: Pace) -> tuple[str, dict[str, Any]]:
    """The shards of the target's own answers."""
    folder = str(Path(config.output) / OWN)
    longest, longest_prompt = _lengths(config.target)
    regenerate = RegenerateConfig(
        config.target,
        turns=config.turns,
        max_prompt_tokens=longest_prompt,
        batch_size=config.batch_size or pace.batch_size,
        device=config.device,
        limit_minutes=config.minutes_regenerate,
    )
    prepared = PrepareConfig(
        config.conversations,
        config.target,
        folder,
        exclude=config.exclude,
        max_length=longest,
        seed=config.seed,
        limit=config.limit,
        regenerate=regenerate,
    )
    return folder, _prepared(prepared)


def _mixed(config: RecipeConfig) -> tuple[str, dict[str, Any]]:
    """The shards of the original answers, behind the target's own where there are any."""
    folder, own = (Path(config.output) / name for name in (MIXED, OWN))
    answers = own / REGENERATED_FILE
    sources, limit = config.conversations, config.limit
    if config.minutes_regenerate:
        sources = (str(answers), *sources)
        if limit is not None:
            with answers.open("rb") as stream:
                limit += sum(1 for _ in stream)
    prepared = PrepareConfig(
        sources,
        config.target,
        str(folder),
        exclude=config.exclude,
        max_length=_lengths(config.target)[0],
        seed=config.seed,
        limit=limit,
    )
    _drop_outdated(folder, prepared)
    return str(folder), _prepared(prepared)


def _drop_outdated(folder: Path, config: PrepareConfig) -> None:
    """Removes shards of other conversations, such as of fewer answers: they are soon made again."""
    if (folder / META_FILE).is_file():
        stored = read_object(folder / META_FILE).get("identity")
    elif (folder / UNFINISHED_FILE).is_file():
        stored = read_object(folder / UNFINISHED_FILE)
    else:
        return
    asked = config.identity()
    kept = {name: (stored or {}).get(name) for name in ("input", "limit")}
    if not agrees(kept, asked):
        shutil.rmtree(folder)


def _prepared(config: PrepareConfig) -> dict[str, Any]:
    meta = prepare(config)
    print(report(meta))
    return {"splits": meta["splits"], "counts": meta["counts"]}


def _lengths(target: str) -> tuple[int, int]:
    """The longest conversation and prompt that are taken, within the target's context."""
    context = int(_target_config(target).max_position_embeddings)
    return min(LONGEST, context), min(LONGEST_PROMPT, context // 2)


def _target_config(target: str) -> Any:
    config = load_target_config(target)
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"target {target!r} is of family {config.model_type!r}; supported families are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return config.get_text_config()


# What has to travel


@dataclass(frozen=True)
class PackConfig:
    """The settings of `python -m train.recipe pack`; each is a flag.

    Raises:
        ValueError: if the target is no .gguf file.
    """

    conversations: tuple[str, ...]
    output: str
    target: str = DEMO
    exclude: tuple[str, ...] = ()
    turns: int = 1
    mix_original: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.target != DEMO and Path(self.target).suffix != ".gguf":
            raise ValueError(
                f"only {DEMO!r} and .gguf files are packed, got {self.target!r}; "
                "bring a folder along yourself and name it with run --target"
            )
        for name in ("turns", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--conversations", nargs="+", required=True, metavar="SOURCE", help="files or ids")
        add("--output", required=True, metavar="DIR", help="folder for the parts")
        add("--target", default=cls.target, help="demo or a .gguf file")
        add("--exclude", nargs="+", default=(), metavar="FILE", help="evaluation questions")
        add("--turns", type=int, default=cls.turns, metavar="N",
            help="user turns that are kept and answered (default %(default)s)")  # fmt: skip
        add("--mix-original", action="store_true", help="the original answers travel too")
        add("--limit", type=int, metavar="N", help="most conversations that are taken")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**_flag_values(cls, args))


def pack(config: PackConfig, part_bytes: int = PART_BYTES) -> dict[str, Any]:
    """Writes the parts, and their manifest last.

    Without `mix_original` only what is asked travels: the answers are left out, and a dash stands
    for each, as a conversation ends with an answer.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError, ValueError: if an input is missing or holds no conversation.
        OSError, RuntimeError: if the target cannot be fetched or the machine fails.
    """
    folder = Path(config.output)
    _check_parts_folder(folder)
    gguf = default_target_gguf() if config.target == DEMO else Path(config.target)
    tally = Tally()
    # All is made beside the parts that are there, and takes their place when it is whole.
    staged = folder / STAGED
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _write_data(staged / DATA_FILE, config, str(gguf), tally)
        files = {
            TARGET_FILE: _split(gguf, staged, TARGET_FILE, part_bytes),
            DATA_FILE: _split(staged / DATA_FILE, staged, DATA_FILE, part_bytes),
        }
        _replace_parts(folder, staged, [*files[TARGET_FILE]["parts"], *files[DATA_FILE]["parts"]])
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        with suppress(OSError):  # whatever is in the folder keeps it
            folder.rmdir()
    manifest = {
        "format": FORMAT,
        "files": files,
        "exclude": [_excluded_name(i) for i in range(len(config.exclude))],
        "target": GGUF_NAME if config.target == DEMO else gguf.name,
        "turns": config.turns,
        "mix_original": config.mix_original,
        "counts": tally.as_dict(),
    }
    write_json(folder / MANIFEST_FILE, manifest)
    return manifest


def _check_parts_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output {str(folder)!r} is a file; name a folder")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if foreign := sorted(name for name in names if not _PART.fullmatch(name)):
        raise ValueError(
            f"output folder {str(folder)!r} holds {foreign[0]!r}, which is no part; choose another"
        )


def _replace_parts(folder: Path, staged: Path, names: Sequence[str]) -> None:
    """Moves the new parts into the folder and removes the old ones."""
    for path in folder.iterdir():
        if path.name not in (*names, MANIFEST_FILE, STAGED):
            path.unlink()
    for name in names:
        (staged / name).replace(folder / name)


def _write_data(path: Path, config: PackConfig, target: str, tally: Tally) -> None:
    """The conversations, and the questions to exclude once more, as answers may hold them."""
    exclusion = Exclusion.from_files(config.exclude)
    longest, longest_prompt = _lengths(target)
    encoder = ChatEncoder(load_tokenizer(target), longest)
    rows = chain.from_iterable(read_rows(source, tally) for source in config.conversations)
    conversations: Iterable[Conversation] = exclusion.drop(clean(rows, tally), tally)
    if not config.mix_original:
        conversations = _questions(conversations, config.turns, encoder, longest_prompt, tally)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        with archive.open(CONVERSATIONS_FILE, "w", force_zip64=True) as stream:
            for conversation in conversations:
                stream.write(_line(conversation).encode())
                tally.num_kept += 1
                if tally.num_kept == config.limit:
                    break
        for i, name in enumerate(config.exclude):
            archive.write(name, _excluded_name(i))
    if not tally.num_kept:
        raise ValueError(f"no conversation is left; skipped: {tally.reasons()}")


def _line(conversation: Conversation) -> str:
    """A conversation as `train.prepare` reads it."""
    messages = [
        {"role": each.role, "content": each.content}
        | ({"finish_reason": "length"} if each.is_cut else {})
        for each in conversation.messages
    ]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def _questions(
    conversations: Iterable[Conversation],
    num_turns: int,
    encoder: ChatEncoder,
    longest: int,
    tally: Tally,
) -> Iterator[Conversation]:
    """The first turns of conversations whose prompt is not too long, a dash for each answer."""
    for conversation in conversations:
        roles = [message.role for message in conversation.messages]
        answers = [i for i, role in enumerate(roles) if role == "assistant"][:num_turns]
        prompt = Conversation(conversation.messages[: answers[0]])
        try:
            is_short = len(encoder.prompt(prompt.chat())) <= longest
        except UnusableConversationError as error:
            tally.skipped[str(error)] += 1
            continue
        if not is_short:
            tally.skipped["over-long prompt"] += 1
            continue
        kept = conversation.messages[: answers[-1] + 1]
        dashes = (replace(each, content="-") if each.role == "assistant" else each for each in kept)
        yield Conversation(tuple(dashes))


def _split(path: Path, folder: Path, name: str, part_bytes: int) -> dict[str, Any]:
    """Cuts a file into parts of about one size, at most `part_bytes`; returns what joins them."""
    num_bytes = path.stat().st_size
    size = math.ceil(num_bytes / max(1, math.ceil(num_bytes / part_bytes)))
    digest = hashlib.sha256()
    parts: list[str] = []
    with path.open("rb") as stream:
        while content := stream.read(size):
            digest.update(content)
            part = folder / f"{name}.{len(parts)}"
            temporary = part.with_name(part.name + ".tmp")
            temporary.write_bytes(content)
            temporary.replace(part)
            parts.append(part.name)
    return {"parts": parts, "bytes": num_bytes, "sha256": digest.hexdigest()}


def _excluded_name(number: int) -> str:
    return f"exclude-{number}.jsonl"


# On the machine that is lent


@dataclass(frozen=True, kw_only=True)
class RunConfig(HeadConfig):
    """The settings of `python -m train.recipe run`; each is a flag.

    Attributes:
        minutes: of the whole command.
        target: a folder instead of the packed .gguf file.
        work: folder for everything that does not leave the machine; by default one in the cache.

    Raises:
        ValueError: if a value is out of its range.
    """

    parts: str
    minutes: float = 10.0
    target: str | None = None
    work: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.minutes < math.inf:
            raise ValueError(f"minutes must be > 0, got {self.minutes}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--parts", required=True, metavar="DIR", help="of pack")
        add("--minutes", type=float, default=cls.minutes, metavar="M",
            help="of the whole command (default %(default)s)")  # fmt: skip
        add("--target", help="a folder, instead of the packed .gguf file")
        add("--work", metavar="DIR", help="for all that stays there (default: in the cache)")
        super().add_arguments(parser)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


def run_parts(config: RunConfig, started: float) -> dict[str, Any]:
    """Joins the parts and trains; the head, its metrics and its record are left in the output.

    Args:
        config: the settings.
        started: when the minutes began, of `time.monotonic`.

    Returns:
        The record.

    Raises:
        FileNotFoundError, ValueError: if a part is missing or damaged.
        OSError, RuntimeError: if the machine fails.
    """
    parts, output = Path(config.parts), Path(config.output)
    _check_results(output)
    manifest = _read_manifest(parts)
    if config.mix_original and not manifest["mix_original"]:
        raise ValueError("the parts hold no original answers; pack them with --mix-original")
    digest = hashlib.sha256(json.dumps(manifest["files"]).encode()).hexdigest()
    work = Path(config.work) if config.work else cache_dir() / "recipe" / digest[:16]
    work.mkdir(parents=True, exist_ok=True)
    _claim(work, digest)
    target = config.target or str(_joined_target(parts, manifest, work))
    data = _joined_data(parts, manifest, work)

    def seconds_left() -> float:
        return 60 * config.minutes - (time.monotonic() - started)

    def minutes_fit() -> float:
        """Called when the answers are there, which leave the machine whatever comes then."""
        _store_answers(work / OWN / REGENERATED_FILE, output)
        left = seconds_left() - min(RESERVE_S, 60 * config.minutes * RESERVE_SHARE)
        if left <= 0:
            raise ValueError(
                f"the {config.minutes:g} minutes are over before the fit; give more --minutes"
            )
        return left / 60

    recipe = RecipeConfig(
        conversations=(str(data / CONVERSATIONS_FILE),),
        target=target,
        exclude=tuple(str(data / name) for name in manifest["exclude"]),
        turns=manifest["turns"],
        minutes_regenerate=ANSWERING_SHARE * config.minutes,
        **config.head_settings() | {"output": str(work)},
    )
    record = run_recipe(recipe, minutes_fit)
    output.mkdir(parents=True, exist_ok=True)
    head = Path(record["head"])
    _copy_folder(head, output / "best")
    for name in (METRICS_FILE, CURVE_FILE):
        if (head.parent / name).is_file():
            shutil.copyfile(head.parent / name, output / name)
    record["head"] = str(output / "best")
    write_json(output / RECORD_FILE, record)
    return record


def _read_manifest(parts: Path) -> dict[str, Any]:
    path = parts / MANIFEST_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"no {MANIFEST_FILE} in {str(parts)!r}; make it with python -m train.recipe pack"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}; pack again") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(f"{str(path)!r} has the format {found}, expected {FORMAT}; pack again")
    files = manifest.get("files")
    files = files if isinstance(files, dict) else {}
    of_file, of_all = {"parts", "bytes", "sha256"}, {"exclude", "target", "turns", "mix_original"}
    has_files = all(of_file <= set(files.get(name) or ()) for name in (TARGET_FILE, DATA_FILE))
    if not has_files or not of_all <= manifest.keys():
        raise ValueError(f"{str(path)!r} is damaged: it does not tell of all parts; pack again")
    return dict(manifest)


def _check_results(output: Path) -> None:
    """Refuses to write over the head of a run of `train.fit`."""
    ours = (ANSWERS_FILE, RECORD_FILE)
    theirs = ("best", METRICS_FILE)
    if any((output / name).exists() for name in theirs) and not any(
        (output / name).exists() for name in ours
    ):
        raise ValueError(
            f"output folder {str(output)!r} holds a run that is not of this command; choose another"
        )


def _claim(work: Path, digest: str) -> None:
    """Notes in the work folder whose parts it is for, and refuses those of others.

    Without a note, what is there may be of any parts, or nothing of ours: it is not touched. The
    folder of the user's cache has the digest for its name.
    """
    note = work / PARTS_DIGEST_FILE
    is_noted = note.is_file()
    is_known = is_noted or work.name == digest[:16]
    if is_noted and note.read_text(encoding="utf-8").strip() != digest:
        raise ValueError(
            f"work folder {str(work)!r} was made from other parts; give another --work or clear it"
        )
    for name in ("target", "data"):
        if not is_known and (work / name).exists():
            raise ValueError(
                f"work folder {str(work)!r} holds {name!r} and no {PARTS_DIGEST_FILE}, so that "
                "nobody knows what it is of; give another --work"
            )
    if not is_noted:
        write_text(note, digest + "\n")


def _joined_target(parts: Path, manifest: dict[str, Any], work: Path) -> Path:
    """The packed target as a transformers folder."""
    folder = work / "target"
    if folder.is_dir():
        return folder
    expected = manifest["files"][TARGET_FILE]["sha256"]
    if manifest["target"] == GGUF_NAME and expected != GGUF_SHA256:
        raise ValueError(
            f"the packed {GGUF_NAME} has SHA-256 {expected}, expected {GGUF_SHA256}; pack again"
        )
    gguf = work / manifest["target"]
    _join(parts, manifest["files"][TARGET_FILE], gguf)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    convert_gguf(gguf, temporary, progress=False)
    temporary.replace(folder)
    gguf.unlink()
    return folder


def _joined_data(parts: Path, manifest: dict[str, Any], work: Path) -> Path:
    """The folder with the packed conversations and questions."""
    folder = work / "data"
    if folder.is_dir():
        return folder
    archive = work / DATA_FILE
    _join(parts, manifest["files"][DATA_FILE], archive)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with zipfile.ZipFile(archive) as content:
        for name in (CONVERSATIONS_FILE, *manifest["exclude"]):
            content.extract(name, temporary)
    temporary.replace(folder)
    archive.unlink()
    return folder


def _join(parts: Path, facts: dict[str, Any], goal: Path) -> None:
    """Puts a file together again and checks its digest."""
    temporary = goal.with_name(goal.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as stream:
            for name in facts["parts"]:
                if not (parts / name).is_file():
                    raise FileNotFoundError(f"no part {str(parts / name)!r}; bring all of them")
                content = (parts / name).read_bytes()
                digest.update(content)
                stream.write(content)
        if digest.hexdigest() != facts["sha256"]:
            raise ValueError(
                f"{goal.name} joined from {str(parts)!r} has SHA-256 {digest.hexdigest()}, "
                f"expected {facts['sha256']}; bring the parts again"
            )
        temporary.replace(goal)
    finally:
        temporary.unlink(missing_ok=True)


def _store_answers(path: Path, output: Path) -> None:
    """Compresses the answers, so that they can be trained on again elsewhere; ids are left out."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / (ANSWERS_FILE + ".tmp")
    with path.open(encoding="utf-8") as lines, lzma.open(temporary, "wb", preset=1) as stream:
        for line in lines:
            row = json.loads(line)
            for message in row["messages"]:
                message.pop("token_ids", None)
            stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    temporary.replace(output / ANSWERS_FILE)


def _copy_folder(source: Path, goal: Path) -> None:
    temporary = goal.with_name(f".{goal.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    shutil.rmtree(goal, ignore_errors=True)
    temporary.replace(goal)


# The commands


def _recipe_command(args: argparse.Namespace) -> None:
    print(_summary(run_recipe(RecipeConfig.from_args(args))))


def _pack_command(args: argparse.Namespace) -> None:
    manifest = pack(PackConfig.from_args(args))
    print(f"{manifest['counts']['kept']} conversations")
    for name, facts in manifest["files"].items():
        print(f"{name}: {len(facts['parts'])} parts, {facts['bytes'] / 1e6:.1f} MB")


def _run_command(args: argparse.Namespace) -> None:
    started = time.monotonic()
    print(_summary(run_parts(RunConfig.from_args(args), started)))


_COMMANDS: dict[str, tuple[Any, Callable[[argparse.Namespace], None], str]] = {
    "": (RecipeConfig, _recipe_command, "Trains a draft head from conversations."),
    "pack": (PackConfig, _pack_command, "Writes what has to travel to a lent machine."),
    "run": (RunConfig, _run_command, "Trains on a lent machine from the parts of pack."),
}


def _summary(record: dict[str, Any]) -> str:
    training = record["training"]
    figures = training["metrics"] or {}
    found = {
        "acceptance length": figures.get("live_acceptance_length"),
        "agreement of the best token": (figures.get("top_1") or [None])[0],
        "steps": training["step"],
        "tokens seen": training["tokens_seen"],
        "minutes of fitting": round(training["elapsed_s"] / 60, 1),
    }
    shown = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    return f"best head: {record['head']}\nheld out: {shown}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and arguments[0] in _COMMANDS else ""
    config, command, text = _COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m train.recipe {name}".strip(),
        description=text if name else __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config.add_arguments(parser)
    args = parser.parse_args(arguments)
    return run(lambda: command(args))


if __name__ == "__main__":
    raise SystemExit(main())
