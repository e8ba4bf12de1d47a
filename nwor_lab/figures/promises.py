# SPDX-License-Identifier: Apache-2.0
"""What the generations before this kit promised or reported, beside what the kit measured of the same thing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from nwor_lab import paths
from nwor_lab.figures import style

LOOKS = {
    "then": {"color": style.OTHER[1], "hatch": "//", "label": "promised or reported before"},
    "here": {"color": style.OTHER[0], "hatch": "", "label": "measured here"},
}


def promises(run: style.Place) -> Path:
    """Draw each promise beside what was measured, a panel a promise.

    `data/promises.csv` has a row a case of a promise (`title`), which was promised `then` or measured `here`
    (`source`), with its `low`, `median` and `high` value.
    """
    table = pd.read_csv(paths.PROMISES)
    titles = table["title"].unique()
    heights = [(table["title"] == title).sum() for title in titles]
    fig, axes = style.figure(style.TWO_COLUMNS, 1.2 + 0.19 * sum(heights), nrows=len(titles), height_ratios=heights)
    for ax, title in zip(axes, titles, strict=True):
        rows = table[table["title"] == title]
        for source, look in LOOKS.items():
            part = rows[rows["source"] == source]
            spread = [part["median"] - part["low"], part["high"] - part["median"]]
            whiskers = {"xerr": spread, "error_kw": style.WHISKERS}
            ax.barh(part["case"], part["median"], height=0.7, edgecolor="white", **look, **whiskers)
        for row in rows.itertuples():
            said = " to ".join(dict.fromkeys(f"{end:.3g}" for end in (row.low, row.high)))
            ax.annotate(said, (max(row.high, 0), row.case), (4, 0), va="center", textcoords="offset points", fontsize=6)
        ax.set(title=title, ylim=(len(rows) - 0.5, -0.5))
        ax.margins(x=0.15)
        if rows["high"].max() > 100:
            ax.set(xscale="log", xlim=(0.5, None))
        ax.grid(axis="y", visible=False)
    style.legend(axes[0])
    caption = (
        "What earlier generations promised or reported, beside what this kit measured: median, with the least and the "
        "greatest value over temperatures (bytes) or settings. Bytes follow from the acceptance counted on a GPU by "
        "the exact formula of what each mode moves. Models and machines differ."
    )
    return style.save(fig, run, "promises", table, caption)
