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
from torch._subclasses import FakeTensor

from nwor_lab.reference.cache import Batch, PagedCache
from nwor_lab.reference.staging import Counts, StagingBuffer


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

    Attributes:
        counts: what became of the windows of such a policy.
        ready: False during profiling and dummy runs, of which such a policy neither holds nor counts anything.
    """

    ready = False

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


class KVCacheInterceptor(WriteAll):
    """What `blind` and `stage` share: a window's rows go to a `StagingBuffer`, all others to the pages at once.

    Any error inside a window makes it fall back: what was staged is written through to the pages, the rest of the
    window is written directly, and `counts.fallbacks` says so. No token is lost either way.

    Attributes:
        fused: as a `StagingBuffer` has it; the rows that are not held are then written by attention's own launch.
        buffer: the open window's, None where writes are direct.
        last_error: the one that made a window fall back.
    """

    fused = True

    def __init__(self, cache: PagedCache, capacity: int = 512) -> None:
        super().__init__(cache)
        self.capacity = capacity
        self.last_error: Exception | None = None
        self.buffer: StagingBuffer | None = None
        self._held: Tensor | None = None  # rows of the open window, also when it has fallen back

    @property
    def state(self) -> str:
        """`staging` while a window's rows are held back, else `direct`."""
        return "staging" if self.buffer else "direct"

    @property
    def held_rows(self) -> Tensor:
        """Rows of the batch that are held back, int64 `[M]`."""
        return self.batch.window_rows

    def begin(self, batch: Batch) -> None:
        """Hold the window's rows back; those without a slot (negative) are padding and part of no window.

        Raises:
            RuntimeError: the window before was neither committed nor cancelled; it stays as it is.
        """
        if self._held is not None:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        super().begin(batch)
        slots = batch.slot_mapping
        if not self.ready or is_fake(slots) or not len(self.held_rows):
            return
        self._held = self.held_rows[slots[self.held_rows] >= 0]
        # Its slots are a copy: the drafter reuses the tensor before the window is over.
        self.buffer = StagingBuffer(slots[self._held], fused=self.fused)
        if len(self._held) > self.capacity:
            self._fall_back(OverflowError(f"a window of {len(self._held)} tokens, but staging holds {self.capacity}"))

    def stage(self, layer: int, key: Tensor, value: Tensor) -> None:
        if is_fake(key):
            return
        context, slots = self.cache.layers[layer], self.batch.slot_mapping
        if self.buffer is None or self._held is None:
            context.write(key, value, slots)
            return
        try:
            self.buffer.stage(context, torch.arange(len(self._held)), key[self._held], value[self._held])
        except Exception as error:  # noqa: BLE001 - any error means direct writes
            self._fall_back(error)
            context.write(key, value, slots)
        else:
            prefills = len(self.batch.window_rows) < len(slots)  # these need vLLM's writer
            launches = int(prefills or not self.fused)
            context.write(key, value, slots.index_fill(0, self._held, -1), launches)

    def commit(self, num_rejected: Tensor) -> None:
        """Without a window, and after a fallback, there is nothing left to write."""
        kept = self.batch.kept(num_rejected)
        if self.buffer and self._held is not None:
            kept, buffer = kept[self._held], self.buffer
            try:
                buffer.commit(kept, self.cache.layers)
            except Exception as error:  # noqa: BLE001
                self._fall_back(error, kept)
            else:
                self.counts.windows += 1
                self.counts.stage_operations += buffer.stage_operations
                self.counts.staged_tokens += len(kept)
                self.counts.committed_tokens += int(kept.sum())
                self.counts.rejected_tokens += int((~kept).sum())
        self.buffer = self._held = None

    def cancel(self) -> None:
        """Drop the window, if one is open: unless it fell back, the pages are as they were before `begin`."""
        self.counts.cancelled += self.state == "staging"
        self.buffer = self._held = None

    def _fall_back(self, error: Exception, kept: Tensor | None = None) -> None:
        """Write through what was staged, of it the rows of `kept` if the verifier has decided."""
        self.counts.fallbacks += 1
        self.last_error = error
        if self.buffer:
            self.buffer.write_through(torch.ones_like(self.buffer.token_mask) if kept is None else kept)
        self.buffer = None


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no data to write: a tracer's fake tensor, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


class BlindStaging(KVCacheInterceptor):
    """Mode `blind`: rows wait in staging, and attention reads slots that nobody has written."""

    fused = False


class Staging(KVCacheInterceptor):
    """Mode `stage`: the drafts alone wait, in a tail that attention can see."""

    @property
    def held_rows(self) -> Tensor:
        return self.batch.draft_rows

    def rows(self, layer: int, request: int, dtype: torch.dtype) -> Tensor:
        drafts, buffer = self.batch.num_drafts, self.buffer
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
    """The policy of `mode`, its warm-up over."""
    policy = POLICIES[mode](cache, capacity)
    policy.ready = True
    return policy
