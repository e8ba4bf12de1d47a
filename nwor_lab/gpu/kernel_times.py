# SPDX-License-Identifier: Apache-2.0
"""What the samples of `nwor_lab.gpu.operators` say: medians, and the model of time.

The model of time has two terms, both measured in the same run: an empty kernel, and the bytes that have to move at the
bandwidth of a large copy. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab.gpu.operators import OURS, PEERS

KEYS = ["kv_heads", "cache", "rows", "kept"]
"""Columns that identify a case of table `kernel_times`."""


def select(times: pd.DataFrame, **wanted: Sequence[Any]) -> pd.DataFrame:
    """The samples whose columns have the values `wanted`; the large copy and the row of launches are always kept.

    Raises:
        ValueError: there is no sample of one of the values, or of all together.
    """
    always = times["op"].isin(["copy", "vllm launches"])
    chosen = ~always
    for column, values in wanted.items():
        there: set[Any] = set(times.loc[times["op"] != "copy", column])
        if missing := sorted(set(values) - there):
            raise ValueError(f"no samples of {column} {missing}, only of {sorted(there)}; others are measured on a GPU")
        chosen &= times[column].isin(values)
    if not chosen.any():
        together = ", ".join(f"{column} {sorted(values)}" for column, values in wanted.items())
        raise ValueError(f"no samples of {together} together; others are measured on a GPU")
    return times[chosen | always].astype({"value": float})


def medians(times: pd.DataFrame) -> pd.DataFrame:
    """One row an op and case: median in microseconds, bytes, launches and TB/s."""
    rows = times[(times["metric"] == "time") & (times["rows"] > 0)].astype({"op": str, "cache": str, "value": float})
    groups = rows.groupby(["op", *KEYS, "launches"], as_index=False)
    frame = groups.agg(us=("value", "median"), bytes=("bytes", "first"))
    return frame.assign(tb_s=frame["bytes"] / frame["us"] / 1e6)


def ceilings(times: pd.DataFrame) -> tuple[float, float]:
    """(TB/s of the large copy, microseconds of the empty kernel), both medians."""
    copies, empties = times[times["op"] == "copy"], times[times["op"] == "empty"]
    return float(copies["bytes"].iloc[0] / copies["value"].median() / 1e6), float(empties["value"].median())


def speedups(times: pd.DataFrame) -> pd.DataFrame:
    """How many times faster the commit is than each peer that writes the same rows: one column a peer."""
    frame = medians(times)
    wide = frame.pivot_table(index=KEYS, columns="op", values="us").dropna(subset="vllm")
    return wide[[peer for peer in PEERS if peer in wide]].div(wide["commit"], axis=0)


def per_launch(times: pd.DataFrame) -> tuple[float, float]:
    """(microseconds of the first launch, of each further one) of vLLM's writer in a graph, by least squares."""
    rows = medians(times).query("op == 'vllm launches'")
    slope, start = np.polyfit(rows["launches"], rows["us"], 1)
    return float(start + slope), float(slope)


def dram_over_model(counters: pd.DataFrame) -> pd.DataFrame:
    """DRAM bytes that the hardware counted, read and written, over those of the model, in `both`: a row a case."""
    wide = counters.pivot_table(index=["op", *KEYS, "bytes"], columns="metric", values="value", observed=True)
    wide = wide.reset_index()
    return wide.assign(both=(wide["dram_read"] + wide["dram_written"]) / (2 * wide["bytes"]))


def unequal_bytes(times: pd.DataFrame) -> int:
    """Bytes of accepted slots in which the commit or any peer differs from vLLM's writer."""
    return int(times.loc[times["metric"] == "bytes_differing", "value"].sum())


def priced(times: pd.DataFrame) -> pd.DataFrame:
    """Commit, log, restore and vLLM's writer, all layers: a row an op and case of `medians`, and in `predicted` the
    model's price in us, by the launches and the copy that `times` holds itself."""
    (bandwidth, empty), (_, further) = ceilings(times), per_launch(times)
    frame = medians(times).query("op in ('commit', 'log', 'restore', 'vllm')").reset_index(drop=True)
    frame["predicted"] = empty + (frame["launches"] - 1) * further + frame["bytes"] / (1e12 * bandwidth) * 1e6
    return frame


def roof_points(times: pd.DataFrame) -> pd.DataFrame:
    """This kit's operators, all layers, where they move rows, as points of `nwor_lab.figures.roofline`."""
    frame = medians(times)
    frame = frame[frame["op"].isin(OURS) & (frame["bytes"] > 0)]
    frame = frame[(frame["op"] != "log") | (frame["kept"] == frame["kept"].max())]  # the log's cases are one
    return frame.assign(panel="commit, log, restore: all layers", kernel=frame["op"])
