# SPDX-License-Identifier: Apache-2.0
"""Figures of the model of bytes, launches and time: where each mode is faster, the prediction beside what was measured,
and one widget to explore the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from nwor_lab import results
from nwor_lab.model import breakeven, ratios, traffic
from nwor_lab.model.breakeven import H200, MODELS, Chip
from nwor_lab.plots import style

MAPS = (
    ("stage", "llama-2-7b", "stage, 32 KV heads"),
    ("stage", "llama-3.1-8b", "stage, 8 KV heads"),
    ("cow", "llama-2-7b", "cow, 32 KV heads"),
)
"""Rows of the break-even map: mode, model, label."""
BATCHES = (1, 16, 64, 256)
KS = tuple(range(1, 13))
LEVELS = (-100, -50, 0, 50, 200, 500)
DOT: Any = {"color": "black", "marker": "o", "markerfacecolor": "white", "markersize": 3, "linestyle": "none"}


def break_even(run: results.Run | Path, published: pd.DataFrame, chip: Chip = H200) -> Path:
    """Draw where each mode is faster over k, acceptance and batch, with published models at their own acceptance.

    Args:
        published: survival by position, as `nwor_lab.plots.paper.published_survival` returns it.
    """
    grid = breakeven.differences(
        {model: MODELS[model] for _, model, _ in MAPS}, KS, np.linspace(0, 1, 21), BATCHES, chip
    )
    dots = breakeven.published_differences(published, BATCHES, chip)
    fig, axes = style.figure(style.TWO_COLUMNS, 4.4, nrows=len(MAPS), ncols=len(BATCHES), sharex=True, sharey=True)
    for line, (mode, model, label) in zip(axes, MAPS, strict=True):
        for ax, batch in zip(line, BATCHES, strict=True):
            here = grid[(grid["mode"] == mode) & (grid["model"] == model) & (grid["batch"] == batch)]
            wide = here.pivot(index="acceptance", columns="k", values="us")
            mesh = ax.pcolormesh(
                wide.columns, wide.index, wide, cmap="PuOr_r", shading="gouraud", rasterized=True,
                norm=mpl.colors.SymLogNorm(linthresh=20, vmin=-1000, vmax=1000),
            )  # fmt: skip
            if wide.to_numpy().max() > 0:
                ax.contourf(wide.columns, wide.index, wide, levels=[0, np.inf], colors="none", hatches=["////"])
            lines = ax.contour(wide.columns, wide.index, wide, levels=LEVELS, colors="black", linewidths=0.6)
            ax.clabel(lines, fontsize=6)
            there = dots[(dots["mode"] == mode) & (dots["batch"] == batch)]
            there = there[[_same_rows(name, model) for name in there["model"]]]
            ax.plot(there["k"], there["acceptance"], **DOT, clip_on=False, zorder=5)
            ax.set(xticks=(1, 4, 8, 12), yticks=(0, 0.5, 1))
            ax.grid(visible=False)
        line[0].set_ylabel(f"{label}\nacceptance")
    for top, bottom, batch in zip(axes[0], axes[-1], BATCHES, strict=True):
        top.set_title(f"batch {batch}")
        bottom.set_xlabel("drafts k")
    bar = fig.colorbar(mesh, ax=axes, shrink=0.6, pad=0.01, ticks=(-1000, -100, 0, 100, 1000))
    bar.set_label("us a step more than vanilla's")
    bar.minorticks_off()
    handles = [
        mpl.patches.Patch(facecolor="white", edgecolor="black", hatch="////", label="slower than vanilla"),
        mpl.lines.Line2D([], [], color="black", linewidth=0.6, label="us, contour"),
        mpl.lines.Line2D([], [], **DOT, label="published models, at their own acceptance"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    caption = (
        f"What a step costs beyond vanilla's by the model of launches and bytes, {chip.name} ({chip.launch_us:g} us a "
        f"launch, {chip.copy_bytes_per_s / 1e12:.2f} TB/s; {chip.source}), bf16, one rank. Acceptance: of each draft, "
        "given that those before it were accepted; published models at the constant one that keeps as many rows. "
        "Attention is taken to be as fast in each mode."
    )
    data = pd.concat([grid.assign(source="model"), dots], ignore_index=True)
    return style.save(fig, run, "break_even", data, caption)


def _same_rows(name: str, model: str) -> bool:
    ours, theirs = MODELS[model], breakeven.known_shape(name)
    return theirs is not None and (theirs.num_kv_heads, theirs.head_size) == (ours.num_kv_heads, ours.head_size)


def predicted_against_measured(run: results.Run | Path, kernels: pd.DataFrame, steps: pd.DataFrame) -> Path:
    """Draw the model's prediction beside every measured kernel and every measured step-time ratio.

    Args:
        kernels: `nwor_lab.plots.paper.priced_kernels`.
        steps: `nwor_lab.model.predicted.against_measured`.
    """
    fig, (left, right) = style.figure(style.TWO_COLUMNS, 3.2, ncols=2)
    span = np.array([kernels[["us", "predicted"]].min().min() / 1.3, kernels[["us", "predicted"]].max().max() * 1.3])
    left.plot(span, span, color="black", linewidth=0.8, label="equal")
    left.fill_between(span, span / 1.25, span * 1.25, color="black", alpha=0.1, linewidth=0, label="within 25 %")
    open_markers: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 3}
    names = (kernels["op"] + ", one launch").replace("vllm, one launch", "vLLM's writer, 32 launches")
    style.series(left, kernels.assign(name=names), "predicted", "us", "name", **open_markers)
    left.set(xscale="log", yscale="log", xlabel="predicted (us)", ylabel="measured (us)", title="kernels, all layers")
    stable = ratios.is_stable(steps)
    shown = steps[stable].assign(x=steps["with_attention"].fillna(steps["predicted"]))
    edges = np.array([shown[["low", "x"]].min().min() - 0.01, shown[["high", "x"]].max().max() + 0.01])
    right.plot(edges, edges, color="black", linewidth=0.8, label="equal")
    whole = shown["with_attention"].notna()
    style.series(right, shown[~whole], "x", "measured", "mode", linestyle="none", markersize=3, capsize=0)
    attended: Any = {"label": "{}, its attention measured", **open_markers, "markerfacecolor": "white", "capsize": 0}
    style.series(right, shown[whole], "x", "measured", "mode", **attended)
    right.set(xlabel="predicted", ylabel="measured", title="time of a step over vanilla's", xlim=edges, ylim=edges)
    for ax in (left, right):
        ax.legend(loc="upper left", fontsize=6)
    error = (shown["x"] - shown["measured"]).abs()
    caption = (
        f"The model of launches and bytes against what was measured on a GPU. Left: {len(kernels)} kernels, "
        "medians, cold L2 cache; among vLLM's writes are windows of which no row is kept, where each launch leaves at "
        f"once. Right: {len(shown)} settings of whole steps, the ratio to vanilla's, median over pairs of repeats, "
        f"whiskers from least to greatest; the largest error is {shown['error'].abs().max():.3f} by launches and bytes "
        f"alone, {error.max():.3f} with the time of both attention kernels, measured by the same build "
        f"(open markers). {(~stable).sum()} settings are left out: their repeats lay more than {ratios.MAX_SPREAD:.0%} "
        "apart. The model leaves out the host's bookkeeping."
    )
    data = pd.concat([kernels.assign(panel="kernels"), steps.assign(panel="steps")], ignore_index=True)
    return style.save(fig, run, "predicted_against_measured", data, caption)


def explore(chip: Chip = H200, **start: Any) -> Any:
    """One `ipywidgets.interactive`: what a step of each mode costs over vanilla's at the setting of its sliders.

    Args:
        start: where the sliders start: `model` (of `MODELS`), `k`, `acceptance`, `batch`, `context`, `tp`. They reach
            that far at least.
    """
    import ipywidgets as widgets

    def whole(name: str, value: int, least: int, most: int, step: int = 1) -> widgets.IntSlider:
        value = start.get(name, value)
        return widgets.IntSlider(value, least, max(most, value), step, continuous_update=False)

    return widgets.interactive(
        lambda **setting: draw_setting(chip=chip, **setting),
        model=widgets.Dropdown(options=list(MODELS), value=start.get("model", "llama-2-7b")),
        k=whole("k", 8, 1, 16),
        acceptance=widgets.FloatSlider(start.get("acceptance", 0.7), min=0, max=1, step=0.01, continuous_update=False),
        batch=whole("batch", 16, 1, 1024),
        context=whole("context", 512, 0, 32768, 128),
        tp=widgets.Dropdown(options=sorted({1, 2, 4, 8, start.get("tp", 1)}), value=start.get("tp", 1)),
    )


def draw_setting(model: str, k: int, acceptance: float, batch: int, context: int, tp: int, chip: Chip = H200) -> None:
    """Print what a step of each mode costs over vanilla's at a setting, and draw it over the batch."""
    shape = breakeven.model_shape(model, tp)
    rows = breakeven.differences({model: shape}, [k], [acceptance], sorted({*(2**n for n in range(11)), batch}), chip)
    window = traffic.Window.expected(batch, breakeven.survival_of(acceptance, k), context)
    print(f"{batch} windows of 1 + {k} rows, {window.kept_rows / batch:.2f} of them kept; {chip.name}, {chip.source}")
    for row in rows[rows["batch"] == batch].itertuples():
        held = traffic.staging_bytes(row.mode, shape, batch, k) / 1e6
        print(
            f"{row.mode}: {row.us:+.1f} us a step, {row.launches:+g} launches, {row.bytes / 1e6:+.1f} MB moved; "
            f"{held:.1f} MB held on the device"
        )
    vanilla = traffic.served_traffic("off", shape, window)
    share = (vanilla["write"].read + vanilla["write"].written) / (vanilla.total().read + vanilla.total().written)
    print(f"vanilla's write is {share:.1%} of the bytes that its attention and write move")
    ax = style.figure(style.TWO_COLUMNS, 2.6)[1]
    style.series(ax, rows, "batch", "us", "mode")
    ax.axhline(0, color="black", linewidth=0.8, label="vanilla")
    ax.axvline(batch, color="black", linewidth=0.5, linestyle=":", label=f"batch {batch}")
    ax.set(xscale="log", xlabel="requests in the batch", ylabel="us a step more than vanilla's")
    ax.set_yscale("symlog", linthresh=10)
    style.legend(ax, ncols=4)
    style.plt.show()
