# SPDX-License-Identifier: Apache-2.0
"""Where a window's keys and values wait until the verifier has decided, and the counts of what became of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

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
