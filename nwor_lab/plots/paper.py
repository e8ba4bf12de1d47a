# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, each a function of tidy tables that draws and saves it; the notebooks call the same ones.

Tables (see `nwor_lab.results`) and the columns beyond the tidy ones:

    reference   metrics `acceptance_length`, `same_tokens`, `dirty_bytes` of each write policy of the reference model
    acceptance  metric `survival`: share of windows in which the draft at `position` (0 is the first) was accepted,
                with its 95 % interval `low`, `high` and the sampling `temperature`
                metric `rejected_share`: rejected rows / rows written by vanilla, of windows of 1 + k rows
    traffic     metrics `bytes_read`, `bytes_written`, `launches` of one window, by mode, one row for each `kind`
    steps       metric `step_ms`: time of one engine step, by mode, TP and repeat; several steps of one repeat
                count as their median
    kernel_times, gpu_cow
                what `nwor_lab.microbench.operators` and `nwor_lab.experiments.bench` leave, recorded on a GPU
    gpu_acceptance
                what `nwor_lab.experiments.acceptance` leaves: counts, of which `acceptance` is made
    gpu_steps   as `bench` leaves it, of several settings; `kv_heads`, `prompt`, `kv_cache_dtype` where they vary
    kv_write_share
                metric `kv_write_share`: the paged write's share of a step, by `batch`, `tp`, `kv_heads`

    attention   what `nwor_lab.microbench.attention` leaves; with it the steps of `stage` are predicted whole

The last four are used where they have been recorded; a figure that lacks one is named as absent.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from nwor_lab import paths, results
from nwor_lab.experiments.acceptance import predict_rejected, survival
from nwor_lab.model import predicted
from nwor_lab.model.breakeven import Chip
from nwor_lab.plots import breakeven, kernels, style
from nwor_lab.plots import steps as step_plots

TABLES = ("reference", "acceptance", "traffic", "steps")
"""Tables that a walk makes."""

RECORDED = ("kernel_times", "gpu_cow")
"""Tables recorded on a GPU."""

OPTIONAL = ("gpu_acceptance", "gpu_steps", "kv_write_share", "attention")
"""Tables recorded on a GPU that there may not be."""

GENERATIONS = {
    "off": "vanilla",
    "blind": "generation 2,\nblind staging",
    "cow": "generation 3,\ncopy-on-write",
    "stage": "stage,\nvisible tail",
}


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
    fig, ax = style.figure(height=3.1)
    elsewhere = published_survival(published)
    markers = "svD^P*X<>"
    for n, (label, group) in enumerate(elsewhere.groupby("model", sort=False)):
        color = style.OTHER[n % len(style.OTHER)]
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
    style.legend(ax)
    columns = ["model", "temperature", "k", "position", "value", "low", "high"]
    data = pd.concat([rows.reindex(columns=columns).assign(source="measured"), elsewhere], ignore_index=True)
    caption = (
        "Share of verify windows in which the draft at each position was accepted (chain drafts). Filled markers: the "
        f"shipped pair, measured in vLLM at k={int(rows['k'].max())}, band: 95 % interval. Open markers: published "
        f"figures, other models and prompts. Run {style.runs_of(rows)}."
    )
    return style.save(fig, run, "acceptance_by_position", data, caption)


