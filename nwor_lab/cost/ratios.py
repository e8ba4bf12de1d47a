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
