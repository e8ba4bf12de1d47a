# SPDX-License-Identifier: Apache-2.0
"""Figures of whole steps: each mode's time over vanilla's, what the paged write takes of it, and what a step leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, results
from nwor_lab.experiments.gpu_steps import MAIN, SETTING, step_ratios
from nwor_lab.model import predicted, ratios
from nwor_lab.plots import style

HEADLINE = paths.RECORDED / "headline.png"


def ratio_points(steps: pd.DataFrame) -> pd.DataFrame:
    """One row a mode and setting of table `gpu_steps`: `measured` (step over vanilla's), `low`, `high`, `shown`.

    Shown are those that have a ratio in `step_ratios`. `heads` and `cache` name the cache in words.
    """
    keys = [*(name for name in SETTING if name in steps), "mode"]
    shown = step_ratios(steps).set_index(keys)["step"].notna().rename("shown")
    points = predicted.against_measured(steps).astype({"prompt": int}).join(shown, on=keys)
    points["cache"] = points["kv_cache_dtype"].replace("auto", "bf16")
    points["heads"] = points["kv_heads"].astype(str) + " KV heads"
    return points.sort_values(["tp", "kv_heads", "cache", "k", "prompt", "mode", "batch"], ignore_index=True)


def headline(path: Path = HEADLINE, steps: pd.DataFrame | None = None) -> Path:
    """Draw the README's figure as a PNG: `stage` and its control `direct` over vLLM never patched, by batch.

    k=8, prompts of 512 tokens, bf16. A panel for each number of KV heads; error bars are the range over repeats.

    Args:
        steps: table `gpu_direct`, by default the recorded one.
    """
    points = step_ratios(results.read_table("gpu_direct", paths.RECORDED) if steps is None else steps)
    points = points.query(f"{MAIN} and mode != 'vllm'").rename(columns={"step": "measured"})
    points["panel"] = points["kv_heads"].astype(str) + " KV heads"
    return _over_batch(
        path, points.sort_values("kv_heads", ascending=False, kind="stable"), "vanilla vLLM, never patched"
    )


def modes_over_batch(path: Path, steps: pd.DataFrame) -> Path:
    """Draw `stage` and `cow` over vanilla by batch as a PNG, a panel for each cache dtype.

    One rank, k=8, prompts of 512 tokens, 32 and 8 KV heads; error bars are the range over repeats.

    Args:
        steps: table `gpu_steps`.
    """
    points = ratio_points(steps)
    points = points[points["shown"]].query("tp == 1 and k == 8 and prompt == 512")
    only = points.groupby("cache")["mode"].transform("nunique").map(lambda n: "" if n > 1 else ", cow not measured")
    points["panel"] = points["cache"] + " cache" + only
    return _over_batch(path, points, "vanilla vLLM")


def _over_batch(path: Path, points: pd.DataFrame, baseline: str) -> Path:
    """Draw `measured` over the batch, a panel for each value of column `panel` in the order of its rows."""
    names = points["panel"].unique()
    fig, axes = style.figure(style.TWO_COLUMNS, 2.5, ncols=len(names), sharey=True, squeeze=False)
    batches = sorted(points["batch"].unique())
    for ax, name in zip(axes[0], names, strict=True):
        panel = points[points["panel"] == name]
        several = panel["kv_heads"].nunique() > 1
        series = panel.sort_values(["mode", "kv_heads"], ascending=False).groupby(["mode", "kv_heads"], sort=False)
        for n, ((_, heads), rows) in enumerate(series):
            look: Any = (
                {"linestyle": "--", "markerfacecolor": "white"} if several and heads != 32 else {"linestyle": "-"}
            )
            at = [batches.index(batch) + 0.06 * (n - (len(series) - 1) / 2) for batch in rows["batch"]]
            rows, label = rows.assign(at=at).sort_values("at"), "{}" + f", {heads} KV heads" * several
            style.series(ax, rows, "at", "measured", "mode", label=label, elinewidth=0.8, capsize=2, **look)
        ax.axhline(1, color="black", linewidth=1, label=baseline)
        ax.set(title=name, xlabel="requests in the batch")
        ax.set_xticks(range(len(batches)), batches)
    axes[0, 0].set_ylabel("step time over vanilla's\n(below 1: faster)")
    style.legend(axes[0, 0], ncols=3)
    style.write(fig, path, dpi=200)
    style.close(fig)
    return path


def step_ratio(run: results.Run | Path, steps: pd.DataFrame) -> Path:
    """Draw the whole grid of step-time ratios over the batch, a panel for each cache, number of ranks and k.

    Settings that the tuning was not searched on (column `tuned_on` is False) are open circles.

    Args:
        steps: rows of table `gpu_steps`.
    """
    every = ratio_points(steps)
    points = every[every["shown"]].copy()
    ranks = points["tp"].map(lambda tp: f",\n{tp} ranks" if tp > 1 else "")
    points["panel"] = points["heads"] + ", " + points["cache"] + ", k=" + points["k"].astype(str) + ranks
    ticks = sorted(points.loc[points["tuned_on"].astype(bool), "batch"].unique())
    equal = {"mode": "off", "measured": 1.0, "low": 1.0, "high": 1.0, "tuned_on": True}
    points = pd.concat([points, points.drop_duplicates(["panel", "batch"]).assign(**equal)], ignore_index=True)
    points["prompt of"] = points["prompt"].astype(str) + " tokens"
    order = {"col_order": points["panel"].unique(), "style_order": points.sort_values("prompt")["prompt of"].unique()}
    shown: Any = {"style": "prompt of", "col": "panel", "col_wrap": 4, "ncols": 4}
    grid = style.relplot(points, "batch", "measured", "mode", **shown, **order)
    grid.set(xscale="log", xticks=ticks, xticklabels=ticks)
    grid.set_titles("{col_name}").set_axis_labels("requests in the batch", "step / vanilla's")
    caption = (
        "Time of an engine step over vanilla's in the same run, by batch, draft length and cache: median over pairs of "
        "repeats, one in each order, whiskers from the least to the greatest repeat. Below the line the mode is "
        "faster; open circles are settings that the tuning was not searched on. "
        f"{(~every['shown']).sum()} of {len(every)} settings are left out: not at parity, or their repeats lay more "
        f"than {ratios.MAX_SPREAD:.0%} apart."
    )
    return style.save(grid, run, "step_ratio", points, caption)


def left_behind(run: results.Run | Path, dirty: pd.DataFrame) -> Path:
    """Draw the slots that each step left dirty in each mode.

    Args:
        dirty: rows `dirty_slots` of `nwor_lab.experiments.endtoend.dirty_rows`, as a table.
    """
    rows = dirty.groupby(["mode", "step"], as_index=False)["value"].sum()
    fig, ax = style.figure(height=2.0)
    for n, mode in enumerate(style.styles(rows["mode"])):
        style.series(ax, rows[rows["mode"] == mode], "step", "value", "mode", markersize=3, markevery=(n, 3))
    ax.set(xlabel="engine step", ylabel="dirty slots, all layers", ylim=(-0.04 * rows["value"].max(), None))
    style.legend(ax, ncols=3)
    caption = (
        "Slots of the target's paged cache whose bytes a step changed although its row was not kept, summed over "
        "layers and ranks. Vanilla and direct leave every rejected row behind; cow and stage leave none."
    )
    return style.save(fig, run, "left_behind", rows, caption)


def write_share(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of a step that the paged write takes, by batch, KV heads and cache, a panel for each TP."""
    rows = frame[frame["metric"] == "kv_write_share"].copy()
    dtypes = rows["kv_cache_dtype"].replace("auto", "bf16")
    rows["cache"], rows["percent"] = rows["kv_heads"].astype(str) + " KV heads, " + dtypes, 100 * rows["value"]
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
