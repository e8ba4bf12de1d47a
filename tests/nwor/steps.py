# SPDX-License-Identifier: Apache-2.0
"""One forward through a manager beside a copy of the pool that plain Python writes."""

import itertools

import pytest
import torch

from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from tests.nwor.paged import MEMORY, Batch, Paged, write_rows

# A prefill chunk, and decodes with 3, 0, 1 and 2 drafts: every way a query can lie in a batch; and decodes alone.
QUERIES, DRAFTS = (5, 4, 1, 2, 3), (0, 3, 0, 1, 2)
DECODES = (1, 4, 1, 2, 3)
REJECTED = {"none rejected": (0, 0, 0, 0, 0), "all rejected": (0, 3, 0, 1, 2), "some rejected": (0, 1, 0, 1, 0)}
# By what a step is: its mode, and the queries for which the mode takes that way.
WAYS = {"cow": ("cow", QUERIES), "logged": ("stage", QUERIES), "staged": ("stage", DECODES)}
memory = pytest.mark.parametrize("kind", MEMORY)
ways = pytest.mark.parametrize("way", WAYS)


class Step:
    """One forward through a manager; `expected` is the pool as plain Python says it must become."""

    def __init__(self, kind: str, way: str, device: str, batch: Batch | None = None, **options: int) -> None:
        if device == "cuda" and MEMORY[kind].get("packed"):
            pytest.skip("a packing describes vLLM's CPU caches")
        self.paged = Paged(**MEMORY[kind], device=device)
        self.mode, queries = WAYS.get(way, (way, DECODES))
        self.batch = batch or Batch(queries, DRAFTS, device=device)
        self.manager = DraftCommitManager(
            CacheLayout.from_kv_caches(self.paged.targets(), self.paged.packing),
            self.mode,
            options.get("max_requests", 8),
            options.get("max_drafts", 8),
            64,
        )
        self.rows = [self.paged.new_rows(self.batch.num_tokens, 100 + index) for index in range(3)]
        self.expected = self.paged.pool.clone()
        self.before = self.paged.pool.clone(), self.batch.slot_mapping.clone()

    def begin(self) -> bool:
        batch, device = self.batch, self.batch.device
        starts = torch.tensor(batch.query_start_loc, dtype=torch.int32, device=device)
        logits = [0, *itertools.accumulate(drafts + 1 for drafts in batch.num_drafts)]
        cu_num_logits = torch.tensor(logits, dtype=torch.int32, device=device)
        decodes = all(rows == drafts + 1 for rows, drafts in zip(batch.queries, batch.num_drafts, strict=True))
        most = max(batch.num_drafts)
        return self.manager.begin(starts, cu_num_logits, batch.slot_mapping, windows_alone=decodes, most_drafts=most)

    def forward_layer(self, layer: int) -> None:
        """The write of one layer, and the end of its attention."""
        cache, manager, rows = self.paged.targets()[layer], self.manager, self.rows[layer]
        slots = self.batch.slot_mapping[: self.batch.num_tokens]

        def write(cache: torch.Tensor, slots: torch.Tensor) -> None:
            write_rows(cache, slots, rows, self.paged.packing)

        if manager.serves_attention:
            manager.stage(layer, write, cache, slots)
        else:
            write(cache, slots)

    def forward(self) -> None:
        for layer in range(3):
            self.forward_layer(layer)

    def commit(self, num_rejected: tuple[int, ...]) -> None:
        self.manager.commit(torch.tensor(num_rejected, dtype=torch.int32, device=self.paged.device))

    def expect(self, rows: list[int], layers: tuple[int, ...] = (0, 1, 2)) -> None:
        """Write `rows` of `layers` to the copy of the pool."""
        for layer in layers:
            slots = [slot if row in rows else -1 for row, slot in enumerate(self.batch.slots)]
            cache = self.paged.targets(self.expected)[layer]
            write_rows(cache, torch.tensor(slots), self.rows[layer], self.paged.packing)

    def assert_pool(self) -> None:
        assert torch.equal(self.paged.pool, self.expected)
        assert torch.equal(self.batch.slot_mapping, self.before[1]), "the drafter needs its slots back"
