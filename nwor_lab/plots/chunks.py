# SPDX-License-Identifier: Apache-2.0
"""Figure of chunk-based verification: the rows that chunks save, and where that is worth their forwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nwor_lab import results
from nwor_lab.model.breakeven import survival_of
from nwor_lab.model.chunks import PRICED, time_ratio, window_rows
from nwor_lab.plots import style

ACCEPTANCES = (0.5, 0.9, 0.98)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 1024, 4096, 8192, 16384, 32768)
BATCH, CONTEXT = 32, 512
"""Of the panels over context and over batch."""
PANELS = {
    "rows computed": "rows a chunk",
    f"time, {CONTEXT} tokens of context": "requests in the batch",
    f"time, {BATCH} requests": "tokens of context",
}
"""Titles, and what is on the x-axis."""


def ratios(survival: Sequence[float], chunk: int) -> pd.DataFrame:
    """Chunks over one forward by the model, for windows of `len(survival)` drafts: `panel`, `drafts` (how they are
    accepted), `x`, `y`."""
    k = len(survival)
    series = {f"acceptance {each:g}": survival_of(each, k) for each in ACCEPTANCES}
    series["drafts looked up, this run"] = list(survival)
    sizes = sorted({*(2**n for n in range(1, 12) if 2**n <= k), min(chunk, 1 + k), 1 + k})
    rows, time, longer = PANELS
    return pd.DataFrame(
        {"panel": panel, "drafts": drafts, "x": x, "y": y}
        for drafts, shares in series.items()
        for panel, points in (
            (rows, [(c, window_rows("off", shares, c).computed / (1 + k)) for c in sizes]),
            (time, [(n, time_ratio(shares, chunk, n, CONTEXT)) for n in BATCHES]),
            (longer, [(n, time_ratio(shares, chunk, BATCH, n)) for n in CONTEXTS]),
        )
        for x, y in points
    )


def when_they_pay(run: results.Run | Path, survival: Sequence[float], chunk: int, counted: float) -> Path:
    """Draw rows computed and time of a window in chunks over one forward's.

    Args:
        survival: [k], counted where drafts were looked up; the other series have one acceptance at each position.
        chunk: rows of a chunk, and `counted`: rows computed so over those of one forward, in the same run.
    """
    frame = ratios(survival, chunk)
    facets = {"legend_out": False, "despine": False, "sharex": False}
    grid = style.relplot(frame, "x", "y", "drafts", panel=2.1, ncols=5, col="panel", facet_kws=facets)
    for ax, (title, label) in zip(grid.axes.flat, PANELS.items(), strict=True):
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set(title=title, xlabel=label, xscale="log", yscale="log")
        shown = sorted(frame.loc[frame["panel"] == title, "x"].unique())
        ax.set_xticks(shown, [f"{x // 1024}k" if x >= 1024 else str(x) for x in shown])
        ax.minorticks_off()
    first, ticks = grid.axes.flat[0], [0.1, 0.2, 0.5, 1, 2, 5]
    ring = {"linestyle": "none", "marker": "o", "color": "black", "markerfacecolor": "none", "markersize": 8}
    first.legend(handles=first.plot(chunk, counted, label="counted, this run", **ring), loc="lower right")
    first.set(yticks=ticks, yticklabels=map(str, ticks), ylabel="chunks over one forward")
    caption = (
        f"Windows of {len(survival)} drafts in chunks over the same in one forward, by the model; below 1 chunks are "
        "less. Left: rows computed; the ring is what the reference model counted. Middle and right: time in chunks "
        f"of {chunk} rows of {PRICED} in bf16 on an H200 at its data sheet's peak, with {CONTEXT} tokens of "
        f"context, and with {BATCH} requests. Lines: drafts accepted with the same probability at each position, and "
        "with the survival that the reference model counted where drafts are looked up in the text."
    )
    return style.save(grid, run, "chunked_verification", frame, caption)
