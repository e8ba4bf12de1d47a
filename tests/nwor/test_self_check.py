# SPDX-License-Identifier: Apache-2.0
"""The window that a mode runs at start-up, without an engine; with one: tests/nwor/test_vllm_modes.py."""

from types import SimpleNamespace

import pytest
import torch

from nwor import ops
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


@pytest.mark.parametrize(("block_size", "batches"), [(16, [1, 2, 4, 8, 16, 32, 64]), (544, [1, 2, 4, 7])])
def test_scratch_of_large_blocks_is_bounded(block_size, batches, monkeypatch):
    """Beside recurrent layers a block is as large as a state: 64 requests would take gigabytes of a full GPU."""
    asked: list[int] = []

    class Slots:
        is_cuda = True

        def __len__(self) -> int:
            return 256

    def window(manager, layers, requests):
        asked.append(requests)
        return SimpleNamespace(wrong=lambda: "")

    monkeypatch.setattr(self_check, "_Window", window)
    manager = SimpleNamespace(mode="stage", slots=Slots(), layout=SimpleNamespace(block_size=block_size))
    assert self_check.failure(manager, []) == "" and asked == batches
