# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, each a function of tidy tables that draws and saves it; the notebooks call the same ones.

Tables (see `nwor.results`) and the columns beyond the tidy ones:

    acceptance  metric `survival`: share of windows in which the draft at `position` (0 is the first) was accepted,
                with its 95 % interval `low`, `high` and the sampling `temperature`
                metric `rejected_share`: rejected rows / rows written by vanilla, of windows of 1 + k rows
    traffic     metrics `bytes_read`, `bytes_written`, `launches` of one window, by mode, one row for each `kind`
    steps       metric `step_ms`: time of one engine step, by mode, TP and repeat; several steps of one repeat
                count as their median
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from nwor import paths, plot, results

TABLES = ("acceptance", "traffic", "steps")


def published_survival(published: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the published acceptance of chain drafts as survival: columns `source`, `model`, `position`, `value`.

    A conditional acceptance is turned into survival by the running product over positions.
    """
    table = pd.read_csv(paths.PUBLISHED_ACCEPTANCE) if published is None else published
    rows = table[table["draft"].str.startswith("chain") & table["metric"].isin(["survival", "conditional_acceptance"])]
    parts = []
    for (source, model, drafter), group in rows.sort_values("position").groupby(
        ["source", "model", "drafter"], sort=False
    ):
        conditional = (group["metric"] == "conditional_acceptance").all()
        value = group["value"].cumprod() if conditional else group["value"]
        label = f"{model.removesuffix('-Instruct')}, {drafter}"
        parts.append(
            pd.DataFrame({"source": source, "model": label, "position": group["position"].astype(int), "value": value})
        )
    return pd.concat(parts, ignore_index=True)


def acceptance(run: results.Run | Path, frame: pd.DataFrame, published: pd.DataFrame | None = None) -> Path:
    """Draw survival over draft position, measured with its 95 % band, beside published figures."""
    rows = frame[frame["metric"] == "survival"]
    rows = rows[rows["k"] == rows["k"].max()].sort_values("position")
    fig, ax = plot.figure(height=3.1)
    elsewhere = published_survival(published)
    markers = "svD^P*X<>"
    for n, (label, group) in enumerate(elsewhere.groupby("model", sort=False)):
        color = plot.OTHER[n % len(plot.OTHER)]
        look = {"linestyle": (0, (1 + n, 1)), "marker": markers[n % len(markers)], "linewidth": 0.8}
        ax.plot(group["position"] + 1, group["value"], color=color, markerfacecolor="white", label=label, **look)
    for n, (temperature, group) in enumerate(rows.groupby("temperature")):
        color = ("black", "#0072B2", "#D55E00")[n % 3]
        mean = group.groupby("position")[["value", "low", "high"]].mean()
        label = f"this kit's pair, T={temperature:g}"
        ax.plot(mean.index + 1, mean["value"], color=color, marker="oxd"[n % 3], linewidth=1.6, label=label)
        ax.fill_between(mean.index + 1, mean["low"], mean["high"], color=color, alpha=0.2, linewidth=0)
    ax.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    ax.set_xticks(range(1, 1 + int(max(rows["position"].max(), elsewhere["position"].max())) + 1))
    plot.legend(ax)
    columns = ["model", "temperature", "k", "position", "value", "low", "high"]
    data = pd.concat([rows.reindex(columns=columns).assign(source="measured"), elsewhere], ignore_index=True)
    caption = (
        "Share of verify windows in which the draft at each position was accepted (chain drafts). Filled markers: the "
        f"shipped pair, measured in vLLM at k={int(rows['k'].max())}, band: 95 % interval. Open markers: published "
        f"figures, other models and prompts. Run {_runs(rows)}."
    )
    return plot.save(fig, run, "acceptance_by_position", data, caption)


def rejected(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of written rows that are rejected over k: predicted from survival, and measured."""
    share = frame[frame["metric"] == "rejected_share"]
    predicted = predict_rejected(frame)
    fig, ax = plot.figure()
    for n, (temperature, group) in enumerate(predicted.groupby("temperature")):
        color = ("black", "#0072B2", "#D55E00")[n % 3]
        seen = share[share["temperature"] == temperature]
        ax.plot(group["k"], group["value"], color=color, linestyle="-:"[n % 2], label=f"predicted, T={temperature:g}")
        ax.plot(
            seen["k"],
            seen["value"],
            color=color,
            linestyle="none",
            marker="oxd"[n % 3],
            label=f"measured, T={temperature:g}",
        )
    ax.set(xlabel="draft length k", ylabel="rejected / written rows", ylim=(0, 1))
    ax.set_xticks(sorted(set(predicted["k"]) | set(share["k"])))
    plot.legend(ax)
    columns = ["origin", "temperature", "k", "value"]
    data = pd.concat([predicted.assign(origin="predicted"), share.assign(origin="measured")])[columns]
    caption = (
        "Share of the window's 1 + k written rows that the verifier rejects. Lines: predicted from the survival measured "
        f"at the longest k, (k - sum of survival) / (1 + k). Markers: measured at each k. Run {_runs(share)}."
    )
    return plot.save(fig, run, "rejected_share", data, caption)


def predict_rejected(frame: pd.DataFrame) -> pd.DataFrame:
    """Return columns `temperature`, `k`, `value`: the rejected share of 1 + k rows that survival at the longest k implies.

    Of k drafts, the sum of the survival of positions 0 .. k-1 is accepted; the last sampled token's row is kept.
    """
    rows = frame[frame["metric"] == "survival"]
    rows = rows[rows["k"] == rows["k"].max()]
    parts = []
    for temperature, group in rows.groupby("temperature"):
        survival = group.groupby("position")["value"].mean().sort_index().to_numpy()
        k = np.arange(1, len(survival) + 1)
        parts.append(pd.DataFrame({"temperature": temperature, "k": k, "value": (k - survival.cumsum()) / (1 + k)}))
    return pd.concat(parts, ignore_index=True)


def traffic(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw bytes read, bytes written and launches of one window by mode, attention's own reads left out."""
    metrics = {"bytes_read": "read (kB)", "bytes_written": "written (kB)", "launches": "launches"}
    rows = frame[frame["metric"].isin(list(metrics))]
    if "kind" in rows:
        rows = rows[rows["kind"] != "attention"]
    sums = rows.groupby(["metric", "mode"], as_index=False)["value"].sum()
    fig, axes = plot.figure(ncols=3, height=2.0)
    for ax, (metric, label) in zip(axes, metrics.items(), strict=True):
        shown = sums[sums["metric"] == metric]
        for n, mode in enumerate(plot.ordered(shown["mode"])):
            look = plot.LOOK[mode]
            value = shown.loc[shown["mode"] == mode, "value"].iloc[0] / (1 if metric == "launches" else 1e3)
            ax.bar(n, value, color=look.color, hatch=look.hatch, edgecolor="white", label=look.label)
        ax.set_xticks([])
        ax.set_title(label)
        ax.grid(axis="x", visible=False)
    plot.legend(axes[0])
    caption = (
        "Bytes moved and kernels launched to write the keys and values of one verify window in each mode, over all layers; "
        f"attention's launches and its reads of the pages are left out. Run {_runs(rows)}."
    )
    return plot.save(fig, run, "traffic_by_mode", sums, caption)


def step_time(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the time of a step by mode and TP: median, with the range over repeats."""
    rows = frame[frame["metric"] == "step_ms"]
    rows = rows.groupby(["run_id", "mode", "tp", "repeat"], as_index=False)["value"].median()
    fig, ax = plot.figure()
    plot.bars(ax, rows, x="tp")
    ax.set(xlabel="tensor-parallel ranks", ylabel="time of a step (ms)")
    plot.legend(ax, ncols=3)
    caption = (
        f"Time of one engine step by mode, median of {rows.groupby(['mode', 'tp']).size().min()} repeats, whiskers from "
        f"least to greatest. Run {_runs(rows)}."
    )
    return plot.save(fig, run, "step_time", rows, caption)


def _runs(rows: pd.DataFrame) -> str:
    return ", ".join(sorted({str(run) for run in rows["run_id"]} - {""})) or "unnamed"


def tables(source: Path | str | None = None) -> dict[str, pd.DataFrame]:
    """Return the tables (`TABLES`) that the figures need.

    Each comes from the run's folder `source` when that holds it, else from the newest run that does, else from
    `data/recorded/`. A figure's caption names the run its numbers are from.

    Raises:
        FileNotFoundError: a table is nowhere to be found.
    """
    held = {name: source if source and (Path(source) / f"{name}.parquet").exists() else None for name in TABLES}
    return {name: results.read_table(name, held[name]) for name in TABLES}


def draw(run: results.Run | Path, drawn: dict[str, pd.DataFrame]) -> list[Path]:
    """Draw every figure from the tables `drawn` into `run`; return the paths of the PDFs."""
    return [
        acceptance(run, drawn["acceptance"]),
        rejected(run, drawn["acceptance"]),
        traffic(run, drawn["traffic"]),
        step_time(run, drawn["steps"]),
    ]


def same_again(run: results.Run, drawn: dict[str, pd.DataFrame]) -> dict[str, bool]:
    """Draw every figure once more elsewhere and say of each file whether it equals that of `run`, byte for byte."""
    with tempfile.TemporaryDirectory() as folder:
        again = [path for pdf in draw(Path(folder), drawn) for path in (pdf, pdf.with_suffix(".png"))]
        plot.close()
        saved = run.directory / "figures"
        return {path.name: path.read_bytes() == (saved / path.name).read_bytes() for path in again}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor figures", description="Redraw the paper figures.")
    parser.add_argument("--source", help="a run's folder (default: the newest results, else data/recorded)")
    parser.add_argument("--out", help="folder to write figures/ into (default: results/figures-<time>)")
    options = parser.parse_args(argv)
    out = Path(options.out) if options.out else paths.RESULTS / f"figures-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        drawn = draw(out, tables(options.source))
    except FileNotFoundError as error:
        parser.error(str(error))
    print("\n".join(str(path) for path in drawn))
    return 0
