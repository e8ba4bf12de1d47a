# SPDX-License-Identifier: Apache-2.0
"""How every figure of the kit looks, and how it is saved.

A figure is sized for a paper's column, readable without colour (each mode has its own marker, line and hatch) and
byte-stable: the same data gives the same PDF and PNG.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns

from nwor_lab import results

COLUMN, TWO_COLUMNS = 3.35, 7.0
"""Widths of a figure in inches: one column of a two-column paper, and the page."""


@dataclass(frozen=True)
class Look:
    label: str
    color: str
    marker: str
    linestyle: str
    hatch: str


# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by marker, line and hatch.
LOOK = {
    "off": Look("off (vanilla)", "#555555", "o", "-", ""),
    "blind": Look("blind staging", "#E69F00", "X", ":", "xx"),
    "cow": Look("copy-on-write", "#D55E00", "s", "--", "//"),
    "stage": Look("stage", "#0072B2", "^", "-.", ".."),
}
OTHER = ("#009E73", "#CC79A7", "#56B4E9", "#000000", "#F0E442", "#999999")
"""Colours for series that are no mode, such as published figures."""

HATCHES = ("", "//", "..", "xx", "\\\\", "")
"""Hatches of bars that are no mode."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.use": True,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.hashsalt": "nwor",
}


def use() -> None:
    """Make the kit's style this process's own."""
    sns.set_style("whitegrid")
    mpl.rcParams.update(STYLE)


def figure(width: float = COLUMN, height: float = 2.2, ncols: int = 1, **kwargs: Any) -> tuple[Any, Any]:
    """Return `(fig, axes)` in the kit's style; `width` and `height` in inches, `kwargs` as `plt.subplots` takes."""
    use()
    return plt.subplots(ncols=ncols, figsize=(width, height), **kwargs)


def close(fig: Any = "all") -> None:
    """Forget `fig`, or every figure that is open, so that a notebook does not show it."""
    plt.close(fig)


def bars(ax: Any, frame: pd.DataFrame, x: str, y: str = "value", by: str = "mode") -> None:
    """Draw grouped bars of `frame[y]` over `frame[x]`, one bar a mode in its look.

    Several rows of one group are drawn as their median with the range from least to greatest as a whisker.

    Raises:
        ValueError: more series than looks, so that two would be taken for one.
    """
    groups = sorted(frame[x].unique())
    series = ordered(frame[by].unique())
    if len([name for name in series if name not in LOOK]) > len(OTHER):
        raise ValueError(f"{len(series)} series have {len(OTHER)} looks: draw them in several panels")
    width = 0.8 / len(series)
    for n, name in enumerate(series):
        look = LOOK.get(name) or Look(name, OTHER[n % len(OTHER)], "D", "-", HATCHES[n % len(HATCHES)])
        rows = frame[frame[by] == name].groupby(x)[y]
        middle = rows.median().reindex(groups)
        spread = np.array([middle - rows.min().reindex(groups), rows.max().reindex(groups) - middle])
        at = np.arange(len(groups)) + (n - (len(series) - 1) / 2) * width
        whiskers = {"yerr": spread, "error_kw": {"elinewidth": 0.6, "capsize": 1.5}} if (rows.size() > 1).any() else {}
        ax.bar(at, middle, width, label=look.label, color=look.color, hatch=look.hatch, edgecolor="white", **whiskers)
    ax.set_xticks(np.arange(len(groups)), [str(group) for group in groups])
    ax.set_xlim(-0.5, len(groups) - 0.5)
    ax.grid(axis="x", visible=False)


def line(ax: Any, x: Any, y: Any, mode: str, low: Any = None, high: Any = None, **kwargs: Any) -> None:
    """Draw one mode's line in its look, with a band from `low` to `high` where they are given."""
    look = LOOK[mode]
    look_args = {"color": look.color, "marker": look.marker, "linestyle": look.linestyle, "label": look.label}
    ax.plot(x, y, **{**look_args, **kwargs})
    if low is not None:
        ax.fill_between(x, low, high, color=kwargs.get("color", look.color), alpha=0.2, linewidth=0)


def legend(ax: Any, ncols: int = 2) -> None:
    """Put the legend of `ax` above the whole figure, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(handles, labels, loc="outside upper center", ncols=ncols, columnspacing=1, handlelength=2.2)


def ordered(names: Any) -> list[str]:
    """Sort series: the modes in `LOOK`'s order, then the rest by name."""
    rank = {name: n for n, name in enumerate(LOOK)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), str(name)))


def runs_of(rows: pd.DataFrame) -> str:
    """Name the runs that `rows` are from, for a caption."""
    return ", ".join(sorted({str(run) for run in rows["run_id"]} - {""})) or "unnamed"


def save(fig: Any, run: results.Run | Path | str, name: str, data: pd.DataFrame, caption: str) -> Path:
    """Save a figure with its data and its caption; return the PDF's path.

    Writes `<run>/figures/<name>.pdf`, `.png` (300 dpi), `.csv` (what is drawn) and `.txt` (the caption).

    Raises:
        ValueError: there is nothing drawn (`data` is empty) or no caption.
    """
    if data.empty or not caption.strip():
        raise ValueError(f"figure {name} needs data and a caption")
    folder = Path(run.directory if isinstance(run, results.Run) else run) / "figures"
    use()
    with mock.patch.dict(os.environ, {"SOURCE_DATE_EPOCH": "0"}):
        for suffix, metadata in (
            ("pdf", {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None}),
            ("png", {"Software": None}),
        ):
            with results.whole_file(folder / f"{name}.{suffix}") as part:
                fig.savefig(part, format=suffix, dpi=300, metadata=metadata)
    results.write_table(folder / f"{name}.csv", data)
    results.write_text(folder / f"{name}.txt", caption.strip() + "\n")
    return folder / f"{name}.pdf"
