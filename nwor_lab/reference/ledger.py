# SPDX-License-Identifier: Apache-2.0
"""Bytes and launches, counted as they happen. The formulas of `nwor_lab.cost.traffic` predict the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moved:
    """Bytes read, bytes written and kernel launches of one kind. Whole numbers, but for an expected step."""

    read: float = 0
    written: float = 0
    launches: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written, self.launches + other.launches)

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.read - other.read, self.written - other.written, self.launches - other.launches)


class Traffic(dict[str, Moved]):
    """What each kind of `nwor_lab.cost.traffic` moved; the reference model's operators count here as they run.

    Kinds that moved nothing are absent, so a ledger and a formula are equal as dictionaries.
    """

    def count(self, kind: str, *, read: float = 0, written: float = 0, launches: int = 0) -> None:
        if read or written or launches:
            self[kind] = self.get(kind, Moved()) + Moved(read, written, launches)

    def total(self) -> Moved:
        return sum(self.values(), Moved())

    def __add__(self, other: Traffic) -> Traffic:
        both = Traffic(self)
        for kind, moved in other.items():
            both.count(kind, read=moved.read, written=moved.written, launches=moved.launches)
        return both
