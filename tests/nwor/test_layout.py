# SPDX-License-Identifier: Apache-2.0
"""Where the layers lie: `CacheLayout.from_kv_caches`."""

import pytest
import torch

from nwor.layout import CacheLayout
from tests.nwor.paged import BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, WIDTH, Paged, random_packing

ROW = WIDTH * 2  # bytes of one slot and head in bf16
CHUNK = BLOCK_SIZE * NUM_HEADS * ROW
STRIDES = {
    "LBNH": (CHUNK, ROW, NUM_HEADS * ROW),
    "LBHN": (CHUNK, BLOCK_SIZE * ROW, ROW),
    "BLHN": (4 * CHUNK, BLOCK_SIZE * ROW, ROW),
}


@pytest.mark.parametrize("order", STRIDES)
def test_layout_by_stride(order):
    """What lies where is read off the strides; the drafter's layer between the targets is no part of it."""
    paged = Paged(order)
    layout = CacheLayout.from_kv_caches(paged.targets())
    apart = CHUNK if order == "BLHN" else NUM_BLOCKS * CHUNK
    assert layout.layer_offsets.tolist() == [0, 2 * apart, 3 * apart]
    assert layout.strides == STRIDES[order]
    assert layout.pool.data_ptr() == paged.pool.data_ptr()
    assert layout.pool.numel() == paged.pool.numel()
    assert (layout.num_layers, layout.num_heads, layout.block_size) == (3, NUM_HEADS, BLOCK_SIZE)
    assert (layout.row_bytes, layout.slot_bytes, layout.dtype) == (ROW, NUM_HEADS * ROW, torch.bfloat16)


def test_block_size_equal_to_heads():
    """Both layouts have one shape there, and differ in strides alone."""
    nhd, hnd = Paged("LBNH", block_size=NUM_HEADS), Paged("LBHN", block_size=NUM_HEADS)
    first, second = CacheLayout.from_kv_caches(nhd.targets()), CacheLayout.from_kv_caches(hnd.targets())
    assert first.strides == (second.strides[0], second.strides[2], second.strides[1])


@pytest.mark.parametrize(("order", "packing"), [("LBNH", None), ("LBHN", None), ("LBHN", random_packing(4, 8))])
def test_rows_are_a_mini_cache_in_the_pools_order(order, packing):
    """vLLM's own writer must be able to fill it: same heads, block size and order, blocks enough for all rows."""
    layout = CacheLayout.from_kv_caches(Paged(order).targets(), packing)
    rows = layout.new_rows(2 * BLOCK_SIZE + 1)
    assert rows.shape == (3, 3, NUM_HEADS, BLOCK_SIZE, ROW)
    assert rows.stride()[2:] == (*STRIDES[order][1:], 1)
    assert not rows.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda first, second: [first, second.clone()], "allocation"),
        (lambda first, second: [first, second[:, :1]], "layer 1"),
        (lambda first, second: [first, second.transpose(1, 2)], "layer 1"),
        (lambda first, second: [first, second.view(torch.float16)], "float16"),
        (lambda first, second: [first.mT], "layer 0"),
        (lambda first, second: [first.flatten(2)], "layer 0"),
    ],
    ids=["another allocation", "shape", "strides", "dtype", "no dense rows", "no paged view"],
)
def test_layers_that_differ_or_are_no_paged_views(change, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout.from_kv_caches(change(*Paged("LBHN").targets()[:2]))
