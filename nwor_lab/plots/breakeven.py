# SPDX-License-Identifier: Apache-2.0
"""Figures of the model of bytes, launches and time: where each mode pays,
and the prediction beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from nwor_lab import results
from nwor_lab.model import breakeven, ratios
from nwor_lab.model.breakeven import H200, MODELS, Chip
from nwor_lab.plots import style

MAPS = (
    ("stage", "separate", "llama-2-7b", "stage, 32 KV heads"),
    ("stage", "separate", "llama-3.1-8b", "stage, 8 KV heads"),
    ("stage", "fused", "llama-2-7b", "stage, rope fused"),
    ("cow", "separate", "llama-2-7b", "cow, 32 KV heads"),
)
"""Rows of the break-even map: mode, vanilla's write, model, label."""

BATCHES = (1, 16, 64, 256)
KS = tuple(range(1, 13))
NORM = mpl.colors.SymLogNorm(linthresh=20, vmin=-1000, vmax=1000)
LEVELS = (-100, -50, 0, 50, 200, 500)


def break_even(run: results.Run | Path, published: pd.DataFrame, chip: Chip = H200) -> Path:
    """Draw where each mode pays over k, acceptance and batch, with published models at their own acceptance.

    Args:
        published: survival by position, as `nwor_lab.plots.paper.published_survival` returns it.
    """
    acceptances = np.linspace(0, 1, 21)
    grid = breakeven.pays(
        {model: MODELS[model] for _, _, model, _ in MAPS}, KS, acceptances, BATCHES, [chip], ["cow", "stage"]
    )
    dots = breakeven.pays_published(published, BATCHES, chip, ["cow", "stage"])
    fig, axes = style.figure(style.TWO_COLUMNS, 5.4, nrows=len(MAPS), ncols=len(BATCHES), sharex=True, sharey=True)
    drawn = []
    for line, (mode, vanilla, model, label) in zip(axes, MAPS, strict=True):
        for ax, batch in zip(line, BATCHES, strict=True):
            chosen = f"mode == '{mode}' and vanilla == '{vanilla}' and batch == {batch}"
            here = grid.query(f"{chosen} and model == '{model}'")
            drawn.append(here.assign(source="model"))
            mesh = _map(ax, here)
            there = dots.query(chosen)
            there = there[there["model"].map(lambda name, model=model: _alike(name, model))]
            drawn.append(there)
            dot = {"color": "black", "markerfacecolor": "white", "markersize": 3, "clip_on": False, "zorder": 5}
            ax.plot(there["k"], there["acceptance"], "o", **dot)
            ax.set(xticks=(1, 4, 8, 12), yticks=(0, 0.5, 1))
            ax.grid(visible=False)
        line[0].set_ylabel(f"{label}\nacceptance")
    for ax, batch in zip(axes[0], BATCHES, strict=True):
        ax.set_title(f"batch {batch}")
    for ax in axes[-1]:
        ax.set_xlabel("drafts k")
    bar = fig.colorbar(mesh, ax=axes, shrink=0.6, pad=0.01, ticks=(-1000, -100, 0, 100, 1000))
    bar.set_label("us a step more than vanilla's")
    bar.minorticks_off()
    caption = (
        f"What a step costs beyond vanilla's by the model of launches and bytes, {chip.name} ({chip.launch_us:g} us a "
        f"launch, {chip.copy_bytes_per_s / 1e12:.2f} TB/s; {chip.source}), bf16, TP=1. Hatched: the mode does not pay. "
        "Acceptance: of each draft, given that those before it were accepted. Circles: published models, at the "
        "constant acceptance that keeps as many rows. Third row: against a vanilla that fuses rope and write, staging "
        "saves no launch, and it loses bytes once a quarter of its rows are accepted drafts. Attention is taken to be "
        "as fast in each mode."
    )
    return style.save(fig, run, "break_even", pd.concat(drawn, ignore_index=True), caption)


def _alike(name: str, model: str) -> bool:
    ours, theirs = MODELS[model], breakeven.known_shape(name)
    return theirs is not None and theirs.num_kv_heads == ours.num_kv_heads and theirs.head_size == ours.head_size


