# SPDX-License-Identifier: Apache-2.0
"""Marking and checking on a CPU. In numpy, whose calls on a few hundred numbers take a fraction of torch's."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .marks import (
    ADOPTED_AT,
    BYTES,
    CHECKED_AT,
    COUNTERS,
    FIELDS,
    FINDINGS_AT,
    KEPT,
    KINDS_AT,
    REJECTED,
    REJECTED_ROW,
    REPORTED,
    RING,
    TOKEN,
    UNWRITTEN,
    Batch,
    Marks,
    Outcome,
    Sample,
    mix,
)

TOGETHER = 32  # slots that are hashed at a time, so that what is gathered stays in the core's cache


class OnCpu:
    """Args:
    expected: int32 [requests, positions], the identities that requests must have. ring: `marks.new_ring`.
    """

    def __init__(self, marks: Marks, expected: Tensor, ring: Tensor) -> None:
        self._marks, self._expected, self._ring = marks, expected.numpy(), ring.numpy()
        self._state, self._identity, self._content = (
            values.numpy() for values in (marks.state, marks.identity, marks.content)
        )
        pages = marks.pages
        self._units, self._inside, self._keys = (values.numpy() for values in (pages.units, pages.inside, marks.keys))
        self._offsets = pages.offsets.numpy()

    def mark(self, batch: Batch, slot_mapping: Tensor, outcome: Outcome) -> None:
        """Mark the step's rows, after sampling and before anything else is written; what was sampled is expected next.

        Of a query the rows [0, query_len - num_rejected) are kept, the rule by which vLLM itself counts them as
        computed.

        Args:
            slot_mapping: int64 [T] or longer, the slots of the pages' cache group; -1 for a row that is not written.
        """
        expected, (rows, starts, lengths, computed) = self._expected, _requests(batch)
        request = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(request)) - starts[request]
        kept = lengths - outcome.num_rejected.numpy()[: len(rows)]
        running = np.zeros(len(request) + 1, dtype=np.int64)
        fed = batch.input_ids.numpy()[: len(request)].astype(np.int64)
        mix(fed, computed[request] + within).cumsum(out=running[1:])
        before = np.where(computed > 0, expected[rows, computed - 1], 0) - running[starts]
        identity = (running[1:] + before[request]).astype(np.int32)

        slots, is_kept = slot_mapping.numpy()[: len(request)], within < kept[request]
        self._state[slots[(slots >= 0) & ~is_kept]] = REJECTED
        is_kept &= slots >= 0
        slots = slots[is_kept]
        self._state[slots], self._identity[slots] = KEPT, identity[is_kept]
        self._content[:, slots] = self._contents(slots)

        sampled = outcome.sampled.numpy().astype(np.int64)
        counts, place = outcome.num_sampled.numpy()[: len(rows), None], np.arange(sampled.shape[1])
        position = (computed + kept + 1)[:, None] - counts + place
        values = np.where(place < counts, mix(sampled, position), 0).cumsum(1)
        values += expected[rows, position[:, 0] - 1][:, None]
        stays = (place < counts) & (position < expected.shape[1])
        expected[np.broadcast_to(rows[:, None], stays.shape)[stays], position[stays]] = values[stays].astype(np.int32)

    def check(self, batch: Batch, table: Tensor, sample: Sample, adopt: bool = False) -> None:
        """Check slots of rows that are in the pages before the step, and put what is wrong with them into the ring.

        A fault of a slot is found once: the slot's mark says that it was reported, or what its bytes are now.

        Args:
            table: int32 [R, blocks], the block table of the pages' cache group.
            adopt: mark the slots anew as what is expected, for rows that may come from elsewhere.
        """
        marks, pages, chosen = self._marks, self._marks.pages, sample.requests.numpy()
        rows, _, _, computed = (of_all[chosen, None] for of_all in _requests(batch))
        position, valid = self._draw(sample, rows, computed)
        size = pages.table_block_size
        block = table.numpy()[chosen[:, None], np.where(valid, position, 0) // size].astype(np.int64)
        valid = valid & (block > 0)  # 0 is in the place of blocks that a window has left
        slots, position = (block * size + position % size)[valid], position[valid]
        row = np.broadcast_to(rows, valid.shape)[valid]
        wanted = self._expected[row, position]
        state = self._state[slots]
        kept = (state & 3) == KEPT
        whole = kept & (self._identity[slots] == wanted)
        place = valid.nonzero()[1]
        everywhere = place < sample.everywhere
        elsewhere = ~everywhere
        number = len(pages.names)
        at = np.concatenate([everywhere.nonzero()[0].repeat(number), elsewhere.nonzero()[0]])
        turn = (place[elsewhere] + sample.seed) % number
        layers = np.concatenate([np.tile(np.arange(number), everywhere.sum()), turn])
        found = np.concatenate([self._contents(slots[everywhere]).T.ravel(), self._contents_in(slots[elsewhere], turn)])
        changed = (self._content[layers, slots[at]] != found) & whole[at]
        if adopt:
            self._state[slots[~whole]], self._identity[slots[~whole]] = KEPT, wanted[~whole]
            self._content[layers, slots[at]] = found
            self._ring[ADOPTED_AT] += (~whole).sum()
            return
        self._ring[CHECKED_AT] += len(slots)
        wrong = ~whole & ((state & REPORTED) == 0)
        if not (wrong.any() or changed.any()):
            return
        kind = np.where(kept, TOKEN, np.where((state & 3) == REJECTED, REJECTED_ROW, UNWRITTEN))
        self._state[slots[wrong]] |= REPORTED
        entry = np.zeros((len(slots), FIELDS), dtype=np.int64)
        entry[:, 0], entry[:, 1], entry[:, 2], entry[:, 3] = sample.seed, row, position, marks.index
        entry[:, 4], entry[:, 5], entry[:, 6] = -1, kind, slots
        self._report(entry[wrong])
        at, layers = at[changed], layers[changed]
        self._content[layers, slots[at]] = found[changed]
        entry = entry[at]
        entry[:, 4], entry[:, 5] = layers, BYTES
        self._report(entry)

    def _draw(self, sample: Sample, rows: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 and bool [n, most]: positions to look at, and which of them there are. rows, computed: [n, 1]."""
        pages, first = self._marks.pages, np.zeros_like(computed)
        if pages.window:
            first = np.maximum(computed - pages.window + 1, 0)
        elif pages.chunk:
            first = computed // pages.chunk * pages.chunk
        count, place = computed - first, np.arange(sample.most)[None]
        if not sample.size:
            return first + place, place < count
        newest = sample.size // 2
        older, part, parts = count - newest, np.maximum(place - newest, 0), sample.size - newest
        begin, end = part * older // parts, (part + 1) * older // parts
        drawn = first + begin + (mix(sample.seed * 1024 + place, rows) & 0x7FFFFFFF) % np.maximum(end - begin, 1)
        drawn = np.where((place < newest) | (count <= sample.size), computed - 1 - place, drawn)
        return drawn, place < np.minimum(count, sample.size)

    def _contents(self, slots: np.ndarray) -> np.ndarray:
        """int32 [layers, n], the hash of what lies in the slots now."""
        found = np.empty((len(self._offsets), len(slots)), dtype=np.int32)
        for begin in range(0, len(slots), TOGETHER):
            part = slice(begin, begin + TOGETHER)
            places = self._places(slots[part])
            for layer, offset in enumerate(self._offsets):
                found[layer, part] = self._hash(self._units[offset:], places)
        return found

    def _contents_in(self, slots: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """int32 [n], the hash of what lies in each slot now in one layer, int64 [n]."""
        found = np.empty(len(slots), dtype=np.int32)
        for begin in range(0, len(slots), TOGETHER):
            part = slice(begin, begin + TOGETHER)
            places = self._places(slots[part])
            places += self._offsets[layers[part], None]
            found[part] = self._hash(self._units, places)
        return found

    def _places(self, slots: np.ndarray) -> np.ndarray:
        """As `Pages.addresses`."""
        pages = self._marks.pages
        places = self._inside.take(slots % pages.block_size, axis=0)
        places += (slots // pages.block_size * pages.strides[0])[:, None]
        return places

    def _hash(self, units: np.ndarray, places: np.ndarray) -> np.ndarray:
        return np.einsum("ij,j->i", units.take(places), self._keys) >> 32

    def _report(self, entries: np.ndarray) -> None:
        """Put findings into the ring."""
        ring, total = self._ring, self._ring[FINDINGS_AT]
        ring[COUNTERS:].reshape(RING, FIELDS)[(total + np.arange(len(entries))) % RING] = entries
        ring[FINDINGS_AT] += len(entries)
        ring[KINDS_AT : KINDS_AT + 4] += np.bincount(entries[:, 5], minlength=4)


def _requests(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """int64 [R] each: a step's requests' rows, where their queries start, those lengths, and the tokens of each whose
    rows are in the pages before the step."""
    count = batch.num_requests
    starts = batch.query_start_loc.numpy()[: count + 1].astype(np.int64)
    lengths = np.diff(starts)
    rows = batch.rows.numpy()[:count].astype(np.int64)
    return rows, starts[:-1], lengths, batch.seq_lens.numpy()[:count] - lengths
