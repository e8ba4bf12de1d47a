# SPDX-License-Identifier: Apache-2.0
"""Figures of the write policies in the reference model, and of how far drafts survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab.bench.survival import predict_rejected
from nwor_lab.cost.breakeven import published_survival
from nwor_lab.figures import style

COSTS = {
    "acceptance_length": "tokens a window\n(more is better)",
    "same_tokens": "share of prompts with vanilla's\ntext (more is better)",
    "dirty_kb": "unaccepted kB left\n(less is better)",
}
"""Metrics of `policies`, and their titles."""
MOVED = {"bytes_read": "kB read", "bytes_written": "kB written", "launches": "launches"}
"""Metrics of `bytes_moved`, and their titles."""


def _mode_bars(rows: pd.DataFrame, titles: dict[str, str]) -> Any:
    """A panel of bars for each metric in `titles`, the value above each bar; columns `metric`, `mode` and `value`."""
    fig, axes = style.figure(style.TWO_COLUMNS, 2.2, ncols=len(titles))
    for ax, (metric, title) in zip(axes, titles.items(), strict=True):
        style.bars(ax, rows[rows["metric"] == metric].assign(window=""), x="window")
        for container in ax.containers:
            ax.bar_label(container, fmt=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", fontsize=6)
        ax.set(title=title, ylim=(0, 1.15 * ax.dataLim.ymax))
    style.legend(axes[0], ncols=4)
    return fig


def policies(run: style.Place, reference: pd.DataFrame) -> Path:
    """Draw what each write policy of the reference model does to acceptance, to the text and to the pages.

    Args:
        reference: table `reference`; of it the metrics `acceptance_length`, `same_tokens` and `dirty_bytes` by mode.
    """
    whole = reference[reference["position"].isna()].pivot(index="mode", columns="metric", values="value")
    wide = whole[["acceptance_length", "same_tokens"]].assign(dirty_kb=whole["dirty_bytes"] / 1e3)
    rows = wide.rename_axis("mode").reset_index().melt("mode", var_name="metric")
    first = reference.iloc[0]
    caption = (
        f"Four write policies in the reference model, greedy, k={first['k']}, {first['batch']} prompts. Vanilla writes "
        "every row and leaves the rejected ones. Blind staging holds drafts where attention does not look: acceptance "
        "and text break. Copy-on-write lets vLLM write and restores rejected rows; `stage` holds drafts where "
        "attention does look. Both are right and leave nothing behind."
    )
    return style.save(_mode_bars(rows, COSTS), run, "policies", rows, caption)


def bytes_moved(run: style.Place, traffic: pd.DataFrame) -> Path:
    """Draw bytes read, bytes written and launches of one window by mode, attention's own left out.

    Args:
        traffic: table `traffic`: metrics `MOVED` by mode and `kind`.
    """
    rows = traffic[traffic["metric"].isin(list(MOVED)) & (traffic["kind"] != "attention")]
    sums = rows.groupby(["metric", "mode"], as_index=False)["value"].sum()
    shown = sums.assign(value=sums["value"].where(sums["metric"] == "launches", sums["value"] / 1e3))
    caption = (
        "Bytes moved and kernels launched to write the keys and values of one verify window in each mode, over all "
        "layers, counted by the reference model; attention's launches and its reads of the prefix are left out."
    )
    return style.save(_mode_bars(shown, MOVED), run, "bytes", sums, caption)


def acceptance(run: style.Place, counted: pd.DataFrame) -> Path:
    """Draw how far drafts survive, beside published figures, and the share of written rows that is rejected.

    Args:
        counted: tidy rows as `nwor_lab.bench.survival.survival` makes them: `survival` by `position` with its
            95 % interval `low`, `high`, and `rejected_share`, by `k` and `temperature`.
    """
    rows = counted[(counted["metric"] == "survival") & (counted["k"] == counted["k"].max())]
    rows = rows.assign(series=[f"this kit's pair, T={t:g}" for t in rows["temperature"]], panel="survival")
    published = published_survival().rename(columns={"model": "series"}).assign(panel="survival")
    survival = pd.concat([rows, published], ignore_index=True)
    survival["x"] = survival["position"].astype(int) + 1
    fig, (left, right) = style.figure(style.TWO_COLUMNS, 3.2, ncols=2, sharey=True)
    looks = style.styles(survival["series"])
    own = survival["series"].isin(rows["series"])
    style.series(left, survival[~own], "x", "value", "series", looks, linewidth=0.8, markerfacecolor="white")
    style.series(left, survival[own], "x", "value", "series", looks, linewidth=1.8)
    shares = {"predicted": predict_rejected(counted), "counted": counted[counted["metric"] == "rejected_share"]}
    share = pd.concat([part.assign(panel=f"rejected, {origin}", x=part["k"]) for origin, part in shares.items()])
    share["series"] = [f"this kit's pair, T={t:g}" for t in share["temperature"]]
    lines = share[["panel", "series", "x", "value"]].sort_values("x")
    for origin, drawn in (("predicted", {"marker": ""}), ("counted", {"linestyle": "none"})):
        part = lines[lines["panel"] == f"rejected, {origin}"]
        style.series(right, part, "x", "value", "series", looks, label=f"{origin}, {{}}", **drawn)
    left.set(xlabel="draft position", ylabel="share", title="windows in which the draft is accepted", ylim=(0, 1))
    right.set(xlabel="draft length k", title="written rows that are rejected", xticks=sorted(set(share["x"])))
    right.legend(loc="lower right")
    style.legend(left, ncols=3)
    caption = (
        "Left: share of verify windows in which the draft at each position was accepted, at k="
        f"{int(rows['k'].max())}; filled markers are the shipped pair in vLLM with 95 % intervals, open ones published "
        "figures of other models and prompts. Right: share of the window's 1 + k written rows that the verifier "
        "rejects; markers are counted at each k, lines predicted from the survival at the longest k."
    )
    columns = ["panel", "series", "x", "value", "low", "high"]
    return style.save(fig, run, "acceptance", pd.concat([survival, share]).reindex(columns=columns), caption)
