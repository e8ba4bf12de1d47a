# SPDX-License-Identifier: Apache-2.0
"""How every figure of the kit looks, and how it is saved.

A figure is sized for a paper's column, readable without colour (each mode has a marker, a line and a hatch of its own)
and byte-stable: the same data gives the same PDF and PNG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from nwor_lab.run import results

COLUMN, TWO_COLUMNS = 3.35, 7.0
"""Widths of a figure in inches: one column of a two-column paper, and the page."""


class Folder(NamedTuple):
    """Where figures go that belong to no notebook's run, and the command that makes them."""

    directory: Path
    command: str


Place = results.Run | Folder | Path
"""Where a figure goes: a run's folder, or another."""


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
WHISKERS: Any = {"elinewidth": 0.6, "capsize": 1.5}

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
    "figure.dpi": 150,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
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


def bars(ax: Any, frame: pd.DataFrame, x: str) -> None:
    """Draw the `value` of each `mode` in `frame` as grouped bars over column `x`; of several rows the median."""
    wide = frame.pivot_table("value", x, "mode", "median")
    looks = styles(wide.columns)
    colors = {name: look.color for name, look in looks.items()}
    wide[list(looks)].plot.bar(ax=ax, color=colors, width=0.8, edgecolor="white", rot=0, legend=False, xlabel="")
    for container, look in zip(ax.containers, looks.values(), strict=True):
        container.set_label(look.label)
        for bar in container:
            bar.set_hatch(look.hatch)
    ax.grid(axis="x", visible=False)


def legend(ax: Any, ncols: int = 2) -> None:
    """Put the legend of `ax` above the whole figure, where it hides nothing."""
    handles, names = ax.get_legend_handles_labels()
    ax.figure.legend(handles, names, loc="outside upper center", ncols=ncols, columnspacing=1, handlelength=2.4)


def write(fig: Any, path: Path) -> Path:
    """Write a figure as a PDF or PNG, by the suffix of `path`: the same figure gives the same bytes. Return `path`."""
    unsaid = {".pdf": ("CreationDate", "ModDate", "Creator", "Producer"), ".png": ("Software",)}[path.suffix]
    with results.whole_file(path) as part:
        fig.savefig(part, format=path.suffix[1:], metadata=dict.fromkeys(unsaid))
    return path


def save(fig: Any, run: Place, name: str, data: pd.DataFrame, caption: str) -> Path:
    """Save a figure with its data and its caption; return the path of its PDF.

    Writes `figures/<name>.pdf`, `.png`, `.csv` (what is drawn) and `.txt` (the caption, and the command that
    made it) under the folder of `run`.

    Raises:
        ValueError: nothing is drawn (`data` is empty).
    """
    if data.empty:
        raise ValueError(f"figure {name} needs data")
    if not isinstance(run, Folder):
        run = (
            Folder(run, "python")
            if isinstance(run, Path)
            else Folder(run.directory, f"nwor reproduce --only {run.name}")
        )
    path = run.directory / "figures" / f"{name}.pdf"
    use()
    write(fig, path)
    write(fig, path.with_suffix(".png"))
    results.write_table(path.with_suffix(".csv"), data)
    results.write_text(path.with_suffix(".txt"), f"{caption.strip()}\n\nMade by: {run.command}\n")
    return path
