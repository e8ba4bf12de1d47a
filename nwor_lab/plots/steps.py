# SPDX-License-Identifier: Apache-2.0
"""Figures of whole steps: each mode's time over vanilla's, what the paged write takes of it, and what a step leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, results
from nwor_lab.model import predicted, ratios
from nwor_lab.plots import style

HEADLINE = paths.RECORDED / "headline.png"


def ratio_points(steps: pd.DataFrame) -> pd.DataFrame:
    """One row a mode and setting of table `gpu_steps`: `measured` (step over vanilla's), `low`, `high`, `stable`.

    `heads` and `cache` name the cache in words; `prompt` is 0 where prompts were not of one length.
    """
    points = predicted.against_measured(steps)
    points["stable"] = ratios.is_stable(points)
    points["cache"] = points.get("kv_cache_dtype", pd.Series("auto", points.index)).replace("auto", "bf16")
    points["heads"] = [f"{heads} KV heads" for heads in points["kv_heads"]]
    points["prompt"] = points.get("prompt", pd.Series(0, points.index)).fillna(0).astype(int)
    order = [name for name in ("tp", "kv_heads", "cache", "k", "prompt", "mode", "batch") if name in points]
    return points.sort_values(order, ignore_index=True)


def headline(path: Path = HEADLINE, steps: pd.DataFrame | None = None) -> Path:
    """Draw the README's figure as a PNG: `stage` and `cow` over vanilla by batch, a panel for each cache dtype.

    One rank, k=8, prompts of 512 tokens, 32 and 8 KV heads; error bars are the range over repeats.

    Args:
        steps: table `gpu_steps`, by default the recorded one.
    """
    points = ratio_points(results.read_table("gpu_steps", paths.RECORDED) if steps is None else steps)
    points = points[points["stable"]].query("tp == 1 and k == 8 and prompt == 512")
    panels = list(points.groupby("cache"))
    fig, axes = style.figure(style.TWO_COLUMNS, 2.5, ncols=len(panels), sharey=True, squeeze=False)
    batches = sorted(points["batch"].unique())
    for ax, (cache, panel) in zip(axes[0], panels, strict=True):
        series = panel.sort_values(["mode", "kv_heads"], ascending=False).groupby(["mode", "kv_heads"], sort=False)
        for n, ((mode, heads), rows) in enumerate(series):
            rows = rows.sort_values("batch")
            look = style.MODE_STYLE[str(mode)]
            at = [batches.index(batch) + 0.06 * (n - 1.5) for batch in rows["batch"]]
            spread = [rows["measured"] - rows["low"], rows["high"] - rows["measured"]]
            ax.errorbar(
                at, rows["measured"], spread, color=look.color, marker=look.marker, capsize=2, elinewidth=0.8,
                linestyle="-" if heads == 32 else "--", markerfacecolor=look.color if heads == 32 else "white",
                label=f"{look.label}, {heads} KV heads",
            )  # fmt: skip
        ax.axhline(1, color="black", linewidth=1, label="vanilla vLLM")
        only = "" if panel["mode"].nunique() > 1 else " (copy-on-write was not measured)"
        ax.set(title=f"{cache} cache{only}", xlabel="requests in the batch")
        ax.set_xticks(range(len(batches)), batches)
    axes[0, 0].set_ylabel("step time over vanilla's\n(below 1: faster)")
    style.legend(axes[0, 0], ncols=3)
    with results.whole_file(path) as part:
        fig.savefig(part, format="png", dpi=200, metadata={"Software": None})
    style.close(fig)
    return path


def step_ratio(run: results.Run | Path, steps: pd.DataFrame) -> Path:
    """Draw the whole grid of step-time ratios over the batch, a panel for each cache, number of ranks and k.

    Settings that the tuning was not searched on (column `tuned_on` is False) are open circles.

    Args:
        steps: rows of table `gpu_steps`.
    """
    every = ratio_points(steps)
    points = every[every["stable"]].copy()
    points["panel"] = [
        f"{row.heads}, {row.cache}, k={row.k}" + (f",\n{row.tp} ranks" if row.tp > 1 else "")
        for row in points.itertuples()
    ]
    vanilla = points.drop_duplicates(["panel", "batch"]).assign(
        mode="off", measured=1.0, low=1.0, high=1.0, tuned_on=True
    )
    points = pd.concat([points, vanilla], ignore_index=True)
    points["requests"] = points["batch"].astype(str)
    points["prompt of"] = [f"{prompt} tokens" for prompt in points["prompt"]]
    order = {"col_order": points["panel"].unique(), "style_order": points.sort_values("prompt")["prompt of"].unique()}
    points = points.sort_values("batch", kind="stable")  # the axis has batches as they come
    grid = style.relplot(
        points, "requests", "measured", "mode", style="prompt of", col="panel", col_wrap=4, ncols=4, **order
    )
    grid.set_titles("{col_name}").set_axis_labels("requests in the batch", "step / vanilla's")
    caption = (
        "Time of an engine step over vanilla's in the same run, by batch, draft length and cache: median over pairs of "
        "repeats, one in each order, whiskers from the least to the greatest repeat. Below the line the mode is "
        "faster; open circles are settings that the tuning was not searched on. "
        f"{len(every) - len(points)} of {len(every)} settings are left out: their repeats lay more than "
        f"{ratios.MAX_SPREAD:.0%} apart."
    )
    return style.save(grid, run, "step_ratio", points, caption)


def left_behind(run: results.Run | Path, dirty: pd.DataFrame) -> Path:
    """Draw the slots that each step left dirty in each mode.

    Args:
        dirty: rows `dirty_slots` of `nwor_lab.experiments.endtoend.dirty_rows`, as a table.
    """
    rows = dirty.groupby(["mode", "step"], as_index=False)["value"].sum()
    fig, ax = style.figure(height=2.0)
    for n, mode in enumerate(style.ordered(rows["mode"].unique())):
        here = rows[rows["mode"] == mode]
        style.line(ax, here["step"], here["value"], mode, markersize=3, markevery=(n, 3))
    ax.set(xlabel="engine step", ylabel="dirty slots, all layers", ylim=(-0.04 * rows["value"].max(), None))
    style.legend(ax, ncols=3)
    caption = (
        "Slots of the target's paged cache whose bytes a step changed although its row was not kept, summed over "
        "layers and ranks. Vanilla leaves every rejected row behind; the modes leave none."
    )
    return style.save(fig, run, "left_behind", rows, caption)


def write_share(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of a step that the paged write takes, by batch, KV heads and cache, a panel for each TP."""
    rows = frame[frame["metric"] == "kv_write_share"].copy()
    dtypes = rows.get("kv_cache_dtype", pd.Series("auto", rows.index)).replace("auto", "bf16")
    rows["cache"] = [f"{heads} KV heads, {dtype}" for heads, dtype in zip(rows["kv_heads"], dtypes, strict=True)]
    rows["percent"] = 100 * rows["value"]
    panels: list[tuple[Any, pd.DataFrame]] = list(rows.groupby("tp"))
    # Every panel has all caches and batches, so that each keeps its colour and place where one was not measured.
    every = rows[["cache"]].drop_duplicates().merge(rows[["batch"]].drop_duplicates(), how="cross")
    fig, axes = style.figure(height=0.8 + 1.4 * len(panels), nrows=len(panels), sharex=True, sharey=True, squeeze=False)
    for ax, (tp, panel) in zip(axes.flat, panels, strict=True):
        style.bars(ax, every.merge(panel, how="left"), x="batch", y="percent", by="cache")
        ax.set(ylabel="% of a step", title=f"{tp} rank" + "s" * (tp > 1))
    axes.flat[-1].set(xlabel="requests in the batch", ylim=(0, None))
    style.legend(axes.flat[0])
    caption = (
        "Share of a speculative step in vanilla vLLM that its paged write of keys and values takes on the GPU: the "
        "most that a mode could save by not writing."
    )
    return style.save(fig, run, "kv_write_share", rows, caption)
