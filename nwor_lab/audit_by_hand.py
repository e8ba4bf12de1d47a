# SPDX-License-Identifier: Apache-2.0
"""A few steps of two layers under the real manager and the real auditor, without a model: a fault shows at once.

Two requests verify `K` drafts in each step; in some a third computes a chunk of its prompt beside them. Keys and values
are random numbers. All else is what serves in vLLM: the manager, its operators and, beside it, the audit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm import stats
from nwor_lab.audit.auditor import AuditReport, CacheAudit
from nwor_lab.faults import FAULTS, Fault

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, WIDTH, K = 2, 16, 2, 4, 16, 3
PROMPTS = (5, 6, 3)
"""Rows of each request's prompt in the first step, which has no drafts."""
STEPS = ((1, 0), (2, 2), (3, 0), (0, 0), (1, 2), (2, 0))
"""Of each later step: rejected drafts of each of two requests, and rows of a prompt that the third one brings."""
_EXAMPLE = (
    r"step (?P<step>\d+), layer (?P<layer>\d+), slot (?P<slot>\d+), "
    r"(?:head (?P<head>\d+), (?P<half>\w+)|all heads): (?P<what>.+)"
)


def offered() -> dict[str, tuple[Fault, str]]:
    """The faults that need nothing special of an engine, by name, each with a mode that it can be injected into."""
    return {name: (fault, fault.modes[-1]) for name, fault in FAULTS.items() if fault.red and not fault.needs}


@dataclass
class Audited:
    """What the auditor found in the steps.

    written: the slots of all kept rows, of any request.
    """

    report: AuditReport
    examples: list[str]
    written: set[int]

    @property
    def red(self) -> set[str]:
        return self.report.red

    def where(self) -> pd.DataFrame:
        """The first things found, a row each: `step, layer, slot, head, half, what`."""
        found = pd.Series(self.examples, dtype=str).str.extract(_EXAMPLE).fillna({"head": "all", "half": "both"})
        return found.astype(dict.fromkeys(("step", "layer", "slot"), int))

    def pages(self) -> pd.DataFrame:
        """A row for each slot: `layer, line` (the block), `column`, and `state`: empty, context or wrong."""
        wrong = set(zip(*(self.where()[name] for name in ("layer", "slot")), strict=True))
        return pd.DataFrame(
            {"layer": layer, "line": slot // BLOCK_SIZE, "column": slot % BLOCK_SIZE, "state": state}
            for layer in range(LAYERS)
            for slot in range(BLOCKS * BLOCK_SIZE)
            for state in ["wrong" if (layer, slot) in wrong else "context" if slot in self.written else "empty"]
        )


def run(fault: Fault | None = None, mode: str = "stage", seed: int = 0) -> Audited:
    """Take the steps under `mode`, with a fault injected into all of them or with none."""
    with nullcontext() if fault is None else fault.inject():
        return _Steps(mode, seed).take()


class _Steps:
    def __init__(self, mode: str, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.caches = list(torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK_SIZE, WIDTH))
        self.audit = CacheAudit(self.caches)
        self.manager = DraftCommitManager(CacheLayout.from_kv_caches(self.caches), mode, len(PROMPTS), K, 32)
        blocks = torch.randperm(BLOCKS, generator=self.generator)
        self.block_tables = blocks[:6], blocks[6:12], blocks[12:]
        self.num_computed_tokens = [0] * len(PROMPTS)
        self.written: set[int] = set()

    def take(self) -> Audited:
        self._step(PROMPTS, (0, 0, 0), (0, 0, 0))
        for rejected, prompt_rows in STEPS:
            drafts = (K, K, 0) if prompt_rows else (K, K)
            self._step((1 + K, 1 + K, prompt_rows)[: len(drafts)], drafts, (rejected, rejected, 0)[: len(drafts)])
        self.audit.look_between_steps()
        return Audited(self.audit.report, self.audit.examples, self.written)

    def _step(self, query_lens: Sequence[int], num_drafts: Sequence[int], num_rejected: Sequence[int]) -> None:
        """One step of vLLM: the window opens, each layer writes its rows, the sampler judges, the window closes."""
        starts = [sum(query_lens[:request]) for request in range(len(query_lens) + 1)]
        slots = [self._slots(request, rows) for request, rows in enumerate(query_lens)]
        slot_mapping, manager = torch.cat(slots), self.manager
        self.audit.before(starts, slot_mapping)
        if any(num_drafts):
            logits = torch.tensor([0, *(1 + drafts for drafts in num_drafts)], dtype=torch.int32).cumsum(0).int()
            alone = all(rows == 1 + drafts for rows, drafts in zip(query_lens, num_drafts, strict=True))
            names = [f"request {request}" for request in range(len(query_lens))] if alone else []
            query_start_loc = torch.tensor(starts, dtype=torch.int32)
            manager.begin(query_start_loc, logits, slot_mapping, names, windows_alone=alone, most_drafts=K)
        else:
            manager.write_all(slot_mapping)
        for layer, cache in enumerate(self.caches):
            rows = torch.randn(len(slot_mapping), HEADS, WIDTH, generator=self.generator)

            def write(cache: Tensor, slot_mapping: Tensor, rows: Tensor = rows) -> None:
                there = slot_mapping >= 0
                slots = slot_mapping[there]
                cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = rows[: len(there)][there]

            self.audit.copy_write(layer, write, slot_mapping)
            if manager.serves_attention:
                manager.stage(layer, write, cache, slot_mapping)
            else:
                write(cache, slot_mapping)
        if manager.is_open:
            manager.commit(torch.tensor(num_rejected, dtype=torch.int32))
        self.audit.after(num_rejected)
        stats.add_to_output(None, None)  # the step's output leaves for the scheduler
        for request, (own, rejected) in enumerate(zip(slots, num_rejected, strict=True)):
            self.num_computed_tokens[request] += len(own) - rejected
            self.written.update(own[: len(own) - rejected].tolist())

    def _slots(self, request: int, rows: int) -> Tensor:
        position = self.num_computed_tokens[request] + torch.arange(rows)
        return self.block_tables[request][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