def acceptance_at_scale(run: results.Run | Path, frame: pd.DataFrame, counts: pd.DataFrame) -> Path:
    """Draw survival over draft position as counted on a GPU, and as counted by the walk, each with its 95 % interval.

    Args:
        frame: rows of table `acceptance`; counts: rows of table `gpu_acceptance`.
    """
    fig, ax = style.figure(height=2.5)
    parts = []
    for where, table in (("at scale", survival(counts)), ("walk", frame)):
        rows = table[(table["metric"] == "survival") & (table["k"] == table["k"].max())]
        parts.append(rows.assign(source=where))
        for n, (temperature, group) in enumerate(rows.sort_values("position").groupby("temperature")):
            color, small = ("black", "#0072B2", "#D55E00")[n % 3], where == "walk"
            spread = np.array([group["value"] - group["low"], group["high"] - group["value"]])
            ax.errorbar(
                group["position"] + (1.2 if small else 1),
                group["value"],
                spread,
                color=color,
                marker="o^d"[n % 3],
                markerfacecolor="white" if small else color,
                linestyle="none" if small else "-:"[n % 2],
                elinewidth=0.6,
                capsize=1.5,
                label=f"T={temperature:g}, {where}",
            )
    data = pd.concat(parts, ignore_index=True)
    ax.set(xlabel="draft position", ylabel="share of windows accepted", ylim=(0, 1))
    ax.set_xticks(range(1, 2 + int(data["position"].max())))
    style.legend(ax)
    windows = int(counts.loc[counts["metric"] == "windows", "value"].sum())
    caption = (
        "Share of verify windows in which the draft at each position was accepted, at the longest k, with 95 % "
        f"intervals. Filled: the shipped pair on a GPU, {windows:,} windows in all, k of {counts['k'].min()} to "
        f"{counts['k'].max()}. Open, beside them: the walk's, of fewer prompts. Runs {style.runs_of(counts)} and "
        f"{style.runs_of(frame)}."
    )
    columns = ["source", "temperature", "k", "position", "value", "low", "high"]
    return style.save(fig, run, "acceptance_at_scale", data[columns], caption)


