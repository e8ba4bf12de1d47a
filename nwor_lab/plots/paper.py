# SPDX-License-Identifier: Apache-2.0
"""`nwor figures`: the paper's figures, each a function of tidy tables that draws and saves it; notebooks call the same.

Tables (see `nwor_lab.results`) and the columns beyond the tidy ones:

    reference   metrics `acceptance_length`, `same_tokens`, `dirty_bytes` of each write policy of the reference model
    acceptance  metric `survival`: share of windows in which the draft at `position` (0 is the first) was accepted,
                with its 95 % interval `low`, `high` and the sampling `temperature`
                metric `rejected_share`: rejected rows / rows written by vanilla, of windows of 1 + k rows
    traffic     metrics `bytes_read`, `bytes_written`, `launches` of one window, by mode, one row for each `kind`
    steps       metric `step_ms`: time of one engine step, by mode, TP and repeat; several steps of one repeat
                count as their median
    kernel_times, attention
                what `nwor_lab.microbench` leaves; with `attention` the steps of `stage` are predicted whole
    gpu_steps, gpu_direct, gpu_acceptance, kv_write_share
                what `nwor measure` leaves: whole steps and their settings, accepted drafts, the paged write's share

The first four are those of one whole reproduction run; the others, made on a GPU, come from the same run or are the
recorded ones. Nothing is taken from a run that failed, is unfinished or was interactive.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths, results
from nwor_lab.experiments.acceptance import predict_rejected, survival
from nwor_lab.model import predicted
from nwor_lab.plots import breakeven, kernels, promises, style
from nwor_lab.plots import steps as step_plots

TABLES = ("reference", "acceptance", "traffic", "steps")
"""Tables that a reproduction run makes."""

RECORDED = ("kernel_times", "gpu_steps", "gpu_direct", "gpu_acceptance", "kv_write_share", "attention")
"""Tables made on a GPU. Those after the first two there may not be."""

DRAWS = "09_paper_figures"
"""The notebook that draws a run's figures, while the run is not over."""


def published_survival() -> pd.DataFrame:
    """Return the published acceptance of chain drafts as survival: columns `source`, `model`, `position`, `value`.

    A conditional acceptance is turned into survival by the running product over positions.
    """
    table = pd.read_csv(paths.PUBLISHED_ACCEPTANCE)
    rows = table[table["draft"].str.startswith("chain") & table["metric"].isin(["survival", "conditional_acceptance"])]
    rows = rows.sort_values("position").astype({"position": int})
    product = rows.groupby(["source", "model", "drafter"])["value"].cumprod()
    rows["value"] = product.where(rows["metric"] == "conditional_acceptance", rows["value"])
    rows["model"] = rows["model"].str.removesuffix("-Instruct") + ", " + rows["drafter"]
    return rows[["source", "model", "position", "value"]].reset_index(drop=True)


