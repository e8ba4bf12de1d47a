# SPDX-License-Identifier: Apache-2.0
"""The window that a mode runs at start-up, without an engine; with one: tests/nwor/test_vllm_modes.py."""

from types import SimpleNamespace

import pytest
import torch

from nwor import ops
from nwor.attention.configs import H200
from nwor.layout import CacheLayout
from nwor.manager import DraftCommitManager
from nwor.vllm import self_check
from tests.nwor.paged import Paged


@pytest.fixture(params=["LBHN", "LBNH", "BLHN", "BLNH", "packed"])
def paged(request) -> Paged:
    return Paged(packed=True) if request.param == "packed" else Paged(order=request.param)


def check(paged: Paged, max_drafts: int = 3, max_requests: int = 4) -> str:
    layout = CacheLayout.from_kv_caches(paged.targets(), paged.packing)
    manager = DraftCommitManager(layout, "cow", max_requests, max_drafts, 64)
    before = paged.pool.clone()
    found = self_check.failure(manager, [SimpleNamespace(kv_cache=cache) for cache in paged.targets()])
    assert torch.equal(paged.pool, before), "no page of the model's is touched"
    assert not manager.is_open and manager.counters.read().windows == 0
    return found


@pytest.mark.parametrize("max_drafts", [1, 3, 8])
@pytest.mark.parametrize("max_requests", [1, 4])
def test_what_works_is_served(paged, max_drafts, max_requests):
    assert check(paged, max_drafts, max_requests) == ""


@pytest.mark.parametrize("operator", ["log_all_layers", "restore_all_layers"])
def test_what_does_not_is_said(paged, operator, monkeypatch):
    monkeypatch.setattr(ops, operator, lambda *arguments: None)
    assert check(paged).startswith("the check at start-up failed, the pages that cow left are not those with the rows")

    def fail(*arguments):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(ops, operator, fail)
    assert check(paged) == "the check at start-up failed: RuntimeError: no kernel image is available"


@pytest.mark.parametrize("operator", ["log_all_layers", "restore_all_layers"])
def test_one_layer_left_out_is_said(paged, operator, monkeypatch):
    """One layer's cache only."""
    move = getattr(ops, operator)
    monkeypatch.setattr(ops, operator, lambda pool, offsets, *rest: move(pool, offsets[:1].expand(2), *rest))
    assert check(paged)


def test_no_room_is_no_fault_of_the_operators(paged, monkeypatch):
    """It is an error that says what would make room, where the manager is built."""

    def fail(*arguments):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(ops, "log_all_layers", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        check(paged)


def gpu_manager(max_requests: int, max_drafts: int, kv_heads: int, block_size: int = 16) -> SimpleNamespace:
    """A manager of mode `stage` on an H200, as far as the choice of batches looks at it."""
    workspace = SimpleNamespace(device=H200, partials=range(1 << 16))
    layout = SimpleNamespace(block_size=block_size, num_heads=kv_heads)
    slots = torch.zeros(max_requests, max_drafts)
    return SimpleNamespace(mode="stage", slots=slots, layout=layout, attention=workspace, max_query_len=max_drafts + 1)


LAYER = SimpleNamespace(
    impl=SimpleNamespace(num_heads=32, head_size=128), kv_cache=torch.zeros(0, dtype=torch.bfloat16), query_quant=None
)


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("max_drafts", [1, 3, 4, 8])
@pytest.mark.parametrize("max_requests", [1, 7, 256])
def test_every_kernel_that_a_batch_can_need_is_compiled_at_start_up(max_requests, max_drafts, kv_heads):
    """Batches of every size up to the largest; a power of two is not enough, and few kernels are."""
    manager = gpu_manager(max_requests, max_drafts, kv_heads)
    run, compiled = self_check._batches(manager, [LAYER])
    needed = {self_check._compiled(manager, LAYER, requests) for requests in range(1, max_requests + 1)}
    assert {self_check._compiled(manager, LAYER, requests) for requests in run + compiled} == needed
    assert len(run + compiled) == len(needed) <= 16
    assert max([*run, *compiled]) <= max_requests


@pytest.mark.parametrize(("block_size", "most"), [(16, 64), (544, 7)])
def test_scratch_of_large_blocks_is_bounded(block_size, most):
    """Beside recurrent layers a block is as large as a state: 64 requests would take gigabytes of a full GPU."""
    run, compiled = self_check._batches(gpu_manager(256, 8, 8, block_size), [LAYER])
    assert max(run) <= most < min(compiled, default=256)
