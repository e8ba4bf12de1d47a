# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a paged KV cache did a step change, and are they the right ones?

The auditor knows nothing of how a mode works. Every slot holds poison that differs by step, layer, slot, head and half
(keys or values; the two halves of an MLA layer's latent row go by the same names), and whose content nobody may read
until it is written. A step may change the slots of the rows that sampling kept, each head and half of them, and nothing
else; a kept row must hold the bytes that vLLM's own writer makes of the same keys and values; and from one step's end
to the next one's start no byte may change.

What it does not see:

* Reads. A kernel that reads poison shows in tokens alone.
* Keys and values that are wrong before vLLM hands them to the cache write, and faults of vLLM's own writer.
* The content of rows whose write passes no hook: under replayed CUDA graphs, in micro-batches, and where a backend
  writes inside its attention. `content_checked` beside `kept_rows` says how many rows were compared.
* A slot that is changed and put right within one step, and layers of the drafter.
* Recurrent layers. Their blocks hold states, which vLLM writes as it likes: whatever is written to a block is passed
  over for as long as one of their cache groups has it (`groups.py`).

A step compares the whole cache twice and needs a copy of it, and scratch for its rows. On two CPU cores an audited step
of the shipped pair took 1.8 times the CPU time of one that is not (`stage`, 8 requests, k=8, 22 MB of cache).

What vLLM copies or discards itself between steps counts as stray: it does so for an engine that sleeps, and for the
states of recurrent layers beside prefix caching, which is refused. Taken as they are, `accept` naming their slots, are
blocks that a KV connector brings back, and new ones that vLLM zeroes, beside recurrent layers and in caches of mixed
precision.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Fixed and random bits of an element: a large finite number, never 0, in every cache dtype of its size but bfloat16.
# Finite, for kernels multiply what lies beyond a sequence by zero, and 0 x NaN is NaN. And not so large that attention
# makes NaN of it: FlashAttention takes exp2(score - the largest), of which rounding leaves millions if scores are 1e13;
# the V2 runner may make of NaN a token beyond a small vocabulary, and the fault ends the process before it is reported.
_POISON: dict[object, tuple[int, int]] = {
    1: (0x50, 0xA7),
    2: (0x5500, 0x80FF),
    4: (0x46000000, 0x00FFFFFF),
    torch.bfloat16: (0x4600, 0x80FF),
}
_BLOCKS_AT_ONCE = 64
_EXAMPLES = 8
_HISTORY = 64
FAULTS = ("dirty_layer_steps", "unwritten_rows", "wrong_rows", "stray_slots", "shipped_rejected", "shipped_unwritten")


@dataclass
class AuditReport:
    """What an audited run found; a step is *dirty* in a layer where a slot outside the kept rows changed.

    steps: audited steps; layer_steps: steps x target layers.
    dirty_layer_steps, dirty_slots: where bytes changed that were not to change.
    kept_rows: rows x layers that were to be written; unwritten_rows: those of which a head's keys or values still are
        the poison.
    content_checked: kept rows x layers that were compared with what vLLM's own writer makes; wrong_rows: those of them
        that were written and differ.
    stray_slots: slots x layers that changed between two steps.
    shipped_slots: slots x layers of the blocks that a KV connector copied out; shipped_rejected: those of them that
        were dirty then: they held a row that no step has kept; shipped_unwritten: those whose kept row was not there.
    dirty_by_step: the dirty slots of each step, all layers.
    """

    steps: int = 0
    layer_steps: int = 0
    dirty_layer_steps: int = 0
    dirty_slots: int = 0
    kept_rows: int = 0
    unwritten_rows: int = 0
    content_checked: int = 0
    wrong_rows: int = 0
    stray_slots: int = 0
    shipped_slots: int = 0
    shipped_rejected: int = 0
    shipped_unwritten: int = 0
    dirty_by_step: list[int] = field(default_factory=list, repr=False)

    @property
    def red(self) -> set[str]:
        """The fields that are not zero and should be."""
        return {fault for fault in FAULTS if getattr(self, fault)}

    @property
    def clean(self) -> bool:
        return self.steps > 0 and not self.red


class CacheAudit:
    """Compares caches with a copy, on their own device: before a step, and after it.

    All slots are poisoned from the start, so a kernel that reads where nothing was written reads numbers of 8000 and
    more (8 in fp8, 80 in fp16) and its tokens cannot stay vanilla's. A slot keeps its poison for as long as nobody
    writes it, since a mode may count on what it left there.

    Args:
        caches: the target layers' views, each [num_blocks, H, N, 2 * head_size].
        part_of: int64 [N * 2 * head_size], for each element of a (block, head) chunk twice its slot in the block, and 1
            more for a value's, where a layout mixes the slots of a block, as vLLM's CPU caches do; None for slots in
            order, keys before values.

    Attributes:
        report: what was found so far.
        examples: the first few faults, in words.
        history: of the first 64 steps, the batch's first request in the first layer: the `slots` of its rows,
            `num_rejected`, and of each row whether its slot `changed`.
    """

    @torch.inference_mode()
    def __init__(self, caches: Sequence[Tensor], part_of: Tensor | None = None) -> None:
        self.caches = caches
        self.num_blocks, _, self.block_size, width = caches[0].shape
        device = caches[0].device
        if part_of is None:
            part_of = torch.arange(2 * self.block_size).repeat_interleave(width // 2)
        self._part_of = part_of.to(device)
        self._by_part = self._part_of.argsort(stable=True)
        self._snapshot = [torch.empty_like(cache) for cache in caches]
        self._random = torch.Generator(device).manual_seed(0)
        self._overwritten = torch.zeros(self.num_blocks * self.block_size, dtype=torch.bool, device=device)
        self._ignored = torch.zeros_like(self._overwritten)
        self._stale = self._overwritten.repeat(len(caches), 1)  # holds a row that was not to be kept
        self._unwritten = self._stale.clone()  # does not hold all of the row that was to be kept
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Poison every slot, and forget what was audited so far."""
        self.forget()
        self._open = False
        every = torch.arange(self.num_blocks, device=self._part_of.device)
        self._poison(every, torch.ones_like(self._overwritten).view(self.num_blocks, -1))

    def ignore(self, slots: Tensor) -> None:
        """From now on pass over changes of these, bool [num_blocks * N]: another cache group has their blocks."""
        self._ignored = slots.to(self._ignored.device)

    def forget(self) -> None:
        """Forget what was audited so far, between steps."""
        self.report = AuditReport()
        self.examples: list[str] = []
        self.history: list[dict[str, Any]] = []

    @torch.inference_mode()
    def before(self, query_start_loc: Sequence[int], slot_mapping: Tensor) -> None:
        """Look for stray writes since the last step, and poison this one's slots anew, before the forward.

        Args:
            query_start_loc: [num_reqs + 1], where each request's rows start.
            slot_mapping: int64 [num_rows] or longer, the slots of all rows of the step; negative ones are skipped.

        Raises:
            ValueError: a slot lies beyond the cache.
        """
        self.look_between_steps()
        self.open_step(query_start_loc, slot_mapping)

    @torch.inference_mode()
    def open_step(self, query_start_loc: Sequence[int], slot_mapping: Tensor) -> None:
        """`before`, without the look."""
        self._starts = list(query_start_loc)
        self._rows = rows = slot_mapping[: self._starts[-1]].clone()
        self._slots: list[int] = rows.tolist()
        if (last := max(self._slots, default=-1)) >= len(self._overwritten):  # on a GPU no index may be
            raise ValueError(f"a row's slot is {last}, and the cache has {len(self._overwritten)}")
        row = (rows >= 0).nonzero().flatten()
        slots = rows[row]
        self._blocks, line = (slots // self.block_size).unique(return_inverse=True)
        cells = line * self.block_size + slots % self.block_size
        self._cells = torch.full_like(rows, -1)
        self._cells[row] = cells
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        poisoned_anew = torch.zeros(len(self._blocks) * self.block_size, dtype=torch.bool, device=rows.device)
        poisoned_anew[cells] = self._overwritten[slots]
        if poisoned_anew.any():
            self._poison(self._blocks, poisoned_anew.view(-1, self.block_size))
            self._overwritten[slots] = False
            self._stale[:, slots] = False
        self._unwritten[:, slots] = False
        self._open = True

    @torch.inference_mode()
    def copy_write(self, layer: int, write: Callable[[Tensor, Tensor], None], slot_mapping: Tensor) -> None:
        """Let vLLM's own writer make the bytes of one layer's rows in scratch, as it is called to write the cache.

        Args:
            layer: the index of the layer's cache.
            write: vLLM's own writer, called with a cache and a slot mapping; it skips negative slots.
            slot_mapping: int64, as vLLM gave it.
        """
        if not self._open:
            return
        count = min(slot_mapping.numel(), len(self._rows))
        cells = torch.full_like(slot_mapping, -1)
        cells[:count] = self._cells[:count]
        scratch = torch.zeros_like(self.caches[layer][: len(self._blocks)])
        write(scratch, cells)
        same = (slot_mapping[:count] == self._rows[:count]) & (slot_mapping[:count] >= 0)
        self._copies[layer] = scratch, same.nonzero().flatten()

    @torch.inference_mode()
    def after(self, num_rejected: Sequence[int]) -> None:
        """Compare: of each query all rows but the last `num_rejected` are to be written, and nothing else.

        Args:
            num_rejected: [num_reqs].

        Raises:
            ValueError: `before` was not called for this step.
        """
        if not self._open:
            raise ValueError("no step is open: call before() ahead of the forward")
        report, starts = self.report, self._starts
        rows = [range(starts[i], starts[i + 1] - gone) for i, gone in enumerate(num_rejected)]
        kept_slots = [self._slots[row] for part in rows for row in part if self._slots[row] >= 0]
        kept = torch.zeros_like(self._overwritten)
        kept[torch.tensor(kept_slots, dtype=torch.int64, device=kept.device)] = True
        report.dirty_by_step.append(0)
        for layer in range(len(self.caches)):
            parts = self._changed_parts(layer)
            changed, written = parts.flatten(1).any(dim=1), parts.flatten(1).all(dim=1)
            compared, different = self._contents(layer, kept)
            found = {
                "changed": parts & ~(kept | self._ignored)[:, None, None],
                "unwritten": ~parts & kept[:, None, None],
                "not what vLLM writes": different & written[:, None, None],
            }
            changed &= ~self._ignored
            self._stale[layer] = (self._stale[layer] | changed) & ~kept
            self._unwritten[layer] = self._unwritten[layer] & ~changed | kept & ~written
            counts = torch.stack([part.flatten(1).any(dim=1).sum() for part in found.values()])
            dirty, unwritten, wrong = counts.tolist()
            report.layer_steps += 1
            report.dirty_layer_steps += int(dirty > 0)
            report.dirty_slots += dirty
            report.dirty_by_step[-1] += dirty
            report.kept_rows += len(set(kept_slots))
            report.unwritten_rows += unwritten
            report.content_checked += compared
            report.wrong_rows += wrong
            if dirty + unwritten + wrong:
                self._explain(layer, found)
            if layer == 0 and num_rejected and len(self.history) < _HISTORY:
                own = [slot for slot in self._slots[starts[0] : starts[1]] if slot >= 0]
                entry = {"slots": own, "num_rejected": num_rejected[0], "changed": changed[own].tolist()}
                self.history.append(entry)
        report.steps += 1
        self._open = False

    @torch.inference_mode()
    def look_between_steps(self) -> None:
        """Count the slots that changed since the last step's end as stray."""
        for layer in range(len(self.caches)):
            stray = self._changed_parts(layer) & ~self._ignored[:, None, None]
            if count := int(stray.flatten(1).any(dim=1).sum()):
                self.report.stray_slots += count
                self._explain(layer, {"changed before the step": stray})

    @torch.inference_mode()
    def ship(self, slots: Tensor, layer: int | None = None) -> None:
        """A KV connector copies these slots, int64 [n], of one layer or all out of the cache: count those at fault."""
        layers, slots = slice(layer, None if layer is None else layer + 1), slots.to(self._stale.device)
        self.report.shipped_slots += self._stale[layers, slots].numel()
        self.report.shipped_rejected += int(self._stale[layers, slots].sum())
        self.report.shipped_unwritten += int(self._unwritten[layers, slots].sum())

    @torch.inference_mode()
    def accept(self, slots: Tensor) -> None:
        """A KV connector has loaded these slots, int64 [n], of all layers, whole blocks, or vLLM has zeroed them: take
        them as they are."""
        slots = slots.to(self._stale.device)
        blocks = (slots // self.block_size).unique()
        for seen, cache in zip(self._snapshot, self.caches, strict=True):
            seen[blocks] = cache[blocks]
        self._overwritten[slots] = True
        self._stale[:, slots] = self._unwritten[:, slots] = False

    def _changed_parts(self, layer: int) -> Tensor:
        """bool [num_blocks * N, H, 2], where keys or values of a head changed since the layer was last looked at."""
        now, seen = _bits(self.caches[layer]), _bits(self._snapshot[layer])
        # Few blocks change in a step: those alone are looked at slot by slot.
        touched = _any(now.view(torch.int64) != seen.view(torch.int64), 1).nonzero().flatten()
        changed = torch.zeros(self.num_blocks, self.block_size, now.shape[1], 2, dtype=torch.bool, device=now.device)
        changed[touched] = self._different_parts(now[touched], seen[touched])
        seen[touched] = now[touched]
        by_slot = changed.flatten(0, 1)
        self._overwritten |= by_slot.flatten(1).any(dim=1)
        return by_slot

    def _different_parts(self, some: Tensor, others: Tensor) -> Tensor:
        """bool [B, N, H, 2], where keys or values of a head differ in these blocks, each [B, H, N, 2 * head_size]."""
        elements = (some != others).flatten(2)[..., self._by_part]
        return _any(elements.unflatten(2, (self.block_size, 2, some.shape[3] // 2)), 4).transpose(1, 2)

    def _contents(self, layer: int, kept: Tensor) -> tuple[int, Tensor]:
        """How many kept rows can be compared, and bool [num_blocks * N, H, 2], where vLLM's writer made other bytes."""
        different = torch.zeros(len(kept), self.caches[layer].shape[1], 2, dtype=torch.bool, device=kept.device)
        if layer not in self._copies:
            return 0, different
        scratch, row = self._copies.pop(layer)
        row = row[kept[self._rows[row]]]
        cells = self._different_parts(_bits(scratch), _bits(self.caches[layer])[self._blocks]).flatten(0, 1)
        different[self._rows[row]] = cells[self._cells[row]]
        return len(row), different

    def _poison(self, blocks: Tensor, chosen: Tensor) -> None:
        """Poison the slots of some blocks of all layers where `chosen`, bool [B, N], says so."""
        for layer, cache in enumerate(self.caches):
            bits, seen = _bits(cache), _bits(self._snapshot[layer])
            fixed, random = _POISON.get(cache.dtype) or _POISON[cache.element_size()]
            for part, slots in zip(blocks.split(_BLOCKS_AT_ONCE), chosen.split(_BLOCKS_AT_ONCE), strict=True):
                shape, where = (len(part), *bits.shape[1:]), {"dtype": torch.int32, "device": bits.device}
                drawn = torch.randint(1 << 24, shape, generator=self._random, **where)
                here = slots.repeat_interleave(2, dim=1)[:, self._part_of].view(-1, 1, *bits.shape[2:])
                bits[part] = torch.where(here, (drawn & random | fixed).to(bits.dtype), bits[part])
                seen[part] = bits[part]

    def _explain(self, layer: int, found: dict[str, Tensor]) -> None:
        for what, parts in found.items():
            slots = parts.flatten(1).any(dim=1).nonzero().flatten()
            for slot in slots[: _EXAMPLES - len(self.examples)].tolist():
                where = "all heads"
                if not parts[slot].all():
                    first = parts[slot].nonzero().tolist()[0]
                    where = f"head {first[0]}, {('keys', 'values')[first[1]]}"
                owner = ""
                if self._open:
                    row = self._slots.index(slot) if slot in self._slots else None
                    request = "no row" if row is None else f"request {bisect_right(self._starts, row) - 1}"
                    owner = f", of {request} of the {'step' if row is None else 'batch'}"
                self.examples.append(f"step {self.report.steps}, layer {layer}, slot {slot}, {where}: {what}{owner}")


def _bits(cache: Tensor) -> Tensor:
    return cache.view(_SAME_SIZE[cache.element_size()])


def _any(found: Tensor, dims: int) -> Tensor:
    """Whether any is True, for each place in the first `dims` dimensions; several times as fast as `Tensor.any`."""
    return found.flatten(dims).view(torch.uint8).amax(dim=-1).bool()
