# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a paged KV cache did a step change? None may but those of the rows that sampling kept.

The auditor knows nothing of how a mode works. Before the forward it poisons the slots of the step's rows, whose content
nobody may read until it is written, and copies the target layers' caches; after sampling it compares every byte with
the copy. A slot whose bytes changed must belong to a kept row, and no kept row may still hold the poison.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# A finite number in every cache dtype: kernels multiply what lies beyond a sequence by zero, and 0 x NaN is NaN.
_POISON = {1: 0x55, 2: 0x5555, 4: 0x55555555}
_EXAMPLES = 8
_HISTORY = 64


@dataclass
class AuditReport:
    """What an audited run found; a step is *dirty* in a layer where a slot outside the kept rows changed.

    steps: audited steps; layer_steps: steps x target layers.
    dirty_layer_steps, dirty_slots: where bytes changed that were not to change.
    kept_rows: rows x layers that were to be written; unwritten_rows: those of them that still hold the poison.
    dirty_by_step: the dirty slots of each step, all layers.
    """

    steps: int = 0
    layer_steps: int = 0
    dirty_layer_steps: int = 0
    dirty_slots: int = 0
    kept_rows: int = 0
    unwritten_rows: int = 0
    dirty_by_step: list[int] = field(default_factory=list, repr=False)

    @property
    def clean(self) -> bool:
        return self.steps > 0 and self.dirty_layer_steps == 0 and self.unwritten_rows == 0


class CacheAudit:
    """Compares caches before and after a step, on their own device.

    All slots are poisoned from the start, so a kernel that reads where nothing was written reads numbers of 1e13 (13 in
    fp8) and its tokens cannot stay vanilla's.

    Args:
        caches: the target layers' views, each [num_blocks, H, N, 2 * head_size].
        offset_of: int64 [N * 2 * head_size], the slot of a block that each element of a (block, head) chunk belongs to,
            where a layout mixes the slots of a block, as vLLM's CPU caches do; None for slots in order.

    Attributes:
        report: what was found so far.
        examples: the first few slots that changed and were not to, in words.
        history: of the first 64 steps, the batch's first request in the first layer: the `slots` of its rows,
            `num_rejected`, and of each row whether its slot `changed`.
    """

    def __init__(self, caches: Sequence[Tensor], offset_of: Tensor | None = None) -> None:
        self.caches, self.enabled = caches, True
        self.num_blocks, _, self.block_size, width = caches[0].shape
        if offset_of is None:
            offset_of = torch.arange(self.block_size).repeat_interleave(width)
        self._offset_of = offset_of.to(caches[0].device)
        self._before = [torch.empty_like(cache) for cache in caches]
        self._open = False
        self._starts: list[int] = []
        self._slots: list[int] = []
        for cache in caches:
            _bits(cache).fill_(_POISON[cache.element_size()])
        self.reset_counters()

    def reset_counters(self) -> None:
        """Forget what was audited so far."""
        self.report = AuditReport()
        self.examples: list[str] = []
        self.history: list[dict[str, Any]] = []

    def before(self, query_start_loc: Sequence[int], slot_mapping: Tensor) -> None:
        """Poison and copy, before the forward.

        Args:
            query_start_loc: [num_reqs + 1], where each request's rows start.
            slot_mapping: int64 [num_rows] or longer, the slots of all rows of the step; negative ones are skipped.
        """
        self._starts = list(query_start_loc)
        rows = slot_mapping[: self._starts[-1]]
        self._slots = rows.tolist()
        slots = rows[rows >= 0]
        blocks, line = (slots // self.block_size).unique(return_inverse=True)
        taken = torch.zeros(len(blocks), self.block_size, dtype=torch.bool, device=slots.device)
        taken[line, slots % self.block_size] = True
        for cache in self.caches:
            bits = _bits(cache)
            elements = taken[:, self._offset_of].view(len(blocks), 1, *bits.shape[2:])
            bits[blocks] = bits[blocks].masked_fill(elements, _POISON[cache.element_size()])
        for before, cache in zip(self._before, self.caches, strict=True):
            before.copy_(cache)  # fresh memory in every step would cost more than the copy
        self._open = True

    def after(self, num_rejected: Sequence[int]) -> None:
        """Compare: of each query all rows but the last `num_rejected` are to be written, and nothing else.

        Args:
            num_rejected: [num_reqs].

        Raises:
            ValueError: `before` was not called for this step.
        """
        if not self._open:
            raise ValueError("no step is open: call before() ahead of the forward")
        report, starts, device = self.report, self._starts, self.caches[0].device
        rows = [range(starts[i], starts[i + 1] - gone) for i, gone in enumerate(num_rejected)]
        kept_slots = [self._slots[row] for part in rows for row in part if self._slots[row] >= 0]
        kept = torch.zeros(self.num_blocks * self.block_size, dtype=torch.bool, device=device)
        kept[torch.tensor(kept_slots, dtype=torch.int64, device=device)] = True
        report.dirty_by_step.append(0)
        for layer, (cache, before) in enumerate(zip(self.caches, self._before, strict=True)):
            changed = self.changed_slots(cache, before)
            dirty, missing, count = torch.stack([(changed & ~kept).sum(), (kept & ~changed).sum(), kept.sum()]).tolist()
            report.layer_steps += 1
            report.dirty_layer_steps += int(dirty > 0)
            report.dirty_slots += dirty
            report.dirty_by_step[-1] += dirty
            report.kept_rows += count
            report.unwritten_rows += missing
            if dirty and len(self.examples) < _EXAMPLES:
                self._explain(layer, (changed & ~kept).nonzero().flatten().tolist())
            if layer == 0 and num_rejected and len(self.history) < _HISTORY:
                own = [slot for slot in self._slots[starts[0] : starts[1]] if slot >= 0]
                entry = {"slots": own, "num_rejected": num_rejected[0], "changed": changed[own].tolist()}
                self.history.append(entry)
        report.steps += 1
        self._open = False

    def changed_slots(self, cache: Tensor, before: Tensor) -> Tensor:
        """bool [num_blocks * N], the slots of one layer in which any byte differs."""
        now, then = _bits(cache), _bits(before)
        # Few blocks change in a step: those alone are looked at slot by slot.
        touched = (now != then).flatten(1).any(dim=1).nonzero().flatten()
        different = (now[touched] != then[touched]).flatten(2).any(dim=1)
        changed = torch.zeros(len(now), self.block_size, dtype=torch.int32, device=cache.device)
        changed[touched] = changed[touched].index_add(1, self._offset_of, different.int())
        return changed.flatten() > 0

    def _explain(self, layer: int, slots: list[int]) -> None:
        for slot in slots[: _EXAMPLES - len(self.examples)]:
            owner = "of no row of the step"
            if slot in self._slots:
                row = self._slots.index(slot)
                owner = f"of request {bisect_right(self._starts, row) - 1} of the batch"
            self.examples.append(f"step {self.report.steps}, layer {layer}, slot {slot}, {owner}")


def _bits(cache: Tensor) -> Tensor:
    return cache.view(_SAME_SIZE[cache.element_size()])


def injected_faults() -> AuditReport:
    """Audit one step of two layers with a fault of each kind:
    a rejected row that is written, a kept row that is not."""
    caches = [torch.zeros(2, 1, 4, 8) for _ in range(2)]
    audit = CacheAudit(caches)
    audit.before((0, 4), torch.tensor([0, 1, 2, 3]))
    caches[0][0, :, :3] = 1.0
    caches[1][0, :, 1] = 1.0
    audit.after((2,))
    return audit.report
