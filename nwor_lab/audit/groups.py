# SPDX-License-Identifier: Apache-2.0
"""The audits of a model's cache groups as one: each looks at its layers by the slots of its own group.

vLLM hands out all blocks from one pool and lays the groups over the same memory: what a layer of one group writes is
seen through the view of another's. But a block is one group's at a time. So each change is held against the group that
has the block, and through the views of the others it is passed over; in a block that nobody has had, all object.

The blocks of recurrent layers hold states, which vLLM writes as it likes: what changes in them is passed over, and all
blocks that a request's table names there are the group's. Beside such layers vLLM zeroes attention's new blocks as it
hands them out: they are taken as zeroed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nwor_lab.audit.auditor import AuditReport, CacheAudit


class GroupsAudit:
    """One `CacheAudit` for each cache group that holds target layers.

    Args:
        audits: by the index of the group.
        block_sizes: slots of a block, of every group.
        num_blocks: blocks of the pool.
        recurrent: indices of the groups whose layers keep states, and have no slots.
    """

    def __init__(
        self,
        audits: Mapping[int, CacheAudit],
        block_sizes: Sequence[int],
        num_blocks: int,
        recurrent: Collection[int] = (),
    ) -> None:
        self.audits, self.enabled = dict(audits), True
        self._recurrent = recurrent
        self._block_sizes = block_sizes
        self._owner = torch.full((num_blocks,), -1)
        self.reset()

    @property
    def report(self) -> AuditReport:
        """What all groups' audits found, summed; a step is one step of all."""
        reports = [audit.report for audit in self.audits.values()]
        counts = {f.name: sum(getattr(r, f.name) for r in reports) for f in fields(AuditReport)[:-1]}
        by_step = [sum(dirty) for dirty in zip(*(r.dirty_by_step for r in reports), strict=True)]
        return AuditReport(**counts | {"steps": reports[0].steps}, dirty_by_step=by_step)

    @property
    def examples(self) -> list[str]:
        if len(self.audits) == 1:
            return next(iter(self.audits.values())).examples
        return [f"group {index}, {text}" for index, audit in self.audits.items() for text in audit.examples]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The first group's."""
        return next(iter(self.audits.values())).history

    def reset(self) -> None:
        """Poison every slot, and forget what was audited so far."""
        for audit in self.audits.values():
            audit.reset()
        if len(self.audits) > 1:  # others have poisoned the same memory since
            self.accept(range(len(self._owner)))

    def forget(self) -> None:
        for audit in self.audits.values():
            audit.forget()

    def before(
        self,
        query_start_loc: Sequence[int],
        slot_mappings: Mapping[int, Tensor],
        tables: Mapping[int, Sequence[list[int]]],
    ) -> None:
        """Look for stray writes since the last step, and open the next, as `CacheAudit.before`.

        Args:
            query_start_loc: [num_reqs + 1].
            slot_mappings: of every group.
            tables: the block table of each request, of every group if there are several, else none. What lies before
                the step's rows may be another group's by now: vLLM frees what a sliding window has left, and the
                tables go on naming it.
        """
        self.look_between_steps()
        for index, rows in tables.items():
            if index in self._recurrent:
                blocks = {block for row in rows for block in row}
            else:
                blocks = _in_use(rows, query_start_loc, slot_mappings[index].tolist(), self._block_sizes[index])
            self._owner[sorted(blocks - {0})] = index  # block 0 is nobody's
        if tables:
            for index, audit in self.audits.items():
                others = (self._owner != -1) & (self._owner != index)
                audit.ignore(others.repeat_interleave(self._block_sizes[index]))
        for index, audit in self.audits.items():
            audit.open_step(query_start_loc, slot_mappings[index])

    def after(self, num_rejected: Sequence[int]) -> None:
        for audit in self.audits.values():
            audit.after(num_rejected)

    def accept(self, blocks: Sequence[int]) -> None:
        """vLLM has zeroed these blocks as it handed them out: all groups take them as they are."""
        for index, audit in self.audits.items():
            size = self._block_sizes[index]
            audit.accept((torch.tensor(blocks)[:, None] * size + torch.arange(size)).flatten())

    def look_between_steps(self) -> None:
        for audit in self.audits.values():
            audit.look_between_steps()


def _in_use(
    tables: Sequence[list[int]], query_start_loc: Sequence[int], slots: Sequence[int], block_size: int
) -> set[int]:
    """The blocks of a step's rows, and those behind them, where a drafter writes."""
    ends = query_start_loc[1:]
    found = {slot // block_size for slot in slots[: ends[-1]] if slot >= 0}
    for row, end in zip(tables, ends, strict=True):
        last = slots[end - 1] // block_size
        if last in row:
            found.update(row[len(row) - row[::-1].index(last) :])
    return found
