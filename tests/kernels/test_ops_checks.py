# SPDX-License-Identifier: Apache-2.0
"""Each wrong input of a per-layer operator is refused with an error that names it; no byte has changed."""

import pytest
import torch
from devices import each_device, needs_gpu

from nwor import ops
from nwor_lab.operators.inputs import make_cache, make_staging, make_vectors
from tests.kernels.wrong_inputs import Arguments, Change, cases, check_devices, check_wrong, put


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


@each_device
@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_LAYERWISE))
def test_layerwise(operator, change, message, device):
    check_wrong(operator, layerwise(device), PARAMETERS[operator], change, message)


@pytest.mark.parametrize(("operator", "change", "message"), cases(WRONG_VALUES))
def test_layerwise_values(operator, change, message):
    check_wrong(operator, layerwise("cpu"), PARAMETERS[operator], change, message)


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


@pytest.mark.parametrize("operator", PARAMETERS)
@pytest.mark.parametrize("home", [pytest.param("cuda", marks=needs_gpu)])
def test_tensors_of_two_devices(operator, home):
    def make() -> Arguments:
        arguments = layerwise(home)
        if operator in ("stage_kv_cache", "commit_draft_layer"):
            one = torch.ones(1, device=home)
            under_fp8(lambda a: a.update(k_scale=one, v_scale=one.clone()))(arguments)
        return arguments

    check_devices(operator, make, PARAMETERS[operator])
