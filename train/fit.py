"""Trains a draft head.

    python -m train.fit --shards shards --target demo --output run --steps 20 --live-prompts 2

Several processes or machines: `accelerate launch -m train.fit` with the same flags (on CPUs, where
that starts one process, `torchrun --nproc-per-node 2 -m train.fit`). Every process takes its share
of each batch, so the batches, and up to rounding the weights, are those of one process.
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from eagle_fsd.checkpoint import check_fit, load_head
from eagle_fsd.command import run
from eagle_fsd.device import peak_memory_bytes, synchronize
from eagle_fsd.draft_head import DraftHead, DraftHeadConfig
from eagle_fsd.draft_vocab import read_vocab
from eagle_fsd.target import TargetModel
from train.batches import BatchLoader, Ints, Pieces, Plan, pack
from train.features import (
    DTYPES,
    CachedFeatures,
    FeatureSource,
    TargetFeatures,
    check_shards,
    load_for_training,
    shards_identity,
    target_identity,
)
from train.fit_config import FitConfig
from train.losses import BatchLoss, TargetLaw, batch_loss
from train.run_folder import RunFolder, head_sha256, provenance
from train.shards import TokenShards
from train.validation import (
    agreement_figures,
    agreement_sums,
    live_counts,
    live_prompts,
)
from train.vocab import build_vocab, vocab_sha256

LOGGER = logging.getLogger(__name__)

FEW_CONVERSATIONS = 1000
WARM_UP_STEPS = 2  # of a benchmark, not timed


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient is NaN or infinite; the message names the batch."""


@dataclass
class Progress:
    """Where a run is; everything but the weights and the optimizer.

    Attributes:
        step: steps done.
        tokens: rows seen; supervised: those with a loss.
        elapsed_s: seconds of all sessions.
        best: figures of the best head so far.
    """

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    elapsed_s: float = 0.0
    best: dict[str, Any] | None = None


