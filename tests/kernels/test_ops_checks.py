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


# -- one layer ---------------------------------------------------------------------------------------------------------

STAGE, COMMIT, DRAFT = "stage_kv_cache", "commit_staged_kv_cache", "commit_draft_layer"
LOG, RESTORE = "log_cache_slots", "restore_rejected_drafts"
WRITE, MOVE, STAGED = f"{STAGE} {DRAFT}", f"{COMMIT} {LOG} {RESTORE}", f"{STAGE} {COMMIT}"
CACHES, EACH_SLOT = "key_cache value_cache", f"{STAGE} {DRAFT} {LOG} {RESTORE}"
ONE_LAYER: list[Wrong] = [
    (DRAFT, "kv_cache_dtype", lambda _: "int8", "kv_cache_dtype must be 'auto'"),
    (STAGE, "kv_cache_dtype", str.upper, "kv_cache_dtype must be"),
    (STAGE, "kv_cache_dtype", lambda _: "fp8", "staging_key must be uint8 under an fp8"),
    (DRAFT, "kv_cache_dtype", lambda _: "fp8_e5m2", "key_cache must be uint8 under an fp8"),
    (WRITE, "key", lambda t: t.double(), "key must be float32"),
    (WRITE, "key", lambda t: t.flatten(1), "key must have shape"),
    (WRITE, "value", lambda t: t.half(), "value must be BFloat16"),
    (WRITE, "value", lambda t: t[:2], "value must have the shape"),
    (DRAFT, "key value", lambda t: t[:2], "key must have"),
    (DRAFT, "key", last_strided, "contiguous in its"),
    (DRAFT, "key_cache", lambda t: t.half(), "value_cache must be Half"),
    (DRAFT, CACHES, lambda t: t.half(), "key_cache must have the dtype of key"),
    (MOVE, CACHES, lambda t: t.half(), "BFloat16"),
    (DRAFT, CACHES, lambda t: t[:, :, :1], "2 heads"),
    (DRAFT, CACHES, lambda t: t[..., :4], "size 8"),
    (DRAFT, "key_cache", lambda t: t[0], "key_cache must have shape"),
    (DRAFT, "value_cache", lambda t: t[:3], "value_cache must have the shape"),
    (f"{DRAFT} {MOVE}", "key_cache", last_strided, "contiguous in its last"),
    (f"{DRAFT} {RESTORE}", "key_cache", lambda t: t[:1].expand(4, -1, -1, -1), "must not be expanded"),
    (LOG, "log_key", lambda t: t[:1].expand(3, -1, -1), "must not be expanded"),
    (LOG, "log_key log_value", lambda t: t[:2], "each of"),
    (f"{LOG} {RESTORE}", "log_value", lambda t: t[:2], "log_value must have"),
    (f"{WRITE} {LOG}", "slot_mapping", lambda t: t.int(), "Long"),
    (WRITE, "slot_mapping", lambda t: t[:, None], "slot_mapping must"),
    (EACH_SLOT, "slot_mapping", with_gaps, "slot_mapping must be contiguous"),
    (f"{DRAFT} {RESTORE}", "accepted_mask", lambda t: t[:2], "each of the 3"),
    (f"{DRAFT} {RESTORE}", "accepted_mask", lambda t: t.int(), "Bool"),
    (STAGE, "staging_key", lambda t: t.float(), "staging_key must have the dtype"),
    (STAGE, "staging_key", lambda t: t[:, :1], "2 heads of size 8"),
    (STAGED, "staging_value", lambda t: t[:2], "staging_value"),
    (STAGED, "staging_slots", lambda t: t[:2], "staging_slots must"),
    (STAGED, "staging_metadata", lambda t: t[:1], "[staged_count,"),
    (STAGED, "staging_metadata", lambda t: t.long(), "Int"),
    (COMMIT, "accepted_len", lambda t: t.repeat(2), "accepted_len must be"),
    (COMMIT, "accepted_len", lambda t: t.float(), "accepted_len must be"),
]
SCALES: list[tuple[str, torch.dtype, tuple[int, ...], str]] = [
    ("k_scale", torch.float16, (1,), "k_scale must be Float"),
    ("v_scale", torch.float32, (2,), "v_scale must hold one number, or be [tokens, 1] or [1, num_heads]"),
    ("k_scale", torch.float32, (2, 1), "k_scale must have a row for each of the 3"),
    ("k_scale", torch.float32, (1, 3), "k_scale must hold one number"),
    ("k_scale", torch.float32, (4, 2), "k_scale must hold one number"),
]
# What only the contents of a tensor show: refused on the CPU, skipped on CUDA (test_ops_cuda.py).
ONE_LAYER_VALUES: list[Wrong] = [
    (f"{DRAFT} {LOG} {RESTORE}", "slot_mapping", at(2, 16), "slot_mapping[2] is 16 but the cache ends at slot 15"),
    (COMMIT, "staging_slots", at(1, 16), "staging_slots[1] is 16"),
    (COMMIT, "accepted_len", lambda t: t * 2, "accepted_len is 4 but 3 rows are staged"),
    (COMMIT, "accepted_len", lambda t: t - 3, "accepted_len is -1"),
    (STAGED, "staging_metadata", at(0, 99), "99"),
]


