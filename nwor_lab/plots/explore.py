# SPDX-License-Identifier: Apache-2.0
"""The break-even model with sliders: what each mode costs at a setting, drawn beside what was measured.

`explorer()` shows it in a notebook. Each slider's move draws one picture anew from `breakeven`; nothing is run, so a
laptop will do. Under papermill it shows the setting that it starts with.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from nwor_lab.model import breakeven, predicted
from nwor_lab.model.breakeven import CHIPS, H200, MODELS, Chip
from nwor_lab.model.traffic import Shape, Window, served_traffic, staging_bytes
from nwor_lab.plots import kernels, paper
from nwor_lab.plots import style as plot

BATCHES = tuple(2**n for n in range(11))
LINES = (("cow", False), ("stage", False), ("stage", True))
"""What is drawn: mode, and whether vanilla fuses rope and write."""


@dataclass(frozen=True)
class Setting:
    """What the sliders say. `acceptance` is each draft's, given that those before it were accepted."""

    k: int = 8
    acceptance: float = 0.7
    batch: int = 16
    context: int = 512
    layers: int = 32
    kv_heads: int = 32
    head_size: int = 128
    cache_bytes: int = 2
    tp: int = 1
    chip: str = H200.name

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.kv_heads, self.head_size, self.cache_bytes, 2, self.tp)

    @property
    def window(self) -> Window:
        return Window.expected(self.batch, breakeven.survival_of(self.acceptance, self.k), self.context)

    @property
    def on(self) -> Chip:
        return CHIPS[self.chip]


def costs(setting: Setting) -> pd.DataFrame:
    """Return `mode`, `fused` and `us`, what one step costs over vanilla's, for each of `LINES`."""
    return pd.DataFrame(
        {
            "mode": mode,
            "fused": fused,
            "us": breakeven.step_difference_us(mode, setting.shape, setting.window, setting.on, fused=fused),
        }
        for mode, fused in LINES
    )


def measured_points(times: pd.DataFrame, *steps: pd.DataFrame) -> pd.DataFrame:
    """What was measured, in the explorer's terms: `mode`, `what`, `k`, `batch`, `kv_heads`, `us` over vanilla's.

    Args:
        times: table `kernel_times`. The write alone, in bf16: the commit less vLLM's write of all rows for `stage`; for
            `cow` the log of a window of which nothing is logged yet, as in a batch that has just changed, and the
            restore. The launch that opens a window and the attention kernel are not in it.
        steps: tables of whole steps, such as `gpu_cow` and `gpu_steps`.
    """
    medians = kernels.medians(times)
    medians = medians[medians["cache"] == "bf16"].set_index(["op", "kv_heads", "rows", "kept"])["us"]
    query = medians.index.get_level_values("kept").max()
    rows = []
    for (_, kv_heads, number, kept), us in medians.loc[["commit"]].items():
        common = {"what": "kernels", "k": query - 1, "batch": number / query, "kv_heads": kv_heads, "kept": kept}
        write = medians.get(("vllm", kv_heads, number, query), np.nan)
        back = medians.get(("restore", kv_heads, number, kept), np.nan)
        log = medians.get(("log", kv_heads, number, query), np.nan)
        rows += [{**common, "mode": "stage", "us": us - write}, {**common, "mode": "cow", "us": log + back}]
    for table in steps:
        for point in predicted.against_measured(table).to_dict("records"):
            shape = breakeven.known_shape(str(point["model"]))
            rows.append(
                {
                    "what": "steps",
                    "mode": point["mode"],
                    "k": point["k"],
                    "batch": point["requests"],
                    "kv_heads": point.get("kv_heads", shape.num_kv_heads if shape else np.nan),
                    "us": 1e3 * point["off_ms"] * (point["measured"] - 1),
                }
            )
    return pd.DataFrame(rows).dropna(subset="us")


def draw(setting: Setting, measured: pd.DataFrame) -> Any:
    """Draw what a step costs over vanilla's, over the batch and over acceptance, with the measured points; the figure.

    Points of the setting's own k and KV heads are filled, all others are open.
    """
    fig, (left, right) = plot.figure(plot.TWO_COLUMNS, 3.2, ncols=2, sharey=True)
    shares = np.linspace(0, 1, 21)
    sides: tuple[tuple[Any, str, Any], ...] = ((left, "batch", BATCHES), (right, "acceptance", shares))
    for ax, name, values in sides:
        lines = pd.concat(costs(replace(setting, **{name: value})).assign(x=value) for value in values)
        for (mode, fused), line in lines.groupby(["mode", "fused"], sort=False):
            look = plot.LOOK[mode]
            label = look.label + (", rope fused" if fused else "")
            kind = {"color": "black" if fused else look.color, "linestyle": ":" if fused else look.linestyle}
            ax.plot(line["x"], line["us"], label=label, **kind)
        ax.axvline(getattr(setting, name), color="black", linewidth=0.5)
        ax.axhline(0, color="black", linewidth=0.8)
    for (what, mode), points in measured.groupby(["what", "mode"]):
        same = (points["k"] == setting.k) & (points["kv_heads"] * setting.tp == setting.kv_heads)
        marker, color = {"kernels": ".", "steps": "D"}[str(what)], plot.LOOK[str(mode)].color
        for chosen, face in ((points[same], color), (points[~same], "none")):
            left.plot(chosen["batch"], chosen["us"], marker, color=color, markerfacecolor=face, markersize=4)
    for marker, label in ((".", "measured, kernels alone"), ("D", "measured, whole steps")):
        left.plot([], [], marker, color="black", markersize=4, label=label)
    left.set(xscale="log", xlabel="batch", ylabel="us a step more than vanilla's", xlim=(0.8, 1.2 * BATCHES[-1]))
    left.set_yscale("symlog", linthresh=10)
    left.set_xticks(BATCHES[::2], [str(batch) for batch in BATCHES[::2]])
    left.minorticks_off()
    right.set(xlabel="acceptance of a draft")
    plot.legend(left, ncols=3)
    return fig


