# SPDX-License-Identifier: Apache-2.0
"""Each wrong input is refused with an error that names it, and no byte has changed (R14, #17)."""

from typing import Any

import pytest
import torch
from devices import each_device, needs_gpu
from wrong_inputs import Arguments, Change, put

from nwor import ops
from nwor.ops_inputs import Pool, make_batch, make_cache, make_staging, make_targets, make_vectors
from tests.operators import check_refused


def layerwise(device: str) -> Arguments:
    """Arguments of every per-layer operator: 3 tokens, 2 heads of 8, 4 blocks of 4 slots, bf16."""
    key, value = make_vectors("packed", 4, 2, 8, torch.bfloat16, device)
    names = ("staging_key", "staging_value", "staging_slots", "staging_metadata")
    staging = make_staging(5, 2, 8, torch.bfloat16, device)
    key_cache, value_cache = make_cache("NHD", 4, 4, 2, 8, torch.bfloat16, device)
    staging[2][:3] = torch.tensor([1, 9, 3])
    staging[3][0] = 3
    return {
        "key": key,
        "value": value,
        "slot_mapping": torch.tensor([1, 9, 3], device=device),
        "accepted_mask": torch.tensor([True, False, True], device=device),
        "key_cache": key_cache,
        "value_cache": value_cache,
        **dict(zip(names, staging, strict=True)),
        "accepted_len": torch.tensor([2], dtype=torch.int32, device=device),
        "log_key": make_staging(4, 2, 8, torch.bfloat16, device)[0],
        "log_value": make_staging(4, 2, 8, torch.bfloat16, device)[1],
        "kv_cache_dtype": "auto",
        "k_scale": None,
        "v_scale": None,
    }


STAGING = ("staging_key", "staging_value", "staging_slots", "staging_metadata")
CACHES = ("key_cache", "value_cache")
QUANTISATION = ("kv_cache_dtype", "k_scale", "v_scale")
PARAMETERS = {
    "stage_kv_cache": ("key", "value", "slot_mapping", *STAGING, *QUANTISATION),
    "commit_staged_kv_cache": (*STAGING, *CACHES, "accepted_len"),
    "commit_draft_layer": ("key", "value", *CACHES, "slot_mapping", "accepted_mask", *QUANTISATION),
    "log_cache_slots": (*CACHES, "slot_mapping", "log_key", "log_value"),
    "restore_rejected_drafts": ("log_key", "log_value", "slot_mapping", "accepted_mask", *CACHES),
}


def under_fp8(change: Change) -> Change:
    """The same with an fp8 cache, staging and log."""

    def with_fp8(arguments: Arguments) -> None:
        for name in (*CACHES, *STAGING[:2], "log_key", "log_value"):
            arguments[name] = arguments[name].view(torch.uint8)[..., :8].contiguous()
        arguments["kv_cache_dtype"] = "fp8"
        change(arguments)

    return with_fp8