class Trainer:
    """One run: everything is loaded and checked before anything is written.

    Raises:
        ValueError, TypeError, FileNotFoundError: one sentence about what does not fit.
    """

    def __init__(self, config: FitConfig, accelerator: Accelerator) -> None:
        self.config = config
        self._accelerator = accelerator
        self._device = accelerator.device
        self._loss_config = config.loss_config()
        self._is_main = accelerator.is_main_process
        self._run = None if config.benchmark or config.output is None else RunFolder(config.output)
        if self._run is not None:
            self._run.check(resume=config.resume)
        train, held_out = (TokenShards(config.shards, name) for name in ("train", "validation"))
        self.target, self._tokenizer = load_for_training(config.target, config.dtype, self._device)
        check_shards(config.shards, self.target, self._tokenizer)
        self.vocab = _draft_vocab(config.draft_vocab, train)
        ids = None if self.vocab is None else torch.tensor(self.vocab["token_ids"])
        self._law = TargetLaw(self.target, ids)
        self.head = build_head(config, self.target).to(self._device)
        self._parameters = [each for each in self.head.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self._set_data(train, held_out)
        self.progress = Progress()
        self.num_steps = config.steps or self._plan.num_steps(config.epochs)
        self._identity = self._make_identity()
        if self._run is not None and config.resume:
            self._restore(self._run)
        self._start = time.perf_counter() - self.progress.elapsed_s
        longest = self.target.max_positions - config.live_tokens
        self._live = live_prompts(held_out, config.live_prompts, longest)

    def _set_data(self, train: TokenShards, held_out: TokenShards) -> None:
        config = self.config
        sources = [self._source("train"), self._source("validation")]
        limits = [len(each) if isinstance(each, CachedFeatures) else None for each in sources]
        pieces = Pieces.of(train, config.max_length, limits[0])
        if not len(pieces):
            raise ValueError(
                f"the shards in {config.shards!r} have no supervised row to learn from"
            )
        self.num_conversations = len(np.unique(pieces.conversations))
        self.num_supervised = int(pieces.num_supervised.sum())
        self._plan = Plan(pieces, config.batch_tokens, config.seed)
        self._loader = BatchLoader(train, sources[0], pieces, self._device, config.feature_noise)
        pieces = Pieces.of(held_out, config.max_length, limits[1])
        few = np.arange(np.searchsorted(np.cumsum(pieces.num_rows), config.eval_tokens) + 1)
        few = few[: len(pieces)]
        self._eval_batches = pack(few, pieces.num_rows, config.batch_tokens)
        self._eval_loader = BatchLoader(held_out, sources[1], pieces, self._device)

    def _source(self, split: str) -> FeatureSource:
        folder = self.config.features
        if folder is None:
            return TargetFeatures(self.target)
        source = CachedFeatures(folder, split, self._device, self.target.dtype)
        pairs = (
            (
                "token shards",
                source.meta["identity"]["shards"],
                shards_identity(self.config.shards),
            ),
            ("target", source.meta["target_sha256"], target_identity(self.target)),
        )
        for name, found, expected in pairs:
            if found != expected:
                raise ValueError(
                    f"the features in {folder!r} are of another {name}; "
                    "make them again with python -m train.features"
                )
        return source

    def _make_identity(self) -> dict[str, Any]:
        return self.config.deciding() | {
            "shards": shards_identity(self.config.shards),
            "target_sha256": target_identity(self.target),
            "first_weights": head_sha256(self.head),
            "draft_vocab": vocab_sha256(self.vocab),
            "num_supervised": self.num_supervised,
            "num_steps": self.num_steps,
        }

    def _restore(self, run: RunFolder) -> None:
        state = run.load_checkpoint(self._identity)
        if state is not None:
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
        if self._is_main:
            run.rewind_metrics(self.progress.step)

    def fit(self, bar: Any) -> None:
        """Trains to the end of the run; `bar` counts the steps."""
        assert self._run is not None
        config, window, since = self.config, _Window(), time.perf_counter()
        while not self._is_over():
            window.add(*self.train_step())
            step = self.progress.step
            bar.update()
            is_last = self._is_over()
            if step % config.log_every == 0 or is_last:
                synchronize(self._device)
                self._log_training(window.record(time.perf_counter() - since), bar)
                window, since = _Window(), time.perf_counter()
            if self._eval_batches and (step % config.eval_every == 0 or is_last):
                before = time.perf_counter()
                self._evaluate()
                since += time.perf_counter() - before
            if step % config.save_every == 0 or is_last:
                self._save()
        if self.progress.best is None:  # nothing was held out to choose by
            self._save_head("best")

    def _is_over(self) -> bool:
        minutes = self.config.limit_minutes
        is_late = minutes is not None and self.progress.elapsed_s >= 60 * minutes
        return self.progress.step >= self.num_steps or is_late

    def train_step(self) -> tuple[Tensor, int]:
        """One step of the optimizer: [K, 2] loss sums and counts by unrolled step, and rows."""
        chosen = self._plan.batch(self.progress.step)
        pieces = self._plan.pieces
        count = int(pieces.num_supervised[chosen].sum())
        self._optimizer.zero_grad(set_to_none=False)
        sums = torch.zeros(2 * self.config.unroll + len(chosen) + 1, device=self._device)
        mine = self._share(len(chosen))
        if len(mine):
            loss = self._loss(chosen[mine])
            (loss.total / count).backward()
            sums[: -len(chosen) - 1] = torch.cat([loss.step_sums, loss.step_counts])
            sums[torch.from_numpy(mine) + 2 * self.config.unroll] = loss.segment_sums
        if self._is_main:  # one clock for all processes
            sums[-1] = time.perf_counter() - self._start
        sums = self._add_up(sums)
        self._set_rate(float(sums[-1]))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip)
        self._check_finite(sums[2 * self.config.unroll : -1], norm, chosen)
        self._optimizer.step()
        num_rows = int(pieces.num_rows[chosen].sum())
        self.progress.step += 1
        self.progress.tokens += num_rows
        self.progress.supervised += count
        self.progress.elapsed_s = float(sums[-1])
        return sums[: 2 * self.config.unroll].view(2, -1).T, num_rows

    def _loss(self, chosen: Ints) -> BatchLoss:
        batch = self._loader.load(chosen, f"{self.config.seed} {self.progress.step}")
        with self._autocast():
            return batch_loss(
                self.head, self._embed(batch.token_ids), batch, self._law, self._loss_config
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        is_on = self.config.dtype == "bfloat16"
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_on)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.head.config.own_embeddings:
            embedded: Tensor = self.head.embed_tokens(token_ids)
            return embedded
        with torch.no_grad():
            return self.target.embed(token_ids)

    def _share(self, num_items: int) -> Ints:
        """Every process's share of a batch; the order, longest first, makes them alike."""
        return np.arange(
            self._accelerator.process_index, num_items, self._accelerator.num_processes
        )

    def _add_up(self, sums: Tensor) -> Tensor:
        """Adds gradients and sums over the processes, in one message."""
        if self._accelerator.num_processes == 1:
            return sums
        gradients = [each.grad if each.grad is not None else torch.zeros_like(each)
                     for each in self._parameters]  # fmt: skip
        message = torch.cat([sums, *(each.flatten() for each in gradients)])
        message = self._reduce(message)
        pieces = message.split([sums.numel(), *(each.numel() for each in gradients)])
        for parameter, piece in zip(self._parameters, pieces[1:], strict=True):
            parameter.grad = piece.view_as(parameter)
        return pieces[0]

    def _reduce(self, values: Tensor) -> Tensor:
        if self._accelerator.num_processes == 1:
            return values
        reduced: Tensor = self._accelerator.reduce(values.to(self._device), "sum")
        return reduced.to(values.device)

    def _set_rate(self, elapsed_s: float) -> None:
        """Warm-up, then a cosine to 0, over the steps or the minutes, whichever end first."""
        done = self.progress.step / self.num_steps
        if self.config.limit_minutes is not None:
            done = max(done, min(1.0, elapsed_s / (60 * self.config.limit_minutes)))
        rise = 1.0
        if self.config.warmup:
            rise = min(1.0, (done + 1 / self.num_steps) / self.config.warmup)
        rate = self.config.lr * rise * 0.5 * (1 + math.cos(math.pi * done))
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _check_finite(self, losses: Tensor, norm: Tensor, chosen: Ints) -> None:
        is_bad = ~losses.isfinite().cpu().numpy()
        if not is_bad.any() and bool(norm.isfinite()):
            return
        culprits = chosen[is_bad] if is_bad.any() else chosen
        numbers = sorted({int(i) for i in self._plan.pieces.conversations[culprits]})
        shown = ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
        what = "loss" if is_bad.any() else "gradient"
        raise NonFiniteLossError(
            f"the {what} is not finite at step {self.progress.step + 1}, in conversations {shown} "
            f"of {self.config.shards!r}; look at their features, or lower --lr"
        )

    def _log_training(self, record: dict[str, Any], bar: Any) -> None:
        progress = self.progress
        rate = self._optimizer.param_groups[0]["lr"]
        record = {
            "kind": "train",
            "step": progress.step,
            "tokens": progress.tokens,
            "lr": rate,
            "elapsed_s": round(progress.elapsed_s, 1),
        } | record
        bar.set_postfix(loss=record["loss"][0], tokens_per_s=record["tokens_per_s"])
        self._record(record)

    def _record(self, record: dict[str, Any]) -> None:
        """One line in the metrics and on the screen, and the same to the tracker."""
        if not self._is_main or self._run is None:
            return
        self._run.log(record)
        shown = " ".join(f"{key} {value}" for key, value in record.items() if key != "kind")
        tqdm.write(f"{record['kind']}: {shown}")
        values = {
            f"{record['kind']}/{name}": value
            for key, item in record.items()
            for name, value in _flat(key, item)
        }
        self._accelerator.log(values, step=record["step"])

    def _evaluate(self) -> None:
        assert self._run is not None
        config = self.config
        mine = [self._eval_batches[i] for i in self._share(len(self._eval_batches))]
        with self._autocast():
            batches = map(self._eval_loader.load, mine)
            pairs = ((batch, self._embed(batch.token_ids)) for batch in batches)
            sums = agreement_sums(self.head, pairs, self._law, config.unroll)
        prompts = [self._live[i] for i in self._share(len(self._live))]
        counts = live_counts(self.head, self.target, self._tokenizer, prompts, config.live_config())
        figures = agreement_figures(self._reduce(sums))
        if not all(map(math.isfinite, figures["loss"])):
            raise NonFiniteLossError(
                f"the loss on held-out conversations of {config.shards!r} is not finite at step "
                f"{self.progress.step}; make their features again, or lower --lr"
            )
        num_tokens, num_cycles = self._reduce(counts).tolist()
        figures["live_acceptance_length"] = (
            round(num_tokens / num_cycles, 4) if num_cycles else None
        )
        record = {"kind": "validation", "step": self.progress.step} | figures
        self._record(record)
        if _is_better(figures, self.progress.best):
            self.progress.best = record
            self._save_head("best")

    def _save(self) -> None:
        self._save_head("last")
        if not self._is_main or self._run is None:
            return
        state = {
            "identity": self._identity,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        self._run.save_checkpoint(state)

    def _save_head(self, name: str) -> None:
        """Writes the head in the dtype that it decodes in."""
        if not self._is_main or self._run is None:
            return
        head = DraftHead(self.head.config)
        head.load_state_dict(self.head.state_dict())
        self._run.save_head(name, head.to(DTYPES[self.config.dtype]), self._extras(), self.vocab)

    def _extras(self) -> dict[str, Any]:
        vocab = self.vocab or {}  # a file may hold the ids alone
        return {
            "draft_vocab_size": len(vocab["token_ids"]) if vocab else None,
            "draft_vocab_coverage": vocab.get("coverage"),
            "training": {
                "args": {
                    key: value
                    for key, value in asdict(self.config).items()
                    if key not in ("output", "resume", "shards", "features", "init")
                },
                "shards": self._identity["shards"],
                "first_weights": self._identity["first_weights"],
                "target_sha256": self._identity["target_sha256"],
                "num_conversations": self.num_conversations,
                "num_steps": self.num_steps,
                "step": self.progress.step,
                "tokens_seen": self.progress.tokens,
                "supervised_seen": self.progress.supervised,
                "elapsed_s": round(self.progress.elapsed_s, 1),
                "num_processes": self._accelerator.num_processes,
                "metrics": self.progress.best,
                **provenance(),
            },
        }

    def benchmark(self, num_steps: int) -> dict[str, Any]:
        """Times `num_steps` steps after two that are not timed."""
        for _ in range(WARM_UP_STEPS):
            self.train_step()
        synchronize(self._device)
        start, num_rows = time.perf_counter(), 0
        for _ in range(num_steps):
            num_rows += self.train_step()[1]
        synchronize(self._device)
        seconds = time.perf_counter() - start
        return {
            "tokens_per_s": round(num_rows / seconds, 1),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "steps": num_steps,
            "tokens": num_rows,
            "draft_vocab_size": self._law.size,
            "unroll": self.config.unroll,
            "has_cached_features": self.config.features is not None,
            "dtype": self.config.dtype,
            "num_threads": torch.get_num_threads(),
            **provenance(),
        }


class _Window:
    """What happened since the last line of the log."""

    def __init__(self) -> None:
        self._sums: Tensor | float = 0.0
        self._num_rows = 0

    def add(self, sums: Tensor, num_rows: int) -> None:
        self._sums = self._sums + sums.double().cpu()
        self._num_rows += num_rows

    def record(self, seconds: float) -> dict[str, Any]:
        assert isinstance(self._sums, Tensor)
        means = self._sums[:, 0] / self._sums[:, 1].clamp(min=1)
        return {
            "loss": [round(each, 6) for each in means.tolist()],
            "tokens_per_s": round(self._num_rows / seconds, 1),
        }


def build_head(config: FitConfig, target: TargetModel) -> DraftHead:
    """The head that a run starts from, in float32.

    Raises:
        FileNotFoundError, ValueError: if `config.init` is no head, or not one for this target.
    """
    if config.init is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return DraftHead(DraftHeadConfig.for_target(target.config, bias=config.bias))
    loaded = load_head(config.init)
    check_fit(loaded.config, target.config, target.vocabulary_size)
    tensors = loaded.state_dict()
    if loaded.config.bias and not config.bias:
        LOGGER.warning(
            "the bias of fc is dropped; training has to make up for it (--bias keeps it)"
        )
        del tensors["fc.bias"]
    elif config.bias and not loaded.config.bias:
        tensors["fc.bias"] = torch.zeros(loaded.config.hidden_size)
    head = DraftHead(replace(loaded.config, bias=config.bias))
    head.load_state_dict(tensors)
    if head.config.own_embeddings:
        head.embed_tokens.requires_grad_(False)
    return head.float()


def _draft_vocab(choice: str, shards: TokenShards) -> dict[str, Any] | None:
    if choice == "full":
        return None
    return build_vocab(shards, int(choice)) if choice.isdigit() else read_vocab(choice)


def _is_better(figures: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """By live acceptance length; by loss where there is none."""
    if best is None:
        return True
    new, old = figures["live_acceptance_length"], best["live_acceptance_length"]
    if new is None or old is None:
        return bool(figures["loss"][0] < best["loss"][0])
    return bool(new > old)


def _flat(key: str, item: Any) -> list[tuple[str, float]]:
    """A figure, or one figure by unrolled step, as named numbers."""
    if isinstance(item, list):
        return [(f"{key}_{number}", value) for number, value in enumerate(item, start=1)]
    return [(key, item)] if isinstance(item, int | float) else []


def fit(config: FitConfig) -> None:
    """Runs `config` from its beginning, or its checkpoint, to its end.

    Raises:
        ValueError, TypeError, FileNotFoundError: one sentence about what does not fit.
        NonFiniteLossError: naming the batch.
        OSError: if the machine fails, for example on a full disk.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tracker = config.tracker
    if tracker == "auto":
        tracker = "tensorboard" if find_spec("tensorboard") else "none"
    has_tracker = tracker != "none" and config.benchmark is None
    accelerator = Accelerator(
        cpu=config.device == "cpu",
        log_with=tracker if has_tracker else None,
        project_dir=config.output if has_tracker else None,
    )
    trainer = Trainer(config, accelerator)
    if config.benchmark is not None:
        figures = trainer.benchmark(config.benchmark)
        if accelerator.is_main_process:
            print(json.dumps(figures))
        return
    accelerator.wait_for_everyone()  # all have looked at the folder before anything is written
    if has_tracker:
        accelerator.init_trackers("tracker")
    if accelerator.is_main_process:
        print(
            f"{trainer.num_conversations} conversations, {trainer.num_supervised} supervised "
            f"tokens, {trainer.num_steps} steps"
        )
        if trainer.num_conversations < FEW_CONVERSATIONS:
            LOGGER.warning("fewer than %d conversations are a trial", FEW_CONVERSATIONS)
    is_hidden = None if accelerator.is_main_process else True
    start = trainer.progress.step
    with tqdm(total=trainer.num_steps, initial=start, unit="step", disable=is_hidden) as bar:
        trainer.fit(bar)
    if accelerator.is_main_process and config.output is not None:
        RunFolder(config.output).plot()
    if has_tracker:
        accelerator.end_training()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 2 after an error, told in one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m train.fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    FitConfig.add_arguments(parser)
    args = parser.parse_args(argv)
    return run(lambda: fit(FitConfig.from_args(args)))


if __name__ == "__main__":
    raise SystemExit(main())
