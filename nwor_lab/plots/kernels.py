# SPDX-License-Identifier: Apache-2.0
"""What the samples of `nwor_lab.microbench.operators` say: medians, the model of time, and the figures.

The model of time has two terms, both measured in the same run: an empty kernel, and the bytes that have to move at the
bandwidth of a large copy. Nothing is fitted. `claim` records what notebook 06 claims of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab import results
from nwor_lab.microbench.operators import OURS, PEERS
from nwor_lab.plots import style

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
    """The medians of this kit's operators where they move rows, with `model` (us), `net` and `gross`.

    `gross` is the share of the copy bandwidth that is reached, `net` the same with the empty kernel's time taken off.
    """
    bandwidth, empty = ceilings(times)
    frame = medians(times)
    frame = frame[frame["op"].isin(OURS) & (frame["bytes"] > 0)]
    frame = frame[(frame["op"] != "log") | (frame["kept"] == frame["kept"].max())]  # the log's cases are one
    moved_us = frame["bytes"] / bandwidth / 1e6
    return frame.assign(model=empty + moved_us, gross=moved_us / frame["us"], net=moved_us / (frame["us"] - empty))


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


def counted(counters: pd.DataFrame) -> pd.DataFrame:
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
    worst = (counted(counters)["both"] - 1).abs().max()
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


# -- figures -------------------------------------------------------------------------------------------------------


def roofline(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw the bandwidth reached over the bytes that have to move, below the model's roof."""
    bandwidth, empty = ceilings(times)
    frame = modelled(times).assign(MB=lambda frame: frame["bytes"] / 1e6)
    fig, ax = style.figure()
    x = np.geomspace(frame["MB"].min() / 2, frame["MB"].max() * 2, 100)
    ax.plot(x, x / (empty + x / bandwidth), color="black", linewidth=0.8, label="model: launch + bytes")
    ax.axhline(bandwidth, color="black", linestyle=":", linewidth=0.8, label="copy of 4 GiB")
    style.series(ax, frame, "MB", "tb_s", "op", linestyle="none", markerfacecolor="none")
    ax.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="TB/s", ylim=(0.02, 6))
    style.legend(ax, ncols=3)
    caption = (
        "Bandwidth of the all-layer operators over the bytes that have to move, one marker a cache, number of rows and "
        f"share accepted. Line: an empty kernel ({empty:.1f} us) plus the bytes at the bandwidth of a large "
        f"copy ({bandwidth:.2f} TB/s). Medians of {frame['samples'].min()} samples, cold L2 cache."
    )
    return style.save(fig, run, "kernel_roofline", frame, caption)


def over_rows(run: results.Run | Path, times: pd.DataFrame, kept: int = 3) -> Path:
    """Draw time over the rows of a window beside the peers, `kept` rows of each request accepted."""
    frame = medians(times)
    frame = frame[(frame["kept"] == kept) & frame["op"].isin(["commit", "stream", *PEERS])].copy()
    frame["panel"] = frame["kv_heads"].astype(str) + " KV heads, " + frame["cache"]
    names = {"commit": "commit (one launch)", "stream": "the same bytes, streamed"}
    frame["writer"] = [names.get(op, f"{op} (a launch a layer)") for op in frame["op"]]
    frame = frame.sort_values("rows").astype({"rows": str})
    panels = sorted(set(frame["panel"]))
    grid = style.relplot(frame, "rows", "us", "writer", col="panel", col_order=panels, panel=2.0, ncols=4)
    grid.set(yscale="log").set_titles("{col_name}").set_axis_labels("rows of the window", "us, all 32 layers")
    caption = (
        f"Time to write the accepted rows, {kept} a request, in all 32 layers: this kit's commit in one launch, "
        "and what writes them layer by layer today. Every peer gets the accepted rows alone. Medians, cold L2 cache."
    )
    return style.save(grid, run, "kernel_over_rows", frame, caption)


def over_share(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw time over the share of rows accepted: rejected rows cost nothing."""
    bandwidth, empty = ceilings(times)
    frame = medians(times)
    frame = frame[frame["op"].isin(["commit", "restore"])]
    heads, cache, rows = frame.groupby(KEYS[:3])["kept"].nunique().iloc[::-1].idxmax()  # timed at most shares
    frame = frame[(frame["kv_heads"] == heads) & (frame["cache"] == cache) & (frame["rows"] == rows)]
    frame = frame.assign(model=empty + frame["bytes"] / bandwidth / 1e6, accepted=frame["kept"] / frame["kept"].max())
    fig, ax = style.figure()
    style.series(ax, frame, "accepted", "us", "op", label="{}, measured", linestyle="none")
    style.series(ax, frame, "accepted", "model", "op", label="{}, model", marker="")
    ax.set(xlabel="share of rows accepted", ylabel="us", ylim=(0, None))
    style.legend(ax)
    caption = (
        f"Time over the share of rows accepted: {rows:,} rows, 32 layers of {heads} KV heads, {cache}. The "
        "commit moves what is accepted and the restore what is rejected; lines: the model."
    )
    return style.save(fig, run, "kernel_over_share", frame, caption)


def launches(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw the time of vLLM's writer over the number of layers written, and the commit of all of them beside it."""
    frame, (first, further) = medians(times), per_launch(times)
    rows = frame.query("op == 'vllm launches'").sort_values("launches")
    commit = frame[frame["op"] == "commit"].merge(rows[KEYS].drop_duplicates())
    fig, ax = style.figure()
    ax.plot(rows["launches"], first + further * (rows["launches"] - 1), color="black", linewidth=0.8, label="fit")
    ax.plot(rows["launches"], rows["us"], "D", color=style.OTHER[6], label="vLLM's writer, a launch a layer")
    ax.plot([32] * len(commit), commit["us"], "^", color=style.OTHER[0], label="commit, one launch")
    ax.set(xlabel="layers written", ylabel="us", ylim=(0, None))
    style.legend(ax)
    caption = (
        f"Why one launch: {rows['rows'].iloc[0]} rows, {rows['kv_heads'].iloc[0]} KV heads, in a CUDA graph. Each "
        f"further launch costs {further:.1f} us, whatever it moves; one launch for all layers pays that once."
    )
    return style.save(fig, run, "kernel_launches", pd.concat([rows, commit]), caption)