WRONG_LAYERWISE: list[tuple[str, str, Change, str]] = [  # (what, operators, change, message)
    ("cache dtype", "commit_draft_layer", put("kv_cache_dtype", lambda _: "int8"), "kv_cache_dtype must be 'auto'"),
    ("case of the cache dtype", "stage_kv_cache", put("kv_cache_dtype", str.upper), "kv_cache_dtype must be"),
    ("key dtype", "stage_kv_cache commit_draft_layer", put("key", lambda t: t.double()), "key must be float32"),
    ("value dtype", "stage_kv_cache commit_draft_layer", put("value", lambda t: t.half()), "value must be BFloat16"),
    ("cache of another dtype", "commit_draft_layer", put("key_cache", lambda t: t.half()), "value_cache must be Half"),
    (
        "caches of another dtype",
        "commit_draft_layer",
        lambda a: [put(name, lambda t: t.half())(a) for name in CACHES] and None,
        "key_cache must have the dtype of key",
    ),
    (
        "cache of another dtype than staging",
        "commit_staged_kv_cache log_cache_slots restore_rejected_drafts",
        lambda a: [put(name, lambda t: t.half())(a) for name in CACHES] and None,
        "BFloat16",
    ),
    ("staging dtype", "stage_kv_cache", put("staging_key", lambda t: t.float()), "staging_key must have the dtype"),
    (
        "fp8 into a 16-bit staging",
        "stage_kv_cache",
        put("kv_cache_dtype", lambda _: "fp8"),
        "staging_key must be uint8 under an fp8",
    ),
    (
        "fp8 into a 16-bit cache",
        "commit_draft_layer",
        put("kv_cache_dtype", lambda _: "fp8_e5m2"),
        "key_cache must be uint8 under an fp8",
    ),
    ("value shape", "stage_kv_cache commit_draft_layer", put("value", lambda t: t[:3]), "value must have the shape"),
    (
        "key without heads",
        "stage_kv_cache commit_draft_layer",
        put("key", lambda t: t.flatten(1)),
        "key must have shape",
    ),
    ("too few keys", "commit_draft_layer", lambda a: a.update(key=a["key"][:2], value=a["value"][:2]), "key must have"),
    ("heads", "commit_draft_layer", lambda a: [put(n, lambda t: t[:, :, :1])(a) for n in CACHES] and None, "2 heads"),
    ("head size", "commit_draft_layer", lambda a: [put(n, lambda t: t[..., :4])(a) for n in CACHES] and None, "size 8"),
    ("cache without blocks", "commit_draft_layer", put("key_cache", lambda t: t[0]), "key_cache must have shape"),
    ("value cache shape", "commit_draft_layer", put("value_cache", lambda t: t[:3]), "value_cache must have the shape"),
    (
        "key strided inside a head",
        "commit_draft_layer",
        put("key", lambda t: t.mT.contiguous().mT),
        "contiguous in its",
    ),
    (
        "cache strided inside a head",
        "commit_draft_layer log_cache_slots restore_rejected_drafts commit_staged_kv_cache",
        put("key_cache", lambda t: t.mT.contiguous().mT),
        "contiguous in its last",
    ),
    (
        "expanded cache",
        "commit_draft_layer restore_rejected_drafts",
        put("key_cache", lambda t: t[:1].expand(4, -1, -1, -1)),
        "must not be expanded",
    ),
    ("expanded log", "log_cache_slots", put("log_key", lambda t: t[:1].expand(4, -1, -1)), "must not be expanded"),
    ("slot dtype", "stage_kv_cache commit_draft_layer log_cache_slots", put("slot_mapping", lambda t: t.int()), "Long"),
    ("slot shape", "stage_kv_cache commit_draft_layer", put("slot_mapping", lambda t: t[:, None]), "slot_mapping must"),
    (
        "slots with gaps",
        "stage_kv_cache commit_draft_layer log_cache_slots restore_rejected_drafts",
        put("slot_mapping", lambda t: t.repeat_interleave(2)[::2]),
        "slot_mapping must be contiguous",
    ),
    ("mask size", "commit_draft_layer restore_rejected_drafts", put("accepted_mask", lambda t: t[:2]), "each of the 3"),
    ("mask dtype", "commit_draft_layer restore_rejected_drafts", put("accepted_mask", lambda t: t.int()), "Bool"),
    (
        "short log",
        "log_cache_slots",
        lambda a: [put(n, lambda t: t[:2])(a) for n in ("log_key", "log_value")],
        "each of",
    ),
    ("log shape", "log_cache_slots restore_rejected_drafts", put("log_value", lambda t: t[:3]), "log_value must have"),
    ("staging shape", "stage_kv_cache commit_staged_kv_cache", put("staging_value", lambda t: t[:3]), "staging_value"),
    ("staging heads", "stage_kv_cache", put("staging_key", lambda t: t[:, :1]), "2 heads of size 8"),
    (
        "staged slots",
        "stage_kv_cache commit_staged_kv_cache",
        put("staging_slots", lambda t: t[:2]),
        "staging_slots must",
    ),
    ("metadata", "stage_kv_cache commit_staged_kv_cache", put("staging_metadata", lambda t: t[:1]), "[staged_count,"),
    ("metadata dtype", "stage_kv_cache commit_staged_kv_cache", put("staging_metadata", lambda t: t.long()), "Int"),
    (
        "accepted_len shape",
        "commit_staged_kv_cache",
        put("accepted_len", lambda t: t.repeat(2)),
        "accepted_len must be",
    ),
    ("accepted_len dtype", "commit_staged_kv_cache", put("accepted_len", lambda t: t.float()), "accepted_len must be"),
    (
        "scale dtype",
        "stage_kv_cache commit_draft_layer",
        under_fp8(lambda a: a.update(k_scale=torch.ones(1, dtype=torch.float16, device=a["key"].device))),
        "k_scale must be Float",
    ),
    (
        "one scale a head without saying so",
        "stage_kv_cache commit_draft_layer",
        under_fp8(lambda a: a.update(v_scale=torch.ones(2, device=a["key"].device))),
        "v_scale must hold one number, or be [tokens, 1] or [1, num_heads]",
    ),
    (
        "too few scales",
        "stage_kv_cache commit_draft_layer",
        under_fp8(lambda a: a.update(k_scale=torch.ones(2, 1, device=a["key"].device))),
        "k_scale must have a row for each of the 3",
    ),
    (
        "scales of other heads",
        "stage_kv_cache commit_draft_layer",
        under_fp8(lambda a: a.update(k_scale=torch.ones(1, 3, device=a["key"].device))),
        "k_scale must hold one number",
    ),
    (
        "a scale for each token and head",
        "commit_draft_layer",
        under_fp8(lambda a: a.update(k_scale=torch.ones(4, 2, device=a["key"].device))),
        "k_scale must hold one number",
    ),
]

