# SPDX-License-Identifier: Apache-2.0
"""The manager of one worker: holds a verify window's rows back from the paged cache until sampling has judged them.

A window opens once before the forward (`begin`), every target layer stages into it (`stage`), and it closes once
after rejection sampling (`commit`), or not at all (`cancel`). Of a request's query the rows
``[0, query_len - num_rejected)`` are kept: the rule by which vLLM itself advances ``num_computed_tokens``.

Mode ``cow`` holds the draft rows' old bytes in `rows` while vLLM writes as always; mode ``stage`` holds the window's
new bytes in `rows` while the pages stay as they were.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor import ops

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


@dataclass(frozen=True)
class Window:
    """The rows of one step that are held back.

    rows: int64 [M], their positions in the batch.
    request: int32 [M], the batch index of each row's request.
    rows_behind: int32 [M], how many rows of the same query lie behind each row; a row is rejected when
        ``rows_behind < num_rejected[request]``.
    start: int32 [num_reqs], each request's first position in this window, -1 where it has none.
    num_drafts: drafts per request (host), the rest of the window's rows being the requests' last sampled tokens.
    whole_batch: every row of the batch is held.
    """

    rows: Tensor
    request: Tensor
    rows_behind: Tensor
    start: Tensor
    num_drafts: tuple[int, ...]
    whole_batch: bool

    def __len__(self) -> int:
        return self.rows.numel()

    @classmethod
    def of(
        cls, query_start_loc: Sequence[int], num_drafts: Sequence[int], device: torch.device, *, sampled_rows: bool
    ) -> "Window":
        """Find the held rows of a batch.

        A request with d > 0 drafts brings them as the last d rows of its query, behind the token it sampled last.
        A request without drafts (prefill, or a decode whose drafter had nothing) holds no row.

        Args:
            query_start_loc: [num_reqs + 1], where each request's query starts in the batch.
            num_drafts: [num_reqs], its draft tokens.
            device: where the tensors are to live.
            sampled_rows: hold the last sampled token's row too (mode ``stage``), not the drafts alone (``cow``).
        """
        rows: list[int] = []
        request: list[int] = []
        behind: list[int] = []
        start: list[int] = []
        for index, drafts in enumerate(num_drafts):
            end = query_start_loc[index + 1]
            if drafts + 1 > end - query_start_loc[index]:
                raise ValueError(f"request {index} has {drafts} drafts in {end - query_start_loc[index]} rows")
            held = drafts + int(sampled_rows) if drafts else 0
            start.append(len(rows) if held else -1)
            rows.extend(range(end - held, end))
            request.extend([index] * held)
            behind.extend(range(held - 1, -1, -1))
        return cls(
            rows=torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
            request=torch.tensor(request, dtype=torch.int32).to(device, non_blocking=True),
            rows_behind=torch.tensor(behind, dtype=torch.int32).to(device, non_blocking=True),
            start=torch.tensor(start, dtype=torch.int32).to(device, non_blocking=True),
            num_drafts=tuple(num_drafts),
            whole_batch=len(rows) == query_start_loc[len(num_drafts)],
        )


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


class DraftCommitManager:
    """Begin, stage, commit, cancel, over all target layers of one rank.

    Args:
        layout: where the layers' slots lie.
        mode: ``cow`` or ``stage``.
        capacity: the most rows a window may hold; a larger one falls back to vLLM's own write.
        max_tokens: the most rows a batch may have.
        emulate: mode ``stage`` without an attention that reads staged rows: vLLM writes and attends, and each layer
            then moves the new bytes into staging and puts the old ones back. Exact, but it is no saving.
    """

    def __init__(self, layout: CacheLayout, mode: str, capacity: int, max_tokens: int, emulate: bool = False) -> None:
        if mode not in ("cow", "stage"):
            raise ValueError(f"a manager serves cow or stage, not {mode!r}")
        device = layout.pool.device
        self.layout, self.mode, self.capacity, self.emulate = layout, mode, capacity, emulate
        self.rows = layout.new_rows(capacity)
        self.old_rows = layout.new_rows(capacity) if emulate else None
        self.slots = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.staging_slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self.kept_and_rejected = torch.zeros(2, dtype=torch.int64, device=device)
        self.counters = Counters()
        self.window: Window | None = None
        self._slot_mapping: Tensor | None = None
        self._stage = layout.num_layers * [False]

    @property
    def holding(self) -> bool:
        """A window of mode ``stage`` is open, so the target layers' writes and attention are ours."""
        return self.window is not None and self.mode == "stage"

    def begin(self, window: Window, slot_mapping: Tensor) -> bool:
        """Open a window, before the forward.

        Args:
            window: the rows to hold.
            slot_mapping: int64 [num_tokens], vLLM's own buffer; ``stage`` masks the held rows in it until the end.

        Returns:
            False where the window does not fit: nothing was changed and vLLM's own write serves this step.

        Raises:
            RuntimeError: a window is open already.
        """
        if self.window is not None:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        if not len(window):
            return False
        if len(window) > self.capacity:
            if not self.counters.fallbacks:
                logger.warning(
                    "NWOR: a window of %d rows does not fit %d; vLLM's own write serves such steps, counted as fallbacks",
                    len(window),
                    self.capacity,
                )
            self.counters.fallbacks += 1
            return False
        count = len(window)
        torch.index_select(slot_mapping, 0, window.rows, out=self.slots[:count])
        if self.mode == "cow":
            ops.log_all_layers(*self._cache(), self.slots[:count], self.layout.packing, self.rows)
        else:
            self.staging_slots[window.rows] = torch.arange(count, device=self.slots.device)
            if self.old_rows is not None:
                ops.log_all_layers(*self._cache(), self.slots[:count], self.layout.packing, self.old_rows)
            else:
                slot_mapping[window.rows] = -1
        self.window, self._slot_mapping = window, slot_mapping
        self._stage = self.layout.num_layers * [False]
        return True

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
        assert self.window is not None and self._slot_mapping is not None
        if self.emulate:
            write(kv_cache, slot_mapping)
        else:
            if not self.window.whole_batch:
                write(kv_cache, slot_mapping)
            if slot_mapping.untyped_storage().data_ptr() != self._slot_mapping.untyped_storage().data_ptr():
                raise RuntimeError("slot_mapping is a copy, no view of the batch's buffer: its rows cannot be told")
            first = slot_mapping.storage_offset() - self._slot_mapping.storage_offset()
            write(self.staged(layer), self.staging_slots[first : first + slot_mapping.numel()])
        self._stage[layer] = True

    def staged(self, layer: int) -> Tensor:
        """The layer's staging as a mini-cache of the cache's own dtype: [blocks, H, N, 2 * head_size]."""
        return self.rows[layer].view(self.layout.dtype)

    def put_back(self, layer: int) -> None:
        """Emulation only, after the layer's attention: move the new bytes to staging and the old ones to the pages."""
        assert self.window is not None and self.old_rows is not None
        slots = self.slots[: len(self.window)]
        one = slice(layer, layer + 1)
        ops.log_all_layers(*self._cache(layer), slots, self.layout.packing, self.rows[one])
        self._restore_everything(*self._cache(layer), self.old_rows[one])

    def commit(self, num_rejected: Tensor) -> None:
        """Close the window, after sampling and before the drafter: keep the accepted rows, and only those.

        Args:
            num_rejected: int32 [num_reqs], rejected drafts of each request.

        Raises:
            RuntimeError: a target layer did not stage; the window is cancelled and the cache is as it was.
        """
        window = self.window
        assert window is not None
        if self.mode == "stage" and not all(self._stage):
            missing = [layer for layer, staged in enumerate(self._stage) if not staged]
            self.cancel()
            raise RuntimeError(
                f"target layers {missing} staged nothing: their attention does not go through NWOR's hook"
            )
        count = len(window)
        move = ops.restore_all_layers if self.mode == "cow" else ops.commit_all_layers
        move(
            *self._cache(),
            self.slots[:count],
            self.layout.packing,
            self.rows,
            window.request,
            window.rows_behind,
            num_rejected,
            self.kept_and_rejected,
        )
        self.counters.windows += sum(1 for drafts in window.num_drafts if drafts)
        self.counters.staged_tokens += sum(window.num_drafts)
        self.counters.stage_operations += count * self.layout.num_layers
        self._close()

    def cancel(self) -> None:
        """Close the window and leave the cache as it was before `begin`; does nothing when none is open."""
        if self.window is None:
            return
        if self.mode == "cow":
            self._restore_everything(*self._cache(), self.rows)
        elif self.old_rows is not None:
            self._restore_everything(*self._cache(), self.old_rows)
        self.counters.cancelled += 1
        self._close()

    def read_counters(self) -> Counters:
        """Counters up to now; waits for the device."""
        kept, rejected = self.kept_and_rejected.tolist()
        row = self.layout.slot_bytes * self.layout.num_layers
        counters = self.counters
        counters.committed_tokens = kept - (counters.windows if self.mode == "stage" else 0)
        counters.rejected_tokens = rejected
        if self.mode == "stage" and not self.emulate:
            counters.bytes_written, counters.bytes_avoided = kept * row, rejected * row
        elif self.emulate:  # vLLM wrote every row, its old bytes were put back, and the kept ones written again
            counters.bytes_written, counters.bytes_avoided = (3 * kept + 2 * rejected) * row, 0
        else:  # vLLM wrote every draft, and the rejected ones were written once more
            counters.bytes_written, counters.bytes_avoided = (kept + 2 * rejected) * row, 0
        return counters

    def reset_counters(self) -> None:
        """Forget warm-up and dummy runs."""
        self.kept_and_rejected.zero_()
        self.counters = Counters()

    def _cache(self, layer: int | None = None) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
        offsets = self.layout.layer_offsets
        return self.layout.pool, offsets if layer is None else offsets[layer : layer + 1], self.layout.strides

    def _restore_everything(self, pool: Tensor, offsets: Tensor, strides: tuple[int, int, int], rows: Tensor) -> None:
        assert self.window is not None
        count = len(self.window)
        everything = torch.full((len(self.window.num_drafts),), self.capacity, dtype=torch.int32, device=pool.device)
        ops.restore_all_layers(
            pool,
            offsets,
            strides,
            self.slots[:count],
            self.layout.packing,
            rows,
            self.window.request,
            self.window.rows_behind,
            everything,
            torch.zeros_like(self.kept_and_rejected),
        )

    def _close(self) -> None:
        assert self.window is not None and self._slot_mapping is not None
        if self.mode == "stage":
            self.staging_slots[self.window.rows] = -1
            if not self.emulate:
                self._slot_mapping[self.window.rows] = self.slots[: len(self.window)]
        self.window = self._slot_mapping = None


@dataclass
class LayerContext:
    """What a hook needs of the layer it is called for; travels on the layer itself."""

    manager: DraftCommitManager
    index: int
