# SPDX-License-Identifier: Apache-2.0
"""What the samples of `nwor_lab.gpu.operators` say: medians, and the model of time.

The model of time has two terms, both measured in the same run: an empty kernel, and the bytes that have to move at the
bandwidth of a large copy. Nothing is fitted. `claim` records what lesson 05 claims of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab.gpu.operators import OURS, PEERS
from nwor_lab.run import results

KEYS = ["kv_heads", "cache", "rows", "kept"]
"""Columns that identify a case of table `kernel_times`."""


def select(times: pd.DataFrame, **wanted: Sequence[Any]) -> pd.DataFrame:
    """The samples whose columns have the values `wanted`; the large copy and the row of launches are always kept.

    Raises:
        ValueError: there is no sample of one of the values.
    """
    kept = times
    for column, values in wanted.items():
        there: set[Any] = set(times.loc[times["op"] != "copy", column])
        if missing := sorted(set(values) - there):
            raise ValueError(f"no samples of {column} {missing}, only of {sorted(there)}; others are measured on a GPU")
        kept = kept[kept[column].isin(values) | kept["op"].isin(["copy", "vllm launches"])]
    return kept.astype({"value": float})


def medians(times: pd.DataFrame) -> pd.DataFrame:
    """One row an op and case: median in microseconds, bytes, launches, TB/s and samples."""
    rows = times[(times["metric"] == "time") & (times["rows"] > 0)].astype({"op": str, "cache": str, "value": float})
    groups = rows.groupby(["op", *KEYS, "launches"], as_index=False)
    frame = groups.agg(us=("value", "median"), bytes=("bytes", "first"), samples=("value", "size"))
    return frame.assign(tb_s=frame["bytes"] / frame["us"] / 1e6)


def ceilings(times: pd.DataFrame) -> tuple[float, float]:
    """(TB/s of the large copy, microseconds of the empty kernel), both medians."""
    copies, empties = times[times["op"] == "copy"], times[times["op"] == "empty"]
    return float(copies["bytes"].iloc[0] / copies["value"].median() / 1e6), float(empties["value"].median())


def modelled(times: pd.DataFrame) -> pd.DataFrame:
    """The medians of this kit's operators where they move rows, with `model` (us) and `net`, the share of the copy
    bandwidth that is reached, the empty kernel's time taken off.
    """
    bandwidth, empty = ceilings(times)
    frame = medians(times)
    frame = frame[frame["op"].isin(OURS) & (frame["bytes"] > 0)]
    frame = frame[(frame["op"] != "log") | (frame["kept"] == frame["kept"].max())]  # the log's cases are one
    moved_us = frame["bytes"] / bandwidth / 1e6
    return frame.assign(model=empty + moved_us, net=moved_us / (frame["us"] - empty))


def speedups(times: pd.DataFrame) -> pd.DataFrame:
    """How many times faster the commit is than each peer that writes the same rows: one column a peer."""
    frame = medians(times)
    wide = frame.pivot_table(index=KEYS, columns="op", values="us").dropna(subset="vllm")
    return wide[[peer for peer in PEERS if peer in wide]].div(wide["commit"], axis=0)


def per_launch(times: pd.DataFrame) -> tuple[float, float]:
    """(microseconds of the first launch, of each further one) of vLLM's writer in a graph, by least squares."""
    rows = medians(times).query("op == 'vllm launches'")
    slope, start = np.polyfit(rows["launches"], rows["us"], 1)
    return float(start + slope), float(slope)


def dram_over_model(counters: pd.DataFrame) -> pd.DataFrame:
    """DRAM bytes that the hardware counted over those of the model, one row a case: read, written and both."""
    keys = ["op", *KEYS, "bytes"]
    wide = counters.pivot_table(index=keys, columns="metric", values="value", observed=True).reset_index()
    wide["read"], wide["written"] = wide["dram_read"] / wide["bytes"], wide["dram_written"] / wide["bytes"]
    wide["both"] = (wide["dram_read"] + wide["dram_written"]) / (2 * wide["bytes"])
    return wide


def unequal_bytes(times: pd.DataFrame) -> int:
    """Bytes of accepted slots in which the commit or any peer differs from vLLM's writer."""
    return int(times.loc[times["metric"] == "bytes_differing", "value"].sum())


def all_move(frame: pd.DataFrame) -> pd.DataFrame:
    """The cases of `modelled` with most rows, all of which move."""
    largest = frame[frame["rows"] == frame["rows"].max()]
    return largest[largest["bytes"] == largest.groupby(["kv_heads", "cache"])["bytes"].transform("max")]


def claim(run: results.Run, times: pd.DataFrame, counters: pd.DataFrame, k: int = 8) -> None:
    """Record what must hold of the samples and of the hardware's counters, each with its own origin.

    k: drafts of a request; a third of its rows accepted is (k + 1) // 3.
    """
    origin, unequal = run.origin(times), unequal_bytes(times)
    compared = bool((times["metric"] == "bytes_differing").any())
    run.claim("bytes that differ from vLLM's own writer", 0, unequal, compared and unequal == 0, origin)
    worst = (dram_over_model(counters)["both"] - 1).abs().max()
    run.claim("DRAM bytes counted, off the model by at most", 0.1, worst, worst <= 0.1, run.origin(counters))

    frame, ratios, third = modelled(times), speedups(times), (k + 1) // 3
    most = frame["rows"].max()
    share, slower = all_move(frame)["net"].min(), frame.query("rows == @most").eval("us / model").max()
    text = f"share of copy bandwidth, {most:,} rows that all move, launch taken off, worst"
    run.expect(text, 0.85, share, share >= 0.85, origin)
    run.expect(f"time over the model's, {most:,} rows, worst", 1.25, slower, slower <= 1.25, origin)
    of_third = ratios["vllm"].xs(third, level="kept").groupby("rows").min()
    for batch, faster in ((1, 10), (8, 8), (16, 7)):
        if (rows := batch * (k + 1)) in of_third:
            text = f"times faster than 32 launches, a third of {rows} rows, worst"
            run.expect(text, faster, of_third[rows], of_third[rows] >= faster, origin)
    least = ratios.min().min()
    run.expect("times faster than any peer, worst of all shapes", "> 1", least, least > 1, origin)
    commits = medians(times).query("op == 'commit' and rows == @most").groupby(["kv_heads", "cache"])["us"]
    heads, cache = commits.max().idxmax()
    idle = (commits.min() / commits.max())[heads, cache]
    text = f"time at none accepted over time at all, {most:,} rows, {heads} KV heads, {cache}"
    run.expect(text, 0.05, idle, idle <= 0.05, origin)


def priced(times: pd.DataFrame) -> pd.DataFrame:
    """Commit, log, restore and vLLM's writer, all layers, beside the model's price: a row an op and case.

    The price is by the launches and the copy that `times` holds itself: `predicted` (us), and `error`, which is
    predicted / `us` - 1.
    """
    (bandwidth, empty), (_, further) = ceilings(times), per_launch(times)
    frame = medians(times).query("op in ('commit', 'log', 'restore', 'vllm')").reset_index(drop=True)
    frame["predicted"] = empty + (frame["launches"] - 1) * further + frame["bytes"] / (1e12 * bandwidth) * 1e6
    return frame.assign(error=frame["predicted"] / frame["us"] - 1)


def roof_points(times: pd.DataFrame) -> pd.DataFrame:
    """The all-layer operators of `modelled` as points of `nwor_lab.figures.roofline`."""
    return modelled(times).assign(panel="commit, log, restore: all layers", kernel=lambda rows: rows["op"])