# What only the contents of a tensor show: refused on the CPU, skipped on CUDA (test_ops_cuda.py).
WRONG_VALUES: list[tuple[str, str, Change, str]] = [
    (
        "slot beyond the cache",
        "commit_draft_layer log_cache_slots restore_rejected_drafts",
        lambda a: a["slot_mapping"].__setitem__(2, 16),
        "slot_mapping[2] is 16 but the cache ends at slot 15",
    ),
    (
        "staged slot beyond the cache",
        "commit_staged_kv_cache",
        lambda a: a["staging_slots"].__setitem__(1, 16),
        "staging_slots[1] is 16",
    ),
    (
        "more accepted than staged",
        "commit_staged_kv_cache",
        lambda a: a["accepted_len"].fill_(4),
        "accepted_len is 4 but 3 rows are staged",
    ),
    ("accepted less than none", "commit_staged_kv_cache", lambda a: a["accepted_len"].fill_(-1), "accepted_len is -1"),
    (
        "metadata of another staging",
        "stage_kv_cache commit_staged_kv_cache",
        lambda a: a["staging_metadata"].__setitem__(0, 99),
        "99",
    ),
]


def cases(wrong: list[tuple[str, str, Change, str]]) -> list[Any]:
    return [
        pytest.param(operator, change, message, id=f"{operator}: {what}")
        for what, operators, change, message in wrong
        for operator in operators.split()
    ]


@each_device
@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_LAYERWISE))
def test_layerwise(operator, change, message, device):
    arguments = layerwise(device)
    change(arguments)
    check_refused(operator, [arguments[name] for name in PARAMETERS[operator]], message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_VALUES))
def test_layerwise_values(operator, change, message):
    arguments = layerwise("cpu")
    change(arguments)
    check_refused(operator, [arguments[name] for name in PARAMETERS[operator]], message)


@each_device
@pytest.mark.parametrize("operator", PARAMETERS)
def test_the_unchanged_arguments_are_taken(operator, device):
    """Else the cases above could fail for another reason than theirs."""
    arguments = layerwise(device)
    getattr(ops, operator)(*(arguments[name] for name in PARAMETERS[operator]))
    if operator == "stage_kv_cache":
        assert arguments["staging_metadata"].tolist() == [3, 1]  # 3 staged before, and room for 2


