# SPDX-License-Identifier: Apache-2.0
"""What the samples of `nwor_lab.microbench.attention` say: ratios to vLLM's faster backend, the floor, the figures.

All times are medians with the empty kernel's taken off. The floor is the bytes that have to move at the bandwidth of
a large copy, which `microbench.operators` measured; a kernel that mostly reads can pass it slightly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import results
from nwor_lab.microbench import counters
from nwor_lab.microbench.attention import net
from nwor_lab.microbench.inputs import KEYS
from nwor_lab.plots import style, tour

BACKENDS = {
    "nwor": "nwor (one launch)",
    "flash": "FlashAttention 3 + write",
    "triton": "Triton + write",
    "floor": "bytes",
}
EACH = {"flash2": "FlashAttention 2, forced", "triton": "Triton", "flash": "FlashAttention 3"}


def frame(times: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """One row a shape: microseconds of `nwor`, `flash` (any split), `triton`, `write`, `vanilla` and `floor`, `ratio`.

    `tuned_on` says whether the tuning was searched on the shape.

    Args:
        times: as `microbench.attention.measure` makes them.
        bandwidth: of a large copy, in TB/s.
    """
    table = net(times)
    table["flash"] = _any_split(table)
    facts = times.groupby(KEYS, observed=True)[["bytes", "tuned_on"]].first()
    table = table.drop(columns=list(table.filter(regex="^flash "))).join(facts).reset_index()
    return table.assign(floor=table["bytes"] / bandwidth / 1e6, tp=32 // table["heads"])


def _any_split(table: pd.DataFrame) -> pd.Series:
    """FlashAttention 3's time, of the number of splits that is fastest."""
    return table.filter(regex="^flash( |$)").min(axis=1)


def errors(times: pd.DataFrame) -> pd.DataFrame:
    """Relative errors against fp32 of nwor and of vLLM's two backends, and nwor's over FlashAttention's: a row a
    shape."""
    table = times[times["metric"] == "error"].pivot_table(index=KEYS, columns="op", values="value", observed=True)
    table = table[["nwor", "flash", "triton"]]
    return table.assign(over_flash=table["nwor"] / table["flash"]).reset_index()


def over_each(times: pd.DataFrame) -> pd.DataFrame:
    """nwor's time over that of each attention of vLLM's alone with its write: a row a shape, a column each of `EACH`.

    An attention that was not measured has no number.

    Args:
        times: table `gpu_cliff`, `gpu_long`, `gpu_long_drafts` or `gpu_next_layers`.
    """
    table = net(times)
    table["flash"] = _any_split(table)
    table = table.reindex(columns=table.columns.union(list(EACH)))
    return pd.DataFrame({name: table["nwor"] / table[op] for op, name in EACH.items()}).reset_index()


def wins(table: pd.DataFrame) -> pd.DataFrame:
    """Of the shapes of `frame`, by k, cache and `tuned_on`: how many there are, in how many nwor takes less time than
    vLLM's faster backend, and the median and largest `ratio`."""
    groups = table.assign(won=table["ratio"] < 1).groupby(["k", "cache", "tuned_on"], observed=True)
    return groups.agg(shapes=("won", "size"), won=("won", "sum"), median=("ratio", "median"), worst=("ratio", "max"))


def claim(run: results.Run, times: pd.DataFrame, table: pd.DataFrame, counted: pd.DataFrame, cache: str) -> None:
    """Record what must hold of the samples, their `frame` and the hardware's counters, each with its own origin."""
    origin, over_flash = run.origin(times), errors(times).set_index("cache")["over_flash"]
    worst, middle = over_flash.max(), over_flash.loc[cache].median()
    run.claim("error against fp32 over FlashAttention 3's, worst shape", 1.03, worst, worst <= 1.03, origin)
    text = f"error against fp32 over FlashAttention 3's, {cache}, median of all shapes"
    run.expect(text, 1.0, middle, middle <= 1, origin)
    least = table["context"].min()
    short = table[(table["context"] == least) & (table["cache"] == cache)]["ratio"].max()
    median = table["ratio"].median()
    text = f"time over vLLM's faster backend, {cache}, context {least}, worst shape"
    run.expect(text, "< 1", short, short < 1, origin)
    run.expect("time over vLLM's faster backend, median of all shapes", "< 1", median, median < 1, origin)
    busy = counters.shown(counted).reset_index()
    idle = busy[(busy["context"] == 512) & (busy["batch"] == 1)][["dram", "tensor", "issue"]].max().max()
    full = busy[(busy["op"] == "nwor") & (busy["context"] == 8192) & (busy["batch"] == 64)]["dram"].min()
    text = "memory, tensor cores or issue slots busy at batch 1, context 512, most of any kernel, %"
    run.expect(text, 20, idle, idle <= 20, run.origin(counted))
    run.expect("memory busy at batch 64, context 8,192, %", 90, full, full >= 90, run.origin(counted))


