# SPDX-License-Identifier: Apache-2.0
"""What a rank has done, counted where it happens: on the device, which writes it where the host can read it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor.layout import CacheLayout
from nwor.ways import HOLDING

_TOTALS = 6
"""Numbers of a way's `counts`, as the operators take them."""
_PLACES = 8
"""Commits whose counts may wait to be read; vLLM schedules at most two steps ahead of what it has read."""


@dataclass
class Counters:
    """What one rank has done since start-up, in tokens, rows or bytes; drafts only, where it says tokens.

    A held row is counted once, whatever the number of layers; `stage_operations` counts it once a layer.
    `docs/metrics.md` has a line on each of them, and a table of the bytes.
    """

    windows: int = 0
    staged_steps: int = 0
    logged_steps: int = 0
    staged_tokens: int = 0
    committed_tokens: int = 0
    rejected_tokens: int = 0
    restored_tokens: int = 0
    stage_operations: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_avoided: int = 0
    fallbacks: int = 0
    cancelled: int = 0


class Totals(NamedTuple):
    """What a rank has counted since start-up, as it goes to the scheduler.

    commits: how many there have been. of_ways: the totals of `HOLDING`, as `counts` of the operators. steps: committed
    ones, by way. layer_bytes: bytes of a token in all layers. layers: their number. reads_back: a staged step's
    attention reads the window's rows back, as on a CPU.
    """

    commits: int
    of_ways: list[list[int]]
    steps: list[int]
    cancelled: int
    layers: int
    layer_bytes: int
    reads_back: bool

    def since(self, before: "Totals | None") -> tuple[int, int, int]:
        """Windows, drafts and kept drafts since other totals, None: since start-up."""
        (a, b), (c, d) = self.of_ways, before.of_ways if before else 2 * [_TOTALS * [0]]
        return a[2] + b[2] - c[2] - d[2], a[3] + b[3] - c[3] - d[3], a[0] + b[0] - c[0] - d[0]

    def counters(self) -> Counters:
        (s_kept, s_rejected, s_windows, s_drafts, *_), (l_kept, l_rejected, l_windows, l_drafts, *_) = self.of_ways
        staged, logged = s_windows + s_drafts, l_windows + l_drafts
        copied = s_kept + l_drafts + l_rejected
        written, read = staged + logged + copied, logged + copied + (staged if self.reads_back else 0)
        return Counters(
            windows=s_windows + l_windows,
            staged_steps=self.steps[0],
            logged_steps=self.steps[1],
            staged_tokens=s_drafts + l_drafts,
            committed_tokens=s_kept + l_kept,
            rejected_tokens=s_rejected + l_rejected,
            restored_tokens=l_rejected,
            stage_operations=self.layers * (s_drafts + l_drafts),
            bytes_written=written * self.layer_bytes,
            bytes_read=read * self.layer_bytes,
            bytes_avoided=(2 * (staged + logged) - written - read) * self.layer_bytes,
            fallbacks=sum(of_way[4] for of_way in self.of_ways),
            cancelled=self.cancelled,
        )


class DeviceCounters:
    """The counts of one rank.

    totals: int64 [2, 6], `counts` of `ops`, of staged steps and of logged ones.
    num_drafts: int32 [max_requests], the drafts held of each request of the step.
    kept: int32 [max_requests], the drafts that the last commit kept of each request.
    steps: those that were committed, by the ways of `HOLDING`, and cancelled: those that were not; the host counts.
    publishes: each commit's counts are wanted on the host (`published`).
    """

    def __init__(self, layout: CacheLayout, max_requests: int) -> None:
        self.num_layers, self.row_bytes = 0, 0
        self.add_layers(layout)
        device = layout.pool.device
        self.totals = torch.zeros(len(HOLDING), _TOTALS, dtype=torch.int64, device=device)
        self.num_drafts, self.kept = torch.zeros(2, max_requests, dtype=torch.int32, device=device)
        self.on_cpu = device.type == "cpu"
        self.publishes = False
        self._ring: list[tuple[Tensor, Any]] = []  # memory of the host, and the totals in it as NumPy's array
        self._forget()

    def _forget(self) -> None:
        self.commits, self.cancelled, self.steps = 0, 0, [0 for _ in HOLDING]

    def add_layers(self, layout: CacheLayout) -> None:
        """Let each row count in these layers too: another cache group's, which holds the same tokens."""
        self.num_layers += layout.num_layers
        self.row_bytes += layout.num_layers * layout.slot_bytes

    def reset(self) -> None:
        """Forget warm-up and dummy runs."""
        self.totals.zero_()
        self._forget()

    def read(self) -> Counters:
        """The counters up to now; waits for the device."""
        return self.as_totals(self.totals.tolist(), self.commits).counters()

    def as_totals(self, of_ways: list[list[int]], commits: int) -> Totals:
        return Totals(commits, of_ways, [*self.steps], self.cancelled, self.num_layers, self.row_bytes, self.on_cpu)

    def next_place(self, way: int) -> Tensor | None:
        """Where the next commit is to publish its counts (`ops.commit_all_layers`); None where nobody wants them.

        What it publishes stays readable for the next ``_PLACES - 1`` commits: nothing is allocated in a step, and
        whoever does not read loses nothing but these counts.
        """
        self.commits += 1
        self.steps[way] += 1
        if not self.publishes:
            return None
        if not self._ring:
            self._ring = [self._new_place() for _ in range(_PLACES)]
        return self._ring[self.commits % _PLACES][0]

    def _new_place(self) -> tuple[Tensor, Any]:
        """Memory that the device writes: both ways' totals, and of each request what nobody reads here."""
        numbers = self.totals.numel()
        with torch.inference_mode(False):  # or it could be filled nowhere but in the mode that it was made in
            place = torch.zeros(numbers + len(self.kept), dtype=torch.int64, pin_memory=not self.on_cpu)
        return place, place.numpy()[:numbers].reshape(self.totals.shape)  # read in a third of the time through torch's

    def published(self) -> Callable[[], Totals | None] | None:
        """What reads the last commit's totals, once the device has done it; None where it published none.

        It gives None where a later commit has taken their place.
        """
        return functools.partial(self.read_published, self.commits) if self.publishes and self._ring else None

    def read_published(self, commit: int) -> Totals | None:
        if self.commits - commit >= _PLACES:
            return None
        return self.as_totals(self._ring[commit % _PLACES][1].tolist(), commit)
