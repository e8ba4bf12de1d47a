# SPDX-License-Identifier: Apache-2.0
"""One layer, one request, two blocks: the smallest window there is, for notebook 00."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

import torch

from nwor_lab.reference.cache import PagedCache
from nwor_lab.reference.decoder import Request, make_batch
from nwor_lab.reference.policies import POLICIES, CopyOnWrite, KVCacheInterceptor, WriteAll, make_policy

MOMENTS = ("before the forward", "attention runs", "after sampling")


@dataclass(frozen=True)
class TinyWindow:
    """A request in the pages of one layer. The key of position p is the number p, so a page shows what it holds.

    k: drafts of the step, beside the token sampled last. num_computed: tokens whose rows lie in the cache before it.
    block_table: the physical block of each logical one.
    """

    k: int = 3
    num_computed: int = 3
    block_table: tuple[int, ...] = (2, 0)
    num_blocks: int = 3
    block_size: int = 4

    def slot_mapping(self) -> list[dict[str, Any]]:
        """The step's rows, and the slot that the block table gives to the position of each."""
        rows = []
        for n in range(1 + self.k):
            position = self.num_computed + n
            block, offset = divmod(position, self.block_size)
            slot = self.block_table[block] * self.block_size + offset
            rows.append({"row": f"draft {n}" if n else "sampled token", "position": position, "slot": slot})
        return rows

    def run(self, mode: str, num_rejected: int) -> list[dict[str, Any]]:
        """One step under `mode`: what the pages and the buffer beside them hold at each of `MOMENTS`.

        Returns:
            A row for each cell, with `mode`, `moment`, `line` (the block, or `num_blocks` for the buffer), `column`,
            `position` of the row that lies there (NaN if none does), `state` (empty, context, kept, undecided or
            rejected) and `sees`, the positions that attention read, `?` where nothing was written.
        """
        cache, before = PagedCache(1, 1, 2, self.num_blocks, self.block_size), self.num_computed
        request = Request([], 0, torch.tensor(self.block_table), before, drafts=[0] * self.k)
        batch = make_batch(cache, [request], [before], [[0] * (1 + self.k)])
        (slots,) = batch.sequence_slots
        rows = torch.arange(len(slots)).float()[:, None, None].expand(-1, 1, 2)
        cache.layers[0].write(rows[:before], rows[:before], slots[:before])
        policy = make_policy(mode, cache)
        cells = self._cells(policy, MOMENTS[0])
        policy.begin(batch)
        policy.stage(0, rows[before:], rows[before:])
        keys = policy.rows(0, 0, torch.float32)[0, :, 0, 0].tolist()
        cells += self._cells(policy, MOMENTS[1])
        policy.commit(torch.tensor([num_rejected]))
        cells += self._cells(policy, MOMENTS[2], num_rejected)
        sees = " ".join("?" if isnan(key) else f"{key:.0f}" for key in keys)
        return [{"mode": mode, **cell, "sees": sees} for cell in cells]

    def run_all(self, num_rejected: int) -> list[dict[str, Any]]:
        """The rows of `run` under each of the four policies."""
        return [row for mode in POLICIES for row in self.run(mode, num_rejected)]

    def _cells(self, policy: WriteAll, moment: str, num_rejected: int = 0) -> list[dict[str, Any]]:
        context, beside = policy.cache.layers[0], []
        if isinstance(policy, CopyOnWrite) and moment == MOMENTS[1]:
            beside = context.decode(policy.log[0], torch.float32)[0, :, 0, 0].tolist()
        elif isinstance(policy, KVCacheInterceptor) and (buffer := policy.buffer):
            beside = buffer.tail(0, torch.arange(len(buffer.slots)), torch.float32)[0, :, 0, 0].tolist()

        def state(position: float) -> str:
            if isnan(position):
                return "empty"
            if position <= self.num_computed:
                return "context" if position < self.num_computed else "kept"
            if moment == MOMENTS[1]:
                return "undecided"
            return "kept" if position <= self.num_computed + self.k - num_rejected else "rejected"

        return [
            {"moment": moment, "line": line, "column": column, "position": position, "state": state(position)}
            for line, places in enumerate([*context.pages[0, :, :, 0, 0].tolist(), beside])
            for column, position in enumerate(places)
        ]
