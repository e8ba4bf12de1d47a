# SPDX-License-Identifier: Apache-2.0
"""Each wrong input of an all-layer operator is refused with an error that names it; no byte has changed."""

import functools

import pytest
import torch
from devices import each_device, needs_gpu

from nwor import ops
from nwor_lab.operators.inputs import Pool, make_batch, make_targets
from tests.kernels.operators import check_refused
from tests.kernels.wrong_inputs import Arguments, Change, cases, check_devices, check_wrong, put

POOL = ("pool", "layer_offsets", "cache_strides", "slots", "packing", "rows")
WINDOW = ("num_drafts", "num_rejected", "kept", "counts")
OPEN = (
    "query_start_loc",
    "cu_num_logits",
    "slot_mapping",
    "slots",
    "num_drafts",
    "staging_rows",
    "page_slots",
    "counts",
)
PARAMETERS = {
    "log_all_layers": POOL,
    "restore_all_layers": POOL + WINDOW,
    "commit_all_layers": POOL + WINDOW,
}


def all_layers(device: str, element_size: int = 0) -> Arguments:
    """2 layers of 4 blocks of 4 slots, 2 heads of 16 bytes; 2 requests, of 3 rows and of 1."""
    pool = Pool("LBHN", 2, 4, 2, 4, 16, device, element_size)
    slots = torch.tensor([[3, 8, 15], [0, -1, -1]], device=device)
    num_drafts, rejected, kept = torch.tensor([[3, 1], [1, 0], [9, 9]], dtype=torch.int32, device=device)
    return dict(zip(POOL + WINDOW, (*pool.arguments(slots), num_drafts, rejected, kept, pool.counts), strict=True))


def a_batch(device: str) -> Arguments:
    """A verify step of 2 drafts and a prefill of 4 rows, for windows of 3 rows and 3 requests."""
    batch = make_batch([3, 4], [3, 1], 16, device)
    targets = make_targets(3, 3, batch[2].numel(), device)
    return dict(zip(OPEN, (*batch, *targets, torch.zeros(5, dtype=torch.int64, device=device)), strict=True))


EVERY = " ".join(PARAMETERS)
BOTH = "restore_all_layers commit_all_layers"
WRONG: list[tuple[str, str, Change, str]] = [
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
    ("drafts dtype", BOTH, put("num_drafts", lambda t: t.long()), "num_drafts must be Int"),
    (
        "drafts of a request too few",
        BOTH,
        put("num_drafts", lambda t: t[:1]),
        "num_drafts must have one entry for each",
    ),
    (
        "rejections of a request too few",
        BOTH,
        put("num_rejected", lambda t: t[:1]),
        "num_rejected must have one entry for each of",
    ),
    ("kept dtype", BOTH, put("kept", lambda t: t.long()), "kept must be Int"),
    ("a number of kept rows too many", BOTH, put("kept", lambda t: t.repeat(2)[:3]), "kept must have one entry"),
    ("counts dtype", BOTH, put("counts", lambda t: t.int()), "counts must be Long"),
    ("two counts", BOTH, put("counts", lambda t: t[:2]), "counts [kept, rejected, windows, drafts, fallbacks]"),
]
WRONG_VALUES: list[tuple[str, str, Change, str]] = [
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
    ("drafts dtype", "open_window", put("num_drafts", lambda t: t.long()), "num_drafts must be Int"),
    (
        "drafts of a request too few",
        "open_window",
        put("num_drafts", lambda t: t[:2]),
        "num_drafts must have one entry",
    ),
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
    check_wrong(operator, a_batch(device), OPEN, change, message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_BATCH_VALUES))
def test_a_batch_values(operator, change, message):
    check_wrong(operator, a_batch("cpu"), OPEN, change, message)


@each_device
def test_the_unchanged_batch_is_taken(device):
    arguments = a_batch(device)
    ops.open_window(*(arguments[name] for name in OPEN))
    assert arguments["counts"].tolist() == [0, 0, 1, 2, 0]


@each_device
@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG))
def test_all_layers(operator, change, message, device):
    check_wrong(operator, all_layers(device), PARAMETERS[operator], change, message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_VALUES))
def test_all_layers_values(operator, change, message):
    check_wrong(operator, all_layers("cpu"), PARAMETERS[operator], change, message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_PACKING))
def test_packing(operator, change, message):
    check_wrong(operator, all_layers("cpu", element_size=2), PARAMETERS[operator], change, message)


def test_the_last_layer_ends_with_the_pool():
    """The last slot of the last layer is the pool's last bytes; one byte less is too small a pool."""
    arguments = all_layers("cpu")
    arguments["slots"][0, 1] = 15
    ops.log_all_layers(*(arguments[name] for name in POOL))
    arguments["pool"] = arguments["pool"][:-1]
    check_refused("log_all_layers", [arguments[name] for name in POOL], "the layers end at slot 11")


@pytest.mark.parametrize("operator", [*PARAMETERS, "open_window"])
@pytest.mark.parametrize("home", [pytest.param("cuda", marks=needs_gpu)])
def test_tensors_of_two_devices(operator, home):
    make = a_batch if operator == "open_window" else all_layers
    check_devices(operator, functools.partial(make, home), PARAMETERS.get(operator, OPEN))


@pytest.mark.parametrize("home", [pytest.param("cuda", marks=needs_gpu)])
def test_packing_is_for_the_cpu(home):
    arguments = all_layers(home)
    arguments["packing"] = torch.zeros(4, 8, dtype=torch.int32, device=home)
    check_refused("log_all_layers", [arguments[name] for name in POOL], "pass None for a cache on the GPU")
