# SPDX-License-Identifier: Apache-2.0
"""The operators against plain Python over drawn inputs, with faults injected to see that the comparison would notice.

What `notebooks/02_kernel_correctness.ipynb` shows; the full grid is in `tests/kernels/test_ops*.py`.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from nwor import ops
from nwor_lab import machine, paths, results
from nwor_lab.operators.inputs import (
    ACCEPTANCE,
    LAYOUTS,
    Pool,
    cache_dtype_of,
    make_batch,
    make_cache,
    make_mask,
    make_scale,
    make_slots,
    make_staging,
    make_targets,
    make_vectors,
    make_window,
)
from nwor_lab.operators.reference import quantise
from nwor_lab.operators.twins import run_both
from nwor_lab.plots import style

ORDERS = ("LBNH", "LBHN", "BLHN")
CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Case:
    """One call of one operator."""

    operator: str
    layout: str
    cache: str
    args: tuple[Any, ...]


def schemas() -> pd.DataFrame:
    """The operators as torch knows them, and the devices that this build has them for."""
    ops.load()
    rows = []
    for name in ops.OPERATORS:
        operator = getattr(torch.ops._C_cache_ops, name).default
        devices = [
            key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        ]
        written = [
            argument.name
            for argument in operator._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        rows.append({"operator": name, "writes": ", ".join(written), "registered for": " ".join(devices)})
    return pd.DataFrame(rows).set_index("operator")


def draw(device: str, cases: int, seed: int) -> Iterator[Case]:
    """Calls with drawn dtypes, layouts, shapes, strides, slots and accepted rows; `cases` times each operator once."""
    rng = random.Random(seed)
    for number in range(cases):
        yield from draw_layerwise(device, rng, seed + number)
        yield from draw_all_layers(device, rng, seed + number)


def draw_layerwise(device: str, rng: random.Random, seed: int) -> Iterator[Case]:
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    cache, layout = rng.choice(CACHE_DTYPES), rng.choice(LAYOUTS)
    heads, head_size, block_size = rng.choice(((2, 8, 16), (4, 16, 4), (3, 20, 8), (1, 64, 16)))
    tokens = rng.randint(1, 12)
    stored = cache_dtype_of(dtype, cache)
    key, value = make_vectors(
        rng.choice(("packed", "qkv", "heads first")), tokens, heads, head_size, dtype, device, seed
    )
    kind = rng.choice(("none", "scalar", "token", "head")) if cache != "auto" else "none"
    scales = make_scale(kind, tokens, heads, device, seed), make_scale(kind, tokens, heads, device, seed + 1)
    slots = make_slots(tokens, 4 * block_size, device, seed)
    mask = make_mask(rng.choice(ACCEPTANCE), tokens, device)
    caches = make_cache(layout, 4, block_size, heads, head_size, stored, device)
    staging = make_staging(tokens, heads, head_size, stored, device)
    log = make_staging(tokens, heads, head_size, stored, device)[:2]
    accepted = torch.tensor([rng.randint(0, int((slots >= 0).sum()))], device=device)
    yield Case("log_cache_slots", layout, cache, (*caches, slots, *log))
    yield Case("stage_kv_cache", layout, cache, (key, value, slots, *staging, cache, *scales))
    yield Case("commit_staged_kv_cache", layout, cache, (*staging, *caches, accepted))
    yield Case("commit_draft_layer", layout, cache, (key, value, *caches, slots, mask, cache, *scales))
    yield Case("restore_rejected_drafts", layout, cache, (*log, slots, mask, *caches))


def draw_all_layers(device: str, rng: random.Random, seed: int) -> Iterator[Case]:
    order = rng.choice(ORDERS)
    packed = device == "cpu" and order != "LBNH" and rng.random() < 0.5
    heads, block_size, slot_bytes = rng.choice(((2, 16, 16), (4, 4, 32), (1, 8, 64)))
    element_size = rng.choice((1, 2, 4)) if packed else 0
    pool = Pool(order, rng.randint(1, 4), 4, heads, block_size, slot_bytes, device, element_size, mini_blocks=4)
    num_drafts = [rng.randint(1, 4) for _ in range(3)]
    num_rejected = [rng.randint(0, drafts) for drafts in num_drafts]
    slots, *decisions = make_window(num_drafts, num_rejected, 4 * block_size, device, seed)
    layout, cache = order + (", packed" if packed else ""), "raw bytes"
    yield Case("log_all_layers", layout, cache, pool.arguments(slots))
    yield Case("restore_all_layers", layout, cache, (*pool.arguments(slots), *decisions, pool.counts))
    yield Case("commit_all_layers", layout, cache, (*pool.arguments(slots), *decisions, pool.counts))
    yield draw_open_window(device, rng, seed, pool.counts)


def draw_open_window(device: str, rng: random.Random, seed: int, counts: Tensor) -> Case:
    """A batch of prefills, decodes and verify steps, some too long for the window."""
    queries = [rng.randint(0, 6) for _ in range(rng.randint(1, 8))]
    num_logits = [rng.choice((0, 1, rows, rows, rng.randint(0, 7))) for rows in queries]
    batch = make_batch(queries, num_logits, 64, device, seed)
    targets = make_targets(len(queries) + rng.randint(0, 2), 4, batch[2].numel() + 2, device)
    if rng.random() < 0.5:
        return Case("open_window", "stage", "", (*batch, *targets, counts))
    return Case("open_window", "cow", "", (*batch, *targets[:2], None, None, counts))


def devices(device: str = "") -> list[str]:
    """The devices to compare on: the one named, else the CPU, and CUDA where there is a GPU.

    Raises:
        ValueError: a device that is neither `cpu` nor `cuda`, or no GPU for `cuda`.
    """
    here = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if device and device not in here:
        raise ValueError(f"device is {' or '.join(here)} on this machine, or empty for all; got {device!r}")
    return [device] if device else here


def with_vllm(on: list[str]) -> list[str]:
    """Those of the devices that the vLLM installed here has a cache writer for: its builds are for one device each."""
    from vllm import _custom_ops  # noqa: F401 - loads vLLM's operators

    has = {
        "cpu": hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"),
        "cuda": hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"),
    }
    return [device for device in on if has[device]]


def everywhere(check: Callable[[str], pd.DataFrame], on: list[str]) -> pd.DataFrame:
    """The rows of `check(device)` of all devices, each with its `device`."""
    return pd.concat([check(device).assign(device=device) for device in on], ignore_index=True)


def recorded() -> pd.DataFrame:
    """What `compare` found on a GPU, as recorded in `data/recorded`."""
    return results.read_table("kernel_check", paths.RECORDED)


def compare(device: str, cases: int, seed: int) -> pd.DataFrame:
    """Run drawn calls beside the reference. Tidy rows: calls, bytes compared and bytes differing, by operator."""
    found = []
    for case in draw(device, cases, seed):
        compared, differing = run_both(case.operator, *case.args).compare()
        found.append((case.operator, case.layout, case.cache, 1, compared, differing))
    names = ["operator", "layout", "cache", "calls", "bytes_compared", "bytes_differing"]
    sums = pd.DataFrame(found, columns=names).groupby(names[:3], as_index=False).sum()
    rows = sums.melt(id_vars=names[:3], var_name="metric", value_name="value")
    rows["unit"] = rows["metric"].map({"calls": "calls"}).fillna("bytes")
    rows["device"] = device
    return rows


# -- injected faults ---------------------------------------------------------------------------------------------------

Fault = tuple[str, str, Callable[[list[Any]], list[Any]]]


def swap(index: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda args: [change(arg) if at == index else arg for at, arg in enumerate(args)]


# Faults that earlier work really had, each as the wrong argument that amounts to it.
FAULTS: tuple[Fault, ...] = (
    ("layout guessed from the shape", "commit_draft_layer", swap(2, lambda cache: cache.transpose(1, 2))),
    ("scale ignored", "commit_draft_layer", swap(7, lambda scale: None)),
    ("mask one row late", "commit_draft_layer", swap(5, lambda mask: mask.roll(1))),
    ("keys committed, values not", "commit_draft_layer", swap(3, lambda cache: cache.clone())),
    ("rejected rows kept", "restore_rejected_drafts", swap(3, lambda mask: ~mask)),
    ("slots of the captured step", "log_cache_slots", swap(2, lambda slots: slots.roll(1))),
    ("one staged row too few", "commit_staged_kv_cache", swap(6, lambda accepted: accepted - 1)),
    (
        "first layer only",
        "restore_all_layers",
        lambda args: [*args[:1], args[1][:1], *args[2:5], args[5][:1], *args[6:]],
    ),
    ("bonus row taken for a draft", "commit_all_layers", swap(7, lambda rejected: rejected + 1)),
    ("another request's rejections", "commit_all_layers", swap(7, lambda rejected: rejected.flip(0))),
    ("prefill rows taken for drafts", "open_window", swap(1, lambda logits: logits + logits.new_tensor([0, 0, 0, 3]))),
    ("slots of the step before", "open_window", swap(2, lambda slots: slots.roll(1))),
)


def injected_faults(device: str) -> pd.DataFrame:
    """Give each operator an argument that amounts to a known fault. Tidy rows: bytes that then differ, by fault."""
    found = []
    for fault, operator, change in FAULTS:
        args = list(fixed_call(operator, device))
        compared, differing = run_both(operator, *args, given=change(args)).compare()
        found.append({"fault": fault, "operator": operator, "bytes_differing": differing, "bytes_compared": compared})
    return pd.DataFrame(found)


def fixed_call(operator: str, device: str) -> tuple[Any, ...]:
    """A call in which every fault of `FAULTS` has something to spoil: four tokens, four heads, blocks of four."""
    key, value = make_vectors("packed", 4, 4, 8, torch.bfloat16, device)
    slots, mask = torch.tensor([6, 1, 11, 4], device=device), torch.tensor([True, True, False, False], device=device)
    scale = torch.tensor([0.37], device=device)
    caches = make_cache("NHD", 4, 4, 4, 8, torch.uint8, device)
    staging = make_staging(4, 4, 8, torch.uint8, device)
    staging[2].copy_(slots)
    staging[3][0] = 4
    pool = Pool("LBHN", 2, 4, 2, 4, 16, device)
    rows = torch.tensor([[6, 1, 11], [4, -1, -1]], device=device)
    num_drafts, num_rejected = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=device)
    decisions = (num_drafts, num_rejected, torch.zeros_like(num_rejected), pool.counts)
    batch = make_batch([3, 2, 4], [3, 1, 1], 64, device)  # a verify step, a decode after it, a prefill
    targets = make_targets(3, 4, batch[2].numel(), device)
    calls: dict[str, tuple[Any, ...]] = {
        "commit_draft_layer": (key, value, *caches, slots, mask, "fp8", scale, scale),
        "commit_staged_kv_cache": (*staging, *caches, torch.tensor([2], device=device)),
        "log_cache_slots": (*caches, slots, *staging[:2]),
        "restore_rejected_drafts": (*staging[:2], slots, mask, *caches),
        "open_window": (*batch, *targets, pool.counts),
        "restore_all_layers": (*pool.arguments(rows), *decisions),
        "commit_all_layers": (*pool.arguments(rows), *decisions),
    }
    return calls[operator]


# -- claims ------------------------------------------------------------------------------------------------------------


def claim(run: results.Run, compared: pd.DataFrame, faults: pd.DataFrame, vllm: pd.DataFrame) -> None:
    """Record what must hold on each device of `compare`, `injected_faults` and `against_vllm`."""
    for device, missed in (faults["bytes_differing"] == 0).groupby(faults["device"]).sum().items():
        _claim_equal(run, f"plain Python, {device}", compared[compared["device"] == device])
        run.claim(f"injected faults that go unnoticed, {device}", 0, int(missed), missed == 0)
    for device, rows in vllm.groupby("device"):
        _claim_equal(run, f"vLLM's own writer, {device}", rows)
    if refused := machine.why_no_fp8_cache():
        run.skip("bytes that differ from vLLM's own writer, cpu, fp8 caches", 0, refused)


def _claim_equal(run: results.Run, other: str, rows: pd.DataFrame) -> None:
    compared, differing = (
        int(rows.loc[rows["metric"] == f"bytes_{name}", "value"].sum()) for name in ("compared", "differing")
    )
    run.claim(f"bytes that differ from {other}", 0, differing, differing == 0 < compared)


# -- fp8 ---------------------------------------------------------------------------------------------------------------


def against_vllm(device: str, seed: int) -> pd.DataFrame:
    """Commit what vLLM's own writer of `device` writes too. Tidy rows: bytes compared and differing, by cache dtype.

    Cache dtypes that vLLM does not have on this machine are left out: `nwor_lab.machine` says which and why.
    """
    rows = []
    caches = [cache for cache in CACHE_DTYPES if not machine.refuse_cache(cache)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cache in caches:
            key, value = make_vectors("packed", 64, 2, 32, dtype, device, seed)
            slots = make_slots(64, 256, device, seed)
            scales = torch.tensor([0.3], device=device), torch.tensor([1.7], device=device)
            ours = [torch.zeros(8, 32, 2, 32, dtype=cache_dtype_of(dtype, cache), device=device) for _ in range(2)]
            ops.commit_draft_layer(key, value, ours[0], ours[1], slots, slots >= 0, cache, *scales)
            theirs = written_by_vllm(key, value, ours[0], slots, cache, scales)
            pairs = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True)]
            differing = sum(int((a != b).sum()) for a, b in pairs)
            common = {"dtype": str(dtype).removeprefix("torch."), "cache": cache, "unit": "bytes", "device": device}
            rows.append({**common, "metric": "bytes_compared", "value": sum(a.numel() for a, _ in pairs)})
            rows.append({**common, "metric": "bytes_differing", "value": differing})
    return pd.DataFrame(rows)


def written_by_vllm(
    key: Tensor, value: Tensor, like: Tensor, slots: Tensor, cache: str, scales: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Key and value caches shaped like `like`, [B, N, H, D], as vLLM's own writer of that device fills zeros."""
    from vllm import _custom_ops

    blocks, size, heads, width = like.shape
    if like.device.type == "cuda":
        caches = [torch.zeros_like(like) for _ in range(2)]
        _custom_ops.reshape_and_cache_flash(key, value, *caches, slots, cache, *scales)
        return caches
    packed = torch.zeros(blocks, heads, 2 * size, width, dtype=like.dtype)
    keys, values = packed.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        key, value, keys, values, slots, "vec", float(scales[0]), float(scales[1]), cache
    )
    keys = keys.reshape(blocks, heads, width, size).transpose(2, 3)  # the `vec` packing transposes keys in a block
    return [keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()]