@each_device
@pytest.mark.parametrize("operator", [STAGE, DRAFT])
@pytest.mark.parametrize(("name", "dtype", "shape", "message"), SCALES)
def test_scales(operator, name, dtype, shape, message, device):
    args = arguments(device, "fp8")[operator]
    check_wrong(operator, args, name, lambda _: torch.ones(shape, dtype=dtype, device=device), message)


# -- all layers --------------------------------------------------------------------------------------------------------

BOTH = "restore_all_layers commit_all_layers"
EVERY = f"log_all_layers {BOTH}"
ALL_LAYERS: list[Wrong] = [
    (EVERY, "pool", lambda t: t.view(torch.int8), "pool must be Byte"),
    (EVERY, "pool", lambda t: t[None], "pool must have shape [n]"),
    (EVERY, "layer_offsets", lambda t: t.int(), "layer_offsets must be Long"),
    (EVERY, "layer_offsets", lambda t: t[:1], "layer_offsets must have one entry"),
    (EVERY, "cache_strides", lambda s: s[:2], "cache_strides must be (block, head, token)"),
    (EVERY, "cache_strides", lambda s: (s[0], 0, s[2]), "cache_strides must be positive"),
    (EVERY, "slots", lambda t: t.int(), "slots must be Long"),
    (EVERY, "slots", lambda t: t.flatten(), "slots must have shape [requests"),
    (EVERY, "slots", lambda t: t[:, :0], "slots must have at least one column"),
    (EVERY, "slots", lambda t: t[:, 1:], "slots must be contiguous"),
    (EVERY, "slots", lambda t: t.repeat(2, 2), "make rows larger"),
    (EVERY, "rows", lambda t: t.view(torch.int8), "rows must be Byte"),
    (EVERY, "rows", lambda t: t[0], "rows must have shape"),
    (EVERY, "rows", lambda t: t[:, :, :0], "rows must have at least one"),
    (EVERY, "rows", last_strided, "rows must be contiguous in its"),
    ("log_all_layers", "rows", lambda t: t[:1].expand(2, -1, -1, -1, -1), "must not be expanded"),
    (BOTH, "num_rejected", lambda t: t.long(), "num_rejected must be Int"),
    (BOTH, "num_rejected", with_gaps, "num_rejected must be contiguous"),
    (BOTH, "num_rejected", lambda t: t[:1], "num_rejected must have one entry for each of"),
    (BOTH, "num_drafts", lambda t: t.long(), "num_drafts must be Int"),
    (BOTH, "num_drafts", lambda t: t[:1], "num_drafts must have one entry for each"),
    (BOTH, "kept", lambda t: t.long(), "kept must be Int"),
    (BOTH, "kept", lambda t: t.repeat(2), "kept must have one entry"),
    (BOTH, "counts", lambda t: t.int(), "counts must be Long"),
    (BOTH, "counts", lambda t: t[:2], "counts"),
]
ALL_LAYERS_VALUES: list[Wrong] = [
    (EVERY, "slots", at((1, 2), 16), "slots[1, 2] is 16 but the layers end at slot 15"),
    (EVERY, "layer_offsets", at(1, 10**6), "leaves no room for a block"),
    (EVERY, "layer_offsets", at(0, -1), "layer_offsets[0] is -1"),
]
PACKING: list[Wrong] = [
    (EVERY, "packing", lambda t: t.long(), "packing must be Int"),
    (EVERY, "packing", lambda t: t.flatten(), "packing must have shape"),
    (EVERY, "packing", lambda t: t[:3], "packing must have one entry"),
    (EVERY, "packing", lambda t: t[:, :5].contiguous(), "packing must list the elements"),
    (EVERY, "packing", lambda t: t.T.contiguous().T, "packing must be contiguous"),
    (EVERY, "packing", at((2, 1), 32), "packing[2, 1] is 32"),
    (EVERY, "rows", lambda t: torch.cat([t, t], -1)[..., :16], "each (block, head) chunk of rows must be contiguous"),
]
OPEN = "open_window"
BATCH: list[Wrong] = [
    (OPEN, "query_start_loc", lambda t: t.long(), "query_start_loc must be Int"),
    (OPEN, "query_start_loc", lambda t: t[:2], "query_start_loc must have a row for"),
    (OPEN, "cu_num_logits", lambda t: t.long(), "cu_num_logits must be Int"),
    (OPEN, "cu_num_logits", lambda t: t[:0], "cu_num_logits must have one entry more"),
    (OPEN, "slot_mapping", lambda t: t.int(), "slot_mapping must be Long"),
    (OPEN, "slots", lambda t: t[:1], "num_drafts"),
    (OPEN, "slots", lambda t: t[0], "slots must have shape [requests"),
    (OPEN, "slots", lambda t: t[:, 1:], "slots must be contiguous"),
    (OPEN, "num_drafts", lambda t: t.long(), "num_drafts must be Int"),
    (OPEN, "num_drafts", lambda t: t[:2], "num_drafts must have one entry for each"),
    (OPEN, "page_slots", lambda t: None, "pass both (stage) or neither (cow)"),
    (OPEN, "staging_rows", lambda t: None, "pass both (stage) or neither (cow)"),
    (OPEN, "staging_rows", lambda t: t.int(), "staging_rows must be Long"),
    (OPEN, "staging_rows", lambda t: t[3:], "page_slots"),
    (OPEN, "page_slots", lambda t: t[1:], "page_slots must have one entry"),
    (OPEN, "counts", lambda t: t[:4], "counts"),
]
BATCH_VALUES: list[Wrong] = [
    (OPEN, "query_start_loc", at(2, 1), "query_start_loc[2] is 1 but must ascend"),
    (OPEN, "query_start_loc", at(0, -1), "query_start_loc[0] is -1"),
    (OPEN, "query_start_loc", at(4, 25), "query_start_loc[4] is 25 but must ascend from 0 to at most the 24 tokens"),
    (OPEN, "cu_num_logits", at(2, 1), "cu_num_logits[2] is 1"),
]


@each_device
def test_page_slots_in_place(device):
    *batch, slots, num_drafts, rows, _, counts = arguments(device)[OPEN]
    given = (*batch, slots, num_drafts, rows[: len(batch[2])], batch[2], counts)
    check_refused(OPEN, given, "must not share memory with slot_mapping")


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
    check_refused("log_all_layers", (args[0][:-1], *args[1:]), "the layers end at slot 11")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_of_two_devices(operator):
    """Every tensor argument in its turn on another device than the rest is refused."""
    drawn = calls("cuda", cache="fp8")[operator]
    for name, arg in zip(ops.OPERATORS[operator], drawn, strict=False):
        if isinstance(arg, torch.Tensor):
            check_wrong(operator, drawn, name, lambda t: t.cpu(), "must be on the device of")


@pytest.mark.gpu
def test_packing_is_for_the_cpu():
    *where, _, rows = arguments("cuda")["log_all_layers"]
    packing = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    check_refused("log_all_layers", (*where, packing, rows), "pass None for a cache on the GPU")
