# SPDX-License-Identifier: Apache-2.0
"""Figure of chunk-based verification: the rows that chunks save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nwor_lab.cost.breakeven import survival_of
from nwor_lab.cost.chunks import window_rows
from nwor_lab.figures import style

ACCEPTANCES = (0.5, 0.9, 0.98)


def rows_computed(survival: Sequence[float], chunk: int) -> pd.DataFrame:
    """Rows computed in chunks over one forward's, for windows of `len(survival)` drafts, by the model: `drafts` (how
    they are accepted), `chunk` (rows of one) and `share`."""
    k = len(survival)
    series = {f"acceptance {each:g}": survival_of(each, k) for each in ACCEPTANCES}
    series["drafts looked up, this run"] = list(survival)
    sizes = sorted({*(2**n for n in range(1, 12) if 2**n <= k), min(chunk, 1 + k), 1 + k})
    return pd.DataFrame(
        {"drafts": drafts, "chunk": size, "share": window_rows("off", shares, size).computed / (1 + k)}
        for drafts, shares in series.items()
        for size in sizes
    )


def when_they_pay(run: style.Place, survival: Sequence[float], chunk: int, counted: float) -> Path:
    """Draw rows computed for a window in chunks over one forward's.

    Args:
        survival: [k], counted where drafts were looked up; the other series have one acceptance at each position.
        chunk: rows of a chunk, and `counted`: rows computed so over those of one forward, in the same run.
    """
    frame = rows_computed(survival, chunk)
    fig, ax = style.figure(height=2.6)
    style.series(ax, frame, "chunk", "share", "drafts")
    ring = {"linestyle": "none", "marker": "o", "color": "black", "markerfacecolor": "none", "markersize": 8}
    ax.plot(chunk, counted, label="counted, this run", **ring)
    ax.set(xlabel="rows a chunk", ylabel="rows computed\nover one forward's", xscale="log", ylim=(0, 1.05))
    ax.set_xticks(sorted(frame["chunk"].unique()), sorted(frame["chunk"].unique()))
    ax.minorticks_off()
    style.legend(ax)
    caption = (
        f"Rows computed for windows of {len(survival)} drafts in chunks over the same in one forward, by the model. "
        "Lines: drafts accepted with the same probability at each position, and with the survival that the reference "
        "model counted where drafts are looked up in the text; the ring is what it counted of the rows."
    )
    return style.save(fig, run, "chunked_verification", frame, caption)
