# SPDX-License-Identifier: Apache-2.0
"""The marks beside the pages: what was written to each slot, how a step marks its rows, and how slots are checked.

Two hashes of 32 bits, so one fault in four billion passes unseen:

* *identity*, of all tokens up to a position: the sum over i <= p of ``mix(token_i, i)``. A sum makes the rows of a
  prefill one running sum, and needs nothing but the identity before a step's first row.
* *content*, of a slot's bytes in one layer: the upper half of the sum of ``key_j * unit_j`` modulo 2**64, in which two
  slots that differ meet with a probability of 2**-32 over the choice of the keys (Lemire and Kaser, 2014).

Beside each slot lie 8 + 4 * layers bytes, beside each position of each running request 4: the identity that it must
have by the request's own tokens. A row's identity is that of the tokens which vLLM fed to the model; a request's comes
from its prompt and from what was sampled for it. Nothing here waits for the device.

`mark` and `check` in torch serve on a CPU, and are what their Triton forms (`kernels`) are held to, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .pages import Pages

KEPT, REJECTED, REPORTED = 1, 2, 4  # of a slot's state; 0 where nothing was written. A fault is reported once.
BYTES, TOKEN, REJECTED_ROW, UNWRITTEN = range(4)  # kinds of findings, as `settings.KINDS` names them
CHECKED_AT, FINDINGS_AT, KINDS_AT, ADOPTED_AT = 0, 1, 2, 6  # of the counters that begin a ring
COUNTERS, RING, FIELDS = 8, 64, 8  # a finding: step, row, position, pages, layer (-1: all), kind, slot, 0
A, B, C, D = 0x2545F4914F6CDD1D, -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd: of `mix`


def mix(token: Tensor, position: Tensor) -> Tensor:
    """int64, each of 32 bits, of two int64 tensors; shifts keep the sign, as everywhere here."""
    x = token * A + position * B
    x = (x ^ (x >> 31)) * C
    x = (x ^ (x >> 29)) * D
    return x >> 32


def content_keys(count: int, device: torch.device) -> Tensor:
    """int64 [count], a key for each unit of a slot."""
    place = torch.arange(count, dtype=torch.int64, device=device)
    return (mix(place, place + 1) << 32) ^ mix(place + 1, place)


def new_ring(device: torch.device) -> Tensor:
    """int64 [COUNTERS + RING * FIELDS]: slots checked, findings in all, by kind, slots adopted; the last findings."""
    return torch.zeros(COUNTERS + RING * FIELDS, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Marks:
    """The marks of some `Pages`.

    state, identity: int32 [slots]. content: int32 [layers, slots]. keys: int64 [heads * width]. offsets: the pages', on
    the host.
    """

    pages: Pages
    index: int
    state: Tensor
    identity: Tensor
    content: Tensor
    keys: Tensor
    offsets: Sequence[int]

    @classmethod
    def of(cls, pages: Pages, index: int) -> Marks:
        device, slots = pages.units.device, pages.num_slots
        return cls(
            pages,
            index,
            state=torch.zeros(slots, dtype=torch.int32, device=device),
            identity=torch.zeros(slots, dtype=torch.int32, device=device),
            content=torch.zeros(len(pages.names), slots, dtype=torch.int32, device=device),
            keys=content_keys(pages.heads * pages.width, device),
            offsets=pages.offsets.tolist(),
        )

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.identity.nbytes + self.content.nbytes

    def contents(self, slots: Tensor) -> Tensor:
        """int32 [layers, n], the hash of what lies in the slots now."""
        places, units = self.pages.addresses(slots).flatten(), self.pages.units
        found = torch.empty(len(self.offsets), len(slots), dtype=torch.int64, device=slots.device)
        for layer, offset in enumerate(self.offsets):  # a layer at a time stays in a CPU's cache
            values = units[offset:].index_select(0, places).view(len(slots), len(self.keys)).long()
            found[layer] = values @ self.keys if slots.device.type == "cpu" else (values * self.keys).sum(1)
        return (found >> 32).int()


class Batch(NamedTuple):
    """What vLLM has prepared for a step of R requests and T tokens.

    rows: int [R], where in the table of expected identities each request is. query_start_loc: int32 [R + 1] or longer.
    seq_lens: int32 [R], the tokens of each with those of this step. input_ids: int32 [T] or longer.
    """

    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    input_ids: Tensor
    num_requests: int
    num_tokens: int

    def computed(self) -> Tensor:
        """int64 [R], tokens of each request whose rows are in the pages before the step."""
        return (self.seq_lens[: self.num_requests] - self.query_start_loc[: self.num_requests + 1].diff()).long()


class Outcome(NamedTuple):
    """What came of the step. num_rejected, num_sampled: int32 [R]. sampled: int [R, k + 1], num_sampled of each row."""

    num_rejected: Tensor
    num_sampled: Tensor
    sampled: Tensor


class Sample(NamedTuple):
    """Which slots to check: the newest half of them, and one of each of as many parts of what is older.

    size: of each request, at most; 0 for all. seed: changes from step to step.

    requests: int64 [n], those of the batch to look at. most: no request has more slots to look at.
    """

    requests: Tensor
    size: int
    most: int
    seed: int


def mark(marks: Marks, expected: Tensor, batch: Batch, slot_mapping: Tensor, outcome: Outcome) -> None:
    """Mark the step's rows, after sampling and before anything else is written.

    Of a query the rows [0, query_len - num_rejected) are kept, the rule by which vLLM itself counts them as computed.

    Args:
        expected: int32 [requests, positions], the identities that requests must have; goes on with what was sampled.
        slot_mapping: int64 [T] or longer, the slots of the pages' cache group; -1 for a row that is not written.
    """
    requests, rows = batch.num_requests, batch.rows[: batch.num_requests].long()
    starts = batch.query_start_loc[: requests + 1].long()
    request = torch.repeat_interleave(torch.arange(requests, device=starts.device), starts.diff())
    within = torch.arange(len(request), device=starts.device) - starts[request]
    computed, kept = batch.computed(), starts.diff() - outcome.num_rejected[:requests]
    running = mix(batch.input_ids[: len(request)].long(), computed[request] + within).cumsum(0)
    running = torch.nn.functional.pad(running, (1, 0))
    before = torch.where(computed > 0, expected[rows, (computed - 1).clamp(min=0)].long(), 0) - running[starts[:-1]]
    identity = (running[1:] + before[request]).int()

    slots, is_kept = slot_mapping[: len(request)].long(), within < kept[request]
    marks.state[slots[(slots >= 0) & ~is_kept]] = REJECTED
    is_kept &= slots >= 0
    slots = slots[is_kept]
    marks.state[slots], marks.identity[slots] = KEPT, identity[is_kept]
    marks.content[:, slots] = marks.contents(slots)

    counts, width = outcome.num_sampled[:requests].long(), outcome.sampled.shape[1]
    place = torch.arange(width, device=starts.device)
    position = (computed + kept - counts + 1)[:, None] + place
    values = mix(outcome.sampled.long(), position)
    values = torch.where(place < counts[:, None], values, 0).cumsum(1) + expected[rows, position[:, 0] - 1][:, None]
    stays = (place < counts[:, None]) & (position < expected.shape[1])
    expected[rows[:, None].expand_as(position)[stays], position[stays]] = values[stays].int()


def check(
    marks: Marks, expected: Tensor, ring: Tensor, batch: Batch, table: Tensor, sample: Sample, adopt: bool = False
) -> None:
    """Check slots of rows that are in the pages before the step, and put what is wrong with them into `ring`.

    A fault of a slot is found once: the slot's mark says that it was reported, or what its bytes are now.

    Args:
        table: int32 [R, blocks], the block table of the pages' cache group.
        adopt: mark the slots anew as what is expected, for rows that may come from elsewhere.
    """
    pages = marks.pages
    chosen = sample.requests
    row, computed = batch.rows[chosen].long()[:, None], batch.computed()[chosen][:, None]
    first = torch.zeros_like(computed)
    if pages.window:
        first = (computed - pages.window + 1).clamp(min=0)
    elif pages.chunk:
        first = computed // pages.chunk * pages.chunk
    count, place = computed - first, torch.arange(sample.most, device=table.device)[None]
    position, valid = first + place, place < count
    if sample.size:
        newest = sample.size // 2
        older, part, parts = count - newest, (place - newest).clamp(min=0), sample.size - newest
        begin, end = part * older // parts, (part + 1) * older // parts
        drawn = first + begin + (mix(sample.seed * 1024 + place, row) & 0x7FFFFFFF) % (end - begin).clamp(min=1)
        drawn = torch.where(place < newest, computed - 1 - place, drawn)
        position, valid = torch.where(count > sample.size, drawn, position), valid & (place < sample.size)
    block = table[chosen[:, None], torch.where(valid, position, 0) // pages.table_block_size].long()
    valid &= block > 0  # 0 is in the place of blocks that a window has left
    size = pages.table_block_size
    slots, where = (block * size + position % size)[valid], valid.nonzero()
    request, position = chosen[where[:, 0]], position[valid]
    wanted = expected[batch.rows[request].long(), position]

    state, found = marks.state[slots], marks.contents(slots)
    kept = (state & 3) == KEPT
    whole = kept & (marks.identity[slots] == wanted)
    changed = (marks.content[:, slots] != found) & whole
    if adopt:
        strange = ~whole
        marks.state[slots[strange]], marks.identity[slots[strange]] = KEPT, wanted[strange]
        marks.content[:, slots] = found
        ring[ADOPTED_AT] += strange.sum()
        return
    ring[CHECKED_AT] += len(slots)
    wrong = ~whole & ((state & REPORTED) == 0)
    if not (wrong.any() or changed.any()):
        return
    kind = torch.where(kept, TOKEN, torch.where((state & 3) == REJECTED, REJECTED_ROW, UNWRITTEN))
    marks.state[slots[wrong]] |= REPORTED
    marks.content[:, slots] = torch.where(changed, found, marks.content[:, slots])
    layers, at = changed.nonzero(as_tuple=True)
    _report(marks, ring, batch.rows[request], position, slots, sample.seed, wrong.nonzero()[:, 0], kind, None)
    _report(marks, ring, batch.rows[request], position, slots, sample.seed, at, torch.zeros_like(kind), layers)


def _report(
    marks: Marks,
    ring: Tensor,
    row: Tensor,
    position: Tensor,
    slots: Tensor,
    step: int,
    at: Tensor,
    kind: Tensor,
    layers: Tensor | None,
) -> None:
    """Put findings at the entries `at` into the ring, of one layer each, or of all."""
    if not len(at):
        return
    entry = torch.zeros(len(at), FIELDS, dtype=torch.int64, device=ring.device)
    entry[:, 0], entry[:, 3], entry[:, 4] = step, marks.index, -1 if layers is None else layers
    entry[:, 1], entry[:, 2], entry[:, 5], entry[:, 6] = row[at], position[at], kind[at], slots[at]
    place = (ring[FINDINGS_AT] + torch.arange(len(at), device=ring.device)) % RING
    ring[COUNTERS:].view(RING, FIELDS)[place] = entry
    ring[FINDINGS_AT] += len(at)
    ring[KINDS_AT : KINDS_AT + 4] += torch.bincount(kind[at], minlength=4)