def test_an_fp8_layer_is_taken():
    for operator in ("stage_kv_cache", "commit_draft_layer"):
        arguments = layerwise("cpu")
        under_fp8(lambda a: a.update(k_scale=torch.ones(1, 2), v_scale=torch.ones(3, 1)))(arguments)
        arguments["staging_metadata"].zero_()
        getattr(ops, operator)(*(arguments[name] for name in PARAMETERS[operator]))
        assert arguments["staging_metadata"].tolist() == [3 if operator == "stage_kv_cache" else 0, 0]


# -- all layers --------------------------------------------------------------------------------------------------------

POOL = ("pool", "layer_offsets", "cache_strides", "slots", "packing", "rows")
WINDOW = ("num_rejected", "kept", "counts")
OPEN = ("query_start_loc", "cu_num_logits", "slot_mapping", "slots", "staging_rows", "page_slots", "counts")
PARAMETERS_ALL = {
    "log_all_layers": POOL,
    "restore_all_layers": POOL + WINDOW,
    "commit_all_layers": POOL + WINDOW,
}


def all_layers(device: str, element_size: int = 0) -> Arguments:
    """2 layers of 4 blocks of 4 slots, 2 heads of 16 bytes; 2 requests, of 3 rows and of 1."""
    pool = Pool("LBHN", 2, 4, 2, 4, 16, device, element_size)
    slots = torch.tensor([[3, 8, 15], [-1, -1, 0]], device=device)
    rejected, kept = torch.tensor([[1, 0], [9, 9]], dtype=torch.int32, device=device)
    return dict(zip(POOL + WINDOW, (*pool.arguments(slots), rejected, kept, pool.counts), strict=True))


def a_batch(device: str, element_size: int = 0) -> Arguments:
    """A verify step of 2 drafts and a prefill of 4 rows, for windows of 3 rows and 3 requests."""
    batch = make_batch([3, 4], [3, 1], 16, device)
    targets = make_targets(3, 3, batch[2].numel(), device)
    return dict(zip(OPEN, (*batch, *targets, torch.zeros(5, dtype=torch.int64, device=device)), strict=True))


