# SPDX-License-Identifier: Apache-2.0
"""The auditor must see one changed bit anywhere, and one kept row that was not written (R27, N3)."""

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import BLOCK_SIZE, NUM_BLOCKS, Paged, write_rows

from nwor.audit import AuditReport, CacheAudit

KEPT = torch.tensor([9, 2, 17])
MEMORY = {
    "NHD": {"order": "LBNH"},
    "HND": {"order": "LBHN"},
    "layers inside blocks": {"order": "BLHN"},
    "packed": {"order": "LBHN", "packed": True},
    "packed fp8": {"order": "LBHN", "packed": True, "dtype": torch.uint8},
    "fp32": {"order": "LBNH", "dtype": torch.float32},
}
memory = pytest.mark.parametrize("kind", MEMORY)


def audit_of(kind: str, device: str = "cpu") -> tuple[Paged, CacheAudit]:
    paged = Paged(**MEMORY[kind], device=device)
    return paged, CacheAudit(paged.targets(), paged.packing)


def write(paged: Paged, layer: int, slots: torch.Tensor) -> None:
    write_rows(paged.targets()[layer], slots, paged.new_rows(len(slots), 50 + layer), paged.packing)


def flip(paged: Paged, layer: int, slot: int, element: tuple[int, int]) -> None:
    """Change one bit of one element (head, place in the row) of one slot."""
    cache = paged.targets()[layer]
    row = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])[slot // BLOCK_SIZE]
    head, place = element
    if paged.packing is None:
        row[head, slot % BLOCK_SIZE, place] ^= 1
    else:
        row[head].view(-1)[paged.packing[slot % BLOCK_SIZE, place].long()] ^= 1


@memory
@each_device
def test_kept_rows_written_and_nothing_else_is_clean(kind, device):
    paged, audit = audit_of(kind, device)
    kept = torch.cat([KEPT, torch.tensor([-1])]).to(device)  # a padding slot is nobody's
    for _ in range(2):
        audit.before()
        for layer in range(3):
            write(paged, layer, kept)
        audit.after(kept)
        paged.pool.bitwise_xor_(255)  # what happens between steps is another's business
    assert audit.report == AuditReport(steps=2, layer_steps=6, kept_rows=18)
    assert audit.report.clean


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(MEMORY)),
    layer=st.integers(0, 2),
    slot=st.integers(0, NUM_BLOCKS * BLOCK_SIZE - 1),
    element=st.tuples(st.integers(0, 1), st.integers(0, 7)),
)
def test_one_bit_anywhere_is_seen(kind, layer, slot, element):
    """A changed bit in a slot that is not kept makes that layer dirty; in a kept one it is part of the write."""
    paged, audit = audit_of(kind)
    audit.before()
    flip(paged, layer, slot, element)
    changed = [
        index for index, cache in enumerate(paged.targets()) if audit.changed_slots(cache, audit._before[index]).any()
    ]
    found = audit.changed_slots(paged.targets()[layer], audit._before[layer])
    audit.after(KEPT)
    assert (changed, found.nonzero().flatten().tolist()) == ([layer], [slot])
    kept = slot in KEPT.tolist()
    assert audit.report.dirty_slots == audit.report.dirty_layer_steps == int(not kept)
    assert audit.report.unwritten_rows == 3 * len(KEPT) - int(kept)
    assert not audit.report.clean


@memory
def test_a_kept_row_that_was_not_written_is_seen(kind):
    """#2: a commit that leaves out one row of one layer."""
    paged, audit = audit_of(kind)
    audit.before()
    for layer in range(3):
        write(paged, layer, KEPT[: 2 if layer == 1 else 3])
    audit.after(KEPT)
    assert audit.report == AuditReport(steps=1, layer_steps=3, kept_rows=9, unwritten_rows=1)
    assert not audit.report.clean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_compared_not_numbers(dtype):
    """#12, #25: NaN equals itself, another NaN is a change, and so is the sign of zero."""
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    cache = torch.full((2, 1, 4, 8), float("nan"), dtype=dtype)
    cache[1] = 0
    audit = CacheAudit([cache])
    nothing = torch.empty(0, dtype=torch.int64)
    audit.before()
    audit.after(nothing)
    assert audit.report == AuditReport(steps=1, layer_steps=1)
    audit.before()
    cache.view(bits)[0, 0, 1, 3] ^= 1
    assert bool(cache[0].isnan().all())
    cache[1, 0, 2, 5] = -0.0
    audit.after(nothing)
    assert audit.report.dirty_slots == 2
    assert not audit.report.clean


def test_no_step_is_no_proof():
    assert not AuditReport().clean


def test_a_step_that_was_not_opened_is_an_error():
    """After a step the copy is gone: a second judgement needs a second copy."""
    _, audit = audit_of("HND")
    audit.before()
    audit.after(KEPT[:0])
    with pytest.raises(ValueError, match="zip"):
        audit.after(KEPT)
