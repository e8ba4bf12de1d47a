# SPDX-License-Identifier: Apache-2.0
"""What a rank has done, counted where it happens: on the device, and copied to the host without a wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor.layout import CacheLayout

_TOTALS = 5 * 8
"""Bytes of the totals, with which the buffer begins."""


@dataclass
class Counters:
    """What one rank has done since start-up, in tokens, rows or bytes; drafts only, where it says tokens.

    A held row is counted once, whatever the number of layers; `stage_operations` counts it once a layer.

    Bytes are those of windows' rows in all layers, as the cache holds them: what must be moved, once each. The context
    and what the model computes, which every mode reads once, are left out. With W rows, D of them drafts, A of these
    accepted and R rejected, bytes are a row's times

        mode        bytes_written   bytes_read   bytes_avoided
        vanilla     W               W
        cow         W + D + R       W + D + R    -2 (D + R)
        stage       W + A           A            W - 2 A
        on a CPU    W + A           W + A        -2 A

    Vanilla's attention reads the window's rows back from the pages. That of `stage` has them at hand; on a CPU alone it
    reads them back, drafts from staging. `bytes_avoided` is vanilla's bytes less the mode's, below 0 where the mode
    moves more. `cow` logs D rows at most: in a batch that stays the same most are logged already.
    """

    windows: int = 0
    staged_tokens: int = 0
    committed_tokens: int = 0
    rejected_tokens: int = 0
    stage_operations: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_avoided: int = 0
    fallbacks: int = 0
    cancelled: int = 0


class DeviceCounters:
    """The counts of one rank, in one buffer that a single copy brings to the host.

    totals: int64 [5], `counts` of `ops`: kept and rejected rows, windows, drafts, fallbacks.
    num_drafts: int32 [max_requests], the drafts held of each request of the step.
    kept: int32 [max_requests], the drafts that the last commit kept of each request.
    cancelled: steps that closed their windows without a commit, which the host counts.
    """

    def __init__(self, mode: str, layout: CacheLayout, max_requests: int) -> None:
        self.mode, self.num_layers, self.row_bytes = mode, 0, 0
        self.add_layers(layout)
        self._buffer = torch.zeros(_TOTALS + 2 * 4 * max_requests, dtype=torch.uint8, device=layout.pool.device)
        self.totals = self._buffer[:_TOTALS].view(torch.int64)
        self.num_drafts, self.kept = self._buffer[_TOTALS:].view(torch.int32).chunk(2)
        self.cancelled = 0

    def add_layers(self, layout: CacheLayout) -> None:
        """Let each row count in these layers too: another cache group's, which holds the same tokens."""
        self.num_layers += layout.num_layers
        self.row_bytes += layout.num_layers * layout.slot_bytes

    def reset(self) -> None:
        """Forget warm-up and dummy runs."""
        self._buffer.zero_()
        self.cancelled = 0

    def read(self) -> Counters:
        """The counters up to now; waits for the device."""
        return self.counters_from(self.totals.tolist())

    def copy(self, stream: torch.cuda.Stream | None) -> "CommitCounts":
        """The counts as the last commit left them, without waiting for it; to be called on the stream of the commit.

        stream: copies to the host, which the drafter then does not wait for; None on a CPU.
        """
        buffer = self._buffer.clone()
        if stream is None:
            return CommitCounts(self, buffer, None)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copied, ready = buffer.to("cpu", non_blocking=True), torch.cuda.Event(blocking=True)
            buffer.record_stream(stream)
            ready.record()
        return CommitCounts(self, copied, ready)

    def counters_from(self, totals: list[int]) -> Counters:
        """Counters from the five totals."""
        kept, rejected, windows, drafts, fallbacks = totals
        rows, copied = windows + drafts, drafts + rejected if self.mode == "cow" else kept
        read_back = 0 if self.mode == "stage" and self._buffer.device.type != "cpu" else rows
        written, read = rows + copied, read_back + copied
        return Counters(
            windows=windows,
            staged_tokens=drafts,
            committed_tokens=kept,
            rejected_tokens=rejected,
            stage_operations=self.num_layers * drafts,
            bytes_written=written * self.row_bytes,
            bytes_read=read * self.row_bytes,
            bytes_avoided=(2 * rows - written - read) * self.row_bytes,
            fallbacks=fallbacks,
            cancelled=self.cancelled,
        )


@dataclass(frozen=True)
class CommitCounts:
    """The counts after one commit, on their way to the host.

    buffer: uint8, a copy of the device's counts on the host. ready: the CUDA event behind that copy, None on a CPU.
    """

    source: DeviceCounters
    buffer: Tensor
    ready: torch.cuda.Event | None

    def read(self, requests: Sequence[str]) -> tuple[Counters, dict[str, int]]:
        """Wait for the copy.

        Args:
            requests: the ids of the batch's requests, in its order.

        Returns:
            The counters since start-up, and by request the drafts that it kept; without those of which none was held.
        """
        if self.ready is not None:
            self.ready.synchronize()
        host = self.buffer.numpy()  # a third of the time of the same through torch, in every step
        num_drafts, kept = host[_TOTALS:].view("int32").reshape(2, -1)[:, : len(requests)].tolist()
        of_batch = zip(requests, num_drafts, kept, strict=True)
        by_request = {request: drafts for request, held, drafts in of_batch if held}
        return self.source.counters_from(host[:_TOTALS].view("int64").tolist()), by_request