def _map(ax: Any, here: pd.DataFrame) -> Any:
    wide = here.pivot(index="acceptance", columns="k", values="us")
    mesh = ax.pcolormesh(wide.columns, wide.index, wide, cmap="PuOr_r", norm=NORM, shading="gouraud", rasterized=True)
    if wide.to_numpy().max() > 0:
        ax.contourf(wide.columns, wide.index, wide, levels=[0, np.inf], colors="none", hatches=["////"])
    lines = ax.contour(wide.columns, wide.index, wide, levels=LEVELS, colors="black", linewidths=0.6)
    ax.clabel(lines, fmt="%g", fontsize=6)
    return mesh


def predicted_against_measured(run: results.Run | Path, kernels: pd.DataFrame, steps: pd.DataFrame) -> Path:
    """Draw the model's prediction beside every measured kernel and every measured step-time ratio.

    Args:
        kernels: `nwor_lab.model.predicted.kernels_against_model`.
        steps: `nwor_lab.model.predicted.against_measured` of one table or several.
    """
    fig, (left, right) = style.figure(style.TWO_COLUMNS, 2.9, ncols=2)
    span = np.array([kernels[["us", "predicted"]].min().min() / 1.3, kernels[["us", "predicted"]].max().max() * 1.3])
    left.plot(span, span, color="black", linewidth=0.8, label="equal")
    left.fill_between(span, span / 1.25, span * 1.25, color="black", alpha=0.1, linewidth=0, label="within 25 %")
    looks = {"commit": "stage", "log": "cow", "restore": "blind", "vllm": "off"}
    names = {"vllm": "vLLM's writer, 32 launches"}
    for op, mode in looks.items():
        rows = kernels[kernels["op"] == op]
        color, marker = style.LOOK[mode].color, style.LOOK[mode].marker
        label = names.get(op, f"{op}, one launch")
        left.plot(rows["predicted"], rows["us"], marker, color=color, markerfacecolor="none", markersize=3, label=label)
    left.set(xscale="log", yscale="log", xlabel="predicted (us)", ylabel="measured (us)", title="kernels, all layers")
    left.legend(loc="upper left", fontsize=6)
    steady = ratios.steady(steps)
    drawn = steps["with_attention"].fillna(steps["predicted"])
    seen = steps.loc[steady, ["low", "high"]].assign(drawn=drawn)
    edges = np.array([seen.min().min() - 0.01, seen.max().max() + 0.01])
    right.plot(edges, edges, color="black", linewidth=0.8, label="equal")
    for mode in style.ordered(steps["mode"].unique()):
        rows, look = steps[steady & (steps["mode"] == mode)], style.LOOK[mode]
        whole = rows["with_attention"].notna()
        for some, label, fill in (
            (rows[~whole], look.label, look.color),
            (rows[whole], f"{look.label}, attention measured", "white"),
        ):
            if some.empty:
                continue
            spread = np.array([some["measured"] - some["low"], some["high"] - some["measured"]])
            kind = {"color": look.color, "marker": look.marker, "markerfacecolor": fill, "markersize": 3}
            x = drawn[some.index]
            right.errorbar(x, some["measured"], spread, elinewidth=0.5, linestyle="none", label=label, **kind)
    right.set(xlabel="predicted", ylabel="measured", title="time of a step over vanilla's", xlim=edges, ylim=edges)
    right.legend(loc="best", fontsize=6)
    worst = steps.loc[steady, "error"].abs().max()
    caption = (
        f"The model of launches and bytes against all that was measured on a GPU. Left: {len(kernels)} kernels, "
        "medians, cold L2 cache; among vLLM's writes are windows of which no row is kept, where each launch leaves at "
        f"once. Right: {steady.sum()} settings of whole steps, the ratio to vanilla's, median over pairs of repeats, "
        f"whiskers from least to greatest; the largest error is {worst:.3f}. The model knows the write alone: neither "
        "the host's bookkeeping nor another attention kernel."
    )
    if steps["with_attention"].notna().any():
        caption += (
            " Open markers: with the attention kernels of both as measured between their neighbours in the same run; "
            f"there the largest error is {(steps['with_attention'] - steps['measured'])[steady].abs().max():.3f}."
        )
    if not steady.all():
        caption += (
            f" Left out, since their repeats lay more than {ratios.UNSTEADY:.0%} apart: {(~steady).sum()} settings, "
            f"with medians of {', '.join(f'{ratio:.2f}' for ratio in steps.loc[~steady, 'measured'])}."
        )
    data = pd.concat([kernels.assign(panel="kernels"), steps.assign(panel="steps")], ignore_index=True)
    return style.save(fig, run, "predicted_against_measured", data, caption)
