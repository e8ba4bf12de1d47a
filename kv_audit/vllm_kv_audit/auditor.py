# SPDX-License-Identifier: Apache-2.0
"""The auditor of one rank: what it holds, and what it does in a step.

A step calls `check_before`, once vLLM has prepared its inputs and before the forward, and `mark_after`, once it is
known what was rejected and before a drafter writes. A request that joins (new, back from preemption, or the next turn
of a session) is looked at whole after its first step: vLLM hands a block to the prefix cache while it schedules the
step that fills it, and what a KV connector brings may come as late as in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .marks import Batch, Marks, Outcome, Sample, mix, new_ring
from .pages import Pages
from .report import Reporter
from .settings import Settings

if TYPE_CHECKING:
    from .perturb import Perturb

EVERY = 8  # steps between two looks at a GPU's findings


class Auditor:
    """Args:
    pages: what is audited. max_requests, max_positions: running requests, and tokens of each.
    scheduler_blocks: blocks as the scheduler counts them, of which a kernel's may be parts.
    adopts: rows may come from a KV connector: what a joining request finds under another identity, or none, is taken
        for what it should be, and held to that from then on.
    """

    def __init__(
        self,
        settings: Settings,
        pages: Sequence[Pages],
        max_requests: int,
        max_positions: int,
        scheduler_blocks: int,
        *,
        adopts: bool,
        rank: int,
    ) -> None:
        device = pages[0].units.device
        self.settings, self.device, self.adopts = settings, device, adopts
        self.marks = [Marks.of(each, index) for index, each in enumerate(pages)]
        self.expected = torch.zeros(max_requests, max_positions, dtype=torch.int32, device=device)
        self.ring = new_ring(device)
        self.reporter = Reporter(rank, [each.names for each in pages])
        self._on_gpu = device.type == "cuda"
        self._positions = np.arange(max_positions)
        self._copied = torch.zeros_like(self.ring, device="cpu", pin_memory=self._on_gpu)
        everyone = torch.arange(max_requests, device=device)
        self._first = [everyone[:count] for count in range(max_requests + 1)]  # a view less to make in each step
        self._scheduler_blocks = scheduler_blocks
        self._step = 0
        self._joiners: Sequence[int] = ()
        self._most_joined = 0
        self._batch: Batch | None = None
        self._tables: Sequence[Tensor] = ()
        self.perturb: Perturb | None = None
        if self._on_gpu:
            from .kernels import Launches as Form
        else:
            from .cpu import OnCpu as Form  # type: ignore[assignment]
        self.forms = [Form(marks, self.expected, self.ring) for marks in self.marks]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.expected.nbytes + sum(marks.nbytes for marks in self.marks)

    def begin_request(self, row: int, name: str, tokens: Sequence[int] | np.ndarray) -> None:
        """A request joins under `row`, with all tokens that are known of it."""
        self.reporter.name(row, name, self._step)
        known = np.asarray(tokens[: self.expected.shape[1]], dtype=np.int64)
        identities = mix(known, self._positions[: len(known)]).cumsum().astype(np.int32)
        self.expected[row, : len(known)].copy_(self._pinned(identities), non_blocking=True)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """vLLM copies whole blocks, (from, to) each: so go their marks."""
        pairs = self._upload(np.asarray(copies, dtype=np.int64).reshape(-1, 2))
        for marks in self.marks:
            for values in (marks.state[None], marks.identity[None], marks.content):
                blocks = values.view(len(values), self._scheduler_blocks, -1)
                blocks[:, pairs[:, 1]] = blocks[:, pairs[:, 0]]

    def follow_blocks(self, scheduler_output: Any) -> None:
        """What vLLM does to whole blocks before a step."""
        if scheduler_output.new_block_ids_to_zero:
            self.forget_blocks(scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            self.copy_blocks(scheduler_output.kv_cache_block_copies)

    def forget_blocks(self, ids: Sequence[int]) -> None:
        """vLLM clears blocks."""
        chosen = self._upload(np.asarray(ids, dtype=np.int64))
        for marks in self.marks:
            marks.state.view(self._scheduler_blocks, -1)[chosen] = 0

    def forget_all(self) -> None:
        """The cache is gone, as in sleep: no slot is known to be written."""
        for marks in self.marks:
            marks.state.zero_()

    def reset(self) -> None:
        """Forget all marks and counts: what was so far were warm-up runs."""
        self.forget_all()
        self.ring.zero_()
        self._copied.zero_()
        self.reporter.reset()
        self._step, self._joiners, self._batch = 0, (), None

    def check_before(
        self, batch: Batch, tables: Sequence[Tensor], joiners: Sequence[int], computed: np.ndarray
    ) -> None:
        """Check slots of the requests that run on, before the forward.

        Args:
            tables: the block table of each cache group. joiners: those of the batch that join in this step.
            computed: int [R], no request has more rows in the pages.
        """
        self._step += 1
        self._batch, self._tables = batch, tables
        self._joiners = [each for each in joiners if computed[each]]  # of the others nothing is in the pages yet
        requests = self._first[batch.num_requests]
        if self._joiners:
            self._most_joined = int(computed[self._joiners].max())
            stay = np.delete(np.arange(batch.num_requests), self._joiners)
            if not len(stay):
                return
            requests = self._upload(stay)
        if self.perturb is not None:
            self.perturb(batch, tables, [i for i in range(batch.num_requests) if i not in joiners])
        size = self.settings.samples
        self._check(batch, Sample(requests, size, size or int(computed.max()), self._step))

    def mark_after(self, slot_mappings: Sequence[Tensor], outcome: Outcome) -> None:
        """Mark the step's rows, and check all that joining requests found in the pages."""
        batch, self._batch = self._batch, None
        if batch is None:
            return  # a step that was not prepared
        for form, marks in zip(self.forms, self.marks, strict=True):
            form.mark(batch, slot_mappings[marks.pages.group], outcome)
        if self._joiners:
            requests = self._upload(np.asarray(self._joiners, dtype=np.int64))
            self._check(batch, Sample(requests, 0, self._most_joined, self._step), adopt=self.adopts)
        if not self._on_gpu:
            self.reporter.read(self.ring, self._step)
        elif self._step % EVERY == 0:
            self.reporter.read(self._copied, self._step)  # as it was some steps ago: nothing waits
            self._copied.copy_(self.ring, non_blocking=True)

    def _check(self, batch: Batch, sample: Sample, adopt: bool = False) -> None:
        if sample.most:
            for form, marks in zip(self.forms, self.marks, strict=True):
                form.check(batch, self._tables[marks.pages.group], sample, adopt)

    def look(self) -> Reporter:
        """What was found up to now; waits for the device."""
        self.reporter.read(self.ring.cpu(), self._step)
        return self.reporter

    def _upload(self, values: np.ndarray) -> Tensor:
        return self._pinned(values).to(self.device, non_blocking=True)

    def _pinned(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory() if self._on_gpu else tensor


def auditor_of(runner: Any) -> Auditor | None:
    """The runner's auditor, where one was asked for and there is something to audit."""
    return vars(runner).get("kv_auditor")
