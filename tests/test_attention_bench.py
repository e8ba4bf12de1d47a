# SPDX-License-Identifier: Apache-2.0
"""What is made of the samples of the attention bench: floors, ratios, goals, figures; the data that is shipped."""

import json

import pandas as pd
import pytest

from nwor import attention_bench, attention_figures, paths, results
from nwor.attention_bench import Shape

SHAPE = Shape(32, 8, 16, 512)


def samples(ratio: float = 0.8, **other) -> pd.DataFrame:
    """Three samples of each call: the empty kernel 2 us, vLLM's faster 100 us more, nwor `ratio` of that."""
    times = {"empty": 2, "nwor": 2 + 100 * ratio, "flash": 112, "flash 1": 102, "triton": 152, "write": 5}
    shape = vars(SHAPE) | {"bytes": SHAPE.bytes} | other
    rows = [
        shape | {"op": op, "metric": "time", "unit": "us", "value": time + jitter, "repeat": n}
        for op, time in times.items()
        for n, jitter in enumerate((0, -1, 1))
    ]
    rows += [
        shape | {"op": op, "metric": "error", "unit": "relative", "value": 2e-3} for op in ("nwor", "flash", "triton")
    ]
    return results.tidy(rows, mode="", model="")


def test_bytes_that_have_to_move():
    """By hand: 2 heads of keys and values; prefix read, 9 new rows read and stored, query read and output written."""
    row = 2 * 2 * 128
    bf16 = 3 * (100 * row * 2 + 9 * row * (2 + 2) + 9 * 4 * 128 * (2 + 2))
    fp8 = 3 * (100 * row * 1 + 9 * row * (2 + 1) + 9 * 4 * 128 * (1 + 2))
    assert Shape(4, 2, 3, 100).bytes == bf16
    assert Shape(4, 2, 3, 100, "fp8").bytes == fp8


def test_net_times_are_without_the_empty_kernel_and_beside_the_faster_backend():
    table = attention_bench.net(samples(0.8)).iloc[0]
    assert table["nwor"] == pytest.approx(80)
    assert table["vanilla"] == table["flash 1"] == pytest.approx(100)
    assert table["ratio"] == pytest.approx(0.8)


@pytest.mark.parametrize(("ratio", "met"), [(0.81, True), (0.83, False)])
def test_goals(ratio, met):
    """0.82 is wanted of 8 KV heads at context 512 and batch 16, at TP=2 with 4 of them as well."""
    for heads, kv_heads in ((32, 8), (16, 4)):
        table = attention_figures.frame(samples(ratio, heads=heads, kv_heads=kv_heads), bandwidth=4.0)
        assert table["wanted"].tolist() == [0.82]
        assert table["met"].tolist() == [met]
        shown = attention_figures.goal_table(table).iloc[0, 0]
        assert ("!" in shown) is not met


def test_floor():
    table = attention_figures.frame(samples(), bandwidth=4.0)
    assert table["floor"].iloc[0] == pytest.approx(SHAPE.bytes / 4e6)


def test_figures_are_written(tmp_path):
    table = attention_figures.frame(pd.concat([samples(0.7), samples(0.9, batch=64)]), bandwidth=4.0)
    for draw in (attention_figures.ratios, attention_figures.over_floor):
        path = draw(tmp_path, table)
        assert path.stat().st_size > 1000
        assert path.with_suffix(".txt").read_text().strip()


def test_tuned_configurations_are_what_the_sweep_found():
    """The shipped file follows from the shipped sweep, by the rule of `best`; needs Triton, as the rule's module does."""
    pytest.importorskip("triton", reason="no Triton here")
    folder = paths.DATA / "attention"
    swept = pd.read_parquet(folder / "h200_sweep.parquet").astype({"cache": str})
    assert attention_bench.best(swept) == json.loads((folder / "h200.json").read_text())["configurations"]


def test_a_source_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no NVIDIA GPU"):
        attention_bench.obtain(tmp_path, "measure")
    with pytest.raises(ValueError, match="source is measure, recorded or empty"):
        attention_bench.obtain(tmp_path, "guessed")
