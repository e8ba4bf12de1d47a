# SPDX-License-Identifier: Apache-2.0
"""What the samples of `microbench.attention` say: ratios to vLLM's faster backend, goals met and missed, figures.

All times are medians with the empty kernel's taken off. The floor is the bytes that have to move at the bandwidth of
a large device-to-device copy, which `microbench.operators` measured; a kernel that mostly reads can pass it slightly.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from nwor_lab import results
from nwor_lab.microbench.attention import net
from nwor_lab.microbench.attention_inputs import KEYS
from nwor_lab.plots import style as plot

# At most so much of the time of vLLM's faster backend with k=8, by KV heads (before TP) and context, for `BATCHES`.
GOALS = {
    (32, 512): (0.60, 0.78, 0.82),
    (32, 2048): (0.68, 0.93, 0.95),
    (32, 8192): (1.00, 1.00, 1.00),
    (8, 512): (0.55, 0.82, 0.85),
    (8, 2048): (0.65, 0.95, 0.97),
    (8, 8192): (1.00, 1.00, 1.00),
}
BATCHES = (1, 16, 64)
LOOKS = {
    "nwor": ("#0072B2", "^", "-"),
    "flash": ("#555555", "o", "--"),
    "triton": ("#E69F00", "s", ":"),
    "floor": ("#000000", "", "-"),
}


def frame(times: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """One row a shape: us of nwor, flash (any split), triton, write, vanilla and floor, `ratio`, and wanted and met.

    Args:
        times: as `attention_bench.measure` makes them.
        bandwidth: of a large copy, in TB/s.
    """
    table = net(times)
    flash = [name for name in table if str(name).startswith("flash")]
    table["flash"] = table[flash].min(axis=1)
    table = table.drop(columns=[name for name in flash if name != "flash"]).reset_index()
    moved = times.groupby(KEYS, observed=True)["bytes"].first()
    table = table.merge(moved.reset_index())
    table["floor"] = table["bytes"] / bandwidth / 1e6
    table["tp"] = 32 // table["heads"]
    keys = zip(table["kv_heads"] * table["tp"], table["context"], table["batch"], table["k"], strict=True)
    table["wanted"] = [
        GOALS[kv, context][BATCHES.index(batch)] if batch in BATCHES and k == 8 else 1.0
        for kv, context, batch, k in keys
    ]
    table["met"] = table["ratio"] <= table["wanted"]
    return table


def errors(times: pd.DataFrame) -> pd.DataFrame:
    """The relative error of nwor, of vLLM's two backends against fp32, and nwor's over FlashAttention's:
    a row a shape."""
    table = times[times["metric"] == "error"].pivot_table(index=KEYS, columns="op", values="value", observed=True)
    table = table[["nwor", "flash", "triton"]]
    return table.assign(over_flash=table["nwor"] / table["flash"]).reset_index()


def saved(times: pd.DataFrame) -> pd.DataFrame:
    """Microseconds that a layer saves beside FlashAttention 3 and vLLM's write, by shape: `alone`, in samples of its
    own whose rows come from memory, and `between` its neighbours, where the projection has just left them
    in the L2 cache."""
    alone, rows = net(times), times[times["metric"] == "between"]
    between = rows.pivot_table(index=KEYS, columns="op", values="value", aggfunc="median", observed=True)
    both = {"alone": alone["flash"] - alone["nwor"], "between": between["flash"] - between["nwor"]}
    return pd.DataFrame(both).astype(float).reset_index()


def goal_table(table: pd.DataFrame) -> pd.DataFrame:
    """Ratios reached beside those wanted: rows are cache, k, TP, KV heads and context; columns the batches."""
    shown = table.assign(
        cell=[
            f"{line.ratio:.2f}{'' if line.met else '!'} ({line.wanted:.2f})"
            for line in table.itertuples()
        ]
    )  # fmt: skip
    index = ["cache", "k", "tp", "kv_heads", "context"]
    wide = shown.pivot_table(index=index, columns="batch", values="cell", aggfunc="first", observed=True)
    return wide.rename_axis(columns="batch: ratio (wanted), ! missed")


def ratios(run: results.Run | Path, table: pd.DataFrame, k: int = 8) -> Path:
    """Draw nwor's time over that of vLLM's faster backend for k drafts, by context and batch;
    bars mark what was wanted."""
    panels = [(tp, kv, cache) for cache in ("bf16", "fp8") for tp in (1, 2) for kv in (32 // tp, 8 // tp)]
    panels = [panel for panel in panels if len(_panel(table, *panel, k))]
    columns = min(4, len(panels))
    fig, axes = plot.figure(plot.TWO_COLUMNS, 1.9 * -(-len(panels) // columns), ncols=columns,
                            nrows=-(-len(panels) // columns), sharey=True, sharex=True, squeeze=False)  # fmt: skip
    for ax, (tp, kv, cache) in zip(axes.flat, panels, strict=False):
        here = _panel(table, tp, kv, cache, k)
        for n, (batch, rows) in enumerate(here.groupby("batch", observed=True)):
            color, marker = ("#000000", "#0072B2", "#009E73", "#D55E00")[n % 4], "o^sD"[n % 4]
            rows = rows.sort_values("context")
            places = rows["context"] * (1.12 ** (n - 1.5))
            ax.plot(places, rows["ratio"], color=color, marker=marker, linestyle="none", label=f"batch {batch}")
            wanted = rows[rows["batch"].isin(BATCHES)]
            ax.plot(
                wanted["context"] * (1.12 ** (n - 1.5)), wanted["wanted"], color=color, marker="_", linestyle="none"
            )
        ax.axhline(1, color="black", linewidth=0.6)
        ax.set(
            xscale="log",
            title=f"{kv} KV heads, {cache}" + (f", TP={tp}" if tp > 1 else ""),
            ylim=(table["ratio"].min() - 0.1, table["ratio"].max() + 0.1),
        )
        ax.set_xticks([512, 2048, 8192], ["512", "2k", "8k"])
        ax.minorticks_off()
    for ax in axes[-1]:
        ax.set_xlabel(f"context, k={k}")
    for ax in axes[:, 0]:
        ax.set_ylabel("time / vLLM's faster")
    plot.legend(axes[0, 0], ncols=4)
    caption = (
        "Verify attention and write of one layer: time of this kit's one launch over that of the faster of vLLM's "
        f"FlashAttention 3 (best split) and Triton backends with their writes. A token and {k} drafts a request, 32 "
        "query heads of 128, divided by TP. Short bars: what was wanted. Medians, empty kernel taken off, cold L2 "
        "cache."
    )
    name = "attention_ratios" if k == 8 else f"attention_ratios_k{k}"
    return plot.save(fig, run, name, table[table["k"] == k], caption)


def over_floor(run: results.Run | Path, table: pd.DataFrame) -> Path:
    """Draw the time of each backend above the floor of bytes, bf16, TP=1."""
    fig, axes = plot.figure(plot.TWO_COLUMNS, 3.4, ncols=3, nrows=2, sharex=True)
    drawn = table[(table["tp"] == 1) & (table["cache"] == "bf16") & table["batch"].isin(BATCHES) & (table["k"] == 8)]
    for line, kv in zip(axes, (32, 8), strict=True):
        for ax, batch in zip(line, BATCHES, strict=True):
            rows = drawn[(drawn["kv_heads"] == kv) & (drawn["batch"] == batch)].sort_values("context")
            if rows.empty:
                ax.set_axis_off()
                continue
            for name, (color, marker, style) in LOOKS.items():
                ax.plot(rows["context"], rows[name], style, color=color, marker=marker, label=name)
            ax.set(xscale="log", yscale="log", title=f"{kv} KV heads, batch {batch}")
            ax.set_xticks([512, 2048, 8192], ["512", "2k", "8k"])
            ax.minorticks_off()
        line[0].set_ylabel("us")
    for ax in axes[-1]:
        ax.set_xlabel("context")
    plot.legend(next(ax for ax in axes.flat if ax.axison), ncols=4)
    caption = (
        "Time of one layer's verify attention and write over the context: this kit's launch (nwor), vLLM's "
        "FlashAttention 3 in its best split and Triton backends with their writes, and the bytes at the bandwidth of a "
        "large copy (floor). bf16, 9 rows a request, 32 query heads of 128. Medians, empty kernel taken off, cold L2."
    )
    return plot.save(fig, run, "attention_over_floor", drawn, caption)


def _panel(table: pd.DataFrame, tp: int, kv_heads: int, cache: str, k: int) -> pd.DataFrame:
    rows = table[(table["tp"] == tp) & (table["kv_heads"] == kv_heads) & (table["cache"] == cache)]
    return rows[rows["k"] == k]
