# SPDX-License-Identifier: Apache-2.0
"""What the repeats of two variants say together: the ratio of their times, and whether it is stable."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

MAX_SPREAD = 0.1
"""Range of a step's ratio over repeats from which on its median is not reported."""
SURE = 0.9
"""Probability with which `median_between` holds the median."""


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


def median_between(ratios: Iterable[float]) -> tuple[float, float]:
    """Two of the ratios of single passes, between which their true median lies with a probability of `SURE` and more.

    The sign test's interval, whatever the passes' distribution: of n independent ones fewer than k lie below the
    median, or fewer than k above, with a probability of 2 P(B(n, 1/2) < k), B binomial. Of five passes it is the least
    and the greatest; of fewer these say less than `SURE`. NaN without any.
    """
    ranked = sorted(ratio for ratio in ratios if not math.isnan(ratio))
    n, k = len(ranked), 1
    if not n:
        return math.nan, math.nan
    while 2 * sum(math.comb(n, below) for below in range(k + 1)) <= (1 - SURE) * 2**n:
        k += 1
    return ranked[k - 1], ranked[n - k]


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
        Columns `gpu`, `tp`, `load`, the median `ratio` of the passes, and `low` and `high` by `median_between`.
    """
    rows = served[served["metric"] == "tokens_per_s"]
    wide = rows.pivot(index=["gpu", "tp", "load", "repeat"], columns="mode", values="value")
    passes = (wide["kv audit"] / wide["off"]).groupby(["gpu", "tp", "load"])
    between = passes.agg(median_between)
    return pd.DataFrame({"ratio": passes.median(), "low": between.str[0], "high": between.str[1]}).reset_index()
