# SPDX-License-Identifier: Apache-2.0
"""`cpu.OnCpu` for a GPU: a kernel to mark and one to check, one launch of each a step and `Pages`.

A program hashes a few slots, each in one layer; those of one layer see to identities, too. Launched outside CUDA graphs
on vLLM's stream. The first launch of a signature goes through Triton's own binding; later ones call what it compiled.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import marks as definitions
from .marks import Batch, Marks, Outcome, Sample

SLOTS, UNITS = 4, 256  # of a program, and of a slot at a time
A, B = tl.constexpr(definitions.A), tl.constexpr(definitions.B)
C, D = tl.constexpr(definitions.C), tl.constexpr(definitions.D)
KEPT, REJECTED = tl.constexpr(definitions.KEPT), tl.constexpr(definitions.REJECTED)
REPORTED = tl.constexpr(definitions.REPORTED)
TOKEN, REJECTED_ROW = tl.constexpr(definitions.TOKEN), tl.constexpr(definitions.REJECTED_ROW)
UNWRITTEN = tl.constexpr(definitions.UNWRITTEN)
CHECKED_AT, FINDINGS_AT = tl.constexpr(definitions.CHECKED_AT), tl.constexpr(definitions.FINDINGS_AT)
KINDS_AT, ADOPTED_AT = tl.constexpr(definitions.KINDS_AT), tl.constexpr(definitions.ADOPTED_AT)
COUNTERS, RING, FIELDS = (
    tl.constexpr(definitions.COUNTERS),
    tl.constexpr(definitions.RING),
    tl.constexpr(definitions.FIELDS),
)


@triton.jit
def _mix(token, position):
    x = token.to(tl.int64) * A + position.to(tl.int64) * B
    x = (x ^ (x >> 31)) * C
    x = (x ^ (x >> 29)) * D
    return x >> 32


@triton.jit
def _content(
    units, offsets, packing, keys, layer, slot, valid,
    block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    SLOTS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """int32 [SLOTS], the hash of what lies in the slots in this layer, or in one of each."""
    base = tl.load(offsets + layer) + (slot // BLOCK_SIZE) * block_stride
    offset = slot % BLOCK_SIZE
    total = tl.zeros([SLOTS, UNITS], dtype=tl.int64)
    for begin in range(0, HEADS * WIDTH, UNITS):
        unit = begin + tl.arange(0, UNITS)
        inside = unit < HEADS * WIDTH
        mask = valid[:, None] & inside[None, :]
        if PACKED:
            within = tl.load(packing + offset[:, None] * WIDTH + (unit % WIDTH)[None, :], mask=mask, other=0)
            within = within.to(tl.int64)
        else:
            within = offset[:, None] * slot_stride + (unit % WIDTH)[None, :]
        head = (unit // WIDTH).to(tl.int64)
        address = base[:, None] + head[None, :] * head_stride + within
        value = tl.load(units + address, mask=mask, other=0).to(tl.int64)
        total += value * tl.load(keys + unit, mask=inside, other=0)[None, :]
    return (tl.sum(total, axis=1) >> 32).to(tl.int32)


@triton.jit
def _request_of(query_start_loc, row, num_requests, REQUESTS: tl.constexpr):
    """The request that each row of the batch is of: how many queries end at it or before."""
    request = tl.zeros_like(row)
    for begin in range(0, num_requests, REQUESTS):
        index = begin + tl.arange(0, REQUESTS)
        ends = tl.load(query_start_loc + 1 + index, mask=index < num_requests, other=2147483647)
        request += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    return request


@triton.jit(
    do_not_specialize=[
        "units", "offsets", "packing", "keys", "state", "identity", "content", "expected", "rows", "query_start_loc",
        "seq_lens", "input_ids", "slot_mapping", "num_rejected", "num_sampled", "sampled", "num_slots", "num_requests",
        "positions", "sampled_stride", "most_sampled", "block_stride", "head_stride", "slot_stride",
    ]
)  # fmt: skip
def _mark(
    units, offsets, packing, keys, state, identity, content, expected, rows, query_start_loc, seq_lens, input_ids,
    slot_mapping, num_rejected, num_sampled, sampled, num_slots, num_requests, positions, sampled_stride, most_sampled,
    block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    SLOTS: tl.constexpr, UNITS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1)
    row = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    request = _request_of(query_start_loc, row, num_requests, REQUESTS)
    real = request < num_requests
    begin = tl.load(query_start_loc + request, mask=real, other=0)
    length = tl.load(query_start_loc + 1 + request, mask=real, other=0) - begin
    computed = tl.load(seq_lens + request, mask=real, other=0) - length
    keeps = length - tl.load(num_rejected + request, mask=real, other=0)
    slot = tl.load(slot_mapping + row, mask=real, other=-1).to(tl.int64)
    kept = real & (row - begin < keeps) & (slot >= 0)
    found = _content(
        units, offsets, packing, keys, layer, slot, kept, block_stride, head_stride, slot_stride,
        BLOCK_SIZE, HEADS, WIDTH, PACKED, SLOTS, UNITS,
    )  # fmt: skip
    tl.store(content + layer.to(tl.int64) * num_slots + slot, found, mask=kept)
    if layer == 0:
        own = expected + tl.load(rows + request, mask=real, other=0).to(tl.int64) * positions
        total = tl.load(own + computed - 1, mask=real & (computed > 0), other=0).to(tl.int64)
        for first in range(tl.min(tl.where(real, begin, 2147483647)), tl.max(tl.where(real, row, -1)) + 1, REQUESTS):
            fed = first + tl.arange(0, REQUESTS)
            mask = real[:, None] & (fed[None, :] >= begin[:, None]) & (fed[None, :] <= row[:, None])
            token = tl.load(input_ids + fed[None, :] + tl.zeros_like(row)[:, None], mask=mask, other=0)
            value = _mix(token, computed[:, None] + fed[None, :] - begin[:, None])
            total += tl.sum(tl.where(mask, value, 0), axis=1)
        tl.store(identity + slot, total.to(tl.int32), mask=kept)
        fate = tl.where(kept, KEPT, REJECTED)
        tl.store(state + slot, fate, mask=real & (slot >= 0))
        leads = real & (row == begin)  # one row of each request sees to what was sampled for it
        count = tl.load(num_sampled + request, mask=leads, other=0)
        position = computed + keeps - count + 1
        total = tl.load(own + position - 1, mask=leads, other=0).to(tl.int64)
        for each in range(most_sampled):
            mask = leads & (each < count)
            token = tl.load(sampled + request.to(tl.int64) * sampled_stride + each, mask=mask, other=0)
            total += tl.where(mask, _mix(token, position + each), 0)
            tl.store(own + position + each, total.to(tl.int32), mask=mask & (position + each < positions))


@triton.jit
def _report(ring, wrong, kind, step, row, position, pages, layer, slot):
    """Put findings into the ring."""
    none = tl.zeros_like(slot)
    place = tl.atomic_add(ring + FINDINGS_AT + none, 1, mask=wrong)
    tl.atomic_add(ring + KINDS_AT + none + kind, 1, mask=wrong)
    entry = ring + COUNTERS + (place % RING) * FIELDS
    tl.store(entry, none + step, mask=wrong)
    tl.store(entry + 1, none + row, mask=wrong)
    tl.store(entry + 2, none + position, mask=wrong)
    tl.store(entry + 3, none + pages, mask=wrong)
    tl.store(entry + 4, none + layer, mask=wrong)
    tl.store(entry + 5, none + kind, mask=wrong)
    tl.store(entry + 6, slot, mask=wrong)


@triton.jit(
    do_not_specialize=[
        "units", "offsets", "packing", "keys", "state", "identity", "content", "expected", "ring", "rows",
        "query_start_loc", "seq_lens", "table", "requests", "num_slots", "positions", "table_stride", "size", "seed",
        "everywhere", "pages", "adopt", "window", "chunk", "table_block_size", "layers", "wide", "block_stride",
        "head_stride", "slot_stride",
    ]
)  # fmt: skip
def _check(
    units, offsets, packing, keys, state, identity, content, expected, ring, rows, query_start_loc, seq_lens, table,
    requests, num_slots, positions, table_stride, size, seed, everywhere, pages, adopt, window, chunk,
    table_block_size, layers, wide, block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    SLOTS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)  # first the slots that are looked at in every layer, a program each; then the others
    in_each = program < wide * layers
    turn = tl.where(in_each, program % layers, 0)
    place = tl.where(in_each, program // layers, program - wide * layers + wide) * SLOTS + tl.arange(0, SLOTS)
    request = tl.load(requests + tl.program_id(1)).to(tl.int32)
    begin, end = tl.load(query_start_loc + request), tl.load(query_start_loc + 1 + request)
    computed = tl.load(seq_lens + request) - (end - begin)
    first = tl.where(window > 0, tl.maximum(computed - window + 1, 0), 0)
    first = tl.where(chunk > 0, computed // tl.maximum(chunk, 1) * chunk, first)
    count = computed - first
    most = tl.where((size > 0) & (size < count), size, count)
    if tl.min(place) >= most:
        return
    in_every_layer = place < everywhere
    layer = tl.where(in_every_layer, turn, (place + seed) % layers)
    valid = (place < most) & (in_every_layer | (turn == 0))
    row = tl.load(rows + request).to(tl.int64)
    seeded = seed.to(tl.int64) * 1024 + place
    newest = size // 2
    older, part, parts = count - newest, tl.maximum(place - newest, 0), tl.maximum(size - newest, 1)
    start = part * older // parts
    span = tl.maximum((part + 1) * older // parts - start, 1)
    drawn = first + start + ((_mix(seeded, tl.zeros_like(seeded) + row) & 0x7FFFFFFF) % span).to(tl.int32)
    drawn = tl.where((place < newest) | (count <= size), computed - 1 - place, drawn)
    position = tl.where(size > 0, drawn, first + place)
    block = tl.load(table + request.to(tl.int64) * table_stride + position // table_block_size, mask=valid, other=0)
    valid = valid & (block > 0)
    slot = block.to(tl.int64) * table_block_size + position % table_block_size
    was = tl.load(state + slot, mask=valid, other=0)
    wanted = tl.load(expected + row * positions + position, mask=valid, other=0)
    kept = (was & 3) == KEPT
    whole = valid & kept & (tl.load(identity + slot, mask=valid, other=0) == wanted)
    found = _content(
        units, offsets, packing, keys, layer, slot, valid, block_stride, head_stride, slot_stride,
        BLOCK_SIZE, HEADS, WIDTH, PACKED, SLOTS, UNITS,
    )  # fmt: skip
    own = content + layer.to(tl.int64) * num_slots + slot
    changed = whole & (tl.load(own, mask=valid, other=0) != found)
    if adopt != 0:
        tl.store(own, found, mask=valid)
        if turn == 0:
            strange = valid & ~whole
            tl.store(state + slot, tl.full([SLOTS], KEPT, tl.int32), mask=strange)
            tl.store(identity + slot, wanted, mask=strange)
            tl.atomic_add(ring + ADOPTED_AT, tl.sum(strange.to(tl.int64)))
    else:
        tl.store(own, found, mask=changed)
        _report(ring, changed, tl.zeros_like(slot), seed, row, position, pages, layer, slot)
        if turn == 0:
            wrong = valid & ~whole & ((was & REPORTED) == 0)
            kind = tl.where(kept, TOKEN, tl.where((was & 3) == REJECTED, REJECTED_ROW, UNWRITTEN))
            tl.store(state + slot, was | REPORTED, mask=wrong)
            _report(ring, wrong, tl.zeros_like(slot) + kind, seed, row, position, pages, -1, slot)
            tl.atomic_add(ring + CHECKED_AT, tl.sum(valid.to(tl.int64)))


class Launches:
    """Both kernels over some marks: what does not change from step to step is bound once."""

    def __init__(self, marks: Marks, expected: Tensor, ring: Tensor) -> None:
        pages = marks.pages
        packing = pages.offsets if pages.packing is None else pages.packing
        own = marks.keys, marks.state, marks.identity, marks.content, expected
        self._mark = _Bound(_mark, (pages.units, pages.offsets, packing, *own))
        self._check = _Bound(_check, (pages.units, pages.offsets, packing, *own, ring))
        self._marks, self._positions = marks, expected.stride(0)
        self._constants = pages.block_size, pages.heads, pages.width, pages.packing is not None, SLOTS, UNITS

    def mark(self, batch: Batch, slot_mapping: Tensor, outcome: Outcome) -> None:
        """As `cpu.OnCpu.mark`."""
        pages, sampled = self._marks.pages, outcome.sampled
        step = batch.rows, batch.query_start_loc, batch.seq_lens, batch.input_ids, slot_mapping, *outcome
        numbers = pages.num_slots, batch.num_requests, self._positions, sampled.stride(0), sampled.shape[1]
        grid = triton.cdiv(batch.num_tokens, SLOTS), len(pages.names), 1
        self._mark(grid, step, (*numbers, *pages.strides, *self._constants, 64))

    def check(self, batch: Batch, table: Tensor, sample: Sample, adopt: bool = False) -> None:
        """As `cpu.OnCpu.check`."""
        pages, layers = self._marks.pages, len(self._marks.pages.names)
        wide = triton.cdiv(min(sample.everywhere, sample.most), SLOTS)
        step = batch.rows, batch.query_start_loc, batch.seq_lens, table, sample.requests
        numbers = pages.num_slots, self._positions, table.stride(0), sample.size, sample.seed, sample.everywhere
        more = self._marks.index, int(adopt), pages.window, pages.chunk, pages.table_block_size, layers, wide
        grid = wide * (layers - 1) + triton.cdiv(sample.most, SLOTS), len(sample.requests), 1
        self._check(grid, step, (*numbers, *more, *pages.strides, *self._constants))


class _Bound:
    """A kernel whose first tensors stay where they are.

    Later launches of a signature hand over addresses: about each tensor Triton would ask the driver.
    """

    def __init__(self, kernel: Any, fixed: tuple[Tensor, ...]) -> None:
        self._kernel, self._fixed = kernel, fixed
        self._addresses = [tensor.data_ptr() for tensor in fixed]
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, grid: tuple[int, int, int], step: tuple[Tensor, ...], numbers: tuple) -> None:
        signature = tuple([tensor.dtype for tensor in step])
        compiled = self._compiled.get(signature)
        if compiled is None:
            self._compiled[signature] = self._kernel[grid](*self._fixed, *step, *numbers)
        else:
            compiled[grid](*self._addresses, *[tensor.data_ptr() for tensor in step], *numbers)
