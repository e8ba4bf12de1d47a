# SPDX-License-Identifier: Apache-2.0
"""One layer, one request, two blocks: the smallest window there is, for notebook 00."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import pandas as pd
import torch

from nwor_lab.model.traffic import MODES, Shape
from nwor_lab.reference.cache import PagedCache
from nwor_lab.reference.decoder import Request, make_batch
from nwor_lab.reference.policies import BlindStaging, CopyOnWrite, WriteAll, make_policy

MOMENTS = ("before the forward", "attention runs", "after sampling")


@dataclass(frozen=True)
class TinyWindow:
    """A request in the pages of one layer. The key of position p is the number p, so a page shows what it holds.

    Attributes:
        k: drafts of the step. Its rows are the token sampled last and the drafts.
        num_computed: tokens whose rows lie in the cache before the step.
        block_table: the physical block of each logical block.
        num_blocks, block_size: of the cache.
    """

    k: int = 3
    num_computed: int = 3
    block_table: tuple[int, ...] = (2, 0)
    num_blocks: int = 3
    block_size: int = 4

    def __post_init__(self) -> None:
        room = len(self.block_table) * self.block_size
        if self.k < 1 or self.num_computed + 1 + self.k > room:
            raise ValueError(
                f"k={self.k}: give 1 to {room - self.num_computed - 1}, two blocks of 4 slots hold no more"
            )

    def slot_mapping(self) -> pd.DataFrame:
        """The step's rows, and vLLM's way from the position of each to its slot."""
        table = pd.DataFrame({"row": ["sampled token", *(f"draft {n}" for n in range(1, self.k + 1))]})
        table["position"] = range(self.num_computed, self.num_computed + 1 + self.k)
        table["position // block_size"] = table["position"] // self.block_size
        table["block_table[...]"] = [self.block_table[n] for n in table["position // block_size"]]
        table["position % block_size"] = table["position"] % self.block_size
        table["slot"] = table["block_table[...]"] * self.block_size + table["position % block_size"]
        return table

    def run(self, mode: str, num_rejected: int) -> pd.DataFrame:
        """One step under `mode`: what the pages and the buffer beside them hold at each of `MOMENTS`.

        Returns:
            A row for each cell, with `mode`, `moment`, `line` (the block, or `num_blocks` for the buffer), `column`,
            `position` of the row that lies there (NaN if none does), `state` (empty, context, kept, undecided or
            rejected) and `sees`, the positions that attention read, `?` where nothing was written.
        """
        cache, before = PagedCache(Shape(1, 1, 2, 4), self.num_blocks, self.block_size), self.num_computed
        request = Request([], 0, torch.tensor(self.block_table), before, drafts=[0] * self.k)
        batch = make_batch(cache, [request], [before], [[0] * (1 + self.k)])
        (slots,) = batch.sequence_slots
        rows = torch.arange(len(slots)).float()[:, None, None].expand(-1, 1, 2)
        cache.layers[0].write(rows[:before], rows[:before], slots[:before])
        policy = make_policy(mode, cache)
        frames = [self._cells(policy, MOMENTS[0])]
        policy.begin(batch)
        policy.stage(0, rows[before:], rows[before:])
        keys = policy.rows(0, 0, torch.float32)[0]
        frames.append(self._cells(policy, MOMENTS[1]))
        policy.commit(torch.tensor([num_rejected]))
        frames.append(self._cells(policy, MOMENTS[2], num_rejected))
        sees = " ".join("?" if key.isnan() else f"{int(key)}" for key in keys[:, 0, 0])
        return pd.concat(frames, ignore_index=True).assign(mode=mode, sees=sees)

    def run_all(self, num_rejected: int) -> pd.DataFrame:
        """The rows of `run` under each of the four policies."""
        return pd.concat([self.run(mode, num_rejected) for mode in MODES], ignore_index=True)

    def _cells(self, policy: WriteAll, moment: str, num_rejected: int = 0) -> pd.DataFrame:
        context = policy.cache.layers[0]
        beside = torch.empty(2, 0, 1, 2)
        if isinstance(policy, CopyOnWrite) and moment == MOMENTS[1]:
            beside = context.decode(policy.log[0], torch.float32)
        elif isinstance(policy, BlindStaging) and moment == MOMENTS[1]:
            beside = policy.buffer.tail(0, torch.arange(len(policy.buffer.slots)), torch.float32)
        first_draft, end = self.num_computed + 1, self.num_computed + 1 + self.k

        def state(position: float) -> str:
            if isnan(position):
                return "empty"
            if position < first_draft:
                return "context" if position < self.num_computed else "kept"
            if moment == MOMENTS[1]:
                return "undecided"
            return "kept" if position < end - num_rejected else "rejected"

        lines = [*context.pages[0, :, :, 0, 0].tolist(), beside[0, :, 0, 0].tolist()]
        cells = [(line, column, p) for line, places in enumerate(lines) for column, p in enumerate(places)]
        frame = pd.DataFrame(cells, columns=["line", "column", "position"])
        return frame.assign(state=[state(p) for p in frame["position"]], moment=moment)
