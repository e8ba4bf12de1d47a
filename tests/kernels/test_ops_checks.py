# SPDX-License-Identifier: Apache-2.0
"""Each wrong input of an operator is refused with an error that names it; no byte has changed."""

from typing import Any

import pytest
import torch
from devices import each_device

from nwor import ops
from nwor_lab.operators.inputs import calls
from tests.kernels.operators import Wrong, at, cases, check, check_refused, check_wrong

OPERATORS = [name for name in ops.OPERATORS if name != "verify_attention"]


def arguments(device: str, cache: str = "auto", element_size: int = 0) -> dict[str, tuple[Any, ...]]:
    """Of every operator: 3 tokens, 3 of them staged, 2 heads of 8 in bf16, 4 blocks of 4 slots, 2 layers, a window of
    3 requests and a batch of 4."""
    shape = {"tokens": 3, "heads": 2, "head_size": 8, "block_size": 4, "scale": "none"}
    drawn = calls(device, cache=cache, element_size=element_size, **shape)
    for operator in ("stage_kv_cache", "commit_draft_layer"):
        named(drawn, operator, "slot_mapping").copy_(torch.tensor([1, 9, 3]))
    for name, value in (("staging_slots", [1, 9, 3]), ("staging_metadata", [3, 0]), ("accepted_len", [2])):
        named(drawn, "commit_staged_kv_cache", name).copy_(torch.tensor(value))
    return drawn


def named(drawn: dict[str, tuple[Any, ...]], operator: str, name: str) -> Any:
    return drawn[operator][ops.OPERATORS[operator].index(name)]


