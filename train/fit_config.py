"""The settings of a training run."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from eagle_fsd.config import TreeConfig
from train.features import DTYPES
from train.losses import LossConfig
from train.validation import LiveConfig

DEVICES = ("auto", "cpu")
TRACKERS = ("auto", "tensorboard", "none")


@dataclass(frozen=True)
class FitConfig:
    """The settings of a run; each is a flag of the command.

    Raises:
        ValueError: if a value is out of its range.
    """

    shards: str
    target: str
    output: str | None = None
    features: str | None = None
    init: str | None = None
    draft_vocab: str = "full"
    unroll: int = 1
    unroll_decay: float = 0.8
    smooth_l1: float = 0.0
    feature_noise: float = 0.0
    steps: int | None = None
    epochs: float = 1.0
    limit_minutes: float | None = None
    batch_tokens: int = 4096
    max_length: int = 2048
    lr: float = 2e-3
    warmup: float = 0.02
    weight_decay: float = 0.0
    clip: float = 0.5
    bias: bool = False
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_tokens: int = 32768
    live_prompts: int = 8
    live_tokens: int = 64
    live_tree: str = "59,6,10"
    save_every: int = 100
    resume: bool = False
    tracker: str = "auto"
    num_threads: int | None = None
    benchmark: int | None = None

    def __post_init__(self) -> None:
        whole = "unroll batch_tokens max_length log_every eval_every eval_tokens save_every steps"
        self._check_range((*whole.split(), "num_threads", "benchmark", "live_tokens"), 1)
        self._check_range(("weight_decay", "feature_noise", "live_prompts", "seed"), 0)
        self._check_range(("lr", "clip", "epochs", "limit_minutes"), 0, is_open=True)
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup must be a share in [0, 1) of the run, got {self.warmup}")
        choices = {"dtype": tuple(DTYPES), "device": DEVICES, "tracker": TRACKERS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.output is None and self.benchmark is None:
            raise ValueError("output is needed: name a folder with --output")
        self.loss_config()
        self.live_config()

    def _check_range(self, names: Sequence[str], least: int, *, is_open: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if not least <= value < math.inf or (is_open and value == least):
                raise ValueError(f"{name} must be {'>' if is_open else '>='} {least}, got {value}")

    def loss_config(self) -> LossConfig:
        """What is minimised."""
        return LossConfig(self.unroll, self.unroll_decay, self.smooth_l1)

    def live_config(self) -> LiveConfig:
        """The live check."""
        tree = TreeConfig.parse(self.live_tree) or TreeConfig.default("cpu")
        return LiveConfig(self.live_prompts, self.live_tokens, tree)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        def add(name: str, help: str, **options: Any) -> None:
            default = getattr(cls, name.removeprefix("--").replace("-", "_"), None)
            shown = "" if default is None else f" (default {default})"
            parser.add_argument(name, help=help + shown, default=default, **options)

        add("--shards", "token shards of train.prepare", metavar="DIR", required=True)
        add("--target", "demo, a hub id, a folder or a .gguf file", required=True)
        add("--output", "folder of the run", metavar="DIR")
        add("--features", "folder of train.features; computed as they are needed without it")
        add("--init", "head to start from: demo, a folder or a hub id", metavar="HEAD")
        add("--draft-vocab", "full, a file of train.vocab, or a number of tokens")
        add("--unroll", "steps in which the head is fed its own features", type=int)
        add("--unroll-decay", "weight of an unrolled step over that of the one before", type=float)
        add("--smooth-l1", "weight of SmoothL1 on the features", type=float)
        add("--feature-noise", "amplitude of uniform noise on the features, EAGLE: 0.2", type=float)
        add("--steps", "optimizer steps, instead of --epochs", type=int)
        add("--epochs", "passes over the shards", type=float)
        add("--limit-minutes", "end by then, the schedule made to fit", type=float)
        add("--batch-tokens", "rows of a batch, over all processes", type=int)
        add("--max-length", "rows of a conversation that see each other", type=int)
        add("--lr", "peak learning rate", type=float)
        add("--warmup", "share of the run in which the rate rises", type=float)
        add("--weight-decay", "of AdamW", type=float)
        add("--clip", "largest norm of the gradient", type=float)
        add("--bias", "whether fc has a bias; other engines want none",
            action=argparse.BooleanOptionalAction)  # fmt: skip
        add("--dtype", "of the target and of autocast", choices=list(DTYPES))
        add("--device", "auto or cpu", choices=DEVICES)
        add("--seed", "of the first weights, the order and the noise", type=int)
        add("--log-every", "steps", type=int)
        add("--eval-every", "steps", type=int)
        add("--eval-tokens", "held-out rows looked at", type=int)
        add("--live-prompts", "held-out prompts decoded, 0 for none", type=int)
        add("--live-tokens", "new tokens of each", type=int)
        add("--live-tree", "N,DEPTH,K")
        add("--save-every", "steps", type=int)
        add("--resume", "go on from the folder's checkpoint", action="store_true")
        add("--tracker", "auto is tensorboard where it is installed", choices=TRACKERS)
        add("--num-threads", "CPU threads", type=int)
        add("--benchmark", "time so many steps, print tokens/s, write nothing", type=int)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def deciding(self) -> dict[str, Any]:
        """The settings that the weights depend on, with those that the data decide left out."""
        free = {
            "shards", "output", "features", "init", "draft_vocab", "steps", "epochs", "log_every",
            "limit_minutes", "eval_every", "eval_tokens", "live_prompts", "live_tokens",
            "live_tree", "save_every", "resume", "tracker", "num_threads", "benchmark", "device",
        }  # fmt: skip
        return {name: value for name, value in asdict(self).items() if name not in free}
