# SPDX-License-Identifier: Apache-2.0
"""Figures of whole steps: each mode's time over vanilla's, what the paged write takes of it, and what a step leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor import plot, predicted, results

CACHE = {"kv_heads": "{} KV heads", "tp": "TP={}", "kv_cache_dtype": "{}"}
"""Columns that tell one cache from another, and how each is named."""


def step_ratio(run: results.Run | Path, steps: pd.DataFrame) -> Path:
    """Draw the step-time ratio of each mode over the batch, a panel for each k and each cache.

    Args:
        steps: rows of table `gpu_steps`.
    """
    points = predicted.against_measured(steps)
    points["cache"] = _caches(points, "\n")
    points["prompt"] = points.get("prompt", 0)
    caches, ks, prompts = (
        list(points["cache"].unique()),
        sorted(points["k"].unique()),
        sorted(points["prompt"].unique()),
    )
    size = (plot.TWO_COLUMNS if len(ks) > 1 else plot.COLUMN, 0.8 + 1.3 * len(caches))
    fig, axes = plot.figure(*size, nrows=len(caches), ncols=len(ks), sharex=True, sharey=True, squeeze=False)
    batches = sorted(points["batch"].unique())
    for line, cache in zip(axes, caches, strict=True):
        for ax, k in zip(line, ks, strict=True):
            ax.axhline(1, color="black", linewidth=0.8)
            for mode in plot.ordered(points["mode"].unique()):
                for n, prompt in enumerate(prompts):
                    keep = (points["cache"] == cache) & (points["k"] == k) & (points["mode"] == mode)
                    here = points[keep & (points["prompt"] == prompt)].sort_values("batch")
                    _ratio_line(ax, here, batches, mode, n, prompt if len(prompts) > 1 else 0)
            ax.set_xticks(range(len(batches)), batches)
        line[0].set_ylabel(f"{cache}\nover vanilla")
    for ax, k in zip(axes[0], ks, strict=True):
        ax.set_title(f"k = {k}")
        ax.set_ylim(min(1, points["measured"].min()) - 0.03, max(1, points["measured"].max()) + 0.03)
    for ax in axes[-1]:
        ax.set_xlabel("batch")
    every = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(every.values(), every.keys(), loc="outside upper center", ncols=3)
    caption = (
        "Time of an engine step over vanilla's in the same run, by batch, draft length and cache: median over repeats, "
        f"whiskers from least to greatest; where they leave the frame, the runs were not steady. Below one the mode is "
        f"faster. Run {plot.runs_of(steps)}."
    )
    return plot.save(fig, run, "step_ratio", points, caption)


def _ratio_line(ax: Any, here: pd.DataFrame, batches: list[Any], mode: str, n: int, prompt: Any) -> None:
    if here.empty:
        return
    look, at = plot.LOOK[mode], [batches.index(batch) + 0.08 * n for batch in here["batch"]]
    spread = np.array([here["measured"] - here["low"], here["high"] - here["measured"]])
    label = look.label + (f", prompt {prompt}" if prompt else "")
    fill = ("white", look.color, "black")[n % 3] if prompt else look.color
    kind = {"color": look.color, "marker": look.marker, "linestyle": look.linestyle, "markerfacecolor": fill}
    ax.errorbar(at, here["measured"], spread, elinewidth=0.6, capsize=1.5, linewidth=0.8, label=label, **kind)


def left_behind(run: results.Run | Path, dirty: pd.DataFrame) -> Path:
    """Draw the slots that each step left dirty in each mode.

    Args:
        dirty: rows `dirty_slots` of `nwor.endtoend.dirty_rows`, as a table.
    """
    rows = dirty.groupby(["mode", "step"], as_index=False)["value"].sum()
    fig, ax = plot.figure(height=2.0)
    for n, mode in enumerate(plot.ordered(rows["mode"].unique())):
        here = rows[rows["mode"] == mode]
        plot.line(ax, here["step"], here["value"], mode, markersize=3, markevery=(n, 3))
    ax.set(xlabel="engine step", ylabel="dirty slots, all layers", ylim=(-0.04 * rows["value"].max(), None))
    plot.legend(ax, ncols=3)
    caption = (
        "Slots of the target's paged cache whose bytes a step changed although its row was not kept, summed over layers "
        f"and ranks. Vanilla leaves every rejected row behind; the modes leave none. Run {plot.runs_of(dirty)}."
    )
    return plot.save(fig, run, "left_behind", rows, caption)


def write_share(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of a step's GPU time that the paged write takes, by batch, KV heads and TP."""
    rows = frame[frame["metric"] == "kv_write_share"].copy()
    rows["cache"] = _caches(rows, ", ")
    rows["percent"] = 100 * rows["value"]
    fig, ax = plot.figure()
    plot.bars(ax, rows, x="batch", y="percent", by="cache")
    ax.set(xlabel="batch", ylabel="% of a step's GPU time", ylim=(0, None))
    plot.legend(ax)
    caption = (
        "Share of all GPU time of a speculative step in vanilla vLLM that its paged write of keys and values takes: the "
        f"most that any mode could save by not writing. Run {plot.runs_of(rows)}."
    )
    return plot.save(fig, run, "kv_write_share", rows, caption)


def _caches(rows: pd.DataFrame, between: str) -> list[str]:
    shown = [name for name in CACHE if name in rows]
    values = rows[shown].itertuples(index=False)
    return [between.join(CACHE[name].format(value) for name, value in zip(shown, one, strict=True)) for one in values]
