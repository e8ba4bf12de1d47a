# SPDX-License-Identifier: Apache-2.0
"""Findings on the host: logged a line each, counted, and kept for whoever asks."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .marks import ADOPTED_AT, CHECKED_AT, COUNTERS, FIELDS, FINDINGS_AT, KINDS_AT, RING
from .settings import AUDIT, KINDS

LINES, SECONDS = 10, 60.0  # so many findings are logged in so much time


class Finding(NamedTuple):
    """A slot that was not what the request `request` needs at `position`; layer: of other bytes, else all layers."""

    kind: str
    request: str
    position: int
    layer: str
    slot: int
    step: int
    rank: int


def logger() -> logging.Logger:
    """vLLM's own: others' lines it shows from warnings on."""
    from vllm.logger import init_logger

    return init_logger("vllm.kv_audit")


class Reporter:
    """What one rank has found. layers: names by pages."""

    def __init__(self, rank: int, layers: Sequence[Sequence[str]]) -> None:
        self.rank, self.layers = rank, layers
        self.reset()

    def reset(self) -> None:
        self.found: collections.deque[Finding] = collections.deque(maxlen=RING)
        self.steps, self.counts = 0, dict.fromkeys(("checked", *KINDS, "adopted", "not_shown"), 0)
        self._taken = dict.fromkeys(("checked", *KINDS), 0)
        self._seen, self._shown, self._since = 0, 0, 0.0
        self._names: dict[int, collections.deque[tuple[int, str]]] = {}

    def name(self, row: int, request: str, step: int) -> None:
        """From the step after `step` on, `row` is this request's."""
        self._names.setdefault(row, collections.deque(maxlen=16)).append((step + 1, request))

    def read(self, ring: Tensor, step: int) -> None:
        """Take in a ring that is on the host."""
        heads = ring[:COUNTERS].tolist()
        if heads[CHECKED_AT] < self.counts["checked"]:
            return  # a copy that is older than what was read
        self.steps = step
        self.counts |= {"checked": heads[CHECKED_AT], "adopted": heads[ADOPTED_AT]}
        self.counts |= dict(zip(KINDS, heads[KINDS_AT : KINDS_AT + len(KINDS)], strict=True))
        total = heads[FINDINGS_AT]
        if total == self._seen:
            return
        entries = ring[COUNTERS:].view(RING, FIELDS).tolist()
        for place in range(max(self._seen, total - RING), total):
            at, row, position, pages, layer, kind, slot, _ = entries[place % RING]
            names = [name for since, name in self._names.get(row, ()) if since <= at]
            layer_name = "all layers" if layer < 0 else self.layers[pages][layer]
            finding = Finding(KINDS[kind], names[-1] if names else "?", position, layer_name, slot, at, self.rank)
            self.found.append(finding)
            self._log(finding)
        self.counts["not_shown"] += max(0, total - RING - self._seen)
        self._seen = total

    def take(self) -> dict[str, int]:
        """What the counts that go to Prometheus rose by since the last call; without those that did not."""
        if self.counts["checked"] == self._taken["checked"]:
            return {}
        risen = {name: self.counts[name] - before for name, before in self._taken.items()}
        self._taken = {name: self.counts[name] for name in self._taken}
        return {name: value for name, value in risen.items() if value}

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Log nothing meanwhile."""
        self._log = lambda finding: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._log

    def _log(self, finding: Finding) -> None:
        now = time.monotonic()
        if now - self._since > SECONDS:
            self._shown, self._since = 0, now
        self._shown += 1
        if self._shown > LINES:
            self.counts["not_shown"] += 1
            return
        what = {
            "bytes": "other bytes than were written",
            "token": "the row of another token",
            "rejected": "the row of a rejected draft",
            "unwritten": "no row that was ever written",
        }[finding.kind]
        more = f" ({self.counts['not_shown']} findings not shown so far)" if self.counts["not_shown"] else ""
        logger().error(
            "kv audit: %s: request %s, position %d, %s, slot %d holds %s; rank %d, step %d%s",
            finding.kind, finding.request, finding.position, finding.layer, finding.slot, what, finding.rank,
            finding.step, more,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values: rank, steps, counts by name, and the last findings as dicts."""
        found = [finding._asdict() for finding in self.found]
        return {"rank": self.rank, "steps": self.steps, "counts": dict(self.counts), "findings": found}


def verdict(reports: Sequence[Mapping[str, Any]]) -> str:
    """One line over all ranks' reports.

    Raises:
        RuntimeError: nothing was audited.
    """
    reports = [report for report in reports if report]
    if not reports:
        raise RuntimeError(f"kv audit: nothing was audited: set {AUDIT} before vLLM is imported")
    sums = collections.Counter[str]()
    for report in reports:
        sums.update(report["counts"])
    total, steps = sum(sums[kind] for kind in KINDS), max(report["steps"] for report in reports)
    kinds = ", ".join(f"{sums[kind]:,} {kind}" for kind in KINDS if sums[kind])
    adopted = f", {sums['adopted']:,} taken over from a connector" if sums["adopted"] else ""
    return (
        f"kv audit: {sums['checked']:,} slots checked in {steps:,} steps, {total:,} findings"
        + (f" ({kinds})" if kinds else "")
        + adopted
    )
