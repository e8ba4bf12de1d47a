# SPDX-License-Identifier: Apache-2.0
"""What the samples of `microbench.operators` say: medians, the model of time, goals met and missed, and the figures.

The model of time has two terms, both measured in the same run: an empty kernel, and the bytes that have to move at the
bandwidth of a large copy. Nothing is fitted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from nwor_lab import results
from nwor_lab.microbench import operators
from nwor_lab.microbench.operators import OURS, PEERS, QUERY
from nwor_lab.plots import style as plot

KEYS = ["kv_heads", "cache", "rows", "kept"]
LAUNCHED = ("vllm", "vllm triton", "flashinfer")  # a kernel of its own for each layer, written for this
SPEEDUPS = {9: 10, 72: 8, 144: 7}  # wanted over the launches, by rows
LOOKS = {
    "commit": ("#0072B2", "^", "-"),
    "restore": ("#D55E00", "s", "--"),
    "log": ("#009E73", "o", ":"),
    "vllm": ("#555555", "D", "--"),
    "vllm triton": ("#CC79A7", "v", "-."),
    "flashinfer": ("#56B4E9", "P", ":"),
    "index_copy": ("#E69F00", "x", "--"),
    "index_put": ("#000000", "+", ":"),
    "stream": ("#999999", ".", "-"),
}


def medians(times: pd.DataFrame) -> pd.DataFrame:
    """One row an op and shape: median, first and last quartile in microseconds, bytes, launches, TB/s and samples."""
    rows = times[(times["metric"] == "time") & (times["rows"] > 0)]
    groups = rows.groupby(["op", *KEYS, "launches"], observed=True)
    frame = groups["value"].quantile([0.25, 0.5, 0.75]).unstack().set_axis(["low", "us", "high"], axis=1)
    frame["bytes"], frame["samples"] = groups["bytes"].first(), groups["value"].size()
    frame["tb_s"] = frame["bytes"] / frame["us"] / 1e6
    return frame.reset_index()


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
    frame = frame[frame["op"].isin(OURS) & (frame["bytes"] > 0)].copy()
    frame = frame[(frame["op"] != "log") | (frame["kept"] == QUERY)]  # it looks at no verdict: one of its three will do
    frame["model"] = empty + frame["bytes"] / bandwidth / 1e6
    frame["gross"] = frame["tb_s"] / bandwidth
    frame["net"] = frame["bytes"] / (frame["us"] - empty) / 1e6 / bandwidth
    return frame


def speedups(times: pd.DataFrame) -> pd.DataFrame:
    """How many times faster the commit is than each peer that writes the same rows: one column a peer."""
    frame = medians(times).loc[lambda frame: frame["op"].isin(LOOKS)]
    wide = frame.pivot(index=KEYS, columns="op", values="us")
    peers = [peer for peer in PEERS if peer in wide]
    return wide[peers].div(wide["commit"], axis=0).loc[lambda frame: frame["vllm"].notna()]


def goals(times: pd.DataFrame) -> pd.DataFrame:
    """What was wanted of the kernels and what was reached, shape by shape.

    `streamed` is what a kernel would reach that only reads and writes as many bytes, side by side and with no verdict
    to wait for: a goal that it misses too is out of reach.
    """
    bandwidth, empty = ceilings(times)
    frame, ratios = modelled(times), speedups(times)
    frame = frame[frame["kept"].isin(operators.KEPT)]
    streams = medians(times).loc[lambda all: all["op"] == "stream"].set_index(["rows", "bytes"])["us"]
    streams = streams.groupby(level=[0, 1]).median()
    rows: list[tuple[str, str, float, float, float]] = []
    for line in frame.itertuples():
        streamed = streams.get((line.rows, line.bytes), np.nan)
        if line.rows == max(operators.ROWS):
            share = line.bytes / streamed / 1e6 / bandwidth
            rows.append(("share of copy bandwidth, 2,304 rows: at least", shape(line), 0.85, line.gross, share))
        if line.rows == min(operators.ROWS):
            rows.append(("empty kernels, 9 rows: at most", shape(line), 1.5, line.us / empty, streamed / empty))
        if line.op == "commit" and line.rows in SPEEDUPS:
            there = ratios.loc[(line.kv_heads, line.cache, line.rows, line.kept)]
            for peer, ratio in there[there.index.isin(LAUNCHED)].dropna().items():
                goal = f"{line.rows} rows, times faster than {peer}: at least"
                rows.append((goal, shape(line), SPEEDUPS[line.rows], ratio, ratio * line.us / streamed))
    frame = pd.DataFrame(rows, columns=["goal", "shape", "wanted", "reached", "streamed"])
    sign = np.where(frame["goal"].str.endswith("at most"), -1, 1)
    for name, by in (("met", "reached"), ("met by streaming", "streamed")):
        frame[name] = sign * frame[by] >= sign * frame["wanted"]
    return frame.sort_values("goal", kind="stable", ignore_index=True)


def goal_table(times: pd.DataFrame) -> pd.DataFrame:
    """`goals` in short: in how many shapes each is met, in how many by mere streaming, and the worst shape."""

    def line(group: pd.DataFrame) -> pd.Series:
        worst = group.loc[group["reached"].idxmax() if "most" in str(group.name) else group["reached"].idxmin()]
        of = group["streamed"].notna()
        return pd.Series(
            {
                "wanted": worst["wanted"],
                "met": f"{group['met'].sum()} of {len(group)}",
                "met by streaming": f"{group['met by streaming'].sum()} of {of.sum()}",
                "worst": round(worst["reached"], 2),
                "worst shape": worst["shape"],
            }
        )

    frame = goals(times)
    return frame.groupby("goal")[[name for name in frame if name != "goal"]].apply(line)


def shape(line: object) -> str:
    kept = f", {line.kept}/{QUERY} kept" if line.op != "log" else ""  # type: ignore[attr-defined]
    return f"{line.op}, {line.kv_heads} heads, {line.cache}{kept}"  # type: ignore[attr-defined]


def per_launch(times: pd.DataFrame) -> tuple[float, float]:
    """(microseconds of the first launch, of each further one) of vLLM's writer in a graph, by least squares."""
    rows = medians(times).loc[lambda frame: frame["op"] == "vllm launches"]
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


