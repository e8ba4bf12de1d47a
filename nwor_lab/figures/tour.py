# SPDX-License-Identifier: Apache-2.0
"""Pages of a KV cache as small coloured grids: the figures of notebook 00."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import HTML
from matplotlib.patches import ConnectionPatch, Patch, Rectangle
from PIL import Image

from nwor_lab.figures import style
from nwor_lab.run import results

STATES = {
    "empty": ("#FFFFFF", "", "never written"),
    "context": ("#D9D9D9", "", "from earlier steps"),
    "kept": ("#8FBCE6", "", "this step's row, kept"),
    "undecided": ("#F7E3BC", "//", "draft, not yet verified"),
    "rejected": ("#E8845C", "xx", "rejected row left behind"),
    "wrong": ("#C0392B", "xx", "what the auditor names"),
    "poison": ("#FFFFFF", "", "NaN: nobody has written it"),
    "same": ("#D9D9D9", "", "as it was"),
    "changed": ("#8FBCE6", "", "changed since the picture before"),
}
"""Fill, hatch and legend of what a slot holds."""
FRAMES = 40
BUFFERS = {"blind": "staging", "cow": "log", "stage": "staging"}


def grid(ax: Any, cells: pd.DataFrame, labels: Mapping[Any, str], fontsize: float = 7) -> None:
    """Draw `cells` (`line, column, state`, and `text` if it has one) as squares; `labels` name the lines."""
    for cell in cells.to_dict("records"):
        color, hatch, _ = STATES[cell["state"]]
        corner = (cell["column"] - 0.5, cell["line"] - 0.5)
        ax.add_patch(Rectangle(corner, 1, 1, facecolor=color, hatch=hatch, edgecolor="#B0B0B0", linewidth=0.6))
        if text := cell.get("text"):
            ax.text(cell["column"], cell["line"], text, ha="center", va="center", fontsize=fontsize)
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
    moments, modes = frame["moment"].unique(), frame["mode"].unique()
    fig, axes = style.figure(width=style.TWO_COLUMNS, height=4.6, nrows=len(moments), ncols=len(modes))
    for n, moment in enumerate(moments):
        _moment(axes[n], frame[frame["moment"] == moment], num_blocks)
        for ax in axes[n]:
            ax.set(xlabel=ax.get_xlabel() if n == 1 else "", title=ax.get_title() if n == 0 else "")
        axes[n][0].set_ylabel(moment)
    legend(fig, frame["state"])
    caption = "Pages of one layer at three moments of a step, under four write policies. Numbers are positions."
    return style.save(fig, run, "pages", frame, caption)


def moments(frame: pd.DataFrame, num_blocks: int) -> dict[str, bytes]:
    """A PNG of each moment of `TinyWindow.run_all`, a panel a policy: a slider shows them without a wait."""
    pictures: dict[str, bytes] = {}
    for name, cells in frame.groupby("moment", sort=False):
        fig, axes = style.figure(width=style.TWO_COLUMNS, height=2.1, ncols=cells["mode"].nunique())
        _moment(axes, cells, num_blocks)
        for ax in axes:
            ax.set_xlabel(ax.get_xlabel() if len(pictures) == 1 else "\n")
        legend(fig, frame["state"])
        fig.savefig(picture := BytesIO(), format="png", dpi=120)
        style.close(fig)
        pictures[str(name)] = picture.getvalue()
    return pictures


def _moment(axes: Any, frame: pd.DataFrame, num_blocks: int) -> None:
    frame = frame.assign(text=["" if isnan(p) else f"{p:.0f}" for p in frame["position"]])
    below = num_blocks + 0.4
    for ax, (mode, cells) in zip(axes, frame.groupby("mode", sort=False), strict=True):
        buffer = {below: BUFFERS[mode]} if (cells["line"] == num_blocks).any() else {}
        cells = cells.assign(line=cells["line"].replace(num_blocks, below))
        grid(ax, cells, {line: f"block {line}" for line in range(num_blocks)} | buffer)
        ax.set(xlabel=f"attention reads\n{cells['sees'].iloc[0]}", ylim=(below + 0.6, -0.6))
        ax.set_title(style.MODE_STYLE[mode].label)


def pages(run: style.Place, frame: pd.DataFrame) -> Path:
    """Draw one request's pages in vLLM, a panel a mode: `frame` has `mode, line, column, state` and `block`."""
    caption = "Pages of one request in one layer of vLLM, after the first step that rejected drafts of it."
    return style.save(_pages(frame, frame["state"]), run, "tour_pages", frame, caption)


