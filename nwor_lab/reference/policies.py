# SPDX-License-Identifier: Apache-2.0
"""Four ways to write draft tokens, each as one page: `begin`, then `stage` and `attend` in every layer, then `commit`.

off     write all rows to the pages, as vLLM does; rejected rows stay there until they are overwritten
blind   hold the window's rows back, but attend to the pages alone, where they are missing
cow     log the draft slots, write all rows, restore the rejected ones
stage   hold the drafts back; attend to the pages up to them, and to the tail in staging

The first row of a window, the token sampled last, is never rejected. vLLM publishes the block that it fills to the
prefix cache while it schedules the step, so `stage` writes it at once; `blind` holds it back as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_lab.reference.cache import Batch, PagedCache
from nwor_lab.reference.staging import Counts, KVCacheInterceptor


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention of the last Q of N positions: `query [Q, Hq, D]`, `key, value [N, Hkv, D]`."""
    rows, positions = len(query), len(key)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,nhd->hqn", query, key) * query.shape[-1] ** -0.5
    ahead = torch.ones(rows, positions, dtype=torch.bool).triu(positions - rows + 1)
    return torch.einsum("hqn,nhd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)


class WriteAll:
    """Mode `off`: the write that vLLM makes, and the frame that the other three fill in.

    Args:
        cache: the pages of the layers that the window concerns.
        capacity: most rows of a window, for the policies that hold them back.
    """

    def __init__(self, cache: PagedCache, capacity: int = 512) -> None:
        self.cache = cache
        self.counts = Counts()

    def begin(self, batch: Batch) -> None:
        """Open the step's window, once, before the forward."""
        self.batch = batch

    def stage(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take the layer's new rows, `key, value [T, H, D]`."""
        self.cache.layers[layer].write(key, value, self.batch.slot_mapping)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attention of `query [T, Hq, D]` over what each row's request has so far; returns `[T, Hq, D]`."""
        self.cache.traffic.count("attention", launches=1)
        parts = query.split(self.batch.query_lens.tolist())
        return torch.cat([attention(q, *self.rows(layer, r, q.dtype)) for r, q in enumerate(parts)])

    def rows(self, layer: int, request: int, dtype: torch.dtype) -> Tensor:
        """The keys and values `[2, N, H, D]` that attention sees of a request."""
        tail = int(self.batch.query_lens[request]) if self.batch.num_drafts[request] else 0
        return self.cache.layers[layer].read(self.batch.sequence_slots[request], dtype, tail)

    def commit(self, num_rejected: Tensor) -> None:
        """Close the window: of each query the last `num_rejected[r]` rows, int64 `[R]`, are dropped."""
        self.batch.kept(num_rejected)

    def cancel(self) -> None:
        """Close the window before a decision, after a failed forward."""


class CopyOnWrite(WriteAll):
    """Mode `cow`: vanilla's write and read, between a log of the draft slots and a restore of the rejected ones."""

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.log: list[Tensor] = []
        if len(batch.draft_rows):
            slots = batch.slot_mapping[batch.draft_rows]
            self.log = [context.load(slots) for context in self.cache.layers.values()]
            self._count("log", len(slots))

    def commit(self, num_rejected: Tensor) -> None:
        self._restore(~self.batch.kept(num_rejected)[self.batch.draft_rows])

    def cancel(self) -> None:
        self._restore(torch.ones(len(self.batch.draft_rows), dtype=torch.bool))

    def _restore(self, rejected: Tensor) -> None:
        if not self.log:
            return
        slots = self.batch.slot_mapping[self.batch.draft_rows][rejected]
        for context, rows in zip(self.cache.layers.values(), self.log, strict=True):
            context.store(rows[:, rejected], slots)
        self._count("restore", len(slots))
        self.log = []

    def _count(self, kind: str, rows: int) -> None:
        moved = rows * sum(context.row_bytes for context in self.cache.layers.values())
        self.cache.traffic.count(kind, read=moved, written=moved, launches=1)


class BlindStaging(WriteAll):
    """Mode `blind`: rows wait in staging, and attention reads slots that nobody has written."""

    fused = False

    def __init__(self, cache: PagedCache, capacity: int = 512) -> None:
        super().__init__(cache)
        self.interceptor = KVCacheInterceptor(cache.layers, capacity, fused=self.fused)
        self.interceptor.ready = True
        self.counts = self.interceptor.counts

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.interceptor.begin(batch.slot_mapping, self.held_rows)

    @property
    def held_rows(self) -> Tensor:
        """Rows of the batch that are held back, int64 `[M]`."""
        return self.batch.window_rows

    def stage(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.interceptor.write(self.cache.layers[layer], key, value, self.batch.slot_mapping)

    def commit(self, num_rejected: Tensor) -> None:
        self.interceptor.commit(self.batch.kept(num_rejected))

    def cancel(self) -> None:
        self.interceptor.cancel()


class Staging(BlindStaging):
    """Mode `stage`: the drafts alone wait, in a tail that attention can see."""

    fused = True

    @property
    def held_rows(self) -> Tensor:
        return self.batch.draft_rows

    def stage(self, layer: int, key: Tensor, value: Tensor) -> None:
        prefills = len(self.batch.window_rows) < len(self.batch.slot_mapping)  # these need vLLM's writer
        self.interceptor.write(self.cache.layers[layer], key, value, self.batch.slot_mapping, launches=int(prefills))

    def rows(self, layer: int, request: int, dtype: torch.dtype) -> Tensor:
        drafts, buffer = self.batch.num_drafts, self.interceptor.buffer
        first, end = int(drafts[:request].sum()), int(drafts[: request + 1].sum())  # in the buffer
        if buffer is None or first == end:
            return super().rows(layer, request, dtype)
        context, slots = self.cache.layers[layer], self.batch.sequence_slots[request]
        sampled = len(slots) - 1 - (end - first)
        pages = context.read(slots[:sampled], dtype)
        # Not counted, nor is the tail: a kernel that attends and stores has these rows on one read.
        own = context.decode(context.load(slots[sampled : sampled + 1]), dtype)
        return torch.cat((pages, own, buffer.tail(layer, torch.arange(first, end), dtype)), dim=1)


POLICIES: dict[str, type[WriteAll]] = {"off": WriteAll, "blind": BlindStaging, "cow": CopyOnWrite, "stage": Staging}


def make_policy(mode: str, cache: PagedCache, capacity: int = 512) -> WriteAll:
    """The policy of `mode`; ValueError for a mode that is none."""
    if mode not in POLICIES:
        raise ValueError(f"{mode!r} is no mode; choose one of {', '.join(POLICIES)}")
    return POLICIES[mode](cache, capacity)
