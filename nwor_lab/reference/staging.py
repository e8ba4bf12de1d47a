# SPDX-License-Identifier: Apache-2.0
"""Holding a window's keys and values back from the pages until the verifier has decided."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from nwor_lab.reference.cache import LayerContext


@dataclass
class Staged:
    """One layer's rows uint8 `[2, M, H, W]`, which of its M tokens are there, and the context that places them."""

    context: LayerContext
    rows: Tensor
    present: Tensor


class StagingBuffer:
    """The rows of one window of M tokens, layer by layer.

    Slots belong to the window, not to a layer, and every layer's rows refer to them by token index.

    Args:
        slots: int64 `[M]`.
        fused: count one launch to commit all layers, and none to stage, as mode `stage` has it; else one a layer for
            each.

    Attributes:
        entries: what each layer has staged.
        token_mask: bool `[M]`, the tokens that some layer has staged.
        stage_operations: layers x tokens.
    """

    def __init__(self, slots: Tensor, *, fused: bool = True) -> None:
        self.slots, self.fused = slots, fused
        self.entries: dict[int, Staged] = {}
        self.token_mask = torch.zeros(len(slots), dtype=torch.bool)
        self.stage_operations = 0

    def stage(self, context: LayerContext, token_indices: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep `key, value [T, H, D]`, the rows of the window's tokens `token_indices` int64 `[T]`, in any order."""
        new, size = context.encode(key, value), len(self.slots)
        entry = self.entries.get(context.layer)
        if entry is None:
            rows = torch.full((2, size, *new.shape[2:]), 0xFF, dtype=torch.uint8)
            entry = self.entries[context.layer] = Staged(context, rows, torch.zeros(size, dtype=torch.bool))
        entry.rows[:, token_indices] = new
        entry.present[token_indices] = self.token_mask[token_indices] = True
        self.stage_operations += len(token_indices)
        read, written = 2 * key.numel() * key.element_size(), len(token_indices) * context.row_bytes
        context.traffic.count("stage", read=read, written=written, launches=0 if self.fused else 1)

    def tail(self, layer: int, token_indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The staged keys and values `[2, T, H, D]` of `token_indices`, as attention must see them.

        Not counted: in mode `stage` the kernel that attends is the kernel that stages, on one read.
        """
        entry = self.entries[layer]
        return entry.context.decode(entry.rows[:, token_indices], dtype)

    def commit(self, kept: Tensor, layers: Collection[int]) -> None:
        """Copy the staged rows of `kept`, bool `[M]`, to their slots in all `layers`, or in none.

        Raises:
            RuntimeError: a layer has not staged every token. Whatever a layer's copy raises, after every cache has
                been restored.
        """
        for layer in layers:
            if layer not in self.entries or not self.entries[layer].present.all():
                raise RuntimeError(f"layer {layer} has not staged all of the window's {len(self.slots)} tokens")
        slots = self.slots[kept]
        # Not counted: one launch for all layers has no half-way point to come back from.
        before = [(entry.context, entry.context.load(slots)) for entry in self.entries.values()]
        try:
            for entry in self.entries.values():
                entry.context.store(entry.rows[:, kept], slots)
        except Exception:
            for context, rows in before:
                context.store(rows, slots)
            raise
        for n, (context, _) in enumerate(before):
            moved = len(slots) * context.row_bytes
            context.traffic.count("commit", read=moved, written=moved, launches=int(n == 0 or not self.fused))

    def write_through(self, kept: Tensor) -> None:
        """Write what is there of the rows of `kept`, bool `[M]`, each layer by itself."""
        for entry in self.entries.values():
            write = entry.present & kept
            entry.context.store(entry.rows[:, write], self.slots[write])
            moved = int(write.sum()) * entry.context.row_bytes
            entry.context.traffic.count("write", read=moved, written=moved, launches=1)


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


class KVCacheInterceptor:
    """Takes the writes of every layer: a window's rows go to a `StagingBuffer`, all others to the pages at once.

    One window a step: `begin` once before the forward, `write` in every layer, then `commit` once after sampling, or
    `cancel`. Any error inside a window makes it fall back: what was staged is written through to the pages, the rest
    of the window is written directly, and `counts.fallbacks` says so. No token is lost either way.

    Args:
        layers: the numbers of the layers that take part. Others, such as a drafter's, are written at once.
        capacity: most tokens that a window may hold.
        fused: as a `StagingBuffer` has it.

    Attributes:
        ready: False during profiling and dummy runs, which are neither staged nor counted.
        buffer: the open window's, None where writes are direct.
    """

    def __init__(self, layers: Collection[int], capacity: int, *, fused: bool = True) -> None:
        self.layers, self.capacity, self.fused = layers, capacity, fused
        self.counts = Counts()
        self.ready = False
        self.last_error: Exception | None = None
        self.buffer: StagingBuffer | None = None
        self._held: Tensor | None = None  # rows of the open window, also when it has fallen back

    @property
    def state(self) -> str:
        """`staging` while a window's rows are held back, else `direct`."""
        return "staging" if self.buffer else "direct"

    def begin(self, slot_mapping: Tensor, held_rows: Tensor) -> bool:
        """Hold back the batch rows `held_rows` int64 `[M]` of `slot_mapping` int64 `[T]`; say if they will be.

        Rows without a slot (negative) are padding and part of no window.

        Raises:
            RuntimeError: the window before was neither committed nor cancelled; it stays as it is.
        """
        if self._held is not None:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        if not self.ready or not len(held_rows) or is_fake(slot_mapping):
            return False
        self._held = held_rows[slot_mapping[held_rows] >= 0]
        # Its slots are a copy: the drafter reuses the tensor before the window is over.
        self.buffer = StagingBuffer(slot_mapping[self._held], fused=self.fused)
        if len(self._held) > self.capacity:
            self._fall_back(OverflowError(f"a window of {len(self._held)} tokens, but staging holds {self.capacity}"))
        return self.state == "staging"

    def write(self, context: LayerContext, key: Tensor, value: Tensor, slot_mapping: Tensor, launches: int = 1) -> None:
        """Take one layer's `key, value [T, H, D]` for `slot_mapping` int64 `[T]`, in place of `context.write`.

        launches: what the write of rows that are not held back counts, 0 where attention's launch makes it.
        """
        if is_fake(key):
            return
        if self.buffer is None or self._held is None or context.layer not in self.layers:
            context.write(key, value, slot_mapping)
            return
        try:
            if not torch.equal(slot_mapping[self._held], self.buffer.slots):
                raise ValueError(f"layer {context.layer} has other slots than its window")
            self.buffer.stage(context, torch.arange(len(self._held)), key[self._held], value[self._held])
        except Exception as error:  # noqa: BLE001 - any error means direct writes
            self._fall_back(error)
            context.write(key, value, slot_mapping)
        else:
            context.write(key, value, slot_mapping.index_fill(0, self._held, -1), launches)

    def commit(self, kept: Tensor) -> None:
        """Close the window; `kept` bool `[T]` says of each row of the batch whether it stays.

        Without a window, and after a fallback, there is nothing left to write.
        """
        if self.buffer and self._held is not None:
            kept, buffer = kept[self._held], self.buffer
            try:
                buffer.commit(kept, self.layers)
            except Exception as error:  # noqa: BLE001
                self._fall_back(error, kept)
            else:
                staged, committed = int(buffer.token_mask.sum()), int(kept.sum())
                self.counts.windows += 1
                self.counts.stage_operations += buffer.stage_operations
                self.counts.staged_tokens += staged
                self.counts.committed_tokens += committed
                self.counts.rejected_tokens += staged - committed
        self.buffer = self._held = None

    def cancel(self) -> None:
        """Drop the window, if one is open: unless it fell back, the pages are as they were before `begin`."""
        self.counts.cancelled += self.state == "staging"
        self.buffer = self._held = None

    def _fall_back(self, error: Exception, kept: Tensor | None = None) -> None:
        """Write through what was staged, of it the rows of `kept` if the verifier has decided."""
        self.counts.fallbacks += 1
        self.last_error = error
        if self.buffer:
            self.buffer.write_through(torch.ones_like(self.buffer.token_mask) if kept is None else kept)
        self.buffer = None


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no data to write: a tracer's fake tensor, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"
