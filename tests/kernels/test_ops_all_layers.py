# SPDX-License-Identifier: Apache-2.0
"""The all-layer operators against plain Python, every byte of the pool and of the mini-cache.

Guards against: a layer left out, counts by layer or head, strides taken for shapes, bytes converted, padding rows.
"""

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor import ops
from nwor_lab.operators.inputs import Pool, make_window, poison
from nwor_lab.operators.reference import Twins
from tests.kernels.operators import check

pytestmark = each_device

# Memory orders, outermost first: vLLM's LBNHC ("NHD") and LBHNC ("HND"), and blocks that hold all layers.
ORDERS = ("LBNH", "LBHN", "BLHN")
# Heads, block size, bytes of a slot and head: one with block size = heads, one of no whole word.
SHAPES = [(2, 16, 16), (4, 4, 32), (3, 5, 6), (1, 8, 512)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    order=st.sampled_from(ORDERS),
    shape=st.sampled_from(SHAPES),
    element_size=st.sampled_from([0, 1, 2, 4]),
    requests=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=6),
    seed=st.integers(0, 1000),
)
def test_log_restore_commit(order, shape, element_size, requests, seed, device):
    """Drawn windows: query lengths, rejected counts, slots and padding; and slots scattered over their chunk, as vLLM's
    CPU caches hold them."""
    if order == "LBNH" or device == "cuda" or shape[2] % (element_size or 1):
        element_size = 0
    pool = Pool(order, 3, 8, *shape, device, element_size, mini_blocks=8)
    queries, rejected = [rows for rows, _ in requests], [number for _, number in requests]
    slots, *decisions = make_window(queries, rejected, 8 * pool.block_size, device, seed, width=5)
    check("log_all_layers", *pool.arguments(slots))
    for operator in ("restore_all_layers", "commit_all_layers"):
        pool.rows.copy_(poison(pool.rows.shape, torch.uint8, device, 41))
        check(operator, *pool.arguments(slots), *decisions, pool.counts)


@pytest.mark.parametrize("element_size", [0, 2])
def test_restore_undoes_what_was_written(element_size, device):
    """Log, overwrite every slot of every layer, restore all: the pool is what it was, bit for bit."""
    if element_size and device == "cuda":
        pytest.skip("a packing describes vLLM's CPU caches")
    pool = Pool("LBHN", 3, 4, 2, 8, 32, device, element_size)
    before = Twins(pool.pool)
    slots, *decisions = make_window([9], [9], 32, device)
    ops.log_all_layers(*pool.arguments(slots))
    logged = pool.rows.clone()
    pool.rows.copy_(poison(pool.rows.shape, torch.uint8, device, 41))
    num_drafts, everything, kept = decisions
    ops.commit_all_layers(*pool.arguments(slots), num_drafts, torch.zeros_like(everything), kept, pool.counts)
    assert not torch.equal(pool.pool.cpu(), next(iter(before.storages.values()))[1])
    pool.rows.copy_(logged)
    ops.restore_all_layers(*pool.arguments(slots), *decisions, pool.counts)
    before.assert_equal("restored pool")


@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (5, 2), (3, 8)])
def test_counts_are_rows(num_layers, num_heads, device):
    """Kept and rejected rows are counted once each, whatever the layers and heads; padding not at all."""
    pool = Pool("LBNH", num_layers, 4, num_heads, 16, 32, device)
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


def test_slices_of_persistent_buffers(device):
    """Slices of longer buffers are read where they lie, and nothing behind them."""
    pool = Pool("LBNH", 2, 4, 2, 8, 32, device)
    slots = torch.full((6, 3), 31, dtype=torch.int64, device=device)
    slots[1:3] = torch.tensor([[30, 2, 17], [9, 0, -1]], device=device)
    numbers = [[3, 3, 2, 3], [3, 1, 0, 3], [7, 7, 7, 7]]
    num_drafts, rejected, kept = torch.tensor(numbers, dtype=torch.int32, device=device)
    decisions = (num_drafts[1:3], rejected[1:3], kept[1:3], pool.counts)
    check("restore_all_layers", *pool.arguments(slots[1:3]), *decisions)
    one_layer = (pool.pool, pool.layer_offsets[1:], pool.cache_strides, slots[1:3], None, pool.rows[1:])
    check("commit_all_layers", *one_layer, *decisions)
    assert kept.tolist() == [7, 2, 2, 7]
