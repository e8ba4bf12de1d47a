# SPDX-License-Identifier: Apache-2.0
"""The auditor must see one changed bit anywhere, a kept row that was not written whole, and bytes that are not its own.

Each injected fault makes one field of the report red, and no other.
"""

from collections.abc import Callable

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nwor_lab.audit.auditor import AuditReport, CacheAudit
from tests.lab.audited import (
    GONE,
    HALF,
    KEPT,
    LAYERS,
    LOGGED,
    REJECTED,
    ROWS,
    STEP,
    Audited,
    clean_step,
    memory,
    report,
)
from tests.nwor.paged import BLOCK_SIZE, MEMORY, NUM_BLOCKS, NUM_HEADS, WIDTH


@memory
@each_device
def test_kept_rows_written_and_nothing_else_is_clean(kind, device):
    """Rejected rows untouched, a padding slot, other layers: no dirt. Nor are rows that bring the bytes of before."""
    audited = Audited(kind, device)
    for _ in range(2):
        audited.begin(torch.cat([STEP, torch.tensor([-1])]), (0, 5, 6))
        for layer in range(LAYERS):
            audited.write(layer)
        audited.audit.after((2, 0))
    assert audited.audit.report == report(2)
    assert audited.audit.report.clean


# What layer 1 writes in place of its own rows, where, and what is found.
FAULTS: dict[str, tuple[Callable[[list[Tensor], Tensor], Tensor], slice, dict[str, int]]] = {
    "one row too many": (lambda rows, poison: rows[1], slice(3, 4), {"dirty_slots": 1}),
    "one row too few": (lambda rows, poison: poison, slice(2, 3), {"unwritten_rows": 1}),
    "bytes of another layer": (lambda rows, poison: rows[0], slice(3), {"wrong_rows": 3}),
    "bytes of another head": (lambda rows, poison: rows[1].flip(1), slice(3), {"wrong_rows": 3}),
    "keys alone": (lambda rows, poison: first_of(rows, poison, HALF), slice(3), {"unwritten_rows": 3}),
    "one element left out": (lambda rows, poison: first_of(rows, poison, WIDTH - 1), slice(3), {"wrong_rows": 3}),
    "one head only": (lambda rows, poison: torch.cat([rows[1][:, :1], poison[:, 1:]], 1), slice(3),
                      {"unwritten_rows": 3}),
    "log of another slot": (lambda rows, poison: poison.roll(1, 0), LOGGED, {"dirty_slots": 2}),
}  # fmt: skip


def first_of(rows: list[Tensor], poison: Tensor, width: int) -> Tensor:
    """The first elements of each row, and what was there before behind them."""
    return torch.cat([rows[1][..., :width], poison[..., width:]], -1)


@memory
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_for_what_it_is(kind, fault):
    made, which, found = FAULTS[fault]
    audited = Audited(kind)
    audited.begin()
    poison = audited.held(1)
    for layer in range(LAYERS):
        audited.write(layer)
    audited.write(1, made(audited.rows, poison), which)
    audited.audit.after(GONE)
    assert audited.audit.report == report(**found)
    assert not audited.audit.report.clean


@memory
@pytest.mark.parametrize("rewritten", [False, True])
def test_a_log_that_outlives_its_step(kind, rewritten):
    """What a mode left in a slot is there still when the next step begins; but a slot that was written since it was
    logged is poisoned anew, and the logged bytes are no longer what it held."""
    audited = Audited(kind)
    logged = audited.held(1)
    clean_step(audited, STEP.flip(0) if rewritten else STEP)  # flipped, it keeps the two rows that are rejected next
    logged = logged if rewritten else audited.held(1)
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer)
    audited.write(1, logged, LOGGED)
    audited.audit.after(GONE)
    assert audited.audit.report == report(2, **({"dirty_slots": 2} if rewritten else {}))


@memory
@pytest.mark.parametrize("begun", [False, True])
def test_a_late_commit_is_seen(kind, begun):
    """A kept row that is written after its step was judged, before the next one begins or in it."""
    audited, others = Audited(kind), torch.tensor([3, 6, 10, 11, 12])
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer, which=slice(2 if layer == 1 else 3))
    audited.audit.after(GONE)
    if not begun:
        audited.write(1)
    audited.begin(others)
    audited.write(1)
    for layer in range(LAYERS):
        audited.write(layer, slots=others)
    audited.audit.after(GONE)
    late = {"dirty_slots": 1} if begun else {"stray_slots": 1}
    assert audited.audit.report == report(2, unwritten_rows=1, **late)


