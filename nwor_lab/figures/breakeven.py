# SPDX-License-Identifier: Apache-2.0
"""Figures of the model of bytes, launches and time: where each mode is faster, what was expected beside what was found,
and one widget to explore the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from nwor_lab.cost import breakeven, ratios, traffic
from nwor_lab.cost.breakeven import H200, MODELS, Chip
from nwor_lab.figures import style

MAPS = (
    ("stage", "llama-2-7b", "stage, 32 KV heads"),
    ("stage", "llama-3.1-8b", "stage, 8 KV heads"),
    ("cow", "llama-2-7b", "cow, 32 KV heads"),
)
"""Rows of the break-even map: mode, model, label."""
BATCHES = (1, 16, 64, 256)
KS = tuple(range(1, 13))


def break_even(run: style.Place, chip: Chip = H200) -> Path:
    """Draw where each mode is faster over k, acceptance and batch."""
    grid = breakeven.differences(
        {model: MODELS[model] for _, model, _ in MAPS}, KS, np.linspace(0, 1, 21), BATCHES, chip
    )
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
            ax.set(xticks=(1, 4, 8, 12), yticks=(0, 0.5, 1))
            ax.grid(visible=False)
        line[0].set_ylabel(f"{label}\nacceptance")
    for top, bottom, batch in zip(axes[0], axes[-1], BATCHES, strict=True):
        top.set_title(f"batch {batch}")
        bottom.set_xlabel("drafts k")
    bar = fig.colorbar(mesh, ax=axes, shrink=0.6, pad=0.01, ticks=(-1000, -100, 0, 100, 1000))
    bar.set_label("us a step more than vanilla's")
    bar.minorticks_off()
    slower = mpl.patches.Patch(facecolor="white", edgecolor="black", hatch="////", label="slower than vanilla")
    fig.legend(handles=[slower], loc="outside upper center")
    caption = (
        f"What a step costs beyond vanilla's by the model of launches and bytes, {chip.name} ({chip.launch_us:g} us a "
        f"launch, {chip.copy_bytes_per_s / 1e12:.2f} TB/s; {chip.source}), bf16, one rank. Acceptance: of each draft, "
        "given that those before it were accepted. Attention is taken to be as fast in each mode."
    )
    return style.save(fig, run, "break_even", grid, caption)


def expected(run: style.Place, kernels: pd.DataFrame, steps: pd.DataFrame) -> Path:
    """Draw what the model expected beside what was found, of every measured kernel and every measured step.

    Args:
        kernels: `nwor_lab.gpu.kernel_times.priced`.
        steps: `nwor_lab.cost.predicted.against_measured`; points whose repeats lie too far apart are left out.
    """
    stable = ratios.is_stable(steps)
    shown = steps[stable].assign(expected=steps["with_attention"].fillna(steps["predicted"]), panel="steps")
    names = (kernels["op"] + ", one launch").replace("vllm, one launch", "vLLM's writer, 32 launches")
    priced = kernels.assign(panel="kernels", expected=kernels["predicted"], measured=kernels["us"], mode=names)
    fig, axes = style.figure(style.TWO_COLUMNS, 3.2, ncols=2)
    for ax, rows, margin in zip(axes, (priced, shown), (1.3, 1.01), strict=True):
        both = rows[["expected", "measured"]].to_numpy()
        span = np.array([both.min() / margin, both.max() * margin])
        ax.plot(span, span, color="black", linewidth=0.8, label="equal")
        look: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 3, "capsize": 0}
        style.series(ax, rows, "expected", "measured", "mode", **look)
        ax.set(xlim=span, ylim=span)
        ax.legend(loc="upper left", fontsize=6)
    axes[0].set(xscale="log", yscale="log", xlabel="expected (us)", ylabel="found (us)", title="kernels, all layers")
    axes[1].set(xlabel="expected", ylabel="found", title="time of a step over vanilla's")
    error = (shown["expected"] - shown["measured"]).abs().max()
    caption = (
        f"What the model of launches and bytes expects beside what was found on a GPU. Left: {len(kernels)} kernels, "
        "medians, cold L2 cache; among vLLM's writes are windows of which no row is kept, where each launch leaves at "
        f"once. Right: {len(shown)} settings of whole steps, the ratio to vanilla's; that of `stage` with the time of "
        f"both attention kernels, measured by the same build, where there is one. The largest error is {error:.3f}; "
        f"{(~stable).sum()} settings are left out: their repeats lay more than {ratios.MAX_SPREAD:.0%} apart. The "
        "model leaves out the host."
    )
    columns = ["panel", "mode", "expected", "measured", "low", "high"]
    return style.save(fig, run, "expected", pd.concat([priced, shown]).reindex(columns=columns), caption)


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
