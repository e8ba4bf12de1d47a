# SPDX-License-Identifier: Apache-2.0
"""Each wrong input of an operator is refused with an error that names it; no byte has changed."""

from itertools import product
from typing import Any

import pytest
import torch
from devices import each_device

from nwor import ops
from nwor_lab.operators.inputs import Pool, calls
from tests.kernels.operators import Change, check, check_changes, check_refused, check_wrong

STAGE, COMMIT, DRAFT = "stage_kv_cache", "commit_staged_kv_cache", "commit_draft_layer"
LOG, RESTORE, OPEN = "log_cache_slots", "restore_rejected_drafts", "open_window"
LOG_ALL, RESTORE_ALL = "log_all_layers", "restore_all_layers"
OPERATORS = [name for name in ops.OPERATORS if name != "verify_attention"]


@each_device
@pytest.mark.parametrize(
    ("operator", "scale"), [*product(OPERATORS, ("none", "head")), *product((STAGE, DRAFT), ("token",))]
)
def test_other_shapes_dtypes_and_strides(operator, scale, device):
    """Of each tensor in its turn; with scales the cache is fp8, and packed on a CPU."""
    cache, element_size = ("auto", 0) if scale == "none" else ("fp8", 2 if device == "cpu" else 0)

    def arguments(device: str) -> tuple[Any, ...]:
        return calls(device, 1, cache=cache, scale=scale, tokens=4, heads=3, element_size=element_size)[operator]

    check_changes(operator, arguments, device)


def log_arguments(operator: str, device: str) -> tuple[Any, ...]:
    """2 layers of 4 blocks of 4 slots; windows of 3 rows and of 1, four rows of the log each, one there already."""
    pool = Pool("LBHN", 2, 4, 2, 4, 16, device)
    slots = torch.tensor([[2, 3, 8], [0, -1, -1]], device=device)
    decisions = torch.tensor([[3, 1], [1, 0], [9, 9]], dtype=torch.int32, device=device)
    logged = torch.tensor([[8, -1, -1, 9], [-1, -1, -1, -1]], device=device)
    return *pool.arguments(slots), *((*decisions, pool.counts) if operator == RESTORE_ALL else ()), logged


@each_device
@pytest.mark.parametrize("operator", [LOG_ALL, RESTORE_ALL])
def test_logs_that_outlive_their_step(operator, device):
    check(operator, *log_arguments(operator, device))
    check_changes(operator, lambda device: log_arguments(operator, device), device)
    for width, word in ((2, "at least"), (3, "power of two")):
        change = lambda t, width=width: t[:, :width].contiguous()
        check_wrong(operator, log_arguments(operator, device), "logged", change, word)


@each_device
@pytest.mark.parametrize(
    ("operator", "name", "change", "word"),
    [
        (STAGE, "kv_cache_dtype", str.upper, "kv_cache_dtype"),
        (STAGE, "kv_cache_dtype", lambda _: "fp8", "uint8"),
        (DRAFT, "kv_cache_dtype", lambda _: "fp8_e5m2", "uint8"),
        ("log_all_layers", "cache_strides", lambda s: s[:2], "cache_strides"),
        ("commit_all_layers", "cache_strides", lambda s: (s[0], 0, s[2]), "cache_strides"),
        (OPEN, "page_slots", lambda _: None, "both"),
        (OPEN, "staging_rows", lambda _: None, "both"),
    ],
)
def test_other_words_strides_and_half_of_the_staging(operator, name, change, word, device):
    check_wrong(operator, calls(device, cache="auto")[operator], name, change, word)


def at(place: Any, value: int) -> Change:
    """The change that puts `value` at one place of a tensor."""

    def change(tensor: Any) -> Any:
        changed = tensor.clone()
        changed[place] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("operator", "name", "change", "word"),
    [
        *((operator, "slot_mapping", at(2, 32), "[2] is 32") for operator in (DRAFT, LOG, RESTORE)),
        (COMMIT, "staging_slots", at(0, 32), "[0] is 32"),
        (COMMIT, "accepted_len", at(0, 9), "accepted_len"),
        (COMMIT, "accepted_len", at(0, -1), "accepted_len"),
        (COMMIT, "staging_metadata", at(0, 99), "99"),
        (STAGE, "staging_metadata", at(0, 99), "99"),
        *((operator, "slots", at((1, 2), 32), "[1, 2] is 32") for operator in OPERATORS[-3:]),
        *((operator, "layer_offsets", at(1, 10**6), "room") for operator in OPERATORS[-3:]),
        *((operator, "layer_offsets", at(0, -1), "[0] is -1") for operator in OPERATORS[-3:]),
        *((operator, "packing", at((2, 1), 99), "[2, 1] is 99") for operator in OPERATORS[-3:]),
        (OPEN, "query_start_loc", at(2, 1), "[2] is 1"),
        (OPEN, "query_start_loc", at(0, -1), "[0] is -1"),
        (OPEN, "query_start_loc", at(4, 99), "[4] is 99"),
        (OPEN, "cu_num_logits", at(2, 1), "[2] is 1"),
    ],
)
def test_wrong_values(operator, name, change, word):
    """What only the contents of a tensor show: refused on the CPU, skipped on CUDA (test_ops_cuda.py)."""
    check_wrong(operator, calls("cpu", 1, element_size=2)[operator], name, change, word)


def test_slots_that_share_a_row_of_the_log():
    check_wrong(LOG_ALL, log_arguments(LOG_ALL, "cpu"), "slots", at((0, 2), 7), "3 and 7")


@each_device
def test_page_slots_in_place(device):
    *batch, slots, num_drafts, rows, _, counts = calls(device)[OPEN]
    given = (*batch, slots, num_drafts, rows[: len(batch[2])], batch[2], counts)
    check_refused(OPEN, given, "share")


def test_the_last_layer_ends_with_the_pool():
    """The last slot of the last layer is the pool's last bytes; one byte less is too small a pool."""
    args = calls("cpu")["log_all_layers"]
    args[3][0, 1] = 31
    ops.log_all_layers(*args)
    check_refused("log_all_layers", (args[0][:-1], *args[1:]), "slot 27")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_of_two_devices(operator):
    """Every tensor argument in its turn on another device than the rest is refused."""
    drawn = calls("cuda", cache="fp8")[operator]
    for name, arg in zip(ops.OPERATORS[operator], drawn, strict=False):
        if isinstance(arg, torch.Tensor):
            check_wrong(operator, drawn, name, lambda t: t.cpu(), "device")


@pytest.mark.gpu
def test_packing_is_for_the_cpu():
    *where, _, rows = calls("cuda")["log_all_layers"]
    packing = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    check_refused("log_all_layers", (*where, packing, rows), "GPU")
