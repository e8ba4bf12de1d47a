# SPDX-License-Identifier: Apache-2.0
"""What the generations before this kit promised or reported, beside what the kit measured of the same thing.

The promises are quotations (`data/promises.csv`); the kit's own values are computed from its recorded tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from nwor_lab import paths, results
from nwor_lab.model.breakeven import MODELS
from nwor_lab.model.predicted import shape_of
from nwor_lab.model.traffic import Window, bytes_saved
from nwor_lab.plots import style
from nwor_lab.plots.steps import ratio_points

TABLES = ("reference", "gpu_acceptance", "gpu_steps", "kv_write_share")
PICTURE = paths.RECORDED / "promises.png"
SOURCES = {"then": "promised or reported before", "here": "measured here"}
SAVED = {
    "pages": "here: page writes alone",
    "written": "here: all writes, staging's too",
    "moved": "here: all bytes, reads too",
}
"""Cases of promise `bandwidth`, by the key that `bytes_saved` gives them."""
POLICIES = {"off": "here: vanilla", "blind": "here: blind staging", "stage": "here: stage"}
"""Cases of promise `acceptance`, by write policy."""


def saved(counts: pd.DataFrame) -> dict[str, list[float]]:
    """Percent of vanilla's bytes that `stage` saves at the longest k, a value a temperature, by case.

    counts: table `gpu_acceptance`.
    """
    rows = counts[counts["k"] == counts["k"].max()]
    sums = rows.groupby(["temperature", "metric"])["value"].sum().unstack("metric")
    shares = []
    for _, count in sums.iterrows():
        windows, drafts = count["windows"], count["draft_tokens"]
        window = Window(windows, drafts, drafts - count["accepted_tokens"], windows + drafts)
        shares.append(bytes_saved("stage", MODELS["llama-2-7b"], window))
    return {case: [100 * share[key] for share in shares] for key, case in SAVED.items()}


def step_ratios(steps: pd.DataFrame, mode: str) -> pd.Series:
    """A mode's step over vanilla's in each setting of table `gpu_steps` that is at parity and stable."""
    if not (steps["mode"] == mode).any():
        return pd.Series(dtype=float)
    points = ratio_points(steps[steps["mode"].isin(["off", mode])])
    return points.loc[points["shown"], "measured"]


def accepted(reference: pd.DataFrame) -> dict[str, list[float]]:
    """Percent of the drafts accepted under each write policy of table `reference`, by case."""
    whole = reference[reference["position"].isna() & (reference["metric"] == "acceptance_length")]
    drafts = whole.assign(value=100 * (whole["value"] - 1) / whole["k"])
    return {case: drafts.loc[drafts["mode"] == mode, "value"].tolist() for mode, case in POLICIES.items()}


def counted(steps: pd.DataFrame) -> dict[str, list[float]]:
    """What `stage` counted over what there was, in each setting of table `gpu_steps`, by case."""
    rows = steps[(steps["mode"] == "stage") & steps["metric"].str.startswith("counters.")]
    setting = ["model", "kv_heads", "kv_cache_dtype", "tp", "k"]
    sums = rows.groupby([*setting, "metric"])["value"].sum().unstack("metric").rename(columns=lambda name: name[9:])
    sums = sums.reset_index()
    if sums.empty:
        return {"here: stage operations": [], "here: staged tokens": []}
    layers = [shape_of(where).num_layers for _, where in sums.iterrows()]
    held = (sums["committed_tokens"] + sums["rejected_tokens"]) * layers
    tokens = sums["staged_tokens"] / (sums["k"] * sums["windows"])
    return {"here: stage operations": list(sums["stage_operations"] / held), "here: staged tokens": list(tokens)}


def measured(found: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, list[float]]]:
    """The kit's own values of each promise, by case; `found` has the tables of `TABLES`."""
    share = found["kv_write_share"].query("metric == 'kv_write_share'")["value"]
    steps = found["gpu_steps"]
    return {
        "bandwidth": saved(found["gpu_acceptance"]),
        "throughput": {
            "here: stage": list(1 / step_ratios(steps, "stage")),
            "here: at most, by no write": list(1 / (1 - share)),
        },
        "overhead": {"here: cow": list(100 * (step_ratios(steps, "cow") - 1))},
        "acceptance": accepted(found["reference"]),
        "counts": counted(steps),
    }


