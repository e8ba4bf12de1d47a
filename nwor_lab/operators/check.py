# SPDX-License-Identifier: Apache-2.0
"""The operators against plain Python over drawn inputs, with faults injected to see that the comparison would notice.

What `notebooks/02_kernels.ipynb` shows; more calls, and every past bug, are in `tests/kernels/test_ops*.py`.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nwor import ops
from nwor_lab import machine
from nwor_lab.faults import COMMIT, FAULTS, Fault
from nwor_lab.operators.inputs import (
    CACHE_DTYPES,
    DTYPES,
    ORDERS,
    cache_dtype_of,
    calls,
    draw,
    make_cache,
    make_slots,
    make_staging,
    make_vectors,
)
from nwor_lab.operators.reference import Twins, raw, run_both
from nwor_lab.run import results

VLLM_WRITERS = {"cpu": ("_C", "cpu_attn_reshape_and_cache"), "cuda": ("_C_cache_ops", "reshape_and_cache_flash")}
FEW = 16
"""Calls of each fault: one may have nothing that it could move wrongly."""
BYTES = ("bytes_compared", "bytes_differing")


def devices(device: str = "") -> list[str]:
    """The devices to compare on: the one named, else the CPU, and CUDA where there is a GPU."""
    return [device] if device else ["cpu"] + ["cuda"] * torch.cuda.is_available()


def on_each_device(check: Callable[[str], pd.DataFrame], on: list[str]) -> pd.DataFrame:
    """The rows of `check(device)` of all devices, each with its `device`."""
    return pd.concat([check(device).assign(device=device) for device in on], ignore_index=True)


# -- drawn calls -------------------------------------------------------------------------------------------------------


def compare(device: str, cases: int, seed: int) -> pd.DataFrame:
    """Run `cases` drawn calls of each operator beside the reference. Tidy rows: bytes compared and bytes differing, by
    operator."""
    drawn = [call for number in range(cases) for call in draw(device, seed + number).items()]
    found = pd.DataFrame(
        [(name, *run_both(name, *args).compare()) for name, args in drawn], columns=["operator", *BYTES]
    )
    sums = found.groupby("operator", as_index=False).sum()
    return sums.melt("operator", var_name="metric").assign(unit="bytes", device=device)


def beside(function: Callable[..., None], operator: str, cases: int, seed: int) -> dict[str, int]:
    """Run a function in an operator's place on drawn calls, of caches that are not packed, and compare all memory that
    either could have written: the bytes compared and differing."""
    pairs = []
    for number in range(cases):
        args = calls("cpu", seed + number, order=ORDERS[number % len(ORDERS)])[operator]
        twins = Twins(*args)
        function(*twins.copies)
        getattr(ops, operator)(*args)
        pairs.append(twins.compare())
    return _added(pairs)


def bytes_apart(left: Tensor, right: Tensor) -> dict[str, int]:
    """The bytes of two tensors, compared and differing."""
    differing = raw(left.contiguous()) != raw(right.contiguous())
    return _added([(differing.numel(), int(differing.sum()))])


def _added(pairs: Iterable[tuple[int, int]]) -> dict[str, int]:
    """Sums over pairs of bytes compared and differing."""
    return dict(zip(BYTES, map(sum, zip(*pairs, strict=True)), strict=True))


def by_operator(compared: pd.DataFrame, vllm: pd.DataFrame) -> pd.DataFrame:
    """What `compare` and `against_vllm` found: a line an operator, or a cache dtype of vLLM's writer, and for each
    device the bytes compared and differing."""
    parts = [compared.assign(against="plain Python", what=compared["operator"])]
    if len(vllm):
        parts.append(vllm.assign(against="vLLM's own writer", what="cache " + vllm["cache"]))
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows["metric"].isin(BYTES)]
    rows = rows.assign(metric=rows["metric"].str.removeprefix("bytes_"))
    wide = rows.pivot_table(index=["against", "what"], columns=["device", "metric"], values="value", aggfunc="sum")
    return wide.rename_axis(columns=["bytes on", ""]).astype("Int64")


# -- injected faults ---------------------------------------------------------------------------------------------------


def injected_faults(device: str) -> pd.DataFrame:
    """Give each operator the wrong arguments of each fault of the catalogue. Tidy rows: bytes that differ then, by
    fault, over a few calls."""
    rows = []
    for fault in FAULTS.values():
        if fault.change is None:
            continue
        pairs = []
        for seed in range(FEW):
            args = calls(device, seed)[fault.operator]
            named = dict(zip(ops.OPERATORS[fault.operator], args, strict=False))
            with_fault = [*(named | fault.change(named)).values()]
            pairs.append(run_both(fault.operator, *args, given=with_fault).compare())
        rows.append({"fault": fault.name, "operator": fault.operator, "breaks": fault.breaks} | _added(pairs))
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Suspect:
    """`commit_all_layers` as it is or, where it has a fault, with that fault's wrong arguments."""

    name: str
    fault: Fault | None = None

    def __call__(self, *args: Any) -> None:
        named = dict(zip(ops.OPERATORS[COMMIT], args, strict=False))
        ops.commit_all_layers(**named | (self.fault.change(named) if self.fault and self.fault.change else {}))

    def __repr__(self) -> str:
        return self.name


