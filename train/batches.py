"""Which rows are trained on when: pieces of conversations, shuffled and packed into batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from train.features import FeatureRequest, FeatureSource
from train.losses import Batch, add_feature_noise, training_rows
from train.shards import TokenShards

# An epoch is packed to know its steps, which takes a while where --epochs only means "for long".
COUNTED_EPOCHS = 16
MOST_STEPS = 2.0**53

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Pieces of conversations; each supervised row of the split is in exactly one.

    Attributes:
        conversations: [N] int64.
        starts, stops: [N] int64, rows of the conversation; at most `max_length`.
        num_supervised: [N] int64, >= 1.
    """

    conversations: Ints
    starts: Ints
    stops: Ints
    num_supervised: Ints

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_rows(self) -> Ints:
        """[N] int64."""
        rows: Ints = self.stops - self.starts
        return rows

    @classmethod
    def of(
        cls, shards: TokenShards, max_length: int, num_conversations: int | None = None
    ) -> "Pieces":
        """Cuts the first `num_conversations` into pieces; rows that teach nothing are left out."""
        found: list[tuple[int, int, int, int]] = []
        for i in range(len(shards) if num_conversations is None else num_conversations):
            is_supervised = training_rows(*shards.conversation(i)).is_supervised.numpy()
            for start in range(0, len(is_supervised), max_length):
                rows = np.flatnonzero(is_supervised[start : start + max_length])
                if len(rows):
                    found.append((i, start, start + int(rows[-1]) + 1, len(rows)))
        table = np.asarray(found, dtype=np.int64).reshape(-1, 4)
        return cls(*(table[:, column] for column in range(4)))


class Plan:
    """The order of a run: every piece once an epoch, in batches of whole pieces.

    The batch of a step follows from the seed and the step alone, so a resumed run goes on where it
    was and any number of processes share the same batches.

    Args:
        pieces: what there is, at least one.
        batch_tokens: most rows of a batch; a longer piece is a batch of its own.
        seed: of the order.
    """

    def __init__(self, pieces: Pieces, batch_tokens: int, seed: int) -> None:
        self.pieces = pieces
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._num_rows = pieces.num_rows
        self._first_steps = [0]
        self._current: tuple[int, list[Ints]] = (-1, [])

    def num_steps(self, num_epochs: float) -> int:
        """Steps of so many epochs, at least one; beyond COUNTED_EPOCHS as many as those had."""
        counted = min(int(num_epochs), COUNTED_EPOCHS)
        steps = sum(len(self._epoch(epoch)) for epoch in range(counted))
        if counted == COUNTED_EPOCHS:
            return max(1, round(min(steps * (num_epochs / counted), MOST_STEPS)))
        return max(1, steps + round((num_epochs - counted) * len(self._epoch(counted))))

    def batch(self, step: int) -> Ints:
        """The pieces of batch `step` >= 0, longest first."""
        while self._first_steps[-1] <= step:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[-1] + len(self._epoch(epoch)))
        epoch = int(np.searchsorted(self._first_steps, step, side="right")) - 1
        return self._epoch(epoch)[step - self._first_steps[epoch]]

    def _epoch(self, epoch: int) -> list[Ints]:
        if self._current[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self.pieces))
            self._current = (epoch, list(pack(order, self._num_rows, self._batch_tokens)))
        return self._current[1]


def pack(order: Ints, num_rows: Ints, batch_tokens: int) -> list[Ints]:
    """Cuts `order` into batches of at most `batch_tokens` rows (or one piece), longest first."""
    batches: list[Ints] = []
    first = total = 0
    for i, piece in enumerate(order):
        if i > first and total + num_rows[piece] > batch_tokens:
            batches.append(order[first:i])
            first, total = i, 0
        total += num_rows[piece]
    if first < len(order):
        batches.append(order[first:])
    return [batch[np.argsort(-num_rows[batch], kind="stable")] for batch in batches]


class BatchLoader:
    """Reads pieces as packed rows.

    Args:
        shards: the tokens.
        source: the features.
        pieces: what `load` counts by.
        device: of the batches.
        feature_noise: amplitude of the noise on the features, 0 for none.
    """

    def __init__(
        self,
        shards: TokenShards,
        source: FeatureSource,
        pieces: Pieces,
        device: torch.device,
        feature_noise: float = 0.0,
    ) -> None:
        self._shards = shards
        self._source = source
        self._pieces = pieces
        self._device = device
        self._feature_noise = feature_noise

    def load(self, chosen: Sequence[int] | Ints, noise_seed: str = "") -> Batch:
        """The rows of some pieces, at least one, in their order.

        Args:
            chosen: the pieces.
            noise_seed: of this batch; the noise of a piece does not depend on what is beside it.
        """
        requests, rows = [], []
        for piece in chosen:
            conversation = int(self._pieces.conversations[piece])
            start, stop = int(self._pieces.starts[piece]), int(self._pieces.stops[piece])
            ids, mask = self._shards.conversation(conversation)
            requests.append(FeatureRequest(conversation, ids, start, stop + 1))
            rows.append((training_rows(ids, mask), slice(start, stop)))
        features = self._source.features(requests)
        inputs = [
            self._with_noise(each[:-1], f"{noise_seed} {request.conversation} {request.start}")
            for each, request in zip(features, requests, strict=True)
        ]
        return Batch(
            token_ids=self._cat([row.token_ids[part] for row, part in rows]),
            position_ids=self._cat([row.position_ids[part] for row, part in rows]),
            is_supervised=self._cat([row.is_supervised[part] for row, part in rows]),
            features=torch.cat(inputs),
            targets=torch.cat([each[1:] for each in features]),
            lengths=[len(each) for each in inputs],
        )

    def _cat(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(self._device)

    def _with_noise(self, features: Tensor, seed: str) -> Tensor:
        if not self._feature_noise:
            return features
        digest = sha256(seed.encode()).digest()
        return add_feature_noise(features, self._feature_noise, int.from_bytes(digest[:7], "big"))
