# SPDX-License-Identifier: Apache-2.0
"""Pages of all layers as grids of numbers, moment by moment: the figures of notebook 02."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from nwor_lab.figures import style

LOOKS = {
    "poison": ("#FFFFFF", "", "NaN: nobody has written it"),
    "same": ("#D9D9D9", "", "as it was"),
    "changed": ("#8FBCE6", "", "changed since the picture before"),
}
"""Fill, hatch and legend of a slot."""


def cells(moments: Mapping[str, Mapping[str, Tensor]]) -> pd.DataFrame:
    """What `pages` draws: a row for each slot of each moment, with its `number` and one of `LOOKS` as its `state`.

    moments: by title, the memories by name ("block", "staging"), each numbers [layers, blocks, slots of a block].
    """
    rows, before = [], dict[str, Tensor]()
    for moment, memories in moments.items():
        for memory, numbers in memories.items():
            old = before.get(memory, numbers)
            changed = ~torch.isclose(old, numbers, rtol=0, atol=0, equal_nan=True)
            for layer, block, column in itertools.product(*map(range, numbers.shape)):
                number = float(numbers[layer, block, column])
                state = "changed" if changed[layer, block, column] else "poison" if math.isnan(number) else "same"
                where = {"moment": moment, "layer": layer, "memory": memory, "block": block, "column": column}
                rows.append({**where, "number": number, "state": state})
            before[memory] = numbers.clone()
    return pd.DataFrame(rows)


def pages(run: style.Place, name: str, frame: pd.DataFrame) -> Path:
    """Draw the rows of `cells`: a column of panels a moment, a line of panels a layer."""
    moments, layers = list(frame["moment"].unique()), sorted(frame["layer"].unique())
    kinds = frame[["memory", "block"]].drop_duplicates().itertuples(index=False)
    lines, at, last = {}, -1.0, ""
    for memory, block in kinds:  # a gap parts the pages from what is no page
        at, last = at + (1.0 if memory == last or not last else 1.4), memory
        lines[memory, block] = at
    height = len(layers) * (0.45 + 0.23 * (at + 1)) + 0.4
    fig, axes = style.figure(style.TWO_COLUMNS, height, nrows=len(layers), ncols=len(moments), squeeze=False)
    for ax, (layer, moment) in zip(axes.flat, ((one, two) for one in layers for two in moments), strict=True):
        part = frame[(frame["layer"] == layer) & (frame["moment"] == moment)]
        for cell in part.itertuples():
            color, hatch, _ = LOOKS[str(cell.state)]
            line = lines[cell.memory, cell.block]
            look: Any = {"facecolor": color, "hatch": hatch, "edgecolor": "#808080", "linewidth": 0.6}
            ax.add_patch(Rectangle((cell.column - 0.5, line - 0.5), 1, 1, **look))
            text = "NaN" if math.isnan(cell.number) else f"{cell.number:g}"
            tone = "#A0A0A0" if text == "NaN" else "black"
            weight = "bold" if cell.state == "changed" else "normal"
            ax.text(cell.column, line, text, ha="center", va="center", fontsize=7, color=tone, fontweight=weight)
        shown = {
            line: f"{memory} {block}" for (memory, block), line in lines.items() if (part["memory"] == memory).any()
        }
        ax.set(xlim=(-0.6, frame["column"].max() + 0.6), ylim=(at + 0.6, -0.6), xticks=[], frame_on=False)
        ax.set_yticks(list(shown), list(shown.values()))
        ax.tick_params(length=0)
        ax.grid(visible=False)
        ax.set_title(f"layer {layer}" if layer else f"{moment}\nlayer {layer}")
    marks = [Patch(facecolor=LOOKS[state][0], hatch=LOOKS[state][1], edgecolor="#808080", label=LOOKS[state][2])
             for state in LOOKS if (frame["state"] == state).any()]  # fmt: skip
    fig.legend(handles=marks, loc="outside upper center", ncols=len(marks), columnspacing=1)
    caption = "Pages of all layers, moment by moment; a slot shows its key. Coloured slots have changed."
    return style.save(fig, run, name, frame, caption)
