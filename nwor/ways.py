# SPDX-License-Identifier: Apache-2.0
"""The ways in which a step keeps rejected rows out of the pages, and which of them each mode takes.

A way opens a step's window before the forward (`begin`) and closes it after sampling (`commit`). The manager owns the
tensors that they share, and picks one way a step. `POLICIES` is the one list of modes: a new one is a class here and an
entry there (`docs/extend.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # settings are read in processes that have no use for torch
    from torch import Tensor

    from nwor.counters import DeviceCounters
    from nwor.step import Step

HOLDING = ("staged", "logged")
"""The ways that hold rows, in the order of their totals."""


class Way:
    """One way of a manager.

    name: for counters and start-up lines. attends: NWOR's attention serves such a step's layers. holds: the window has
    rows of its own, which are counted. leaves: what the slots of rejected rows hold behind a step, to which the check
    at start-up holds it.
    """

    name = ""
    attends = False
    holds = True
    leaves: Literal["old rows", "new rows", "zeros"] = "old rows"

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


def log_rows_per_request(max_drafts: int, block_size: int) -> int:
    """Rows of a request in a log that outlives its step, 0 where blocks are too short for one.

    A power of two that divides the block size: consecutive positions have rows of their own, found by the slot alone.
    """
    rows = 1 << (max_drafts - 1).bit_length()
    return rows if block_size % rows == 0 else 0


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
        self.step.close(num_drafts, self.totals.new_zeros(self.totals.shape), restores=True)

    def forget(self) -> None:
        self._previous = ()


class WrittenThrough(Way):
    """Every row goes to its slot, by NWOR's attention: the control, which tells what the kernel alone gives."""

    name = "written through"
    attends = True
    holds = False
    leaves = "new rows"

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

    @property
    def attends(self) -> bool:
        """NWOR's attention serves some steps."""
        return self.windows.attends

    @property
    def is_clean(self) -> bool:
        """No step leaves a rejected draft's row in the pages."""
        return self.windows.holds and self.others is not None

    def without_attention(self) -> Policy:
        """What is left where NWOR's attention cannot serve the layers; only of one that `is_clean`."""
        assert self.others is not None
        return Policy(self.others, self.others)


POLICIES = {
    "cow": Policy(windows=Logged, others=Logged),
    "direct": Policy(windows=WrittenThrough, others=None),
    "stage": Policy(windows=Staged, others=Logged),
}
