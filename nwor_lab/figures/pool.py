# SPDX-License-Identifier: Apache-2.0
"""Pages of all layers as grids of numbers, moment by moment: the figures of notebook 02."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from nwor_lab.figures import style, tour


def cells(moments: Mapping[str, Mapping[str, Tensor]]) -> pd.DataFrame:
    """What `pages` draws: a row for each slot of each moment, with its `number` and a `state`: poison, same or
    changed.

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
    lines, line, last = {}, -1.0, ""
    for memory, block in kinds:  # a gap parts the pages from what is no page
        line, last = line + (1.0 if memory == last or not last else 1.4), memory
        lines[memory, block] = line
    numbers = ["NaN" if math.isnan(number) else f"{number:g}" for number in frame["number"]]
    at = [lines[cell] for cell in zip(frame["memory"], frame["block"], strict=True)]
    frame = frame.assign(line=at, text=numbers)
    height = len(layers) * (0.45 + 0.23 * (1 + frame["line"].max())) + 0.4
    fig, axes = style.figure(style.TWO_COLUMNS, height, nrows=len(layers), ncols=len(moments), squeeze=False)
    for ax, (layer, moment) in zip(axes.flat, itertools.product(layers, moments), strict=True):
        part = frame[(frame["layer"] == layer) & (frame["moment"] == moment)]
        there = part[["line", "memory", "block"]].drop_duplicates().itertuples(index=False)
        tour.grid(ax, part, {line: f"{memory} {block}" for line, memory, block in there})
        ax.set(ylim=(frame["line"].max() + 0.6, -0.6), aspect="auto")
        ax.set_title(f"layer {layer}" if layer else f"{moment}\nlayer {layer}")
    tour.legend(fig, frame["state"])
    caption = "Pages of all layers, moment by moment; a slot shows its key. Coloured slots have changed."
    return style.save(fig, run, name, frame.drop(columns=["line", "text"]), caption)
