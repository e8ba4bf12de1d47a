# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts by position, and the share of written rows that is rejected, from engine runs.

Survival at position i is the share of windows in which the drafts 0 to i were all accepted: the count that vLLM
exports as ``spec_decode_num_accepted_tokens_per_pos`` over its number of windows.
"""

from collections.abc import Iterable

import pandas as pd
from scipy.stats import binomtest

from nwor import figures


def interval(accepted: int, windows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927); windows of one request are treated as independent."""
    found = binomtest(accepted, windows).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def survival(bench: pd.DataFrame) -> pd.DataFrame:
    """Tidy rows from the rows of a bench run, by mode, k and temperature, over all repeats.

    Returns:
        metric ``survival`` at each ``position`` with its interval ``low``, ``high``; ``conditional`` likewise, given
        that the draft before was accepted; ``acceptance_length``, bonus token included; ``windows``; and
        ``rejected_share``, rejected rows over the 1 + k rows that vanilla writes for each window.
    """
    rows = []
    for (mode, k, temperature), part in bench[bench.temperature.notna()].groupby(["mode", "k", "temperature"]):
        common = {"mode": mode, "k": k, "temperature": temperature}
        windows = int(part.loc[part.metric == "windows", "value"].sum())
        drafts = int(part.loc[part.metric == "draft_tokens", "value"].sum())
        accepted = int(part.loc[part.metric == "accepted_tokens", "value"].sum())
        before = windows
        for position, count in part[part.metric == "accepted_at"].groupby("position").value.sum().items():
            for metric, trials in (("survival", windows), ("conditional", before)):
                if trials:
                    low, high = interval(int(count), trials)
                    rows.append(
                        {
                            **common,
                            "metric": metric,
                            "value": count / trials,
                            "unit": "share",
                            "position": int(position),
                            "low": low,
                            "high": high,
                        }
                    )
            before = int(count)
        rejected = (drafts - accepted) / (drafts + windows)
        rows.append({**common, "metric": "acceptance_length", "value": 1 + accepted / windows, "unit": "tokens"})
        rows.append({**common, "metric": "windows", "value": windows, "unit": "windows"})
        rows.append({**common, "metric": "draft_tokens", "value": drafts, "unit": "tokens"})
        rows.append({**common, "metric": "rejected_share", "value": rejected, "unit": "share"})
    return pd.DataFrame(rows)


def same_share(counts: Iterable[tuple[int, int]]) -> float:
    """The z statistic of two shares, given as (accepted, trials) twice; 0 where both are the same for certain."""
    (a, n), (b, m) = counts
    pooled = (a + b) / (n + m)
    deviation = (pooled * (1 - pooled) * (1 / n + 1 / m)) ** 0.5
    return 0.0 if deviation == 0 else (a / n - b / m) / deviation


def checks(table: pd.DataFrame) -> list[tuple[str, object, object, bool]]:
    """What must hold of a survival table, as (claim, predicted, measured, holds)."""
    survival = table[table.metric == "survival"].sort_values("position")
    falling = all(part.value.is_monotonic_decreasing for _, part in survival.groupby(["k", "temperature"]))
    lines: list[tuple[str, object, object, bool]] = [
        ("survival never rises with position", True, falling, falling),
    ]
    predicted = figures.predict_rejected(table).set_index(["temperature", "k"]).value
    measured = table[table.metric == "rejected_share"]
    off = max(abs(row.value - predicted[row.temperature, row.k]) for row in measured.itertuples())
    lines.append(
        ("rejected share of written rows: counted against predicted from survival", "<= 0.08 apart", off, off <= 0.08)
    )
    return lines
