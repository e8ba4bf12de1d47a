# SPDX-License-Identifier: Apache-2.0
"""Which rows a window holds, and where the layers lie: `Window.of` and `CacheLayout.of` (R3, R13, R16, #4, #7, #8)."""

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, WIDTH, Paged, random_packing

from nwor.manager import CacheLayout, Window

CPU = torch.device("cpu")


def window(queries: list[int], drafts: list[int], sampled_rows: bool, device: torch.device = CPU) -> Window:
    starts = [sum(queries[:request]) for request in range(len(queries) + 1)]
    return Window.of(starts, drafts, device, sampled_rows=sampled_rows)


@each_device
def test_rows_of_a_mixed_batch(device):
    """#4, #8: prefill rows are never drafts, and positions count from the batch's start, whatever lies before them."""
    # A prefill chunk of 5 rows (0-4), 3 drafts (5-8), a plain decode (9), 1 draft (10-11).
    found = window([5, 4, 1, 2], [0, 3, 0, 1], True, torch.device(device))
    assert found.rows.tolist() == [5, 6, 7, 8, 10, 11]
    assert found.request.tolist() == [1, 1, 1, 1, 3, 3]
    assert found.rows_behind.tolist() == [3, 2, 1, 0, 1, 0]
    assert found.start.tolist() == [-1, 0, -1, 4]
    assert (len(found), found.num_drafts, found.whole_batch) == (6, (0, 3, 0, 1), False)
    dtypes = [tensor.dtype for tensor in (found.rows, found.request, found.rows_behind, found.start)]
    assert dtypes == [torch.int64, torch.int32, torch.int32, torch.int32]
    assert {tensor.device.type for tensor in (found.rows, found.request, found.rows_behind, found.start)} == {device}


def test_without_sampled_rows_the_drafts_alone_are_held():
    found = window([5, 4, 1, 2], [0, 3, 0, 1], False)
    assert found.rows.tolist() == [6, 7, 8, 11]
    assert found.rows_behind.tolist() == [2, 1, 0, 0]
    assert found.start.tolist() == [-1, 0, -1, 3]


def test_prefill_ahead_of_drafts_in_one_query():
    """The last chunk of a prompt may carry drafts (a resumed request): only the last d rows are drafts."""
    assert window([7], [2], True).rows.tolist() == [4, 5, 6]
    assert window([7], [2], False).rows.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("queries", "drafts", "sampled_rows", "whole"),
    [
        ([4, 3], [3, 2], True, True),
        ([4, 3], [3, 2], False, False),
        ([4, 1], [3, 0], True, False),
        ([5, 3], [3, 2], True, False),
        ([4], [3], True, True),
    ],
)
def test_whole_batch(queries, drafts, sampled_rows, whole):
    assert window(queries, drafts, sampled_rows).whole_batch is whole


@pytest.mark.parametrize(("queries", "drafts"), [([3], [3]), ([4, 1], [2, 1]), ([2, 2], [0, 5])])
def test_more_drafts_than_rows(queries, drafts):
    """A query holds its last sampled token and its drafts: fewer rows mean the batch was misread."""
    request = len(queries) - 1
    with pytest.raises(ValueError, match=f"request {request} has {drafts[-1]} drafts in {queries[-1]} rows"):
        window(queries, drafts, True)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=6),
    sampled_rows=st.booleans(),
)
def test_any_batch_against_the_rule_itself(requests, sampled_rows):
    """Row by row: of each query ``[0, query_len - num_rejected)`` stays, and all others that stay are not held."""
    drafts = [min(number, rows - 1) for number, rows, _ in requests]
    rejected = [min(gone, number) for (_, _, gone), number in zip(requests, drafts, strict=True)]
    queries = [rows for _, rows, _ in requests]
    found = window(queries, drafts, sampled_rows)

    expected, gone_rows, position = [], [], 0
    for request, rows in enumerate(queries):
        for row in range(rows):
            from_the_end = rows - row
            is_draft = from_the_end <= drafts[request]
            is_sampled = drafts[request] > 0 and from_the_end == drafts[request] + 1
            if is_draft or (sampled_rows and is_sampled):
                expected.append((position, request))
            if row >= rows - rejected[request]:
                gone_rows.append(position)
            position += 1

    assert list(zip(found.rows.tolist(), found.request.tolist(), strict=True)) == expected
    judged = zip(found.rows.tolist(), found.request.tolist(), found.rows_behind.tolist(), strict=True)
    assert [row for row, request, behind in judged if behind < rejected[request]] == gone_rows
    held = [request for _, request in expected]
    assert found.start.tolist() == [held.index(r) if r in held else -1 for r in range(len(queries))]
    assert found.whole_batch == (len(expected) == position)


