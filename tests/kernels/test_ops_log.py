# SPDX-License-Identifier: Apache-2.0
"""A log of all layers that outlives its step: what it holds is not read again,
and what is wrong with it is said."""

import pytest
import torch
from devices import each_device

from nwor_lab.operators.inputs import Pool, poison
from tests.kernels.operators import Wrong, at, cases, check, check_wrong

pytestmark = each_device


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


def log_arguments(device: str, operator: str) -> tuple:
    """2 layers of 4 blocks of 4 slots; windows of 3 rows and of 1, four rows of the log each, one there already."""
    pool = Pool("LBHN", 2, 4, 2, 4, 16, device)
    slots = torch.tensor([[2, 3, 8], [0, -1, -1]], device=device)
    decisions = torch.tensor([[3, 1], [1, 0], [9, 9]], dtype=torch.int32, device=device)
    logged = torch.tensor([[8, -1, -1, 9], [-1, -1, -1, -1]], device=device)
    return *pool.arguments(slots), *((*decisions, pool.counts) if operator == RESTORE else ()), logged


LOG, RESTORE = "log_all_layers", "restore_all_layers"
BOTH = f"{LOG} {RESTORE}"
WRONG_LOG: list[Wrong] = [
    (BOTH, "logged", [lambda t: t.int(), lambda t: t.flatten(), lambda t: t.repeat(1, 2)[:, :4], lambda t: t[:1]], ""),
    (BOTH, "logged", [lambda t: t[:, :3].contiguous()], "power of two"),
    (BOTH, "logged", [lambda t: t[:, :2].contiguous()], "at least"),
    (BOTH, "logged", [lambda t: t.repeat(1, 2)], "block size"),
    (BOTH, "rows", [lambda t: t[:, :1]], "larger"),
]


@cases(WRONG_LOG)
def test_wrong_logs(wrong, device):
    check_wrong(wrong[0], log_arguments(device, wrong[0]), *wrong[1:])


def test_slots_that_share_a_row_of_the_log(device):
    if device == "cuda":
        pytest.skip("only the device knows the slots")
    check_wrong(LOG, log_arguments("cpu", LOG), "slots", at((0, 2), 7), "3 and 7")


@pytest.mark.parametrize("operator", [LOG, RESTORE])
def test_the_unchanged_log_is_taken(operator, device):
    """Else the cases above could fail for another reason than theirs."""
    check(operator, *log_arguments(device, operator))
