# SPDX-License-Identifier: Apache-2.0
"""What a rank has done, counted where it happens: on the device, and copied to the host without a wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor.layout import CacheLayout

_TOTALS = 5 * 8
"""Bytes of the totals, with which the buffer begins."""
_PLACES = 8
"""Commits whose counts may be on their way to the host; vLLM schedules at most two steps ahead of what it has read."""


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
    cancelled: steps that closed their windows without a commit, which the host counts. copies: made so far.
    """

    def __init__(self, mode: str, layout: CacheLayout, max_requests: int) -> None:
        self.mode, self.num_layers, self.row_bytes = mode, 0, 0
        self.add_layers(layout)
        self._buffer = torch.zeros(_TOTALS + 2 * 4 * max_requests, dtype=torch.uint8, device=layout.pool.device)
        self.totals = self._buffer[:_TOTALS].view(torch.int64)
        self.num_drafts, self.kept = self._buffer[_TOTALS:].view(torch.int32).chunk(2)
        self.cancelled = 0
        self._places: list[_Place] = []
        self.copies = 0

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

        They stay readable for the next ``_PLACES - 1`` copies: nothing is allocated in a step, and whoever does not
        read loses nothing but these counts.

        stream: copies to the host, which the drafter then does not wait for; None on a CPU.
        """
        number, self.copies = self.copies, self.copies + 1
        self._places = self._places or [_Place(self._buffer) for _ in range(_PLACES)]
        place = self._places[number % _PLACES]
        place.fill(self._buffer, stream)
        return CommitCounts(self, place, number)

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


class _Place:
    """Where the counts of one commit arrive on the host; made once, it serves commit after commit.

    totals, num_drafts, kept: arrays, as those of `DeviceCounters`; there once `wait` has returned.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._on_gpu: tuple[Tensor, torch.cuda.Event, torch.cuda.Event] | None = None
        with torch.inference_mode(False):  # or it could be filled nowhere but in the mode that it was made in
            self._on_host = torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda)
            if buffer.is_cuda:
                self._on_gpu = torch.empty_like(buffer), torch.cuda.Event(), torch.cuda.Event(blocking=True)
        host = self._on_host.numpy()  # to be read in a third of the time that it takes through torch
        self.totals = host[:_TOTALS].view("int64")
        self.num_drafts, self.kept = host[_TOTALS:].view("int32").reshape(2, -1)

    def fill(self, buffer: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Let the counts come, on a GPU on that stream; as they are now, for the next window changes the buffer."""
        if stream is None or self._on_gpu is None:
            self._on_host.copy_(buffer)
            return
        on_device, begun, ended = self._on_gpu
        on_device.copy_(buffer)
        begun.record()
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            self._on_host.copy_(on_device, non_blocking=True)
            ended.record()

    def wait(self) -> None:
        """Until the counts are there."""
        if self._on_gpu is not None:
            self._on_gpu[2].synchronize()


@dataclass(frozen=True)
class CommitCounts:
    """The counts after one commit, on their way to the host; number: of the copy that brings them."""

    source: DeviceCounters
    place: _Place
    number: int

    def read(self, requests: Sequence[str]) -> tuple[Counters, dict[str, int]] | None:
        """Wait for the counts.

        Args:
            requests: the ids of the batch's requests, in its order.

        Returns:
            The counters since start-up, and by request the drafts that it kept; without those of which none was held.
            None where later commits have taken the place.
        """
        place, number = self.place, len(requests)
        place.wait()
        if self.source.copies - self.number > _PLACES:
            return None
        counters = self.source.counters_from(place.totals.tolist())
        num_drafts, kept = place.num_drafts[:number].tolist(), place.kept[:number].tolist()
        by_request = {request: drafts for request, held, drafts in zip(requests, num_drafts, kept, strict=True) if held}
        return counters, by_request