# -- the layout --------------------------------------------------------------------------------------------------------

ROW = WIDTH * 2  # bytes of one slot and head in bf16
CHUNK = BLOCK_SIZE * NUM_HEADS * ROW
STRIDES = {
    "LBNH": (CHUNK, ROW, NUM_HEADS * ROW),
    "LBHN": (CHUNK, BLOCK_SIZE * ROW, ROW),
    "BLHN": (4 * CHUNK, BLOCK_SIZE * ROW, ROW),
}


@pytest.mark.parametrize("order", STRIDES)
def test_layout_by_stride(order):
    """R13, #7: what lies where is read off the strides; the drafter's layer between the targets is no part of it."""
    paged = Paged(order)
    layout = CacheLayout.of(paged.targets())
    apart = CHUNK if order == "BLHN" else NUM_BLOCKS * CHUNK
    assert layout.layer_offsets.tolist() == [0, 2 * apart, 3 * apart]
    assert layout.strides == STRIDES[order]
    assert layout.pool.data_ptr() == paged.pool.data_ptr()
    assert layout.pool.numel() == paged.pool.numel()
    assert (layout.num_layers, layout.num_heads, layout.block_size) == (3, NUM_HEADS, BLOCK_SIZE)
    assert (layout.row_bytes, layout.slot_bytes, layout.dtype) == (ROW, NUM_HEADS * ROW, torch.bfloat16)


def test_block_size_equal_to_heads():
    """#7: both layouts have one shape there, and differ in strides alone."""
    nhd, hnd = Paged("LBNH", block_size=NUM_HEADS), Paged("LBHN", block_size=NUM_HEADS)
    first, second = CacheLayout.of(nhd.targets()), CacheLayout.of(hnd.targets())
    assert first.strides == (second.strides[0], second.strides[2], second.strides[1])


@pytest.mark.parametrize(("order", "packing"), [("LBNH", None), ("LBHN", None), ("LBHN", random_packing(4, 8))])
def test_rows_are_a_mini_cache_in_the_pools_order(order, packing):
    """vLLM's own writer must be able to fill it: same heads, block size and order, blocks enough for all rows."""
    layout = CacheLayout.of(Paged(order).targets(), packing)
    rows = layout.new_rows(2 * BLOCK_SIZE + 1)
    assert rows.shape == (3, 3, NUM_HEADS, BLOCK_SIZE, ROW)
    assert rows.stride()[2:] == (*STRIDES[order][1:], 1)
    assert not rows.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers[1].clone(), "layer 1 lies in another allocation"),
        (lambda layers: layers[1][:, :1], "layer 1 is .* layer 0 is"),
        (lambda layers: layers[1].transpose(1, 2), "layer 1 is .* layer 0 is"),
        (lambda layers: layers[1].view(torch.float16), "layer 1 is .*float16"),
    ],
    ids=["another allocation", "shape", "strides", "dtype"],
)
def test_layers_that_differ(change, message):
    layers = Paged("LBHN").targets()
    layers[1] = change(layers)
    with pytest.raises(ValueError, match=message):
        CacheLayout.of(layers)


@pytest.mark.parametrize("change", [lambda layer: layer.mT, lambda layer: layer.flatten(2)], ids=["rows", "dimensions"])
def test_layers_that_are_no_paged_views(change):
    with pytest.raises(ValueError, match="layer 0 is no .blocks, heads, block_size, 2 . head_size. view"):
        CacheLayout.of([change(layer) for layer in Paged("LBHN").targets()])