# -- figures -------------------------------------------------------------------------------------------------------


def roofline(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw the bandwidth reached over the bytes that have to move, below the model's roof."""
    bandwidth, empty = ceilings(times)
    frame = modelled(times)
    fig, ax = plot.figure()
    x = np.logspace(np.log10(frame["bytes"].min() / 2), np.log10(frame["bytes"].max() * 2), 100)
    ax.plot(x / 1e6, x / (empty + x / bandwidth / 1e6) / 1e6, color="black", linewidth=0.8, label="model")
    ax.axhline(bandwidth, color="black", linestyle=":", linewidth=0.8, label="copy of 4 GiB")
    for op in OURS:
        color, marker, _ = LOOKS[op]
        rows = frame[frame["op"] == op]
        ax.plot(rows["bytes"] / 1e6, rows["tb_s"], color=color, marker=marker, linestyle="none", label=op, markersize=3)
    ax.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="TB/s", ylim=(0.02, 6))
    plot.legend(ax, ncols=3)
    caption = (
        "Bandwidth of the all-layer operators over the bytes that have to move: 9 to 2,304 rows of 32 layers, 8 and 32 "
        f"KV heads, bf16 and fp8. Line: an empty kernel ({empty:.1f} us) plus the bytes at the bandwidth of a large "
        f"copy ({bandwidth:.2f} TB/s). Medians of {frame['samples'].min()} samples, cold L2 cache."
    )
    return plot.save(fig, run, "kernel_roofline", frame, caption)


