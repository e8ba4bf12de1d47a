# SPDX-License-Identifier: Apache-2.0
"""Time of one layer's verify attention and write on a GPU, beside what vLLM does in the same place.

    python -m nwor_lab.microbench.attention --out results/attention

and the sweep of `nwor tune`, which finds the configurations that are taken.

Each sample is one replay of a CUDA graph after a read of 256 MiB, as a layer's weights are read before its attention;
what is compared is sampled in turns. Every request has k + 1 rows (a token and k drafts) behind `context` positions in
pages of 16 slots, at random places of the cache. What a sample has to do is the same for all: read the prefix, attend,
and leave the rows stored.

    nwor             `nwor.attention.verify`, rows to staging, the tuned configuration; one launch
    flash            `reshape_and_cache_flash`, then FlashAttention 3 as vLLM calls it in a full graph: a schedule made
                     outside the graph for at most 32 splits
    flash 1 ... 16   the same with that many splits fixed, without a schedule: "best split" is the fastest of all
    triton           `triton_reshape_and_cache_flash`, then vLLM's `unified_attention`
    write            `reshape_and_cache_flash` alone
    empty            one kernel of one thread that does nothing

Metric `between` is what a layer takes between its neighbours: projection, rope, this, output projection, eight layers
with weights of their own in one graph, whose replay is divided by eight; `none` is the same without it. There the new
rows lie in the L2 cache, and each launch waits for the kernel before.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nwor.attention.configs import (
    H200,
    LARGEST_APART,
    Config,
    Device,
    next_power_of_2,
    plan_split_combine,
    row_tiles,
    shrunk,
)
from nwor_lab import results
from nwor_lab.microbench.attention_inputs import BATCHES, HEAD_SIZE, KEYS, LAYERS, Shape, Windows, weights
from nwor_lab.microbench.operators import Timer, compact, empty

HEADS = ((32, 32), (32, 8), (16, 16), (16, 4))  # (query heads, KV heads): 32 and 8 KV heads, whole and at TP=2
CONTEXTS, CACHES = (512, 2048, 8192), ("bf16", "fp8")
SWEPT = (560, 2096, 8240)  # no multiples of a tile, as most are not
NOISE = 1.02  # two medians of a sweep that are no further apart are called equal when configurations are chosen
ENTRY_KEYS = [name for name in KEYS if name != "context"]  # one entry serves all contexts
LOST, LAUNCH = 0.98, 1.2
"""Of vLLM's time, and us: a batch is left to vLLM where the kernel saves less than either. The fastest of many
candidates is less fast when it is measured again, and in a step a launch takes longer than alone."""


# -- measuring -----------------------------------------------------------------------------------------------------


def shapes(
    heads: Iterable[tuple[int, int]] = HEADS, batches: Iterable[int] = BATCHES, contexts: Iterable[int] = CONTEXTS,
    caches: Iterable[str] = CACHES, ks: Iterable[int] = (8,), head_size: int = HEAD_SIZE,
) -> list[Shape]:  # fmt: skip
    """Every shape of the grid."""
    return [
        Shape(*pair, batch, context, cache, k, head_size)
        for k, cache, pair, batch, context in itertools.product(ks, caches, heads, batches, contexts)
    ]


def measure(chosen: Sequence[Shape] | None = None, repeats: int = 30, seed: int = 0) -> pd.DataFrame:
    """Time everything on every shape. One row a sample: op, the shape, bytes, and the tidy columns.

    Metric `error` is the relative error of each call's output against fp32, `between` the time of a layer as a whole.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    timer, found = Timer(clean=True), []
    layers = functools.cache(weights)
    for shape in chosen or shapes():
        windows = Windows(shape, seed)
        calls = windows.calls()
        common = asdict(shape) | {"bytes": shape.bytes}
        found += [
            common | {"op": op, "repeat": repeat, "metric": "time", "unit": "us", "value": value}
            for op, repeat, value in timer.sample(calls, repeats)
        ]
        found += [
            common | {"op": op, "metric": "error", "unit": "relative", "value": windows.error(call)}
            for op, call in calls.items()
            if op not in ("empty", "write")
        ]
        found += [
            common | {"op": op, "repeat": repeat, "metric": "between", "unit": "us", "value": value / LAYERS}
            for op, repeat, value in timer.sample(windows.between(calls, layers(shape.heads, shape.kv_heads)), repeats)
        ]
        print(shape, ratio(found), flush=True)
        del windows, calls
    return results.tidy(found, mode="", model="", seed=seed)


