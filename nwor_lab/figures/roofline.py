# SPDX-License-Identifier: Apache-2.0
"""The roofline of kernels: how near they come to what launch and bandwidth allow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from nwor_lab.figures import style


def roofline(run: style.Place, points: pd.DataFrame, bandwidth: float, empty: float) -> Path:
    """Draw the bandwidth that kernels reach over the bytes that have to move, below the model's roof.

    Args:
        points: a row a kernel and case: `panel`, `kernel`, `bytes` (read and written) and `us`.
        bandwidth, empty: of `nwor_lab.gpu.kernel_times.ceilings`: TB/s of a large copy, us of an empty kernel.
    """
    points = points.assign(MB=points["bytes"] / 1e6, tb_s=points["bytes"] / points["us"] / 1e6)
    panels = points["panel"].unique()
    width = style.TWO_COLUMNS if len(panels) > 1 else style.COLUMN
    fig, axes = style.figure(width, 2.9, ncols=len(panels), sharey=True, squeeze=False)
    for ax, panel in zip(axes[0], panels, strict=True):
        rows = points[points["panel"] == panel]
        x = np.geomspace(rows["MB"].min() / 2, rows["MB"].max() * 2, 100)
        ax.plot(x, x / (empty + x / bandwidth), color="black", linewidth=0.8, label="roof: launch + bytes")
        style.series(ax, rows, "MB", "tb_s", "kernel", linestyle="none", markerfacecolor="none", markersize=3)
        ax.set(xscale="log", yscale="log", xlabel="MB that have to move", title=panel)
        ax.legend(loc="lower right", fontsize=6)
    axes[0, 0].set_ylabel("TB/s reached")
    caption = (
        "Bandwidth that kernels reach over the bytes that have to move; a marker a shape, medians, cold L2 cache. "
        f"Line: an empty kernel ({empty:.1f} us) and the bytes at the bandwidth of a large copy ({bandwidth:.2f} TB/s)."
    )
    return style.save(fig, run, "roofline", points[["panel", "kernel", "MB", "us", "tb_s"]], caption)
