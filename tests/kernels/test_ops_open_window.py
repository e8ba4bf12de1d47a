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


def test_what_does_not_fit_falls_back(device):
    """More drafts than the window is wide, or more logits than rows: none of that request is held."""
    batch = of(device, [0, 4, 6, 8], [0, 4, 6, 10], list(range(20, 28)))
    (cow, num_drafts, counted), (slots, _, staging_rows, page_slots, staged) = open_both(batch, 3, 2, device)
    assert cow.tolist() == [[-1, -1], [25, -1], [-1, -1]]
    assert num_drafts.tolist() == [0, 1, 0]
    assert counted.tolist() == [1, 2, 4, 5, 7, 0]  # 3 drafts of the first and of the last request
    assert slots.tolist() == cow.tolist()
    assert staging_rows.tolist() == [-1, -1, -1, -1, -1, 2, -1, -1]
    assert page_slots.tolist() == [20, 21, 22, 23, 24, -1, 26, 27]
    assert staged.tolist() == counted.tolist()


def test_a_window_without_columns_holds_nothing(device):
    """How a whole batch falls back: every verify step is counted, and every row goes to its page."""
    batch = of(device, [0, 3, 7, 8], [0, 3, 4, 7], list(range(30, 38)))
    (_, num_drafts, counted), (slots, _, staging_rows, page_slots, staged) = open_both(batch, 3, 0, device, tokens=9)
    assert counted.tolist() == [1, 2, 3, 4, 7, 0]
    assert slots.numel() == 0 and not num_drafts.any() and staging_rows.eq(-1).all()
    assert page_slots.tolist() == [*range(30, 38), -1]
    assert staged.tolist() == counted.tolist()


def test_drafts_behind_prefill_rows(device):
    """Whose rows are recomputed behind a failed load: `cow` holds the drafts, `stage` counts a fallback."""
    batch = of(device, [0, 4], [0, 3], [40, 41, 42, 43])
    (cow, _, counted), (slots, num_drafts, staging_rows, page_slots, staged) = open_both(batch, 1, 2, device)
    assert cow.tolist() == [[42, 43]] and counted.tolist() == [1, 2, 4, 6, 5, 0]
    assert slots.eq(-1).all() and staging_rows.eq(-1).all() and not num_drafts.any()
    assert page_slots.tolist() == [40, 41, 42, 43] and staged.tolist() == [1, 2, 3, 4, 6, 0]


def test_a_window_as_wide_as_the_drafts(device):
    """Exactly full is full, not over."""
    batch = make_batch([5, 5], [5, 5], 16, device)
    (_, _, counted), (_, _, staging_rows, _, staged) = open_both(batch, 2, 4, device)
    assert counted.tolist() == [1, 2, 5, 12, 5, 0] == staged.tolist()
    assert staging_rows.tolist()[:10] == [-1, 0, 1, 2, 3, -1, 4, 5, 6, 7]


def test_no_requests(device):
    """An empty batch clears what the last one left."""
    batch = of(device, [0], [0], [5, 6])
    (cow, num_drafts, _), (slots, _, staging_rows, page_slots, counts) = open_both(batch, 2, 3, device)
    assert {int(number) for tensor in (cow, slots, staging_rows, page_slots) for number in tensor.flatten()} == {-1}
    assert counts.tolist() == [1, 2, 3, 4, 5, 0] and not num_drafts.any()


def test_prefills_longer_than_a_thread_block(device):
    """Rows are found among many requests and in long queries."""
    queries = [700, 9, 1, 0, 9, 1, 300] + [9, 1, 5] * 40
    logits = [1, 9, 1, 0, 9, 1, 1] + [9, 1, 2] * 40
    open_both(make_batch(queries, logits, 4096, device), len(queries) + 1, 9, device)


@settings(max_examples=60, deadline=None, derandomize=True)
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