def net(frame: pd.DataFrame) -> pd.DataFrame:
    """Median times with the empty kernel's taken off: one row a shape, one column an op, us.

    `vanilla` is the faster of vLLM's two backends (any split of FlashAttention 3), `ratio` is nwor's time over it.
    """
    times = frame[frame["metric"] == "time"]
    table = times.pivot_table(index=KEYS, columns="op", values="value", aggfunc="median")
    table = table.sub(table["empty"], axis=0).drop(columns="empty")
    table["vanilla"] = table.drop(columns=["nwor", "write"]).min(axis=1)
    table["ratio"] = table["nwor"] / table["vanilla"]
    return table


def ratio(found: list[dict[str, Any]]) -> str:
    """The last shape's figures, to look at while it runs."""
    frame = pd.DataFrame(found)
    last = frame[(frame[KEYS] == frame.iloc[-1][KEYS]).all(axis=1)]
    table = net(last).iloc[0]
    errors = last[last["metric"] == "error"].set_index("op")["value"]
    shown = ", ".join(f"{op} {value:.1f}" for op, value in table.items() if op != "ratio")
    return f"ratio {table['ratio']:.3f} ({shown}) errors " + ", ".join(f"{op} {e:.1e}" for op, e in errors.items())


# -- the sweep -----------------------------------------------------------------------------------------------------


def kernels(shape: Shape, device: Device = H200) -> list[Config]:
    """The binaries that are tried: tiles, warps, stages, bounds of registers, warps apart; whole and split."""
    most = (2, 3) if shape.element == 1 else (2,)
    rows, width = rows_of(shape, device)[0], next_power_of_2(shape.head_size)
    kept = {(32, 4): (3, 4), (64, 4): (3, 4), (128, 4): most, (128, 8): most}
    found = [Config(tile, warps, stage) for (tile, warps), stages in kept.items() for stage in stages]
    if shape.heads == shape.kv_heads:
        found += [Config(32, 4, stage, registers=128) for stage in kept[32, 4]]
    if rows * width <= LARGEST_APART:
        few = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3))
        found += [Config(tile, warps, stage, apart=True) for tile, warps, stage in few]
    found = list(dict.fromkeys(shrunk(kernel, rows, shape.head_size, shape.element, device) for kernel in found))
    return [replace(kernel, splits=splits) for splits in (1, 2) for kernel in found]


def rows_of(shape: Shape, device: Device) -> tuple[int, int]:
    """Packed rows of a tile, and tiles of a window and KV head."""
    return row_tiles(shape.query, shape.group, device.largest_tile(shape.head_size))


def programs(shape: Shape, device: Device) -> int:
    """How many there are without splits."""
    return shape.batch * shape.kv_heads * rows_of(shape, device)[1]


def filled(device: Device) -> int:
    """Programs that fill the device: splits are combined by powers of 2."""
    return 1 << (device.multiprocessors.bit_length() - 1)


