# SPDX-License-Identifier: Apache-2.0
"""The per-layer operators against plain Python, every byte.

Guards against: counts by launch, layouts taken for others, overflow, fewer elements than threads, scales applied twice
or not at all, and errors that are caught and passed over.
"""

import pytest
import torch
from devices import each_device
from hypothesis import given, settings
from hypothesis import strategies as st

from nwor_lab.operators.check import draw
from nwor_lab.operators.inputs import make_cache, make_slots, make_staging, make_vectors
from tests.kernels.operators import check

pytestmark = each_device


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_drawn_calls(seed, device):
    """Every operator with drawn dtypes, layouts, shapes, strides, scales, slots, accepted rows and batches."""
    for case in draw(device, 1, seed):
        check(case.operator, *case.args)


def test_staging_appends_in_token_order(device):
    """Calls append, counts are tokens, slots stand beside their rows."""
    key, value = make_vectors("packed", 6, 2, 8, torch.bfloat16, device)
    staging = make_staging(7, 2, 8, torch.bfloat16, device)
    for slots in ([9, -1, 3], [-1, -1, -1], [4, 30, 5], [-1, 2, -1]):
        slot_mapping = torch.tensor(slots, device=device)
        check("stage_kv_cache", key, value, slot_mapping, *staging, "auto", None, None)
    assert staging[3].tolist() == [6, 0]
    assert staging[2][:6].tolist() == [9, 3, 4, 30, 5, 2]


@pytest.mark.parametrize("tokens", [1, 33, 255, 600])
def test_one_count_a_token(tokens, device):
    """8 tokens once counted 4,096; the count is tokens with a slot, whatever the launch."""
    key, value = make_vectors("packed", tokens, 2, 8, torch.float32, device)
    slots = make_slots(tokens, 4096, device)
    staging = make_staging(tokens, 2, 8, torch.float32, device)
    check("stage_kv_cache", key, value, slots, *staging, "auto", None, None)
    assert staging[3].tolist() == [int((slots >= 0).sum()), 0]


def test_overflow_stages_nothing_and_commits_nothing(device):
    """One row too many sets the flag; neither that call's rows nor later ones are staged, nothing commits."""
    key, value = make_vectors("packed", 4, 2, 8, torch.bfloat16, device)
    staging = make_staging(5, 2, 8, torch.bfloat16, device)
    caches = make_cache("NHD", 4, 4, 2, 8, torch.bfloat16, device)
    first, second = (torch.tensor(slots, device=device) for slots in ([1, 2, 3, -1], [4, 5, 6]))
    check("stage_kv_cache", key, value, first, *staging, "auto", None, None)
    assert staging[3].tolist() == [3, 0]
    check("stage_kv_cache", key, value, second, *staging, "auto", None, None)
    assert staging[3].tolist() == [3, 1]
    check("stage_kv_cache", key, value, second[:1], *staging, "auto", None, None)
    assert staging[3].tolist() == [3, 1]
    check("commit_staged_kv_cache", *staging, *caches, torch.tensor([3], dtype=torch.int32, device=device))
    staging[3].zero_()
    check("stage_kv_cache", key, value, second, *staging, "auto", None, None)
    assert staging[3].tolist() == [3, 0]


@pytest.mark.parametrize("capacity", [512, 0])
def test_staging_of_exactly_its_capacity(capacity, device):
    """A fixed buffer of 512 rows was overrun once; exactly full is full, not over."""
    key, value = make_vectors("packed", capacity + 1, 2, 8, torch.float16, device)
    staging = make_staging(capacity, 2, 8, torch.float16, device)
    check("stage_kv_cache", key, value, torch.arange(capacity, device=device), *staging, "auto", None, None)
    assert staging[3].tolist() == [capacity, 0]
    check("stage_kv_cache", key, value, torch.tensor([0], device=device), *staging, "auto", None, None)
    assert staging[3].tolist() == [capacity, 1]


def test_slices_of_a_persistent_slot_buffer(device):
    """A slice of a longer slot buffer is read where it lies, at its own offset."""
    buffer = torch.full((16,), -1, dtype=torch.int64, device=device)
    buffer[5:9] = torch.tensor([8, 1, 30, 2], device=device)
    key, value = make_vectors("qkv", 4, 2, 8, torch.bfloat16, device)
    caches = make_cache("vllm HND", 4, 8, 2, 8, torch.bfloat16, device)
    mask = torch.ones(16, dtype=torch.bool, device=device)
    check("commit_draft_layer", key, value, *caches, buffer[5:9], mask[5:9], "auto", None, None)
    check("log_cache_slots", *caches, buffer[5:9], *make_staging(4, 2, 8, torch.bfloat16, device)[:2])


def test_no_rows_is_no_work(device):
    """An empty slot mapping, and one of padding alone, change nothing."""
    key, value = make_vectors("packed", 2, 2, 8, torch.float32, device)
    caches = make_cache("NHD", 4, 4, 2, 8, torch.float32, device)
    log = make_staging(2, 2, 8, torch.float32, device)[:2]
    for slots in (torch.empty(0, dtype=torch.int64, device=device), torch.tensor([-1, -5], device=device)):
        mask = torch.ones(len(slots), dtype=torch.bool, device=device)
        check("commit_draft_layer", key, value, *caches, slots, mask, "auto", None, None)
        check("log_cache_slots", *caches, slots, *log)
        check("restore_rejected_drafts", *log, slots, ~mask, *caches)
        check("stage_kv_cache", key, value, slots, *make_staging(1, 2, 8, torch.float32, device), "auto", None, None)