def summary(setting: Setting) -> str:
    """Say in a few lines what the picture shows at the setting."""
    shape, window, chip = setting.shape, setting.window, setting.on
    first = (
        f"{setting.batch} windows of 1 + {setting.k} rows, {window.kept_rows / setting.batch:.2f} of them kept; "
        f"{chip.name}: {chip.launch_us:g} us a launch, {chip.copy_bytes_per_s / 1e12:.2f} TB/s ({chip.source})"
    )
    lines = [first]
    for mode, fused in LINES:
        moved = breakeven.step_difference(mode, shape, window, fused=fused)
        us = chip.us(moved)
        survival = breakeven.survival_of(setting.acceptance, setting.k)
        span = breakeven.paying_batches(mode, shape, survival, chip, fused=fused)
        where = "pays at no batch" if span is None else f"pays at batches {span[0]:.0f} to {span[1]:.0f}"
        memory = staging_bytes(mode, shape, setting.batch, setting.k)
        lines.append(
            f"{mode}{' (rope fused)' if fused else ''}: {us:+.1f} us a step, {moved.launches:+g} launches, "
            f"{(moved.read + moved.written) / 1e6:+.1f} MB; {where.replace('inf', 'any')}; {memory / 1e6:.1f} MB held"
        )
    vanilla = served_traffic("off", shape, window)
    write, every = vanilla["write"], vanilla.total()
    share = (write.read + write.written) / (every.read + every.written)
    lines.append(f"vanilla's write is {share:.1%} of the bytes that attention and write move at this context")
    return "\n".join(lines)


def explorer(measured: pd.DataFrame, setting: Setting | None = None) -> Any:
    """Return the sliders, the summary and the picture as one widget; show it as the last line of a cell.

    Args:
        measured: `measured_points`.
        setting: where the sliders start.
    """
    import ipywidgets as widgets

    start = setting or Setting()
    choices: dict[str, Any] = {
        "batch": BATCHES,
        "context": (0, 128, 512, 2048, 8192, 32768),
        "kv_heads": (1, 2, 4, 8, 16, 32, 64),
        "head_size": (64, 80, 96, 128, 256),
        "cache_bytes": (1, 2, 4),
        "tp": (1, 2, 4, 8),
    }
    late = {"continuous_update": False, "style": {"description_width": "7em"}}
    sliders: dict[str, Any] = {
        "k": widgets.IntSlider(start.k, 1, 16, description="drafts k", **late),
        "acceptance": widgets.FloatSlider(start.acceptance, min=0, max=1, step=0.01, description="acceptance", **late),
        "layers": widgets.IntSlider(start.layers, 1, 128, description="layers", **late),
        "chip": widgets.Dropdown(options=list(CHIPS), value=start.chip, description="chip", style=late["style"]),
    }
    for name, values in choices.items():
        options = sorted({*values, getattr(start, name)})
        words = {"kv_heads": "KV heads", "tp": "TP", "cache_bytes": "cache bytes"}.get(name, name.replace("_", " "))
        sliders[name] = widgets.SelectionSlider(options=options, value=getattr(start, name), description=words, **late)
    model = widgets.Dropdown(options=["", *MODELS], description="model", style=late["style"])
    said, picture = widgets.HTML(), widgets.Image(format="png", layout={"max_width": "100%"})
    busy = {"now": False}

    def show(_: Any = None) -> None:
        if busy["now"]:
            return
        chosen = Setting(**{field.name: sliders[field.name].value for field in fields(Setting)})
        said.value = f"<pre>{summary(chosen)}</pre>"
        picture.value = _png(draw(chosen, measured))

    def take(change: Any) -> None:
        if shape := MODELS.get(change["new"]):
            busy["now"] = True  # three sliders move, one picture is drawn
            sliders["layers"].value, sliders["kv_heads"].value = shape.num_layers, shape.num_kv_heads
            sliders["head_size"].value = shape.head_size
            busy["now"] = False
            show()

    for slider in sliders.values():
        slider.observe(show, "value")
    model.observe(take, "value")
    show()
    columns = [["k", "acceptance", "batch", "context"], ["layers", "kv_heads", "head_size", "cache_bytes"]]
    boxes = [widgets.VBox([sliders[name] for name in names]) for names in columns]
    return widgets.VBox([widgets.HBox([*boxes, widgets.VBox([model, sliders["tp"], sliders["chip"]])]), said, picture])


def _png(fig: Any) -> bytes:
    file = io.BytesIO()
    fig.savefig(file, format="png", dpi=110, metadata={"Software": None})
    plot.close(fig)
    return file.getvalue()


def recorded_points() -> pd.DataFrame:
    """`measured_points` of the tables at hand: the newest results', else the recorded ones."""
    found = paper.tables()
    return measured_points(*(found[name] for name in ("kernel_times", "gpu_cow", "gpu_steps") if name in found))
