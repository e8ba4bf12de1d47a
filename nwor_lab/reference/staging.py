# SPDX-License-Identifier: Apache-2.0
"""Holding a window's keys and values back from the pages until the verifier has decided."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from nwor_lab.model.traffic import Traffic
from nwor_lab.reference.cache import LayerContext


@dataclass
class Counts:
    """What became of the windows so far. `staged_tokens = committed_tokens + rejected_tokens`, always.

    Attributes:
        windows: windows committed.
        stage_operations: layers x tokens; 40 layers of 48 tokens are 1,920 operations.
        staged_tokens: the unique tokens behind them, 48 there.
        committed_tokens, rejected_tokens: where they went.
        cancelled: windows dropped before a decision.
        fallbacks: windows that took direct writes instead, since something failed.
    """

    windows: int = 0
    stage_operations: int = 0
    staged_tokens: int = 0
    committed_tokens: int = 0
    rejected_tokens: int = 0
    cancelled: int = 0
    fallbacks: int = 0


@dataclass
class Staged:
    """One layer's rows uint8 `[2, M, H, W]`, which of its M tokens are there, and the context that places them."""

    context: LayerContext
    rows: Tensor
    present: Tensor


class StagingBuffer:
    """Takes the writes of every layer: a window's rows wait here, all others go to the pages at once.

    One window a step: `begin` once before the forward, `write` in every layer, then `commit` once after sampling, or
    `cancel`. Slots belong to the window, not to a layer, and every layer's rows refer to them by token index.

    Any error inside a window makes it fall back: what was staged is written through to the pages, the rest of the
    window is written directly, and `counts.fallbacks` says so. No token is lost either way.

    Args:
        layers: the numbers of the layers that take part. Others, such as a drafter's, are written at once.
        capacity: most tokens that a window may hold.
        traffic: ledger of what staging and commits move.
        fused: one commit for all layers, and no launch to stage, as mode `stage` has it; else one launch a layer for
            each.
    """

    def __init__(self, layers: Collection[int], capacity: int, traffic: Traffic, *, fused: bool = True) -> None:
        self.layers, self.capacity, self.traffic, self.fused = layers, capacity, traffic, fused
        self.counts = Counts()
        self.ready = False
        self.last_error: Exception | None = None
        self._rows: Tensor | None = None
        self._close()

    @property
    def state(self) -> str:
        """`staging` while a window's rows are held back, else `direct`."""
        return "staging" if self._staging else "direct"

    def finish_warm_up(self) -> None:
        """From now on windows are real. Profiling and dummy runs before this are neither staged nor counted."""
        self.ready = True

    def begin(self, slot_mapping: Tensor, held_rows: Tensor) -> bool:
        """Hold back the batch rows `held_rows` int64 `[M]` of `slot_mapping` int64 `[T]`; say if they will be.

        Rows without a slot (negative) are padding and part of no window.

        Raises:
            RuntimeError: the window before was neither committed nor cancelled; it stays as it is.
        """
        if self._rows is not None:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        if not self.ready or not len(held_rows) or is_fake(slot_mapping):
            return False
        self._rows, self._batch_size = held_rows[slot_mapping[held_rows] >= 0], len(slot_mapping)
        self.slots = slot_mapping[self._rows]  # a copy: the drafter reuses the tensor before the window is over
        self.token_mask = torch.zeros(len(self.slots), dtype=torch.bool)
        self._staging = True
        if len(self.slots) > self.capacity:
            self._fall_back(OverflowError(f"a window of {len(self.slots)} tokens, but staging holds {self.capacity}"))
        return self._staging

    def write(self, context: LayerContext, key: Tensor, value: Tensor, slot_mapping: Tensor, launches: int = 1) -> None:
        """Take one layer's `key, value [T, H, D]` for `slot_mapping` int64 `[T]`, in place of `context.write`.

        launches: what the write of rows that are not held back counts, 0 where attention's launch makes it.
        """
        if is_fake(key):
            return
        if self._rows is None or not self._staging or context.layer not in self.layers:
            context.write(key, value, slot_mapping)
            return
        try:
            if not torch.equal(slot_mapping[self._rows], self.slots):
                raise ValueError(f"layer {context.layer} has other slots than its window")
            self.stage(context, torch.arange(len(self._rows)), key[self._rows], value[self._rows])
        except Exception as error:  # noqa: BLE001 - any error means direct writes
            self._fall_back(error)
            context.write(key, value, slot_mapping)
            return
        context.write(key, value, slot_mapping.index_fill(0, self._rows, -1), launches)

    def stage(self, context: LayerContext, token_indices: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep `key, value [T, H, D]`, the rows of the window's tokens `token_indices` int64 `[T]`, in any order.

        Raises:
            RuntimeError: no window is open. IndexError: no such token, or one that the layer has staged already.
            TypeError, ValueError: rows that do not fit the layer's cache.
        """
        if not self._staging:
            raise RuntimeError("no window is open: begin one before the forward")
        new, size, places = context.encode(key, value), len(self.slots), token_indices.tolist()
        if not set(places) <= set(range(size)):
            raise IndexError(f"token indices {places} in a window of {size} tokens")
        entry = self.entries.get(context.layer)
        if entry is None:
            context.load(self.slots)  # slots that reach out of the cache show here, not at the commit
            rows = torch.full((2, size, *new.shape[2:]), 0xFF, dtype=torch.uint8)
            entry = Staged(context, rows, torch.zeros(size, dtype=torch.bool))
        if entry.present[token_indices].any() or len(set(places)) < len(places):
            raise IndexError(f"layer {context.layer} stages a token twice: {places}")
        entry.rows[:, token_indices] = new
        entry.present[token_indices] = self.token_mask[token_indices] = True
        self.entries[context.layer] = entry
        self.stage_operations += len(places)
        read, written = 2 * key.numel() * key.element_size(), len(places) * context.row_bytes
        self.traffic.count("stage", read=read, written=written, launches=0 if self.fused else 1)

    def tail(self, layer: int, token_indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The staged keys and values `[2, T, H, D]` of `token_indices`, as attention must see them.

        Not counted: in mode `stage` the kernel that attends is the kernel that stages, on one read.
        """
        entry = self.entries[layer]
        if not entry.present[token_indices].all():
            raise IndexError(f"layer {layer} has not staged all of {token_indices.tolist()}")
        return entry.context.decode(entry.rows[:, token_indices], dtype)

    def commit(self, kept: Tensor) -> None:
        """Close the window; `kept` bool `[T]` says of each row of the batch whether it stays.

        Without a window, and after a fallback, there is nothing left to write.

        Raises:
            ValueError: `kept` is no mask of the batch's rows; the window stays open.
        """
        if self._rows is None:
            return
        if kept.dtype != torch.bool or kept.shape != (self._batch_size,):
            raise ValueError(f"kept is {kept.dtype} {list(kept.shape)}, not bool [{self._batch_size}]")
        kept = kept[self._rows]
        if self._staging:
            try:
                self.copy_to_pages(kept)
            except Exception as error:  # noqa: BLE001
                self._fall_back(error, kept)
            else:
                tokens, committed = int(self.token_mask.sum()), int(kept.sum())
                self.counts.windows += 1
                self.counts.stage_operations += self.stage_operations
                self.counts.staged_tokens += tokens
                self.counts.committed_tokens += committed
                self.counts.rejected_tokens += tokens - committed
        self._close()

    def copy_to_pages(self, kept: Tensor) -> None:
        """Copy the staged rows of `kept`, bool `[M]`, to their slots in every layer, or in none.

        Raises:
            RuntimeError: a layer has not staged every token. Whatever a layer's copy raises, after every cache has
                been restored.
        """
        if len(self.entries) != len(self.layers):
            raise RuntimeError(f"layers {sorted(self.entries)} staged, but there are {len(self.layers)}")
        for layer, entry in self.entries.items():
            if not entry.present.all():
                raise RuntimeError(f"layer {layer} staged {int(entry.present.sum())} of {len(self.slots)} tokens")
        slots, moved = self.slots[kept], 0
        # Not counted: one launch for all layers has no half-way point to come back from.
        before = [(entry.context, entry.context.load(slots)) for entry in self.entries.values()]
        try:
            for entry in self.entries.values():
                entry.context.store(entry.rows[:, kept], slots)
                moved += len(slots) * entry.context.row_bytes
        except Exception:
            for context, rows in before:
                context.store(rows, slots)
            raise
        self.traffic.count("commit", read=moved, written=moved, launches=1 if self.fused else len(self.layers))

    def cancel(self) -> None:
        """Drop the window, if one is open: unless it fell back, the pages are as they were before `begin`."""
        self.counts.cancelled += int(self._staging)
        self._close()

    def _fall_back(self, error: Exception, kept: Tensor | None = None) -> None:
        """Write through what was staged, of it the rows of `kept` if the verifier has decided."""
        self.counts.fallbacks += 1
        self.last_error = error
        for entry in self.entries.values():
            write = entry.present if kept is None else entry.present & kept
            entry.context.store(entry.rows[:, write], self.slots[write])
            moved = int(write.sum()) * entry.context.row_bytes
            entry.context.traffic.count("write", read=moved, written=moved, launches=1)
        self._staging = False

    def _close(self) -> None:
        self._staging = False
        self._rows = None
        self.slots = torch.empty(0, dtype=torch.int64)
        self.token_mask = torch.empty(0, dtype=torch.bool)
        self.entries: dict[int, Staged] = {}
        self.stage_operations = 0


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no data to write: a tracer's fake tensor, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"
