# SPDX-License-Identifier: Apache-2.0
"""Figure of parity: how far rounding and injected faults shift log-probabilities, and the tolerance between them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import seaborn as sns

from nwor_lab import paths, results
from nwor_lab.experiments.parity import tolerance
from nwor_lab.faults import MARGIN
from nwor_lab.plots import style

EDGE = 10.0
"""Nats at which what is more is drawn, infinite shifts too."""


BEFORE = {
    "tail_unseen": "attention: drafts hidden",
    "one_head_unseen": "attention: drafts hidden from one head",
    "last_page_missed": "attention: a page missed",
}
"""Names of the catalogue's faults in a table recorded before there was one."""


def renamed(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of rounding and of the catalogue's faults."""
    table = table.assign(fault=table["fault"].replace(BEFORE))
    return table[table["fault"].isin(["none", *MARGIN])]


def margin_points(table: pd.DataFrame) -> pd.DataFrame:
    """Rows `shift` of table `parity_margin`, each with its `panel`, its `tolerance` and whether a `fault` is in it."""
    rows = renamed(table[table["metric"] == "shift"])
    cache = rows["kv_cache_dtype"].where(rows["kv_cache_dtype"] == "fp8", rows["dtype"])
    rows["panel"] = rows["device"].str.removeprefix("NVIDIA ") + ", " + rows["weights"] + ", " + cache
    random, on_gpu = rows["weights"] == "random weights", rows["device"] != "CPU"
    how = zip(rows["dtype"], rows["kv_cache_dtype"], random, on_gpu, strict=True)
    rows["tolerance"] = [tolerance(*one) for one in how]
    rows["value"] = rows["value"].clip(upper=EDGE)
    rows["kind"] = (rows["fault"] == "none").map({True: "rounding alone", False: "a fault injected"})
    rows["fault"] = rows["fault"].replace("none", "rounding").str.removeprefix("attention: ")
    return rows


def margin(run: results.Run | Path) -> Path:
    """Draw `shift` of rounding and of each injected fault as recorded, a panel for each device, weights and dtype."""
    rows = margin_points(results.read_table("parity_margin", paths.RECORDED))
    style.use()
    order = ["rounding", *rows.loc[rows["fault"] != "rounding"].groupby("fault")["value"].median().sort_values().index]
    colors = {"rounding alone": "#0072B2", "a fault injected": "#D55E00"}
    grid = sns.catplot(
        rows, x="value", y="fault", hue="kind", col="panel", col_wrap=3, kind="strip", order=order, palette=colors,
        jitter=False, size=3, height=1.9, aspect=style.TWO_COLUMNS / 3 / 1.9, facet_kws={"despine": False},
        sharex=False,
    )  # fmt: skip
    for panel, ax in grid.axes_dict.items():
        bound = rows.loc[rows["panel"] == panel, "tolerance"].iloc[0]
        ax.axvline(bound, color="black", linewidth=1, linestyle="--")
        ax.set(xscale="log")
    grid.set_titles("{col_name}").set_axis_labels("shift of log-probabilities (nats)", "")
    sns.move_legend(grid, "outside upper center", ncols=2, title=None)
    grid.figure.set_size_inches(style.TWO_COLUMNS, grid.figure.get_size_inches()[1] + 0.3)
    caption = (
        "Shift of log-probabilities under `stage` against vanilla, by rounding alone (blue) and with a fault injected "
        "into its attention (orange); a point is a load of 8 requests or more. The dashed line is the tolerance. "
        f"Where vanilla's token was not among the best 20, the shift is infinite and drawn at {EDGE:g}."
    )
    columns = ["panel", "fault", "batch", "repeat", "places", "value", "tolerance"]
    return style.save(grid, run, "parity_margin", rows[columns], caption)
