# SPDX-License-Identifier: Apache-2.0
"""How every figure of the kit looks, and how it is saved.

A figure is sized for a paper's column, readable without colour (each mode has a marker, a line and a hatch of its own)
and byte-stable: the same data gives the same PDF and PNG.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns

from nwor_lab import results

COLUMN, TWO_COLUMNS = 3.35, 7.0
"""Widths of a figure in inches: one column of a two-column paper, and the page."""


class ModeStyle(NamedTuple):
    label: str
    color: str
    marker: str
    linestyle: str
    hatch: str


# The palette of Okabe and Ito: distinct for colour-blind readers, and in grey by marker, line and hatch.
MODE_STYLE = {
    "off": ModeStyle("vanilla (off)", "#555555", "o", "-", ""),
    "blind": ModeStyle("blind staging", "#E69F00", "X", ":", "xx"),
    "cow": ModeStyle("copy-on-write (cow)", "#D55E00", "s", "--", "//"),
    "direct": ModeStyle("direct (control)", "#009E73", "D", ":", "\\\\"),
    "stage": ModeStyle("stage", "#0072B2", "^", "-.", ".."),
}
OTHER = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555", "#000000")
"""Colours of series that are no mode, such as published figures."""
MARKERS = "^osDvPX*"
LINES = ("-", "--", ":", "-.", "-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "oo")
DASHES: Any = {"-": "", "--": (4, 2), ":": (1, 1), "-.": (4, 1, 1, 1)}
WHISKERS: Any = {"elinewidth": 0.6, "capsize": 1.5}
HELD_OUT: Any = {"linestyle": "none", "marker": "o", "markerfacecolor": "white"}
"""Markers of settings that the tuning was not searched on."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 6.5,
    "legend.title_fontsize": 6.5,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.hashsalt": "nwor",
}


def use() -> None:
    """Set the style of the kit in this process."""
    sns.set_style("whitegrid")
    mpl.rcParams.update(STYLE)


def figure(width: float = COLUMN, height: float = 2.2, ncols: int = 1, **kwargs: Any) -> tuple[Any, Any]:
    """Return `(fig, axes)` in the kit's style; `width` and `height` in inches, `kwargs` as `plt.subplots` takes."""
    use()
    return plt.subplots(ncols=ncols, figsize=(width, height), layout="constrained", **kwargs)


def close(fig: Any = "all") -> None:
    """Close `fig`, or every open figure, so that a notebook does not show it."""
    plt.close(fig)


def styles(names: Any) -> dict[Any, ModeStyle]:
    """The style of each series of `names`: the modes in the order of `MODE_STYLE`, then the rest by name.

    Raises:
        ValueError: more series than colours, so that two would look the same.
    """
    rank = {name: n for n, name in enumerate(MODE_STYLE)}
    names = sorted(set(names), key=lambda name: (rank.get(name, len(rank)), str(name)))
    if len(names) > len(OTHER):
        raise ValueError(f"{len(names)} series have {len(OTHER)} colours: draw them in several panels")
    free = zip(OTHER, MARKERS, LINES, HATCHES, strict=True)
    return {name: MODE_STYLE.get(name) or ModeStyle(str(name), *look) for name, look in zip(names, free, strict=False)}


def relplot(
    frame: pd.DataFrame, x: str, y: str, by: str, width: float = TWO_COLUMNS, panel: float = 1.5, ncols: int = 3,
    **kwargs: Any,
) -> sns.FacetGrid:  # fmt: skip
    """`seaborn.relplot` in the kit's style: a line for each value of column `by`, the legend above; see `save`.

    Args:
        frame: one row a point. Columns `low` and `high`, where there are such, are drawn as whiskers, and where column
            `tuned_on` is False the marker is an open circle.
        width: of the figure, `panel`: height of a panel, both in inches. `ncols`: columns of the legend.
        kwargs: as `seaborn.relplot` takes them, such as `col` and `col_wrap`; `style` is another column than `by`
            where line and marker mean something of their own.
    """
    use()
    looks = {look.label: look for look in styles(frame[by]).values()}
    shown = frame.assign(**{by: [MODE_STYLE[name].label if name in MODE_STYLE else str(name) for name in frame[by]]})
    lines: dict[str, Any] = {"markers": True}
    if "style" not in kwargs:
        lines = {"style": by, "style_order": list(looks)}
        lines["markers"] = {name: look.marker for name, look in looks.items()}
        lines["dashes"] = {name: DASHES[look.linestyle] for name, look in looks.items()}
    across = kwargs.get("col_wrap") or (frame[kwargs["col"]].nunique() if "col" in kwargs else 1)
    grid = sns.relplot(
        shown, x=x, y=y, hue=by, kind="line", errorbar=None, height=panel, aspect=width / across / panel,
        hue_order=list(looks), palette={name: look.color for name, look in looks.items()},
        **{"facet_kws": {"legend_out": False, "despine": False}, "legend": "full", **lines, **kwargs},
    )  # fmt: skip
    for ax, (_, rows) in zip(grid.axes.flat, grid.facet_data(), strict=False):
        if "low" in rows:
            series(ax, rows, x, y, by, looks, marker="", linestyle="none")
        if not rows.get("tuned_on", pd.Series(True)).all():
            held_out = rows[~rows["tuned_on"].astype(bool)].drop(columns=["low", "high"], errors="ignore")
            series(ax, held_out, x, y, by, looks, **HELD_OUT, zorder=5)
    if not frame.get("tuned_on", pd.Series(True)).all():
        marker = mpl.lines.Line2D([], [], color="black", **HELD_OUT)
        grid.figure.legend([marker], ["held out of the tuning"], loc="outside lower center")
    sns.move_legend(grid, "outside upper center", ncols=ncols, title=None, columnspacing=1, handlelength=2.8)
    grid.figure.set_size_inches(width, grid.figure.get_size_inches()[1] + 0.5)
    return grid