def suspects(seed: int) -> list[Suspect]:
    """Three commits A, B and C, of which one has a fault of the catalogue; the seed draws which one and which fault."""
    rng = random.Random(seed)
    fault = rng.choice([fault for fault in FAULTS.values() if fault.operator == COMMIT])
    broken = rng.choice("ABC")
    return [Suspect(name, fault if name == broken else None) for name in "ABC"]


def drawn_commit(seed: int) -> tuple[Any, ...]:
    """Drawn arguments of a call of `commit_all_layers` on a poisoned pool of two layers and four heads."""
    return calls("cpu", seed)[COMMIT]


# -- vLLM's own writer -------------------------------------------------------------------------------------------------


def against_vllm(device: str, seed: int, scale: float = 0.3, layout: str = "NHD") -> pd.DataFrame:
    """Write what vLLM's own writer of `device` writes too, by a commit and by staging. Tidy rows: bytes compared and
    differing, by dtype and cache; none where the vLLM here has no writer, since its builds are for one device.

    Cache dtypes that vLLM does not have on this machine are left out: `nwor_lab.machine` says which and why.
    """
    from vllm import _custom_ops  # noqa: F401 - loads vLLM's operators

    namespace, writer = VLLM_WRITERS[device]
    caches = [cache for cache in CACHE_DTYPES if not machine.refuse_cache(cache)]
    rows = []
    for dtype, cache in product(DTYPES, caches if hasattr(getattr(torch.ops, namespace), writer) else ()):
        key, value = make_vectors("packed", 200, 2, 32, dtype, device, seed)
        slots, stored = make_slots(200, 256, device, seed), cache_dtype_of(dtype, cache)
        scales = torch.tensor([scale], device=device), torch.tensor([1.7 * scale], device=device)
        ours, staged = (make_cache(layout, 8, 32, 2, 32, stored, device) for _ in range(2))
        theirs = ours[0].clone(), ours[1].clone()
        ops.commit_draft_layer(key, value, *ours, slots, slots >= 0, cache, *scales)
        staging = make_staging(200, 2, 32, stored, device)
        ops.stage_kv_cache(key, value, slots, *staging, cache, *scales)
        ops.commit_staged_kv_cache(*staging, *staged, staging[3][:1])
        write_as_vllm(key, value, theirs, slots, cache, scales)
        pairs = zip(ours + staged, theirs * 2, strict=True)
        wrong = [raw(mine.contiguous()) != raw(other.contiguous()) for mine, other in pairs]
        numbers = {"bytes_compared": sum(map(Tensor.numel, wrong)), "bytes_differing": int(sum(map(Tensor.sum, wrong)))}
        common = {"dtype": str(dtype).removeprefix("torch."), "cache": cache, "unit": "bytes", "device": device}
        rows += [{**common, "metric": metric, "value": number} for metric, number in numbers.items()]
    return pd.DataFrame(rows)


def write_as_vllm(
    key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor, cache: str, scales: tuple[Tensor, Tensor]
) -> None:
    """Write to key and value caches [B, N, H, D] by vLLM's own writer of their device."""
    from vllm import _custom_ops

    if key.device.type == "cuda":
        _custom_ops.reshape_and_cache_flash(key, value, *caches, slots, cache, *scales)
        return
    # The `vec` packing [B, H, 2 N, D] transposes keys inside a block.
    blocks, size, heads, width = caches[0].shape
    packed_keys = caches[0].permute(0, 2, 3, 1).reshape(blocks, heads, size, width)
    packed = torch.cat([packed_keys, caches[1].transpose(1, 2)], dim=2)
    keys, values = packed.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        key, value, keys, values, slots, "vec", float(scales[0]), float(scales[1]), cache
    )
    caches[0].copy_(keys.reshape(blocks, heads, width, size).permute(0, 3, 1, 2))
    caches[1].copy_(values.transpose(1, 2))


# -- claims ------------------------------------------------------------------------------------------------------------


def claim(
    run: results.Run,
    compared: pd.DataFrame,
    faults: pd.DataFrame,
    vllm: pd.DataFrame,
    by_hand: dict[str, dict[str, int]],
) -> None:
    """Record what must hold on each device of `compare`, `injected_faults` and `against_vllm`, and of what the notebook
    does itself: by what a result is compared with, its `bytes_compared` and `bytes_differing`."""
    for other, sums in by_hand.items():
        _claim_equal(run, other, sums)
    for device, missed in (faults["bytes_differing"] == 0).groupby(faults["device"]).sum().items():
        _claim_equal(run, f"plain Python, {device}", _sums(compared[compared["device"] == device]))
        run.claim(f"injected faults that go unnoticed, {device}", 0, int(missed), missed == 0)
    for device, rows in vllm.groupby("device"):
        _claim_equal(run, f"vLLM's own writer, {device}", _sums(rows))
    if refused := machine.why_no_fp8_cache():
        run.skip("bytes that differ from vLLM's own writer, cpu, fp8 caches", 0, refused)


def _sums(rows: pd.DataFrame) -> dict[str, int]:
    return rows.groupby("metric")["value"].sum().astype(int).to_dict()


def _claim_equal(run: results.Run, other: str, sums: dict[str, int]) -> None:
    differing = sums["bytes_differing"]
    run.claim(f"bytes that differ from {other}", 0, differing, differing == 0 < sums["bytes_compared"])
