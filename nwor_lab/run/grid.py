# SPDX-License-Identifier: Apache-2.0
"""The one table that a grid of parameters ends with: what was measured at each of its points."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from nwor_lab.run.parameters import Values

VALUE = ["table", "mode", "metric", "unit"]


def measured(folders: dict[Path, Values]) -> pd.DataFrame:
    """What was measured at each point: columns `point`, `table`, `mode`, `metric`, `unit`, `value`, the median, and
    one for each parameter that the points were given.
    """
    rows = []
    for folder, values in folders.items():
        given = {name: str(value) for of in values.values() for name, value in of.items()}
        for path in sorted(folder.glob("*.parquet")):
            frame = pd.read_parquet(path)
            if "metric" in frame:
                medians = frame.groupby(["mode", "metric", "unit"], as_index=False, observed=True)["value"].median()
                rows.append(medians.assign(point=folder.name, table=path.stem, **given))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=["point", *VALUE, "value"])


def varying(table: pd.DataFrame) -> pd.DataFrame:
    """The values of a `measured` that are not the same at all points: a row a value, a column a point."""
    wide = table.fillna(dict.fromkeys(VALUE, "")).pivot_table("value", VALUE, "point", sort=False)
    return wide[(wide.nunique(axis=1) > 1) | wide.isna().any(axis=1)]
