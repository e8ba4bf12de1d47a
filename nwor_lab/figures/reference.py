# SPDX-License-Identifier: Apache-2.0
"""The first figure of notebook 01: acceptance and what is left in the pages, by write policy."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from nwor_lab.figures import style
from nwor_lab.run import results


def policies(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw acceptance by draft position and the bytes a step leaves behind, by mode, from table `reference`."""
    survival = frame[frame["metric"] == "survival"]
    survival = survival.assign(position=survival["position"].astype(int) + 1)
    dirty = frame[frame["metric"] == "dirty_bytes"].assign(value=lambda rows: rows["value"] / 1e3, position="")
    fig, (left, right) = style.figure(width=style.TWO_COLUMNS, ncols=2, width_ratios=(3, 2))
    style.bars(left, survival, x="position")
    left.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    style.bars(right, dirty, x="position")
    right.set(ylabel="unaccepted kB left", xlabel="after a step; only vanilla leaves any")
    style.legend(left, ncols=4)
    first = frame.iloc[0]
    caption = (
        f"Reference model, greedy, k={first['k']}, {first['batch']} prompts. Left: share of verify windows in which "
        "the draft at each position was accepted; off, copy-on-write and stage coincide. Right: bytes outside the kept "
        "rows that a step changes in the target's pages and leaves so, mean of a step."
    )
    return style.save(fig, run, "reference_policies", frame, caption)
