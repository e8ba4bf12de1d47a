# SPDX-License-Identifier: Apache-2.0
"""The model of bytes, launches and time: what it expected beside what was found, and sliders to explore it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab.cost import breakeven, ratios, traffic
from nwor_lab.cost.breakeven import H200, MODELS, Chip
from nwor_lab.figures import style


def expected(run: style.Place, kernels: pd.DataFrame, steps: pd.DataFrame, guessed: pd.DataFrame) -> Path:
    """Draw what was expected beside what was found: by the model each kernel and step, by hand layers and runs.

    Args:
        kernels: `nwor_lab.gpu.kernel_times.priced`.
        steps: `nwor_lab.cost.predicted.against_measured`; points whose repeats lie too far apart are left out.
        guessed: `nwor_lab.figures.command.guessed`: ratios that were written down before a run; where it gave none,
            they are left out.
    """
    stable = ratios.is_stable(steps)
    shown = steps[stable].assign(expected=steps["with_attention"].fillna(steps["predicted"]), panel="steps")
    names = kernels["op"].replace("vllm", "vLLM's writer")
    priced = kernels.assign(panel="kernels", expected=kernels["predicted"], measured=kernels["us"], mode=names)
    written = guessed.assign(mode=guessed["series"]).dropna(subset="measured")
    panels = [written[written["panel"] == panel] for panel in ("layers", "engines", "servers")]
    fig, grid = style.figure(style.TWO_COLUMNS, 5, ncols=3, nrows=2)
    grid[0, 2].axis("off")
    axes = [*grid[0, :2], *grid[1]]
    for ax, rows, margin in zip(axes, (priced, shown, *panels), (1.3, 1.01, 1.3, 1.01, 1.01), strict=True):
        both = rows[["expected", "measured"]].to_numpy()
        span = np.array([both.min() / margin, both.max() * margin])
        ax.plot(span, span, color="black", linewidth=0.8, label="equal")
        look: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 3, "capsize": 0}
        points = rows if rows is priced or rows is shown else rows.drop(columns=["low", "high"], errors="ignore")
        style.series(ax, points, "expected", "measured", "mode", **look)
        ax.set(xlim=span, ylim=span)
        if ax is axes[-1]:  # of servers there are points wherever a legend could be
            grid[0, 2].legend(*ax.get_legend_handles_labels(), loc="lower center", fontsize=5)
        else:
            ax.legend(loc="lower right" if rows is shown else "upper left", fontsize=5)
    axes[0].set(xscale="log", yscale="log", xlabel="expected (us)", ylabel="found (us)", title="kernels, all layers")
    axes[1].set(xlabel="expected", ylabel="found", title="time of a step over vanilla's")
    axes[2].set(xscale="log", yscale="log", xlabel="expected", ylabel="found", title="layers")
    axes[3].set(xlabel="expected", ylabel="found", title="steps")
    axes[4].set(xlabel="expected", ylabel="found", title="tokens a second of servers")
    error = (shown["expected"] - shown["measured"]).abs().max()
    caption = (
        f"What the model of launches and bytes expects beside what was found on a GPU. Above: {len(kernels)} kernels, "
        "each one launch but for vLLM's writer with 32, medians, cold L2 cache; among vLLM's writes are windows of "
        f"which no row is kept, where each launch leaves at once; and {len(shown)} settings of whole steps, the "
        "ratio to vanilla's; that of `stage` with the time of "
        f"both attention kernels, measured by the same build, where there is one. The largest error is {error:.3f}; "
        f"left out: {(~stable).sum()}, whose repeats lay more than {ratios.MAX_SPREAD:.0%} apart. The model leaves out "
        "the host. Below: ratios to vLLM's that were written down before the run that gave them "
        f"({', '.join(sorted(set(written['gpu'])))}): {len(panels[0])} of one layer's time under `stage`, by vLLM's "
        f"attention, {len(panels[1])} of a step's time, and {len(panels[2])} of tokens a second, where more is faster. "
        f"Left out: {len(guessed) - len(written)}, without parity or with repeats too far apart."
    )
    drawn = pd.concat([priced, shown, *panels])
    columns = ["panel", "mode", "expected", "measured", "low", "high"]
    return style.save(fig, run, "expected", drawn.reindex(columns=columns), caption)


def explore(model: str, k: int, acceptance: float, batch: int, context: int, tp: int, chip: Chip = H200) -> Any:
    """One `ipywidgets.interactive`: `draw_setting` at sliders that start at a setting, and reach that far at least."""
    import ipywidgets as widgets

    def whole(value: int, least: int, most: int, step: int = 1) -> widgets.IntSlider:
        return widgets.IntSlider(value, least, max(most, value), step, continuous_update=False)

    return widgets.interactive(
        lambda **setting: draw_setting(chip=chip, **setting),
        model=widgets.Dropdown(options=list(MODELS), value=model),
        k=whole(k, 1, 16),
        acceptance=widgets.FloatSlider(acceptance, min=0, max=1, step=0.01, continuous_update=False),
        batch=whole(batch, 1, 1024),
        context=whole(context, 0, 32768, 128),
        tp=widgets.Dropdown(options=sorted({1, 2, 4, 8, tp}), value=tp),
    )


def draw_setting(model: str, k: int, acceptance: float, batch: int, context: int, tp: int, chip: Chip = H200) -> None:
    """Print what a step of each mode costs over vanilla's at a setting, and draw it over the batch."""
    shape, rows = replace(MODELS[model], tp=tp), []
    window = traffic.Window.expected(batch, breakeven.survival_of(acceptance, k), context)
    print(f"{batch} windows of 1 + {k} rows, {window.kept_rows / batch:.2f} of them kept; {chip.name}, {chip.source}")
    for mode, requests in product(("cow", "direct", "stage"), sorted({*(2**n for n in range(11)), batch})):
        step = traffic.Window.expected(requests, breakeven.survival_of(acceptance, k))
        moved = breakeven.step_difference(mode, shape, step)
        rows.append({"mode": mode, "batch": requests, "us": chip.us(moved)})
        if requests == batch:
            held = traffic.staging_bytes(mode, shape, batch, k) / 1e6
            print(
                f"{mode}: {chip.us(moved):+.1f} us a step, {moved.launches:+g} launches, "
                f"{(moved.read + moved.written) / 1e6:+.1f} MB moved; {held:.1f} MB held on the device"
            )
    vanilla = traffic.served_traffic("off", shape, window)
    share = (vanilla["write"].read + vanilla["write"].written) / (vanilla.total().read + vanilla.total().written)
    print(f"vanilla's write is {share:.1%} of the bytes that its attention and write move")
    ax = style.figure(style.TWO_COLUMNS, 2.6)[1]
    style.series(ax, pd.DataFrame(rows), "batch", "us", "mode")
    ax.axhline(0, color="black", linewidth=0.8, label="vanilla")
    ax.axvline(batch, color="black", linewidth=0.5, linestyle=":", label=f"batch {batch}")
    ax.set(xscale="log", xlabel="requests in the batch", ylabel="us a step more than vanilla's")
    ax.set_yscale("symlog", linthresh=10)
    style.legend(ax, ncols=5)
    style.plt.show()