def last_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous in the last dimension."""
    return tensor.mT.contiguous().mT


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2)[::2]


def less(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


LONG, INT, HALF, FLOAT = torch.Tensor.long, torch.Tensor.int, torch.Tensor.half, torch.Tensor.float

# -- one layer ---------------------------------------------------------------------------------------------------------

STAGE, COMMIT, DRAFT = "stage_kv_cache", "commit_staged_kv_cache", "commit_draft_layer"
LOG, RESTORE = "log_cache_slots", "restore_rejected_drafts"
WRITE, MOVE, STAGED = f"{STAGE} {DRAFT}", f"{COMMIT} {LOG} {RESTORE}", f"{STAGE} {COMMIT}"
CACHES, EACH_SLOT, MASKED = "key_cache value_cache", f"{STAGE} {DRAFT} {LOG} {RESTORE}", f"{DRAFT} {RESTORE}"
ONE_LAYER: list[Wrong] = [
    (STAGE, "kv_cache_dtype", [str.upper, lambda _: "int8"], ""),
    (STAGE, "kv_cache_dtype", [lambda _: "fp8"], "uint8"),
    (DRAFT, "kv_cache_dtype", [lambda _: "fp8_e5m2"], "uint8"),
    (WRITE, "key", [torch.Tensor.double, lambda t: t.flatten(1)], ""),
    (WRITE, "value", [HALF, less], ""),
    (DRAFT, "key value", [less], ""),
    (DRAFT, "key", [last_strided], "contiguous"),
    (DRAFT, "key_cache", [HALF], "value_cache"),
    (DRAFT, "key_cache", [lambda t: t[0]], ""),
    (DRAFT, "value_cache", [less], ""),
    (DRAFT, CACHES, [HALF], ""),
    (DRAFT, CACHES, [lambda t: t[:, :, :1]], "heads"),
    (DRAFT, CACHES, [lambda t: t[..., :4]], "size"),
    (MOVE, CACHES, [HALF], "BFloat16"),
    (f"{DRAFT} {MOVE}", "key_cache", [last_strided], "contiguous"),
    (MASKED, "key_cache", [lambda t: t[:1].expand(4, -1, -1, -1)], "expanded"),
    (LOG, "log_key", [lambda t: t[:1].expand(3, -1, -1)], "expanded"),
    (LOG, "log_key log_value", [less], "each of"),
    (f"{LOG} {RESTORE}", "log_value", [less], ""),
    (f"{WRITE} {LOG}", "slot_mapping", [INT], "Long"),
    (WRITE, "slot_mapping", [lambda t: t[:, None]], ""),
    (EACH_SLOT, "slot_mapping", [with_gaps], ""),
    (MASKED, "accepted_mask", [less], "each of"),
    (MASKED, "accepted_mask", [INT], "Bool"),
    (STAGE, "staging_key", [FLOAT], ""),
    (STAGE, "staging_key", [lambda t: t[:, :1]], "heads"),
    (STAGED, "staging_value", [less], ""),
    (STAGED, "staging_slots", [less], ""),
    (STAGED, "staging_metadata", [less], "staged_count"),
    (STAGED, "staging_metadata", [LONG], "Int"),
    (COMMIT, "accepted_len", [FLOAT, lambda t: t.repeat(2)], ""),
]
SCALES = [
    ("k_scale", torch.float16, (1,)),
    ("v_scale", torch.float32, (2,)),
    ("k_scale", torch.float32, (2, 1)),
    ("k_scale", torch.float32, (1, 3)),
    ("k_scale", torch.float32, (4, 2)),
]
# What only the contents of a tensor show: refused on the CPU, skipped on CUDA (test_ops_cuda.py).
ONE_LAYER_VALUES: list[Wrong] = [
    (f"{DRAFT} {LOG} {RESTORE}", "slot_mapping", [at(2, 16)], "[2] is 16"),
    (COMMIT, "staging_slots", [at(1, 16)], "[1] is 16"),
    (COMMIT, "accepted_len", [lambda t: t * 2, lambda t: t - 3], ""),
    (STAGED, "staging_metadata", [at(0, 99)], "99"),
]


@each_device
@pytest.mark.parametrize("operator", [STAGE, DRAFT])
@pytest.mark.parametrize(("name", "dtype", "shape"), SCALES)
def test_scales(operator, name, dtype, shape, device):
    args = arguments(device, "fp8")[operator]
    check_wrong(operator, args, name, lambda _: torch.ones(shape, dtype=dtype, device=device), name)


# -- all layers --------------------------------------------------------------------------------------------------------

BOTH = "restore_all_layers commit_all_layers"
EVERY = f"log_all_layers {BOTH}"
ALL_LAYERS: list[Wrong] = [
    (EVERY, "pool", [torch.Tensor.char, lambda t: t[None]], ""),
    (EVERY, "layer_offsets", [INT, less], ""),
    (EVERY, "cache_strides", [lambda s: s[:2], lambda s: (s[0], 0, s[2])], ""),
    (EVERY, "slots", [INT, torch.flatten, lambda t: t[:, :0], lambda t: t[:, 1:]], ""),
    (EVERY, "slots", [lambda t: t.repeat(2, 2)], "rows"),
    (EVERY, "rows", [torch.Tensor.char, lambda t: t[0], lambda t: t[:, :, :0], last_strided], ""),
    ("log_all_layers", "rows", [lambda t: t[:1].expand(2, -1, -1, -1, -1)], "expanded"),
    (BOTH, "num_rejected", [LONG, with_gaps, less], ""),
    (BOTH, "num_drafts", [LONG, less], ""),
    (BOTH, "kept", [LONG, lambda t: t.repeat(2)], ""),
    (BOTH, "counts", [INT, lambda t: t[:2]], ""),
]
ALL_LAYERS_VALUES: list[Wrong] = [
    (EVERY, "slots", [at((1, 2), 16)], "[1, 2] is 16"),
    (EVERY, "layer_offsets", [at(1, 10**6)], "room"),
    (EVERY, "layer_offsets", [at(0, -1)], "[0] is -1"),
]
PACKING: list[Wrong] = [
    (EVERY, "packing", [LONG, torch.flatten, less, lambda t: t[:, :5].contiguous(), lambda t: t.T.contiguous().T], ""),
    (EVERY, "packing", [at((2, 1), 32)], "[2, 1] is 32"),
    (EVERY, "rows", [lambda t: torch.cat([t, t], -1)[..., :16]], "contiguous"),
]
OPEN = "open_window"
BATCH: list[Wrong] = [
    (OPEN, "query_start_loc", [LONG, lambda t: t[:2]], ""),
    (OPEN, "cu_num_logits", [LONG, lambda t: t[:0]], ""),
    (OPEN, "slot_mapping", [INT], ""),
    (OPEN, "slots", [lambda t: t[0], lambda t: t[:, 1:]], ""),
    (OPEN, "slots", [lambda t: t[:1]], "num_drafts"),
    (OPEN, "num_drafts", [LONG, lambda t: t[:2]], ""),
    (OPEN, "page_slots", [lambda t: None], "both"),
    (OPEN, "page_slots", [lambda t: t[1:]], ""),
    (OPEN, "staging_rows", [lambda t: None], "both"),
    (OPEN, "staging_rows", [INT], ""),
    (OPEN, "staging_rows", [lambda t: t[3:]], "page_slots"),
    (OPEN, "counts", [lambda t: t[:4]], ""),
]
BATCH_VALUES: list[Wrong] = [
    (OPEN, "query_start_loc", [at(2, 1)], "[2] is 1"),
    (OPEN, "query_start_loc", [at(0, -1)], "[0] is -1"),
    (OPEN, "query_start_loc", [at(4, 25)], "[4] is 25"),
    (OPEN, "cu_num_logits", [at(2, 1)], "[2] is 1"),
]


@each_device
def test_page_slots_in_place(device):
    *batch, slots, num_drafts, rows, _, counts = arguments(device)[OPEN]
    given = (*batch, slots, num_drafts, rows[: len(batch[2])], batch[2], counts)
    check_refused(OPEN, given, "share")


# -- every operator ----------------------------------------------------------------------------------------------------


@each_device
@cases(ONE_LAYER + ALL_LAYERS + BATCH)
def test_wrong_shapes_and_dtypes(wrong, device):
    check_wrong(wrong[0], arguments(device)[wrong[0]], *wrong[1:])


@cases(ONE_LAYER_VALUES + ALL_LAYERS_VALUES + BATCH_VALUES)
def test_wrong_values(wrong):
    check_wrong(wrong[0], arguments("cpu")[wrong[0]], *wrong[1:])


@cases(PACKING)
def test_packing(wrong):
    check_wrong(wrong[0], arguments("cpu", element_size=2)[wrong[0]], *wrong[1:])


@each_device
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_unchanged_arguments_are_taken(operator, cache, device):
    """Else the cases above could fail for another reason than theirs."""
    check(operator, *arguments(device, cache)[operator])


def test_the_last_layer_ends_with_the_pool():
    """The last slot of the last layer is the pool's last bytes; one byte less is too small a pool."""
    args = arguments("cpu")["log_all_layers"]
    args[3][0, 1] = 15
    ops.log_all_layers(*args)
    check_refused("log_all_layers", (args[0][:-1], *args[1:]), "slot 11")


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
    *where, _, rows = arguments("cuda")["log_all_layers"]
    packing = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    check_refused("log_all_layers", (*where, packing, rows), "GPU")
