# SPDX-License-Identifier: Apache-2.0
"""The ways in which a step keeps rejected rows out of the pages, and which of them each mode takes.

A way opens a step's window before the forward (`begin`) and closes it after sampling (`commit`). The manager owns the
tensors that they share, and picks one way a step. A new policy is a class here, and an entry in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor.counters import HOLDING, DeviceCounters
from nwor.layout import log_rows_per_request
from nwor.step import Step


class Way:
    """One way of a manager.

    name: for counters and start-up lines. attends: NWOR's attention serves such a step's layers. holds: the window has
    rows of its own, which are counted.
    """

    name = ""
    attends = False
    holds = True

    def __init__(self, step: Step, counters: DeviceCounters) -> None:
        self.step, self.counters = step, counters
        if self.holds:
            self.number = HOLDING.index(self.name)
            self.totals = counters.totals[self.number]

    @staticmethod
    def rows_per_request(max_drafts: int, block_size: int, outlives_step: bool) -> int:
        """Rows of `DraftCommitManager.rows` that a request needs, in each layer."""
        return max_drafts

    def begin(
        self, query_start_loc: Tensor, cu_num_logits: Tensor, slot_mapping: Tensor, requests: Sequence[str]
    ) -> None:
        """What comes before the forward: find the step's drafts, on the device. As `DraftCommitManager.begin`."""

    def commit(self, num_rejected: Tensor) -> None:
        """What comes after sampling."""

    def cancel(self, num_drafts: Tensor) -> None:
        """Leave the slots of the drafts as they were before `begin`; num_drafts: int32 [requests], those held."""

    def forget(self) -> None:
        """A step without a window comes: what this way knows of the one before no longer holds."""


class Staged(Way):
    """Drafts wait in `rows`, where NWOR's attention reads them; the kept ones are copied to their slots."""

    name = "staged"
    attends = True

    def begin(
        self, query_start_loc: Tensor, cu_num_logits: Tensor, slot_mapping: Tensor, requests: Sequence[str]
    ) -> None:
        self.step.open(query_start_loc, cu_num_logits, slot_mapping, self.totals, stages=True)

    def commit(self, num_rejected: Tensor) -> None:
        self.step.close(num_rejected, self.totals, self.counters.next_place(self.number))


class Logged(Way):
    """The slots' old bytes go to `rows`, vLLM writes and attends as ever, and the rejected rows' are restored.

    Where no other way shares `rows` the log outlives its step: a slot's bytes are logged once, however many windows
    reach it before one of its drafts is accepted.
    """

    name = "logged"

    def __init__(self, step: Step, counters: DeviceCounters) -> None:
        super().__init__(step, counters)
        self._logged = step.tensors["logged"]
        self._previous: Sequence[str] = ()

    @staticmethod
    def rows_per_request(max_drafts: int, block_size: int, outlives_step: bool) -> int:
        return (outlives_step and log_rows_per_request(max_drafts, block_size)) or max_drafts

    def begin(
        self, query_start_loc: Tensor, cu_num_logits: Tensor, slot_mapping: Tensor, requests: Sequence[str]
    ) -> None:
        previous, self._previous = self._previous, ()
        if self._logged is not None and not (requests and requests == previous):
            self._logged.fill_(-1)
        self.step.open(query_start_loc, cu_num_logits, slot_mapping, self.totals, logs=True)
        self._previous = [*requests]

    def commit(self, num_rejected: Tensor) -> None:
        self.step.close(num_rejected, self.totals, self.counters.next_place(self.number), restores=True)

    def cancel(self, num_drafts: Tensor) -> None:
        self._previous = ()
        self.step.close(num_drafts, torch.zeros_like(self.totals), restores=True)

    def forget(self) -> None:
        self._previous = ()


class WrittenThrough(Way):
    """Every row goes to its slot, by NWOR's attention: the control, which tells what the kernel alone gives."""

    name = "written through"
    attends = True
    holds = False

    @staticmethod
    def rows_per_request(max_drafts: int, block_size: int, outlives_step: bool) -> int:
        return 0


@dataclass(frozen=True)
class Policy:
    """windows: the way of a step whose queries are all windows. others: of every other step; None is vLLM alone."""

    windows: type[Way]
    others: type[Way] | None

    @property
    def ways(self) -> list[type[Way]]:
        return list(dict.fromkeys(way for way in (self.windows, self.others) if way is not None))


POLICIES = {
    "cow": Policy(windows=Logged, others=Logged),
    "direct": Policy(windows=WrittenThrough, others=None),
    "stage": Policy(windows=Staged, others=Logged),
}
