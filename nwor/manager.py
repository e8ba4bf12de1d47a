# SPDX-License-Identifier: Apache-2.0
"""The manager of one worker: holds a verify window's rows back from the paged cache until sampling has judged them.

A window opens once before the forward (`begin`), every target layer stages into it (`stage`), and it closes once
after rejection sampling (`commit`), or not at all (`cancel`). Of a request's query the rows
``[0, query_len - num_rejected)`` are kept: the rule by which vLLM itself advances ``num_computed_tokens``.

Mode ``cow`` holds the draft rows' old bytes in `rows` while vLLM writes as always, and logs a slot's bytes once,
however many windows reach it before one of its drafts is accepted; mode ``stage`` holds the drafts' new bytes in
`rows` while their slots stay as they were. Row 0 of a window, the token sampled last, is never rejected, and vLLM
publishes the block that it fills to the prefix cache while it schedules the step: it is written at once.

Which rows are held is worked out on the device, into tensors that live as long as the manager: a CUDA graph captured
once reads them in every replay, and no step waits for the device. vLLM's own buffers are never changed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor import ops
from nwor.attention.configs import next_power_of_2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheLayout:
    """Where the slots of every target layer lie inside vLLM's one KV allocation.

    pool: uint8 [bytes], the whole allocation.
    layer_offsets: int64 [L], byte offset of each layer's first element.
    strides: bytes between blocks, heads and tokens, the same for all layers.
    num_heads, block_size: H and N; row_bytes: C, the bytes of one slot and head, keys then values.
    dtype: the cache's element type (uint8 for fp8 caches).
    packing: int32 [N, E] or None. For caches whose slots are scattered inside a (block, head) chunk, element e of
        in-block offset n lies at element ``packing[n, e]`` of the chunk.
    """

    pool: Tensor
    layer_offsets: Tensor
    strides: tuple[int, int, int]
    num_heads: int
    block_size: int
    row_bytes: int
    dtype: torch.dtype
    packing: Tensor | None = None

    @classmethod
    def of(cls, kv_caches: Sequence[Tensor], packing: Tensor | None = None) -> "CacheLayout":
        """Read the layout off the layers' cache views, each [num_blocks, H, N, 2 * head_size] of any strides.

        Raises:
            ValueError: the layers differ in shape, strides or dtype, or do not share one allocation.
        """
        first = kv_caches[0]
        storage = first.untyped_storage()
        for index, cache in enumerate(kv_caches):
            if cache.untyped_storage().data_ptr() != storage.data_ptr():
                raise ValueError(f"layer {index} lies in another allocation than layer 0")
            if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
                raise ValueError(
                    f"layer {index} is {tuple(cache.shape)}/{cache.stride()}/{cache.dtype}, "
                    f"layer 0 is {tuple(first.shape)}/{first.stride()}/{first.dtype}"
                )
            if cache.dim() != 4 or cache.stride(3) != 1:
                raise ValueError(f"layer {index} is no [blocks, heads, block_size, 2 * head_size] view with dense rows")
        _, num_heads, block_size, width = first.shape
        size = first.element_size()
        return cls(
            pool=torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage),
            layer_offsets=torch.tensor([c.storage_offset() * size for c in kv_caches], dtype=torch.int64).to(
                first.device
            ),
            strides=(first.stride(0) * size, first.stride(1) * size, first.stride(2) * size),
            num_heads=num_heads,
            block_size=block_size,
            row_bytes=width * size,
            dtype=first.dtype,
            packing=packing,
        )

    @property
    def num_layers(self) -> int:
        return self.layer_offsets.numel()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in one layer on this rank."""
        return self.num_heads * self.row_bytes

    def new_rows(self, capacity: int) -> Tensor:
        """A zeroed mini-cache uint8 [L, ceil(capacity / N), H, N, C] in the pool's own order of heads and tokens."""
        blocks = -(-capacity // self.block_size)
        heads_inside = self.strides[1] < self.strides[2] and self.packing is None
        order = (self.block_size, self.num_heads) if heads_inside else (self.num_heads, self.block_size)
        rows = torch.zeros(self.num_layers, blocks, *order, self.row_bytes, dtype=torch.uint8, device=self.pool.device)
        return rows.transpose(2, 3) if heads_inside else rows


def log_ring(max_drafts: int, block_size: int) -> int:
    """Rows of a request in a log that outlives its step, 0 where blocks are too short for one.

    A power of two that divides the block size: consecutive positions have rows of their own, found by the slot alone.
    """
    ring = next_power_of_2(max_drafts)
    return ring if block_size % ring == 0 else 0


def rows_held(mode: str, max_drafts: int, block_size: int) -> int:
    """Rows that a manager has room for, of each request and layer."""
    return max_drafts if mode == "stage" else log_ring(max_drafts, block_size) or max_drafts


@dataclass
class Counters:
    """What one rank has done since start-up, in tokens, rows or bytes; drafts only, where it says tokens.

    A held row is counted once, whatever the number of layers; `stage_operations` counts it once a layer.
    """

    windows: int = 0
    staged_tokens: int = 0
    committed_tokens: int = 0
    rejected_tokens: int = 0
    stage_operations: int = 0
    bytes_written: int = 0
    bytes_avoided: int = 0
    fallbacks: int = 0
    cancelled: int = 0


@dataclass(frozen=True)
class Receipt:
    """What a commit did, on its way to the host.

    tally: uint8, `DraftCommitManager.tally` as the commit left it, being copied.
    ready: the CUDA event after the copy, None on a CPU.
    """

    manager: "DraftCommitManager"
    tally: Tensor
    ready: torch.cuda.Event | None

    def read(self) -> tuple[Counters, list[int]]:
        """Wait for the copy; returns the counters and the committed drafts of each request."""
        if self.ready is not None:
            self.ready.synchronize()
        counts, kept = self.manager.split(self.tally)
        return self.manager.counters_of(counts.tolist()), kept.tolist()


class DraftCommitManager:
    """Begin, stage, commit, cancel, over all target layers of one rank.

    Args:
        layout: where the layers' slots lie.
        mode: ``cow`` or ``stage``.
        max_requests: the most requests of a batch; a larger batch falls back to vLLM's own write.
        max_drafts: the most drafts of a request; a request with more falls back.
        max_tokens: the most rows of a batch.
        replayed: forwards may be replays of CUDA graphs, which call no hook: a layer that went through its hook once,
            when the graph was captured, counts as staged from then on.

    Attributes:
        width: W, the rows of a request that may be held: its k drafts.
        slots: int64 [max_requests, W], the page slots of the held rows. Right-aligned: behind the row of column w lie
            W - 1 - w rows of its query; -1: no row. Row (r, w) lies in `rows` as row ``r * W + w``, but where `logged`
            says.
        rows: uint8 [L, B', H, N, C], old bytes (``cow``) or new ones (``stage``), as in `ops.log_all_layers`.
        logged: int64 [max_requests, P], ``cow`` only, as in `ops.log_all_layers`: what `rows` still holds of the window
            before. None where blocks are shorter than windows: then each window is logged whole.
        staging_rows, page_slots: int64 [max_tokens], ``stage`` only: for each row of the batch its row in `rows`, or
            -1; and the slot vLLM's writer is to take, -1 for held rows.
        stored_first: a query of this step may read a row of another (`begin`), so vLLM's writer and attention run
            before an attention that stores rows as it attends.
        graphs_of_prefills: a FULL graph may be replayed for a batch with prefill rows.
        rehearsing: the next forward is a dummy run or a capture, which has to launch all that a replay may need.
    """

    def __init__(
        self,
        layout: CacheLayout,
        mode: str,
        max_requests: int,
        max_drafts: int,
        max_tokens: int,
        replayed: bool = False,
    ) -> None:
        if mode not in ("cow", "stage"):
            raise ValueError(f"a manager serves cow or stage, not {mode!r}")
        device = layout.pool.device
        self.layout, self.mode, self.replayed = layout, mode, replayed
        self.width = max_drafts
        self.rows = layout.new_rows(max_requests * rows_held(mode, max_drafts, layout.block_size))
        self.logged: Tensor | None = None
        if mode == "cow" and (ring := log_ring(max_drafts, layout.block_size)):
            self.logged = torch.full((max_requests, ring), -1, dtype=torch.int64, device=device)
        self.slots = torch.full((max_requests, self.width), -1, dtype=torch.int64, device=device)
        self.staging_rows: Tensor | None = None
        self.page_slots: Tensor | None = None
        if mode == "stage":
            self.staging_rows = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
            self.page_slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self.attention: Any = None  # the GPU attention's workspace
        self.graphs_of_prefills = False
        self.tally = torch.zeros(5 * 8 + max_requests * 4, dtype=torch.uint8, device=device)
        self.counts, self.kept = self.split(self.tally)
        self.rehearsing, self.stored_first = True, False
        self.num_requests: int | None = None
        self._slot_mapping: Tensor | None = None
        self._before: Sequence[str] = ()
        self._staged = layout.num_layers * [False]
        self._warned, self._cancelled = False, 0

    @property
    def is_open(self) -> bool:
        return self.num_requests is not None

    @property
    def max_query_len(self) -> int:
        """Rows of a window's query at most: the token sampled last and the drafts."""
        return self.width + 1

    @property
    def holding(self) -> bool:
        """A window of mode ``stage`` is open, so the target layers' writes and attention are ours."""
        return self.is_open and self.mode == "stage"

    def begin(
        self,
        query_start_loc: Tensor,
        cu_num_logits: Tensor,
        slot_mapping: Tensor,
        requests: Sequence[str] = (),
        stored_first: bool = False,
    ) -> bool:
        """Open a window, before the forward.

        A request with d drafts brings them as the last d rows of its query, behind the token it sampled last, and has
        d + 1 logits. The drafts are held. A request without drafts (prefill, or a decode whose drafter had nothing)
        holds no row; nor does one with drafts behind prefill rows under ``stage``.

        Args:
            query_start_loc: int32 [num_reqs + 1] or longer, where each request's query starts in the batch.
            cu_num_logits: int32 [num_reqs + 1], where each request's logits start.
            slot_mapping: int64 [num_tokens] or longer, the slots of the target layers' cache group.
            requests: the ids of the batch's requests where all of its rows but one a request are drafts, else none.
                Where they are those of the step before, nothing has written between its restore and now to any slot
                that is logged, but to those that no window will reach again.
            stored_first: whether a request of the batch may read rows that another writes in this very step.

        Returns:
            False where the batch does not fit: vLLM's own write serves this step.

        Raises:
            RuntimeError: a window is open already.
        """
        if self.is_open:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        self.rehearsing = False
        num_requests = cu_num_logits.numel() - 1
        fits = num_requests <= len(self.slots)
        if not fits and not self._warned:
            self._warned = True
            logger.warning(
                "NWOR: a batch of %d requests does not fit %d; "
                "vLLM's own write serves such steps, counted as fallbacks",
                num_requests,
                len(self.slots),
            )
        before, self._before = self._before, ()
        ops.open_window(
            query_start_loc,
            cu_num_logits,
            slot_mapping,
            self.slots if fits else self.slots.new_empty(num_requests, 0),  # no columns: every window falls back
            self.staging_rows,
            self.page_slots,
            self.counts,
        )
        if not fits:
            return False
        self.num_requests, self._slot_mapping, self.stored_first = num_requests, slot_mapping, stored_first
        if self.mode == "cow":
            if self.logged is not None and not (requests and requests == before):
                self.logged.fill_(-1)
            self._before = list(requests)
            ops.log_all_layers(*self._cache(), self._held(), self.layout.packing, self.rows, self.logged)
        if not self.replayed:
            self._staged = self.layout.num_layers * [False]
        return True

    def clear(self, slot_mapping: Tensor | None = None) -> None:
        """Hold nothing in the next forward: a dummy run, or with `slot_mapping` a step without drafts.

        Raises:
            RuntimeError: a window is open.
        """
        if self.is_open:
            raise RuntimeError("a window is open: commit or cancel it before clear, or its rows are lost")
        self.rehearsing, self._before = slot_mapping is None, ()
        if self.staging_rows is None or self.page_slots is None:
            return
        self.staging_rows.fill_(-1)
        self.page_slots.fill_(-1)
        if slot_mapping is not None:
            self.page_slots[: slot_mapping.numel()] = slot_mapping

    def stage(
        self, layer: int, write: Callable[[Tensor, Tensor], None], kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Take over one layer's cache write: held rows go to staging, all others to the pages as ever.

        Args:
            layer: the target layer's index.
            write: vLLM's own writer, called with a cache and a slot mapping; it skips negative slots and makes the
                bytes, so that staged and written rows cannot differ.
            kv_cache: the layer's cache.
            slot_mapping: int64, the layer's slots for this call; a view into the batch's buffer when the batch is
                split, so rows are found by its offset in that buffer.
        """
        assert self._slot_mapping is not None and self.staging_rows is not None and self.page_slots is not None
        if slot_mapping.untyped_storage().data_ptr() != self._slot_mapping.untyped_storage().data_ptr():
            raise RuntimeError("slot_mapping is a copy, no view of the batch's buffer: its rows cannot be told")
        first = slot_mapping.storage_offset() - self._slot_mapping.storage_offset()
        part = slice(first, first + slot_mapping.numel())
        write(kv_cache, self.page_slots[part])
        write(self.staged(layer), self.staging_rows[part])
        self.mark_staged(layer)

    def mark_staged(self, layer: int) -> None:
        """The layer's rows are in staging, or will be in every replay of the graph being captured."""
        self._staged[layer] = True

    def staged(self, layer: int) -> Tensor:
        """The layer's staging as a mini-cache of the cache's own dtype: [blocks, H, N, 2 * head_size]."""
        return self.rows[layer].view(self.layout.dtype)

    def commit(self, num_rejected: Tensor) -> None:
        """Close the window, after sampling and before the next forward: keep the accepted rows, and only those.

        Args:
            num_rejected: int32 [num_reqs], rejected drafts of each request.

        Raises:
            RuntimeError: no window is open; or a target layer did not stage: then the window is cancelled and the cache
                is as it was.
        """
        if not self.is_open:
            raise RuntimeError("no window is open: begin one before the forward, and commit it once")
        if self.mode == "stage" and not all(self._staged):
            missing = [layer for layer, staged in enumerate(self._staged) if not staged]
            self.cancel()
            raise RuntimeError(
                f"target layers {missing} staged nothing: their attention does not go through NWOR's hook"
            )
        kept = self.kept[: self.num_requests]
        arguments = *self._cache(), self._held(), self.layout.packing, self.rows, num_rejected, kept, self.counts
        if self.mode == "cow":
            ops.restore_all_layers(*arguments, self.logged)
        else:
            ops.commit_all_layers(*arguments)
        self.num_requests = self._slot_mapping = None

    def cancel(self) -> None:
        """Close the window and leave the held rows' slots as before `begin`; does nothing when none is open."""
        if not self.is_open:
            return
        held = (self._held() >= 0).sum(dim=1)
        if self.mode == "cow":
            everything = torch.full_like(held, self.width, dtype=torch.int32)
            nowhere = torch.empty_like(everything), torch.zeros_like(self.counts)
            ops.restore_all_layers(
                *self._cache(), self._held(), self.layout.packing, self.rows, everything, *nowhere, self.logged
            )
        self.counts[2] -= (held > 0).sum()
        self.counts[3] -= held.sum()
        self._cancelled += 1
        self._before = ()
        self.num_requests = self._slot_mapping = None

    def receipt(self, stream: torch.cuda.Stream | None) -> Receipt:
        """What the last commit did, without waiting for it; to be called on the stream of the commit.

        stream: copies to the host, which the drafter then does not wait for; None on a CPU.
        """
        tally = self.tally.clone()
        if stream is None:
            return Receipt(self, tally.cpu(), None)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copied, ready = tally.to("cpu", non_blocking=True), torch.cuda.Event(blocking=True)
            tally.record_stream(stream)
            ready.record()
        return Receipt(self, copied, ready)

    def read_counters(self) -> Counters:
        """Counters up to now; waits for the device."""
        return self.counters_of(self.counts.tolist())

    def reset_counters(self) -> None:
        """Forget warm-up and dummy runs."""
        self.tally.zero_()
        self._cancelled = 0

    @staticmethod
    def split(tally: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a tally: counts int64 [5], as `ops.open_window` and `ops.commit_all_layers` raise them, and kept
        int32 [max_requests], the last commit's kept rows of each request."""
        return tally[:40].view(torch.int64), tally[40:].view(torch.int32)

    def counters_of(self, counts: list[int]) -> Counters:
        """Counters from the device's five counts."""
        kept, rejected, windows, drafts, fallbacks = counts
        layers = self.layout.num_layers
        row = self.layout.slot_bytes * layers
        if self.mode == "cow":  # vLLM wrote every draft, and the rejected ones were written once more
            written, avoided = kept + 2 * rejected, 0
        else:
            written, avoided = kept, rejected
        return Counters(
            windows=windows,
            staged_tokens=drafts,
            committed_tokens=kept,
            rejected_tokens=rejected,
            stage_operations=layers * drafts,
            bytes_written=written * row,
            bytes_avoided=avoided * row,
            fallbacks=fallbacks,
            cancelled=self._cancelled,
        )

    def _held(self) -> Tensor:
        return self.slots[: self.num_requests]

    def _cache(self) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
        return self.layout.pool, self.layout.layer_offsets, self.layout.strides


@dataclass
class LayerContext:
    """What a hook needs of the layer it is called for; travels on the layer itself."""

    manager: DraftCommitManager
    index: int
