# SPDX-License-Identifier: Apache-2.0
"""The manager of one rank: holds a step's draft rows back from the paged cache until sampling has judged them.

A window opens once before the forward (`begin`) and closes once after rejection sampling (`commit`), or not at all
(`cancel`). Of a request's query the rows ``[0, query_len - num_rejected)`` are kept: the rule by which vLLM itself
advances ``num_computed_tokens``. The token before the drafts, sampled last, is never rejected, and vLLM publishes the
block that it fills to the prefix cache while it schedules the step: it is written at once.

There are two ways to keep the pages clean, and each step takes the cheaper one (`nwor.ways`). Under ``stage`` a step
whose queries are all windows is *staged*: NWOR's attention puts the drafts' new rows into `rows` and reads them there,
and the kept ones are copied to their slots. Every other step, and every step under ``cow``, is *logged*: the slots' old
bytes go to `rows`, vLLM writes and attends as ever, and the rejected rows' are restored. Mode ``direct``, the control,
holds nothing: NWOR's attention serves the steps that it serves under ``stage``, and writes every row to its slot.

Which rows are held is worked out on the device, into tensors that live as long as the manager: a CUDA graph captured
once reads them in every replay, and no step waits for the device. vLLM's own buffers are never changed. They say where
something lies: a *slot* is a token's place in the pages, a *row* one in `DraftCommitManager.rows`, beside the cache.

================ ========================= =================================================================
slot_mapping     each row of the batch     its slot; vLLM's own
page_slots       each row of the batch     its slot, where it is to be written now, else -1
staging_rows     each row of the batch     its row beside the cache, where it is a draft that waits there, else -1
slots            each draft of a request   its slot, else -1; draft d of request r has row ``r * W + d``
logged           each row beside the cache the slot whose old bytes it holds, else -1; of a log that outlives its step
================ ========================= =================================================================
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nwor.counters import DeviceCounters
from nwor.layout import CacheLayout
from nwor.step import Step
from nwor.ways import POLICIES, Logged, Way, log_rows_per_request

if TYPE_CHECKING:
    from nwor.attention.verify import Workspace

logger = logging.getLogger(__name__)


class DraftCommitManager:
    """Begin, stage, commit, cancel, over all target layers of one rank.

    Args:
        layout: where the layers' slots lie.
        mode: one of `nwor.ways.POLICIES`.
        max_requests: the most requests of a batch.
        max_drafts: W, the most drafts of a request; a request with more falls back.
        max_tokens: the most rows of a batch.
        attends: NWOR's attention can serve the layers; ``stage`` logs every step where it cannot.
        uses_full_cudagraphs: forwards may be replays of CUDA graphs, which call no hook: a layer that went through its
            hook once, when the graph was captured, counts as staged from then on.
        keeps_blocks: a running request keeps its blocks. Of a sliding window vLLM frees those that it has left behind,
            and may hand them out again at once, even to the same request: no log outlives its step then.
        attention: the GPU attention's workspace; None where vLLM's own attention or the CPU's attends.

    Attributes:
        ways: the ways of this manager, that of windows first. way: that of the open window, None where none is open.
        slots: int64 [max_requests, W]. num_drafts: int32 [max_requests], the drafts held of each request.
        rows: uint8 [L, B', H, N, C], new bytes of a staged step, old ones of a logged step (`ops.log_all_layers`).
        logged: int64 [max_requests, P], as in `ops.log_all_layers`. None where a staged step may come between, or
            blocks are shorter than windows or are not kept: then each window is logged whole.
        staging_rows, page_slots: int64 [max_tokens], where steps may be staged. ``direct`` has -1 alone in
            `staging_rows`, and None: vLLM's own slot mapping says where rows go.
        is_dummy_or_capture: the next forward is a dummy run or a capture, which has to launch all that a replay may
            need.
        serves_attention: a window is open whose layers' writes and attention go through NWOR's.
    """

    def __init__(
        self,
        layout: CacheLayout,
        mode: str,
        max_requests: int,
        max_drafts: int,
        max_tokens: int,
        *,
        attends: bool = True,
        uses_full_cudagraphs: bool = False,
        keeps_blocks: bool = True,
        attention: "Workspace | None" = None,
    ) -> None:
        if mode not in POLICIES:
            raise ValueError(f"a manager serves {', '.join(POLICIES)}, not {mode!r}")
        policy = POLICIES[mode] if attends else POLICIES[mode].without_attention()

        def minus_ones(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int64, device=layout.pool.device)

        self.layout, self.mode, self.max_drafts = layout, mode, max_drafts
        self.uses_full_cudagraphs, self.attention = uses_full_cudagraphs, attention
        self.slots = minus_ones(max_requests, max_drafts)
        log_outlives_step = policy.ways == [Logged] and keeps_blocks
        needed = [way.rows_per_request(max_drafts, layout.block_size, log_outlives_step) for way in policy.ways]
        self.rows = layout.new_rows(max_requests * max(needed))
        log_rows = log_rows_per_request(max_drafts, layout.block_size) if log_outlives_step else 0
        self.logged = minus_ones(max_requests, log_rows) if log_rows else None
        self.staging_rows = minus_ones(max_tokens) if policy.windows.attends else None
        self.page_slots = minus_ones(max_tokens) if policy.windows.attends and policy.windows.holds else None
        self.counters = DeviceCounters(layout, max_requests)
        self.num_drafts = self.counters.num_drafts
        self.step = Step(
            pool=layout.pool, layer_offsets=layout.layer_offsets, cache_strides=layout.strides, slots=self.slots,
            packing=layout.packing, rows=self.rows, num_drafts=self.num_drafts, kept=self.counters.kept,
            staging_rows=self.staging_rows if self.page_slots is not None else None, page_slots=self.page_slots,
            logged=self.logged, counts=self.counters.totals,
        )  # fmt: skip
        self.ways = [way(self.step, self.counters) for way in policy.ways]
        self._others = None if policy.others is None else self.ways[-1]
        self.is_dummy_or_capture = True
        self.way: Way | None = None
        self.serves_attention = False  # asked by each layer of each step
        self._num_requests = 0
        self._slot_mapping: Tensor | None = None
        self._staged = layout.num_layers * [False]
        self._warned = False

    @property
    def is_open(self) -> bool:
        return self.way is not None

    @property
    def attends(self) -> bool:
        """NWOR's attention serves the steps whose queries are all windows."""
        return self.staging_rows is not None

    @property
    def max_query_len(self) -> int:
        """Rows of a window's query at most: the token sampled last and the drafts."""
        return self.max_drafts + 1

    def begin(
        self,
        query_start_loc: Tensor,
        cu_num_logits: Tensor,
        slot_mapping: Tensor,
        requests: Sequence[str] = (),
        *,
        windows_alone: bool,
        most_drafts: int = 0,
    ) -> bool:
        """Open a window, before the forward.

        A request with d drafts brings them as the last d rows of its query, behind the token it sampled last, and has
        d + 1 logits. The drafts are held. A request without drafts (prefill, or a decode whose drafter had nothing)
        holds no row.

        Args:
            query_start_loc: int32 [num_reqs + 1] or longer, where each request's query starts in the batch.
            cu_num_logits: int32 [num_reqs + 1], where each request's logits start.
            slot_mapping: int64 [num_tokens] or longer, the slots of the target layers' cache group.
            requests: the ids of the batch's requests where all of its rows but one a request are drafts, else none.
                Where they are those of the step before, the log still holds: the only logged slots that were written
                since are ones that no later window reaches.
            windows_alone: each query is a window, all its rows but the first are drafts, and none may read a row that
                another writes in this very step.
            most_drafts: the most drafts of a request, where the host knows it: what falls back is warned of once.

        Returns:
            False where no window opens: vLLM's own write serves this step.

        Raises:
            RuntimeError: a window is open already; or what an operator raises: then none is open, and the counts may
                have this one too many.
        """
        if self.way is not None:
            raise RuntimeError("a window is open: commit or cancel it before the next begin")
        self.is_dummy_or_capture = False
        if most_drafts > self.max_drafts:
            windows_alone, requests = False, ()  # vLLM's write leaves rows in slots that are logged: the log is stale
            self._warn(most_drafts)
        way = self.ways[0] if windows_alone else self._others
        if way is None:
            self.write_all(slot_mapping)
            return False
        way.begin(query_start_loc, cu_num_logits, slot_mapping, requests)
        if way.attends and not self.uses_full_cudagraphs:
            self._staged = self.layout.num_layers * [False]
        self.way, self._num_requests, self._slot_mapping = way, cu_num_logits.numel() - 1, slot_mapping
        self.serves_attention = way.attends
        return True

    def _close(self) -> None:
        self.way, self.serves_attention = None, False

    def _warn(self, most_drafts: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "NWOR: a request with %d drafts does not fit where each may have %d; vLLM's own write serves it, and "
                "leaves its rejected drafts in the cache: counted as a fallback, and said once",
                most_drafts, self.max_drafts,
            )  # fmt: skip

    def hold_nothing(self) -> None:
        """The next forward is a dummy run or a capture, whose rows go nowhere.

        Raises:
            RuntimeError: a window is open.
        """
        self._forget_step()
        self.is_dummy_or_capture = True
        self._write_to(None)

    def write_all(self, slot_mapping: Tensor, replays: bool = True) -> None:
        """The next forward is a step without a window: every row goes to its slot.

        replays: it may be the replay of a graph that NWOR's attention is captured in.

        Raises:
            RuntimeError: a window is open.
        """
        self._forget_step()
        self.is_dummy_or_capture = False
        if replays:
            self._write_to(slot_mapping)

    def _forget_step(self) -> None:
        if self.way is not None:
            raise RuntimeError("a window is open: commit or cancel it first, or its rows are lost")
        for way in self.ways:
            way.forget()

    def _write_to(self, slot_mapping: Tensor | None) -> None:
        """What a captured graph reads: no row is held, and each goes to its slot, None: nowhere."""
        if self.page_slots is None or self.staging_rows is None:
            return
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
            slot_mapping: int64, the slots of the whole batch, as the layer is given them.

        Raises:
            RuntimeError: they are others than those given to `begin`.
        """
        if self.page_slots is None or self.staging_rows is None:
            write(kv_cache, slot_mapping)
        else:
            assert self._slot_mapping is not None
            if slot_mapping.data_ptr() != self._slot_mapping.data_ptr():
                raise RuntimeError("slot_mapping is a copy or another group's: the window is of other slots")
            rows = slot_mapping.numel()
            write(kv_cache, self.page_slots[:rows])
            write(self.staging_of(layer), self.staging_rows[:rows])
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
        if self.way is None:
            raise RuntimeError("no window is open: begin one before the forward, and commit it once")
        if self.way.attends and False in self._staged:
            missing = [layer for layer, staged in enumerate(self._staged) if not staged]
            self.cancel()
            raise RuntimeError(
                f"target layers {missing} staged nothing: their attention does not go through NWOR's hook"
            )
        if num_rejected.numel() != self._num_requests:
            raise RuntimeError(
                f"num_rejected has {num_rejected.numel()} requests, of {self._num_requests} in the window"
            )
        self.way.commit(num_rejected)
        self._close()

    def cancel(self) -> None:
        """Close the window and leave the held rows' slots as before `begin`; does nothing when none is open."""
        if self.way is None:
            return
        way, drafts = self.way, self.num_drafts[: self._num_requests]
        try:
            way.cancel(drafts)
            if way.holds:
                way.totals[2] -= (drafts > 0).sum()
                way.totals[3] -= drafts.sum()
        finally:
            self.counters.cancelled += 1
            self._close()