def series(
    ax: Any, frame: pd.DataFrame, x: str, y: str, by: str, looks: dict[Any, ModeStyle] | None = None, label: str = "{}",
    **kwargs: Any,
) -> None:  # fmt: skip
    """Draw a line for each value of column `by` in its style, with whiskers from `low` to `high` if there are such.

    Args:
        looks: the styles by value; by default those of the values in `frame`. label: of a line, with `{}` for its
            value. kwargs: as `ax.errorbar` takes them, such as `linestyle="none"` for markers alone.
    """
    looks = looks or styles(frame[by])
    for name in (name for name in looks if (frame[by] == name).any()):
        rows, look = frame[frame[by] == name], looks[name]
        ranged = "low" in rows and rows["low"].notna().any()
        spread = [rows[y] - rows["low"], rows["high"] - rows[y]] if ranged else None
        drawn = {"color": look.color, "marker": look.marker, "linestyle": look.linestyle, **WHISKERS, **kwargs}
        ax.errorbar(rows[x], rows[y], spread, label=label.format(look.label), **drawn)


def bars(ax: Any, frame: pd.DataFrame, x: str, y: str = "value", by: str = "mode") -> None:
    """Draw grouped bars of `frame[y]` over `frame[x]`, one bar a value of column `by`, such as the mode.

    Several rows of one group are drawn as their median with a whisker from the least to the greatest.
    """
    groups, looks = sorted(frame[x].unique()), styles(frame[by])
    width = 0.8 / len(looks)
    for n, (name, look) in enumerate(looks.items()):
        rows = frame[frame[by] == name].groupby(x)[y]
        middle = rows.median().reindex(groups)
        spread = np.array([middle - rows.min().reindex(groups), rows.max().reindex(groups) - middle])
        at = np.arange(len(groups)) + (n - (len(looks) - 1) / 2) * width
        whiskers = {"yerr": spread, "error_kw": WHISKERS} if (rows.size() > 1).any() else {}
        ax.bar(at, middle, width, label=look.label, color=look.color, hatch=look.hatch, edgecolor="white", **whiskers)
    ax.set_xticks(np.arange(len(groups)), [str(group) for group in groups])
    ax.set_xlim(-0.5, len(groups) - 0.5)
    ax.grid(axis="x", visible=False)


def legend(ax: Any, ncols: int = 2) -> None:
    """Put the legend of `ax` above the whole figure, where it hides nothing."""
    handles, names = ax.get_legend_handles_labels()
    ax.figure.legend(handles, names, loc="outside upper center", ncols=ncols, columnspacing=1, handlelength=2.4)


def write(fig: Any, path: Path, dpi: int = 300) -> Path:
    """Write a figure as a PDF or PNG, by the suffix of `path`: the same figure gives the same bytes. Return `path`."""
    unsaid = {".pdf": ("CreationDate", "ModDate", "Creator", "Producer"), ".png": ("Software",)}[path.suffix]
    with mock.patch.dict(os.environ, {"SOURCE_DATE_EPOCH": "0"}), results.whole_file(path) as part:
        fig.savefig(part, format=path.suffix[1:], dpi=dpi, metadata=dict.fromkeys(unsaid))
    return path


def save(fig: Any, run: results.Run | Path | str, name: str, data: pd.DataFrame, caption: str) -> Path:
    """Save a figure (or a grid of seaborn) with its data and its caption; return the path of its PDF.

    Writes `<run>/figures/<name>.pdf`, `.png` (300 dpi), `.csv` (what is drawn) and `.txt` (the caption).

    Raises:
        ValueError: nothing is drawn (`data` is empty), or there is no caption.
    """
    if data.empty or not caption.strip():
        raise ValueError(f"figure {name} needs data and a caption")
    if isinstance(fig, sns.FacetGrid):
        fig = fig.figure
        fig.set_layout_engine("constrained")  # seaborn's own is in the way of a legend above the panels
    path = Path(run.directory if isinstance(run, results.Run) else run) / "figures" / f"{name}.pdf"
    use()
    write(fig, path)
    write(fig, path.with_suffix(".png"))
    results.write_table(path.with_suffix(".csv"), data)
    results.write_text(path.with_suffix(".txt"), caption.strip() + "\n")
    return path
