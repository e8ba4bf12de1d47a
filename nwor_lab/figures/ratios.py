# SPDX-License-Identifier: Apache-2.0
"""Figures of ratios to one baseline: whole steps and serving as dots, a layer's attention beside vLLM's others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab.cost.ratios import MAX_SPREAD, SURE
from nwor_lab.figures import style
from nwor_lab.serving import table


def dots(
    run: style.Place, name: str, points: pd.DataFrame, axis: str, lines: str, caption: str, absent: str = ""
) -> Path:
    """Draw ratios to a baseline as dots: a line a setting, a marker a mode, whiskers from `low` to `high`.

    Args:
        points: columns `panel`, `setting`, `mode`, `ratio`, `low`, `high`, panels and settings in the order of their
            rows; `ratio` is NaN where there is none.
        axis: what the ratio is, below the dots; lines: what a setting is, beside them. absent: what stands where a
            ratio is NaN.
    """
    panels, modes = points["panel"].unique(), style.styles(points["mode"])
    ncols = min(3, len(panels))
    nrows = -(-len(panels) // ncols)
    most = points.groupby("panel")["setting"].nunique().max()
    size = {"width": style.TWO_COLUMNS if ncols > 1 else style.COLUMN, "height": nrows * (0.5 + 0.17 * most) + 0.4}
    fig, axes = style.figure(**size, nrows=nrows, ncols=ncols, sharex=True, squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        rows = points[points["panel"] == panel]
        settings = {setting: line for line, setting in enumerate(rows["setting"].unique())}
        for n, (mode, look) in enumerate(modes.items()):
            part = rows[rows["mode"] == mode]
            line = part["setting"].map(settings).astype(float) + 0.3 * (n - (len(modes) - 1) / 2)
            for at in line[part["ratio"].isna()]:
                ax.text(1.01, at, absent, color=look.color, fontsize=5, va="center")
            spread = [part["ratio"] - part["low"], part["high"] - part["ratio"]]
            drawn = {"color": look.color, "marker": look.marker, "markersize": 3.5, "linestyle": "none"}
            ax.errorbar(part["ratio"], line, xerr=spread, label=look.label, **drawn, **style.WHISKERS)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set(title=panel, ylim=(len(settings) - 0.5, -0.5), yticks=list(settings.values()))
        ax.set_yticklabels(list(settings), fontsize=6)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes.flat[max(0, len(panels) - ncols) : len(panels)]:  # of some of these the panel below is not drawn
        ax.tick_params(labelbottom=True)
    fig.supxlabel(axis, fontsize=8)
    fig.supylabel(lines, fontsize=8)
    style.legend(axes[0, 0], ncols=len(modes))
    return style.save(fig, run, name, points, caption)


def steps(run: style.Place, lines: pd.DataFrame) -> Path:
    """Draw each mode's decode step over that of vLLM never patched, in every setting measured.

    Args:
        lines: of `nwor_lab.bench.gpu_steps.step_ratios`, those that are to be drawn.
    """
    points = lines[lines["mode"] != "vllm"].sort_values(
        ["k", "kv_heads", "kv_cache_dtype", "prompt", "batch"], ascending=[False, False, True, True, True]
    )
    points = points.assign(ratio=points["step"])
    caches = points["kv_cache_dtype"].replace("auto", "bf16")
    panels = "k=" + points["k"].astype(str) + ", " + points["kv_heads"].astype(str) + " KV heads, " + caches
    if points.get("gpu", pd.Series(dtype=str)).nunique() > 1:
        panels = points["gpu"] + ", " + panels
    points = points.assign(panel=panels, setting=[f"{row.prompt:,} x {row.batch}" for row in points.itertuples()])
    left_out = int(points["ratio"].isna().sum())
    caption = (
        "Time of a decode step over that of vLLM never patched, in the same run: left of the line the mode is faster. "
        "A line a setting (tokens of the prompt x requests), median over pairs of repeats, whiskers from the least to "
        "the greatest repeat. `direct`, the control, has the attention kernel of `stage` and writes every row: what it "
        f"gains is the kernel's. {left_out} of {len(points)} are left out: not at parity, or with repeats more than "
        f"{MAX_SPREAD:.0%} apart."
    )
    return dots(run, "steps", points, "step time over unpatched vLLM's (below 1: faster)", "prompt x requests", caption)


def serving(run: style.Place, summary: pd.DataFrame) -> Path:
    """Draw each mode's served tokens a second over those of vLLM never patched, a line a load.

    Args:
        summary: `nwor_lab.serving.table.summary`.
    """
    points = summary[summary["mode"] != "off"]
    points = points.assign(setting=points["load"] + " (" + points["passes"].astype(str) + ")")
    caption = (
        "Output tokens a second over those of vLLM never patched, by vLLM's own client, in the same pass over the "
        "loads: right of the line the mode serves more. Where requests come at a rate, an answer's own tokens a "
        "second. Medians of the passes, whose number is in brackets; between the whiskers the median lies with a "
        f"probability of {SURE:.0%} (of fewer than five passes they are the least and the greatest). Without parity, "
        f"as {int(points['ratio'].isna().sum())} of {len(points)} are, no speed is shown."
    )
    columns = ["panel", "setting", "mode", "ratio", "low", "high"]
    panel = points["gpu"].str.split().str[0] + ", " + table.setting(points) if "gpu" in points else "serving"
    points = points.assign(panel=panel)[columns]
    axis = "tokens a second over unpatched vLLM's (above 1: faster)"
    return dots(run, "serving", points, axis, "load (passes)", caption, absent="no parity")


def cliff(run: style.Place, over: pd.DataFrame, k: int = 8, kv_heads: int = 8) -> Path:
    """Draw a layer's time over that of each attention of vLLM's alone, by context and batch, a panel an attention.

    Args:
        over: `nwor_lab.gpu.layer_times.over_each` of table `gpu_cliff`; of it `k` drafts and so many KV heads.
    """
    from nwor_lab.gpu.layer_times import EACH

    rows = over[(over["k"] == k) & (over["kv_heads"] == kv_heads)].sort_values(["batch", "context"])
    drawn = rows.melt(["context", "batch"], list(EACH.values()), "panel", "ratio").dropna(subset="ratio")
    contexts = sorted(drawn["context"].unique())
    drawn = drawn.assign(at=drawn["context"].map(contexts.index), requests=[f"batch {n:>2}" for n in drawn["batch"]])
    fig, axes = style.figure(style.TWO_COLUMNS, 2.4, ncols=drawn["panel"].nunique(), sharey=True)
    for ax, (panel, part) in zip(axes, drawn.groupby("panel", sort=False), strict=True):
        style.series(ax, part, "at", "ratio", "requests", style.styles(drawn["requests"]))
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set(title=panel, xlabel="context", ylim=(0, None))
        ax.set_xticks(range(len(contexts)), [f"{context // 1024}k" for context in contexts])
    axes[0].set_ylabel("layer time over vLLM's\n(below 1: faster)")
    style.legend(axes[0], ncols=4)
    caption = (
        "Verify attention and write of one layer: time of this kit's one launch over that of vLLM's attention with its "
        "write. FlashAttention 2, which an A100 takes, was forced on an H200; like Triton it does not split a window's "
        f"context, and FlashAttention 3 (best split) does. A token and {k} drafts a request, {kv_heads} KV heads, bf16."
        " Medians, empty kernel taken off, cold L2 cache."
    )
    return style.save(fig, run, "cliff", drawn.drop(columns=["at", "requests"]), caption)


PARTS = {
    "matmul": "#D9D9D9", "attention": "#0072B2", "KV write": "#D55E00", "NWOR": "#009E73", "other": "#A6A6A6",
    "communication": "#CC79A7", "no kernel": "#FFFFFF",
}  # fmt: skip
"""Kinds of kernels in a step, in the order of their bars, and what is left of the step."""


def step_parts(run: style.Place, table: pd.DataFrame) -> Path:
    """Draw what a decode step's time is made of: kernels by kind, and time without one, in shares of vanilla's step.

    Args:
        table: rows of `gpu_direct` of one setting but for the batch: metrics `step_ms`, and `kernel_us` by `kind`.
    """
    steps = table[table["metric"] == "step_ms"].groupby(["batch", "mode"])["value"].median()
    parts = table[table["metric"] == "kernel_us"].groupby(["batch", "mode", "kind"])["value"].mean().unstack() / 1e3
    parts = parts.assign(**{"no kernel": (steps - parts.sum(axis=1)).clip(lower=0)})
    shares = 100 * parts.div(steps.xs("vllm", level="mode"), axis=0, level="batch")
    batches, kinds = shares.index.unique("batch"), [kind for kind in PARTS if kind in shares and shares[kind].sum() > 0]
    fig, axes = style.figure(style.TWO_COLUMNS, 2.6, ncols=len(batches), sharey=True)
    for ax, batch in zip(axes, batches, strict=True):
        drawn = shares.loc[batch].loc[["vllm", "direct", "stage"], kinds].fillna(0)
        look: Any = {"width": 0.7, "edgecolor": "black", "linewidth": 0.3, "rot": 0, "legend": False}
        drawn.plot.bar(ax=ax, stacked=True, color=PARTS, **look)
        for container, hatch in zip(ax.containers, style.HATCHES, strict=False):
            for bar in container:
                bar.set_hatch(hatch)
        ax.set(title=f"batch {batch}", xlabel="", ylim=(0, None))
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("% of unpatched vLLM's step")
    style.legend(axes[0], ncols=len(kinds))
    written = shares.xs("vllm", level="mode")["KV write"]
    caption = (
        "What a decode step is made of, in shares of the step of vLLM never patched: GPU time of kernels by kind, and "
        "the time in which none runs (the host's). The write of keys and values, which is all that not writing could "
        f"save, takes {written.min():.1f} to {written.max():.1f} % of it. `direct`, the control, and `stage` have an "
        "attention kernel that writes too; NWOR's own launches open the window and commit."
    )
    data = shares.reset_index().melt(["batch", "mode"], var_name="kind", value_name="percent")
    return style.save(fig, run, "step_parts", data, caption)
