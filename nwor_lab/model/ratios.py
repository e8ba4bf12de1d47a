# SPDX-License-Identifier: Apache-2.0
"""What the repeats of two turns say together: the ratio of their times, and whether it says anything."""

import math

import pandas as pd

UNSTEADY = 0.1
"""Range of a step's ratio over repeats from which on its median says nothing."""


def crossover(ratios: pd.Series) -> float:
    """One ratio from those of each repeat, `ratios` by `repeat`, whichever turn comes first.

    A turn that comes first finds a cooler chip, and the order is turned round from one repeat to the next: two of them
    are one measurement, their geometric mean. The median over these. A last repeat alone is left out if others are not.
    """
    logs = ratios.map(math.log).groupby(ratios.index // 2).agg(["mean", "count"])
    return math.exp(logs.loc[logs["count"] == logs["count"].max(), "mean"].median())


def steady(points: pd.DataFrame) -> pd.Series:
    """Whether each point's median says something: its range over repeats, `low` to `high`, is less than `UNSTEADY`."""
    return points["high"] - points["low"] < UNSTEADY