def rounding() -> pd.DataFrame:
    """How far each of vLLM's two writers lands from the value, over one binade.

    Rows: writer, value, error in percent of the value, and in steps of e4m3, which are of 1/8 there.
    """
    values = torch.linspace(1, 2, 4097)[:-1]
    rows = []
    for writer, device in (("CPU writer", "cpu"), ("CUDA writer", "cuda")):
        stored = quantise(values, 1.0, "e4m3", device).view(torch.float8_e4m3fn).float()
        off = stored - values
        columns = {"value": values, "error": 100 * off / values, "steps": 8 * off}
        rows.append(pd.DataFrame({"writer": writer, **{name: column.numpy() for name, column in columns.items()}}))
    return pd.concat(rows, ignore_index=True)


def draw_rounding(run: results.Run, frame: pd.DataFrame) -> Path:
    """Draw the error of an e4m3 cache by writer."""
    fig, ax = style.figure(height=1.9)
    for (writer, group), look in zip(frame.groupby("writer"), ("-", "--"), strict=True):
        color = style.OTHER[0] if look == "-" else style.OTHER[1]
        ax.plot(group["value"], group["error"], look, color=color, label=f"vLLM's {writer}", linewidth=1)
    ax.set(xlabel="key or value element / scale", ylabel="error in the cache (%)")
    style.legend(ax)
    caption = (
        "Error of an fp8 e4m3 KV cache over one binade. vLLM's CUDA writer rounds to nearest even, its CPU writer "
        "towards zero: its mean error is twice as large, and always makes vectors shorter."
    )
    return style.save(fig, run, "fp8_rounding", frame, caption)


def mean_error(frame: pd.DataFrame) -> dict[str, float]:
    """Mean absolute error in steps of the format, by writer."""
    return {writer: float(np.abs(group["steps"]).mean()) for writer, group in frame.groupby("writer")}
