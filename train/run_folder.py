"""The output folder of a training run: checkpoint, metrics, heads, curve."""

import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.checkpoint import save_head
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.draft_vocab import VOCAB_FILE
from eagle_fsd.files import whole_file, write_text
from train.vocab import write_vocab

CHECKPOINT_FILE = "checkpoint.pt"
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "curve.png"
CHECKPOINT_VERSION = 1


class RunFolder:
    """Files of one run. Each appears whole or not at all, and only one process writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._checkpoint = self.folder / CHECKPOINT_FILE
        self._metrics = self.folder / METRICS_FILE

    def check(self, *, resume: bool) -> None:
        """Refuses to start over, or to resume, what is not there to be.

        Raises:
            ValueError: if the folder holds a run and `resume` is False, or something else.
        """
        if self._checkpoint.exists():
            if not resume:
                raise ValueError(
                    f"output folder {str(self.folder)!r} holds a run; "
                    "go on with --resume or choose another folder"
                )
        elif self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output {str(self.folder)!r} is a file; name a folder")
        elif self.folder.is_dir() and not resume and any(self.folder.iterdir()):
            raise ValueError(
                f"output folder {str(self.folder)!r} is not empty; go on with --resume if a run "
                "was begun there, choose another or clear it"
            )

    def load_checkpoint(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The state of a run with the same settings; None where no checkpoint was written yet.

        Raises:
            ValueError: if the checkpoint is of another run, or cannot be read.
        """
        if not self._checkpoint.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(
                self._checkpoint, map_location="cpu", weights_only=True
            )
            found, version_found = state["identity"], state["version"]
        except (RuntimeError, EOFError, OSError, ValueError, TypeError) as error:
            raise self._unreadable(error) from error
        except (pickle.UnpicklingError, LookupError, AttributeError) as error:
            raise self._unreadable("it is no checkpoint") from error  # not: trust the file
        if version_found != CHECKPOINT_VERSION:
            raise ValueError(
                f"{str(self._checkpoint)!r} has version {version_found}, "
                f"expected {CHECKPOINT_VERSION}; start a new run"
            )
        differing = sorted(
            key for key in identity.keys() | found.keys() if found.get(key) != identity.get(key)
        )
        if differing:
            values = ", ".join(
                f"{key} {found.get(key)!r} there and {identity.get(key)!r} here"
                for key in differing
            )
            raise ValueError(
                f"{str(self._checkpoint)!r} is of another run ({values}); "
                "give its settings or choose another folder"
            )
        return state

    def _unreadable(self, reason: object) -> ValueError:
        return ValueError(
            f"cannot read {str(self._checkpoint)!r}: {reason}; remove it to begin the run anew"
        )

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self._checkpoint) as temporary:
            torch.save({"version": CHECKPOINT_VERSION} | state, temporary)

    def save_head(
        self, name: str, head: DraftHead, extras: dict[str, Any], vocab: dict[str, Any] | None
    ) -> None:
        """Writes "best" or "last" in the format of draft heads, with its draft vocabulary."""
        save_head(head, self.folder / name, extras)
        if vocab is not None:
            write_vocab(self.folder / name / VOCAB_FILE, vocab)

    def log(self, record: dict[str, Any]) -> None:
        """Appends one line to the metrics."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The whole lines of the metrics; what a killed run left of its last line is skipped."""
        if not self._metrics.exists():
            return
        for line in self._metrics.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def rewind_metrics(self, step: int) -> None:
        """Drops what was logged after `step`, as it will be logged again."""
        kept = [record for record in self.records() if record["step"] <= step]
        if not self.folder.is_dir():
            return
        write_text(self._metrics, "".join(json.dumps(each) + "\n" for each in kept))

    def plot(self) -> Path | None:
        """Loss, agreement and acceptance length over steps; None without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return None
        records = list(self.records())
        train = [each for each in records if each["kind"] == "train"]
        held_out = [each for each in records if each["kind"] == "validation"]
        live = [each for each in held_out if each.get("live_acceptance_length")]
        figure = Figure(figsize=(12, 4), layout="constrained")
        loss, agreement, length = figure.subplots(1, 3)
        loss.plot([r["step"] for r in train], [r["loss"][0] for r in train], label="train")
        loss.plot(
            [r["step"] for r in held_out], [r["loss"][0] for r in held_out], "o-", label="held out"
        )
        loss.set(xlabel="step", ylabel="cross-entropy, nats", title="loss of step 1")
        loss.legend()
        for top in ("top_1", "top_3", "top_10"):
            agreement.plot(
                [r["step"] for r in held_out], [r[top][0] for r in held_out], "o-", label=top
            )
        agreement.set(xlabel="step", title="agreement of step 1, held out")
        agreement.legend()
        length.plot([r["step"] for r in live], [r["live_acceptance_length"] for r in live], "o-")
        length.set(xlabel="step", title="live acceptance length")
        with whole_file(self.folder / CURVE_FILE) as temporary:
            figure.savefig(temporary, format="png")
        return self.folder / CURVE_FILE


def head_sha256(head: DraftHead) -> str:
    """A digest of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def provenance() -> dict[str, Any]:
    """Versions of what computes, and the commit of the code where it is a git checkout."""
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "accelerate", "eagle-fsd"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        commit = answer.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"versions": versions, "commit": commit}
