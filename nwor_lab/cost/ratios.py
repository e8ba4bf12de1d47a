# SPDX-License-Identifier: Apache-2.0
"""What the repeats of two variants say together: the ratio of their times, and whether it is stable."""

from __future__ import annotations

import math

import pandas as pd

MAX_SPREAD = 0.1
"""Range of a step's ratio over repeats from which on its median is not reported."""


def abba_ratio(ratios: pd.Series) -> float:
    """One ratio from those of each repeat (`ratios`, indexed by repeat), whichever variant runs first.

    The variant that runs first finds a cooler chip, so repeats reverse the order: AB, BA, AB, ... Two of them make one
    measurement, their geometric mean; the result is the median over these. A last repeat alone is left out if there
    are whole pairs.
    """
    logs = ratios.map(math.log).groupby(ratios.index // 2).agg(["mean", "count"])
    return math.exp(logs.loc[logs["count"] == logs["count"].max(), "mean"].median())


def is_stable(points: pd.DataFrame) -> pd.Series:
    """Whether each point's range over repeats, from column `low` to column `high`, is less than `MAX_SPREAD`."""
    return points["high"] - points["low"] < MAX_SPREAD


def audited_steps(costs: pd.DataFrame) -> pd.DataFrame:
    """Decode steps under the sampled auditor over those without, by kind of GPU, batch and audit (column `mode`).

    Args:
        costs: table `gpu_audit_cost` of the record: `gpu`, `batch`, `repeat`, `audit` and `step_ms`.
    """
    wide = costs.pivot(index=["gpu", "batch", "repeat"], columns="audit", values="step_ms")
    over = wide.drop(columns="off").div(wide["off"], axis=0).rename_axis(columns="mode").stack()
    apart = over.groupby(["gpu", "batch", "mode"])
    ratio = apart.agg(lambda rows: abba_ratio(rows.droplevel(["gpu", "batch", "mode"])))
    return pd.DataFrame({"ratio": ratio, "low": apart.min(), "high": apart.max()}).reset_index()


def audited_servers(served: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second of servers under the sampled auditor over those without, by kind of GPU, ranks and load.

    Args:
        served: table `gpu_audit_serving` of the record: `gpu`, `tp`, `load`, `repeat`, `mode`, `metric` and `value`.

    Returns:
        Columns `gpu`, `tp`, `load`, and of the passes the median `ratio`, the least `low` and the greatest `high`.
    """
    rows = served[served["metric"] == "tokens_per_s"]
    wide = rows.pivot(index=["gpu", "tp", "load", "repeat"], columns="mode", values="value")
    passes = (wide["kv audit"] / wide["off"]).groupby(["gpu", "tp", "load"])
    return passes.agg(ratio="median", low="min", high="max").reset_index()