EVERY = "log_all_layers restore_all_layers commit_all_layers"
BOTH = "restore_all_layers commit_all_layers"
WRONG_ALL: list[tuple[str, str, Change, str]] = [
    ("pool dtype", EVERY, put("pool", lambda t: t.view(torch.int8)), "pool must be Byte"),
    ("pool shape", EVERY, put("pool", lambda t: t[None]), "pool must have shape [n]"),
    ("offsets dtype", EVERY, put("layer_offsets", lambda t: t.int()), "layer_offsets must be Long"),
    ("an offset too few", EVERY, put("layer_offsets", lambda t: t[:1]), "layer_offsets must have one entry"),
    ("two strides", EVERY, put("cache_strides", lambda s: s[:2]), "cache_strides must be (block, head, token)"),
    ("stride 0", EVERY, put("cache_strides", lambda s: (s[0], 0, s[2])), "cache_strides must be positive"),
    ("slots dtype", EVERY, put("slots", lambda t: t.int()), "slots must be Long"),
    ("slots shape", EVERY, put("slots", lambda t: t.flatten()), "slots must have shape [requests"),
    ("no columns", EVERY, put("slots", lambda t: t[:, :0]), "slots must have at least one column"),
    ("slots cut by columns", EVERY, put("slots", lambda t: t[:, 1:]), "slots must be contiguous"),
    ("more rows than the mini-cache holds", EVERY, put("slots", lambda t: t.repeat(2, 2)), "make rows larger"),
    ("rows dtype", EVERY, put("rows", lambda t: t.view(torch.int8)), "rows must be Byte"),
    ("rows shape", EVERY, put("rows", lambda t: t[0]), "rows must have shape"),
    ("no heads", EVERY, put("rows", lambda t: t[:, :, :0]), "rows must have at least one"),
    (
        "rows strided inside a slot",
        EVERY,
        put("rows", lambda t: t.mT.contiguous().mT),
        "rows must be contiguous in its",
    ),
    ("expanded rows", "log_all_layers", put("rows", lambda t: t[:1].expand(2, -1, -1, -1, -1)), "must not be expanded"),
    ("rejected dtype", BOTH, put("num_rejected", lambda t: t.long()), "num_rejected must be Int"),
    ("rejected with gaps", BOTH, put("num_rejected", lambda t: t.repeat(2)[::2]), "num_rejected must be contiguous"),
    ("a verdict too few", BOTH, put("num_rejected", lambda t: t[:1]), "num_rejected must have one entry for each of"),
    ("kept dtype", BOTH, put("kept", lambda t: t.long()), "kept must be Int"),
    ("a number of kept rows too many", BOTH, put("kept", lambda t: t.repeat(2)[:3]), "kept must have one entry"),
    ("counts dtype", BOTH, put("counts", lambda t: t.int()), "counts must be Long"),
    ("two counts", BOTH, put("counts", lambda t: t[:2]), "counts [kept, rejected, windows, drafts, fallbacks]"),
]
WRONG_VALUES_ALL: list[tuple[str, str, Change, str]] = [
    (
        "slot beyond a layer",
        EVERY,
        lambda a: a["slots"].__setitem__((1, 2), 16),
        "slots[1, 2] is 16 but the layers end at slot 15",
    ),
    ("offset beyond the pool", EVERY, lambda a: a["layer_offsets"].__setitem__(1, 10**6), "leaves no room for a block"),
    ("offset before the pool", EVERY, lambda a: a["layer_offsets"].__setitem__(0, -1), "layer_offsets[0] is -1"),
]
WRONG_PACKING: list[tuple[str, str, Change, str]] = [
    ("dtype", EVERY, put("packing", lambda t: t.long()), "packing must be Int"),
    ("shape", EVERY, put("packing", lambda t: t.flatten()), "packing must have shape"),
    ("block size", EVERY, put("packing", lambda t: t[:3]), "packing must have one entry"),
    ("elements", EVERY, put("packing", lambda t: t[:, :5].contiguous()), "packing must list the elements"),
    ("strides", EVERY, put("packing", lambda t: t.T.contiguous().T), "packing must be contiguous"),
    ("position outside", EVERY, lambda a: a["packing"].__setitem__((2, 1), 32), "packing[2, 1] is 32"),
    (
        "rows with gaps",
        EVERY,
        put("rows", lambda t: torch.cat([t, t], -1)[..., :16]),
        "each (block, head) chunk of rows must be contiguous",
    ),
]


WRONG_BATCH: list[tuple[str, str, Change, str]] = [
    ("starts dtype", "open_window", put("query_start_loc", lambda t: t.long()), "query_start_loc must be Int"),
    ("a start too few", "open_window", put("query_start_loc", lambda t: t[:2]), "query_start_loc must have a row for"),
    ("logits dtype", "open_window", put("cu_num_logits", lambda t: t.long()), "cu_num_logits must be Int"),
    (
        "no logits at all",
        "open_window",
        put("cu_num_logits", lambda t: t[:0]),
        "cu_num_logits must have one entry more",
    ),
    ("requests too many", "open_window", put("slots", lambda t: t[:1]), "of which slots holds 1, got 3"),
    ("slot mapping dtype", "open_window", put("slot_mapping", lambda t: t.int()), "slot_mapping must be Long"),
    ("slots of one request", "open_window", put("slots", lambda t: t[0]), "slots must have shape [requests"),
    ("slots cut by columns", "open_window", put("slots", lambda t: t[:, 1:]), "slots must be contiguous"),
    ("rows alone", "open_window", put("page_slots", lambda t: None), "pass both (stage) or neither (cow)"),
    ("pages alone", "open_window", put("staging_rows", lambda t: None), "pass both (stage) or neither (cow)"),
    ("rows dtype", "open_window", put("staging_rows", lambda t: t.int()), "staging_rows must be Long"),
    ("a row too few", "open_window", put("staging_rows", lambda t: t[1:]), "staging_rows must have a row for each"),
    ("a page slot too few", "open_window", put("page_slots", lambda t: t[1:]), "page_slots must have one entry"),
    (
        "page slots in place",
        "open_window",
        lambda a: a.update(page_slots=a["slot_mapping"]),
        "must not share memory with slot_mapping",
    ),
    ("counts", "open_window", put("counts", lambda t: t[:4]), "counts [kept, rejected, windows, drafts, fallbacks]"),
]
WRONG_BATCH_VALUES: list[tuple[str, str, Change, str]] = [
    (
        "a query that ends before it starts",
        "open_window",
        lambda a: a["query_start_loc"].__setitem__(1, 8),
        "query_start_loc[2] is 7 but must ascend",
    ),
    (
        "a start before the batch",
        "open_window",
        lambda a: a["query_start_loc"].__setitem__(0, -1),
        "query_start_loc[0] is -1",
    ),
    (
        "more rows than slots",
        "open_window",
        put("slot_mapping", lambda t: t[:6]),
        "query_start_loc[2] is 7 but must ascend from 0 to at most the 6 tokens",
    ),
    ("falling logits", "open_window", lambda a: a["cu_num_logits"].__setitem__(2, 2), "cu_num_logits[2] is 2"),
]