def claim_each(run: results.Run, cliff: pd.DataFrame, long: pd.DataFrame) -> None:
    """Record what was aimed at beside each attention of vLLM's alone: `over_each` of `gpu_cliff` and `gpu_long`."""
    forced, _, flash = EACH.values()
    worst = over_each(cliff).query("kv_heads == 8 and context >= 8192 and batch <= 4")[forced].max()
    text = "a layer over FlashAttention 2's, forced, 8 KV heads, contexts of 8k and more, batch 1 and 4, worst shape"
    run.expect(text, 0.5, worst, worst <= 0.5, run.origin(cliff))
    worst = over_each(long)[flash].max()
    text = "a layer over FlashAttention 3's, 32k and 128k, batch 1 and 4, worst shape"
    run.expect(text, "<= 1", worst, worst <= 1, run.origin(long))


def ratios(run: results.Run | Path, table: pd.DataFrame, k: int = 8) -> Path:
    """Draw nwor's time over that of vLLM's faster backend for k drafts, by context and batch, a panel a cache."""
    rows = table[table["k"] == k].sort_values(["cache", "tp", "kv_heads", "batch"])
    panels = [f"{row.kv_heads} KV heads, {row.cache}" + ",\n2 ranks" * (row.tp > 1) for row in rows.itertuples()]
    drawn = rows.assign(panel=panels, requests=[f"batch {batch:>2}" for batch in rows["batch"]])
    grid = _over_context(drawn, "ratio", "requests")
    grid.refline(y=1, color="black", linestyle="-", linewidth=0.8)
    grid.set_axis_labels(f"context, k={k}", "time / vLLM's faster\n(line: equal)")
    caption = (
        "Verify attention and write of one layer: time of this kit's one launch over that of the faster of vLLM's "
        f"FlashAttention 3 (best split) and Triton backends with their writes. A token and {k} drafts a request, 32 "
        "query heads of 128, divided among the ranks. Below the line at 1 this kit is faster; open circles are shapes "
        "that the tuning was not searched on. Medians, empty kernel taken off, cold L2 cache."
    )
    return style.save(grid, run, "attention_ratios" if k == 8 else f"attention_ratios_k{k}", rows, caption)


def over_floor(run: results.Run | Path, table: pd.DataFrame, k: int = 8, cache: str = "bf16") -> Path:
    """Draw the time of each backend above the floor of bytes, on one rank, by KV heads and batch; of shapes that are
    tuned on, where there are such."""
    drawn = table[(table["tp"] == 1) & (table["cache"] == cache) & (table["k"] == k)]
    drawn = drawn[drawn["tuned_on"] | ~drawn["tuned_on"].any()]
    long = drawn.melt(["kv_heads", "batch", "context"], list(BACKENDS), "backend", "us")
    long["panel"] = [f"{row.kv_heads} KV heads, batch {row.batch}" for row in long.itertuples()]
    long["backend"] = long["backend"].map(BACKENDS)
    grid = _over_context(long, "us", "backend")
    grid.set(yscale="log").set_axis_labels("context", "us")
    caption = (
        "Time of one layer's verify attention and write over the context: this kit's launch (nwor), vLLM's "
        "FlashAttention 3 in its best split and Triton backends with their writes, and the bytes at the bandwidth of a "
        f"large copy. {cache}, {k + 1} rows a request, 32 query heads of 128. Medians, empty kernel taken off, cold L2."
    )
    return style.save(grid, run, "attention_over_floor", drawn, caption)