@memory
@each_device
def test_a_write_between_two_steps_is_seen(kind, device):
    """Of a slot of no row, of a kept row, and of one that the next step brings; and behind the last step."""
    audited = Audited(kind, device)
    for index, slot in enumerate((0, KEPT[0].item(), REJECTED[1].item())):
        clean_step(audited)
        audited.flip(index, slot)
    clean_step(audited)
    assert audited.audit.report == report(4, stray_slots=3)
    assert audited.audit.examples[0] == "step 1, layer 0, slot 0, head 0, keys: changed before the step"
    audited.flip(0, 23, 1, WIDTH - 1)
    for _ in range(2):
        audited.audit.look_between_steps()
        assert audited.audit.report.stray_slots == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(MEMORY)),
    layer=st.integers(0, 2),
    slot=st.integers(0, NUM_BLOCKS * BLOCK_SIZE - 1),
    head=st.integers(0, NUM_HEADS - 1),
    place=st.integers(0, WIDTH - 1),
)
def test_one_bit_anywhere_is_seen(kind, layer, slot, head, place):
    """And named: a changed bit makes a slot dirty, or a kept row wrong."""
    audited = Audited(kind)
    audited.begin()
    for index in range(LAYERS):
        audited.write(index)
    audited.flip(layer, slot, head, place)
    audited.audit.after(GONE)
    kept = slot in KEPT.tolist()
    assert audited.audit.report == report(**{"wrong_rows" if kept else "dirty_slots": 1})
    half = "keys" if place < HALF else "values"
    assert audited.audit.examples[0].startswith(f"step 0, layer {layer}, slot {slot}, head {head}, {half}: ")


@memory
def test_rows_whose_write_nobody_saw_are_counted_as_unchecked(kind):
    """No hook was called, or for other slots; dirt is seen all the same."""
    for slots in (None, STEP + 1):
        audited = Audited(kind)
        audited.audit.before(ROWS, STEP)
        for layer in range(LAYERS):
            if slots is not None:
                audited.audit.copy_write(layer, lambda cache, slot_mapping: None, slots)
            audited.write(layer, audited.rows[0])
        audited.write(1, which=slice(3, 4))
        audited.audit.after(GONE)
        assert audited.audit.report == report(content_checked=0, dirty_slots=1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@each_device
def test_poison_differs_everywhere_and_is_finite(dtype, device):
    """By step, layer, slot, head and half; large, so that a read of it shows, never 0, and not so large as to give NaN:
    what rounding leaves of a score of poison is taken to the power of 2."""
    size = 24  # elements: the shifts of the hashed bits do not tell keys from values
    caches = [torch.zeros(4, 2, 4, 2 * size, dtype=dtype, device=device) for _ in range(2)]
    audit = CacheAudit(caches)

    def poison() -> list[bytes]:
        chunks = torch.stack(caches).view(-1, size)
        assert (chunks.float().abs() >= 8).all() and (chunks.float().abs() < 2**16).all()
        return [bytes(chunk.tolist()) for chunk in chunks.view(torch.uint8).cpu()]

    first = poison()
    for cache in caches:
        cache.zero_()
    audit.before((0, 0), torch.empty(0, dtype=torch.int64, device=device))
    audit.after((0,))
    audit.before((0, 16), torch.arange(16, device=device))
    assert len({*first, *poison()}) == 2 * len(first)


def test_bits_are_compared_not_numbers():
    """Another NaN is a change, and so is the sign of zero."""
    cache, slots = torch.zeros(2, 1, 4, 8), torch.arange(8)
    audit = CacheAudit([cache])
    audit.before((0, 8), slots)
    cache[0], cache[1] = float("nan"), 0
    audit.after((0,))
    audit.before((0, 0), slots)
    cache.view(torch.int32)[0, 0, 1, 3] ^= 1
    cache[1, 0, 2, 5] = -0.0
    assert cache[0].isnan().all()
    audit.after((0,))
    assert audit.report.dirty_slots == 2


def test_what_is_no_step():
    """No proof, and no batch: on a GPU a slot beyond the cache would end the process as it is used for an index."""
    assert not AuditReport().clean
    audit = CacheAudit([torch.zeros(2, 1, 4, 8)])
    with pytest.raises(ValueError, match="open"):
        audit.after((0,))
    with pytest.raises(ValueError, match="slot"):
        audit.before((0, 2), torch.tensor([7, 8]))


def test_examples_name_step_layer_slot_head_half_and_request():
    audited = Audited("HND")
    audited.begin(starts=(0, 3, 5))
    poison = audited.held(1)
    audited.write(0, which=slice(4))
    audited.write(1, torch.cat([audited.rows[1][:, :1], poison[:, 1:]], 1))
    audited.write(2, audited.rows[0])
    audited.flip(2, 0, 1, WIDTH - 1)
    audited.audit.after((0, 2))
    assert audited.audit.examples == [
        "step 0, layer 0, slot 17, all heads: changed, of request 1 of the batch",
        "step 0, layer 1, slot 2, head 1, keys: unwritten, of request 0 of the batch",
        "step 0, layer 1, slot 4, head 1, keys: unwritten, of request 0 of the batch",
        "step 0, layer 1, slot 9, head 1, keys: unwritten, of request 0 of the batch",
        "step 0, layer 2, slot 0, head 1, values: changed, of no row of the step",
        "step 0, layer 2, slot 2, all heads: not what vLLM writes, of request 0 of the batch",
        "step 0, layer 2, slot 4, all heads: not what vLLM writes, of request 0 of the batch",
        "step 0, layer 2, slot 9, all heads: not what vLLM writes, of request 0 of the batch",
    ]
    audited.audit.reset()
    assert (audited.audit.report, audited.audit.examples) == (AuditReport(), [])


def test_the_first_requests_steps_are_remembered():
    audited = Audited("HND")
    audited.begin(torch.cat([STEP, torch.tensor([-1])]), (0, 4, 6))
    audited.write(0)
    audited.audit.after((2, 0))
    expected = {"slots": STEP[:4].tolist(), "num_rejected": 2, "changed": [True, True, True, False]}
    assert audited.audit.history == [expected]