@each_device
@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_BATCH))
def test_a_batch(operator, change, message, device):
    arguments = a_batch(device)
    change(arguments)
    check_refused(operator, [arguments[name] for name in OPEN], message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_BATCH_VALUES))
def test_a_batch_values(operator, change, message):
    arguments = a_batch("cpu")
    change(arguments)
    check_refused(operator, [arguments[name] for name in OPEN], message)


@each_device
def test_the_unchanged_batch_is_taken(device):
    arguments = a_batch(device)
    ops.open_window(*(arguments[name] for name in OPEN))
    assert arguments["counts"].tolist() == [0, 0, 1, 2, 0]


@each_device
@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_ALL))
def test_all_layers(operator, change, message, device):
    arguments = all_layers(device)
    change(arguments)
    check_refused(operator, [arguments[name] for name in PARAMETERS_ALL[operator]], message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_VALUES_ALL))
def test_all_layers_values(operator, change, message):
    arguments = all_layers("cpu")
    change(arguments)
    check_refused(operator, [arguments[name] for name in PARAMETERS_ALL[operator]], message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_PACKING))
def test_packing(operator, change, message):
    arguments = all_layers("cpu", element_size=2)
    change(arguments)
    check_refused(operator, [arguments[name] for name in PARAMETERS_ALL[operator]], message)


def test_the_last_layer_ends_with_the_pool():
    """The last slot of the last layer is the pool's last bytes; one byte less is too small a pool."""
    arguments = all_layers("cpu")
    arguments["slots"][0, 1] = 15
    ops.log_all_layers(*(arguments[name] for name in POOL))
    arguments["pool"] = arguments["pool"][:-1]
    check_refused("log_all_layers", [arguments[name] for name in POOL], "the layers end at slot 11")


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [*PARAMETERS, *PARAMETERS_ALL, "open_window"])
@pytest.mark.parametrize("home", [pytest.param("cuda", marks=needs_gpu)])
def test_tensors_of_two_devices(operator, home):
    """Every tensor argument in its turn on the other device."""
    names = (PARAMETERS | PARAMETERS_ALL | {"open_window": OPEN})[operator]
    make = layerwise if operator in PARAMETERS else a_batch if operator == "open_window" else all_layers
    for moved in names:
        arguments = make(home)
        if operator in ("stage_kv_cache", "commit_draft_layer"):
            under_fp8(lambda a: a.update(k_scale=torch.ones(1, device=home), v_scale=torch.ones(1, device=home)))(
                arguments
            )
        if not isinstance(arguments[moved], torch.Tensor):
            continue
        arguments[moved] = arguments[moved].cpu()
        check_refused(operator, [arguments[name] for name in names], "must be on the device of")


@pytest.mark.parametrize("home", [pytest.param("cuda", marks=needs_gpu)])
def test_packing_is_for_the_cpu(home):
    arguments = all_layers(home)
    arguments["packing"] = torch.zeros(4, 8, dtype=torch.int32, device=home)
    check_refused("log_all_layers", [arguments[name] for name in POOL], "pass None for a cache on the GPU")
