# SPDX-License-Identifier: Apache-2.0
"""The manager of one rank: holds a step's draft rows back from the paged cache until sampling has judged them.

A window opens once before the forward (`begin`), every target layer writes through it (`stage`, or an attention that
says so by `mark_staged`), and it closes once after rejection sampling (`commit`), or not at all (`cancel`). Of a
request's query the rows ``[0, query_len - num_rejected)`` are kept: the rule by which vLLM itself advances
``num_computed_tokens``.

Mode ``cow`` holds the draft rows' old bytes in `rows` while vLLM writes as always, and logs a slot's bytes once,
however many windows reach it before one of its drafts is accepted; mode ``stage`` holds the drafts' new bytes in
`rows` while their slots stay as they were. The token before the drafts, sampled last, is never rejected, and vLLM
publishes the block that it fills to the prefix cache while it schedules the step: it is written at once.

Mode ``direct``, the control, holds nothing. Its window only says which steps NWOR's attention serves: that of
``stage``, which stores every row in the slot that vLLM's own slot mapping names.

Which rows are held is worked out on the device, into tensors that live as long as the manager: a CUDA graph captured
once reads them in every replay, and no step waits for the device. vLLM's own buffers are never changed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nwor import ops
from nwor.counters import DeviceCounters
from nwor.layout import CacheLayout, log_rows_per_request, rows_per_request
from nwor.settings import ATTENDING, MODES

if TYPE_CHECKING:
    from nwor.attention.verify import Workspace

logger = logging.getLogger(__name__)


class DraftCommitManager:
    """Begin, stage, commit, cancel, over all target layers of one rank.

    Args:
        layout: where the layers' slots lie.
        mode: ``cow``, ``direct`` or ``stage``.
        max_requests: the most requests of a batch; a larger batch falls back to vLLM's own write.
        max_drafts: W, the most drafts of a request; a request with more falls back.
        max_tokens: the most rows of a batch.
        uses_full_cudagraphs: forwards may be replays of CUDA graphs, which call no hook: a layer that went through its
            hook once, when the graph was captured, counts as staged from then on.
        graphs_of_prefills: such a graph may be replayed for a batch with prefill rows.
        blocks_stay: a request's blocks stay its own while it runs. Of a sliding window vLLM frees those that it has
            left behind, and may hand them out again at once, even to the same request: no log outlives its step then.
        attention: the GPU attention's workspace; None where vLLM's own attention or the CPU's attends.

    Attributes:
        slots: int64 [max_requests, W], the page slot of draft d of request r at [r, d]; -1: no such draft. The draft
            is row ``r * W + d`` of `rows`, but where `logged` says.
        num_drafts: int32 [max_requests], the drafts held of each request.
        rows: uint8 [L, B', H, N, C], old bytes (``cow``) or new ones (``stage``), as in `ops.log_all_layers`.
        logged: int64 [max_requests, P], ``cow`` only, as in `ops.log_all_layers`: what `rows` still holds of the window
            before. None where blocks are shorter than windows, or do not stay: then each window is logged whole.
        staging_rows, page_slots: int64 [max_tokens], ``stage`` only, vLLM's slot mapping in two: for each row of the
            batch its row in `rows`, written on commit, or -1; and the slot to write now, -1 for held rows. ``direct``
            has -1 alone in `staging_rows`, and None: vLLM's own slot mapping says where rows go.
        cu_num_logits: as given to `begin`, while a window is open.
        writes_first: a query of this step may read a row of another (`begin`), so vLLM's writer and attention run
            before an attention that stores rows as it attends.
        is_dummy_or_capture: the next forward is a dummy run or a capture, which has to launch all that a replay may
            need.
    """

    def __init__(
        self,
        layout: CacheLayout,
        mode: str,
        max_requests: int,
        max_drafts: int,
        max_tokens: int,
        *,
        uses_full_cudagraphs: bool = False,
        graphs_of_prefills: bool = False,
        blocks_stay: bool = True,
        attention: "Workspace | None" = None,
    ) -> None:
        if mode not in MODES[1:]:
            raise ValueError(f"a manager serves {', '.join(MODES[1:])}, not {mode!r}")

        def minus_ones(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int64, device=layout.pool.device)

        self.layout, self.mode, self.max_drafts = layout, mode, max_drafts
        self.uses_full_cudagraphs, self.graphs_of_prefills = uses_full_cudagraphs, graphs_of_prefills
        self.attention = attention
        self.slots = minus_ones(max_requests, max_drafts)
        block_size = layout.block_size
        self.rows = layout.new_rows(max_requests * rows_per_request(mode, max_drafts, block_size, blocks_stay))
        log_rows = log_rows_per_request(max_drafts, block_size, blocks_stay)
        self.logged = minus_ones(max_requests, log_rows) if mode == "cow" and log_rows else None
        self.staging_rows = minus_ones(max_tokens) if mode in ATTENDING else None
        self.page_slots = minus_ones(max_tokens) if mode == "stage" else None
        self.counters = DeviceCounters(mode, layout, max_requests)
        self.num_drafts = self.counters.num_drafts
        self.is_dummy_or_capture, self.writes_first = True, False
        self.num_requests: int | None = None
        self.cu_num_logits: Tensor | None = None
        self._slot_mapping: Tensor | None = None
        self._previous_requests: Sequence[str] = ()
        self._staged = layout.num_layers * [False]
        self._warned = False

    @property
    def is_open(self) -> bool:
        return self.num_requests is not None

    @property
    def max_query_len(self) -> int:
        """Rows of a window's query at most: the token sampled last and the drafts."""
        return self.max_drafts + 1

    @property
    def serves_attention(self) -> bool:
        """A window is open in a mode with an attention of its own: the layers' writes and attention go through it."""
        return self.is_open and self.mode in ATTENDING

    def begin(
        self,
        query_start_loc: Tensor,
        cu_num_logits: Tensor,
        slot_mapping: Tensor,
        requests: Sequence[str] = (),
        writes_first: bool = False,
        most_drafts: int = 0,
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
                Where they are those of the step before, the log still holds: the only logged slots that were written
                since are ones that no later window reaches.
            writes_first: whether a request of the batch may read rows that another writes in this very step.
            most_drafts: the most drafts of a request, where the host knows it: what falls back is warned of once.

        Returns:
            False where the batch does not fit: vLLM's own write serves this step.

        Raises:
            RuntimeError: a window is open already; or what an operator raises: then none is open, and the counts may
                have this one too many.
        """
        if self.is_open:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        self.is_dummy_or_capture = False
        num_requests = cu_num_logits.numel() - 1
        fits = num_requests <= len(self.slots)
        if (not fits or most_drafts > self.max_drafts) and not self._warned:
            self._warned = True
            logger.warning(
                "NWOR: %d requests with up to %d drafts each do not fit %d with %d; vLLM's own write serves what does "
                "not fit, and leaves its rejected drafts in the cache: counted as fallbacks, and said once",
                num_requests, max(most_drafts, 1), *self.slots.shape,
            )  # fmt: skip
        previous_requests, self._previous_requests = self._previous_requests, ()
        if self.mode != "direct" or not fits:
            ops.open_window(
                query_start_loc,
                cu_num_logits,
                slot_mapping,
                self.slots if fits else self.slots.new_empty(num_requests, 0),  # no columns: every window falls back
                self.num_drafts if fits else self.num_drafts.new_empty(num_requests),
                self.staging_rows if self.mode == "stage" else None,
                self.page_slots,
                self.counters.totals,
            )
        if not fits:
            return False
        if self.mode == "cow":
            if self.logged is not None and not (requests and requests == previous_requests):
                self.logged.fill_(-1)
            ops.log_all_layers(*self._cache_and_slots(num_requests), self.rows, self.logged)
            self._previous_requests = list(requests)
        if not self.uses_full_cudagraphs:
            self._staged = self.layout.num_layers * [False]
        self.num_requests, self.cu_num_logits, self.writes_first = num_requests, cu_num_logits, writes_first
        self._slot_mapping = slot_mapping
        return True

    def hold_nothing(self, slot_mapping: Tensor | None = None) -> None:
        """Hold nothing in the next forward: a dummy run, or with `slot_mapping` a step without drafts.

        Raises:
            RuntimeError: a window is open.
        """
        if self.is_open:
            raise RuntimeError("a window is open: commit or cancel it before hold_nothing, or its rows are lost")
        self.is_dummy_or_capture, self._previous_requests, self.writes_first = slot_mapping is None, (), False
        if self.page_slots is None:
            return
        assert self.staging_rows is not None
        self.staging_rows.fill_(-1)
        self.page_slots.fill_(-1)
        if slot_mapping is not None:
            self.page_slots[: slot_mapping.numel()] = slot_mapping

    def stage(
        self, layer: int, write: Callable[[Tensor, Tensor], None], kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Take over one layer's cache write: held rows go to staging, all others to the pages as ever.

        Mode ``direct`` holds none.

        Args:
            layer: the target layer's index.
            write: vLLM's own writer, called with a cache and a slot mapping; it skips negative slots and makes the
                bytes, so that staged and written rows cannot differ.
            kv_cache: the layer's cache.
            slot_mapping: int64, the layer's slots for this call; a view of the batch's when vLLM splits the batch, with
                rows at its own offset.

        Raises:
            RuntimeError: `slot_mapping` is no view of that given to `begin`.
        """
        if self.page_slots is None:
            write(kv_cache, slot_mapping)
            self.mark_staged(layer)
            return
        assert self._slot_mapping is not None and self.staging_rows is not None
        if slot_mapping.untyped_storage().data_ptr() != self._slot_mapping.untyped_storage().data_ptr():
            raise RuntimeError("slot_mapping is a copy, no view of the batch's buffer: its rows cannot be found")
        first = slot_mapping.storage_offset() - self._slot_mapping.storage_offset()
        rows = slice(first, first + slot_mapping.numel())
        write(kv_cache, self.page_slots[rows])
        write(self.staging_of(layer), self.staging_rows[rows])
        self.mark_staged(layer)

    def mark_staged(self, layer: int) -> None:
        """The layer's rows are in staging, or will be in every replay of the graph being captured."""
        self._staged[layer] = True

    def staging_of(self, layer: int) -> Tensor:
        """The layer's staging as a mini-cache of the cache's own dtype: [blocks, H, N, 2 * head_size]."""
        return self.rows[layer].view(self.layout.dtype)

    def commit(self, num_rejected: Tensor) -> None:
        """Close the window, after sampling and before the next forward: keep the accepted rows, and only those.

        Args:
            num_rejected: int32 [num_reqs], rejected drafts of each request.

        Raises:
            RuntimeError: no window is open; or a target layer did not stage: then the window is cancelled and the cache
                is as it was. Where forwards may be replays of CUDA graphs (`uses_full_cudagraphs`), a layer that staged
                once is not asked again.
        """
        if self.num_requests is None:
            raise RuntimeError("no window is open: begin one before the forward, and commit it once")
        if self.mode in ATTENDING and not all(self._staged):
            missing = [layer for layer, staged in enumerate(self._staged) if not staged]
            self.cancel()
            raise RuntimeError(
                f"target layers {missing} staged nothing: their attention does not go through NWOR's hook"
            )
        decisions = self.num_drafts[: self.num_requests], num_rejected, self.counters.kept[: self.num_requests]
        if self.mode == "cow":
            self._restore(*decisions, self.counters.totals)
        elif self.mode == "stage":
            cache_and_slots = self._cache_and_slots(self.num_requests)
            ops.commit_all_layers(*cache_and_slots, self.rows, *decisions, self.counters.totals)
        self.num_requests = self.cu_num_logits = self._slot_mapping = None

    def cancel(self) -> None:
        """Close the window and leave the held rows' slots as before `begin`; does nothing when none is open."""
        if not self.is_open:
            return
        drafts, totals = self.num_drafts[: self.num_requests], self.counters.totals
        try:
            if self.mode == "cow":
                self._restore(drafts, drafts, torch.empty_like(drafts), torch.zeros_like(totals))
            totals[2] -= (drafts > 0).sum()
            totals[3] -= drafts.sum()
        finally:
            self.counters.cancelled += 1
            self._previous_requests = ()
            self.num_requests = self.cu_num_logits = self._slot_mapping = None

    def _restore(self, num_drafts: Tensor, num_rejected: Tensor, kept: Tensor, counts: Tensor) -> None:
        assert self.num_requests is not None
        decisions = num_drafts, num_rejected, kept, counts
        ops.restore_all_layers(*self._cache_and_slots(self.num_requests), self.rows, *decisions, self.logged)

    def _cache_and_slots(self, num_requests: int) -> tuple[Tensor, Tensor, tuple[int, int, int], Tensor, Tensor | None]:
        layout = self.layout
        return layout.pool, layout.layer_offsets, layout.strides, self.slots[:num_requests], layout.packing
