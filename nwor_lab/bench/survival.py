# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts by position, from counts: survival, its intervals, and the share of written rows rejected.

Survival at position i is the share of windows in which the drafts 0 to i were all accepted: the count that vLLM
exports as ``spec_decode_num_accepted_tokens_per_pos`` over its number of windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

COUNTS = ("tokens", "windows", "draft_tokens", "accepted_tokens", "accepted_at")
"""Metrics of a bench that count acceptance."""


def mean_accepted(accepted_at: Sequence[float], windows: int) -> tuple[float, float]:
    """Mean of the drafts accepted in a window, and its standard error.

    accepted_at: windows whose draft at each position was accepted. One of n accepted drafts counts at n positions, the
        i-th of which adds 2i + 1 to n squared.
    """
    mean = sum(accepted_at) / windows
    square = sum((2 * position + 1) * count for position, count in enumerate(accepted_at)) / windows
    return mean, math.sqrt(max(0.0, square - mean**2) / windows)


def survival(counts: pd.DataFrame) -> pd.DataFrame:
    """Tidy rows from the rows of a bench, by mode, k and temperature, over all repeats.

    Returns:
        metric ``survival`` at each ``position`` with its interval ``low``, ``high``; ``acceptance_length``,
        accepted drafts of a window and one token more, with the 95 % interval of a mean over windows; ``windows``;
        ``draft_tokens``; and ``rejected_share`` with its interval, rejected rows over the 1 + k rows that vanilla
        writes for each window.
    """
    rows = []
    for (mode, k, temperature), part in counts[counts.temperature.notna()].groupby(["mode", "k", "temperature"]):
        total = part.groupby("metric")["value"].sum()
        windows, drafts, accepted = (int(total[name]) for name in ("windows", "draft_tokens", "accepted_tokens"))
        at = part[part.metric == "accepted_at"].groupby("position").value.sum().sort_index()
        (mean, error), written = mean_accepted(at.tolist(), windows), drafts + windows
        half = 1.96 * error
        found = [
            ("acceptance_length", "tokens", 1 + mean, half),
            ("rejected_share", "share", (drafts - accepted) / written, half * windows / written),
            ("windows", "windows", windows, math.nan),
            ("draft_tokens", "tokens", drafts, math.nan),
        ]
        lines: list[dict[str, Any]] = [
            {"metric": metric, "unit": unit, "value": value, "low": value - half, "high": value + half}
            for metric, unit, value, half in found
        ]
        for position, count in at.items():
            # Wilson's 95 % interval (Wilson 1927); windows of one request are treated as independent.
            bounds = binomtest(int(count), windows).proportion_ci(method="wilson")
            line = {"metric": "survival", "unit": "share", "position": int(position), "value": count / windows}
            lines.append({**line, "low": float(bounds.low), "high": float(bounds.high)})
        rows += [{"mode": mode, "k": k, "temperature": temperature, **line} for line in lines]
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """What `survival` says of whole windows: a line a temperature and k, a column a metric, counts as whole numbers."""
    wide = table[table["position"].isna()].pivot_table(index=["temperature", "k"], columns="metric", values="value")
    every = ("windows", "draft_tokens", "acceptance_length", "rejected_share")
    wide = wide[[name for name in every if name in wide]].rename_axis(columns=None)
    return wide.astype({"windows": int, "draft_tokens": int})


def verdicts(table: pd.DataFrame) -> list[str]:
    """What `survival` says at each temperature's longest k, a sentence each, with the 95 % interval of its mean."""
    said = []
    for temperature, rows in table.groupby("temperature"):
        longest = rows[rows["k"] == rows["k"].max()].set_index("metric")
        mean, share = longest.loc["acceptance_length"], longest.loc["rejected_share", "value"]
        how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        windows, k = longest.loc["windows", "value"], longest["k"].iloc[0]
        within = f"({mean['low']:.2f} to {mean['high']:.2f}, 95 %, {windows:,.0f} windows)"
        yields = f"the verifier yields {mean['value']:.2f} tokens a window {within}"
        said.append(f"{how}, k={k}: {yields}, and {share:.0%} of the rows written are rejected.")
    return said


def predict_rejected(table: pd.DataFrame) -> pd.DataFrame:
    """Return columns `temperature`, `k`, `value`: the rejected share of 1 + k rows that survival at the longest k
    implies.

    Of k drafts, the sum of the survival of positions 0 .. k-1 is accepted; the last sampled token's row is kept.
    """
    rows = table[table["metric"] == "survival"]
    rows = rows[rows["k"] == rows["k"].max()]
    parts = []
    for temperature, group in rows.groupby("temperature"):
        by_position = group.groupby("position")["value"].mean().sort_index().to_numpy()
        k = np.arange(1, len(by_position) + 1)
        parts.append(pd.DataFrame({"temperature": temperature, "k": k, "value": (k - by_position.cumsum()) / (1 + k)}))
    return pd.concat(parts, ignore_index=True)


def same_share(counts: Iterable[tuple[int, int]]) -> float:
    """The z statistic of two shares, given as (accepted, trials) twice; 0 where both are the same for certain."""
    (a, n), (b, m) = counts
    pooled = (a + b) / (n + m)
    deviation = (pooled * (1 - pooled) * (1 / n + 1 / m)) ** 0.5
    return 0.0 if deviation == 0 else (a / n - b / m) / deviation
