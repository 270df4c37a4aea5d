"""A preallocated key/value cache whose tree rows can be kept in part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one attention layer in buffers that are written in place.

    Sliding-window layers keep all rows too: which of them a query sees is the mask's business, and
    a rolled-back row can then never be one that was thrown away.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows = 0
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: Tensor) -> Tensor:
        batch, heads, _, head_dim = states.shape
        return states.new_empty((batch, heads, self.capacity, head_dim))

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [B, heads, T, head_dim]; returns all keys and all values, as views."""
        start, stop = self.num_rows, self.num_rows + key_states.shape[2]
        if not self.is_initialized or not self._fits(key_states):
            self._start_over(key_states, value_states)
        if stop > self.capacity:
            self.grow(max(stop, 2 * self.capacity))
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        self.num_rows = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _fits(self, key_states: Tensor) -> bool:
        return (
            self.keys is not None
            and self.keys.dtype == key_states.dtype
            and self.keys.device == key_states.device
        )

    def _start_over(self, key_states: Tensor, value_states: Tensor) -> None:
        """Follows a model that was moved or converted since the last request."""
        if self.num_rows:
            raise RuntimeError(
                "the model's dtype or device changed in the middle of a request; start a new "
                "request"
            )
        self.lazy_initialization(key_states, value_states)

    def grow(self, capacity: int) -> None:
        """Enlarges the buffers to `capacity` rows, keeping the rows written so far."""
        self.capacity = capacity
        if self.keys is None or self.values is None:
            return
        keys, values = self._buffer(self.keys), self._buffer(self.values)
        keys[:, :, : self.num_rows] = self.keys[:, :, : self.num_rows]
        values[:, :, : self.num_rows] = self.values[:, :, : self.num_rows]
        self.keys, self.values = keys, values

    def keep(self, num_prefix: int, rows: Tensor) -> None:
        """Keeps the first `num_prefix` rows and, right behind them, the later `rows` [M]."""
        if self.keys is not None and self.values is not None:
            stop = num_prefix + rows.numel()
            rows = rows.to(self.keys.device)
            # index_select copies before anything is written, so overlapping source and goal are
            # safe.
            self.keys[:, :, num_prefix:stop] = self.keys.index_select(2, rows)
            self.values[:, :, num_prefix:stop] = self.values.index_select(2, rows)
        self.num_rows = num_prefix + rows.numel()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_rows + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_rows

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.num_rows = 0

    def reserve(self, capacity: int) -> None:
        """Forgets all rows and makes room for `capacity`, in the same buffer if it is large."""
        self.num_rows = 0
        if self.capacity < capacity:
            self.grow(capacity)

    def truncate(self, num_rows: int) -> None:
        """Drops all rows from `num_rows` on."""
        self.num_rows = min(self.num_rows, num_rows)


class PreallocatedCache(Cache):
    """One `PreallocatedLayer` a layer, in the form that transformers models take as `cache=`."""

    layers: list[PreallocatedLayer]  # type: ignore[assignment]

    def __init__(self, num_layers: int, capacity: int = 0) -> None:
        super().__init__(layers=[PreallocatedLayer(capacity) for _ in range(num_layers)])

    @property
    def num_rows(self) -> int:
        """Rows written so far, the same in every layer."""
        return self.layers[0].num_rows

    def reserve(self, capacity: int) -> None:
        """Forgets all rows and makes room for `capacity`."""
        for layer in self.layers:
            layer.reserve(capacity)

    def commit(self, num_prefix: int, path: list[int]) -> None:
        """Keeps the prefix and the nodes of an accepted path, drops every other row.

        Args:
            num_prefix: rows before the tree.
            path: tree rows to keep, ascending; the root's row 0 included. They need not be
                contiguous.
        """
        num_kept = len(path)
        if path == list(range(num_kept)):  # in place already
            for layer in self.layers:
                layer.truncate(num_prefix + num_kept)
            return
        rows = torch.tensor(path) + num_prefix
        for layer in self.layers:
            layer.keep(num_prefix, rows)
