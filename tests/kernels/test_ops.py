# SPDX-License-Identifier: Apache-2.0
"""The operators against plain Python, every byte of every tensor and of what lies around it; and by hand, what went
wrong before.

Guards against: counts by launch, layouts taken for others, overflow, fewer elements than threads, scales applied twice
or not at all, a layer left out, bytes converted, padding rows, prefills taken for verify steps.
"""

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor import ops
from nwor_lab.operators.inputs import (
    Pool,
    calls,
    draw,
    make_batch,
    make_cache,
    make_staging,
    make_targets,
    make_vectors,
    make_window,
    poison,
)
from tests.kernels.operators import check

pytestmark = each_device


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_drawn_calls(seed, device):
    """Every operator with drawn dtypes, layouts, packings, shapes, strides, scales, slots, accepted rows and batches;
    no rows and no requests among them, staging that is full or has overflowed, slices of longer buffers."""
    for operator, args in draw(device, seed).items():
        check(operator, *args)


# -- one layer ---------------------------------------------------------------------------------------------------------


def test_staging_appends_and_overflows_whole(device):
    """Slots stand beside their rows in the order of tokens; one row too many sets the flag, and neither that call's
    rows nor later ones are staged, nor does anything commit."""
    key, value = make_vectors("packed", 4, 2, 8, torch.bfloat16, device)
    staging = make_staging(5, 2, 8, torch.bfloat16, device)
    caches = make_cache("NHD", 8, 4, 2, 8, torch.bfloat16, device)
    for slots, found in (([9, -1, 3, -1], [2, 0]), ([4], [3, 0]), ([4, 5, 6], [3, 1]), ([7], [3, 1])):
        slot_mapping = torch.tensor(slots, device=device)
        check("stage_kv_cache", key, value, slot_mapping, *staging, "auto", None, None)
        assert staging[3].tolist() == found
    assert staging[2][:3].tolist() == [9, 3, 4]
    check("commit_staged_kv_cache", *staging, *caches, torch.tensor([3], dtype=torch.int32, device=device))


@pytest.mark.parametrize("capacity", [512, 0])
def test_staging_of_exactly_its_capacity(capacity, device):
    """A fixed buffer of 512 rows was overrun once; exactly full is full, not over."""
    key, value = make_vectors("packed", capacity + 1, 2, 8, torch.float16, device)
    staging = make_staging(capacity, 2, 8, torch.float16, device)
    for slots, over in ((torch.arange(capacity), 0), (torch.tensor([0]), 1)):
        check("stage_kv_cache", key, value, slots.to(device), *staging, "auto", None, None)
        assert staging[3].tolist() == [capacity, over]


# -- all layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element_size", [0, 2])
def test_restore_undoes_what_was_written(element_size, device):
    """Log, overwrite every slot of every layer, restore all: the pool is what it was, bit for bit."""
    if element_size and device == "cuda":
        pytest.skip("a packing describes vLLM's CPU caches")
    drawn = calls(device, element_size=element_size)["commit_all_layers"]
    *where, rows, num_drafts, rejected, kept, counts = drawn
    before, log = where[0].clone(), torch.empty_like(rows)
    ops.log_all_layers(*where, log)
    ops.commit_all_layers(*where, rows, num_drafts, torch.zeros_like(rejected), kept, counts)
    assert not torch.equal(where[0], before)
    ops.restore_all_layers(*where, log, num_drafts, num_drafts, kept, counts)
    assert torch.equal(where[0], before)


def test_counts_are_rows(device):
    """Kept and rejected rows are counted once each, whatever the layers and heads; padding not at all."""
    pool = Pool("LBNH", 3, 4, 8, 16, 32, device)
    slots = torch.arange(20, device=device).view(4, 5)
    slots[:, 4], slots[1, 1:] = -1, -1  # behind the drafts
    slots[0, 2] = -1  # a rejected row without a slot
    numbers = [[4, 1, 4, 4], [2, 0, 3, 1], [9, 9, 9, 9]]
    num_drafts, rejected, kept = torch.tensor(numbers, dtype=torch.int32, device=device)
    for operator, expected in (("restore_all_layers", [12, 12, 11]), ("commit_all_layers", [19, 17, 11])):
        check(operator, *pool.arguments(slots), num_drafts, rejected, kept, pool.counts)
        assert kept.tolist() == [2, 1, 1, 3]
        assert pool.counts.tolist()[:3] == expected  # from [5, 7, 11]: 7 kept and 5 rejected a call


@pytest.mark.parametrize("drafts", [[9] * 66, [33, 0, 31, 2], [70, 0, 31, 2]], ids=["many requests", "33", "70"])
def test_more_rows_than_a_launch_has_threads(drafts, device):
    """Many requests over several blocks of the mini-cache; windows wider than a warp, and a request that holds none."""
    pool = Pool("LBHN", 2, 80, 2, 8, 16, device, mini_blocks=80)
    window = make_window(drafts, [request % 11 for request in range(len(drafts))], 640, device)
    check("log_all_layers", *pool.arguments(window[0]))
    check("restore_all_layers", *pool.arguments(window[0]), *window[1:], pool.counts)
    check("commit_all_layers", *pool.arguments(window[0]), *window[1:], pool.counts)


