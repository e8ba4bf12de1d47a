# SPDX-License-Identifier: Apache-2.0
"""Figures of whole steps: each mode's time over vanilla's, what the paged write takes of it, and what a step leaves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab import results
from nwor_lab.model import predicted, ratios
from nwor_lab.plots import style

CACHE = {"kv_heads": "{} KV heads", "tp": "TP={}", "kv_cache_dtype": "{}"}
"""Columns that tell one cache from another, and how each is named."""


def step_ratio(run: results.Run | Path, steps: pd.DataFrame) -> Path:
    """Draw the step-time ratio of each mode over the batch, a panel for each cache and k.

    Args:
        steps: rows of table `gpu_steps`.
    """
    every = predicted.against_measured(steps)
    points = every[ratios.steady(every)].copy()
    points["cache"] = _caches(points, ", ")
    points["prompt"] = points["prompt"].astype(int) if "prompt" in points else 0
    points = points.sort_values([name for name in ("tp", "kv_heads", "kv_cache_dtype", "k") if name in points])
    panels = list(points.groupby(["cache", "k"], sort=False))
    prompts, batches = sorted(points["prompt"].unique()), sorted(points["batch"].unique())
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (style.TWO_COLUMNS if columns > 1 else style.COLUMN, 0.7 + 1.4 * lines)
    fig, axes = style.figure(*size, nrows=lines, ncols=columns, sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, ((cache, k), panel) in zip(axes.flat, panels, strict=False):
        ax.axhline(1, color="black", linewidth=0.8)
        for mode, (n, prompt) in itertools.product(style.ordered(panel["mode"].unique()), enumerate(prompts)):
            here = panel[(panel["mode"] == mode) & (panel["prompt"] == prompt)].sort_values("batch")
            _ratio_line(ax, here, batches, mode, n, prompt if len(prompts) > 1 else 0)
        ax.set_xticks(range(len(batches)), batches)
        ax.set_title(f"{cache}, k={k}")
        ax.set_ylim(min(1, points["measured"].min()) - 0.03, max(1, points["measured"].max()) + 0.03)
    for ax in axes[:, 0]:
        ax.set_ylabel("step over vanilla's")
    for n, ax in enumerate(axes.flat):
        if n + columns >= len(panels):
            ax.set_xlabel("batch")
            ax.tick_params(labelbottom=True)
    named = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(named.values(), named.keys(), loc="outside upper center", ncols=3)
    caption = (
        "Time of an engine step over vanilla's in the same run, by batch, draft length and cache: median over pairs of "
        "repeats, one in each order of turns, whiskers from the least to the greatest repeat. Below one the mode is "
        f"faster. Left out, since their repeats lay more than {ratios.UNSTEADY:.0%} apart: "
        f"{len(every) - len(points)} of {len(every)}. Run {style.runs_of(steps)}."
    )
    return style.save(fig, run, "step_ratio", points, caption)


def _ratio_line(ax: Any, here: pd.DataFrame, batches: list[Any], mode: str, n: int, prompt: Any) -> None:
    if here.empty:
        return
    look, at = style.LOOK[mode], [batches.index(batch) + 0.08 * n for batch in here["batch"]]
    spread = np.array([here["measured"] - here["low"], here["high"] - here["measured"]])
    label = look.label + (f", prompt {prompt}" if prompt else "")
    fill = ("white", look.color, "black")[n % 3] if prompt else look.color
    kind = {"color": look.color, "marker": look.marker, "linestyle": look.linestyle, "markerfacecolor": fill}
    ax.errorbar(at, here["measured"], spread, elinewidth=0.6, capsize=1.5, linewidth=0.8, label=label, **kind)


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
        f"layers and ranks. Vanilla leaves every rejected row behind; the modes leave none. Run {style.runs_of(dirty)}."
    )
    return style.save(fig, run, "left_behind", rows, caption)


def write_share(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of a step that the paged write takes, by batch, KV heads and cache, a panel for each TP."""
    rows = frame[frame["metric"] == "kv_write_share"].copy()
    rows["cache"] = _caches(rows.drop(columns="tp"), ", ")
    rows["percent"] = 100 * rows["value"]
    panels = list(rows.groupby("tp"))
    # In all panels: else a cache would have another look where one is missing, and a batch another place.
    bars = rows[["cache"]].drop_duplicates().merge(rows[["batch"]].drop_duplicates(), how="cross")
    fig, axes = style.figure(height=0.8 + 1.4 * len(panels), nrows=len(panels), sharex=True, sharey=True, squeeze=False)
    for ax, (tp, panel) in zip(axes.flat, panels, strict=True):
        style.bars(ax, bars.merge(panel, how="left"), x="batch", y="percent", by="cache")
        ax.set_ylabel("% of a step")
        if len(panels) > 1:
            ax.set_title(f"TP={tp}")
    axes.flat[-1].set(xlabel="batch", ylim=(0, None))
    style.legend(axes.flat[0])
    caption = (
        "Share of a speculative step in vanilla vLLM that its paged write of keys and values takes on the GPU: the "
        f"most that any mode could save by not writing. Run {style.runs_of(rows)}."
    )
    return style.save(fig, run, "kv_write_share", rows, caption)


def _caches(rows: pd.DataFrame, between: str) -> list[str]:
    """Names of the rows' caches, of what varies among them."""
    shown = [name for name in CACHE if name in rows and (name == "kv_heads" or rows[name].nunique() > 1)]
    values = rows[shown].replace("auto", "bf16").itertuples(index=False)
    return [between.join(CACHE[name].format(value) for name, value in zip(shown, one, strict=True)) for one in values]