def rejected(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the share of written rows that are rejected over k: predicted from survival, and measured."""
    share = frame[frame["metric"] == "rejected_share"]
    predicted = predict_rejected(frame)
    fig, ax = style.figure()
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
    style.legend(ax)
    columns = ["origin", "temperature", "k", "value"]
    data = pd.concat([predicted.assign(origin="predicted"), share.assign(origin="measured")])[columns]
    caption = (
        "Share of the window's 1 + k written rows that the verifier rejects. Lines: predicted from the survival "
        "measured at the longest k, (k - sum of survival) / (1 + k). Markers: measured at each k. "
        f"Run {style.runs_of(share)}."
    )
    return style.save(fig, run, "rejected_share", data, caption)


def traffic(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw bytes read, bytes written and launches of one window by mode, attention's own reads left out."""
    metrics = {"bytes_read": "read (kB)", "bytes_written": "written (kB)", "launches": "launches"}
    rows = frame[frame["metric"].isin(list(metrics))]
    if "kind" in rows:
        rows = rows[rows["kind"] != "attention"]
    sums = rows.groupby(["metric", "mode"], as_index=False)["value"].sum()
    fig, axes = style.figure(ncols=3, height=2.0)
    for ax, (metric, label) in zip(axes, metrics.items(), strict=True):
        shown = sums[sums["metric"] == metric]
        for n, mode in enumerate(style.ordered(shown["mode"])):
            look = style.LOOK[mode]
            value = shown.loc[shown["mode"] == mode, "value"].iloc[0] / (1 if metric == "launches" else 1e3)
            ax.bar(n, value, color=look.color, hatch=look.hatch, edgecolor="white", label=look.label)
        ax.set_xticks([])
        ax.set_title(label)
        ax.grid(axis="x", visible=False)
    style.legend(axes[0])
    caption = (
        "Bytes moved and kernels launched to write the keys and values of one verify window in each mode, over all "
        f"layers; attention's launches and its reads of the pages are left out. Run {style.runs_of(rows)}."
    )
    return style.save(fig, run, "traffic_by_mode", sums, caption)


def step_time(run: results.Run | Path, frame: pd.DataFrame) -> Path:
    """Draw the time of a step by mode and TP: median, with the range over repeats."""
    rows = frame[frame["metric"] == "step_ms"]
    rows = rows.groupby(["run_id", "mode", "tp", "repeat"], as_index=False)["value"].median()
    fig, ax = style.figure()
    style.bars(ax, rows, x="tp")
    ax.set(xlabel="tensor-parallel ranks", ylabel="time of a step (ms)")
    style.legend(ax, ncols=3)
    caption = (
        f"Time of one engine step by mode, median of {rows.groupby(['mode', 'tp']).size().min()} repeats, whiskers "
        f"from least to greatest. Run {style.runs_of(rows)}."
    )
    return style.save(fig, run, "step_time", rows, caption)


def generations(run: results.Run | Path, reference: pd.DataFrame, moved: pd.DataFrame) -> Path:
    """Draw what each generation got wrong: acceptance, text, bytes left behind and bytes moved, by write policy.

    Args:
        reference: rows of table `reference`.
        moved: rows of table `traffic`.
    """
    whole = reference[reference["position"].isna()].pivot(index="mode", columns="metric", values="value")
    bytes_moved = moved[moved["metric"].isin(["bytes_read", "bytes_written"]) & (moved["kind"] != "attention")]
    frame = pd.DataFrame(
        {
            "drafts and bonus\naccepted (tokens)": whole["acceptance_length"],
            "prompts with\nvanilla's tokens": whole["same_tokens"],
            "unaccepted kB\nleft by a step": whole["dirty_bytes"] / 1e3,
            "MB moved to\nwrite a window": bytes_moved.groupby("mode")["value"].sum() / 1e6,
        }
    ).loc[list(GENERATIONS)]
    more_is_worse = (False, False, True, True)
    fig, axes = style.figure(style.TWO_COLUMNS, 2.3, ncols=len(frame.columns))
    rows = []
    for ax, (what, values), worse in zip(axes, frame.items(), more_is_worse, strict=True):
        for n, (mode, value) in enumerate(values.items()):
            look = style.LOOK[str(mode)]
            vanilla = values["off"]
            behind = value > 1.01 * vanilla if worse else value < 0.99 * vanilla
            ax.bar(n, value, color=look.color, hatch=look.hatch, edgecolor="white", label=GENERATIONS[str(mode)])
            text = f"{value:.3g}" + (" !" if behind else "")
            ax.text(n, value, text, ha="center", va="bottom", fontsize=7, weight="bold" if behind else "normal")
            name = str(what).replace("\n", " ")
            rows.append({"mode": mode, "metric": name, "value": value, "worse_than_vanilla": behind})
        ax.set(title=what, xticks=[], ylim=(0, 1.2 * values.max()))
        ax.grid(axis="x", visible=False)
    style.legend(axes[0], ncols=4)
    first = reference.iloc[0]
    caption = (
        f"Three generations of the idea in the reference model, greedy, k={first['k']}, {first['batch']} prompts. The "
        "first, an interceptor in Python, is that model itself. The second staged drafts where attention did not look: "
        "acceptance and text broke. The third lets vLLM write and puts rejected rows back: right, but more bytes. "
        f"`stage` keeps the tail visible. Bold with a mark: worse than vanilla. Run {style.runs_of(reference)}."
    )
    return style.save(fig, run, "generations", pd.DataFrame(rows), caption)


def _break_even(run: results.Run | Path) -> Path:
    return breakeven.break_even(run, published_survival())


def priced_kernels(times: pd.DataFrame) -> pd.DataFrame:
    """Each kernel of table `kernel_times` beside the model's price, by the launch and the copy of the same run."""
    bandwidth, empty = kernels.ceilings(times)
    return predicted.kernels_against_model(kernels.medians(times), Chip("measured", empty, 1e12 * bandwidth))


def measured_steps(drawn: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Every whole step that was measured on a GPU, in whichever of the tables `drawn`, beside its prediction."""
    steps = [drawn[name] for name in ("gpu_cow", "gpu_steps") if name in drawn]
    attention = drawn.get("attention")
    return pd.concat([predicted.against_measured(table, attention=attention) for table in steps], ignore_index=True)


FIGURES: dict[str, tuple[Callable[..., Path], tuple[str, ...]]] = {
    "generations": (generations, ("reference", "traffic")),
    "acceptance_by_position": (acceptance, ("acceptance",)),
    "acceptance_at_scale": (acceptance_at_scale, ("acceptance", "gpu_acceptance")),
    "rejected_share": (rejected, ("acceptance",)),
    "traffic_by_mode": (traffic, ("traffic",)),
    "step_time": (step_time, ("steps",)),
    "kernel_over_rows": (kernels.over_rows, ("kernel_times",)),
    "kernel_roofline": (kernels.roofline, ("kernel_times",)),
    "break_even": (_break_even, ()),
    "predicted_against_measured": (breakeven.predicted_against_measured, ("kernel_times", "gpu_cow")),
    "step_ratio": (step_plots.step_ratio, ("gpu_steps",)),
    "kv_write_share": (step_plots.write_share, ("kv_write_share",)),
}
"""Each figure by its file's name: what draws it, and the tables it takes."""


def tables(source: Path | str | None = None) -> dict[str, pd.DataFrame]:
    """Return the tables that the figures need, and of the `OPTIONAL` ones those that there are.

    Each comes from the run's folder `source` when that holds it, else from the newest run that does, else from
    `data/recorded/`. A figure's caption names the run its numbers are from.

    Raises:
        FileNotFoundError: a table is nowhere to be found.
    """
    found = {}
    for name in (*TABLES, *RECORDED, *OPTIONAL):
        held = source if source and (Path(source) / f"{name}.parquet").exists() else None
        try:
            found[name] = results.read_table(name, held)
        except FileNotFoundError:
            if name not in OPTIONAL:
                raise
    return found


def absent(drawn: dict[str, pd.DataFrame]) -> dict[str, str]:
    """Return the figures that are not drawn, and the first table each of them lacks."""
    lacks = {name: [table for table in needs if table not in drawn] for name, (_, needs) in FIGURES.items()}
    return {name: missing[0] for name, missing in lacks.items() if missing}


def draw(run: results.Run | Path, drawn: dict[str, pd.DataFrame]) -> list[Path]:
    """Draw every figure that the tables `drawn` allow into `run`; return the paths of the PDFs."""
    return [draw_one(run, name, drawn) for name in FIGURES if name not in absent(drawn)]


def draw_one(run: results.Run | Path, name: str, drawn: dict[str, pd.DataFrame]) -> Path:
    """Draw the figure `name` (of `FIGURES`) from the tables `drawn` into `run`; return the path of its PDF."""
    figure, needs = FIGURES[name]
    if name == "predicted_against_measured":
        return figure(run, priced_kernels(drawn["kernel_times"]), measured_steps(drawn))
    return figure(run, *(drawn[table] for table in needs))


def same_again(run: results.Run, drawn: dict[str, pd.DataFrame]) -> dict[str, bool]:
    """Draw every figure once more elsewhere and say of each file whether it equals that of `run`, byte for byte."""
    saved, same = run.directory / "figures", {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in FIGURES if name not in absent(drawn)]:
            pdf = draw_one(Path(folder), name, drawn)
            style.close()
            for path in (pdf, pdf.with_suffix(".png")):
                same[path.name] = path.read_bytes() == (saved / path.name).read_bytes()
    return same


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor figures", description="Redraw the paper figures.")
    parser.add_argument("--source", help="a run's folder (default: the newest results, else data/recorded)")
    parser.add_argument("--out", help="folder to write figures/ into (default: results/figures-<time>)")
    options = parser.parse_args(argv)
    out = Path(options.out) if options.out else paths.RESULTS / f"figures-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        found = tables(options.source)
        drawn = draw(out, found)
    except FileNotFoundError as error:
        parser.error(str(error))
    print("\n".join(str(path) for path in drawn))
    for name, table in absent(found).items():
        print(f"absent: {name}, since {table}.parquet is neither in a run nor recorded")
    return 0