@pytest.mark.parametrize("element_size", [0, 2])
@pytest.mark.parametrize("order", ["LBHN", "BLHN"])
def test_a_log_that_outlives_its_step(order, element_size, device):
    """Three windows of six rows that move on by one, seven and no slots over pages of 16:
    the overlap is not read again."""
    if element_size and device == "cuda":
        pytest.skip("a packing describes vLLM's CPU caches")
    pool = Pool(order, 2, 6, 2, 16, 16, device, element_size)
    logged = torch.full((3, 8), -1, dtype=torch.int64, device=device)
    pages, kept = torch.tensor([[4, 1], [2, 3]]), poison((2,), torch.int32, device, 10)
    num_drafts = torch.tensor([6, 5], dtype=torch.int32, device=device)
    begins = [[12, 19, 26, 26], [9, 10, 17, 17]]  # positions; the second request has five rows
    for step in range(4):
        positions = torch.tensor([[begin[step]] for begin in begins]) + torch.arange(6)
        slots = (pages.gather(1, positions // 16) * 16 + positions % 16).to(device)
        slots[1] = torch.cat([slots[1, 1:], slots.new_tensor([-1])])
        before = logged.clone()
        check("log_all_layers", *pool.arguments(slots), logged)
        assert torch.equal(logged, before), "what is logged counts from the restore on"
        pool.pool.copy_(poison(pool.pool.shape, torch.uint8, device, 50 + step))  # a row that is read again differs
        rejected = torch.tensor([[6, 6], [0, 3], [6, 5], [2, 9]][step], dtype=torch.int32, device=device)
        check("restore_all_layers", *pool.arguments(slots), num_drafts, rejected, kept, pool.counts, logged)
    there = [set(held.tolist()) for held in logged]
    assert there[0] & set(slots[0].tolist()) == set(slots[0, 4:].tolist()), "the two that were rejected last"
    assert there[1] >= set(slots[1, :5].tolist()) and there[2] == {-1}


# -- the window --------------------------------------------------------------------------------------------------------


def open_both(batch, requests: int, width: int, device: str, tokens: int = 0) -> tuple:
    """Both modes against the reference; slots, drafts and counts of `cow`, then all of `stage`."""
    counts = torch.tensor([1, 2, 3, 4, 5, 0], device=device), torch.tensor([1, 2, 3, 4, 5, 0], device=device)
    targets = make_targets(requests, width, tokens or batch[2].numel(), device)
    slots, num_drafts = make_targets(requests, width, 0, device)[:2]
    check("open_window", *batch, slots, num_drafts, None, None, counts[0])
    check("open_window", *batch, *targets, counts[1])
    return (slots, num_drafts, counts[0]), (*targets, counts[1])


def of(device: str, *lists: list[int]) -> tuple:
    """query_start_loc, cu_num_logits and slot_mapping."""
    dtypes = (torch.int32, torch.int32, torch.int64)
    return tuple(
        torch.tensor(numbers, dtype=dtype, device=device) for numbers, dtype in zip(lists, dtypes, strict=True)
    )


def test_a_mixed_batch_in_words(device):
    """A verify step of 2 drafts, a prefill of 4, a decode,
    and a verify step of 1 draft whose slot is missing."""
    batch = of(device, [0, 3, 7, 8, 10], [0, 3, 4, 5, 7], [40, 41, 42, 50, 51, 52, 53, 60, 70, -7, -1, -1])
    (cow, num_drafts, counted), (slots, _, staging_rows, page_slots, staged) = open_both(batch, 5, 4, device, tokens=13)
    assert cow.tolist() == [[41, 42, -1, -1], [-1] * 4, [-1] * 4, [-1] * 4, [-1] * 4]
    assert num_drafts.tolist() == [2, 0, 0, 1, 0], "a draft without a slot is a draft"
    assert counted.tolist() == [1, 2, 5, 7, 5, 0]
    assert slots.tolist() == cow.tolist()
    assert staging_rows.tolist() == [-1, 0, 1, -1, -1, -1, -1, -1, -1, 12, -1, -1, -1]
    assert page_slots.tolist() == [40, -1, -1, 50, 51, 52, 53, 60, 70, -1, -1, -1, -1]
    assert staged.tolist() == [1, 2, 5, 7, 5, 0]


def test_drafts_behind_prefill_rows(device):
    """Whose rows are recomputed behind a failed load: `cow` holds the drafts, `stage` counts a fallback."""
    batch = of(device, [0, 4], [0, 3], [40, 41, 42, 43])
    (cow, _, counted), (slots, num_drafts, staging_rows, page_slots, staged) = open_both(batch, 1, 2, device)
    assert cow.tolist() == [[42, 43]] and counted.tolist() == [1, 2, 4, 6, 5, 0]
    assert slots.eq(-1).all() and staging_rows.eq(-1).all() and not num_drafts.any()
    assert page_slots.tolist() == [40, 41, 42, 43] and staged.tolist() == [1, 2, 3, 4, 6, 0]


def test_prefills_longer_than_a_thread_block(device):
    """Rows are found among many requests and in long queries."""
    queries = [700, 9, 1, 0, 9, 1, 300] + [9, 1, 5] * 40
    logits = [1, 9, 1, 0, 9, 1, 1] + [9, 1, 2] * 40
    open_both(make_batch(queries, logits, 4096, device), len(queries) + 1, 9, device)