def beside(found: Mapping[str, pd.DataFrame], promises: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each promise and what was measured of it: columns `promise`, `title`, `source`, `case`, `value`, a row a value.

    Args:
        found: the tables of `TABLES`.
        promises: by default `data/promises.csv`.

    Raises:
        LookupError: nothing was measured of a promise or of one of its cases; the message names it.
    """
    promises = pd.read_csv(paths.PROMISES) if promises is None else promises
    here = measured(found)
    rows: list[dict[str, Any]] = []
    for (name, title), quoted in promises.groupby(["promise", "title"], sort=False):
        common = {"promise": name, "title": title}
        rows += [{**common, "source": SOURCES["then"], "case": q.case, "value": q.value} for q in quoted.itertuples()]
        if name not in here:
            raise LookupError(f"nothing is measured of the promise {name!r}")
        for case, values in here[name].items():
            if not values or pd.isna(values).any():
                raise LookupError(f"nothing is recorded of {case!r}, beside the promise {name!r}")
            rows += [{**common, "source": SOURCES["here"], "case": case, "value": value} for value in values]
    return pd.DataFrame(rows)


def spread(values: pd.Series) -> str:
    """A value, or the least and the greatest of several."""
    ends = [f"{end:.0f}" if abs(end) >= 10 else f"{end:.3g}" for end in (values.min(), values.max())]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def panels(data: pd.DataFrame) -> sns.FacetGrid:
    """A panel a promise, from the rows of `beside`: bars to the median, whiskers from the least to the greatest."""
    style.use()
    colors = dict(zip(SOURCES.values(), style.OTHER[1::-1], strict=True))
    grid = sns.catplot(
        data, kind="bar", x="value", y="case", hue="source", col="title", col_wrap=2, sharex=False, sharey=False,
        estimator="median", errorbar=("pi", 100), err_kws={"linewidth": 0.8, "color": "black"}, capsize=0.2,
        palette=colors, height=1.15, aspect=style.TWO_COLUMNS / 2 / 1.15, facet_kws={"despine": False}, width=0.7,
    )  # fmt: skip
    for title, ax in grid.axes_dict.items():
        panel = data[data["title"] == title].groupby("case", sort=False)["value"]
        for bar in ax.containers[0]:
            bar.set_hatch("//")
        if panel.max().max() > 100:
            ax.set_xscale("log")
        for y, (_, values) in enumerate(panel):
            ax.annotate(spread(values), (max(values.max(), 0), y), (4, 0), va="center", fontsize=6.5,
                        textcoords="offset points")  # fmt: skip
        low, high = ax.get_xlim()
        ax.set_xlim(*((low / 2, 8 * high) if ax.get_xscale() == "log" else (low, 1.6 * high)))
    grid.set_titles("{col_name}").set_axis_labels("", "")
    sns.move_legend(grid, "outside upper center", ncols=2, title=None)
    grid.legend.get_patches()[0].set_hatch("//")
    grid.figure.set_size_inches(style.TWO_COLUMNS, 4.6)
    return grid


def draw(run: results.Run | Path, *tables: pd.DataFrame) -> Path:
    """Draw each promise beside what was measured; `tables` are those of `TABLES`, in that order."""
    data = beside(dict(zip(TABLES, tables, strict=True)))
    caption = (
        "What earlier generations promised or reported, beside what this kit measured: median, with the least and the "
        "greatest value over temperatures (bytes), settings (throughput, copy-on-write, counts). Bytes follow from "
        "the acceptance counted on a GPU by the exact formula of what each mode moves. Models and machines differ."
    )
    return style.save(panels(data), run, "promises", data, caption)


def record(path: Path = PICTURE) -> Path:
    """Draw the figure of `docs/history.md` from the recorded tables, smaller than `draw` does."""
    fig = panels(beside({name: results.read_table(name, paths.RECORDED) for name in TABLES})).figure
    fig.set_layout_engine("constrained")
    return style.write(fig, path, dpi=170)
