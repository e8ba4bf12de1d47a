# SPDX-License-Identifier: Apache-2.0
"""Pages of a KV cache as small coloured grids: the figures of notebook 00."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

from nwor_lab.figures import style

STATES = {
    "empty": ("#FFFFFF", "", "never written"),
    "context": ("#D9D9D9", "", "from earlier steps"),
    "kept": ("#8FBCE6", "", "this step's row, kept"),
    "undecided": ("#F7E3BC", "//", "draft, not yet verified"),
    "rejected": ("#E8845C", "xx", "rejected row left behind"),
}
"""Fill, hatch and legend of what a slot holds."""
BUFFERS = {"blind": "staging", "cow": "log", "stage": "staging"}


def grid(ax: Any, cells: pd.DataFrame, labels: Mapping[Any, str], fontsize: float = 7) -> None:
    """Draw `cells` (`line, column, state`, and `text` if it has one) as squares; `labels` name the lines."""
    for cell in cells.to_dict("records"):
        color, hatch, _ = STATES[cell["state"]]
        corner = (cell["column"] - 0.5, cell["line"] - 0.5)
        ax.add_patch(Rectangle(corner, 1, 1, facecolor=color, hatch=hatch, edgecolor="#B0B0B0", linewidth=0.6))
        ax.text(cell["column"], cell["line"], cell.get("text", ""), ha="center", va="center", fontsize=fontsize)
    ax.set(xlim=(-0.6, cells["column"].max() + 0.6), ylim=(cells["line"].max() + 0.6, -0.6), aspect="equal")
    ax.set(xticks=[], yticks=list(labels), yticklabels=list(labels.values()), frame_on=False)
    ax.tick_params(length=0)
    ax.grid(visible=False)


def legend(fig: Any, states: Any) -> None:
    """Name the colours of `states` above the figure."""
    shown = [STATES[name] for name in STATES if name in set(states)]
    marks = [Patch(facecolor=c, hatch=hatch, edgecolor="#B0B0B0", label=label) for c, hatch, label in shown]
    fig.legend(handles=marks, loc="outside upper center", ncols=len(marks), columnspacing=1)


def addresses(run: style.Place, frame: pd.DataFrame, block_table: Sequence[int], block_size: int) -> Path:
    """Draw the request's positions in its own order, the block table, and where the pages hold them.

    frame: rows of `nwor_lab.reference.tour.TinyWindow.run` under mode `off`, of which the second moment is drawn.
    """
    frame = pd.DataFrame(frame)
    frame = frame[frame["moment"] == frame["moment"].unique()[1]]
    slots = frame["line"] * block_size + frame["column"]
    pages = frame.assign(text=[f"slot {slot}" for slot in slots])
    rows = frame.dropna(subset="position")
    positions = rows["position"].astype(int)
    logical = rows.assign(line=positions // block_size, column=positions % block_size, text=positions.astype(str))
    fig, (left, right) = style.figure(width=style.TWO_COLUMNS, height=1.9, ncols=2)
    labels = {n: f"logical block {n}\nblock_table[{n}] = {block}" for n, block in enumerate(block_table)}
    grid(left, logical, labels)
    grid(right, pages, {line: f"block {line}" for line in pages["line"].unique()})
    left.set_title("positions of the request")
    right.set_title("slots of the paged cache")
    for n, block in enumerate(block_table):
        ends = (block_size - 0.4, n), (-1.7, block), left.transData, right.transData
        fig.add_artist(ConnectionPatch(*ends, arrowstyle="->", color="#444444"))
    legend(fig, rows["state"])
    caption = "A request's positions, its block table and the slots of its rows. Slot = block x block_size + offset."
    return style.save(fig, run, "tour_addresses", pages, caption)


def policies(run: style.Place, frame: pd.DataFrame, num_blocks: int) -> Path:
    """Draw the rows of `TinyWindow.run_all`: a column of panels a policy, a line of panels a moment."""
    frame = pd.DataFrame(frame)
    moments, modes = frame["moment"].unique(), frame["mode"].unique()
    fig, axes = style.figure(width=style.TWO_COLUMNS, height=4.6, nrows=len(moments), ncols=len(modes))
    frame = frame.assign(text=["" if isnan(p) else f"{p:.0f}" for p in frame["position"]])
    for n, moment in enumerate(moments):
        for ax, mode in zip(axes[n], modes, strict=True):
            cells = frame[(frame["mode"] == mode) & (frame["moment"] == moment)]
            below = num_blocks + 0.4
            buffer = {below: BUFFERS[mode]} if (cells["line"] == num_blocks).any() else {}
            cells = cells.assign(line=cells["line"].replace(num_blocks, below))
            grid(ax, cells, {line: f"block {line}" for line in range(num_blocks)} | buffer)
            ax.set(xlabel=f"attention reads\n{cells['sees'].iloc[0]}" if n == 1 else "", ylim=(below + 0.6, -0.6))
            ax.set_title("" if n else style.MODE_STYLE[mode].label)
        axes[n][0].set_ylabel(moment)
    legend(fig, frame["state"])
    caption = "Pages of one layer at three moments of a step, under four write policies. Numbers are positions."
    return style.save(fig, run, "pages", frame, caption)


def pages(run: style.Place, frame: pd.DataFrame) -> Path:
    """Draw one request's pages in vLLM, a panel a mode: `frame` has `mode, line, column, state` and `block`."""
    frame = pd.DataFrame(frame)
    lines, modes = int(frame["line"].max()) + 1, frame["mode"].unique()
    fig, axes = style.figure(width=style.TWO_COLUMNS, height=0.4 + (0.3 + 0.21 * lines) * len(modes), nrows=len(modes))
    for ax, mode in zip(axes, modes, strict=True):
        cells = frame[frame["mode"] == mode]
        grid(ax, cells, {line: f"block {block}" for line, block in cells.groupby("line")["block"].first().items()})
        ax.set_title(style.MODE_STYLE[mode].label)
    legend(fig, frame["state"])
    caption = "Pages of one request in one layer of vLLM, after the first step that rejected drafts of it."
    return style.save(fig, run, "tour_pages", frame, caption)
