# SPDX-License-Identifier: Apache-2.0
"""The explorer draws the model at the setting of its sliders, beside what was measured, and moves when they move."""

import subprocess
import sys

import pandas as pd
import pytest

from nwor_lab import paths, results
from nwor_lab.model import breakeven, predicted
from nwor_lab.plots import explore, kernels, style
from nwor_lab.plots.explore import Setting


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    tables = [results.read_table(name, paths.RECORDED) for name in ("kernel_times", "gpu_cow")]
    return explore.measured_points(*tables)


def slider(shown, name: str):
    boxes = [box for column in shown.children[0].children for box in column.children]
    (found,) = [box for box in boxes if box.description == name]
    return found


def test_costs_are_the_models() -> None:
    setting = Setting(k=4, acceptance=0.5, batch=3, layers=36, kv_heads=8, tp=2, cache_bytes=1, chip="B200")
    costs = explore.costs(setting).set_index(["mode", "fused"])["us"]
    shape = breakeven.Shape(36, 8, 128, 1, 2, 2)
    window = breakeven.Window.expected(3, breakeven.survival_of(0.5, 4))
    for mode, fused in explore.LINES:
        us = breakeven.step_difference_us(mode, shape, window, breakeven.CHIPS["B200"], fused=fused)
        assert costs[mode, fused] == pytest.approx(us)


def test_measured_points_are_those_recorded(measured: pd.DataFrame) -> None:
    medians = kernels.medians(results.read_table("kernel_times", paths.RECORDED))
    us = medians.query("kv_heads == 8 and cache == 'bf16' and rows == 72").set_index(["op", "kept"])["us"]
    at = measured.query("what == 'kernels' and kv_heads == 8 and batch == 8 and kept == 3").set_index("mode")["us"]
    assert at["stage"] == pytest.approx(us["commit", 3] - us["vllm", 9])
    assert at["cow"] == pytest.approx(us["log", 9] + us["restore", 3])
    steps = measured[measured["what"] == "steps"]
    points = predicted.against_measured(results.read_table("gpu_cow", paths.RECORDED))
    assert steps["us"].tolist() == pytest.approx((1e3 * points["off_ms"] * (points["measured"] - 1)).tolist())


def test_a_slider_moves_the_picture_and_the_words(measured: pd.DataFrame) -> None:
    style.close()
    shown = explore.explorer(measured)
    _, said, picture = shown.children
    before, words = bytes(picture.value), said.value
    assert before.startswith(b"\x89PNG")
    assert explore.summary(Setting()) in words
    slider(shown, "batch").value = 256
    assert bytes(picture.value) != before
    assert explore.summary(Setting(batch=256)) in said.value
    slider(shown, "batch").value = 16
    assert (bytes(picture.value), said.value) == (before, words), "the same setting, the same picture"
    slider(shown, "model").value = "qwen3-8b"
    assert explore.summary(Setting(layers=36, kv_heads=8)) in said.value
    for name, value in (("chip", "A100 80GB"), ("TP", 8), ("KV heads", 1), ("acceptance", 0.0), ("drafts k", 1)):
        slider(shown, name).value = value
    assert "A100 80GB" in said.value
    assert not style.plt.get_fignums(), "no figure is left open"


def test_the_summary_says_where_a_mode_pays() -> None:
    said = explore.summary(Setting(k=8, acceptance=1.0, batch=256)).splitlines()
    low, high = breakeven.paying_batches("stage", breakeven.MODELS["llama-2-7b"], [1.0] * 8)
    assert f"pays at batches {low:.0f} to {high:.0f}" in next(line for line in said if line.startswith("stage:"))
    assert "pays at no batch" in next(line for line in said if line.startswith("cow:"))


def test_the_model_needs_no_widgets() -> None:
    code = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "from nwor_lab.plots import explore; print(len(explore.costs(explore.Setting())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.ROOT, check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.split() == ["3"]
