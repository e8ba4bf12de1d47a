# SPDX-License-Identifier: Apache-2.0
"""What the samples of `nwor_lab.gpu.attention` say: ratios to vLLM's faster backend, and the floor of bytes.

All times are medians with the empty kernel's taken off. The floor is the bytes that have to move at the bandwidth of
a large copy, which `nwor_lab.gpu.operators` measured; a kernel that mostly reads can pass it slightly.
"""

from __future__ import annotations

import pandas as pd

from nwor_lab.gpu.attention_case import KEYS

BACKENDS = {"nwor": "nwor, one launch", "flash": "FlashAttention 3 + write", "triton": "Triton + write"}
EACH = {
    "flash2": "FlashAttention 2, forced",
    "triton": "Triton",
    "flash": "FlashAttention 3",
    "xqa": "FlashInfer's XQA",
}


def net(frame: pd.DataFrame) -> pd.DataFrame:
    """Median times with the empty kernel's taken off: one row a shape, one column an op, us.

    `flash` is FlashAttention 3 with the number of splits that is fastest, `vanilla` the faster of that and `triton`,
    and `ratio` nwor's time over it.
    """
    times = frame[frame["metric"] == "time"]
    table = times.pivot_table(index=KEYS, columns="op", values="value", aggfunc="median")
    table = table.sub(table["empty"], axis=0).drop(columns="empty")
    splits = table.filter(regex="^flash( |$)")
    table = table.drop(columns=splits.columns).assign(flash=splits.min(axis=1))
    table["vanilla"] = table[["flash", "triton"]].min(axis=1)
    return table.assign(ratio=table["nwor"] / table["vanilla"])


def verdict(table: pd.DataFrame) -> str:
    """What `net` says, in a sentence."""
    ratios = table["ratio"]
    return (
        f"nwor takes {ratios.median():.3f} of the time of vLLM's faster backend at the median of {len(ratios)} shapes "
        f"({ratios.min():.3f} to {ratios.max():.3f}), and more than it in {(ratios > 1).sum()}."
    )


def frame(times: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """One row a shape: the columns of `net`, `bytes`, `floor` in microseconds, and whether the tuning was searched on
    the shape, `tuned_on`.

    Args:
        times: as `nwor_lab.gpu.attention.measure` makes them.
        bandwidth: of a large copy, in TB/s.
    """
    facts = times.groupby(KEYS, observed=True)[["bytes", "tuned_on"]].first()
    table = net(times).join(facts).reset_index()
    return table.assign(floor=table["bytes"] / bandwidth / 1e6)


def errors(times: pd.DataFrame) -> pd.DataFrame:
    """Relative errors against fp32 of nwor and of vLLM's two backends, and nwor's over FlashAttention's: a row a
    shape."""
    table = times[times["metric"] == "error"].pivot_table(index=KEYS, columns="op", values="value", observed=True)
    table = table[["nwor", "flash", "triton"]]
    return table.assign(over_flash=table["nwor"] / table["flash"]).reset_index()


def over_each(times: pd.DataFrame) -> pd.DataFrame:
    """nwor's time over that of each attention of vLLM's alone with its write: a row a shape, a column each of `EACH`.

    An attention that was not measured has no number.

    Args:
        times: a table of layers, as `nwor_lab.gpu.attention` writes it.
    """
    table = net(times)
    table = table.reindex(columns=table.columns.union(list(EACH)))
    return pd.DataFrame({name: table["nwor"] / table[op] for op, name in EACH.items()}).reset_index()


def beside_each(times: pd.DataFrame) -> pd.DataFrame:
    """`over_each`, a line a shape and attention that was measured: the attention is `over`, nwor's time `ratio`."""
    return over_each(times).melt(KEYS, list(EACH.values()), "over", "ratio").dropna(subset="ratio")


def wins(table: pd.DataFrame) -> pd.DataFrame:
    """Of the shapes of `frame`, by k, cache and `tuned_on`: how many there are, in how many nwor takes less time than
    vLLM's faster backend, and the median and largest `ratio`."""
    groups = table.assign(won=table["ratio"] < 1).groupby(["k", "cache", "tuned_on"], observed=True)
    return groups.agg(shapes=("won", "size"), won=("won", "sum"), median=("ratio", "median"), worst=("ratio", "max"))


def roof_points(table: pd.DataFrame, empty: float, k: int = 8, cache: str = "bf16") -> pd.DataFrame:
    """The layers of `frame` with `k` drafts on one rank as points of `nwor_lab.figures.roofline.roofline`.

    empty: microseconds of an empty kernel, which the times of `frame` are without and the roof has.
    """
    rows = table[(table["heads"] == 32) & (table["cache"] == cache) & (table["k"] == k)]
    long = rows.melt(["kv_heads", "batch", "context", "bytes"], list(BACKENDS), "kernel", "us").dropna(subset="us")
    title = f"attention and write of one layer, {1 + k} rows, {cache}"
    return long.assign(panel=title, kernel=long["kernel"].map(BACKENDS), us=long["us"] + empty)