def divisions(
    shape: Shape, kernel: Config, device: Device = H200, least: Sequence[int] = (64, 128, 256, 512, 2048, 4096)
) -> list[Config]:
    """The kernel with every worthwhile number of splits and of tiles that one has at least."""
    if kernel.splits == 1:
        return [kernel]
    splits = {2} | {int(fill * filled(device) / programs(shape, device)) for fill in (0.5, 1, 2)}
    return [
        replace(kernel, splits=number, least=positions // kernel.tile)
        for number in sorted(splits & set(range(2, 65)))
        for positions in least
        if positions >= kernel.tile
    ]


def filling(shape: Shape, kernel: Config, device: Device = H200) -> Config:
    """The kernel as it is, or, if it is to be split, with as many splits as fill the GPU once."""
    if kernel.splits == 1:
        return kernel
    splits = min(64, max(2, filled(device) // programs(shape, device)))
    return replace(kernel, splits=splits, least=128 // kernel.tile)


def _compile(job: tuple[Shape, list[Config]]) -> None:
    shape, configs = job
    windows = Windows(replace(shape, context=64))
    for config in configs:
        windows.nwor(config)()
    torch.cuda.synchronize()


def compile_all(jobs: Sequence[tuple[Shape, list[Config]]], workers: int) -> None:
    """Fill Triton's cache with each configuration of each job, on a small problem like its shape."""
    parts = [(shape, configs[n::workers]) for shape, configs in jobs for n in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, [part for part in parts if part[1]], chunksize=1)


def sweep(chosen: Sequence[Shape], repeats: int = 5, workers: int = 14) -> pd.DataFrame:
    """Time of every candidate on every shape: the shape, the configuration, `value` in us with the empty kernel off.

    `vanilla` is, in the same turns, the time of vLLM's faster backend with its write, as vLLM calls them.
    First every kernel, whole and in some splits; then the fastest few of each kind with every division of the prefix.
    """
    device = Device.of("cuda")
    kinds = {(s.heads, s.kv_heads, s.cache, s.k): kernels(s, device) for s in chosen}
    jobs, known = {replace(shape, context=0): list[Config]() for shape in chosen}, set()
    for shape, configs in jobs.items():
        for kernel in kinds[shape.heads, shape.kv_heads, shape.cache, shape.k]:
            for config in divisions(shape, kernel, device, (512,)):
                rows = shape.query * shape.group
                combined = plan_split_combine(
                    config.splits, programs(shape, device), rows, shape.head_size, device.multiprocessors
                )[1:]
                binary = (
                    shape.group,
                    shape.query,
                    shape.cache,
                    replace(config, splits=config.splits > 1, least=0),
                    combined,
                )
                if binary not in known:
                    known.add(binary)
                    configs.append(config)
    compile_all(list(jobs.items()), workers)
    timer, found = Timer(clean=True), []

    def time(shape: Shape, windows: Windows, configs: list[Config]) -> None:
        backends = windows.vanilla()
        calls = {"empty": empty, **backends}
        calls |= {str(n): windows.nwor(config) for n, config in enumerate(configs)}
        frame = pd.DataFrame(timer.sample(calls, repeats), columns=["op", "repeat", "value"])
        medians = frame.groupby("op")["value"].median()
        medians -= medians["empty"]
        vanilla = medians[[*backends]].min()
        for n, config in enumerate(configs):
            value = medians[str(n)] if medians[str(n)] > 0 else math.nan  # not above the empty kernel: disturbed
            found.append(asdict(shape) | asdict(config) | {"value": value, "vanilla": vanilla})

    for key, same in itertools.groupby(chosen, key=lambda s: (s.heads, s.kv_heads, s.cache, s.k)):
        for _, contexts in itertools.groupby(same, key=lambda s: s.batch):
            everywhere = list(contexts)
            first = [filling(everywhere[0], kernel, device) for kernel in kinds[key]]
            for shape in everywhere:
                time(shape, Windows(shape), first)
            frame = pd.DataFrame(found[-len(first) * len(everywhere) :])
            logs = frame["value"].map(math.log).groupby(frame.index % len(first)).mean().to_numpy()
            second = []
            for split in (False, True):
                ranked = [n for n in logs.argsort() if (first[n].splits > 1) == split]
                second += [config for n in ranked[:3] for config in divisions(everywhere[0], first[n], device)]
            for shape in everywhere:
                time(shape, Windows(shape), second)
                print(min(found[-len(second) :], key=lambda row: row["value"]), flush=True)
    return pd.DataFrame(found)


def best(swept: pd.DataFrame, steps: pd.DataFrame | None = None, head_size: int = HEAD_SIZE) -> list[dict[str, Any]]:
    """Of each (heads, batch, cache, k) the configuration that loses least where it loses most.

    What it loses at a context is its time over that of the fastest there: one configuration serves all contexts, since
    a captured graph does not know them. Those that nowhere take `NOISE` times vLLM's time come first. `slower_from` is
    the least context at which the chosen one takes `LOST` times that, or saves less than `LAUNCH`, or at which whole
    steps took no less than vanilla's, 0 for none.

    Args:
        steps: `ratio` of a whole step with the kernel to vanilla's, by the columns of a shape on one rank: a layer
            alone is not timed under the load of a step, which moves the clock.
        head_size: of all that was swept.
    """
    knobs, found = {name: type(value) for name, value in asdict(Config()).items()}, []
    of_steps: dict[Any, list[int]] = {}
    if steps is not None:
        of_steps = steps[steps["ratio"] >= 1].groupby(ENTRY_KEYS)["context"].apply(list).to_dict()
    for key, group in swept.groupby(ENTRY_KEYS):
        heads, kv_heads, batch, cache, k = key
        table = group.pivot_table(
            index=list(knobs), columns="context", values=["value", "vanilla"], aggfunc="min"
        ).dropna()
        times, lost = table["value"], (table["value"] / table["value"].min()).max(axis=1)
        vanilla = table["vanilla"].min()
        slower = (times > NOISE * vanilla).any(axis=1)
        chosen = lost[~slower].idxmin() if not slower.all() else lost.idxmin()
        slow = times.columns[times.loc[chosen] > (LOST * vanilla).clip(upper=vanilla - LAUNCH)]
        contexts = [*slow, *of_steps.get(key, [])]
        shape = Shape(heads, kv_heads, batch, 0, cache, k)
        entry = {"cache_bytes": shape.element, "query": shape.query, "group": shape.group, "head_size": head_size}
        entry |= {"programs": batch * kv_heads, "slower_from": int(min(contexts, default=0))}
        found.append(entry | {name: kind(value) for (name, kind), value in zip(knobs.items(), chosen, strict=True)})
    return found


def by_shape(steps: pd.DataFrame) -> pd.DataFrame:
    """Whole steps by the columns of a shape on one rank, as `best` takes them.

    Args:
        steps: lines of `endtoend.gpu_steps` of mode `stage`, of models of 32 query heads (`nwor_lab.engines.shapes`).

    Returns:
        Them with `heads` and `kv_heads` of a rank, `cache`, `ratio`, and as `context` the one swept for their prompt.
    """
    return steps.assign(
        heads=HEADS[0][0] // steps["tp"],
        kv_heads=steps["kv_heads"] // steps["tp"],
        context=steps["prompt"].map(dict(zip(CONTEXTS, SWEPT, strict=True))),
        cache=steps["kv_cache_dtype"].map({"auto": "bf16", "fp8": "fp8"}),
        ratio=steps["step"],
    )


# -- the command ---------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nwor_lab.microbench.attention", description="Time the verify attention."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.parquet and what made it")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--heads", default=",".join(f"{q}x{kv}" for q, kv in HEADS), help="query heads x KV heads")
    parser.add_argument("--ks", default="8", help="drafts of a window")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here; the recorded results are in data/recorded")
    pairs = [(int(q), int(kv)) for q, kv in (pair.split("x") for pair in options.heads.split(","))]
    batches, ks = ([int(number) for number in text.split(",")] for text in (options.batches, options.ks))
    chosen = shapes(pairs, batches, CONTEXTS, options.caches.split(","), ks)
    times = measure(chosen, options.repeats)
    results.write_table(options.out / "attention.parquet", compact(times))
    results.write_provenance(options.out / "attention.parquet", vars(options))
    print(json.dumps({str(key): round(value, 3) for key, value in net(times)["ratio"].items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
