# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, at the start of a step, for trying the auditor in any run. Nothing here waits for the device."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .marks import KEPT, REJECTED, Batch, Marks

if TYPE_CHECKING:
    from .auditor import Auditor


class Perturb:
    """Plants each kind of fault with its probability in a step, among the newest rows of a request that runs on.

    * ``bytes``: a bit of the slot is flipped in one layer.
    * ``token``: the row of the position before lies in the slot, bytes and mark, as if a block table were wrong.
    * ``rejected``: the row counts as rejected, as if a draft too many had been taken for accepted.
    * ``unwritten``: the row counts as never written.

    planted: how many of each kind.
    """

    def __init__(self, auditor: Auditor, probabilities: Mapping[str, float], seed: int = 0) -> None:
        self._auditor, self._probabilities = auditor, probabilities
        self._random = random.Random(seed)
        self.planted = dict.fromkeys(probabilities, 0)

    def __call__(self, batch: Batch, tables: Sequence[Tensor], requests: Sequence[int]) -> None:
        """Plant faults. requests: those of the batch to choose from, by index."""
        for place, (kind, probability) in enumerate(self._probabilities.items()):
            if not requests or self._random.random() >= probability:
                continue
            marks, request = self._random.choice(self._auditor.marks), self._random.choice(requests)
            position = batch.computed()[request] - 1 - place  # each kind at a position of its own
            slots = [self._slot(marks, tables, request, (position - back).clamp(min=0)) for back in (0, 1)]
            self._take_for_right(marks, slots[0], self._auditor.expected[batch.rows[request], position.clamp(min=0)])
            self._plant(kind, marks, *slots)
            self.planted[kind] += 1

    def _slot(self, marks: Marks, tables: Sequence[Tensor], request: int, position: Tensor) -> Tensor:
        """int64 [1]."""
        size = marks.pages.table_block_size
        block = tables[marks.pages.group][request].index_select(0, (position // size)[None].long())
        return block.long() * size + position % size

    @staticmethod
    def _take_for_right(marks: Marks, slot: Tensor, identity: Tensor) -> None:
        """Whatever was planted there before: each fault is to be found once."""
        marks.state[slot], marks.identity[slot], marks.content[:, slot] = KEPT, identity, marks.contents(slot)

    def _plant(self, kind: str, marks: Marks, slot: Tensor, other: Tensor) -> None:
        pages = marks.pages
        if kind == "bytes":
            layer = self._random.randrange(len(pages.names))
            unit = self._random.randrange(pages.heads * pages.width)
            pages.units[pages.offsets[layer] + pages.addresses(slot)[:, unit]] ^= 1
        elif kind == "token":
            here, there = (pages.offsets[:, None] + pages.addresses(each) for each in (slot, other))
            pages.units[here] = pages.units[there]
            for values in (marks.identity, *marks.content):
                values[slot] = values[other]
        else:
            marks.state[slot] = REJECTED if kind == "rejected" else 0