def over_rows(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw time over rows beside the peers, a third of the rows accepted."""
    frame = medians(times)
    frame = frame[(frame["kept"] == 3) & frame["op"].isin(LOOKS) & ~frame["op"].isin(["restore", "log"])]
    shapes = [(32, "bf16"), (8, "bf16"), (32, "fp8"), (8, "fp8")]
    fig, axes = plot.figure(plot.TWO_COLUMNS, 2.2, ncols=len(shapes), sharey=True)
    for ax, (kv_heads, cache) in zip(axes, shapes, strict=True):
        rows = frame[(frame["kv_heads"] == kv_heads) & (frame["cache"] == cache)]
        for op, (color, marker, style) in LOOKS.items():
            line = rows[rows["op"] == op].sort_values("rows")
            if len(line):
                label = {"commit": "commit, one launch", "stream": "as many bytes, streamed"}.get(op, op)
                ax.plot(line["rows"], line["us"], style, color=color, marker=marker, label=label, markersize=3)
        ax.set(xscale="log", yscale="log", xlabel="rows of the window", title=f"{kv_heads} KV heads, {cache}")
        ax.set_xticks(operators.ROWS, [str(number) for number in operators.ROWS], minor=False)
        ax.minorticks_off()
    axes[0].set_ylabel("us, all 32 layers")
    plot.legend(axes[0], ncols=4)
    caption = (
        "Time to write the accepted third of a window's rows in all 32 layers: this kit's commit in one launch, and "
        "what writes them layer by layer today. Every peer gets the accepted rows alone. Medians, cold L2 cache."
    )
    return plot.save(fig, run, "kernel_over_rows", frame, caption)


def over_share(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw time over the share of rows accepted: what is rejected costs nothing."""
    bandwidth, empty = ceilings(times)
    frame = medians(times)
    frame = frame[(frame["kv_heads"] == 32) & (frame["cache"] == "bf16") & (frame["rows"] == 2304)]
    frame = frame[frame["op"].isin(["commit", "restore"])].copy()
    frame["model"] = empty + frame["bytes"] / bandwidth / 1e6
    fig, ax = plot.figure()
    for op, rows in frame.groupby("op", observed=True):
        color, marker, style = LOOKS[str(op)]
        rows = rows.sort_values("kept")
        ax.plot(rows["kept"] / QUERY, rows["us"], color=color, marker=marker, linestyle="none", label=op)
        ax.plot(rows["kept"] / QUERY, rows["model"], style, color=color, linewidth=0.8, label=f"{op}, model")
    ax.set(xlabel="share of rows accepted", ylabel="us", ylim=(0, None))
    plot.legend(ax)
    caption = (
        "Time over the share of rows accepted: 2,304 rows, 32 layers of 32 KV heads, bf16. The commit moves what is "
        "accepted and the restore what is rejected; lines: the model."
    )
    return plot.save(fig, run, "kernel_over_share", frame, caption)


def launches(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw the time of vLLM's writer over the number of layers written, and the commit of all of them beside it."""
    frame = medians(times)
    rows = frame[frame["op"] == "vllm launches"].sort_values("launches")
    first, further = per_launch(times)
    here = (frame["kv_heads"] == 32) & (frame["cache"] == "bf16") & (frame["rows"] == 9) & (frame["kept"] == QUERY)
    commit = frame[here & (frame["op"] == "commit")]
    fig, ax = plot.figure()
    ax.plot(rows["launches"], first + further * (rows["launches"] - 1), color="black", linewidth=0.8, label="fit")
    color, marker, _ = LOOKS["vllm"]
    ax.plot(rows["launches"], rows["us"], color=color, marker=marker, linestyle="none", label="vllm, a launch a layer")
    color, marker, _ = LOOKS["commit"]
    ax.plot([32], commit["us"], color=color, marker=marker, linestyle="none", label="commit, one launch")
    ax.set(xlabel="layers written", ylabel="us", ylim=(0, None))
    plot.legend(ax)
    caption = (
        f"Why one launch: 9 rows, 32 KV heads, bf16, in a CUDA graph. Each further launch costs {further:.1f} us, "
        "whatever it moves; one launch for all layers pays that once."
    )
    data = pd.concat([rows, commit])
    return plot.save(fig, run, "kernel_launches", data, caption)


def counters(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the DRAM bytes that the hardware counted over those of the model."""
    cases = counted(frame)
    fig, ax = plot.figure(height=1.9)
    for way, color, marker in (("read", "#0072B2", "o"), ("written", "#D55E00", "x")):
        ax.plot(2 * cases["bytes"] / 1e6, cases[way], color=color, marker=marker, linestyle="none", label=way)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(xscale="log", xlabel="MB read and written, model", ylabel="counted / model", ylim=(0.9, 1.1))
    ax.set_xticks([200, 500, 1000, 2000], ["200", "500", "1000", "2000"])
    ax.minorticks_off()
    plot.legend(ax)
    caption = (
        "DRAM bytes that the hardware counted over those that have to move, for the operators whose data exceeds the "
        "L2 cache: nothing is read or written for rows that stay."
    )
    return plot.save(fig, run, "kernel_counters", cases, caption)