def cliff(run: results.Run | Path, times: pd.DataFrame) -> Path:
    """Draw nwor's time over that of each attention of vLLM's alone, by context and batch, a panel an attention.

    Args:
        times: table `gpu_cliff`, of which k=8 and 8 KV heads are drawn.
    """
    rows = over_each(times).query("k == 8 and kv_heads == 8").sort_values("batch")
    drawn = rows.melt(["context", "batch"], list(EACH.values()), "panel", "over")
    drawn["requests"] = [f"batch {batch:>2}" for batch in drawn["batch"]]
    grid = _over_context(drawn, "over", "requests")
    grid.set(ylim=(0, None)).refline(y=1, color="black", linestyle="-", linewidth=0.8)
    grid.set_axis_labels("context, k=8", "time / vLLM's\n(line: equal)")
    caption = (
        "Verify attention and write of one layer: time of this kit's one launch over that of vLLM's attention with its "
        "write. FlashAttention 2, which an A100 takes, was forced on an H200; like Triton it does not "
        "split a window's context, and FlashAttention 3 (best split) does. A token and 8 drafts a request, "
        "8 KV heads, bf16. Medians, empty kernel taken off, cold L2 cache."
    )
    return style.save(grid, run, "attention_cliff", drawn, caption)


def _over_context(rows: pd.DataFrame, y: str, by: str) -> Any:
    panels = rows["panel"].unique()
    rows = rows.sort_values("context", kind="stable")
    rows["positions"] = [f"{context // 1024}k" if context >= 1024 else str(context) for context in rows["context"]]
    wrap = min(4, len(panels))
    grid = style.relplot(rows, "positions", y, by, col="panel", col_order=panels, col_wrap=wrap, ncols=4)
    return grid.set_titles("{col_name}")


def kernel_picture(run: results.Run | Path, k: int = 3) -> Path:
    """Draw what one launch reads and writes for one request of `k` drafts: its pages, their splits, the new rows and
    staging."""
    context, splits, block_size = 37, 2, 16
    pages, drafts = -(-(context + 1 + k) // block_size), range(1, 1 + k)
    states = ["context"] * context + ["kept"]
    states += ["empty"] * (pages * block_size - len(states))
    cells = [(0, slot + slot // block_size, state, slot) for slot, state in enumerate(states)]
    cells += [(4, at + row, "undecided", context + row) for at in (12, 32) for row in drafts]
    cells.append((4, 12, "kept", context))
    frame = pd.DataFrame(cells, columns=["line", "column", "state", "text"])
    fig, ax = style.figure(style.TWO_COLUMNS, 2.2)
    tour.grid(ax, frame, {}, fontsize=5)
    ax.text(11.5, 4.9, f"{1 + k} new rows, as the\nprojection left them", fontsize=7, va="top")
    ax.text(32.5, 4.9, f"staging: {k} rows,\nin no page", fontsize=7, va="top")
    share = -(-pages // splits)
    for split in range(splits):
        left, right = split * share * (block_size + 1) - 0.5, min(pages, (split + 1) * share) * (block_size + 1) - 1.5
        ax.plot([left, left, right, right], [-0.8, -1.1, -1.1, -0.8], color="black", linewidth=0.8)
        ax.text((left + right) / 2, -1.3, f"split {split + 1} of {splits}", ha="center", fontsize=7)
    arrow = {"arrowstyle": "->", "color": "black"}
    ax.annotate("", (context + context // block_size, 0.5), (12, 3.5), arrowprops=arrow)
    ax.annotate("", (32.5, 4), (12.5 + k, 4), arrowprops=arrow)
    tour.legend(fig, frame["state"])
    ax.set_ylim(7.4, -2.4)
    caption = (
        f"One launch for one request and KV head: {context} positions before, a token and {k} drafts, pages of "
        f"{block_size} slots in {splits} splits, a program each. A split attends to its part of the prefix, the last "
        "one to the new rows too, which are read once, where the projection left them, and stored once: the token "
        "in its page, the drafts in staging. The sums of the splits are added up at the end of the same launch."
    )
    data = pd.DataFrame({"k": [k], "context": [context], "splits": [splits], "block_size": [block_size]})
    return style.save(fig, run, "attention_kernel", data, caption)