def _pages(frame: pd.DataFrame, states: Any, said: Mapping[str, str] | None = None) -> Any:
    """A figure of the pages of each mode; states: of the legend; said: behind the name of a mode."""
    lines, modes = frame["line"].nunique(), frame["mode"].unique()
    fig, axes = style.figure(width=style.TWO_COLUMNS, height=0.4 + (0.3 + 0.21 * lines) * len(modes), nrows=len(modes))
    for ax, mode in zip(axes, modes, strict=True):
        cells = frame[frame["mode"] == mode]
        grid(ax, cells, {line: f"block {block}" for line, block in cells.groupby("line")["block"].first().items()})
        ax.set_title(style.MODE_STYLE[mode].label + (said[mode] if said else ""), loc="left" if said else "center")
    legend(fig, states)
    return fig


def film(run: style.Place, frame: pd.DataFrame) -> Path:
    """Draw the steps of `nwor_lab.demo.pages_by_step`, the first `FRAMES` of them, as a GIF; return its path.

    Blocks that the prompt has filled are left out.
    """
    later = frame[(frame["step"] > 0) & (frame["state"] != "context")]
    lines = sorted(later.loc[later["state"] != "empty", "line"].unique())
    frame = frame[frame["line"].isin(lines)].assign(line=lambda rows: rows["line"].map(lines.index))
    frame["text"] = frame["state"].map({"rejected": "\N{MULTIPLICATION SIGN}"}).fillna("")
    last = frame.groupby("mode")["step"].transform("max")
    pictures, left = [], dict.fromkeys(frame["mode"].unique(), 0)
    for step in range(min(FRAMES, int(last.max()) + 1)):
        now = frame[frame["step"] == last.clip(upper=step)]
        said = {}
        for mode, cells in now.groupby("mode"):
            at = cells.iloc[0]
            left[mode] += int(cells["state"].eq("rejected").sum()) if at["step"] == step else 0
            told = f"step {at['step']}, {at['num_rejected']} drafts rejected"
            said[str(mode)] = f": {told}; rows left behind so far: {left[mode]}"
        fig = _pages(now, frame["state"], said)
        fig.savefig(picture := BytesIO(), format="png", dpi=110)
        style.close(fig)
        pictures.append(Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE))
    path = (run if isinstance(run, Path) else run.directory) / "figures" / "tour_pages.gif"
    with results.whole_file(path) as part:
        first, *rest = pictures
        first.save(part, "GIF", save_all=True, append_images=[*rest, *pictures[-1:] * 3], duration=500, loop=0)
    return path


def named(frame: pd.DataFrame) -> Any:
    """Draw `nwor_lab.audit_by_hand.Audited.pages`, a panel a layer, and what the auditor names; returns the figure."""
    layers = sorted(frame["layer"].unique())
    fig, axes = style.figure(width=5.0, height=1.7, ncols=len(layers))
    half, width = (int(frame["line"].max()) + 1) // 2, int(frame["column"].max()) + 1
    folded = frame.assign(line=frame["line"] % half, column=frame["column"] + (width + 1) * (frame["line"] // half))
    for ax, layer in zip(axes, layers, strict=True):
        grid(ax, folded[folded["layer"] == layer], {line: f"block {line}, {line + half}" for line in range(half)})
        ax.set_title(f"layer {layer}")
    legend(fig, set(frame["state"]))
    return fig


def playing(path: Path) -> HTML:
    """A GIF as a part of the page."""
    return HTML(f'<img src="data:image/gif;base64,{b64encode(path.read_bytes()).decode()}" alt="{path.stem}">')
