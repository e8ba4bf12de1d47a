# SPDX-License-Identifier: Apache-2.0
"""Where the layers lie: `CacheLayout.from_kv_caches`."""

import pytest
import torch

from nwor.layout import CacheLayout
from nwor.vllm.context import cache_of
from tests.nwor.paged import BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, WIDTH, Paged, random_packing
from tests.nwor.runners import gpu_layer

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
        (lambda layers: layers[1].clone(), "allocation"),
        (lambda layers: layers[1][:, :1], "layer 1"),
        (lambda layers: layers[1].transpose(1, 2), "layer 1"),
        (lambda layers: layers[1].view(torch.float16), "float16"),
    ],
    ids=["another allocation", "shape", "strides", "dtype"],
)
def test_layers_that_differ(change, message):
    layers = Paged("LBHN").targets()
    layers[1] = change(layers)
    with pytest.raises(ValueError, match=message):
        CacheLayout.from_kv_caches(layers)


@pytest.mark.parametrize("change", [lambda layer: layer.mT, lambda layer: layer.flatten(2)], ids=["rows", "dimensions"])
def test_layers_that_are_no_paged_views(change):
    with pytest.raises(ValueError, match="layer 0"):
        CacheLayout.from_kv_caches([change(layer) for layer in Paged("LBHN").targets()])


@pytest.mark.parametrize(
    ("width", "dtype", "row_bytes"),
    [(576, torch.bfloat16, 1152), (576, torch.uint8, 576), (656, torch.uint8, 656)],
    ids=["bf16", "fp8", "fp8_ds_mla"],
)
def test_a_latent_cache_has_one_head(width, dtype, row_bytes):
    """vLLM keeps [blocks, 64, width] of one allocation; fp8_ds_mla's rows are 656 raw bytes."""
    from vllm.model_executor.layers.attention import MLAAttention

    pool = torch.zeros(2, 5, 64, width, dtype=dtype)
    layers = [gpu_layer("FlashMLAImpl", MLAAttention, use_sparse=False) for _ in range(2)]
    for layer, cache in zip(layers, pool, strict=True):
        layer.kv_cache = cache
    layout = CacheLayout.from_kv_caches([cache_of(layer) for layer in layers])
    assert (layout.num_layers, layout.num_heads, layout.block_size) == (2, 1, 64)
    assert layout.slot_bytes == layout.row_bytes == row_bytes and layout.strides[2] == row_bytes
    assert layout.layer_offsets.tolist() == [0, 5 * 64 * row_bytes]
    assert layout.new_rows(70).shape == (2, 2, 1, 64, row_bytes)