def acceptance(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw survival over draft position, measured with its 95 % interval, beside published figures."""
    rows = frame[(frame["metric"] == "survival") & (frame["k"] == frame["k"].max())]
    rows = rows.assign(source="measured", model=[f"this kit's pair, T={t:g}" for t in rows["temperature"]])
    columns = ["source", "model", "temperature", "k", "position", "value", "low", "high"]
    data = pd.concat([rows, published_survival()], ignore_index=True).reindex(columns=columns)
    shown = data.assign(draft=data["position"].astype(int) + 1)
    fig, ax = style.figure(height=3.1)
    for source, look in ((False, {"linewidth": 0.8, "markerfacecolor": "white"}), (True, {"linewidth": 1.8})):
        lines = shown[(shown["source"] == "measured") == source]
        style.series(ax, lines, "draft", "value", "model", style.styles(shown["model"]), **look)
    ax.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    style.legend(ax)
    caption = (
        "Share of verify windows in which the draft at each position was accepted (chain drafts). Filled markers: the "
        f"shipped pair, measured in vLLM at k={int(rows['k'].max())}, whiskers: 95 % interval. Open markers: published "
        "figures, other models and prompts."
    )
    return style.save(fig, run, "acceptance_by_position", data, caption)


def acceptance_at_scale(run: results.Run | Path, frame: pd.DataFrame, counts: pd.DataFrame) -> Path:
    """Draw survival over draft position as counted on a GPU and as counted in a run, each with its 95 % interval.

    Args:
        frame: rows of table `acceptance`; counts: rows of table `gpu_acceptance`.
    """
    both = {"GPU, many prompts": survival(counts).assign(shift=1), "this run": frame.assign(shift=1.2)}
    data = pd.concat(both, names=["source"]).reset_index("source").query("metric == 'survival'").sort_values("position")
    data = data[data["k"] == data.groupby("source")["k"].transform("max")].reset_index(drop=True)
    series = [f"T={t:g}, {source}" for t, source in zip(data["temperature"], data["source"], strict=True)]
    shown = data.assign(draft=data["position"] + data["shift"], series=series)
    grid = style.relplot(shown, "draft", "value", "series", width=style.COLUMN, panel=2.0, ncols=2)
    grid.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    windows = int(counts.loc[counts["metric"] == "windows", "value"].sum())
    caption = (
        "Share of verify windows in which the draft at each position was accepted, at the longest k, with 95 % "
        f"intervals: the shipped pair on a GPU ({windows:,} windows in all, k of {counts['k'].min()} to "
        f"{counts['k'].max()}), and beside it the run's own, of fewer prompts."
    )
    columns = ["source", "temperature", "k", "position", "value", "low", "high"]
    return style.save(grid, run, "acceptance_at_scale", data[columns], caption)


def rejected(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of written rows that are rejected over k: predicted from survival, and measured."""
    found = {"predicted": predict_rejected(frame), "measured": frame[frame["metric"] == "rejected_share"]}
    data = pd.concat([rows.assign(origin=origin) for origin, rows in found.items()])
    data = data[["origin", "temperature", "k", "value"]].sort_values("k")
    fig, ax = style.figure()
    looks: dict[str, Any] = {"predicted": {"marker": ""}, "measured": {"linestyle": "none"}}
    for origin, look in looks.items():
        rows = data[data["origin"] == origin].assign(drafts=lambda rows: "T=" + rows["temperature"].map("{:g}".format))
        style.series(ax, rows, "k", "value", "drafts", label=f"{origin}, {{}}", **look)
    ax.set(xlabel="draft length k", ylabel="rejected / written rows", ylim=(0, 1), xticks=sorted(set(data["k"])))
    style.legend(ax)
    caption = (
        "Share of the window's 1 + k written rows that the verifier rejects. Lines: predicted from the survival "
        "measured at the longest k, (k - sum of survival) / (1 + k). Markers: measured at each k."
    )
    return style.save(fig, run, "rejected_share", data, caption)


def _mode_bars(rows: pd.DataFrame, metrics: dict[str, str], width: float, height: float) -> Any:
    """A panel of bars for each metric, with its value above each bar; columns `metric`, `mode` and `value`."""
    fig, axes = style.figure(width, height, ncols=len(metrics))
    for ax, (metric, title) in zip(axes, metrics.items(), strict=True):
        style.bars(ax, rows[rows["metric"] == metric].assign(window=""), x="window")
        for container in ax.containers:
            ax.bar_label(container, fmt=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", fontsize=6)
        ax.set(title=title, ylim=(0, 1.15 * ax.dataLim.ymax))
    style.legend(axes[0], ncols=4 if width > style.COLUMN else 2)
    return fig


def traffic(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw bytes read, bytes written and launches of one window by mode, attention's own reads left out."""
    metrics = {"bytes_read": "read (kB)", "bytes_written": "written (kB)", "launches": "launches"}
    rows = frame[frame["metric"].isin(list(metrics)) & (frame["kind"] != "attention")]
    sums = rows.groupby(["metric", "mode"], as_index=False)["value"].sum()
    shown = sums.assign(value=sums["value"].where(sums["metric"] == "launches", sums["value"] / 1e3))
    caption = (
        "Bytes moved and kernels launched to write the keys and values of one verify window in each mode, over all "
        "layers; attention's launches and its reads of the pages are left out."
    )
    return style.save(_mode_bars(shown, metrics, style.COLUMN, 2.0), run, "traffic_by_mode", sums, caption)


def step_time(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the time of a step by mode and TP: median, with the range over repeats."""
    rows = frame[frame["metric"] == "step_ms"]
    rows = rows.groupby(["run_id", "mode", "tp", "repeat"], as_index=False)["value"].median()
    fig, ax = style.figure()
    style.bars(ax, rows, x="tp")
    ax.set(xlabel="tensor-parallel ranks", ylabel="time of a step (ms)")
    style.legend(ax, ncols=3)
    repeats = rows.groupby(["mode", "tp"]).size().min()
    caption = f"Time of one engine step by mode, median of {repeats} repeats, whiskers from least to greatest."
    return style.save(fig, run, "step_time", rows, caption)


POLICY_METRICS = {
    "acceptance_length": "tokens a window\n(more is better)",
    "same_tokens": "share of prompts with vanilla's\ntext (more is better)",
    "dirty_kb": "unaccepted kB left\n(less is better)",
    "written_mb": "MB moved to write\n(less is better)",
}
"""Metrics of `policies`, and their titles."""


def policies(run: results.Run | Path, reference: pd.DataFrame, moved: pd.DataFrame) -> Path:
    """Draw what each write policy of the reference model costs: acceptance, text, bytes left behind, bytes moved.

    Args:
        reference: rows of table `reference`.
        moved: rows of table `traffic`.
    """
    whole = reference[reference["position"].isna()].pivot(index="mode", columns="metric", values="value")
    written = moved[moved["metric"].isin(["bytes_read", "bytes_written"]) & (moved["kind"] != "attention")]
    wide = whole[["acceptance_length", "same_tokens"]].assign(
        dirty_kb=whole["dirty_bytes"] / 1e3, written_mb=written.groupby("mode")["value"].sum() / 1e6
    )
    rows = wide.rename_axis("mode").reset_index().melt("mode", var_name="metric")
    first = reference.iloc[0]
    caption = (
        f"Four write policies in the reference model, greedy, k={first['k']}, {first['batch']} prompts. Vanilla writes "
        "every row and leaves the rejected ones. Blind staging holds drafts where attention does not look: acceptance "
        "and text break. Copy-on-write lets vLLM write and restores rejected rows: right, but more bytes. `stage` "
        "holds drafts where attention does look: right, and nothing is left behind."
    )
    return style.save(_mode_bars(rows, POLICY_METRICS, style.TWO_COLUMNS, 2.3), run, "policies", rows, caption)


def headline(run: results.Run | Path, steps: pd.DataFrame) -> Path:
    """Draw the README's figure (`nwor_lab.plots.steps.headline`) into a run; returns the path of its PNG."""
    folder = Path(run.directory if isinstance(run, results.Run) else run) / "figures"
    return step_plots.headline(folder / "headline.png", steps)


def priced_kernels(times: pd.DataFrame) -> pd.DataFrame:
    """Commit, log, restore and vLLM's writer, all layers, beside the model's price: a row an op and case.

    The price is by the launches and the copy that table `kernel_times` holds itself: `predicted` (us), and `error`,
    which is predicted / `us` - 1.
    """
    (bandwidth, empty), (_, further) = kernels.ceilings(times), kernels.per_launch(times)
    frame = kernels.medians(times).query("op in ('commit', 'log', 'restore', 'vllm')").reset_index(drop=True)
    frame["predicted"] = empty + (frame["launches"] - 1) * further + frame["bytes"] / (1e12 * bandwidth) * 1e6
    return frame.assign(error=frame["predicted"] / frame["us"] - 1)


def measured_steps(found: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Every whole step of table `gpu_steps`, beside its prediction; found: it, and `attention` where there is one."""
    return predicted.against_measured(found["gpu_steps"], attention=found.get("attention"))


FIGURES: dict[str, tuple[Callable[..., Path], tuple[str, ...]]] = {
    "headline": (headline, ("gpu_direct",)),
    "policies": (policies, ("reference", "traffic")),
    "acceptance_by_position": (acceptance, ("acceptance",)),
    "acceptance_at_scale": (acceptance_at_scale, ("acceptance", "gpu_acceptance")),
    "rejected_share": (rejected, ("acceptance",)),
    "traffic_by_mode": (traffic, ("traffic",)),
    "step_time": (step_time, ("steps",)),
    "kernel_over_rows": (kernels.over_rows, ("kernel_times",)),
    "kernel_roofline": (kernels.roofline, ("kernel_times",)),
    "break_even": (lambda run: breakeven.break_even(run, published_survival()), ()),
    "predicted_against_measured": (breakeven.predicted_against_measured, ("kernel_times", "gpu_steps")),
    "step_ratio": (step_plots.step_ratio, ("gpu_steps",)),
    "kv_write_share": (step_plots.write_share, ("kv_write_share",)),
    "promises": (promises.draw, promises.TABLES),
}
"""Each figure by its file's name: what draws it, and the tables it takes."""


# -- which run is drawn --------------------------------------------------------------------------------------------


def unfinished(run: Path) -> str:
    """Why the figures cannot be drawn from this run's folder, in a line; empty where they can."""
    manifest = results.read_manifest(run)
    entries = manifest["notebooks"]
    if not entries:
        return f"{run} is no run: it has no manifest.json that can be read"
    # `whole` is written by the reproduction run alone, so a notebook run by hand does not count.
    well = {name for name, entry in entries.items() if entry.get("state") == "done" and entry.get("whole")}
    if broken := set(manifest.get("chosen", entries)) - well - {DRAWS}:
        return f"{run} is not whole: {', '.join(sorted(broken))} did not finish"
    if missing := [name for name in TABLES if not (run / f"{name}.parquet").exists()]:
        return f"{run} is not whole: it lacks {', '.join(missing)}"
    return ""


def sources(source: Path | str | None = None, own: Path | None = None) -> dict[str, Path]:
    """The folder that each table is read from; tables of a GPU that are nowhere are left out.

    Args:
        source: a run's folder, which must be whole; by default the newest one under `results/` that is whole and was
            made with the default parameters, and where there is none `data/recorded`.
        own: the folder of the run that asks, preferred where it is whole but for the notebook that draws.

    Raises:
        FileNotFoundError: `source` does not exist or is not whole; or a recorded table is missing.
    """
    if source and (why := unfinished(Path(source))):
        raise FileNotFoundError(why)
    candidates = [Path(source)] if source else [own, results.newest_run(TABLES[-1])]
    chosen = next((run for run in candidates if run and not unfinished(run)), paths.RECORDED)
    held = {name: chosen if (chosen / f"{name}.parquet").exists() else paths.RECORDED for name in TABLES + RECORDED}
    missing = [name for name, folder in held.items() if not (folder / f"{name}.parquet").exists()]
    if needed := [name for name in missing if name in TABLES + RECORDED[:2]]:
        raise FileNotFoundError(f"no {', '.join(needed)} in {chosen}; `make reproduce` makes them")
    return {name: folder for name, folder in held.items() if name not in missing}


def tables(source: Path | str | None = None, own: Path | None = None) -> dict[str, pd.DataFrame]:
    """The tables that the figures need, read from `sources`."""
    return {name: results.read_table(name, folder) for name, folder in sources(source, own).items()}


def absent(found: dict[str, pd.DataFrame]) -> dict[str, str]:
    """Return the figures that cannot be drawn, and the first table each of them lacks."""
    lacks = {name: [table for table in needs if table not in found] for name, (_, needs) in FIGURES.items()}
    return {name: missing[0] for name, missing in lacks.items() if missing}


def draw_one(run: results.Run | Path, name: str, found: dict[str, pd.DataFrame]) -> Path:
    """Draw the figure `name` (of `FIGURES`) from the tables `found` into `run`; return its path."""
    figure, needs = FIGURES[name]
    if name == "predicted_against_measured":
        return figure(run, priced_kernels(found["kernel_times"]), measured_steps(found))
    return figure(run, *(found[table] for table in needs))


def same_again(run: results.Run, found: dict[str, pd.DataFrame]) -> dict[str, bool]:
    """Draw every figure once more elsewhere and say of each file whether it equals that of `run`, byte for byte."""
    saved, same = run.directory / "figures", {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in FIGURES if name not in absent(found)]:
            path = draw_one(Path(folder), name, found)
            style.close()
            for file in {path, path.with_suffix(".png")}:
                same[file.name] = file.read_bytes() == (saved / file.name).read_bytes()
    return same


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor figures", description="Redraw the paper figures.")
    parser.add_argument("--source", help="a whole run's folder (default: the newest whole run, else data/recorded)")
    parser.add_argument("--out", help="folder to write figures/ into (default: results/figures-<time>)")
    options = parser.parse_args(argv)
    out = Path(options.out) if options.out else paths.RESULTS / f"figures-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        chosen = sources(options.source)
        found = {name: results.read_table(name, folder) for name, folder in chosen.items()}
        missing = absent(found)
        for name in (name for name in FIGURES if name not in missing):
            used = sorted({str(chosen[table]) for table in FIGURES[name][1]})
            print(f"{draw_one(out, name, found)}  from {', '.join(used) or 'the model'}", flush=True)
            style.close()
    except OSError as error:
        print(f"nwor figures: {error}", file=sys.stderr)
        return 2
    for name, table in missing.items():
        print(f"not drawn: {name}, since there is no {table}.parquet in the run or in data/recorded")
    return 0
