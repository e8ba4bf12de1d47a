# SPDX-License-Identifier: Apache-2.0
"""Three small target layers under audit, and one step of them, for the tests of the auditor."""

import pytest
import torch
from torch import Tensor

from nwor_lab.audit.auditor import AuditReport, CacheAudit
from tests.nwor.paged import BITS, BLOCK_SIZE, MEMORY, WIDTH, Paged, write_rows

STEP = torch.tensor([9, 4, 2, 17, 21])  # the slots of the step's rows, one request's
KEPT, REJECTED = STEP[:3], STEP[3:]
ROWS, GONE, LOGGED = (0, 5), (2,), slice(3, 5)
LAYERS, HALF = 3, WIDTH // 2
memory = pytest.mark.parametrize("kind", MEMORY)


def parts(packing: Tensor | None) -> Tensor | None:
    """For each element of a chunk twice its slot, and 1 more for a value's."""
    if packing is None:
        return None
    part_of = torch.empty(packing.numel(), dtype=torch.int64)
    for offset, places in enumerate(packing):
        for half in (0, 1):
            part_of[places.long().chunk(2)[half]] = 2 * offset + half
    return part_of


class Audited:
    """Three target layers, poisoned, and their audit; `rows[layer]` are a step's keys and values, [5, H, WIDTH]."""

    def __init__(self, kind: str, device: str = "cpu") -> None:
        if device == "cuda" and MEMORY[kind].get("packed"):
            pytest.skip("a packing describes vLLM's CPU caches")
        self.paged = Paged(**MEMORY[kind], device=device)
        self.audit = CacheAudit(self.paged.targets(), parts(self.paged.packing))
        self.rows = [self.paged.new_rows(len(STEP), 50 + layer) for layer in range(LAYERS)]

    def held(self, layer: int, slots: Tensor = STEP) -> Tensor:
        """What slots hold now, [len(slots), H, WIDTH]."""
        cache, packing, found = self.paged.targets()[layer], self.paged.packing, []
        for block, offset in zip(slots // BLOCK_SIZE, slots % BLOCK_SIZE, strict=True):
            chunk = cache[block]
            found.append(chunk[:, offset] if packing is None else chunk.flatten(1)[:, packing[offset].long()])
        return torch.stack(found)

    def begin(self, slots: Tensor = STEP, starts: tuple[int, ...] = ROWS) -> None:
        """Open a step, and let vLLM call its writer in every layer."""
        slots = slots.to(self.paged.device)
        self.audit.before(starts, slots)
        for layer, rows in enumerate(self.rows):

            def write(cache: Tensor, slot_mapping: Tensor, rows: Tensor = rows) -> None:
                write_rows(cache, slot_mapping, rows, self.paged.packing)

            self.audit.copy_write(layer, write, slots)

    def write(self, layer: int, rows: Tensor | None = None, which: slice = slice(3), slots: Tensor = STEP) -> None:
        """Write `which` of a layer's rows, the kept ones unless told, or of others, to their slots."""
        rows = self.rows[layer] if rows is None else rows
        write_rows(self.paged.targets()[layer], slots[which], rows[which], self.paged.packing)

    def flip(self, layer: int, slot: int, head: int = 0, place: int = 0) -> None:
        """Change one bit of one element of one slot."""
        cache = self.paged.targets()[layer]
        chunk = cache.view(BITS[cache.element_size()])[slot // BLOCK_SIZE, head]
        if self.paged.packing is None:
            chunk[slot % BLOCK_SIZE, place] ^= 1
        else:
            chunk.view(-1)[self.paged.packing[slot % BLOCK_SIZE, place].long()] ^= 1


def clean_step(audited: Audited, slots: Tensor = STEP) -> None:
    audited.begin(slots)
    for layer in range(LAYERS):
        audited.write(layer, slots=slots)
    audited.audit.after(GONE)


def report(steps: int = 1, **counts: int) -> AuditReport:
    """Of steps like `clean_step`, with `counts` beside it; what is dirty is in one layer of the last step."""
    dirt = counts.get("dirty_slots", 0)
    rows = LAYERS * len(KEPT) * steps
    expected = {"steps": steps, "layer_steps": LAYERS * steps, "kept_rows": rows, "content_checked": rows, **counts}
    return AuditReport(**expected, dirty_layer_steps=int(dirt > 0), dirty_by_step=[*(steps - 1) * [0], dirt])
