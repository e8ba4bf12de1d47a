# SPDX-License-Identifier: Apache-2.0
"""`open_window` against plain Python, every element of what it writes.

Guards against: prefills taken for verify steps, logits taken for rows, more drafts than a window holds, padding.
"""

import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor_lab.operators.inputs import make_batch, make_targets
from tests.kernels.operators import check

pytestmark = each_device


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8), st.booleans()), max_size=12),
    width=st.integers(0, 6),
    spare=st.tuples(st.integers(0, 2), st.integers(0, 4)),
    seed=st.integers(0, 1000),
)
def test_any_batch(requests, width, spare, seed, device):
    """Drawn batches: queries and logits that agree or do not, windows of any width, padding."""
    queries = [rows for rows, _, _ in requests]
    num_logits = [rows if verify else logits for rows, logits, verify in requests]
    batch = make_batch(queries, num_logits, 128, device, seed)
    open_both(batch, len(queries) + spare[0], width, device, tokens=batch[2].numel() + spare[1])
