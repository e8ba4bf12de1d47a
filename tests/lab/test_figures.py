# SPDX-License-Identifier: Apache-2.0
"""The figures: each is drawn from what its tables say, and one without a table is said not to be drawn."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nwor_lab import paths
from nwor_lab.bench import gpu_steps
from nwor_lab.cost import breakeven
from nwor_lab.figures import breakeven as breakeven_plots
from nwor_lab.figures import command as figures
from nwor_lab.figures import policies, ratios, style
from nwor_lab.gpu import layer_times
from nwor_lab.run import results
from nwor_lab.serving.table import SETTING, told_apart


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    style.close()


def recorded(name: str) -> pd.DataFrame:
    return results.read_table(name, paths.RECORDED)


def drawn_data(path: Path) -> pd.DataFrame:
    return pd.read_csv(path.with_suffix(".csv"))


def test_the_recorded_tables_draw_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says what made it."""
    there = [name for name in figures.FIGURES if name not in ("steps", "expected")]  # slow ones below
    assert figures.main(["--out", str(tmp_path), "--only", *there]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(there)
    for name in there:
        path = tmp_path / "figures" / f"{name}.pdf"
        assert path.is_file() and path.with_suffix(".png").is_file() and len(drawn_data(path))
        assert path.with_suffix(".txt").read_text().endswith(f"Made by: nwor figures --only {name}\n")


def test_a_folder_of_tables_is_the_only_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a run"
    source.mkdir()
    shutil.copy(paths.RECORDED / "traffic.parquet", source)
    assert figures.main(["--source", str(source), "--out", str(tmp_path), "--only", "bytes", "policies"]) == 0
    out = capsys.readouterr().out
    assert "bytes.pdf" in out and "policies is not drawn" in out and "reference.parquet" in out
    assert f"--source '{source}' --only bytes" in (tmp_path / "figures" / "bytes.txt").read_text()
    assert figures.main(["--source", str(tmp_path / "nowhere")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert figures.main(["--out", "/proc/nwor"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_table_that_cannot_be_read_is_a_line_and_the_other_figures_are_drawn(tmp_path, capsys):
    (tmp_path / "traffic.parquet").write_bytes(b"half a file")
    pd.DataFrame({"other": [1]}).to_parquet(tmp_path / "reference.parquet")
    shutil.copy(paths.RECORDED / "gpu_cliff.parquet", tmp_path)
    asked = ["bytes", "policies", "cliff"]
    assert figures.main(["--source", str(tmp_path), "--out", str(tmp_path), "--only", *asked]) == 1
    said = capsys.readouterr()
    assert "cliff.pdf" in said.out
    assert [line.split(": ")[1] for line in said.err.splitlines()] == ["bytes", "policies"]


def test_the_same_data_gives_the_same_bytes_and_other_data_others(tmp_path: Path) -> None:
    traffic = recorded("traffic")
    paths = [policies.bytes_moved(tmp_path / n, table) for n, table in (("a", traffic), ("b", traffic),
             ("c", traffic.assign(value=2 * traffic["value"])))]  # fmt: skip
    for suffix in (".pdf", ".png"):
        first, same, other = (path.with_suffix(suffix).read_bytes() for path in paths)
        assert first == same != other


def test_nothing_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs data"):
        style.save(style.figure()[0], tmp_path, "empty", pd.DataFrame(), "a caption")
    assert not (tmp_path / "figures").exists()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a figure its data and its caption alone: a picture takes a second."""
    monkeypatch.setattr(style, "write", lambda figure, path: path)


# -- what they say ---------------------------------------------------------------------------------------------------


def test_steps_are_over_vllm_never_patched_and_none_without_parity(tmp_path: Path, undrawn: None) -> None:
    table = recorded("gpu_direct").query(gpu_steps.MAIN + " and kv_heads == 8")
    beside = gpu_steps.step_ratios(table)
    data = drawn_data(ratios.steps(tmp_path, beside)).set_index(["mode", "batch"])["ratio"]
    for (mode, batch), ratio in data.items():
        own = table[(table["metric"] == "step_ms") & (table["batch"] == batch)]
        medians = own.groupby("mode")["value"].median()
        assert ratio == pytest.approx(medians[mode] / medians["vllm"], rel=0.03)
    assert {mode for mode, _ in data.index} == {"direct", "stage"} and len(data) == 8
    lost = beside.assign(step=beside["step"].mask(beside["batch"] == 4))
    path = ratios.steps(tmp_path, lost)
    assert "2 of 8 are left out" in path.with_suffix(".txt").read_text()


def test_parts_of_a_step_add_up_to_it(tmp_path: Path, undrawn: None) -> None:
    table = recorded("gpu_direct").query(gpu_steps.MAIN + " and kv_heads == 32")
    data = drawn_data(ratios.step_parts(tmp_path, table))
    whole = data.groupby(["batch", "mode"])["percent"].sum().unstack()
    assert (whole["vllm"].between(99.9, 102)).all() and (whole[["direct", "stage"]] < 100).all(axis=None)
    assert data.query("kind == 'KV write' and mode == 'vllm'")["percent"].between(1, 2).all()


def test_no_measured_step_is_hidden(tmp_path: Path, undrawn: None) -> None:
    points = pd.DataFrame(
        {"mode": ["stage", "stage", "cow"], "predicted": [0.9, 0.95, 1.0], "measured": [0.92, 0.95, 1.0]}
    )
    points = points.assign(low=[0.91, 0.95, 1.0], high=[0.92, 1.3, 1.0], with_attention=np.nan)
    kernels = pd.DataFrame({"op": ["vllm"], "us": [1.0], "predicted": [2.0]})
    guessed = pd.DataFrame(
        {
            "panel": ["engines", "engines", "layers", "servers"], "series": ["stage", "stage", "Triton", "stage"],
            "gpu": "H200", "expected": [0.97, 0.97, 0.2, 1.0], "measured": [1.2, np.nan, 0.3, 1.1],
        }
    )  # fmt: skip
    path = breakeven_plots.expected(tmp_path, kernels, points, guessed)
    assert len(drawn_data(path).query("panel == 'steps'")) == 2
    written = drawn_data(path).set_index("panel").loc[["engines", "layers", "servers"]]
    assert written["mode"].to_list() == ["stage", "Triton", "stage"]
    assert written[["expected", "measured"]].to_numpy().tolist() == [[0.97, 1.2], [0.2, 0.3], [1.0, 1.1]]
    said = path.with_suffix(".txt").read_text()
    assert "largest error is 0.020" in said and "left out: 1" in said and "Left out: 1" in said


def test_an_expectation_meets_one_result() -> None:
    """Two tables of layers have shapes in common."""
    found = figures.guessed(recorded)
    assert not found.duplicated(["table", "what", "gpu", "mode", "batch"]).any()
    (one,) = found.query("table == 'gpu_long' and batch == 4 and what.str.contains('131072')")["measured"]
    shape = "kv_heads == 8 and k == 8 and cache == 'bf16' and batch == 4 and context == 131072"
    assert one == layer_times.over_each(recorded("gpu_long")).query(shape)["FlashAttention 3"].item()


def test_the_sliders_move_the_picture_and_the_words(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(style.plt, "show", lambda: shown.append(style.plt.gca().lines[-3].get_ydata().tolist()))
    beyond = {"model": "qwen3-8b", "k": 40, "acceptance": 0.5, "batch": 5000, "context": 100_000, "tp": 16}
    sliders = breakeven_plots.explore(**beyond).children[:-1]
    assert {child.description: child.value for child in sliders} == beyond
    for batch in (4, 64):
        breakeven_plots.draw_setting("llama-2-7b", 8, 0.5, batch, 512, 1)
        window = breakeven.Window.expected(batch, breakeven.survival_of(0.5, 8))
        us = breakeven.H200.us(breakeven.step_difference("stage", breakeven.MODELS["llama-2-7b"], window))
        assert f"stage: {us:+.1f} us a step" in capsys.readouterr().out
    breakeven_plots.draw_setting("llama-2-7b", 2, 0.5, 4, 512, 1)
    assert shown[0] != shown[-1]


def test_no_two_series_look_alike() -> None:
    looks = [look[1:] for look in style.styles([f"cache {n}" for n in range(8)]).values()]
    assert len(set(looks)) == 8
    with pytest.raises(ValueError, match="several panels"):
        style.styles(range(9))
    assert len({look.marker for look in style.MODE_STYLE.values()}) == len(style.MODE_STYLE), "without colour too"


def test_servers_come_by_the_requests_they_have_at_once():
    """Rows of a load may have been recorded after those of a greater one."""
    lines = figures.served(lambda name: results.read_table(name, paths.RECORDED))
    of_a_setting = told_apart(lines.query("mode == 'stage'")).groupby(SETTING)["load"].agg(list)
    at_once = ["1 at once", "16 at once", "64 at once"]
    assert len(of_a_setting) > 1 and all(loads[:3] == at_once for loads in of_a_setting)
    assert any(loads[3:] == ["20 a second"] for loads in of_a_setting), "those at a rate come last"


def test_an_open_load_is_held_against_what_was_expected_of_it():
    """Its `batch` is empty there; the rows are those of another server, named anew."""

    def table(name):
        rows = results.read_table(name, paths.RECORDED)
        if name != "gpu_serving_more":
            return rows
        other = rows.query("gpu == 'H200' and k == 8 and kv_cache_dtype == 'auto' and load == '16 at once'")
        return pd.concat([rows, other.assign(k=4, load_format="nwor_random", load="20 a second")], ignore_index=True)

    lines = figures.guessed(table)
    found = lines[lines["what"] == "tokens a second, k=4, bf16, random weights, 20 a second"]
    assert set(found["mode"]) == {"stage", "cow"} and found["measured"].between(0.8, 1.2).all()


def test_a_step_whose_repeats_part_is_not_held_against_what_was_expected():
    """On two ranks those of one request do, those of 16 do not."""
    lines = figures.guessed(lambda name: results.read_table(name, paths.RECORDED))
    found = lines[lines["what"].str.endswith("two ranks") & (lines["mode"] == "stage")].set_index("batch")["measured"]
    assert found.isna()[1] and 0.9 < found[16] < 1
